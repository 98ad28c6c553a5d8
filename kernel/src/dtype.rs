//! Element types, scalars, and the one promotion table.

use crate::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// The element type of a tensor.
///
/// Floats of 16 and 8 bits compute in `f32` and round (to nearest even) when stored, on every
/// backend. What an op on them stores:
///
/// | op | result |
/// |---|---|
/// | elementwise, moves, softmax, norms, attention | the dtype of the operands, [promoted](Self::promote) |
/// | sums, means, variances, vector norms | the dtype of the operand: they go back into the computation that they came from, and would widen it |
/// | products, convolutions | what the factors promote to, which a bias does not widen; `matmul_as` and `matmul_scaled` store another dtype |
/// | losses, with every reduction, and log-sum-exps | `f32` (`f64` for `f64`) |
/// | statistics beside a result, as of batch norm and attention | `f32` (`f64` for `f64`) |
/// | gradients | the dtype of the tensor that they are of |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// Logical values, one byte each.
    Bool,
    /// Unsigned 8-bit integers; arithmetic wraps.
    U8,
    /// Unsigned 32-bit integers; arithmetic wraps.
    U32,
    /// Signed 32-bit integers; arithmetic wraps. The type of every index an op returns.
    I32,
    /// Signed 64-bit integers; arithmetic wraps.
    I64,
    /// 8-bit floats, 4 exponent bits, overflow to NaN.
    F8E4M3,
    /// 8-bit floats, 5 exponent bits, overflow to infinity.
    F8E5M2,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

/// What a value is held as while a kernel computes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Logical value.
    Bool,
    /// `u32`, also for `u8`.
    U32,
    /// `i32`.
    I32,
    /// `i64`.
    I64,
    /// `f32`, also for all smaller floats.
    F32,
    /// `f64`.
    F64,
}

impl Kind {
    /// Whether values of this kind are floats.
    pub fn is_float(self) -> bool {
        matches!(self, Kind::F32 | Kind::F64)
    }

    /// The dtype that stores this kind without loss.
    pub fn dtype(self) -> DType {
        match self {
            Kind::Bool => DType::Bool,
            Kind::U32 => DType::U32,
            Kind::I32 => DType::I32,
            Kind::I64 => DType::I64,
            Kind::F32 => DType::F32,
            Kind::F64 => DType::F64,
        }
    }
}

impl DType {
    /// All element types, in promotion order.
    pub const ALL: [DType; 11] = [
        DType::Bool,
        DType::U8,
        DType::U32,
        DType::I32,
        DType::I64,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::U32 | DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// What kernels hold a value of this type as.
    pub fn kind(self) -> Kind {
        match self {
            DType::Bool => Kind::Bool,
            DType::U8 | DType::U32 => Kind::U32,
            DType::I32 => Kind::I32,
            DType::I64 => Kind::I64,
            DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 => Kind::F32,
            DType::F64 => Kind::F64,
        }
    }

    /// Whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        self.kind().is_float()
    }

    /// Whether this is an integer type (`bool` is not).
    pub fn is_int(self) -> bool {
        matches!(self, DType::U8 | DType::U32 | DType::I32 | DType::I64)
    }

    /// Whether negative values exist.
    pub fn is_signed(self) -> bool {
        !matches!(self, DType::Bool | DType::U8 | DType::U32)
    }

    /// The name used in type strings such as `f32[2, 3]`.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    /// The type in which two operands meet.
    ///
    /// | with | result |
    /// |---|---|
    /// | the same type | that type |
    /// | `bool` and any | the other |
    /// | two integers | the wider; `u32` with `i32` gives `i64`, `u8` with a signed type gives that type |
    /// | an integer and a float | the float |
    /// | two floats of different width | the wider |
    /// | `f16` with `bf16`, `f8e4m3` with `f8e5m2` | `f32`: neither holds the other |
    ///
    /// ```
    /// use anymesh_kernel::DType::*;
    /// assert_eq!(U32.promote(I32), I64);
    /// assert_eq!(I64.promote(BF16), BF16);
    /// assert_eq!(F16.promote(BF16), F32);
    /// ```
    pub fn promote(self, other: DType) -> DType {
        use DType::*;
        let (low, high) = if self <= other {
            (self, other)
        } else {
            (other, self)
        };
        match (low, high) {
            _ if low == high => low,
            (U32, I32) => I64,
            (F8E4M3, F8E5M2) | (F16, BF16) => F32,
            _ => high,
        }
    }

