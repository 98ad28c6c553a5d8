//! The first bytes of a connection between processes.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| anymesh_cluster::fuzzing::handshake(data));
