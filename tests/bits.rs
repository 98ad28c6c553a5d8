//! Elements that are only moved keep their bits, on the device under test.
//!
//! `ANYMESH_TEST_DEVICE` as for the conformance suite; `core/tests/bits.rs` holds the CPU.

#![cfg(feature = "conformance")]

mod common;

use anymesh::conformance::bits;

#[test]
fn whatever_is_only_moved_keeps_its_bits() {
    let Some(device) = common::under_test() else {
        return;
    };
    let wrong = pollster::block_on(bits::moved(&device)).expect("every op runs");
    assert!(wrong.is_empty(), "{device}\n{}", wrong.join("\n"));
}
