//! What listens where torchrun's store should.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| anymesh_cluster::fuzzing::torch_store(data));
