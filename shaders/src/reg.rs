//! Registers of a program while a kernel is compiled: four lanes of one kind, and the code for each
//! instruction.

use crate::{
    int, math, philox,
    words::{self, B4, D4, F4, I4, L4, Q4, U4},
};
use anymesh_kernel::{
    DType, Kind, Scalar,
    map::{Binary, Unary},
};
use cubecl::prelude::*;

/// A value on four lanes.
#[derive(Clone, Copy)]
pub(crate) enum Reg {
    B(NativeExpand<B4>),
    U(NativeExpand<U4>),
    I(NativeExpand<I4>),
    L(NativeExpand<L4>),
    F(NativeExpand<F4>),
    D(NativeExpand<D4>),
}

/// Four elements as they lie in memory. What is only moved stays this: on its way through a float
/// a NaN may lose its payload.
#[derive(Clone, Copy)]
pub(crate) enum Raw {
    /// At most 32 bits each.
    Bits(NativeExpand<U4>),
    /// 64 bits each.
    Wide(NativeExpand<Q4>),
}

/// What a fault check reports: lanes where an integer divisor is zero.
pub(crate) type Fault<'a> = &'a mut dyn FnMut(NativeExpand<B4>);

#[cube]
fn reinterpret<A: CubePrimitive, B: CubePrimitive>(x: A) -> B {
    B::reinterpret(x)
}

#[cube]
fn convert<A: CubePrimitive, B: CubePrimitive>(x: A) -> B {
    B::cast_from(x)
}

#[cube]
fn nonzero<T: Numeric>(x: Vector<T, Const<4>>) -> B4 {
    // Not `not_equal`: see `compare`.
    !x.equal(&Vector::new(T::from_int(0)))
}

#[cube]
fn is_zero<T: Numeric>(x: Vector<T, Const<4>>) -> B4 {
    x.equal(&Vector::new(T::from_int(0)))
}

#[cube]
fn splat<T: Numeric>(x: T) -> Vector<T, Const<4>> {
    Vector::new(x)
}

#[cube]
fn hidden(#[comptime] bits: u32, zero: u32) -> U4 {
    U4::new(bits | zero)
}

#[cube]
fn hidden_wide(#[comptime] low: u32, #[comptime] high: u32, zero: u32) -> Q4 {
    Q4::new(words::join(low | zero, high | zero))
}

#[cube]
fn choose<T: CubePrimitive>(
    c: B4,
    yes: Vector<T::Scalar, Const<4>>,
    no: Vector<T::Scalar, Const<4>>,
) -> Vector<T::Scalar, Const<4>> {
    select_many(c, yes, no)
}

#[cube]
fn mask8(x: U4) -> U4 {
    x & U4::new(0xffu32)
}

#[cube]
fn at_most_255(x: U4) -> U4 {
    min(x, U4::new(255u32))
}

#[cube]
fn not_bool(x: B4) -> B4 {
    !x
}

#[cube]
fn bool_bits(x: B4) -> U4 {
    U4::cast_from(x)
}

#[cube]
fn from_bool_bits(x: U4) -> B4 {
    x.not_equal(&U4::new(0u32))
}

/// A compiler that does not know the zero can neither contract across this nor see that two such
/// values are the same.
#[cube]
fn fence_bits(x: U4, zero: u32) -> U4 {
    x | U4::new(zero)
}

#[cube]
fn fence_wide(x: Q4, zero: u32) -> Q4 {
    x | Q4::new(words::join(zero, zero))
}

/// Programs are type-checked when they are built, so a mismatch here is a bug of this crate; CubeCL
/// turns the panic of an expansion into an error of the launch.
fn ill_typed() -> ! {
    panic!("a map program with mixed kinds reached the kernel compiler")
}

impl Raw {
    /// The first where the condition holds, else the second.
    pub(crate) fn select(scope: &Scope, c: NativeExpand<B4>, yes: Self, no: Self) -> Self {
        match (yes, no) {
            (Raw::Bits(a), Raw::Bits(b)) => Raw::Bits(choose::expand::<u32>(scope, c, a, b)),
            (Raw::Wide(a), Raw::Wide(b)) => Raw::Wide(choose::expand::<u64>(scope, c, a, b)),
            _ => ill_typed(),
        }
    }

