//! Sines, tangents and their inverses.

use super::*;

/// `sin(r)`, `|r| <= pi/4`.
#[cube]
pub(crate) fn sin_reduced(r: F4) -> F4 {
    let square = r * r;
    r + r * square * polynomial(square, SIN)
}

/// `cos(r)`, `|r| <= pi/4`.
#[cube]
pub(crate) fn cos_reduced(r: F4) -> F4 {
    let square = r * r;
    all(1.0) - (square * all(0.5) - square * square * polynomial(square, COS))
}

/// The word `at + offset` of `2 / pi`, `at <= 4`.
#[cube]
fn two_over_pi(at: U4, #[comptime] offset: usize) -> U4 {
    let far = select_many(
        at.equal(&U4::new(3u32)),
        U4::new(comptime!(TWO_OVER_PI[offset + 3])),
        U4::new(comptime!(TWO_OVER_PI[offset + 4])),
    );
    let near = select_many(
        at.equal(&U4::new(0u32)),
        U4::new(comptime!(TWO_OVER_PI[offset])),
        U4::new(comptime!(TWO_OVER_PI[offset + 1])),
    );
    select_many(
        at.less_than(&U4::new(2u32)),
        near,
        select_many(
            at.equal(&U4::new(2u32)),
            U4::new(comptime!(TWO_OVER_PI[offset + 2])),
            far,
        ),
    )
}

/// The low word of the two words shifted left together, `0 <= count < 32`.
#[cube]
fn shift_in(high: U4, low: U4, count: U4) -> U4 {
    (high << count) | ((low >> U4::new(1u32)) >> (U4::new(31u32) - count))
}

/// The quarter turn nearest to `|x|`, and the angle from there (at most `pi/4`, either sign). In
/// integers, so that it is exact to the last bit of the angle for every `x`: the mantissa times
/// those 96 bits of `2 / pi` that matter at this exponent; what is above is whole turns.
#[cube]
fn quarter_turns(x: F4) -> (U4, F4) {
    let magnitude = magnitude_bits(x);
    let small = magnitude.less_than(&U4::new(0x3f49_0fdbu32));
    let mantissa = (magnitude & U4::new(0x007f_ffffu32)) | U4::new(0x0080_0000u32);
    let start = select_many(small, U4::new(126u32), magnitude >> U4::new(23u32)) - U4::new(120u32);
    let (at, count) = (start >> U4::new(5u32), start & U4::new(31u32));
    let (w1, w2) = (two_over_pi(at, 1usize), two_over_pi(at, 2usize));
    let (p0, p1, p2) = (
        shift_in(two_over_pi(at, 0usize), w1, count),
        shift_in(w1, w2, count),
        shift_in(w2, two_over_pi(at, 3usize), count),
    );
    // Two bits of quarter turns, then 62 bits of fraction.
    let middle = mantissa * p1;
    let low = middle + mantissa.mul_hi(p2);
    let carry = select_many(low.less_than(&middle), U4::new(1u32), U4::new(0u32));
    let high = mantissa * p0 + mantissa.mul_hi(p1) + carry;
    let quarters = (high + U4::new(0x2000_0000u32)) >> U4::new(30u32);
    // The fraction from -1/2 to 1/2; a negative one is made positive by flipping its bits.
    let high = high - (quarters << U4::new(30u32));
    let minus = U4::reinterpret(I4::reinterpret(high) >> I4::new(31i32));
    let (high, low) = (high ^ minus, low ^ minus);
    let zeros = U4::cast_from(high.leading_zeros());
    let leading = select_many(
        zeros.equal(&U4::new(32u32)),
        low,
        shift_in(high, low, zeros & U4::new(31u32)),
    );
    // Times pi/2 in units of 2^-31.
    let angle = F4::cast_from(leading.mul_hi(U4::new(0xc90f_daa2u32)))
        * power_of_two(I4::new(-29i32) - I4::cast_from(zeros));
    let angle = F4::reinterpret(bits(angle) | (minus & U4::new(SIGN)));
    (
        select_many(small, U4::new(0u32), quarters),
        select_many(small, F4::reinterpret(magnitude), angle),
    )
}

#[cube]
fn is_not_finite(x: F4) -> B4 {
    magnitude_bits(x).greater_equal(&U4::new(INFINITY))
}

/// `sin` or `cos` of `angle` as the quarter turns say, `minus` giving the sign bit to flip.
#[cube]
fn sine_of(x: F4, quarters: U4, angle: F4, minus: U4) -> F4 {
    let odd = (quarters & U4::new(1u32)).equal(&U4::new(1u32));
    let y = bits(select_many(odd, cos_reduced(angle), sin_reduced(angle)));
    let y = F4::reinterpret(y ^ ((quarters & U4::new(2u32)) << U4::new(30u32)) ^ minus);
    select_many(is_not_finite(x), nan(x), y)
}

