//! How values of a row become one.

use super::RowPlan;
use crate::{intern::Interned, math, nvidia, words::F4};
use anymesh_kernel::{
    backend::ReduceOp,
    map::{Binary, Unary},
};
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

/// Exponentials of values that are at most zero, for a sum whose largest term is one: an error of a
/// term in the units of that one is all that matters, so CUDA's shortest way is good enough.
#[cube]
fn exp(x: F4, #[comptime] native: bool) -> F4 {
    if comptime!(native) {
        nvidia::coarse_exp(x)
    } else {
        math::unary(x, Unary::Exp)
    }
}

/// `exp(a - b)`.
#[cube]
fn ratio(a: f32, b: f32, #[comptime] native: bool) -> f32 {
    exp(F4::new(a - b), native).extract(0usize)
}

/// What is known of some values.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Part {
    /// The reduction itself on each of four lanes; for log-sum-exp the sum of exponentials relative
    /// to the top.
    pub(super) known: F4,
    /// The largest value, for log-sum-exp: the nearest finite number, so that it can be subtracted
    /// from infinities. The sum knows of these, and of NaN.
    pub(super) top: f32,
}

#[cube]
pub(super) fn nothing(lowest: f32, #[comptime] mode: ReduceOp) -> Part {
    let known = if comptime!(mode == ReduceOp::LogSumExp) {
        F4::new(0.0f32)
    } else {
        F4::new(identity(lowest, mode))
    };
    Part {
        known,
        top: f32::new(-f32::MAX),
    }
}

/// The larger or the smaller one; NaN if either is.
#[cube]
#[allow(unused_variables)]
fn extreme(a: F4, b: F4, #[comptime] largest: bool) -> F4 {
    intrinsic!(|scope| match (nvidia::is_target(scope), largest) {
        (true, _) => nvidia::extreme::expand(scope, a, b, largest),
        (false, true) => math::binary::expand(scope, a, b, Binary::Max),
        (false, false) => math::binary::expand(scope, a, b, Binary::Min),
    })
}

#[cube]
fn join(a: F4, b: F4, #[comptime] mode: ReduceOp) -> F4 {
    match mode {
        ReduceOp::Sum => a + b,
        ReduceOp::Min => extreme(a, b, false),
        _ => extreme(a, b, true),
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
    if comptime!(mode == ReduceOp::LogSumExp) {
        let mut top = part.top;
        #[unroll]
        for k in 0..count {
            let x = *values.index(k);
            let pair = max(x.extract(0usize), x.extract(1usize));
            let other = max(x.extract(2usize), x.extract(3usize));
            top = max(top, max(pair, other));
        }
        let top = min(top, f32::new(f32::MAX));
        let mut sum = part.known * F4::new(ratio(part.top, top, native));
        #[unroll]
        for k in 0..count {
            sum += exp(*values.index(k) - F4::new(top), native);
        }
        Part { known: sum, top }
    } else {
        let mut known = part.known;
        #[unroll]
        for k in 0..count {
            known = join(known, *values.index(k), mode);
        }
        Part {
            known,
            top: part.top,
        }
    }
}

#[cube]
fn merge(a: f32, b: f32, #[comptime] mode: ReduceOp) -> f32 {
    match mode {
        ReduceOp::Sum => a + b,
        // Tops are finite numbers.
        ReduceOp::LogSumExp => max(a, b),
        _ => join(F4::new(a), F4::new(b), mode).extract(0usize),
    }
}

/// The four lanes as one value.
#[cube]
pub(super) fn over_lanes(x: F4, #[comptime] mode: ReduceOp) -> f32 {
    merge(
        merge(x.extract(0usize), x.extract(1usize), mode),
        merge(x.extract(2usize), x.extract(3usize), mode),
        mode,
    )
}

/// The values of all threads of a row as one, which all of them get. Called by every thread of a
/// cube.
#[cube]
fn across(value: f32, #[comptime] plan: Interned<RowPlan>, #[comptime] mode: ReduceOp) -> f32 {
    let width = comptime!(plan.width);
    let mut value = value;
    if comptime!(plan.planes) {
        // Every thread of a plane adds the same pairs: all have the same bits.
        #[unroll]
        for step in 0..comptime!(width.min(32).ilog2()) {
            let other = plane_shuffle_xor(value, comptime!((width.min(32) / 2) >> step));
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
    if comptime!(mode == ReduceOp::LogSumExp) {
        let top = across(part.top, plan.clone(), mode);
        let own = over_lanes(part.known, ReduceOp::Sum) * ratio(part.top, top, native);
        let sum = F4::new(across(own, plan, ReduceOp::Sum));
        let log = if comptime!(native) {
            math::unary_native(sum, Unary::Log)
        } else {
            math::unary(sum, Unary::Log)
        };
        top + log.extract(0usize)
    } else {
        across(over_lanes(part.known, mode), plan, mode)
    }
}
