//! Float functions on four lanes, by instruction.

mod convert;
pub(crate) mod elementary;
mod functions;
mod power;
mod wide;

pub(crate) use convert::*;

use crate::{
    nvidia,
    words::{B4, D4, F4},
};
use anymesh_kernel::map::{Binary, Unary};
use cubecl::prelude::*;

/// `IsNan` and `IsInf`.
#[cube]
pub(crate) fn classify(x: F4, #[comptime] op: Unary) -> B4 {
    match op {
        Unary::IsNan => elementary::is_nan(x),
        _ => elementary::is_inf(x),
    }
}

/// Any function of one value that gives a float.
#[cube]
#[allow(unused_variables)]
pub(crate) fn unary(x: F4, #[comptime] op: Unary) -> F4 {
    intrinsic!(|scope| functions::of(op).0(scope, x))
}

/// [`unary`], with the device's own function where CUDA's is right to two ulp and much shorter.
#[cube]
pub(crate) fn unary_native(x: F4, #[comptime] op: Unary) -> F4 {
    match op {
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Tanh => x.tanh(),
        Unary::Erf => x.erf(),
        _ => unary(x, op),
    }
}

/// A function of one value whose last digits nobody sees, if NVIDIA's GPUs have a short one.
pub(crate) fn coarse_unary(
    scope: &Scope,
    x: NativeExpand<F4>,
    op: Unary,
) -> Option<NativeExpand<F4>> {
    match op {
        Unary::Exp => Some(nvidia::coarse_exp::expand(scope, x)),
        Unary::Tanh => Some(nvidia::coarse_tanh::expand(scope, x)),
        Unary::Sqrt => Some(nvidia::coarse_sqrt::expand(scope, x)),
        Unary::Erf => Some(nvidia::coarse_erf::expand(scope, x)),
        _ => None,
    }
}

/// A function of two values, if NVIDIA's GPUs have a shorter one; `coarse` where nobody sees its
/// last digits.
pub(crate) fn native_binary(
    scope: &Scope,
    a: NativeExpand<F4>,
    b: NativeExpand<F4>,
    op: Binary,
    coarse: bool,
) -> Option<NativeExpand<F4>> {
    match op {
        Binary::Max => Some(nvidia::extreme::expand(scope, a, b, true)),
        Binary::Min => Some(nvidia::extreme::expand(scope, a, b, false)),
        Binary::Div if coarse => Some(nvidia::coarse_div::expand(scope, a, b)),
        Binary::Div => Some(nvidia::div::expand(scope, a, b)),
        _ => None,
    }
}

/// Any function of two values that gives a float.
#[cube]
pub(crate) fn binary(a: F4, b: F4, #[comptime] op: Binary) -> F4 {
    match op {
        Binary::Add => a + b,
        // Not `a - b`: of a value minus itself CubeCL makes a zero, also of infinities.
        Binary::Sub => a + (-b),
        Binary::Mul => a * b,
        Binary::Div => elementary::div(a, b),
        Binary::FloorDiv => power::floor_div(a, b),
        Binary::TruncDiv => power::trunc_div(a, b),
        Binary::Rem => power::rem(a, b),
        Binary::Pow => power::pow(a, b),
        Binary::Max => elementary::max(a, b),
        Binary::Min => elementary::min(a, b),
        Binary::Fmax => elementary::fmax(a, b),
        Binary::Fmin => elementary::fmin(a, b),
        Binary::Atan2 => elementary::atan2(a, b),
        Binary::Hypot => power::hypot(a, b),
        _ => elementary::copysign(a, b),
    }
}

/// `IsNan` and `IsInf` of `f64`.
#[cube]
pub(crate) fn classify_wide(x: D4, #[comptime] op: Unary) -> B4 {
    match op {
        Unary::IsNan => wide::is_nan(x),
        _ => wide::is_inf(x),
    }
}

/// Any function of one `f64` that gives a float. Only where the device has `f64` functions, but for
/// arithmetic and rounding.
#[cube]
#[allow(unused_variables)]
pub(crate) fn unary_wide(x: D4, #[comptime] op: Unary) -> D4 {
    intrinsic!(|scope| functions::of(op).1(scope, x))
}

/// Any function of two `f64`.
#[cube]
pub(crate) fn binary_wide(a: D4, b: D4, #[comptime] op: Binary) -> D4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a + (-b),
        Binary::Mul => a * b,
        Binary::Div => wide::div(a, b),
        Binary::FloorDiv => wide::floor_div(a, b),
        Binary::TruncDiv => wide::trunc_div(a, b),
        Binary::Rem => wide::rem(a, b),
        Binary::Pow => wide::pow(a, b),
        Binary::Max => wide::max(a, b),
        Binary::Min => wide::min(a, b),
        Binary::Fmax => wide::fmax(a, b),
        Binary::Fmin => wide::fmin(a, b),
        Binary::Atan2 => wide::atan2(a, b),
        Binary::Hypot => wide::hypot(a, b),
        _ => wide::copysign(a, b),
    }
}
