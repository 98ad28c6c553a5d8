//! Every op, dtype and memory layout, held against the CPU.

use crate::Suite;
use anymesh::{
    Device,
    conformance::{bits, cases},
};

pub(crate) const SUITE: Suite = &[
    (
        "every_op_on_the_device_equals_the_oracle",
        every_op_on_the_device_equals_the_oracle,
    ),
    (
        "whatever_is_only_moved_keeps_its_bits",
        whatever_is_only_moved_keeps_its_bits,
    ),
];

/// `core/tests/conformance/bits.rs` holds the CPU.
fn whatever_is_only_moved_keeps_its_bits(device: &Device) {
    let wrong = pollster::block_on(bits::moved(device)).expect("every op runs");
    assert!(wrong.is_empty(), "{device}\n{}", wrong.join("\n"));
}

/// `ANYMESH_PART`: which of how many parts of the cases is to be held.
fn part() -> Option<(usize, usize)> {
    let text = std::env::var("ANYMESH_PART").ok()?;
    let (own, of) = text.split_once('/')?;
    let (own, of): (usize, usize) = (own.parse().ok()?, of.parse().ok()?);
    (own < of).then_some((own, of))
}

fn every_op_on_the_device_equals_the_oracle(device: &Device) {
    let oracle = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    // A part of `op detail`, where only some are to be held.
    let some = std::env::var("ANYMESH_CASES").unwrap_or_default();
    // And of those every nth, such as `3/8`: several processes share a suite that compiles much.
    let (own, of) = part().unwrap_or((0, 1));
    let seen = std::cell::Cell::new(0);
    let chosen = |case: &cases::Case| {
        let number = seen.replace(seen.get() + 1);
        let name = format!("{} {}", case.op, case.detail);
        name.contains(&some) && number % of == own
    };
    let report = pollster::block_on(cases::run(device, &oracle, chosen, |_, _| ()));
    println!("{device}\n{report}");
    assert!(
        report.failures.is_empty(),
        "{} cases failed",
        report.failures.len()
    );
    let enough = if some.is_empty() { 4000 / of } else { 0 };
    let passed = report.passed();
    assert!(passed > enough, "only {passed} cases ran");
}
