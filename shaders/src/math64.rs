//! `f64` functions on four lanes.
use crate::words::{B4, D4, I4, L4, U4};
use anymesh_core::map::{Binary, Unary};
use cubecl::prelude::*;

#[cube]
pub(crate) fn classify(x: D4, #[comptime] op: Unary) -> B4 {
    match op {
        Unary::IsNan => x.is_nan(),
        _ => x.is_inf(),
    }
}

#[cube]
pub(crate) fn unary(x: D4, _zero: u32, #[comptime] op: Unary) -> D4 {
    match op {
        Unary::Neg => -x,
        _ => x.abs(),
    }
}

#[cube]
pub(crate) fn binary(a: D4, b: D4, _zero: u32, #[comptime] op: Binary) -> D4 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        _ => a / b,
    }
}

#[cube]
pub(crate) fn to_u32(x: D4) -> U4 {
    U4::cast_from(x)
}

#[cube]
pub(crate) fn to_i32(x: D4) -> I4 {
    I4::cast_from(x)
}

#[cube]
pub(crate) fn to_i64(x: D4) -> L4 {
    L4::cast_from(x)
}