/// 1.53 ulp.
#[cube]
pub(crate) fn sin(x: F4) -> F4 {
    let (quarters, angle) = quarter_turns(x);
    sine_of(x, quarters, angle, bits(x) & U4::new(SIGN))
}

/// 1.53 ulp.
#[cube]
pub(crate) fn cos(x: F4) -> F4 {
    let (quarters, angle) = quarter_turns(x);
    sine_of(x, quarters + U4::new(1u32), angle, U4::new(0u32))
}

/// 3.18 ulp.
#[cube]
pub(crate) fn tan(x: F4) -> F4 {
    let (quarters, angle) = quarter_turns(x);
    let odd = (quarters & U4::new(1u32)).equal(&U4::new(1u32));
    let (sine, cosine) = (sin_reduced(angle), cos_reduced(angle));
    let y = bits(select_many(odd, cosine, sine) / select_many(odd, sine, cosine));
    let y = F4::reinterpret(y ^ (quarters << U4::new(31u32)) ^ (bits(x) & U4::new(SIGN)));
    select_many(is_not_finite(x), nan(x), y)
}

/// `asin(x)`, `0 <= x <= 1/2`.
#[cube]
fn asin_reduced(x: F4) -> F4 {
    let square = x * x;
    x + x * square * polynomial(square, ASIN)
}

/// 2.33 ulp.
#[cube]
pub(crate) fn asin(x: F4) -> F4 {
    let a = abs(x);
    let far = a.greater_than(&all(0.5));
    let half = asin_reduced(select_many(far, (all(0.5) - a * all(0.5)).sqrt(), a));
    let y = select_many(
        far,
        all(PI / 2.0) - (half * all(2.0) - all(PI_LOW / 2.0)),
        half,
    );
    let y = copysign(y, x);
    keep_nan(x, select_many(a.greater_than(&all(1.0)), nan(x), y))
}

/// 1.24 ulp.
#[cube]
pub(crate) fn acos(x: F4) -> F4 {
    let a = abs(x);
    let far = a.greater_than(&all(0.5));
    let half = asin_reduced(select_many(far, (all(0.5) - a * all(0.5)).sqrt(), a));
    let outer = select_many(
        x.less_than(&all(0.0)),
        all(PI) - (half * all(2.0) - all(PI_LOW)),
        half * all(2.0),
    );
    let y = select_many(
        far,
        outer,
        all(PI / 2.0) - (copysign(half, x) - all(PI_LOW / 2.0)),
    );
    keep_nan(x, select_many(a.greater_than(&all(1.0)), nan(x), y))
}

/// `atan(x)`, `0 <= x <= 1`.
#[cube]
fn atan_reduced(x: F4) -> F4 {
    let square = x * x;
    x + x * square * polynomial(square, ATAN)
}

/// 1.98 ulp.
#[cube]
pub(crate) fn atan(x: F4) -> F4 {
    let a = abs(x);
    let far = a.greater_than(&all(1.0));
    let inner = atan_reduced(select_many(far, div(all(1.0), a), a));
    let y = select_many(far, all(PI / 2.0) - (inner - all(PI_LOW / 2.0)), inner);
    keep_nan(x, copysign(y, x))
}

/// The angle of the point `(x, y)`, with the signs of zeros and the infinities as in C.
/// 1.92 ulp.
#[cube]
pub(crate) fn atan2(y: F4, x: F4) -> F4 {
    let (p, q) = (magnitude_bits(y), magnitude_bits(x));
    let steep = p.greater_than(&q);
    let (low, high) = (select_many(steep, q, p), select_many(steep, p, q));
    let ratio = div(F4::reinterpret(low), F4::reinterpret(high));
    // 0 / 0 is meant as 0, infinity / infinity as 1.
    let ratio = select_many(
        high.equal(&U4::new(0u32)),
        all(0.0),
        select_many(low.equal(&U4::new(INFINITY)), all(1.0), ratio),
    );
    let angle = atan_reduced(ratio);
    let angle = select_many(steep, all(PI / 2.0) - (angle - all(PI_LOW / 2.0)), angle);
    let behind = bits(x).greater_equal(&U4::new(SIGN));
    let angle = select_many(behind, all(PI) - (angle - all(PI_LOW)), angle);
    keep_nan(x, keep_nan(y, copysign(angle, y)))
}
