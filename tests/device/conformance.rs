//! Every op, dtype and memory layout, held against the CPU.

use crate::Suite;
use anymesh::{
    Device,
    conformance::{bits, cases},
};
use std::{
    cell::RefCell,
    collections::HashMap,
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

pub(crate) const SUITE: Suite = &[
    (EVERY_OP, every_op_on_the_device_equals_the_oracle),
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

const EVERY_OP: &str = "every_op_on_the_device_equals_the_oracle";

/// A software adapter compiles kernels for minutes, on one core for each process. Few processes with many
/// kernels took three times as long as many with few. So the cases are held in parts, each by a process of its own: this program again,
/// with that test alone.
const PARTS: usize = 12;

/// Runs all parts, some of them beside each other; how many cases passed.
fn in_parts() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, passed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let worker = || {
        while let own @ 0..PARTS = next.fetch_add(1, Ordering::Relaxed) {
            let program = std::env::current_exe().expect("this program has a path");
            let made = Command::new(program)
                .arg(EVERY_OP)
                .env("ANYMESH_PART", format!("{own}/{PARTS}"))
                .output()
                .expect("this program starts again");
            let [out, err] = [&made.stdout, &made.stderr].map(|text| String::from_utf8_lossy(text));
            println!("{out}");
            let held = made.status.success() && out.contains("1 passed; 0 failed");
            assert!(
                held,
                "part {own} of the cases failed, or did not run: {err}"
            );
            let count = out.lines().find_map(|line| line.split_once(" passed, "));
            let count: usize = count.map_or(0, |(n, _)| n.trim().parse().unwrap_or(0));
            passed.fetch_add(count, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        (0..cores.min(4)).for_each(|_| drop(scope.spawn(worker)));
    });
    passed.into_inner()
}

fn every_op_on_the_device_equals_the_oracle(device: &Device) {
    // Some cases, or a device that compiles quickly.
    let alone = ["ANYMESH_TEST_DEVICE", "ANYMESH_CASES"].map(std::env::var_os);
    match part() {
        Some((own, of)) => assert!(hold(device, own, of) > 0, "no case ran"),
        None if alone.iter().any(Option::is_some) => {
            let all = std::env::var_os("ANYMESH_CASES").is_none();
            let passed = hold(device, 0, 1);
            assert!(
                passed > if all { ENOUGH } else { 0 },
                "only {passed} cases ran"
            );
        }
        None => {
            let passed = in_parts();
            assert!(passed > ENOUGH, "only {passed} cases ran");
        }
    }
}

/// There are more cases than this on every device.
const ENOUGH: usize = 4000;

/// Holds every part-th op; how many cases passed, which is all.
fn hold(device: &Device, own: usize, of: usize) -> usize {
    let oracle = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    // A part of `op detail`, where only some are to be held.
    let some = std::env::var("ANYMESH_CASES").unwrap_or_default();
    // Cases of one op stay together: they share kernels.
    let ops = RefCell::new(HashMap::new());
    let chosen = |case: &cases::Case| {
        let mut ops = ops.borrow_mut();
        let next = ops.len();
        let number = *ops.entry(case.op).or_insert(next);
        let name = format!("{} {}", case.op, case.detail);
        name.contains(&some) && number % of == own
    };
    let report = pollster::block_on(cases::run(device, &oracle, chosen, |_, _| ()));
    println!("{device}\n{report}");
    assert!(report.failures.is_empty(), "cases failed");
    report.passed()
}
