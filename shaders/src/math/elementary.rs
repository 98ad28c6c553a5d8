//! Functions of one or more `f32` values, on four lanes at a time.
//!
//! Shader languages promise little about their own functions: WGSL lets `asin` be off by 7e-5,
//! `log` near 1 by thousands of ulp, and leaves NaN and infinity to the driver. So everything here
//! is built from `+ - * / sqrt`, rounding to integers and bits, and is right to a few ulp
//! everywhere and at every special value. Three rules keep it so on drivers that may rewrite float
//! expressions:
//! - no trick of the kind `(a + b) - a`: drivers simplify it. Where a value must be cut in two, its
//!   low bits are masked away;
//! - no reliance on fused multiply-add, and no harm from it either;
//! - NaN and infinity are told by bits, never by comparing a value with itself; a shader has no
//!   literals for them, so they are made from bits.
//!
//! The ulp figures are the worst measured against `f64` on dense grids over the whole range
//! (software Vulkan device). Subnormal inputs and results may be taken for zero.

mod trigonometry;

pub(crate) use trigonometry::*;

use cubecl::prelude::*;

use crate::words::{B4, F4, I4, U4};

const LOG2_E: f32 = std::f32::consts::LOG2_E;
pub(crate) const LN_2: f32 = std::f32::consts::LN_2;
/// `ln 2` in two parts; the first has 9 bits, so that its product with an exponent is exact.
pub(crate) const LN_2_HIGH: f32 = 0.693359375;
pub(crate) const LN_2_LOW: f32 = -2.1219444e-4;
const LOG10_E: f32 = std::f32::consts::LOG10_E;
/// `log10 2` in two parts, as above.
const LOG10_2_HIGH: f32 = 0.30078125;
const LOG10_2_LOW: f32 = 2.4874566e-4;
pub(crate) const PI: f32 = std::f32::consts::PI;
pub(crate) const PI_LOW: f32 = -8.742278e-8;
pub(crate) const SIGN: u32 = 0x8000_0000;
pub(crate) const MAGNITUDE: u32 = 0x7fff_ffff;
pub(crate) const INFINITY: u32 = 0x7f80_0000;
/// `2 / pi` to 224 bits, after a word of zeros.
const TWO_OVER_PI: [u32; 8] = [
    0,
    0xa2f9_836e,
    0x4e44_1529,
    0xfc27_57d1,
    0xf534_ddc0,
    0xdb62_9599,
    0x3c43_9041,
    0xfe51_63ab,
];

// Minimax polynomials, highest power first.
/// `(exp(r) - 1 - r) / r^2`, `|r| <= ln(2) / 2`.
const EXP: &[f32] = &[
    0.000199150309,
    0.00139420596,
    0.00833327137,
    0.0416663401,
    0.166666672,
    0.5,
];
/// `(ln(1 + f) - f + f^2 / 2) / f^3`, `sqrt(1/2) - 1 <= f <= sqrt(2) - 1`.
const LOG: &[f32] = &[
    0.0691356733,
    -0.117892504,
    0.118734263,
    -0.123844616,
    0.142186165,
    -0.166692436,
    0.20002228,
    -0.249999866,
    0.333333105,
];
/// `(sinh(x) - x) / x^3` in `x^2`, `|x| <= 1`.
const SINH: &[f32] = &[2.81743974e-06, 0.000198360663, 0.00833335053, 0.166666672];
/// `(tanh(x) - x) / x^3` in `x^2`, `|x| <= 0.6`.
const TANH: &[f32] = &[
    0.00223106099,
    -0.00826708786,
    0.0217344388,
    -0.0539524741,
    0.133332476,
    -0.333333313,
];
/// `(sin(r) - r) / r^3` in `r^2`, `|r| <= pi/4`.
const SIN: &[f32] = &[-0.000195156565, 0.00833216682, -0.166666552];
/// `(cos(r) - 1 + r^2 / 2) / r^4` in `r^2`, `|r| <= pi/4`.
const COS: &[f32] = &[2.44366092e-05, -0.00138873525, 0.0416666456];
/// `(asin(x) - x) / x^3` in `x^2`, `|x| <= 1/2`.
const ASIN: &[f32] = &[
    0.0375651866,
    0.0144026149,
    0.0318176076,
    0.0445157215,
    0.0750051066,
    0.166666597,
];
/// `(atan(x) - x) / x^3` in `x^2`, `|x| <= 1`.
const ATAN: &[f32] = &[
    -0.00182718469,
    0.0110643152,
    -0.0314554684,
    0.0582343191,
    -0.084194459,
    0.109575719,
    -0.142652452,
    0.199986383,
    -0.333333015,
];
// Small pieces.

