//! Deferred execution against eager one, on the device itself.

use crate::Suite;
use anymesh::Device;

#[path = "../../engine/tests/random/hold.rs"]
mod hold;

pub(crate) const SUITE: Suite = &[(
    "random_programs_give_the_same_bits_deferred_and_not",
    random_programs_give_the_same_bits_deferred_and_not,
)];

/// A GPU knows launches from the third time on, and lists of them from the time after that.
const TIMES: usize = 6;

/// `ANYMESH_PROGRAMS` says how many, `ANYMESH_SEED` from which on. Kernels are compiled for each, so
/// that they are few by default.
fn random_programs_give_the_same_bits_deferred_and_not(device: &Device) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("ANYMESH_SEED").unwrap_or(0);
    let count = number("ANYMESH_PROGRAMS").unwrap_or(10);
    let eager = device.innermost();
    // A GPU tells its faults when it is read: `faults.rs` has those.
    let gpu = !matches!(eager.backend().host_memory(0), Ok(Some(_)));
    hold::hold(eager, first..first + count, TIMES, gpu);
}
