//! Every op, dtype and memory layout, held against the CPU.

use crate::Suite;
use anymesh::{
    Device,
    conformance::{bits, cases},
};
use std::{
    cell::RefCell,
    collections::HashMap,
    process::{Child, Command, Stdio},
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

/// A software adapter compiles kernels for minutes, on one core for each process. So parts beside the
/// first are other processes: this program again, with that test alone.
fn other_parts(of: usize) -> Vec<Child> {
    let start = |own: usize| {
        let program = std::env::current_exe().expect("this program has a path");
        Command::new(program)
            .arg(EVERY_OP)
            .env("ANYMESH_PART", format!("{own}/{of}"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this program starts again")
    };
    (1..of).map(start).collect()
}

fn every_op_on_the_device_equals_the_oracle(device: &Device) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let alone = ["ANYMESH_TEST_DEVICE", "ANYMESH_CASES"].map(std::env::var_os);
    let alone = alone.iter().any(Option::is_some);
    let (own, of) = part().unwrap_or((0, if alone { 1 } else { cores.min(4) }));
    let others = match part() {
        None => other_parts(of),
        Some(_) => vec![],
    };
    let held = hold(device, own, of);
    for other in others {
        let made = other.wait_with_output().expect("it ends");
        let [out, err] = [&made.stdout, &made.stderr].map(|text| String::from_utf8_lossy(text));
        println!("{out}");
        let passed = made.status.success() && out.contains("1 passed; 0 failed");
        assert!(passed, "a part of the cases failed, or did not run: {err}");
    }
    assert!(held, "cases failed");
}

/// Holds every part-th op; whether all is well.
fn hold(device: &Device, own: usize, of: usize) -> bool {
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
    let enough = if some.is_empty() { 4000 / of } else { 0 };
    let passed = report.passed();
    assert!(passed > enough, "only {passed} cases ran");
    report.failures.is_empty()
}
