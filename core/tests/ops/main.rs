//! Ops on one device, held against loops over plain vectors, definitions and known traps.

#[path = "../support/mod.rs"]
mod support;

mod bad_input;
mod conv;
mod create;
mod elementwise;
mod index;
mod linalg;
mod movement;
mod nn;
mod random;
mod reductions;
mod scatter;
mod sort;
mod views;
