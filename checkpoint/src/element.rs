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
    let word = word(bytes, dtype);
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

/// The bits of one stored element.
fn word(bytes: &[u8], dtype: DType) -> u64 {
    let mut word = [0; 8];
    word.iter_mut()
        .zip(&bytes[..bytes.len().min(dtype.size())])
        .for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
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

/// Converts stored elements to another type, as [`Tensor::cast`](anymesh_core::Tensor::cast) does.
///
/// To floats: rounds once, to nearest even; what is too large becomes what the type has for it,
/// infinity or (in `f8e4m3`) NaN. From floats to integers: cut off towards zero, ends at the
/// largest and the smallest integer, NaN is 0. Between integers: wraps around. To bool: anything
/// but zero is true, NaN too. From bool: 0 and 1.
pub(crate) fn cast(bytes: &[u8], from: DType, to: DType) -> Vec<u8> {
    if from == to {
        return bytes.to_vec();
    }
    let mut out = Vec::with_capacity(bytes.len() / from.size() * to.size());
    match (from.is_float(), to.is_float()) {
        (true, true) => float_to_float(bytes, from, to, &mut out),
        (true, false) => bytes
            .chunks_exact(from.size())
            .for_each(|element| float_to_integer(number(element, from), to, &mut out)),
        (false, true) => bytes
            .chunks_exact(from.size())
            .for_each(|element| integer_to_float(integer(element, from), to, &mut out)),
        (false, false) => bytes
            .chunks_exact(from.size())
            .for_each(|element| store_integer(integer(element, from), to, &mut out)),
    }
    out
}

fn float_to_float(bytes: &[u8], from: DType, to: DType, out: &mut Vec<u8>) {
    // To f32 it is the last rounding, below that the first of two.
    let narrow: fn(f64) -> f32 = if to == DType::F32 {
        |x| x as f32
    } else {
        round_to_odd
    };
    // A loop for each type, so that the choice is not made for every element.
    match to {
        DType::F8E4M3 => widen(bytes, from, narrow, |x| out.push(F8E4M3::from_f32(x).0)),
        DType::F8E5M2 => widen(bytes, from, narrow, |x| out.push(F8E5M2::from_f32(x).0)),
        DType::F16 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&f16::from_f32(x).to_le_bytes())
        }),
        DType::BF16 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&bf16::from_f32(x).to_le_bytes())
        }),
        DType::F64 => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&f64::from(x).to_le_bytes())
        }),
        _ => widen(bytes, from, narrow, |x| {
            out.extend_from_slice(&x.to_le_bytes())
        }),
    };
}

/// A stored integer or logical value.
fn integer(bytes: &[u8], dtype: DType) -> i64 {
    let word = word(bytes, dtype);
    match dtype {
        DType::Bool => i64::from(word != 0),
        DType::I32 => i64::from(word as u32 as i32),
        _ => word as i64,
    }
}

fn store_integer(i: i64, to: DType, out: &mut Vec<u8>) {
    match to {
        DType::Bool => out.push(u8::from(i != 0)),
        DType::U8 => out.push(i as u8),
        DType::U32 => out.extend_from_slice(&(i as u32).to_le_bytes()),
        DType::I32 => out.extend_from_slice(&(i as i32).to_le_bytes()),
        _ => out.extend_from_slice(&i.to_le_bytes()),
    }
}

fn integer_to_float(i: i64, to: DType, out: &mut Vec<u8>) {
    match to {
        DType::F64 => out.extend_from_slice(&(i as f64).to_le_bytes()),
        DType::F32 => out.extend_from_slice(&(i as f32).to_le_bytes()),
        _ => {
            let at = out.len();
            out.resize(at + to.size(), 0);
            let near = i as f32;
            let (exact, rounded) = (i128::from(i), near as i128);
            store(
                odd_neighbour(near, rounded == exact, rounded.abs() > exact.abs()),
                to,
                &mut out[at..],
            );
        }
    }
}

