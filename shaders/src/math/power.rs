//! Powers, lengths and exact division with remainder, on four `f32` lanes; see the `math` module
//! for the rules.

use cubecl::prelude::*;

use super::elementary::*;
use crate::words::{B4, F4, I4, U4};

/// `(log2((1 + s) / (1 - s)) - 2 s / ln 2) / s^3` in `s^2`, `|s| <= 0.1717`.
const LOG2_TAIL: &[f32] = &[0.340262175, 0.411704183, 0.577082872, 0.961796701];
/// `2 / ln 2` in two parts, the first of 12 bits.
const TWO_OVER_LN_2: f32 = 2.88539;
const TWO_OVER_LN_2_HIGH: f32 = 2.884765625;
const TWO_OVER_LN_2_LOW: f32 = 0.000624457;

/// `log2 x` for positive finite `x` as a number of 12 bits and the rest, together good to 32 bits.
#[cube]
fn log2_in_two(x: F4) -> (F4, F4) {
    let (e, f) = log_split(x);
    // s = f / (2 + f), first 12 bits and the rest by long division.
    let whole = f + all(2.0);
    let high = short(whole);
    let low = f - opaque(high - all(2.0));
    let first = short(f / whole);
    let rest = (opaque(f - first * high) - first * low) / whole;
    let s = first + rest;
    let square = s * s;
    let small = first * all(TWO_OVER_LN_2_LOW)
        + (rest * all(TWO_OVER_LN_2) + s * square * polynomial(square, LOG2_TAIL));
    let large = first * all(TWO_OVER_LN_2_HIGH);
    let sum = short(e + (large + small));
    (sum, opaque(opaque(e - sum) + large) + small)
}

/// Whether `x` is an integer, and whether an odd one. From 2^24 on every number is an even integer.
#[cube]
fn integer_odd(x: F4) -> (B4, B4) {
    let a = abs(x);
    let even = a.greater_equal(&all(16777216.0));
    let whole = select_many(even, all(0.0), a);
    let integer = whole.floor().equal(&whole);
    let odd = (I4::cast_from(whole) & I4::new(1i32)).equal(&I4::new(1i32));
    (integer, integer.vec_and(odd))
}

/// As `powf` in C.
/// 3.44 ulp.
#[cube]
pub(crate) fn pow(x: F4, y: F4) -> F4 {
    let a = abs(x);
    let (zero, endless) = (magnitude_bits(x).equal(&U4::new(0u32)), is_inf(x));
    // Beyond 2^33 every power but those of 1 has long overflowed, or vanished.
    let power = clamp_to(y, -8589934592.0, 8589934592.0);
    let (high, low) = log2_in_two(select_many(zero.or(endless), all(1.0), a));
    let first = short(power);
    let large = first * high;
    let small = first * low + (power - first) * (high + low);
    let sum = clamp_to(large + small, -200.0, 200.0);
    let n = sum.round();
    // Past the clamp the fraction is meaningless, and not wanted.
    let fraction = clamp_to(opaque(large - n) + small, -1.0, 1.0);
    let y0 = scale(
        all(1.0) + exp_reduced(fraction * all(LN_2)),
        I4::cast_from(n),
    );
    // Zero and infinity: the power is one or the other.
    let upwards = bits(y).less_than(&U4::new(SIGN));
    let y0 = select_many(
        zero.or(endless),
        select_many(upwards, a, select_many(zero, infinity(x), all(0.0))),
        y0,
    );
    let (integer, odd) = integer_odd(y);
    let minus = bits(x).greater_equal(&U4::new(SIGN));
    let y0 = select_many(minus.vec_and(odd), neg(y0), y0);
    let y0 = select_many(
        minus.vec_and(!integer).vec_and(!zero.or(endless)),
        nan(x),
        y0,
    );
    let y0 = keep_nan(x, keep_nan(y, y0));
    let one = bits(x)
        .equal(&U4::new(0x3f80_0000u32))
        .or(magnitude_bits(y).equal(&U4::new(0u32)));
    select_many(one, all(1.0), y0)
}

/// Without overflow on the way; infinity beats NaN.
/// 1.18 ulp.
#[cube]
pub(crate) fn hypot(a: F4, b: F4) -> F4 {
    let (p, q) = (magnitude_bits(a), magnitude_bits(b));
    let larger = select_many(p.less_than(&q), q, p);
    let (huge, tiny) = (
        larger.greater_than(&U4::new(0x5e80_0000u32)),
        larger.less_than(&U4::new(0x2080_0000u32)),
    );
    // 2^-80 and 2^80.
    let down = select_many(
        huge,
        all(8.271806e-25),
        select_many(tiny, all(1.2089258e24), all(1.0)),
    );
    let up = select_many(
        huge,
        all(1.2089258e24),
        select_many(tiny, all(8.271806e-25), all(1.0)),
    );
    let (x, y) = (F4::reinterpret(p) * down, F4::reinterpret(q) * down);
    let length = (x * x + y * y).sqrt() * up;
    select_many(
        is_inf(a).or(is_inf(b)),
        infinity(a),
        keep_nan(a, keep_nan(b, length)),
    )
}

// Division with remainder: in integers, because a quotient rounded up to the next integer is wrong
// by a whole divisor.

/// Mantissa of 24 bits and exponent of a magnitude: `bits` stands for
/// `mantissa 2^(exponent - 150)`. Zero has mantissa 0.
#[cube]
fn parts(magnitude: U4) -> (U4, I4) {
    let subnormal = magnitude.less_than(&U4::new(0x0080_0000u32));
    let zeros = select_many(
        subnormal,
        U4::cast_from(magnitude.leading_zeros()) - U4::new(8u32),
        U4::new(0u32),
    );
    let mantissa = (magnitude & U4::new(0x007f_ffffu32))
        | select_many(subnormal, U4::new(0u32), U4::new(0x0080_0000u32));
    let exponent = select_many(
        subnormal,
        I4::new(1i32) - I4::cast_from(zeros),
        I4::cast_from(magnitude >> U4::new(23u32)),
    );
    (mantissa << zeros, exponent)
}

