//! Ops on meshes, held against the same ops on one device, and their rules.

#[path = "../support/mod.rs"]
mod support;

mod basics;
mod boundary;
mod brute;
mod facts;
mod forms;
mod index;
mod nn;
mod rules;
mod scale;
mod views;
