//! What is stored of each element of a row.

use super::{RowPlan, hold, nth_column, stages::put_each};
use crate::{intern::Interned, map::Outputs, program::Inputs, words::F4};
use cubecl::prelude::*;

/// Stores the elements of a row that is held.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn put_held(
    inputs: &Inputs,
    out: &mut Outputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    lane: usize,
    there: bool,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
) {
    #[unroll]
    for k in 0..comptime!(plan.chunks) {
        let column = nth_column(lane, length, plan.width, k, true);
        if comptime!(plan.exact && plan.full) {
            put_each(
                inputs,
                out,
                held,
                results,
                row,
                column,
                length,
                plan.clone(),
                stage,
                k,
            );
        } else if there && column < length {
            put_each(
                inputs,
                out,
                held,
                results,
                row,
                column,
                length,
                plan.clone(),
                stage,
                k,
            );
        }
    }
}

/// Stores the elements of a row that is read again.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn put_long(
    inputs: &Inputs,
    out: &mut Outputs,
    results: &Sequence<f32>,
    row: usize,
    lane: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
) {
    let (whole, width) = (length / 4usize, comptime!(plan.width as usize));
    let mut chunk = lane;
    while chunk + comptime!((plan.unroll - 1) * plan.width as usize) < whole {
        let held = hold(inputs, row, chunk, length, plan.clone(), plan.unroll, true);
        #[unroll]
        for k in 0..comptime!(plan.unroll) {
            let column = nth_column(chunk, length, plan.width, k, true);
            put_each(
                inputs,
                out,
                &held,
                results,
                row,
                column,
                length,
                plan.clone(),
                stage,
                k,
            );
        }
        chunk += comptime!(plan.unroll * plan.width as usize);
    }
    while chunk * 4usize < length {
        let held = hold(inputs, row, chunk, length, plan.clone(), 1usize, true);
        put_each(
            inputs,
            out,
            &held,
            results,
            row,
            chunk * 4usize,
            length,
            plan.clone(),
            stage,
            0usize,
        );
        chunk += width;
    }
}
