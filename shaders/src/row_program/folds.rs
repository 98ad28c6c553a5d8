//! How values of a row become one.

use super::RowPlan;
use crate::{intern::Interned, math, words::F4};
use anymesh_kernel::{backend::ReduceOp, map::Unary};
use cubecl::prelude::*;

/// What changes nothing.
#[cube]
pub(super) fn identity(lowest: f32, #[comptime] mode: ReduceOp) -> f32 {
    match mode {
        ReduceOp::Sum => 0.0f32.runtime(),
        ReduceOp::Min => -lowest,
        _ => lowest,
    }
}

#[cube]
fn exp(x: F4, #[comptime] native: bool) -> F4 {
    if comptime!(native) {
        math::unary_native(x, Unary::Exp)
    } else {
        math::unary(x, Unary::Exp)
    }
}

/// `exp(x - top)`; one where they are equal, so that infinities are not subtracted from each other.
#[cube]
fn relative(x: F4, top: F4, #[comptime] native: bool) -> F4 {
    select_many(x.equal(&top), F4::new(1.0f32), exp(x - top, native))
}

#[cube]
fn larger(a: F4, b: F4) -> F4 {
    math::binary(a, b, anymesh_kernel::map::Binary::Max)
}

#[cube]
fn smaller(a: F4, b: F4) -> F4 {
    math::binary(a, b, anymesh_kernel::map::Binary::Min)
}

/// What is known of some values on each of four lanes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Part {
    /// The reduction itself; the largest value for log-sum-exp.
    pub(super) known: F4,
    /// The sum of exponentials relative to it, for log-sum-exp.
    pub(super) sum: F4,
}

#[cube]
fn join(a: F4, b: F4, #[comptime] mode: ReduceOp) -> F4 {
    match mode {
        ReduceOp::Sum => a + b,
        ReduceOp::Min => smaller(a, b),
        _ => larger(a, b),
    }
}

/// A part with `count` more values.
#[cube]
pub(super) fn absorb(
    part: Part,
    values: &Sequence<F4>,
    #[comptime] count: usize,
    #[comptime] mode: ReduceOp,
    #[comptime] native: bool,
) -> Part {
    let mut all = part.known;
    #[unroll]
    for k in 0..count {
        all = join(all, *values.index(k), mode);
    }
    let mut sum = part.sum;
    if comptime!(mode == ReduceOp::LogSumExp) {
        sum = sum * relative(part.known, all, native);
        #[unroll]
        for k in 0..count {
            sum += relative(*values.index(k), all, native);
        }
    }
    Part { known: all, sum }
}

#[cube]
fn merge(a: f32, b: f32, #[comptime] mode: ReduceOp) -> f32 {
    match mode {
        ReduceOp::Sum => a + b,
        ReduceOp::Min => smaller(F4::new(a), F4::new(b)).extract(0usize),
        _ => larger(F4::new(a), F4::new(b)).extract(0usize),
    }
}

#[cube]
fn over_lanes(x: F4, #[comptime] mode: ReduceOp) -> f32 {
    merge(
        merge(x.extract(0usize), x.extract(1usize), mode),
        merge(x.extract(2usize), x.extract(3usize), mode),
        mode,
    )
}

/// The lanes of all threads of a row as one value, which all of them get. Called by every thread of
/// a cube; the largest value for log-sum-exp.
#[cube]
fn across(value: F4, #[comptime] plan: Interned<RowPlan>, #[comptime] mode: ReduceOp) -> f32 {
    let width = comptime!(plan.width);
    let mut value = over_lanes(value, mode);
    if comptime!(plan.planes) {
        // Every thread of a plane adds the same pairs: all have the same bits.
        #[unroll]
        for step in 0..5u32 {
            let other = plane_shuffle_xor(value, comptime!(16u32 >> step));
            value = merge(value, other, mode);
        }
    }
    if comptime!(!plan.planes || width > 32) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.threads as usize));
        let me = UNIT_POS as usize;
        let lane = UNIT_POS % width;
        let first = (UNIT_POS - lane) as usize;
        if comptime!(plan.planes) {
            shared[me / 32usize] = value;
            sync_cube();
            value = shared[first / 32usize];
            #[unroll]
            for k in 1..comptime!(width as usize / 32) {
                value = merge(value, shared[first / 32usize + k], mode);
            }
        } else {
            let mut half = comptime!(width / 2).runtime();
            while half > 0u32 {
                shared[me] = value;
                sync_cube();
                if lane < half {
                    value = merge(value, shared[me + half as usize], mode);
                }
                sync_cube();
                half /= 2u32;
            }
            shared[me] = value;
            sync_cube();
            value = shared[first];
        }
        sync_cube();
    }
    value
}

/// The result of a reduction, known to all threads of a row, from the parts of each.
#[cube]
pub(super) fn result(
    part: Part,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] mode: ReduceOp,
) -> f32 {
    let native = comptime!(plan.native);
    let known = across(part.known, plan.clone(), mode);
    if comptime!(mode == ReduceOp::LogSumExp) {
        // A lane that took in nothing has a sum of nothing, and no NaN.
        let own = part.sum * relative(part.known, F4::new(known), native);
        let sum = F4::new(across(own, plan, ReduceOp::Sum));
        let log = if comptime!(native) {
            math::unary_native(sum, Unary::Log)
        } else {
            math::unary(sum, Unary::Log)
        };
        known + log.extract(0usize)
    } else {
        known
    }
}
