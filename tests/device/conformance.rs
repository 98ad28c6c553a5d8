//! Every op, dtype and memory layout, held against the CPU.

use crate::Suite;
use anymesh::{Device, conformance::cases};

pub(crate) const SUITE: Suite = &[(
    "every_op_on_the_device_equals_the_oracle",
    every_op_on_the_device_equals_the_oracle,
)];

fn every_op_on_the_device_equals_the_oracle(device: &Device) {
    let oracle = anymesh::device("cpu").expect("the CPU backend is always there");
    let report = pollster::block_on(cases::run(device, &oracle, |_| true, |_, _| ()));
    println!("{device}\n{report}");
    assert!(
        report.failures.is_empty(),
        "{} cases failed",
        report.failures.len()
    );
    assert!(report.passed() > 4000, "only {} cases ran", report.passed());
}
