//! Moving data between ranks: plans and what they do to tensors, and what carries them.

#[path = "../support/mod.rs"]
mod support;

#[path = "../support/gate.rs"]
mod gate;

mod ahead;
mod cost;
mod processes;
mod reshard;
mod rows;
mod transport;
