//! Element types by all their names, and conversion between the float types.

use anymesh_core::{DType, F8E4M3, F8E5M2, bf16, f16};

/// An element type by our name (`bf16`), or the one that NumPy, Paddle, PyTorch or safetensors use.
pub fn dtype_by_name(name: &str) -> Option<DType> {
    let name = name.to_ascii_lowercase();
    let name = ["paddle.", "torch.", "numpy.", "np."].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(&name);
    Some(match name {
        "bool_" => DType::Bool,
        "uint8" => DType::U8,
        "uint32" => DType::U32,
        "int32" | "int" => DType::I32,
        "int64" | "long" => DType::I64,
        "float8_e4m3fn" | "float8_e4m3" | "f8_e4m3" => DType::F8E4M3,
        "float8_e5m2" | "f8_e5m2" => DType::F8E5M2,
        "float16" | "half" => DType::F16,
        "bfloat16" => DType::BF16,
        "float32" | "float" => DType::F32,
        "float64" | "double" => DType::F64,
        ours => return ours.parse().ok(),
    })
}

/// Converts stored elements from one float type to another, rounding once, to nearest even. What is too large becomes what the type has for it: infinity, and NaN
/// in `f8e4m3`.
///
/// `None` where one of them is no float type.
pub(super) fn cast(bytes: &[u8], from: DType, to: DType) -> Option<Vec<u8>> {
    if from == to {
        return Some(bytes.to_vec());
    }
    let narrow: fn(f32, &mut Vec<u8>) = match to {
        DType::F8E4M3 => |x, out| out.push(F8E4M3::from_f32(x).0),
        DType::F8E5M2 => |x, out| out.push(F8E5M2::from_f32(x).0),
        DType::F16 => |x, out| out.extend(f16::from_f32(x).to_le_bytes()),
        DType::BF16 => |x, out| out.extend(bf16::from_f32(x).to_le_bytes()),
        DType::F32 => |x, out| out.extend(x.to_le_bytes()),
        DType::F64 => |x, out| out.extend(f64::from(x).to_le_bytes()),
        _ => return None,
    };
    let mut out = Vec::with_capacity(bytes.len() / from.size() * to.size());
    let mut two = |widen: fn([u8; 2]) -> f32| bytes.chunks_exact(2).for_each(|b| narrow(widen([b[0], b[1]]), &mut out));
    match from {
        DType::F16 => two(|b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => two(|b| bf16::from_le_bytes(b).to_f32()),
        DType::F8E4M3 => bytes.iter().for_each(|b| narrow(F8E4M3(*b).to_f32(), &mut out)),
        DType::F8E5M2 => bytes.iter().for_each(|b| narrow(F8E5M2(*b).to_f32(), &mut out)),
        DType::F32 => bytes.chunks_exact(4).for_each(|b| narrow(f32::from_le_bytes([b[0], b[1], b[2], b[3]]), &mut out)),
        DType::F64 => {
            // To f32 it is the last rounding, below that the first of two.
            let step: fn(f64) -> f32 = if to == DType::F32 { |x| x as f32 } else { round_to_odd };
            bytes.chunks_exact(8).for_each(|b| narrow(step(f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])), &mut out));
        }
        _ => return None,
    }
    Some(out)
}

/// The neighbour in `f32` whose last bit is set where `x` lies between two: a second rounding to far fewer bits then gives what one rounding would.
fn round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let towards_zero = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(towards_zero | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_double_rounds_once() {
        // Just above the middle of two halves: rounding to f32 first would land on the middle, and then on the even one below.
        let x = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        let half = |x: f64| cast(&x.to_le_bytes(), DType::F64, DType::F16).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f64());
        assert_eq!(half(x), Some(1.0 + 2f64.powi(-10)));
        assert_eq!(half(1.0 + 2f64.powi(-11)), Some(1.0));
        assert_eq!(half(-x), Some(-1.0 - 2f64.powi(-10)));
        assert_eq!(half(1e300), Some(f64::INFINITY));
        assert_eq!(half(-1e-300).map(f64::to_bits), Some((-0.0f64).to_bits()));
        assert!(half(f64::NAN).is_some_and(f64::is_nan));
    }

    #[test]
    fn every_small_float_survives_a_wider_type() {
        for (small, wide) in [(DType::F16, DType::F64), (DType::BF16, DType::F32), (DType::BF16, DType::F64), (DType::F16, DType::F32)] {
            let all: Vec<u8> = (0..=u16::MAX).filter(|b| !f16::from_bits(*b).is_nan() && !bf16::from_bits(*b).is_nan()).flat_map(u16::to_le_bytes).collect();
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
    fn types_have_the_names_of_others_too() {
        for (name, dtype) in
            [("bf16", DType::BF16), ("bfloat16", DType::BF16), ("paddle.float32", DType::F32), ("torch.float8_e4m3fn", DType::F8E4M3), ("F64", DType::F64)]
        {
            assert_eq!(dtype_by_name(name), Some(dtype), "{name}");
        }
        assert_eq!(dtype_by_name("float33"), None);
    }
}
