//! Functions of single values, per kind. `f32` functions that are not exact are computed in `f64`
//! and rounded once, because this backend is what all others are measured by.

use crate::{
    element::{Held, Stored},
    fastmath::{self, Shifted},
    product::HasTiles,
};

/// Operations on floats.
pub(crate) trait Float:
    Held
    + Stored<Held = Self>
    + HasTiles
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
{
    const ONE: Self;
    fn wide(self) -> f64;
    fn narrow(value: f64) -> Self;
    fn abs(self) -> Self;
    fn sqrt(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    fn round(self) -> Self;
    fn trunc(self) -> Self;
    fn fmod(self, other: Self) -> Self;
    fn copysign(self, sign: Self) -> Self;
    fn is_nan(self) -> bool;
    fn is_infinite(self) -> bool;
    /// `exp` in `f64`, as exact as a result of this type needs; see `fastmath` for `FUSED`.
    fn exp_wide<const FUSED: bool>(x: f64) -> f64;
    /// `exp(self * scale - base)`; see [`Shifted`] for how exact.
    fn exp_shifted<const FUSED: bool>(self, by: Shifted) -> Self;
    /// Whether fast `f64` functions are exact enough, see `fastmath`.
    const FAST: bool;
}

macro_rules! float {
    ($($t:ty, $fast:expr, |$x:ident, $by:ident| $shifted:expr);*) => {$(
        impl Float for $t {
            const ONE: Self = 1.0;
            const FAST: bool = $fast;
            #[inline(always)]
            fn exp_wide<const FUSED: bool>(x: f64) -> f64 {
                if $fast { fastmath::exp::<FUSED>(x) } else { x.exp() }
            }
            #[inline(always)]
            fn exp_shifted<const FUSED: bool>(self, $by: Shifted) -> Self {
                let $x = self;
                $shifted
            }
            #[inline(always)]
            fn wide(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn narrow(value: f64) -> Self {
                value as $t
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn floor(self) -> Self {
                <$t>::floor(self)
            }
            #[inline(always)]
            fn ceil(self) -> Self {
                <$t>::ceil(self)
            }
            #[inline(always)]
            fn round(self) -> Self {
                <$t>::round_ties_even(self)
            }
            #[inline(always)]
            fn trunc(self) -> Self {
                <$t>::trunc(self)
            }
            #[inline(always)]
            fn fmod(self, other: Self) -> Self {
                self % other
            }
            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                <$t>::copysign(self, sign)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                <$t>::is_nan(self)
            }
            #[inline(always)]
            fn is_infinite(self) -> bool {
                <$t>::is_infinite(self)
            }
        }
    )*};
}
float!(
    f32, true, |x, by| by.exp32::<FUSED>(x);
    f64, false, |x, by| by.exp64(x)
);

#[inline(always)]
pub(crate) fn sign<T: Float>(x: T) -> T {
    let zero = T::default();
    if x > zero {
        T::ONE
    } else if x < zero {
        -T::ONE
    } else if x == zero {
        zero
    } else {
        x
    }
}

/// The larger; NaN if either is NaN.
#[inline(always)]
pub(crate) fn max<T: PartialOrd + Copy>(a: T, b: T) -> T {
    // A value that does not equal itself is NaN.
    #[allow(clippy::eq_op)]
    if a > b || a != a { a } else { b }
}

/// The smaller; NaN if either is NaN.
#[inline(always)]
pub(crate) fn min<T: PartialOrd + Copy>(a: T, b: T) -> T {
    #[allow(clippy::eq_op)]
    if a < b || a != a { a } else { b }
}

#[inline(always)]
pub(crate) fn fmax<T: Float>(a: T, b: T) -> T {
    if a >= b || b.is_nan() { a } else { b }
}

#[inline(always)]
pub(crate) fn fmin<T: Float>(a: T, b: T) -> T {
    if a <= b || b.is_nan() { a } else { b }
}

/// The remainder with the divisor's sign. Exact zeros take the divisor's sign as well.
pub(crate) fn float_rem<T: Float>(a: T, b: T) -> T {
    let zero = T::default();
    let rest = a.fmod(b);
    if rest == zero {
        zero.copysign(b)
    } else if (rest < zero) != (b < zero) {
        rest + b
    } else {
        rest
    }
}

/// `floor(a / b)` that agrees with [`float_rem`] where the quotient rounds up to an integer.
pub(crate) fn float_floor_div<T: Float>(a: T, b: T) -> T {
    let zero = T::default();
    if b == zero {
        return a / b;
    }
    let rest = a.fmod(b);
    let mut quotient = (a - rest) / b;
    if rest != zero && (rest < zero) != (b < zero) {
        quotient = quotient - T::ONE;
    }
    if quotient == zero {
        zero.copysign(a / b)
    } else {
        quotient.round()
    }
}

/// Operations on integers. All wrap.
pub(crate) trait Int: Held + Ord {
    const ZERO: Self;
    const ONE: Self;
    const BITS: u32;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Towards zero. The divisor is not zero.
    fn div(self, other: Self) -> Self;
    /// With the sign of the dividend. The divisor is not zero.
    fn rem(self, other: Self) -> Self;
    fn neg(self) -> Self;
    fn not(self) -> Self;
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn shl(self, bits: u32) -> Self;
    fn shr(self, bits: u32) -> Self;
    /// As a shift count; negative ones become huge.
    fn count(self) -> u64;
    fn is_negative(self) -> bool;
}

macro_rules! int {
    ($($t:ty, $count:expr, $negative:expr);*) => {$(
        impl Int for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const BITS: u32 = <$t>::BITS;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self.wrapping_div(other)
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                self.wrapping_rem(other)
            }
            #[inline(always)]
            fn neg(self) -> Self {
                self.wrapping_neg()
            }
            #[inline(always)]
            fn not(self) -> Self {
                !self
            }
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn shl(self, bits: u32) -> Self {
                self << bits
            }
            #[inline(always)]
            fn shr(self, bits: u32) -> Self {
                self >> bits
            }
            #[inline(always)]
            fn count(self) -> u64 {
                $count(self)
            }
            #[inline(always)]
            fn is_negative(self) -> bool {
                $negative(self)
            }
        }
    )*};
}
int!(i32, |v| v as u64, |v| v < 0; i64, |v| v as u64, |v| v < 0; u32, u64::from, |_| false);

