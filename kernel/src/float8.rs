//! The two 8-bit float formats: conversion to and from `f32`.
//!
//! `F8E4M3` is the "fn" form (no infinities, one NaN per sign, largest finite value 448); `F8E5M2`
//! follows IEEE rules (largest finite value 57344, then infinity). Conversions round to nearest,
//! ties to even, and every code comes back from `f32` as it was, NaNs included.

/// 8-bit float with 4 exponent and 3 mantissa bits. Overflow becomes NaN.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// 8-bit float with 5 exponent and 2 mantissa bits. Overflow becomes infinity.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

/// Rounds `|x|` to a small float with `mantissa` bits and smallest normal exponent `min_exp`; the
/// exponent field is allowed to run past the format's maximum, so that the caller decides what
/// overflow means.
fn round_magnitude(x: f32, mantissa: u32, min_exp: i32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    let exp = (bits >> 23) as i32 - 127;
    // Below the smallest normal number the spacing is fixed: shift the (explicit) mantissa down
    // further.
    let (significand, shift) = if exp < min_exp {
        (
            (bits & 0x7f_ffff) | 0x80_0000,
            23 - mantissa as i32 + (min_exp - exp),
        )
    } else {
        (
            (((exp - min_exp + 1) as u32) << 23) | (bits & 0x7f_ffff),
            23 - mantissa as i32,
        )
    };
    if shift >= 32 {
        return 0;
    }
    let shift = shift as u32;
    let half = 1u64 << (shift - 1);
    let odd = u64::from(significand >> shift) & 1;
    ((u64::from(significand) + half - 1 + odd) >> shift) as u32
}

fn expand(code: u8, mantissa: u32, min_exp: i32) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let exp = magnitude >> mantissa;
    let frac = magnitude & ((1 << mantissa) - 1);
    let unit = 2f32.powi(min_exp - mantissa as i32);
    let value = if exp == 0 {
        frac as f32 * unit
    } else {
        ((1 << mantissa) + frac) as f32 * unit * 2f32.powi(exp as i32 - 1)
    };
    if code & 0x80 != 0 { -value } else { value }
}

impl F8E4M3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// Rounds to nearest even; values that round past 448 and NaN become NaN.
    pub fn from_f32(x: f32) -> Self {
        let sign = ((x.to_bits() >> 24) & 0x80) as u8;
        if x.is_nan() {
            return Self(sign | 0x7f);
        }
        let code = if x.is_infinite() {
            0x7f
        } else {
            round_magnitude(x, 3, -6).min(0x7f)
        };
        Self(sign | code as u8)
    }

    /// Like [`from_f32`](Self::from_f32) but clamps to the largest finite value.
    pub fn saturating_from_f32(x: f32) -> Self {
        Self::from_f32(if x.is_nan() {
            x
        } else {
            x.clamp(-Self::MAX, Self::MAX)
        })
    }

    /// The exact value; a NaN keeps its sign.
    pub fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            f32::NAN.copysign(f32::from(self.0 as i8))
        } else {
            expand(self.0, 3, -6)
        }
    }
}

impl F8E5M2 {
    /// The largest finite value.
    pub const MAX: f32 = 57344.0;

    /// Rounds to nearest even; values that round past 57344 become infinity. A NaN keeps the front
    /// of its payload, and is quiet where that is nothing.
    pub fn from_f32(x: f32) -> Self {
        let sign = ((x.to_bits() >> 24) & 0x80) as u8;
        if x.is_nan() {
            let payload = (x.to_bits() >> 21 & 3) as u8;
            return Self(sign | 0x7c | if payload == 0 { 2 } else { payload });
        }
        let code = if x.is_infinite() {
            0x7c
        } else {
            round_magnitude(x, 2, -14).min(0x7c)
        };
        Self(sign | code as u8)
    }

    /// Like [`from_f32`](Self::from_f32) but clamps to the largest finite value.
    pub fn saturating_from_f32(x: f32) -> Self {
        Self::from_f32(if x.is_nan() {
            x
        } else {
            x.clamp(-Self::MAX, Self::MAX)
        })
    }

    /// The exact value; a NaN keeps its sign and payload.
    pub fn to_f32(self) -> f32 {
        let (sign, magnitude) = (u32::from(self.0 & 0x80) << 24, u32::from(self.0 & 0x7f));
        // Infinity and NaN, with the fraction in front.
        if magnitude >= 0x7c {
            f32::from_bits(sign | 0x7f80_0000 | (magnitude & 3) << 21)
        } else {
            expand(self.0, 2, -14)
        }
    }
}

impl std::fmt::Debug for F8E4M3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_f32())
    }
}

impl std::fmt::Debug for F8E5M2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_f32())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..=255u8 {
            let (a, b) = (F8E4M3(code), F8E5M2(code));
            assert_eq!(
                (a.to_f32().is_nan(), b.to_f32().is_nan()),
                (code & 0x7f == 0x7f, code & 0x7f > 0x7c),
                "{code:#x}"
            );
            assert_eq!(
                (
                    F8E4M3::from_f32(a.to_f32()).0,
                    F8E5M2::from_f32(b.to_f32()).0
                ),
                (code, code),
                "{code:#x}"
            );
        }
        assert_eq!(
            F8E5M2::from_f32(f32::from_bits(0xff80_0001)).0,
            0xfe,
            "a payload that is lost leaves a NaN"
        );
    }

    #[test]
    fn rounding_picks_the_nearest_code_and_ties_go_to_even() {
        let finite: Vec<f32> = (0..0x7f).map(|c| F8E4M3(c).to_f32()).collect();
        for pair in finite.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            let below = F8E4M3::from_f32(f32::from_bits(middle.to_bits() - 1)).to_f32();
            let above = F8E4M3::from_f32(f32::from_bits(middle.to_bits() + 1)).to_f32();
            assert_eq!((below, above), (pair[0], pair[1]));
            assert_eq!(F8E4M3::from_f32(middle).0 & 1, 0, "{middle}");
        }
    }

    #[test]
    fn overflow_follows_the_format() {
        assert!(F8E4M3::from_f32(465.0).to_f32().is_nan());
        assert_eq!(F8E4M3::from_f32(464.0).to_f32(), 448.0);
        assert_eq!(F8E4M3::saturating_from_f32(1e9).to_f32(), 448.0);
        assert_eq!(F8E5M2::from_f32(61440.0).to_f32(), f32::INFINITY);
        assert_eq!(F8E5M2::from_f32(61439.0).to_f32(), 57344.0);
        assert_eq!(
            F8E5M2::saturating_from_f32(f32::NEG_INFINITY).to_f32(),
            -57344.0
        );
    }
}