    /// Zeros of the same width: the number zero in every dtype.
    pub(crate) fn zero(self, scope: &Scope) -> Self {
        match self {
            Raw::Bits(_) => Raw::Bits(splat::expand::<u32>(scope, 0u32.into_expand(scope))),
            Raw::Wide(_) => Raw::Wide(splat::expand::<u64>(scope, 0u64.into_expand(scope))),
        }
    }
}

impl Reg {
    /// The values of elements of `dtype`.
    pub(crate) fn from_raw(scope: &Scope, dtype: DType, raw: Raw) -> Self {
        match (raw, dtype) {
            (Raw::Wide(bits), DType::I64) => Reg::L(convert::expand::<Q4, L4>(scope, bits)),
            (Raw::Wide(bits), DType::F64) => Reg::D(reinterpret::expand::<Q4, D4>(scope, bits)),
            (Raw::Wide(_), _) | (_, DType::I64 | DType::F64) => ill_typed(),
            (Raw::Bits(bits), DType::Bool) => Reg::B(from_bool_bits::expand(scope, bits)),
            (Raw::Bits(bits), DType::U8 | DType::U32) => Reg::U(bits),
            (Raw::Bits(bits), DType::I32) => Reg::I(reinterpret::expand::<U4, I4>(scope, bits)),
            (Raw::Bits(bits), _) => Reg::F(words::small_to_f32::expand(scope, bits, dtype)),
        }
    }

    /// The values as elements of `dtype`, to be stored.
    pub(crate) fn to_raw(self, scope: &Scope, dtype: DType) -> Raw {
        match self {
            Reg::B(x) => Raw::Bits(bool_bits::expand(scope, x)),
            Reg::U(x) => Raw::Bits(x),
            Reg::I(x) => Raw::Bits(reinterpret::expand::<I4, U4>(scope, x)),
            Reg::F(x) => Raw::Bits(words::f32_to_small::expand(scope, x, dtype)),
            Reg::L(x) => Raw::Wide(convert::expand::<L4, Q4>(scope, x)),
            Reg::D(x) => Raw::Wide(reinterpret::expand::<D4, Q4>(scope, x)),
        }
    }

    /// A constant; `zero` is a zero known only at run time, from which infinities and NaN are made.
    pub(crate) fn constant(
        scope: &Scope,
        value: Scalar,
        kind: Kind,
        zero: NativeExpand<u32>,
    ) -> Self {
        match kind {
            Kind::Bool => {
                let bits =
                    splat::expand::<u32>(scope, u32::from(value.to_bool()).into_expand(scope));
                Reg::B(from_bool_bits::expand(scope, bits))
            }
            Kind::U32 => Reg::U(splat::expand::<u32>(
                scope,
                (value.to_i64() as u32).into_expand(scope),
            )),
            Kind::I32 => Reg::I(splat::expand::<i32>(
                scope,
                (value.to_i64() as i32).into_expand(scope),
            )),
            Kind::I64 => Reg::L(splat::expand::<i64>(
                scope,
                value.to_i64().into_expand(scope),
            )),
            Kind::F32 => {
                let value = value.to_f64() as f32;
                if value.is_finite() && value != f32::MIN && value != f32::MAX {
                    Reg::F(splat::expand::<f32>(scope, value.into_expand(scope)))
                } else {
                    Reg::F(reinterpret::expand::<U4, F4>(
                        scope,
                        hidden::expand(scope, value.to_bits(), zero),
                    ))
                }
            }
            Kind::F64 => {
                let bits = value.to_f64().to_bits();
                Reg::D(reinterpret::expand::<Q4, D4>(
                    scope,
                    hidden_wide::expand(scope, bits as u32, (bits >> 32) as u32, zero),
                ))
            }
        }
    }

    /// The lanes of a condition.
    pub(crate) fn condition(self) -> NativeExpand<B4> {
        match self {
            Reg::B(lanes) => lanes,
            _ => ill_typed(),
        }
    }

