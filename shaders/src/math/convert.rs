//! Floats to integers: truncate towards zero, saturate, and NaN gives 0, whatever the device's own
//! conversion does.

use cubecl::prelude::*;

use crate::words::{D4, F4, I4, L4, U4};

#[cube]
pub(crate) fn f32_to_i32(x: F4) -> I4 {
    let (low, high) = (F4::new(-2147483648.0f32), F4::new(2147483648.0f32));
    let inside = x.greater_equal(&low).vec_and(x.less_than(&high));
    let y = I4::cast_from(select_many(inside, x, F4::new(0.0f32)));
    let y = select_many(x.less_than(&low), I4::new(i32::MIN), y);
    select_many(x.greater_equal(&high), I4::new(i32::MAX), y)
}

#[cube]
pub(crate) fn f32_to_u32(x: F4) -> U4 {
    let high = F4::new(4294967296.0f32);
    let inside = x.greater_than(&F4::new(0.0f32)).vec_and(x.less_than(&high));
    let y = U4::cast_from(select_many(inside, x, F4::new(0.0f32)));
    select_many(x.greater_equal(&high), U4::new(u32::MAX), y)
}

#[cube]
pub(crate) fn f32_to_i64(x: F4) -> L4 {
    let (low, high) = (
        F4::new(-9223372036854775808.0f32),
        F4::new(9223372036854775808.0f32),
    );
    let inside = x.greater_equal(&low).vec_and(x.less_than(&high));
    let y = L4::cast_from(select_many(inside, x, F4::new(0.0f32)));
    let y = select_many(x.less_than(&low), L4::new(i64::MIN), y);
    select_many(x.greater_equal(&high), L4::new(i64::MAX), y)
}

/// A power of two or zero, as `f64`: exact also where the device takes no `f64` literals.
#[cube]
fn wide(#[comptime] value: f32) -> D4 {
    D4::cast_from(F4::new(f32::new(value)))
}

#[cube]
pub(crate) fn f64_to_i32(x: D4) -> I4 {
    let (low, high) = (wide(-2147483648.0), wide(2147483648.0));
    // Between MIN - 1 and MIN truncation still gives MIN, so the lower bound may be taken at MIN.
    let inside = x.greater_equal(&low).vec_and(x.less_than(&high));
    let y = I4::cast_from(select_many(inside, x, wide(0.0)));
    let y = select_many(x.less_than(&low), I4::new(i32::MIN), y);
    select_many(x.greater_equal(&high), I4::new(i32::MAX), y)
}

#[cube]
pub(crate) fn f64_to_u32(x: D4) -> U4 {
    let high = wide(4294967296.0);
    let inside = x.greater_than(&wide(0.0)).vec_and(x.less_than(&high));
    let y = U4::cast_from(select_many(inside, x, wide(0.0)));
    select_many(x.greater_equal(&high), U4::new(u32::MAX), y)
}

#[cube]
pub(crate) fn f64_to_i64(x: D4) -> L4 {
    let (low, high) = (wide(-9223372036854775808.0), wide(9223372036854775808.0));
    let inside = x.greater_equal(&low).vec_and(x.less_than(&high));
    let y = L4::cast_from(select_many(inside, x, wide(0.0)));
    let y = select_many(x.less_than(&low), L4::new(i64::MIN), y);
    select_many(x.greater_equal(&high), L4::new(i64::MAX), y)
}
