//! The conformance suite on the devices of this machine.
//!
//! `ANYMESH_TEST_DEVICE` names the device to test (`cpu`, `wgpu:llvmpipe`, `cuda:0`,
//! `cuda:0:portable`, ...); without it the software adapter is taken where there is one. Without
//! any adapter the test says so and passes: there is nothing to hold.

#![cfg(feature = "conformance")]

mod common;

use anymesh::conformance::cases;

#[test]
fn every_op_on_the_device_equals_the_oracle() {
    let Some(device) = common::under_test() else {
        return;
    };
    let oracle = anymesh::device("cpu").expect("the CPU backend is always there");
    let report = pollster::block_on(cases::run(&device, &oracle, |_| true, |_, _| ()));
    println!("{device}\n{report}");
    assert!(
        report.failures.is_empty(),
        "{} cases failed",
        report.failures.len()
    );
    assert!(report.passed() > 4000, "only {} cases ran", report.passed());
}