/// The same constant in every lane.
#[cube]
pub(crate) fn all(#[comptime] value: f32) -> F4 {
    F4::new(f32::new(value))
}

#[cube]
pub(crate) fn bits(x: F4) -> U4 {
    U4::reinterpret(x)
}

#[cube]
pub(crate) fn magnitude_bits(x: F4) -> U4 {
    bits(x) & U4::new(MAGNITUDE)
}

/// Positive infinity. It goes through a runtime value because shader compilers refuse a constant
/// that is infinite.
#[cube]
pub(crate) fn infinity(any: F4) -> F4 {
    F4::reinterpret((bits(any) & U4::new(INFINITY)) | U4::new(INFINITY))
}

#[cube]
pub(crate) fn nan(any: F4) -> F4 {
    F4::reinterpret((bits(any) & U4::new(INFINITY)) | U4::new(0x7fc0_0000u32))
}

/// `y`, but NaN where `x` is.
#[cube]
pub(crate) fn keep_nan(x: F4, y: F4) -> F4 {
    select_many(is_nan(x), x, y)
}

#[cube]
fn polynomial_step(sum: F4, x: F4, coefficient: f32) -> F4 {
    sum * x + F4::new(coefficient)
}

/// Horner's rule, unrolled.
#[cube]
#[allow(unused_variables)]
pub(crate) fn polynomial(x: F4, #[comptime] coefficients: &'static [f32]) -> F4 {
    intrinsic!(|scope| {
        let mut sum = F4::__expand_new(scope, coefficients[0].into());
        for &coefficient in &coefficients[1..] {
            sum = polynomial_step::expand(scope, sum, x, coefficient.into());
        }
        sum
    })
}

/// `2^n`, `-126 <= n <= 127`.
#[cube]
pub(crate) fn power_of_two(n: I4) -> F4 {
    F4::reinterpret((n + I4::new(127i32)) << I4::new(23i32))
}

/// `x 2^n`, `|n| <= 252`.
#[cube]
pub(crate) fn scale(x: F4, n: I4) -> F4 {
    let half = n >> I4::new(1i32);
    x * power_of_two(half) * power_of_two(n - half)
}

/// `x`, but the compiler cannot see where it comes from: the limit is below every value in use.
/// Drivers join `(x - n a) - n b` to `x - n (a + b)`, and the digits for which the constant was cut
/// in two are lost; across this they do not.
#[cube]
pub(crate) fn opaque(x: F4) -> F4 {
    x.max(all(-1e30))
}

/// `x` without its last 12 bits: products of two such numbers are exact.
#[cube]
pub(crate) fn short(x: F4) -> F4 {
    F4::reinterpret(bits(x) & U4::new(0xffff_f000u32))
}

#[cube]
pub(crate) fn clamp_to(x: F4, #[comptime] low: f32, #[comptime] high: f32) -> F4 {
    let x = select_many(x.less_than(&all(low)), all(low), x);
    select_many(x.greater_than(&all(high)), all(high), x)
}

// Signs, rounding, classes.

/// Exact.
#[cube]
pub(crate) fn neg(x: F4) -> F4 {
    F4::reinterpret(bits(x) ^ U4::new(SIGN))
}

/// Exact.
#[cube]
pub(crate) fn abs(x: F4) -> F4 {
    F4::reinterpret(magnitude_bits(x))
}