fn float_to_integer(x: f64, to: DType, out: &mut Vec<u8>) {
    match to {
        DType::Bool => out.push(u8::from(x != 0.0)),
        DType::U8 => out.push(x as u8),
        DType::U32 => out.extend_from_slice(&(x as u32).to_le_bytes()),
        DType::I32 => out.extend_from_slice(&(x as i32).to_le_bytes()),
        _ => out.extend_from_slice(&(x as i64).to_le_bytes()),
    }
}

/// A double as the odd one of its neighbours in `f32`.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let wide = f64::from(near);
    odd_neighbour(near, wide == x || x.is_nan(), wide.abs() > x.abs())
}

/// Of the two neighbours in `f32` of a number, the one whose last bit is set: a second rounding to
/// far fewer bits then gives what one rounding of the number itself would. `near` is the number
/// rounded, which may be `exact`, or else lie `beyond` it, seen from zero.
fn odd_neighbour(near: f32, exact: bool, beyond: bool) -> f32 {
    if exact {
        return near;
    }
    f32::from_bits((near.to_bits() - u32::from(beyond)) | 1)
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
            let bytes = cast(&x.to_le_bytes(), DType::F64, DType::F16);
            f16::from_le_bytes([bytes[0], bytes[1]]).to_f64()
        };
        assert_eq!(half(x), 1.0 + 2f64.powi(-10));
        assert_eq!(half(1.0 + 2f64.powi(-11)), 1.0);
        assert_eq!(half(-x), -1.0 - 2f64.powi(-10));
        assert_eq!(half(1e300), f64::INFINITY);
        assert_eq!(half(-1e-300).to_bits(), (-0.0f64).to_bits());
        assert!(half(f64::NAN).is_nan());
    }

    #[test]
    fn an_integer_rounds_once() {
        let small = |i: i64| {
            let bytes = cast(&i.to_le_bytes(), DType::I64, DType::BF16);
            bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64()
        };
        // Just above the middle of two bf16, by less than an f32 of that size can tell.
        let middle = (1i64 << 40) + (1 << 32);
        assert_eq!(small(middle), (1i64 << 40) as f64);
        assert_eq!(small(middle + 1), ((1i64 << 40) + (1 << 33)) as f64);
        assert_eq!(small(-middle - 1), -((1i64 << 40) + (1 << 33)) as f64);
        assert_eq!(small(i64::MIN), i64::MIN as f64);
        assert_eq!(small(300), 300.0);
    }

    #[test]
    fn numbers_that_do_not_fit_an_integer_end_at_its_bounds_or_wrap_around() {
        let floats = [3.99, -3.99, 300.0, -1.0, 1e30, f32::NEG_INFINITY, f32::NAN];
        let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        let ints = |to: DType| -> Vec<i64> {
            let out = cast(&bytes, DType::F32, to);
            out.chunks_exact(to.size())
                .map(|element| integer(element, to))
                .collect()
        };
        assert_eq!(ints(DType::U8), [3, 0, 255, 0, 255, 0, 0]);
        let (low, high) = (i64::from(i32::MIN), i64::from(i32::MAX));
        assert_eq!(ints(DType::I32), [3, -3, 300, -1, high, low, 0]);
        assert_eq!(ints(DType::I64), [3, -3, 300, -1, i64::MAX, i64::MIN, 0]);
        assert_eq!(ints(DType::Bool), [1, 1, 1, 1, 1, 1, 1]);
        let wide = (1i64 << 40) + 259;
        let to = |dtype| integer(&cast(&wide.to_le_bytes(), DType::I64, dtype), dtype);
        assert_eq!(
            [to(DType::U8), to(DType::U32), to(DType::Bool)],
            [3, 259, 1]
        );
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
            let back = cast(&cast(&all, small, wide), wide, small);
            assert_eq!(back, all, "{small} through {wide}");
        }
        for small in [DType::F8E4M3, DType::F8E5M2] {
            let all: Vec<u8> = (0..=255u8).filter(|b| b & 0x7f < 0x7d).collect();
            for wide in [DType::F16, DType::BF16, DType::F32, DType::F64] {
                let back = cast(&cast(&all, small, wide), wide, small);
                assert_eq!(back, all, "{small} through {wide}");
            }
        }
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