#[inline(always)]
pub(crate) fn int_abs<T: Int>(x: T) -> T {
    if x.is_negative() { x.neg() } else { x }
}

#[inline(always)]
pub(crate) fn int_sign<T: Int>(x: T) -> T {
    if x.is_negative() {
        T::ONE.neg()
    } else if x == T::ZERO {
        x
    } else {
        T::ONE
    }
}

pub(crate) fn int_floor_div<T: Int>(a: T, b: T) -> T {
    let quotient = a.div(b);
    if a.is_negative() != b.is_negative() && a.rem(b) != T::ZERO {
        quotient.sub(T::ONE)
    } else {
        quotient
    }
}

pub(crate) fn int_floor_rem<T: Int>(a: T, b: T) -> T {
    let rest = a.rem(b);
    if rest != T::ZERO && rest.is_negative() != b.is_negative() {
        rest.add(b)
    } else {
        rest
    }
}

/// By squaring. A negative exponent gives the true value truncated: 0, or ±1 for bases ±1.
pub(crate) fn int_pow<T: Int>(base: T, exponent: T) -> T {
    if exponent.is_negative() {
        let odd = exponent.and(T::ONE) == T::ONE;
        return match base {
            b if b == T::ONE => b,
            b if b == T::ONE.neg() => {
                if odd {
                    b
                } else {
                    T::ONE
                }
            }
            _ => T::ZERO,
        };
    }
    let (mut result, mut square, mut rest) = (T::ONE, base, exponent);
    while rest != T::ZERO {
        if rest.and(T::ONE) == T::ONE {
            result = result.mul(square);
        }
        square = square.mul(square);
        rest = rest.shr(1);
    }
    result
}

#[inline(always)]
pub(crate) fn int_shl<T: Int>(a: T, b: T) -> T {
    if b.count() < u64::from(T::BITS) {
        a.shl(b.count() as u32)
    } else {
        T::ZERO
    }
}

#[inline(always)]
pub(crate) fn int_shr<T: Int>(a: T, b: T) -> T {
    if b.count() < u64::from(T::BITS) {
        a.shr(b.count() as u32)
    } else if a.is_negative() {
        T::ONE.neg()
    } else {
        T::ZERO
    }
}