    pub(crate) fn select(scope: &Scope, c: Self, yes: Self, no: Self) -> Self {
        let c = c.condition();
        match (yes, no) {
            (Reg::B(a), Reg::B(b)) => {
                let (a, b) = (bool_bits::expand(scope, a), bool_bits::expand(scope, b));
                Reg::B(from_bool_bits::expand(
                    scope,
                    choose::expand::<u32>(scope, c, a, b),
                ))
            }
            (Reg::U(a), Reg::U(b)) => Reg::U(choose::expand::<u32>(scope, c, a, b)),
            (Reg::I(a), Reg::I(b)) => Reg::I(choose::expand::<i32>(scope, c, a, b)),
            (Reg::L(a), Reg::L(b)) => Reg::L(choose::expand::<i64>(scope, c, a, b)),
            (Reg::F(a), Reg::F(b)) => Reg::F(choose::expand::<f32>(scope, c, a, b)),
            (Reg::D(a), Reg::D(b)) => Reg::D(choose::expand::<f64>(scope, c, a, b)),
            _ => ill_typed(),
        }
    }
}

#[cube]
fn compare<T: Numeric>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] op: Binary,
) -> B4 {
    match op {
        Binary::Eq => a.equal(&b),
        // Not `not_equal`: some drivers answer that one with an ordered comparison, which is false
        // for NaN.
        Binary::Ne => !a.equal(&b),
        Binary::Lt => a.less_than(&b),
        Binary::Le => a.less_equal(&b),
        Binary::Gt => a.greater_than(&b),
        _ => a.greater_equal(&b),
    }
}

/// Bool lanes as 0 and 1: order and logic are those of small integers.
#[cube]
fn logic(a: U4, b: U4, #[comptime] op: Binary) -> U4 {
    match op {
        Binary::And | Binary::Min => a & b,
        Binary::Or | Binary::Max => a | b,
        _ => a ^ b,
    }
}

impl Reg {
    pub(crate) fn unary(self, scope: &Scope, op: Unary, native: bool) -> Self {
        match (self, op) {
            (Reg::B(x), Unary::Not) => Reg::B(not_bool::expand(scope, x)),
            (Reg::U(x), _) => Reg::U(int::unary_u32::expand(scope, x, op)),
            (Reg::I(x), _) => Reg::I(int::unary_signed::expand::<i32>(scope, x, op)),
            (Reg::L(x), _) => Reg::L(int::unary_signed::expand::<i64>(scope, x, op)),
            (Reg::F(x), Unary::IsNan | Unary::IsInf) => {
                Reg::B(math::classify::expand(scope, x, op))
            }
            (Reg::F(x), _) if native => Reg::F(math::unary_native::expand(scope, x, op)),
            (Reg::F(x), _) => Reg::F(math::unary::expand(scope, x, op)),
            (Reg::D(x), Unary::IsNan | Unary::IsInf) => {
                Reg::B(math::classify_wide::expand(scope, x, op))
            }
            (Reg::D(x), _) => Reg::D(math::unary_wide::expand(scope, x, op)),
            (Reg::B(_), _) => ill_typed(),
        }
    }

