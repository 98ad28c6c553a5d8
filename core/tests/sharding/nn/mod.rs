//! Neural-network ops on meshes: every placement of their samples against the plain result, and how
//! little they communicate.

mod heads;
mod layers;

use crate::support::{mesh, whole_numbers as numbers};
use anymesh_conformance::sweep::{self, Precision};
use anymesh_core::{DType, Reduction, Sharding, Tensor, spmd::Ledger};

/// Every rank holds what it should of a result: exactly, or but for rounding.
#[track_caller]
fn assert_same(name: &str, sharded: &Tensor, whole: &Tensor, exact: bool) {
    let precision = if exact {
        Precision::Values
    } else {
        Precision::Rounded(1e-6)
    };
    let one = std::slice::from_ref;
    if let Err(why) = sweep::compare(precision, one(sharded), one(whole)) {
        panic!("{name}: {why}");
    }
}

/// What an op communicated: its kinds of steps and bytes. Every step is on behalf of a line of this
/// file.
fn traffic<T>(f: impl FnOnce() -> T) -> (T, Vec<(&'static str, u64)>) {
    let (result, ledger) = Ledger::record(f);
    for entry in &ledger.entries {
        assert!(entry.caller.contains("tests/sharding/nn/"), "{ledger}");
    }
    (
        result,
        ledger.entries.iter().map(|e| (e.op, e.bytes)).collect(),
    )
}
