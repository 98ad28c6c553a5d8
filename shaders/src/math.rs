//! Float functions on four lanes.
use crate::words::{B4, F4, I4, L4, U4};
use anymesh_core::map::{Binary, Unary};
use cubecl::prelude::*;

#[cube]
pub(crate) fn classify(x: F4, #[comptime] op: Unary) -> B4 {
    match op {
        Unary::IsNan => x.is_nan(),
        _ => x.is_inf(),
    }
}

#[cube]
pub(crate) fn unary(x: F4, _zero: u32, #[comptime] op: Unary) -> F4 {
    match op {
        Unary::Neg => -x,
        Unary::Exp => x.exp(),
        _ => x.abs(),
    }
}

#[cube]
pub(crate) fn binary(a: F4, b: F4, _zero: u32, #[comptime] op: Binary) -> F4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Max => max_nan(a, b),
        Binary::Min => min_nan(a, b),
        _ => a / b,
    }
}

#[cube]
pub(crate) fn f32_to_u32(x: F4) -> U4 {
    U4::cast_from(x)
}

#[cube]
pub(crate) fn f32_to_i32(x: F4) -> I4 {
    I4::cast_from(x)
}

#[cube]
pub(crate) fn f32_to_i64(x: F4) -> L4 {
    L4::cast_from(x)
}
