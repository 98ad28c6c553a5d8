//! Functions of `f64` values on four lanes, for devices that have the type.
//!
//! The first part is exact and right on every such device. The second part stands on the device's
//! own functions, which shader languages lack for `f64` (they compile, and give garbage): it is for
//! CUDA alone, where those are right to an ulp or two. What CUDA's dialect here lacks or has only
//! in a short form (`log1p`, and those in `functions.rs`) is composed to about 1e-14.

use cubecl::prelude::*;

use crate::words::{B4, D4, Q4};

const SIGN: u64 = 0x8000_0000_0000_0000;
const MAGNITUDE: u64 = 0x7fff_ffff_ffff_ffff;
pub(crate) const INFINITY: u64 = 0x7ff0_0000_0000_0000;
/// The same constant in every lane.
#[cube]
#[allow(unused_variables)]
pub(crate) fn all(#[comptime] value: f64) -> D4 {
    intrinsic!(|scope| { D4::__expand_new(scope, value.into()) })
}

#[cube]
fn polynomial_step(sum: D4, x: D4, coefficient: f64) -> D4 {
    sum * x + D4::new(coefficient)
}

/// Horner's rule, unrolled.
#[cube]
#[allow(unused_variables)]
pub(crate) fn polynomial(x: D4, #[comptime] coefficients: &'static [f64]) -> D4 {
    intrinsic!(|scope| {
        let mut sum = D4::__expand_new(scope, coefficients[0].into());
        for &coefficient in &coefficients[1..] {
            sum = polynomial_step::expand(scope, sum, x, coefficient.into());
        }
        sum
    })
}

#[cube]
pub(crate) fn bits(x: D4) -> Q4 {
    Q4::reinterpret(x)
}

#[cube]
pub(crate) fn magnitude_bits(x: D4) -> Q4 {
    bits(x) & Q4::new(MAGNITUDE)
}

#[cube]
pub(crate) fn infinity(any: D4) -> D4 {
    D4::reinterpret((bits(any) & Q4::new(INFINITY)) | Q4::new(INFINITY))
}

#[cube]
pub(crate) fn nan(any: D4) -> D4 {
    D4::reinterpret((bits(any) & Q4::new(INFINITY)) | Q4::new(0x7ff8_0000_0000_0000u64))
}

#[cube]
pub(crate) fn keep_nan(x: D4, y: D4) -> D4 {
    select_many(is_nan(x), x, y)
}

// On every device with the type.

#[cube]
pub(crate) fn neg(x: D4) -> D4 {
    D4::reinterpret(bits(x) ^ Q4::new(SIGN))
}

#[cube]
pub(crate) fn abs(x: D4) -> D4 {
    D4::reinterpret(magnitude_bits(x))
}

/// Zero and NaN give themselves.
#[cube]
pub(crate) fn sign(x: D4) -> D4 {
    let magnitude = magnitude_bits(x);
    let itself = magnitude
        .equal(&Q4::new(0u64))
        .or(magnitude.greater_than(&Q4::new(INFINITY)));
    select_many(itself, x, copysign(all(1.0), x))
}

#[cube]
pub(crate) fn copysign(x: D4, y: D4) -> D4 {
    D4::reinterpret(magnitude_bits(x) | (bits(y) & Q4::new(SIGN)))
}

#[cube]
pub(crate) fn is_nan(x: D4) -> B4 {
    magnitude_bits(x).greater_than(&Q4::new(INFINITY))
}

#[cube]
pub(crate) fn is_inf(x: D4) -> B4 {
    magnitude_bits(x).equal(&Q4::new(INFINITY))
}

#[cube]
pub(crate) fn floor(x: D4) -> D4 {
    x.floor()
}

#[cube]
pub(crate) fn ceil(x: D4) -> D4 {
    x.ceil()
}

#[cube]
pub(crate) fn trunc(x: D4) -> D4 {
    x.trunc()
}

/// To the nearest integer, ties to even.
#[cube]
pub(crate) fn round(x: D4) -> D4 {
    let down = x.floor();
    let rest = x - down;
    let half = down * all(0.5);
    let odd = !half.floor().equal(&half);
    let up = rest
        .greater_than(&all(0.5))
        .or(rest.equal(&all(0.5)).vec_and(odd));
    // From 2^52 on every value is an integer.
    let whole = magnitude_bits(x).greater_equal(&Q4::new(0x4330_0000_0000_0000u64));
    select_many(
        whole,
        x,
        copysign(select_many(up, down + all(1.0), down), x),
    )
}

#[cube]
pub(crate) fn sqrt(x: D4) -> D4 {
    x.sqrt()
}

#[cube]
pub(crate) fn rsqrt(x: D4) -> D4 {
    all(1.0) / x.sqrt()
}

#[cube]
pub(crate) fn div(a: D4, b: D4) -> D4 {
    a / b
}

/// NaN if either is NaN.
#[cube]
pub(crate) fn max(a: D4, b: D4) -> D4 {
    keep_nan(a, keep_nan(b, select_many(a.less_than(&b), b, a)))
}

/// NaN if either is NaN.
#[cube]
pub(crate) fn min(a: D4, b: D4) -> D4 {
    keep_nan(a, keep_nan(b, select_many(b.less_than(&a), b, a)))
}

