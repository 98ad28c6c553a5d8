//! Stored elements as numbers and back: the one place that knows how each type is encoded.

use anymesh_core::{DType, F8E4M3, F8E5M2, bf16, f16};

/// Calls `each` with every element of a float type as `f32`; those of `f64` go through `narrow`
/// first. `false`, and nothing, where it is no float type.
fn widen(bytes: &[u8], dtype: DType, narrow: fn(f64) -> f32, mut each: impl FnMut(f32)) -> bool {
    // A loop for each type, so that the choice is not made for every element.
    match dtype {
        DType::F8E4M3 => bytes.iter().for_each(|b| each(F8E4M3(*b).to_f32())),
        DType::F8E5M2 => bytes.iter().for_each(|b| each(F8E5M2(*b).to_f32())),
        DType::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .for_each(|b| each(f16::from_le_bytes(*b).to_f32())),
        DType::BF16 => bytes
            .as_chunks()
            .0
            .iter()
            .for_each(|b| each(bf16::from_le_bytes(*b).to_f32())),
        DType::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .for_each(|b| each(f32::from_le_bytes(*b))),
        DType::F64 => bytes
            .as_chunks()
            .0
            .iter()
            .for_each(|b| each(narrow(f64::from_le_bytes(*b)))),
        DType::I64 | DType::I32 | DType::U32 | DType::U8 | DType::Bool => return false,
    }
    true
}

/// Stored floats as `f32`; empty for other types.
pub(crate) fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let mut out = Vec::with_capacity(bytes.len() / dtype.size());
    widen(bytes, dtype, |x| x as f32, |x| out.push(x));
    out
}

/// A stored element as a number; integers past 2^53 are rounded. `bytes` are those of one element.
///
/// ```
/// # use anymesh_checkpoint::number;
/// # use anymesh_core::DType;
/// assert_eq!(number(&[0x80, 0x3f], DType::BF16), 1.0);
/// assert_eq!(number(&[0xff; 8], DType::I64), -1.0);
/// ```
pub fn number(bytes: &[u8], dtype: DType) -> f64 {
    let mut word = [0; 8];
    word.iter_mut()
        .zip(&bytes[..bytes.len().min(dtype.size())])
        .for_each(|(to, from)| *to = *from);
    let word = u64::from_le_bytes(word);
    match dtype {
        DType::F64 => f64::from_bits(word),
        DType::I64 => word as i64 as f64,
        DType::I32 => f64::from(word as u32 as i32),
        DType::U32 | DType::U8 | DType::Bool => word as f64,
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => {
            let mut out = f32::NAN;
            widen(bytes, dtype, |x| x as f32, |x| out = x);
            out.into()
        }
    }
}

/// Writes an `f32` as an element of a float type, rounded to nearest even. `out` is one element
/// long.
pub(crate) fn store(x: f32, dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F8E4M3 => out.copy_from_slice(&[F8E4M3::from_f32(x).0]),
        DType::F8E5M2 => out.copy_from_slice(&[F8E5M2::from_f32(x).0]),
        DType::F16 => out.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        DType::BF16 => out.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        DType::F64 => out.copy_from_slice(&f64::from(x).to_le_bytes()),
        _ => out.copy_from_slice(&x.to_le_bytes()),
    }
}

/// Converts stored elements from one float type to another, rounding once, to nearest even. What is
/// too large becomes what the type has for it: infinity, and NaN in `f8e4m3`.
///
/// `None` where one of them is no float type.
pub(crate) fn cast(bytes: &[u8], from: DType, to: DType) -> Option<Vec<u8>> {
    if from == to {
        return Some(bytes.to_vec());
    }
    // To f32 it is the last rounding, below that the first of two.
    let narrow: fn(f64) -> f32 = if to == DType::F32 {
        |x| x as f32
    } else {
        round_to_odd
    };
    let mut out = Vec::with_capacity(bytes.len() / from.size() * to.size());
    let floats = match to {
        DType::F8E4M3 => widen(bytes, from, narrow, |x| out.push(F8E4M3::from_f32(x).0)),
        DType::F8E5M2 => widen(bytes, from, narrow, |x| out.push(F8E5M2::from_f32(x).0)),
        DType::F16 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&f16::from_f32(x).to_le_bytes())
        }),
        DType::BF16 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&bf16::from_f32(x).to_le_bytes())
        }),
        DType::F32 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&x.to_le_bytes())
        }),
        DType::F64 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&f64::from(x).to_le_bytes())
        }),
        DType::I64 | DType::I32 | DType::U32 | DType::U8 | DType::Bool => false,
    };
    floats.then_some(out)
}

