//! Real layers, written as a user writes them: what a rank receives and holds, against plans by
//! hand, to the byte; and their values on meshes against those of one device.

mod layers;
mod measure;
mod table;

#[path = "../support/mod.rs"]
mod support;