    /// The float type a float-valued op (`exp`, `mean`, ...) computes for this input: itself, or
    /// `f32` for integers.
    pub fn to_float(self) -> DType {
        if self.is_float() { self } else { DType::F32 }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        DType::ALL
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| crate::Error::Parse {
                what: "dtype",
                text: text.into(),
                expected: "one of bool u8 u32 i32 i64 f8e4m3 f8e5m2 f16 bf16 f32 f64".into(),
            })
    }
}

/// One number of any kind, exact: 64-bit integers are not squeezed through a float.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// A logical value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
}

impl Scalar {
    /// As a float, rounding integers that do not fit.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::Bool(b) => f64::from(u8::from(b)),
            Scalar::Int(i) => i as f64,
            Scalar::Float(f) => f,
        }
    }

    /// As an integer; floats truncate towards zero and saturate.
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::Bool(b) => i64::from(b),
            Scalar::Int(i) => i,
            Scalar::Float(f) => f as i64,
        }
    }

    /// As a logical value: anything but zero is true.
    pub fn to_bool(self) -> bool {
        match self {
            Scalar::Bool(b) => b,
            Scalar::Int(i) => i != 0,
            Scalar::Float(f) => f != 0.0,
        }
    }

    /// The type a tensor of `dtype` has after meeting this scalar: literals are weak, they only
    /// lift across bool < integer < float.
    pub fn promote(self, dtype: DType) -> DType {
        match self {
            Scalar::Bool(_) => dtype,
            Scalar::Int(_) if dtype == DType::Bool => DType::I32,
            Scalar::Int(_) => dtype,
            Scalar::Float(_) => dtype.to_float(),
        }
    }

    /// Identity of the stored bits, so that programs holding scalars can be compared and hashed.
    fn key(self) -> (u8, u64) {
        match self {
            Scalar::Bool(b) => (0, u64::from(b)),
            Scalar::Int(i) => (1, i as u64),
            Scalar::Float(f) => (2, f.to_bits()),
        }
    }
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Scalar {}

impl std::hash::Hash for Scalar {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

macro_rules! scalar_from {
    ($($t:ty => $variant:ident as $wide:ty),*) => {$(
        impl From<$t> for Scalar {
            fn from(value: $t) -> Self {
                Scalar::$variant(<$wide>::from(value))
            }
        }
    )*};
}
scalar_from!(bool => Bool as bool, u8 => Int as i64, u32 => Int as i64, i32 => Int as i64, i64 => Int as i64, f32 => Float as f64, f64 => Float as f64);

/// A Rust type that is the element type of some tensor.
pub trait Element:
    bytemuck::NoUninit + Send + Sync + PartialEq + std::fmt::Debug + 'static
{
    /// The matching dtype.
    const DTYPE: DType;

    /// Reads elements from the stored little-endian bytes.
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! element {
    ($($t:ty => $dtype:ident),*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            fn from_bytes(bytes: &[u8]) -> Vec<Self> {
                bytemuck::pod_collect_to_vec(bytes)
            }
        }
    )*};
}
element!(u8 => U8, u32 => U32, i32 => I32, i64 => I64, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2, f16 => F16, bf16 => BF16, f32 => F32, f64 => F64);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    fn from_bytes(bytes: &[u8]) -> Vec<Self> {
        bytes.iter().map(|b| *b != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_is_commutative_idempotent_and_never_lowers_the_class() {
        for a in DType::ALL {
            assert_eq!(a.promote(a), a);
            for b in DType::ALL {
                let c = a.promote(b);
                assert_eq!(c, b.promote(a));
                assert!(
                    c.is_float() || !(a.is_float() || b.is_float()),
                    "{a} {b} {c}"
                );
            }
        }
    }

    #[test]
    fn names_parse_back() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().expect("its own name"), d);
        }
        assert!("f33".parse::<DType>().is_err());
    }
}
