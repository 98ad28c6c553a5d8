//! One sharded program over several processes.

#![deny(unsafe_code)]

mod start;
pub mod stop;
mod torch_store;
mod wire;

pub use start::{Launcher, Meeting, Problem, Start, StartError};
pub use torch_store::{StoreError, TorchStore};
