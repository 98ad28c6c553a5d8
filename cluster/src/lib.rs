//! One sharded program over several processes.

#![deny(unsafe_code)]

mod wire;
