//! Registers of a program while a kernel is compiled: four lanes of one kind, and the code for each instruction.

use crate::{
    words::{self, B4, D4, F4, I4, L4, Q4, U4},
};
use anymesh_core::{
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
    x.not_equal(&Vector::new(T::from_int(0)))
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
fn choose<T: CubePrimitive>(c: B4, yes: Vector<T::Scalar, Const<4>>, no: Vector<T::Scalar, Const<4>>) -> Vector<T::Scalar, Const<4>> {
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

macro_rules! simple_binary {
    ($($name:ident $a:ident $b:ident => $out:expr),*) => {$(
        #[cube]
        fn $name<T: Numeric>($a: Vector<T, Const<4>>, $b: Vector<T, Const<4>>) -> Vector<T, Const<4>> {
            $out
        }
    )*};
}
simple_binary!(add a b => a + b, sub a b => a - b, mul a b => a * b, largest a b => max(a, b), smallest a b => min(a, b));

macro_rules! bit_binary {
    ($($name:ident $a:ident $b:ident => $out:expr),*) => {$(
        #[cube]
        fn $name<T: Int>($a: Vector<T, Const<4>>, $b: Vector<T, Const<4>>) -> Vector<T, Const<4>> {
            $out
        }
    )*};
}
bit_binary!(bit_and a b => a & b, bit_or a b => a | b, bit_xor a b => a ^ b);

#[cube]
fn bit_not<T: Int>(a: Vector<T, Const<4>>) -> Vector<T, Const<4>> {
    !a
}

macro_rules! comparison {
    ($($name:ident $method:ident),*) => {$(
        #[cube]
        fn $name<T: Numeric>(a: Vector<T, Const<4>>, b: Vector<T, Const<4>>) -> B4 {
            a.$method(&b)
        }
    )*};
}
comparison!(eq equal, ne not_equal, lt less_than, le less_equal, gt greater_than, ge greater_equal);

/// Programs are type-checked when they are built, so a mismatch here is a bug of this crate; CubeCL turns the panic of an
/// expansion into an error of the launch.
fn ill_typed() -> ! {
    panic!("a map program with mixed kinds reached the kernel compiler")
}

impl Reg {
    /// Lanes of bits (at most 32 each) as a value of `dtype`.
    pub(crate) fn from_bits(scope: &Scope, dtype: DType, bits: NativeExpand<U4>) -> Self {
        match dtype {
            DType::Bool => Reg::B(from_bool_bits::expand(scope, bits)),
            DType::U8 | DType::U32 => Reg::U(bits),
            DType::I32 => Reg::I(reinterpret::expand::<U4, I4>(scope, bits)),
            DType::I64 | DType::F64 => ill_typed(),
            _ => Reg::F(words::small_to_f32::expand(scope, bits, dtype)),
        }
    }

    /// Lanes of 64 bits as a value of `dtype`.
    pub(crate) fn from_wide(scope: &Scope, dtype: DType, bits: NativeExpand<Q4>) -> Self {
        match dtype {
            DType::I64 => Reg::L(convert::expand::<Q4, L4>(scope, bits)),
            DType::F64 => Reg::D(reinterpret::expand::<Q4, D4>(scope, bits)),
            _ => ill_typed(),
        }
    }

    /// The bits to store as `dtype` (at most 32 bits).
    pub(crate) fn to_bits(self, scope: &Scope, dtype: DType) -> NativeExpand<U4> {
        match self {
            Reg::B(x) => bool_bits::expand(scope, x),
            Reg::U(x) => x,
            Reg::I(x) => reinterpret::expand::<I4, U4>(scope, x),
            Reg::F(x) => words::f32_to_small::expand(scope, x, dtype),
            Reg::L(_) | Reg::D(_) => ill_typed(),
        }
    }

    /// The bits of a 64-bit value.
    pub(crate) fn to_wide(self, scope: &Scope) -> NativeExpand<Q4> {
        match self {
            Reg::L(x) => convert::expand::<L4, Q4>(scope, x),
            Reg::D(x) => reinterpret::expand::<D4, Q4>(scope, x),
            _ => ill_typed(),
        }
    }

    pub(crate) fn zero(scope: &Scope, kind: Kind) -> Self {
        match kind {
            Kind::Bool => Reg::B(from_bool_bits::expand(scope, splat::expand::<u32>(scope, 0u32.into_expand(scope)))),
            Kind::U32 => Reg::U(splat::expand::<u32>(scope, 0u32.into_expand(scope))),
            Kind::I32 => Reg::I(splat::expand::<i32>(scope, 0i32.into_expand(scope))),
            Kind::I64 => Reg::L(splat::expand::<i64>(scope, 0i64.into_expand(scope))),
            Kind::F32 => Reg::F(splat::expand::<f32>(scope, 0f32.into_expand(scope))),
            Kind::F64 => Reg::D(splat::expand::<f64>(scope, 0f64.into_expand(scope))),
        }
    }

    /// A constant; `zero` is a zero known only at run time, from which infinities and NaN are made.
    pub(crate) fn constant(scope: &Scope, value: Scalar, kind: Kind, zero: NativeExpand<u32>) -> Self {
        match kind {
            Kind::Bool => {
                let bits = splat::expand::<u32>(scope, u32::from(value.to_bool()).into_expand(scope));
                Reg::B(from_bool_bits::expand(scope, bits))
            }
            Kind::U32 => Reg::U(splat::expand::<u32>(scope, (value.to_i64() as u32).into_expand(scope))),
            Kind::I32 => Reg::I(splat::expand::<i32>(scope, (value.to_i64() as i32).into_expand(scope))),
            Kind::I64 => Reg::L(splat::expand::<i64>(scope, value.to_i64().into_expand(scope))),
            Kind::F32 => {
                let value = value.to_f64() as f32;
                if value.is_finite() && value != f32::MIN && value != f32::MAX {
                    Reg::F(splat::expand::<f32>(scope, value.into_expand(scope)))
                } else {
                    Reg::F(reinterpret::expand::<U4, F4>(scope, hidden::expand(scope, value.to_bits(), zero)))
                }
            }
            Kind::F64 => {
                let bits = value.to_f64().to_bits();
                Reg::D(reinterpret::expand::<Q4, D4>(scope, hidden_wide::expand(scope, bits as u32, (bits >> 32) as u32, zero)))
            }
        }
    }

    pub(crate) fn select(scope: &Scope, c: Self, yes: Self, no: Self) -> Self {
        let Reg::B(c) = c else { ill_typed() };
        match (yes, no) {
            (Reg::B(a), Reg::B(b)) => {
                let (a, b) = (bool_bits::expand(scope, a), bool_bits::expand(scope, b));
                Reg::B(from_bool_bits::expand(scope, choose::expand::<u32>(scope, c, a, b)))
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

/// Float functions of one value.
#[cube]
fn unary_f32(x: F4, #[comptime] op: Unary) -> F4 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Sqrt => x.sqrt(),
        _ => x,
    }
}

#[cube]
fn binary_f32(a: F4, b: F4, #[comptime] op: Binary) -> F4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        _ => a,
    }
}

#[cube]
fn compare<T: Numeric>(a: Vector<T, Const<4>>, b: Vector<T, Const<4>>, #[comptime] op: Binary) -> B4 {
    match op {
        Binary::Eq => a.equal(&b),
        Binary::Ne => a.not_equal(&b),
        Binary::Lt => a.less_than(&b),
        Binary::Le => a.less_equal(&b),
        Binary::Gt => a.greater_than(&b),
        _ => a.greater_equal(&b),
    }
}

impl Reg {
    pub(crate) fn unary(self, scope: &Scope, op: Unary, _zero: NativeExpand<u32>) -> Self {
        match self {
            Reg::F(x) => Reg::F(unary_f32::expand(scope, x, op)),
            _ => ill_typed(),
        }
    }

    pub(crate) fn binary(scope: &Scope, op: Binary, a: Self, b: Self, _zero: NativeExpand<u32>, _fault: Fault<'_>) -> Self {
        match (a, b) {
            (Reg::F(a), Reg::F(b)) if op.is_comparison() => Reg::B(compare::expand::<f32>(scope, a, b, op)),
            (Reg::F(a), Reg::F(b)) => Reg::F(binary_f32::expand(scope, a, b, op)),
            _ => ill_typed(),
        }
    }

    pub(crate) fn cast(self, scope: &Scope, dtype: DType) -> Self {
        match (self, dtype) {
            (Reg::F(x), DType::F32) => Reg::F(x),
            (Reg::F(x), DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2) => {
                Reg::F(words::small_to_f32::expand(scope, words::f32_to_small::expand(scope, x, dtype), dtype))
            }
            _ => ill_typed(),
        }
    }

    pub(crate) fn philox(_scope: &Scope, _index: Reg, _key: [Reg; 3], _word: u8) -> Self {
        ill_typed()
    }
}
