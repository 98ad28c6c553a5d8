//! Row programs: a row is read once, held in registers where it fits, and written once.
//!
//! Some threads of a cube share a row, each with a few chunks of four elements; results of
//! reductions are known to all of them. Rows that are too long to be held are read again, from
//! cache, for every round of reductions. Sums of columns: the threads of a row walk down a fixed
//! number of rows, add up in registers, and a cube writes one part of each sum; a second launch adds
//! the parts in a fixed order. How everything is cut follows from shapes alone.

mod columns;
mod cut;
mod folds;
mod launch;
mod put;
mod stages;

pub(crate) use launch::{RowPlan, fits, stores};

use crate::{
    intern::Interned,
    map::Outputs,
    program::{Inputs, float_param},
    words::F4,
};
use anymesh_kernel::backend::ReduceOp;
use cubecl::prelude::*;
use folds::{Part, absorb, identity, nothing, over_lanes, result};
use put::{put_held, put_long};
use stages::{held_input, hold_shared, masked, named_column, put_row, value};

/// The held inputs of the chunks from `first` on.
#[cube]
fn hold(
    inputs: &Inputs,
    row: usize,
    first: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] chunks: usize,
    #[comptime] whole: bool,
) -> Sequence<F4> {
    let mut held = Sequence::<F4>::new();
    #[unroll]
    for k in 0..chunks {
        let column = nth_column(first, length, plan.width, k, whole);
        #[unroll]
        for h in 0..comptime!(plan.held.len()) {
            held.push(held_input(inputs, row, column, length, plan.clone(), h));
        }
        hold_shared(inputs, &mut held, row, column, length, plan.clone(), k);
    }
    held
}

/// The first column of a thread's chunk `k` from `first` on. Unless all are there as a `whole`,
/// those past the end repeat the last one; what they give is left out.
#[cube]
fn nth_column(
    first: usize,
    length: usize,
    #[comptime] width: u32,
    #[comptime] k: usize,
    #[comptime] whole: bool,
) -> usize {
    let chunk = first + comptime!(k * width as usize);
    if comptime!(whole) {
        chunk * 4usize
    } else {
        min(chunk, (length - 1usize) / 4usize) * 4usize
    }
}

/// Takes the chunks that are held, from `first` on, into what the reductions of a round know.
#[cube]
#[allow(clippy::too_many_arguments)]
fn take_in(
    inputs: &Inputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    known: &mut Array<F4>,
    tops: &mut Array<f32>,
    row: usize,
    first: usize,
    length: usize,
    lowest: f32,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] round: usize,
    #[comptime] chunks: usize,
    #[comptime] whole: bool,
) {
    #[unroll]
    for i in 0..comptime!(plan.rounds[round].len()) {
        let fold = comptime!(plan.rounds[round][i]);
        if comptime!(plan.picks[fold].is_none()) {
            let mode = comptime!(plan.modes[fold]);
            let none = F4::new(identity(lowest, mode));
            let mut values = Sequence::<F4>::new();
            #[unroll]
            for k in 0..chunks {
                let column = nth_column(first, length, plan.width, k, whole);
                let x = value(
                    inputs,
                    held,
                    results,
                    row,
                    column,
                    length,
                    plan.clone(),
                    fold,
                    0usize,
                    k,
                );
                if comptime!(whole) {
                    values.push(x);
                } else {
                    let column = nth_column(first, length, plan.width, k, true);
                    values.push(masked(x, column, length, none, plan.aligned));
                }
            }
            let before = Part {
                known: known[i],
                top: tops[i],
            };
            let part = absorb(before, &values, chunks, mode, plan.native);
            known[i] = part.known;
            tops[i] = part.top;
        }
    }
}

/// The result of a sum to which one column adds something, which every thread reads for itself.
#[cube]
fn picked(
    inputs: &Inputs,
    results: &Sequence<f32>,
    row: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] fold: usize,
) -> f32 {
    let any = hold(inputs, row, 0usize, length, plan.clone(), 1usize, true);
    let stage = comptime!(plan.picks[fold].unwrap_or(0));
    let named = named_column(inputs, &any, results, row, length, plan.clone(), stage);
    let there = named >= 0i32 && (named as usize) < length;
    let column = select(there, named as usize, 0usize) / 4usize * 4usize;
    let held = hold(
        inputs,
        row,
        column / 4usize,
        length,
        plan.clone(),
        1usize,
        true,
    );
    let x = value(
        inputs,
        &held,
        results,
        row,
        column,
        length,
        plan.clone(),
        fold,
        0usize,
        0usize,
    );
    let x = masked(x, column, length, F4::new(0.0f32), plan.aligned);
    over_lanes(x, ReduceOp::Sum)
}

