//! Real layers, written as a user writes them: what a rank receives and holds, against plans by
//! hand, to the byte; and their values on meshes against those of one device.

mod facts;
mod layers;
mod measure;
mod memory;
mod others;
mod planned;
mod table;
mod values;

#[path = "../support/mod.rs"]
mod support;