/// Exact; zero and NaN give themselves.
#[cube]
pub(crate) fn sign(x: F4) -> F4 {
    let magnitude = magnitude_bits(x);
    let itself = magnitude
        .equal(&U4::new(0u32))
        .or(magnitude.greater_than(&U4::new(INFINITY)));
    select_many(itself, x, copysign(all(1.0), x))
}

/// The magnitude of `x` with the sign of `y`. Exact.
#[cube]
pub(crate) fn copysign(x: F4, y: F4) -> F4 {
    F4::reinterpret(magnitude_bits(x) | (bits(y) & U4::new(SIGN)))
}

#[cube]
pub(crate) fn is_nan(x: F4) -> B4 {
    magnitude_bits(x).greater_than(&U4::new(INFINITY))
}

#[cube]
pub(crate) fn is_inf(x: F4) -> B4 {
    magnitude_bits(x).equal(&U4::new(INFINITY))
}

/// Exact.
#[cube]
pub(crate) fn floor(x: F4) -> F4 {
    x.floor()
}

/// Exact.
#[cube]
pub(crate) fn ceil(x: F4) -> F4 {
    x.ceil()
}

/// To the nearest integer, ties to even. Exact.
#[cube]
pub(crate) fn round(x: F4) -> F4 {
    let down = x.floor();
    let rest = x - down;
    let odd = (down * all(0.5)).floor().not_equal(&(down * all(0.5)));
    let up = rest
        .greater_than(&all(0.5))
        .or(rest.equal(&all(0.5)).vec_and(odd));
    // From 2^23 on every value is an integer.
    let whole = magnitude_bits(x).greater_equal(&U4::new(0x4b00_0000u32));
    select_many(
        whole,
        x,
        copysign(select_many(up, down + all(1.0), down), x),
    )
}

/// Exact.
#[cube]
pub(crate) fn trunc(x: F4) -> F4 {
    x.trunc()
}

/// NaN if either is NaN. Exact.
#[cube]
pub(crate) fn max(a: F4, b: F4) -> F4 {
    keep_nan(a, keep_nan(b, select_many(a.less_than(&b), b, a)))
}

/// NaN if either is NaN. Exact.
#[cube]
pub(crate) fn min(a: F4, b: F4) -> F4 {
    keep_nan(a, keep_nan(b, select_many(b.less_than(&a), b, a)))
}

/// Ignores one NaN. Exact.
#[cube]
pub(crate) fn fmax(a: F4, b: F4) -> F4 {
    select_many(is_nan(a), b, select_many(a.less_than(&b), b, a))
}

/// Ignores one NaN. Exact.
#[cube]
pub(crate) fn fmin(a: F4, b: F4) -> F4 {
    select_many(is_nan(a), b, select_many(b.less_than(&a), b, a))
}

// Powers and roots.

/// Half an ulp, or 2.5 where the device divides by a reciprocal.
#[cube]
pub(crate) fn div(a: F4, b: F4) -> F4 {
    // The reciprocal of a divisor above 2^126 is subnormal, which many devices flush to zero.
    let shrink = select_many(
        magnitude_bits(b).greater_than(&U4::new(0x7e80_0000u32)),
        all(0.25),
        all(1.0),
    );
    (a * shrink) / (b * shrink)
}

/// 0.50 ulp.
#[cube]
pub(crate) fn sqrt(x: F4) -> F4 {
    x.sqrt()
}

/// 1.49 ulp.
#[cube]
pub(crate) fn rsqrt(x: F4) -> F4 {
    x.inverse_sqrt()
}

// Exponentials.

/// `exp(r) - 1`, `|r| <= ln(2) / 2`.
#[cube]
pub(crate) fn exp_reduced(r: F4) -> F4 {
    r + r * r * polynomial(r, EXP)
}

/// `n` and `r` with `x = n ln 2 + r`, `|r| <= ln(2) / 2`.
#[cube]
fn exp_reduce(x: F4) -> (F4, F4) {
    let n = (x * all(LOG2_E)).round();
    (n, opaque(x - n * all(LN_2_HIGH)) - n * all(LN_2_LOW))
}