/// The neighbour in `f32` whose last bit is set where `x` lies between two: a second rounding to
/// far fewer bits then gives what one rounding would.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let towards_zero = if f64::from(near).abs() > x.abs() {
        near.to_bits() - 1
    } else {
        near.to_bits()
    };
    f32::from_bits(towards_zero | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_double_rounds_once() {
        // Just above the middle of two halves: rounding to f32 first would land on the middle, and
        // then on the even one below.
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        let half = |x: f64| {
            cast(&x.to_le_bytes(), DType::F64, DType::F16)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64())
        };
        assert_eq!(half(x), Some(1.0 + 2f64.powi(-10)));
        assert_eq!(half(1.0 + 2f64.powi(-11)), Some(1.0));
        assert_eq!(half(-x), Some(-1.0 - 2f64.powi(-10)));
        assert_eq!(half(1e300), Some(f64::INFINITY));
        assert_eq!(half(-1e-300).map(f64::to_bits), Some((-0.0f64).to_bits()));
        assert!(half(f64::NAN).is_some_and(f64::is_nan));
    }

    #[test]
    fn every_small_float_survives_a_wider_type() {
        for (small, wide) in [
            (DType::F16, DType::F64),
            (DType::BF16, DType::F32),
            (DType::BF16, DType::F64),
            (DType::F16, DType::F32),
        ] {
            let all: Vec<u8> = (0..=u16::MAX)
                .filter(|b| !f16::from_bits(*b).is_nan() && !bf16::from_bits(*b).is_nan())
                .flat_map(u16::to_le_bytes)
                .collect();
            let back = cast(&all, small, wide).and_then(|there| cast(&there, wide, small));
            assert_eq!(back.as_deref(), Some(&all[..]), "{small} through {wide}");
        }
        for small in [DType::F8E4M3, DType::F8E5M2] {
            let all: Vec<u8> = (0..=255u8).filter(|b| b & 0x7f < 0x7d).collect();
            for wide in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                let back = cast(&all, small, wide).and_then(|there| cast(&there, wide, small));
                assert_eq!(back.as_deref(), Some(&all[..]), "{small} through {wide}");
            }
        }
        assert_eq!(cast(&[1, 0, 0, 0], DType::I32, DType::F32), None);
        assert_eq!(cast(&[1, 0, 0, 0], DType::F32, DType::I32), None);
    }

    #[test]
    fn every_type_is_read_as_the_number_it_holds() {
        let cases: [(DType, &[u8], f64); 11] = [
            (DType::F64, &1.5f64.to_le_bytes(), 1.5),
            (DType::F32, &(-2.25f32).to_le_bytes(), -2.25),
            (DType::F16, &f16::from_f32(0.5).to_le_bytes(), 0.5),
            (DType::BF16, &bf16::from_f32(3.0).to_le_bytes(), 3.0),
            (DType::F8E4M3, &[F8E4M3::from_f32(1.75).0], 1.75),
            (DType::F8E5M2, &[F8E5M2::from_f32(-1.5).0], -1.5),
            (DType::I64, &(-7i64).to_le_bytes(), -7.0),
            (DType::I32, &(-8i32).to_le_bytes(), -8.0),
            (DType::U32, &u32::MAX.to_le_bytes(), 4294967295.0),
            (DType::U8, &[200], 200.0),
            (DType::Bool, &[1], 1.0),
        ];
        for (dtype, bytes, expected) in cases {
            assert_eq!(number(bytes, dtype), expected, "{dtype}");
            if dtype.is_float() {
                assert_eq!(floats(bytes, dtype), [expected as f32], "{dtype}");
                let mut back = vec![0; dtype.size()];
                store(expected as f32, dtype, &mut back);
                assert_eq!(back, bytes, "{dtype}");
            } else {
                assert!(floats(bytes, dtype).is_empty(), "{dtype}");
            }
        }
    }
}
