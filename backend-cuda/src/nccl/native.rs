//! What NCCL can reduce by itself, and with which bits.

use anymesh_kernel::DType;
use cudarc::nccl::sys::{ncclDataType_t as Type, ncclRedOp_t as Op};

/// A way to combine values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Added; of bools, whether any is true.
    Sum,
    /// Multiplied; of bools, whether all are true.
    Prod,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Whether all are not zero.
    And,
    /// Whether any is not zero.
    Or,
}

impl Combine {
    /// Every one.
    pub const ALL: [Self; 6] = [
        Self::Sum,
        Self::Prod,
        Self::Max,
        Self::Min,
        Self::And,
        Self::Or,
    ];
}

/// What NCCL has for a dtype and a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Native {
    /// The same bits in any order.
    Exact(Reduce),
    /// Rounded in NCCL's own order and, where the dtype has 16 bits, at every step instead of once
    /// at the end.
    Rounds(Reduce),
    /// Nothing, for this reason.
    Lacks(&'static str),
}

/// A reduction as NCCL names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reduce {
    pub(super) element: Type,
    pub(super) op: Op,
}

/// Why NCCL's maximum of floats is not used.
const NAN: &str = "NCCL's minimum and maximum may lose a NaN, and order zeros by sign";
const EIGHT_BITS: &str =
    "NCCL has no sums of 8-bit floats before 2.24 and rounds them at every step";
const LOGICAL: &str = "NCCL has no logical reduction of numbers";

/// The table.
///
/// | | sum, prod | max, min | and, or |
/// |---|---|---|---|
/// | bool | exact, as max and min of bytes | exact | exact, as min and max |
/// | u8 u32 i32 i64 | exact, wraps | exact | lacks |
/// | f32 f64 | rounds in its own order | lacks: NaN | lacks |
/// | f16 bf16 | rounds at every step | lacks: NaN | lacks |
/// | 8-bit floats | lacks | lacks | lacks |
pub fn native(dtype: DType, combine: Combine) -> Native {
    let reduce = |element, op| Reduce { element, op };
    let arithmetic = match combine {
        Combine::Sum => Some(Op::ncclSum),
        Combine::Prod => Some(Op::ncclProd),
        _ => None,
    };
    let extreme = match combine {
        Combine::Max => Some(Op::ncclMax),
        Combine::Min => Some(Op::ncclMin),
        _ => None,
    };
    let element = match dtype {
        // A bool is a byte with 0 or 1.
        DType::Bool => {
            let op = match combine {
                Combine::Sum | Combine::Max | Combine::Or => Op::ncclMax,
                Combine::Prod | Combine::Min | Combine::And => Op::ncclMin,
            };
            return Native::Exact(reduce(Type::ncclUint8, op));
        }
        DType::F8E4M3 | DType::F8E5M2 => return Native::Lacks(EIGHT_BITS),
        DType::U8 => Type::ncclUint8,
        DType::U32 => Type::ncclUint32,
        DType::I32 => Type::ncclInt32,
        DType::I64 => Type::ncclInt64,
        DType::F16 => Type::ncclFloat16,
        DType::BF16 => Type::ncclBfloat16,
        DType::F32 => Type::ncclFloat32,
        DType::F64 => Type::ncclFloat64,
    };
    let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    match (arithmetic, extreme) {
        (Some(op), _) if float => Native::Rounds(reduce(element, op)),
        (_, Some(_)) if float => Native::Lacks(NAN),
        (Some(op), _) | (_, Some(op)) => Native::Exact(reduce(element, op)),
        (None, None) => Native::Lacks(LOGICAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_exact_sums_of_floats_round_and_the_rest_is_lacking() {
        let letter = |dtype, combine| match native(dtype, combine) {
            Native::Exact(_) => 'e',
            Native::Rounds(_) => 'r',
            Native::Lacks(_) => '-',
        };
        let row = |dtype| -> String { Combine::ALL.map(|c| letter(dtype, c)).iter().collect() };
        for (dtype, expected) in [
            (DType::Bool, "eeeeee"),
            (DType::U8, "eeee--"),
            (DType::U32, "eeee--"),
            (DType::I32, "eeee--"),
            (DType::I64, "eeee--"),
            (DType::F16, "rr----"),
            (DType::BF16, "rr----"),
            (DType::F32, "rr----"),
            (DType::F64, "rr----"),
            (DType::F8E4M3, "------"),
            (DType::F8E5M2, "------"),
        ] {
            assert_eq!(row(dtype), expected, "{dtype}");
        }
    }

    #[test]
    fn elements_have_the_size_of_their_dtype() {
        let size = |element| match element {
            Type::ncclInt8 | Type::ncclUint8 | Type::ncclFloat8e4m3 | Type::ncclFloat8e5m2 => 1,
            Type::ncclFloat16 | Type::ncclBfloat16 => 2,
            Type::ncclInt32 | Type::ncclUint32 | Type::ncclFloat32 => 4,
            _ => 8,
        };
        for dtype in DType::ALL {
            for combine in Combine::ALL {
                if let Native::Exact(r) | Native::Rounds(r) = native(dtype, combine) {
                    assert_eq!(size(r.element), dtype.size(), "{dtype}");
                }
            }
        }
    }
}
