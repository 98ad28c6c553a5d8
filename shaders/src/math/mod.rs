//! Float functions on four lanes, by instruction.

mod convert;
mod elementary;
mod power;
mod special;
mod wide;

pub(crate) use convert::*;

use crate::words::{B4, D4, F4};
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
pub(crate) fn unary(x: F4, #[comptime] op: Unary) -> F4 {
    match op {
        Unary::Neg => elementary::neg(x),
        Unary::Abs => elementary::abs(x),
        Unary::Sign => elementary::sign(x),
        Unary::Exp => elementary::exp(x),
        Unary::Exp2 => elementary::exp2(x),
        Unary::Expm1 => elementary::expm1(x),
        Unary::Log => elementary::log(x),
        Unary::Log2 => elementary::log2(x),
        Unary::Log10 => elementary::log10(x),
        Unary::Log1p => elementary::log1p(x),
        Unary::Sqrt => elementary::sqrt(x),
        Unary::Rsqrt => elementary::rsqrt(x),
        Unary::Sin => elementary::sin(x),
        Unary::Cos => elementary::cos(x),
        Unary::Tan => elementary::tan(x),
        Unary::Asin => elementary::asin(x),
        Unary::Acos => elementary::acos(x),
        Unary::Atan => elementary::atan(x),
        Unary::Sinh => elementary::sinh(x),
        Unary::Cosh => elementary::cosh(x),
        Unary::Tanh => elementary::tanh(x),
        Unary::Asinh => elementary::asinh(x),
        Unary::Acosh => elementary::acosh(x),
        Unary::Atanh => elementary::atanh(x),
        Unary::Erf => special::erf(x),
        Unary::Erfinv => special::erfinv(x),
        Unary::Lgamma => special::lgamma(x),
        Unary::Digamma => special::digamma(x),
        Unary::Floor => elementary::floor(x),
        Unary::Ceil => elementary::ceil(x),
        Unary::Round => elementary::round(x),
        _ => elementary::trunc(x),
    }
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

/// Any function of two values that gives a float.
#[cube]
pub(crate) fn binary(a: F4, b: F4, #[comptime] op: Binary) -> F4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
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

/// Any function of one `f64`. Only where the device has `f64` functions, but for arithmetic and
/// rounding.
#[cube]
pub(crate) fn unary_wide(x: D4, #[comptime] op: Unary) -> D4 {
    match op {
        Unary::Neg => wide::neg(x),
        Unary::Abs => wide::abs(x),
        Unary::Sign => wide::sign(x),
        Unary::Exp => wide::exp(x),
        Unary::Exp2 => wide::exp2(x),
        Unary::Expm1 => wide::expm1(x),
        Unary::Log => wide::log(x),
        Unary::Log2 => wide::log2(x),
        Unary::Log10 => wide::log10(x),
        Unary::Log1p => wide::log1p(x),
        Unary::Sqrt => wide::sqrt(x),
        Unary::Rsqrt => wide::rsqrt(x),
        Unary::Sin => wide::sin(x),
        Unary::Cos => wide::cos(x),
        Unary::Tan => wide::tan(x),
        Unary::Asin => wide::asin(x),
        Unary::Acos => wide::acos(x),
        Unary::Atan => wide::atan(x),
        Unary::Sinh => wide::sinh(x),
        Unary::Cosh => wide::cosh(x),
        Unary::Tanh => wide::tanh(x),
        Unary::Asinh => wide::asinh(x),
        Unary::Acosh => wide::acosh(x),
        Unary::Atanh => wide::atanh(x),
        Unary::Erf => wide::erf(x),
        Unary::Erfinv => wide::erfinv(x),
        Unary::Lgamma => wide::lgamma(x),
        Unary::Digamma => wide::digamma(x),
        Unary::Floor => wide::floor(x),
        Unary::Ceil => wide::ceil(x),
        Unary::Round => wide::round(x),
        _ => wide::trunc(x),
    }
}

/// Any function of two `f64`.
#[cube]
pub(crate) fn binary_wide(a: D4, b: D4, #[comptime] op: Binary) -> D4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
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
