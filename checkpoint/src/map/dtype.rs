//! Element types by all their names.

use anymesh_core::DType;

/// An element type by our name (`bf16`), or the one that NumPy, Paddle, PyTorch or safetensors use:
/// `bfloat16`, `paddle.float32`, `VarType.FP16`, `torch.half`, `F8_E4M3`.
pub fn dtype_by_name(name: &str) -> Option<DType> {
    let name = name.to_ascii_lowercase();
    // The module or the class it is in: `paddle.`, `paddle.base.core.DataType.`, `torch.`, `np.`.
    let name = name.rsplit('.').next().unwrap_or(&name);
    Some(match name {
        "bool_" => DType::Bool,
        "uint8" => DType::U8,
        "uint32" => DType::U32,
        "int32" | "int" => DType::I32,
        "int64" | "long" => DType::I64,
        "float8_e4m3fn" | "float8_e4m3" | "f8_e4m3" | "fp8_e4m3fn" => DType::F8E4M3,
        "float8_e5m2" | "f8_e5m2" | "fp8_e5m2" => DType::F8E5M2,
        "float16" | "half" | "fp16" => DType::F16,
        "bfloat16" => DType::BF16,
        "float32" | "float" | "fp32" => DType::F32,
        "float64" | "double" | "fp64" => DType::F64,
        ours => return ours.parse().ok(),
    })
}

/// Why a name is no element type that can be cast to.
pub(super) fn unknown_dtype(name: &str) -> String {
    let all = DType::ALL.map(DType::name).join(", ");
    if name.to_ascii_lowercase().ends_with("uint16") {
        // Paddle keeps bf16 in arrays of NumPy, which has no such type, as uint16.
        return format!(
            "'{name}' is how Paddle calls bfloat16 in NumPy arrays, and an integer type elsewhere: write bfloat16; there are {all}"
        );
    }
    format!(
        "'{name}' is no element type here; there are {all}, also by their names in Paddle, PyTorch and NumPy"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_names_of_others_too() {
        for (name, dtype) in [
            ("bf16", DType::BF16),
            ("bfloat16", DType::BF16),
            ("torch.float8_e4m3fn", DType::F8E4M3),
            ("F64", DType::F64),
            ("numpy.bool_", DType::Bool),
        ] {
            assert_eq!(dtype_by_name(name), Some(dtype), "{name}");
        }
        assert_eq!(dtype_by_name("float33"), None);
    }

    #[test]
    fn every_spelling_of_paddle_is_read_for_the_types_that_there_are() {
        // As `paddle.cast` takes them, as they print, and as the two enumerations name them.
        for (name, in_proto, in_pir, dtype) in [
            ("bool", "BOOL", "BOOL", DType::Bool),
            ("uint8", "UINT8", "UINT8", DType::U8),
            ("int32", "INT32", "INT32", DType::I32),
            ("int64", "INT64", "INT64", DType::I64),
            (
                "float8_e4m3fn",
                "FP8_E4M3FN",
                "FLOAT8_E4M3FN",
                DType::F8E4M3,
            ),
            ("float8_e5m2", "FP8_E5M2", "FLOAT8_E5M2", DType::F8E5M2),
            ("float16", "FP16", "FLOAT16", DType::F16),
            ("bfloat16", "BF16", "BFLOAT16", DType::BF16),
            ("float32", "FP32", "FLOAT32", DType::F32),
            ("float64", "FP64", "FLOAT64", DType::F64),
        ] {
            for spelling in [
                name.to_string(),
                format!("paddle.{name}"),
                format!("VarType.{in_proto}"),
                format!("paddle.base.core.DataType.{in_pir}"),
            ] {
                assert_eq!(dtype_by_name(&spelling), Some(dtype), "{spelling}");
            }
        }
        for name in ["int8", "int16", "complex64", "paddle.complex128", "uint16"] {
            assert_eq!(dtype_by_name(name), None, "{name}");
            assert!(unknown_dtype(name).contains(name), "{name}");
        }
        assert!(unknown_dtype("uint16").contains("write bfloat16"));
    }
}