    pub(crate) fn binary(scope: &Scope, op: Binary, a: Self, b: Self, fault: Fault<'_>) -> Self {
        let divides = matches!(op, Binary::FloorDiv | Binary::TruncDiv | Binary::Rem);
        if divides {
            match b {
                Reg::U(x) => fault(is_zero::expand::<u32>(scope, x)),
                Reg::I(x) => fault(is_zero::expand::<i32>(scope, x)),
                Reg::L(x) => fault(is_zero::expand::<i64>(scope, x)),
                _ => {}
            }
        }
        if op.is_comparison() {
            return Reg::B(match (a, b) {
                (Reg::B(a), Reg::B(b)) => {
                    let (a, b) = (bool_bits::expand(scope, a), bool_bits::expand(scope, b));
                    compare::expand::<u32>(scope, a, b, op)
                }
                (Reg::U(a), Reg::U(b)) => compare::expand::<u32>(scope, a, b, op),
                (Reg::I(a), Reg::I(b)) => compare::expand::<i32>(scope, a, b, op),
                (Reg::L(a), Reg::L(b)) => compare::expand::<i64>(scope, a, b, op),
                (Reg::F(a), Reg::F(b)) => compare::expand::<f32>(scope, a, b, op),
                (Reg::D(a), Reg::D(b)) => compare::expand::<f64>(scope, a, b, op),
                _ => ill_typed(),
            });
        }
        match (a, b) {
            (Reg::B(a), Reg::B(b)) => {
                let bits = logic::expand(
                    scope,
                    bool_bits::expand(scope, a),
                    bool_bits::expand(scope, b),
                    op,
                );
                Reg::B(from_bool_bits::expand(scope, bits))
            }
            (Reg::U(a), Reg::U(b)) => Reg::U(int::binary_u32::expand(scope, a, b, op)),
            (Reg::I(a), Reg::I(b)) => Reg::I(int::binary_i32::expand(scope, a, b, op)),
            (Reg::L(a), Reg::L(b)) => Reg::L(int::binary_i64::expand(scope, a, b, op)),
            (Reg::F(a), Reg::F(b)) => Reg::F(math::binary::expand(scope, a, b, op)),
            (Reg::D(a), Reg::D(b)) => Reg::D(math::binary_wide::expand(scope, a, b, op)),
            _ => ill_typed(),
        }
    }

    /// Converts to the kind of `dtype` as [`anymesh_kernel::map::Inst::Cast`] says.
    pub(crate) fn cast(self, scope: &Scope, dtype: DType) -> Self {
        let converted = match (self, dtype.kind()) {
            (Reg::B(_), Kind::Bool)
            | (Reg::U(_), Kind::U32)
            | (Reg::I(_), Kind::I32)
            | (Reg::L(_), Kind::I64)
            | (Reg::F(_), Kind::F32)
            | (Reg::D(_), Kind::F64) => self,
            (Reg::U(x), Kind::Bool) => Reg::B(nonzero::expand::<u32>(scope, x)),
            (Reg::I(x), Kind::Bool) => Reg::B(nonzero::expand::<i32>(scope, x)),
            (Reg::L(x), Kind::Bool) => Reg::B(nonzero::expand::<i64>(scope, x)),
            (Reg::F(x), Kind::Bool) => Reg::B(nonzero::expand::<f32>(scope, x)),
            (Reg::D(x), Kind::Bool) => Reg::B(nonzero::expand::<f64>(scope, x)),
            (Reg::B(x), _) => return Reg::U(bool_bits::expand(scope, x)).cast(scope, dtype),
            (Reg::U(x), Kind::I32) => Reg::I(reinterpret::expand::<U4, I4>(scope, x)),
            (Reg::U(x), Kind::I64) => Reg::L(zero_extend::expand(scope, x)),
            (Reg::U(x), Kind::F32) => Reg::F(convert::expand::<U4, F4>(scope, x)),
            (Reg::U(x), Kind::F64) => Reg::D(convert::expand::<U4, D4>(scope, x)),
            (Reg::I(x), Kind::U32) => Reg::U(reinterpret::expand::<I4, U4>(scope, x)),
            (Reg::I(x), Kind::I64) => Reg::L(convert::expand::<I4, L4>(scope, x)),
            (Reg::I(x), Kind::F32) => Reg::F(convert::expand::<I4, F4>(scope, x)),
            (Reg::I(x), Kind::F64) => Reg::D(convert::expand::<I4, D4>(scope, x)),
            (Reg::L(x), Kind::U32) => Reg::U(convert::expand::<L4, U4>(scope, x)),
            (Reg::L(x), Kind::I32) => Reg::I(convert::expand::<L4, I4>(scope, x)),
            (Reg::L(x), Kind::F32) => Reg::F(convert::expand::<L4, F4>(scope, x)),
            (Reg::L(x), Kind::F64) => Reg::D(convert::expand::<L4, D4>(scope, x)),
            (Reg::F(x), Kind::U32) => Reg::U(math::f32_to_u32::expand(scope, x)),
            (Reg::F(x), Kind::I32) => Reg::I(math::f32_to_i32::expand(scope, x)),
            (Reg::F(x), Kind::I64) => Reg::L(math::f32_to_i64::expand(scope, x)),
            (Reg::F(x), Kind::F64) => Reg::D(convert::expand::<F4, D4>(scope, x)),
            (Reg::D(x), Kind::U32) => Reg::U(math::f64_to_u32::expand(scope, x)),
            (Reg::D(x), Kind::I32) => Reg::I(math::f64_to_i32::expand(scope, x)),
            (Reg::D(x), Kind::I64) => Reg::L(math::f64_to_i64::expand(scope, x)),
            (Reg::D(x), Kind::F32) => Reg::F(convert::expand::<D4, F4>(scope, x)),
        };
        let from_float = matches!(self, Reg::F(_) | Reg::D(_));
        match (converted, dtype) {
            (Reg::U(x), DType::U8) if from_float => Reg::U(at_most_255::expand(scope, x)),
            (Reg::U(x), DType::U8) => Reg::U(mask8::expand(scope, x)),
            (Reg::F(x), DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2) => {
                Reg::F(words::small_to_f32::expand(
                    scope,
                    words::f32_to_small::expand(scope, x, dtype),
                    dtype,
                ))
            }
            _ => converted,
        }
    }