/// The results of all reductions of a row, in the order of rounds.
#[cube]
fn reduced(
    inputs: &Inputs,
    held: &Sequence<F4>,
    row: usize,
    lane: usize,
    length: usize,
    lowest: f32,
    #[comptime] plan: Interned<RowPlan>,
) -> Sequence<f32> {
    let mut results = Sequence::<f32>::new();
    #[unroll]
    for round in 0..comptime!(plan.rounds.len()) {
        let count = comptime!(plan.rounds[round].len());
        // What each reduction of the round knows of this thread's chunks.
        let mut known = Array::<F4>::new(count);
        let mut tops = Array::<f32>::new(count);
        #[unroll]
        for i in 0..count {
            let mode = comptime!(plan.modes[plan.rounds[round][i]]);
            let none = nothing(lowest, mode);
            known[i] = none.known;
            tops[i] = none.top;
        }
        if comptime!(plan.chunks > 0) {
            take_in(
                inputs,
                held,
                &results,
                &mut known,
                &mut tops,
                row,
                lane,
                length,
                lowest,
                plan.clone(),
                round,
                plan.chunks,
                plan.exact,
            );
        } else if comptime!(plan.reads(round)) {
            let (whole, width) = (length / 4usize, comptime!(plan.width as usize));
            let mut chunk = lane;
            while chunk + comptime!((plan.unroll - 1) * plan.width as usize) < whole {
                let held = hold(inputs, row, chunk, length, plan.clone(), plan.unroll, true);
                take_in(
                    inputs,
                    &held,
                    &results,
                    &mut known,
                    &mut tops,
                    row,
                    chunk,
                    length,
                    lowest,
                    plan.clone(),
                    round,
                    plan.unroll,
                    true,
                );
                chunk += comptime!(plan.unroll * plan.width as usize);
            }
            while chunk * 4usize < length {
                let held = hold(inputs, row, chunk, length, plan.clone(), 1usize, true);
                take_in(
                    inputs,
                    &held,
                    &results,
                    &mut known,
                    &mut tops,
                    row,
                    chunk,
                    length,
                    lowest,
                    plan.clone(),
                    round,
                    1usize,
                    plan.aligned,
                );
                chunk += width;
            }
        }
        #[unroll]
        for i in 0..count {
            let fold = comptime!(plan.rounds[round][i]);
            let found = if comptime!(plan.picks[fold].is_some()) {
                picked(inputs, &results, row, length, plan.clone(), fold)
            } else {
                let part = Part {
                    known: known[i],
                    top: tops[i],
                };
                result(part, plan.clone(), comptime!(plan.modes[fold]))
            };
            let scaled = if comptime!(plan.scales[fold].is_some()) {
                found * float_param(inputs, comptime!(plan.scales[fold].unwrap_or(0)))
            } else {
                found
            };
            results.push(scaled);
        }
    }
    results
}

/// One row: its reductions, and what is stored of it.
#[cube]
#[allow(clippy::too_many_arguments)]
fn one_row(
    inputs: &Inputs,
    out: &mut Outputs,
    per_row: &mut Sequence<Box<[u32]>>,
    sums: &mut Array<F4>,
    at: usize,
    rows: usize,
    length: usize,
    lowest: f32,
    #[comptime] plan: Interned<RowPlan>,
) {
    // Surplus threads repeat the last row, so that everybody meets at the barriers; they write
    // nothing.
    let row = if comptime!(plan.full) {
        at
    } else {
        min(at, rows - 1usize)
    };
    let lane = UNIT_POS as usize % comptime!(plan.width as usize);
    let held = hold(
        inputs,
        row,
        lane,
        length,
        plan.clone(),
        plan.chunks,
        plan.exact,
    );
    let results = reduced(inputs, &held, row, lane, length, lowest, plan.clone());
    if comptime!(plan.each.is_some()) {
        let stage = comptime!(plan.each.unwrap_or(0));
        if comptime!(plan.chunks > 0) {
            put_held(
                inputs,
                out,
                &held,
                &results,
                row,
                lane,
                at < rows,
                length,
                plan.clone(),
                stage,
            );
        } else if at < rows {
            put_long(
                inputs,
                out,
                &results,
                row,
                lane,
                length,
                plan.clone(),
                stage,
            );
        }
    }
    if comptime!(plan.rows.is_some()) {
        let stage = comptime!(plan.rows.unwrap_or(0));
        if at < rows && lane == 0usize {
            let first = hold(inputs, row, 0usize, length, plan.clone(), 1usize, true);
            put_row(
                inputs,
                per_row,
                &first,
                &results,
                row,
                length,
                plan.clone(),
                stage,
            );
        }
    }
    if comptime!(plan.columns.is_some()) {
        let stage = comptime!(plan.columns.unwrap_or(0));
        let outputs = comptime!(plan.stages[stage].program.outputs.len());
        #[unroll]
        for k in 0..comptime!(plan.chunks) {
            let column = nth_column(lane, length, plan.width, k, plan.exact);
            #[unroll]
            for o in 0..outputs {
                let x = value(
                    inputs,
                    &held,
                    &results,
                    row,
                    column,
                    length,
                    plan.clone(),
                    stage,
                    o,
                    k,
                );
                let i = comptime!(o * plan.chunks + k);
                if comptime!(plan.full) {
                    sums[i] = sums[i] + x;
                } else {
                    sums[i] = sums[i] + select(at < rows, x, F4::new(0.0f32));
                }
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn row_program_kernel(
    inputs: &Inputs,
    out: &mut Outputs,
    per_row: &mut Sequence<Box<[u32]>>,
    parts: &mut Sequence<Box<[F4]>>,
    rows: usize,
    length: usize,
    count: usize,
    lowest: f32,
    #[comptime] plan: Interned<RowPlan>,
) {
    let width = comptime!(plan.width as usize);
    let lines = comptime!((plan.threads / plan.width) as usize);
    let line = CUBE_POS * lines + UNIT_POS as usize / width;
    let outputs = comptime!(plan.column_outputs());
    let mut sums = Array::<F4>::new(comptime!((outputs * plan.chunks).max(1)));
    if comptime!(plan.columns.is_some()) {
        #[unroll]
        for i in 0..comptime!(outputs * plan.chunks) {
            sums[i] = F4::new(0.0f32);
        }
        // A known number of rounds, so that every thread meets the others at the barriers.
        for step in 0..comptime!(plan.steps) {
            let at = line * comptime!(plan.steps as usize) + step as usize;
            one_row(
                inputs,
                out,
                per_row,
                &mut sums,
                at,
                rows,
                length,
                lowest,
                plan.clone(),
            );
        }
        columns::write_parts(parts, &sums, length, count, plan);
    } else {
        one_row(
            inputs, out, per_row, &mut sums, line, rows, length, lowest, plan,
        );
    }
}