/// `exp(x) 2^shift`, for arguments whose result overflows only after the shift.
#[cube]
pub(crate) fn exp_shifted(x: F4, #[comptime] shift: i32) -> F4 {
    let (n, r) = exp_reduce(clamp_to(x, -110.0, 92.0));
    scale(all(1.0) + exp_reduced(r), I4::cast_from(n) + I4::new(shift))
}

/// 1.72 ulp.
#[cube]
pub(crate) fn exp(x: F4) -> F4 {
    keep_nan(x, exp_shifted(x, 0))
}

/// 1.75 ulp.
#[cube]
pub(crate) fn exp2(x: F4) -> F4 {
    let inside = clamp_to(x, -160.0, 130.0);
    let n = inside.round();
    keep_nan(
        x,
        scale(
            all(1.0) + exp_reduced((inside - n) * all(LN_2)),
            I4::cast_from(n),
        ),
    )
}

/// 1.46 ulp.
#[cube]
pub(crate) fn expm1(x: F4) -> F4 {
    let (n, r) = exp_reduce(clamp_to(x, -30.0, 89.0));
    // Half of the result, because 2^n itself may overflow.
    let half = power_of_two(I4::cast_from(n) - I4::new(1i32));
    let y = (exp_reduced(r) * half + (half - all(0.5))) * all(2.0);
    keep_nan(x, select_many(abs(x).less_than(&all(1e-7)), x, y))
}

/// 1.91 ulp.
#[cube]
pub(crate) fn sinh(x: F4) -> F4 {
    let a = abs(x);
    let half = exp_shifted(a, -1);
    let square = a * a;
    let y = select_many(
        a.less_than(&all(1.0)),
        a + a * square * polynomial(square, SINH),
        half - all(0.25) / half,
    );
    keep_nan(x, copysign(y, x))
}

/// 1.90 ulp.
#[cube]
pub(crate) fn cosh(x: F4) -> F4 {
    let half = exp_shifted(abs(x), -1);
    keep_nan(x, half + all(0.25) / half)
}

/// 1.16 ulp.
#[cube]
pub(crate) fn tanh(x: F4) -> F4 {
    let a = abs(x);
    let square = a * a;
    let large = all(1.0) - all(2.0) / (exp_shifted(clamp_to(a + a, 0.0, 20.0), 0) + all(1.0));
    let y = select_many(
        a.less_than(&all(0.6)),
        a + a * square * polynomial(square, TANH),
        large,
    );
    keep_nan(x, copysign(y, x))
}

// Logarithms.

/// `e` and `f` with `x = 2^e (1 + f)`, `sqrt(1/2) <= 1 + f < sqrt(2)`, for positive finite `x`.
#[cube]
pub(crate) fn log_split(x: F4) -> (F4, F4) {
    let whole = bits(x);
    let subnormal = whole.less_than(&U4::new(0x0080_0000u32));
    // The bits of a subnormal number are the number in units of 2^-149.
    let normal = select_many(subnormal, bits(F4::cast_from(whole)), whole);
    let above = normal - U4::new(0x3f35_04f3u32);
    let exponent = F4::cast_from(I4::reinterpret(above) >> I4::new(23i32))
        - select_many(subnormal, all(149.0), all(0.0));
    let mantissa = F4::reinterpret((above & U4::new(0x007f_ffffu32)) + U4::new(0x3f35_04f3u32));
    (exponent, mantissa - all(1.0))
}

/// `ln(1 + f)` for the `f` of `log_split`.
#[cube]
pub(crate) fn log_reduced(f: F4) -> F4 {
    let square = f * f;
    f - (square * all(0.5) - square * f * polynomial(f, LOG))
}

/// `ln x` for positive finite `x`.
#[cube]
pub(crate) fn log_positive(x: F4) -> F4 {
    let (e, f) = log_split(x);
    e * all(LN_2_HIGH) + (e * all(LN_2_LOW) + log_reduced(f))
}

