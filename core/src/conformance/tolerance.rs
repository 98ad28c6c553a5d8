//! How far a device may be from the oracle, per op and dtype, with the reason.

use crate::DType;

/// An allowed error: `ulps` units of the result's precision relative to the expected value, plus `scale` units relative
/// to the largest value in the result (what cancellation in a sum can leave behind).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Units in the last place of the expected value.
    pub ulps: f64,
    /// Units in the last place of the largest value.
    pub scale: f64,
}

impl Tolerance {
    /// Bit-for-bit (up to the sign of zero and NaN payloads).
    pub const EXACT: Tolerance = Tolerance { ulps: 0.0, scale: 0.0 };

    /// The allowed absolute error for an expected value.
    pub fn allowed(self, expected: f64, scale: f64, dtype: DType) -> f64 {
        self.ulps * epsilon(dtype) * expected.abs().max(tiny(dtype)) + self.scale * epsilon(dtype) * scale
    }
}

/// Spacing of the dtype at 1.
fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F8E4M3 => 2f64.powi(-3),
        DType::F8E5M2 => 2f64.powi(-2),
        _ => 0.0,
    }
}

/// Smallest normal number: below it precision is absolute, and GPUs may flush to zero.
fn tiny(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MIN_POSITIVE,
        DType::F32 | DType::BF16 => f64::from(f32::MIN_POSITIVE) / f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-14),
        DType::F8E4M3 => 2f64.powi(-6),
        DType::F8E5M2 => 2f64.powi(-14),
        _ => 0.0,
    }
}

/// One row of the table: ops, allowed error in f32, and why.
struct Row {
    ops: &'static [&'static str],
    f32: Tolerance,
    #[allow(dead_code)]
    reason: &'static str,
}

const TABLE: &[Row] = &[
    Row { ops: &["arange", "linspace"], f32: Tolerance { ulps: 1.0, scale: 2.0 }, reason: "a device without f64 rounds the step and the product to f32" },
    Row {
        ops: &["normal"],
        f32: Tolerance { ulps: 4.0, scale: 4.0 },
        reason: "logarithm, root and cosine each round; near its zeros the cosine has only absolute precision",
    },
];

/// The tolerance of `op` for results of `dtype`. Integers, bools and ops that only move data are exact.
pub fn tolerance(op: &str, dtype: DType) -> Tolerance {
    if !dtype.is_float() {
        return Tolerance::EXACT;
    }
    let Some(row) = TABLE.iter().find(|row| row.ops.contains(&op)) else { return Tolerance::EXACT };
    match dtype {
        DType::F32 | DType::F64 => row.f32,
        // Small floats compute in f32: a last-bit difference there may round to the neighbouring value here, no more.
        _ => Tolerance { ulps: 1.0, scale: row.f32.scale * f64::from(f32::EPSILON) / epsilon(dtype) },
    }
}
