//! What the hub says to a process.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| anymesh_cluster::fuzzing::to_member(data));
