//! Element types by all their names.

use anymesh_core::DType;

/// An element type by our name (`bf16`), or the one that NumPy, Paddle, PyTorch or safetensors use.
pub fn dtype_by_name(name: &str) -> Option<DType> {
    let name = name.to_ascii_lowercase();
    let name = ["paddle.", "torch.", "numpy.", "np."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(&name);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_names_of_others_too() {
        for (name, dtype) in [
            ("bf16", DType::BF16),
            ("bfloat16", DType::BF16),
            ("paddle.float32", DType::F32),
            ("torch.float8_e4m3fn", DType::F8E4M3),
            ("F64", DType::F64),
        ] {
            assert_eq!(dtype_by_name(name), Some(dtype), "{name}");
        }
        assert_eq!(dtype_by_name("float33"), None);
    }
}