/// The magnitude with this mantissa (of at most 24 bits) and exponent, as `parts` has it.
#[cube]
fn join(mantissa: U4, exponent: I4) -> U4 {
    let zeros = U4::cast_from(mantissa.leading_zeros()) - U4::new(8u32);
    let exponent = exponent - I4::cast_from(zeros);
    let mantissa = mantissa << (zeros & U4::new(31u32));
    let lost = I4::new(1i32) - exponent;
    let lost = select_many(lost.greater_than(&I4::new(24i32)), I4::new(24i32), lost);
    let subnormal = mantissa
        >> U4::reinterpret(select_many(
            lost.less_than(&I4::new(0i32)),
            I4::new(0i32),
            lost,
        ));
    let normal =
        (mantissa & U4::new(0x007f_ffffu32)) | (U4::reinterpret(exponent) << U4::new(23u32));
    let value = select_many(exponent.less_than(&I4::new(1i32)), subnormal, normal);
    select_many(mantissa.equal(&U4::new(0u32)), U4::new(0u32), value)
}

/// The largest of four lanes.
#[cube]
fn largest(x: I4) -> i32 {
    let (a, b) = (x.extract(0usize), x.extract(1usize));
    let (c, d) = (x.extract(2usize), x.extract(3usize));
    let (a, c) = (select(a > b, a, b), select(c > d, c, d));
    select(a > c, a, c)
}

/// `|a|` divided by `|b|`, both finite and `b` not zero: the low 32 bits of the quotient rounded
/// down, the bits of the remainder, and how many bits longer than the divisor the dividend is. Long
/// division, eight bits at a time; it takes as many steps as the lane that needs most.
#[cube]
fn divide(a: F4, b: F4) -> (U4, U4, I4) {
    let (dividend, top) = parts(magnitude_bits(a));
    let (divisor, bottom) = parts(magnitude_bits(b));
    let divisor = select_many(divisor.equal(&U4::new(0u32)), U4::new(1u32), divisor);
    let longer = top - bottom;
    let less = longer.less_than(&I4::new(0i32));
    let mut quotient = select_many(less, U4::new(0u32), dividend / divisor);
    let mut rest = select_many(less, U4::new(0u32), dividend % divisor);
    let mut left = longer;
    let steps = (largest(longer) + 7i32) / 8i32;
    for _ in 0..steps {
        let count = select_many(left.greater_than(&I4::new(8i32)), I4::new(8i32), left);
        let count = U4::reinterpret(select_many(
            left.less_than(&I4::new(0i32)),
            I4::new(0i32),
            count,
        ));
        let shifted = rest << count;
        quotient = (quotient << count) + shifted / divisor;
        rest = shifted % divisor;
        left -= I4::new(8i32);
    }
    (
        quotient,
        select_many(less, magnitude_bits(a), join(rest, bottom)),
        longer,
    )
}

/// Neither can be divided by long division.
#[cube]
fn indivisible(a: F4, b: F4) -> B4 {
    let endless = magnitude_bits(a).greater_equal(&U4::new(INFINITY));
    endless
        .or(is_nan(b))
        .or(magnitude_bits(b).equal(&U4::new(0u32)))
}

/// The quotient rounded towards zero.
/// 0.50 ulp.
#[cube]
pub(crate) fn trunc_div(a: F4, b: F4) -> F4 {
    let (quotient, _rest, longer) = divide(a, b);
    let rounded = div(a, b);
    // A quotient of more than 24 bits is an integer however it is rounded.
    let long = longer.greater_than(&I4::new(24i32)).or(indivisible(a, b));
    select_many(
        long,
        rounded,
        copysign(F4::cast_from(quotient), F4::reinterpret(bits(a) ^ bits(b))),
    )
}

/// The quotient rounded towards minus infinity, as `floor_divide` in NumPy: an infinite dividend
/// gives NaN. 0.50 ulp.
#[cube]
pub(crate) fn floor_div(a: F4, b: F4) -> F4 {
    let (quotient, rest, longer) = divide(a, b);
    let minus = (bits(a) ^ bits(b)).greater_equal(&U4::new(SIGN));
    let down = minus.vec_and(rest.not_equal(&U4::new(0u32)));
    let exact = F4::cast_from(quotient + select_many(down, U4::new(1u32), U4::new(0u32)));
    let exact = select_many(minus, neg(exact), exact);
    let long = longer.greater_than(&I4::new(24i32)).or(indivisible(a, b));
    let nothing = is_inf(a).vec_and(magnitude_bits(b).not_equal(&U4::new(0u32)));
    select_many(nothing, nan(a), select_many(long, div(a, b), exact))
}

/// The remainder of `floor_div`, with the sign of the divisor, as `remainder` in NumPy.
/// 0.50 ulp.
#[cube]
pub(crate) fn rem(a: F4, b: F4) -> F4 {
    let (_quotient, rest, _longer) = divide(a, b);
    let nothing = rest.equal(&U4::new(0u32));
    let opposite = (bits(a) ^ bits(b)).greater_equal(&U4::new(SIGN));
    let same = copysign(F4::reinterpret(rest), b);
    // b less the magnitude of the rest, in the sign of b.
    let y = select_many(nothing.or(!opposite), same, b - same);
    select_many(indivisible(a, b), nan(a), y)
}
