//! Deferred execution against eager one, on the device itself.

use crate::Suite;
use anymesh::Device;

#[path = "../../engine/tests/random/hold.rs"]
mod hold;

pub(crate) const SUITE: Suite = &[(
    "random_programs_give_the_same_bits_deferred_and_not",
    random_programs_give_the_same_bits_deferred_and_not,
)];

/// `ANYMESH_PROGRAMS` says how many. Kernels are compiled for each, so that they are few by default.
fn random_programs_give_the_same_bits_deferred_and_not(device: &Device) {
    let count = std::env::var("ANYMESH_PROGRAMS").ok();
    let count = count.and_then(|text| text.parse().ok()).unwrap_or(10);
    let eager = device.innermost();
    // A GPU tells its faults when it is read: `faults.rs` has those.
    let gpu = !matches!(eager.backend().host_memory(0), Ok(Some(_)));
    hold::hold(eager, 0..count, gpu);
}