/// Ignores one NaN.
#[cube]
pub(crate) fn fmax(a: D4, b: D4) -> D4 {
    select_many(is_nan(a), b, select_many(a.less_than(&b), b, a))
}

/// Ignores one NaN.
#[cube]
pub(crate) fn fmin(a: D4, b: D4) -> D4 {
    select_many(is_nan(a), b, select_many(b.less_than(&a), b, a))
}

// On CUDA alone.

/// The quotient rounded towards zero.
#[cube]
pub(crate) fn trunc_div(a: D4, b: D4) -> D4 {
    let exact = ((a - a % b) / b).round();
    let plain = is_inf(a)
        .or(is_inf(b))
        .or(magnitude_bits(b).equal(&Q4::new(0u64)));
    copysign(
        select_many(plain, (a / b).trunc(), exact),
        D4::reinterpret(bits(a) ^ bits(b)),
    )
}

/// The remainder of `floor_div`, with the sign of the divisor, as `remainder` in NumPy.
#[cube]
pub(crate) fn rem(a: D4, b: D4) -> D4 {
    let rest = a % b;
    let nothing = magnitude_bits(rest).equal(&Q4::new(0u64));
    let opposite = (bits(a) ^ bits(b)).greater_equal(&Q4::new(SIGN));
    let y = select_many(
        nothing,
        copysign(rest, b),
        select_many(opposite, rest + b, rest),
    );
    let undefined = is_inf(a).or(magnitude_bits(b).equal(&Q4::new(0u64)));
    select_many(undefined, nan(a), keep_nan(a, keep_nan(b, y)))
}

/// The quotient rounded towards minus infinity, as `floor_divide` in NumPy: an infinite dividend
/// gives NaN.
#[cube]
pub(crate) fn floor_div(a: D4, b: D4) -> D4 {
    let rest = a % b;
    let down = !magnitude_bits(rest).equal(&Q4::new(0u64));
    let down = down.vec_and((bits(a) ^ bits(b)).greater_equal(&Q4::new(SIGN)));
    let exact = select_many(is_inf(b), all(0.0), ((a - rest) / b).round())
        - select_many(down, all(1.0), all(0.0));
    let exact = select_many(exact.equal(&all(0.0)), copysign(exact, a / b), exact);
    let plain = magnitude_bits(b)
        .equal(&Q4::new(0u64))
        .or(is_nan(a))
        .or(is_nan(b));
    select_many(plain, a / b, select_many(is_inf(a), nan(a), exact))
}

#[cube]
pub(crate) fn pow(x: D4, y: D4) -> D4 {
    x.powf(y)
}

#[cube]
pub(crate) fn atan2(y: D4, x: D4) -> D4 {
    y.atan2(x)
}

#[cube]
pub(crate) fn hypot(x: D4, y: D4) -> D4 {
    x.hypot(y)
}

#[cube]
pub(crate) fn exp(x: D4) -> D4 {
    x.exp()
}

#[cube]
pub(crate) fn exp2(x: D4) -> D4 {
    all(2.0).powf(x)
}

#[cube]
pub(crate) fn expm1(x: D4) -> D4 {
    x.exp_m1()
}

#[cube]
pub(crate) fn log(x: D4) -> D4 {
    x.ln()
}

#[cube]
pub(crate) fn log2(x: D4) -> D4 {
    x.ln() * all(std::f64::consts::LOG2_E)
}

#[cube]
pub(crate) fn log10(x: D4) -> D4 {
    x.ln() * all(std::f64::consts::LOG10_E)
}

/// The logarithm of the rounded `1 + x`, times how much the rounding changed `x`.
#[cube]
pub(crate) fn log1p(x: D4) -> D4 {
    let whole = all(1.0) + x;
    let change = whole - all(1.0);
    let small = abs(change).less_than(&all(1e-300));
    let safe = select_many(small, all(1.0), change);
    let plain = magnitude_bits(x).greater_equal(&Q4::new(0x4340_0000_0000_0000u64));
    select_many(
        small,
        x,
        select_many(plain, whole.ln(), whole.ln() * (x / safe)),
    )
}

#[cube]
pub(crate) fn sin(x: D4) -> D4 {
    x.sin()
}

#[cube]
pub(crate) fn cos(x: D4) -> D4 {
    x.cos()
}

#[cube]
pub(crate) fn tan(x: D4) -> D4 {
    x.tan()
}

#[cube]
pub(crate) fn asin(x: D4) -> D4 {
    x.asin()
}

#[cube]
pub(crate) fn acos(x: D4) -> D4 {
    x.acos()
}

#[cube]
pub(crate) fn atan(x: D4) -> D4 {
    x.atan()
}

#[cube]
pub(crate) fn sinh(x: D4) -> D4 {
    x.sinh()
}

#[cube]
pub(crate) fn cosh(x: D4) -> D4 {
    x.cosh()
}

#[cube]
pub(crate) fn tanh(x: D4) -> D4 {
    x.tanh()
}

#[cube]
pub(crate) fn asinh(x: D4) -> D4 {
    x.asinh()
}

#[cube]
pub(crate) fn acosh(x: D4) -> D4 {
    x.acosh()
}

#[cube]
pub(crate) fn atanh(x: D4) -> D4 {
    x.atanh()
}

#[cube]
pub(crate) fn erf(x: D4) -> D4 {
    x.erf()
}