    /// The same value behind a fence made of a zero that is known only at run time (see
    /// [`anymesh_kernel::map::Inst::Fence`]).
    pub(crate) fn fence(self, scope: &Scope, zero: NativeExpand<u32>) -> Self {
        match self {
            // Logic has one result, however it is computed.
            Reg::B(_) => self,
            Reg::U(x) => Reg::U(fence_bits::expand(scope, x, zero)),
            Reg::I(x) => {
                let bits = reinterpret::expand::<I4, U4>(scope, x);
                let bits = fence_bits::expand(scope, bits, zero);
                Reg::I(reinterpret::expand::<U4, I4>(scope, bits))
            }
            Reg::F(x) => {
                let bits = reinterpret::expand::<F4, U4>(scope, x);
                let bits = fence_bits::expand(scope, bits, zero);
                Reg::F(reinterpret::expand::<U4, F4>(scope, bits))
            }
            Reg::L(x) => {
                let bits = convert::expand::<L4, Q4>(scope, x);
                let bits = fence_wide::expand(scope, bits, zero);
                Reg::L(convert::expand::<Q4, L4>(scope, bits))
            }
            Reg::D(x) => {
                let bits = reinterpret::expand::<D4, Q4>(scope, x);
                let bits = fence_wide::expand(scope, bits, zero);
                Reg::D(reinterpret::expand::<Q4, D4>(scope, bits))
            }
        }
    }

    /// A word of Philox at four indices.
    pub(crate) fn philox(scope: &Scope, index: Reg, key: [Reg; 3], word: u8) -> Self {
        let (low, high) = match index {
            Reg::I(x) => (
                reinterpret::expand::<I4, U4>(scope, x),
                splat::expand::<u32>(scope, 0u32.into_expand(scope)),
            ),
            Reg::L(x) => {
                let bits = convert::expand::<L4, Q4>(scope, x);
                (
                    low_half::expand(scope, bits),
                    high_half::expand(scope, bits),
                )
            }
            _ => ill_typed(),
        };
        let [Reg::U(seed_low), Reg::U(seed_high), Reg::U(stream)] = key else {
            ill_typed()
        };
        Reg::U(philox::word::expand(
            scope,
            low,
            high,
            stream,
            seed_low,
            seed_high,
            word as u32,
        ))
    }
}

/// Some shader compilers go through a signed 32-bit number; the mask undoes that.
#[cube]
fn zero_extend(x: U4) -> L4 {
    L4::cast_from(x) & L4::new(0xffff_ffffi64)
}

#[cube]
fn low_half(x: Q4) -> U4 {
    U4::cast_from(x)
}

#[cube]
fn high_half(x: Q4) -> U4 {
    U4::cast_from(x >> Q4::new(32u64))
}
