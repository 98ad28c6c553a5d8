//! What a process says to the hub, and what the hub makes of it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| anymesh_cluster::fuzzing::to_hub(data));