/// A block of Philox 4x32-10.
#[inline(always)]
pub(crate) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    #[inline(always)]
    fn round([c0, c1, c2, c3]: [u32; 4], key: [u32; 2], number: u32) -> [u32; 4] {
        let (a, b) = (u64::from(c0) * 0xd251_1f53, u64::from(c2) * 0xcd9e_8d57);
        let (k0, k1) = (
            key[0].wrapping_add(number.wrapping_mul(0x9e37_79b9)),
            key[1].wrapping_add(number.wrapping_mul(0xbb67_ae85)),
        );
        [
            (b >> 32) as u32 ^ c1 ^ k0,
            b as u32,
            (a >> 32) as u32 ^ c3 ^ k1,
            a as u32,
        ]
    }
    // Written out, so that a loop over counters vectorises.
    let c = round(round(round(counter, key, 0), key, 1), key, 2);
    let c = round(round(round(c, key, 3), key, 4), key, 5);
    round(round(round(round(c, key, 6), key, 7), key, 8), key, 9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn float_division_with_remainder_follows_python() {
        let cases = [
            (7.0, 3.0, 2.0, 1.0),
            (-7.0, 3.0, -3.0, 2.0),
            (7.0, -3.0, -3.0, -2.0),
            (-7.0, -3.0, 2.0, -1.0),
            (1.0, 0.1, 9.0, 0.09999999999999995),
        ];
        for (a, b, quotient, rest) in cases {
            assert_eq!(
                (float_floor_div(a, b), float_rem(a, b)),
                (quotient, rest),
                "{a} {b}"
            );
        }
        assert_eq!(float_floor_div(-1.0, f64::INFINITY), -1.0);
        assert_eq!(float_rem(-1.0, f64::INFINITY), f64::INFINITY);
        assert_eq!(
            (float_floor_div(1.0, 0.0), float_floor_div(-1.0, 0.0)),
            (f64::INFINITY, f64::NEG_INFINITY)
        );
        assert!(
            float_floor_div(0.0f32, 0.0).is_nan()
                && float_rem(1.0f32, 0.0).is_nan()
                && float_floor_div(f64::INFINITY, 1.0).is_nan()
        );
        assert!(
            float_rem(6f64, -3.0).is_sign_negative()
                && float_floor_div(-0f64, 2.0).is_sign_negative()
        );
    }

    #[test]
    fn integer_division_rounds_down_and_wraps() {
        assert_eq!((int_floor_div(-7, 2), int_floor_rem(-7, 2)), (-4, 1));
        assert_eq!((int_floor_div(7, -2), int_floor_rem(7, -2)), (-4, -1));
        assert_eq!((int_floor_div(-8i64, 2), int_floor_rem(-8i64, 2)), (-4, 0));
        assert_eq!(
            (int_floor_div(i32::MIN, -1), int_floor_rem(i32::MIN, -1)),
            (i32::MIN, 0)
        );
        assert_eq!((int_floor_div(7u32, 2), int_floor_rem(7u32, 2)), (3, 1));
    }

    #[test]
    fn integer_powers_wrap_and_truncate() {
        assert_eq!(
            (int_pow(3, 4), int_pow(-2, 3), int_pow(5, 0), int_pow(0, 0)),
            (81, -8, 1, 1)
        );
        assert_eq!(
            (
                int_pow(2, -1),
                int_pow(1, -5),
                int_pow(-1, -5),
                int_pow(-1, -4),
                int_pow(0, -1)
            ),
            (0, 1, -1, 1, 0)
        );
        assert_eq!(int_pow(3u32, 40), 3u32.wrapping_pow(40));
    }

    #[test]
    fn shifts_past_the_width_leave_only_the_sign() {
        assert_eq!(
            (int_shl(1, 31), int_shl(1, 32), int_shl(1, -1)),
            (i32::MIN, 0, 0)
        );
        assert_eq!(
            (
                int_shr(-8, 1),
                int_shr(-8, 40),
                int_shr(8, -1),
                int_shr(u32::MAX, 32)
            ),
            (-4, -1, 0, 0)
        );
        assert_eq!(int_shr(-1i64, 63), -1);
    }

    #[test]
    fn extremes_propagate_or_ignore_nan_as_named() {
        let nan = f32::NAN;
        assert!(
            max(nan, 1.0).is_nan()
                && max(1.0, nan).is_nan()
                && min(nan, 1.0).is_nan()
                && min(1.0, nan).is_nan()
        );
        assert_eq!(
            (
                fmax(nan, 1.0),
                fmax(1.0, nan),
                fmin(nan, 1.0),
                fmin(1.0, nan)
            ),
            (1.0, 1.0, 1.0, 1.0)
        );
        assert!(fmax(nan, nan).is_nan() && sign(nan).is_nan());
    }
}