/// `y`, but for an argument `x` of a logarithm that is not positive and finite the value that
/// belongs there.
#[cube]
fn log_edges(x: F4, y: F4) -> F4 {
    let whole = bits(x);
    let y = select_many(whole.greater_equal(&U4::new(INFINITY)), x, y);
    let y = select_many(whole.greater_than(&U4::new(SIGN)), nan(x), y);
    select_many(magnitude_bits(x).equal(&U4::new(0u32)), neg(infinity(x)), y)
}

/// 1.06 ulp.
#[cube]
pub(crate) fn log(x: F4) -> F4 {
    log_edges(x, log_positive(x))
}

/// 1.68 ulp.
#[cube]
pub(crate) fn log2(x: F4) -> F4 {
    let (e, f) = log_split(x);
    log_edges(x, e + log_reduced(f) * all(LOG2_E))
}

/// 2.19 ulp.
#[cube]
pub(crate) fn log10(x: F4) -> F4 {
    let (e, f) = log_split(x);
    log_edges(
        x,
        e * all(LOG10_2_HIGH) + (e * all(LOG10_2_LOW) + log_reduced(f) * all(LOG10_E)),
    )
}

/// `ln(1 + x)` for finite `x > -1`.
#[cube]
fn log1p_inside(x: F4) -> F4 {
    let (e, f) = log_split(all(1.0) + x);
    // 1 + x has lost digits of x; with its exponent known, f can be had from x with one rounding.
    let shrink = power_of_two(-I4::cast_from(clamp_to(e, -25.0, 25.0)));
    let f = select_many(
        e.less_than(&all(25.0)),
        opaque(shrink - all(1.0)) + x * shrink,
        f,
    );
    e * all(LN_2_HIGH) + (e * all(LN_2_LOW) + log_reduced(f))
}

/// 1.41 ulp.
#[cube]
pub(crate) fn log1p(x: F4) -> F4 {
    let y = log_edges(all(1.0) + x, log1p_inside(x));
    select_many(abs(x).less_than(&all(1e-8)), x, y)
}

/// 1.71 ulp.
#[cube]
pub(crate) fn asinh(x: F4) -> F4 {
    let a = abs(x);
    // From 2^30 on the one under the root makes no difference, and the square may overflow.
    let far = a.greater_than(&all(1073741824.0));
    let near = select_many(far, all(0.0), a);
    let inner = near + near * near / (all(1.0) + (all(1.0) + near * near).sqrt());
    let y = log1p_inside(select_many(far, a, inner)) + select_many(far, all(LN_2), all(0.0));
    let itself = is_inf(x).or(is_nan(x)).or(a.less_than(&all(1e-8)));
    select_many(itself, x, copysign(y, x))
}

/// 2.41 ulp.
#[cube]
pub(crate) fn acosh(x: F4) -> F4 {
    let far = x.greater_than(&all(1073741824.0));
    let above = select_many(far, all(0.0), x - all(1.0));
    let inner = above + (above * (above + all(2.0))).sqrt();
    let y = log1p_inside(select_many(far, x, inner)) + select_many(far, all(LN_2), all(0.0));
    let y = select_many(x.less_than(&all(1.0)), nan(x), y);
    select_many(bits(x).equal(&U4::new(INFINITY)), x, keep_nan(x, y))
}

/// 1.65 ulp.
#[cube]
pub(crate) fn atanh(x: F4) -> F4 {
    let a = abs(x);
    let inner = select_many(a.less_than(&all(1.0)), a, all(0.0));
    let y = all(0.5) * log1p_inside(all(2.0) * (inner + inner * inner / (all(1.0) - inner)));
    let y = select_many(a.equal(&all(1.0)), infinity(x), copysign(y, x));
    let y = select_many(a.greater_than(&all(1.0)), nan(x), copysign(y, x));
    keep_nan(x, select_many(a.less_than(&all(1e-8)), x, y))
}

// Trigonometry.
