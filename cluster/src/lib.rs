//! One sharded program over several processes.

#![deny(unsafe_code)]

mod start;
mod wire;

pub use start::{Launcher, Meeting, Problem, Start, StartError};
