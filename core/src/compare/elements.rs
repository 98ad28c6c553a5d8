//! Stored elements as numbers and back.

use crate::{DType, F8E4M3, F8E5M2, Reduction, bf16, f16};

/// The bytes of element `i`, as an array.
fn bytes<const N: usize>(data: &[u8], i: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&data[i * N..][..N]);
    out
}

/// Element `i` as a number; integers beyond 2^53 are rounded.
pub(super) fn number(dtype: DType, data: &[u8], i: usize) -> f64 {
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes(data, i)).into(),
        DType::F64 => f64::from_le_bytes(bytes(data, i)),
        DType::F16 => f16::from_le_bytes(bytes(data, i)).into(),
        DType::BF16 => bf16::from_le_bytes(bytes(data, i)).into(),
        DType::F8E4M3 => bytemuck::cast::<u8, F8E4M3>(data[i]).to_f32().into(),
        DType::F8E5M2 => bytemuck::cast::<u8, F8E5M2>(data[i]).to_f32().into(),
        _ => integer(dtype, data, i) as f64,
    }
}

/// Element `i` of integers and bools.
fn integer(dtype: DType, data: &[u8], i: usize) -> i64 {
    match dtype {
        DType::U32 => u32::from_le_bytes(bytes(data, i)).into(),
        DType::I32 => i32::from_le_bytes(bytes(data, i)).into(),
        DType::I64 => i64::from_le_bytes(bytes(data, i)),
        DType::Bool => (data[i] != 0).into(),
        _ => data[i].into(),
    }
}

/// Appends a float as an element.
fn push_number(dtype: DType, value: f64, out: &mut Vec<u8>) {
    match dtype {
        DType::F64 => out.extend(value.to_le_bytes()),
        DType::F16 => out.extend(f16::from_f64(value).to_le_bytes()),
        DType::BF16 => out.extend(bf16::from_f64(value).to_le_bytes()),
        DType::F8E4M3 => out.push(bytemuck::cast(F8E4M3::from_f32(value as f32))),
        DType::F8E5M2 => out.push(bytemuck::cast(F8E5M2::from_f32(value as f32))),
        _ => out.extend((value as f32).to_le_bytes()),
    }
}

/// Appends an integer as an element; it wraps.
fn push_integer(dtype: DType, value: i64, out: &mut Vec<u8>) {
    match dtype {
        DType::I64 => out.extend(value.to_le_bytes()),
        DType::U32 | DType::I32 => out.extend((value as u32).to_le_bytes()),
        DType::Bool => out.push((value != 0).into()),
        _ => out.push(value as u8),
    }
}

/// What the terms of a value that is partial make together, element by element: added up in f64, so
/// that the order of ranks does not matter, and rounded once.
pub(super) fn combined(dtype: DType, reduction: Reduction, terms: &[Vec<u8>]) -> Vec<u8> {
    let Some(first) = terms.first() else {
        return Vec::new();
    };
    let mut out = Vec::with_capacity(first.len());
    for i in 0..first.len() / dtype.size() {
        if dtype.is_float() {
            let terms = terms.iter().map(|t| number(dtype, t, i));
            let value = terms.reduce(|a, b| match reduction {
                Reduction::Sum => a + b,
                Reduction::Prod => a * b,
                // NaN wins, as it does in the kernels.
                Reduction::Max | Reduction::Or if a.is_nan() || a > b => a,
                Reduction::Min | Reduction::And if a.is_nan() || a < b => a,
                _ => b,
            });
            push_number(dtype, value.unwrap_or(0.0), &mut out);
        } else {
            let terms = terms.iter().map(|t| integer(dtype, t, i));
            let value = terms.reduce(|a, b| match reduction {
                Reduction::Sum if dtype == DType::Bool => a | b,
                Reduction::Sum => a.wrapping_add(b),
                Reduction::Prod => a.wrapping_mul(b),
                Reduction::Max => a.max(b),
                Reduction::Min => a.min(b),
                Reduction::And => i64::from(a != 0 && b != 0),
                Reduction::Or => i64::from(a != 0 || b != 0),
            });
            push_integer(dtype, value.unwrap_or(0), &mut out);
        }
    }
    out
}

/// A hash of stored bytes, the same on every machine.
pub(super) fn hash(data: &[u8]) -> u64 {
    const K: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |h: u64, word: u64| (h ^ word).wrapping_mul(K).rotate_left(29);
    let words = data.chunks_exact(8);
    let mut last = [0; 8];
    last[..words.remainder().len()].copy_from_slice(words.remainder());
    let h = words.fold(data.len() as u64, |h, word| {
        mix(h, u64::from_le_bytes(bytes(word, 0)))
    });
    let h = mix(h, u64::from_le_bytes(last));
    let h = (h ^ (h >> 32)).wrapping_mul(K);
    h ^ (h >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_in_every_dtype() {
        for dtype in DType::ALL {
            for value in [0.0, 1.0] {
                let mut data = vec![];
                if dtype.is_float() {
                    push_number(dtype, value, &mut data);
                } else {
                    push_integer(dtype, value as i64, &mut data);
                }
                assert_eq!(data.len(), dtype.size(), "{dtype}");
                assert_eq!(number(dtype, &data, 0), value, "{dtype}");
            }
        }
    }

    #[test]
    fn terms_are_combined_as_their_reduction_says() {
        let of = |x: f32| x.to_le_bytes().to_vec();
        let all = [of(3.0), of(-2.0), of(5.0)];
        let value = |r| number(DType::F32, &combined(DType::F32, r, &all), 0);
        assert_eq!(value(Reduction::Sum), 6.0);
        assert_eq!(value(Reduction::Prod), -30.0);
        assert_eq!(value(Reduction::Max), 5.0);
        assert_eq!(value(Reduction::Min), -2.0);
        let with_nan = [of(3.0), of(f32::NAN), of(5.0)];
        let value = combined(DType::F32, Reduction::Max, &with_nan);
        assert!(number(DType::F32, &value, 0).is_nan());
        let bools = combined(DType::Bool, Reduction::And, &[vec![1, 0], vec![1, 1]]);
        assert_eq!(bools, [1, 0]);
    }

    #[test]
    fn a_hash_sees_every_byte_and_the_length() {
        let data: Vec<u8> = (0..37).collect();
        for i in 0..data.len() {
            let mut other = data.clone();
            other[i] ^= 1;
            assert_ne!(hash(&data), hash(&other), "byte {i}");
        }
        assert_ne!(hash(&[0; 8]), hash(&[0; 9]));
        assert_ne!(hash(&[]), hash(&[0]));
    }
}
