//! `f64` functions on four lanes. Arithmetic and rounding run wherever the device has `f64`; the rest only where the device
//! says that it has `f64` functions (CUDA), because shader languages have none.

use crate::words::{B4, D4, Q4};
use anymesh_core::map::{Binary, Unary};
use cubecl::prelude::*;

const MAGNITUDE: u64 = 0x7fff_ffff_ffff_ffff;
const INFINITY: u64 = 0x7ff0_0000_0000_0000;

#[cube]
fn bits(x: D4) -> Q4 {
    Q4::reinterpret(x)
}

#[cube]
fn is_nan(x: D4) -> B4 {
    (bits(x) & Q4::new(MAGNITUDE)).greater_than(&Q4::new(INFINITY))
}

#[cube]
pub(crate) fn classify(x: D4, #[comptime] op: Unary) -> B4 {
    match op {
        Unary::IsNan => is_nan(x),
        _ => (bits(x) & Q4::new(MAGNITUDE)).equal(&Q4::new(INFINITY)),
    }
}

#[cube]
fn all(#[comptime] value: f64) -> D4 {
    D4::reinterpret(Q4::new(comptime!(value.to_bits())))
}

#[cube]
fn sign(x: D4) -> D4 {
    let signed = select_many(x.greater_than(&all(0.0)), all(1.0), select_many(x.less_than(&all(0.0)), all(-1.0), x));
    select_many(is_nan(x), x, signed)
}

/// `exp(x) - 1`: the rounding error of `exp(x)` is undone by dividing by its own logarithm.
#[cube]
fn expm1(x: D4) -> D4 {
    let e = x.exp();
    let corrected = (e - all(1.0)) * x / e.ln();
    let near = (e.equal(&all(1.0))).or(x.equal(&all(0.0)));
    let far = x.abs().greater_than(&all(30.0));
    select_many(near, x, select_many(far, e - all(1.0), corrected))
}

/// `ln(1 + x)`, by the same correction.
#[cube]
fn log1p(x: D4) -> D4 {
    let u = x + all(1.0);
    let corrected = u.ln() * x / (u - all(1.0));
    let plain = x.abs().greater_than(&all(1e15)).or(x.less_equal(&all(-1.0))).or(is_nan(x));
    select_many(u.equal(&all(1.0)), x, select_many(plain, u.ln(), corrected))
}

#[cube]
fn sinh(x: D4) -> D4 {
    let e = expm1(x.abs());
    let small = (e + e / (e + all(1.0))) * all(0.5);
    // Past e^709 the square root of the result is squared, so that it does not overflow half way.
    let half = (x.abs() * all(0.5)).exp();
    let value = select_many(x.abs().greater_than(&all(700.0)), half * all(0.5) * half, small);
    copysign(value, x)
}

#[cube]
fn cosh(x: D4) -> D4 {
    let half = (x.abs() * all(0.5)).exp();
    let e = x.abs().exp();
    select_many(x.abs().greater_than(&all(700.0)), half * all(0.5) * half, (e + all(1.0) / e) * all(0.5))
}

#[cube]
fn tanh(x: D4) -> D4 {
    let e = expm1(x.abs() * all(-2.0));
    copysign(all(0.0) - e / (e + all(2.0)), x)
}

#[cube]
fn asinh(x: D4) -> D4 {
    let a = x.abs();
    let near = log1p(a + a * a / (all(1.0) + (a * a + all(1.0)).sqrt()));
    let far = a.ln() + all(std::f64::consts::LN_2);
    copysign(select_many(a.greater_than(&all(1e8)), far, near), x)
}

#[cube]
fn acosh(x: D4) -> D4 {
    let t = x - all(1.0);
    let near = log1p(t + (t * t + t * all(2.0)).sqrt());
    select_many(x.greater_than(&all(1e8)), x.ln() + all(std::f64::consts::LN_2), near)
}

#[cube]
fn atanh(x: D4) -> D4 {
    let a = x.abs();
    copysign(log1p(a * all(2.0) / (all(1.0) - a)) * all(0.5), x)
}

#[cube]
fn copysign(x: D4, y: D4) -> D4 {
    D4::reinterpret((bits(x) & Q4::new(MAGNITUDE)) | (bits(y) & Q4::new(0x8000_0000_0000_0000u64)))
}

/// Functions of one value that every device with `f64` has.
#[cube]
pub(crate) fn unary(x: D4, #[comptime] op: Unary) -> D4 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sign => sign(x),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => all(1.0) / x.sqrt(),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round(),
        Unary::Trunc => x.trunc(),
        Unary::Exp => x.exp(),
        Unary::Exp2 => (x * all(std::f64::consts::LN_2)).exp(),
        Unary::Expm1 => expm1(x),
        Unary::Log => x.ln(),
        Unary::Log2 => x.ln() * all(std::f64::consts::LOG2_E),
        Unary::Log10 => x.ln() * all(std::f64::consts::LOG10_E),
        Unary::Log1p => log1p(x),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tan => x.tan(),
        Unary::Asin => x.asin(),
        Unary::Acos => x.acos(),
        Unary::Atan => x.atan(),
        Unary::Sinh => sinh(x),
        Unary::Cosh => cosh(x),
        Unary::Tanh => tanh(x),
        Unary::Asinh => asinh(x),
        Unary::Acosh => acosh(x),
        Unary::Atanh => atanh(x),
        _ => x.erf(),
    }
}

#[cube]
fn max(a: D4, b: D4) -> D4 {
    select_many(is_nan(a).or(b.less_than(&a)).or(a.equal(&b)), a, b)
}

#[cube]
fn min(a: D4, b: D4) -> D4 {
    select_many(is_nan(a).or(a.less_than(&b)).or(a.equal(&b)), a, b)
}

/// The remainder with the sign of the divisor.
#[cube]
fn rem(a: D4, b: D4) -> D4 {
    let r = a - (a / b).trunc() * b;
    let off = (!r.equal(&all(0.0))).vec_and(((bits(r) ^ bits(b)) & Q4::new(0x8000_0000_0000_0000u64)).not_equal(&Q4::new(0u64)));
    select_many(off, r + b, r)
}

#[cube]
fn hypot(a: D4, b: D4) -> D4 {
    let (x, y) = (a.abs(), b.abs());
    let (big, small) = (max(x, y), min(x, y));
    let ratio = small / big;
    let value = big * (ratio * ratio + all(1.0)).sqrt();
    select_many(small.equal(&all(0.0)).or(big.equal(&all(0.0))), big, value)
}

#[cube]
pub(crate) fn binary(a: D4, b: D4, #[comptime] op: Binary) -> D4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::FloorDiv => (a / b).floor(),
        Binary::TruncDiv => (a / b).trunc(),
        Binary::Rem => rem(a, b),
        Binary::Pow => a.powf(b),
        Binary::Max => max(a, b),
        Binary::Min => min(a, b),
        Binary::Fmax => select_many(is_nan(a), b, select_many(is_nan(b), a, max(a, b))),
        Binary::Fmin => select_many(is_nan(a), b, select_many(is_nan(b), a, min(a, b))),
        Binary::Atan2 => a.atan2(b),
        Binary::Hypot => hypot(a, b),
        _ => copysign(a, b),
    }
}
