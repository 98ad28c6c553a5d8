//! Row programs: a row is read once, held in registers where it fits, and written once.
//!
//! Some threads of a cube share a row, each with a few chunks of four elements; results of
//! reductions are known to all of them. Rows that are too long to be held are read again, from
//! cache, for every round of reductions. Sums of columns: the threads of a row walk down a fixed
//! number of rows, add up in registers, and a cube writes one part of each sum; a second launch adds
//! the parts in a fixed order. How everything is cut follows from shapes alone.

mod columns;
mod folds;
mod launch;

pub(crate) use launch::{RowPlan, fits};

use crate::{
    intern::Interned,
    map::{Outputs, OutputsExpand, nth_of_width, store},
    program::{InRow, Inputs, InputsExpand, Known, float_param},
    reg::{Raw, Reg},
    words::F4,
};
use anymesh_kernel::DType;
use cubecl::prelude::*;
use folds::{Part, absorb, identity, result};

/// Elements of a row that a thread reads before it combines them, where it does not hold all.
const UNROLL: usize = 4;

/// The inputs that are held, at four columns.
#[cube]
#[allow(unused_variables)]
fn held_input(
    inputs: &Inputs,
    row: usize,
    column: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] which: usize,
) -> F4 {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column,
            length,
        };
        match at.load(scope, inputs, &plan.stages[0], plan.held[which]) {
            Reg::F(x) => x,
            _ => panic!("only floats are held"),
        }
    })
}

/// A splat of one number.
#[cube]
fn splat(x: f32) -> F4 {
    F4::new(x)
}

/// Emits a stage at four columns: chunk `k` of those that are held.
fn eval_stage(
    scope: &Scope,
    inputs: &InputsExpand,
    held: &SequenceExpand<F4>,
    results: &SequenceExpand<f32>,
    at: InRow,
    plan: &RowPlan,
    stage: usize,
    k: usize,
) -> Vec<Reg> {
    let map = &plan.stages[stage];
    let mut known = Known {
        loads: vec![None; map.program.inputs.len()],
        params: vec![None; map.program.params.len()],
        index: None,
    };
    for (h, input) in plan.held.iter().enumerate() {
        let value = held.__expand_index_method(scope, (k * plan.held.len() + h).into());
        known.loads[*input] = Some(Reg::F(*value));
    }
    // Results come in the order of rounds; a stage reads only those that are there.
    for (place, fold) in plan.order.iter().enumerate().take(results.len()) {
        let result = *results.__expand_index_method(scope, place.into());
        if let Some(param) = known.params.get_mut(plan.params + fold) {
            *param = Some(Reg::F(splat::expand(scope, result)));
        }
    }
    if !map.program.indices.is_empty() {
        known.index = Some(at.columns(scope));
    }
    at.eval(scope, inputs, map, known)
}

/// The first output of a stage at four columns, a float.
#[cube]
#[allow(unused_variables, clippy::too_many_arguments)]
fn value(
    inputs: &Inputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    column: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
    #[comptime] output: usize,
    #[comptime] k: usize,
) -> F4 {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column,
            length,
        };
        match eval_stage(scope, inputs, held, results, at, &plan, stage, k)[output] {
            Reg::F(x) => x,
            _ => panic!("what is reduced is a float"),
        }
    })
}

/// Values of columns that are there, and something else for the others.
#[cube]
fn masked(x: F4, column: usize, length: usize, other: F4, #[comptime] aligned: bool) -> F4 {
    if comptime!(aligned) {
        select(column < length, x, other)
    } else {
        let mut out = F4::empty();
        #[unroll]
        for l in 0..4usize {
            out.insert(
                l,
                select(column + l < length, x.extract(l), other.extract(l)),
            );
        }
        out
    }
}

#[cube]
fn put_word(out: &mut [u32], at: usize, value: u32) {
    out[at] = value;
}

#[cube]
fn word_at(at: usize, #[comptime] plus: usize, #[comptime] size: usize) -> usize {
    (at + plus) * size / 4usize
}

#[cube]
fn is_there(column: usize, #[comptime] lane: usize, length: usize) -> bool {
    column + lane < length
}

#[cube]
fn lane_of(bits: crate::words::U4, #[comptime] lane: usize) -> u32 {
    bits.extract(lane)
}

#[cube]
fn pair_of(bits: crate::words::U4, #[comptime] lane: usize) -> u32 {
    bits.extract(lane) & 0xffffu32 | bits.extract(comptime!(lane + 1)) << 16u32
}

#[cube]
fn chunk_of(row: usize, column: usize, length: usize) -> usize {
    (row * length + column) / 4usize
}

#[cube]
fn position_of(row: usize, column: usize, length: usize) -> usize {
    row * length + column
}

/// Stores the elements that a chunk of a row gives, at columns that are there. Chunks of rows that
/// are no multiple of four elements go word by word.
#[cube]
#[allow(unused_variables, clippy::too_many_arguments)]
fn put_each(
    inputs: &Inputs,
    out: &mut Outputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    column: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
    #[comptime] k: usize,
) {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column,
            length,
        };
        let values = eval_stage(scope, inputs, held, results, at, &plan, stage, k);
        let outputs = &plan.stages[stage].program.outputs;
        let dtypes: Vec<DType> = outputs.iter().map(|(_, dtype)| *dtype).collect();
        for (o, value) in values.iter().enumerate() {
            let raw = value.to_raw(scope, dtypes[o]);
            if plan.aligned {
                let chunk = chunk_of::expand(scope, row, column, length);
                store(scope, out, nth_of_width(&dtypes, o), chunk, raw, dtypes[o]);
            } else {
                store_words(scope, out, o, at, raw, dtypes[o]);
            }
        }
    })
}

/// Stores four elements word by word, into outputs that are all bound as words.
fn store_words(
    scope: &Scope,
    out: &mut OutputsExpand,
    nth: usize,
    at: InRow,
    raw: Raw,
    dtype: DType,
) {
    let Raw::Bits(bits) = raw else {
        panic!("wide elements are stored by whole chunks")
    };
    let size = dtype.size();
    let first = position_of::expand(scope, at.row, at.column, at.length);
    for lane in (0..4usize).step_by(4 / size) {
        let word = match size {
            4 => lane_of::expand(scope, bits, lane),
            _ => pair_of::expand(scope, bits, lane),
        };
        let place = word_at::expand(scope, first, lane, size);
        let there = is_there::expand(scope, at.column, lane, at.length);
        if_expand(scope, there, |scope| {
            put_word::expand(scope, out.words_mut(scope, nth), place, word);
        });
    }
}

/// Stores what a row gives.
#[cube]
#[allow(unused_variables)]
fn put_row(
    inputs: &Inputs,
    out: &mut Sequence<Box<[u32]>>,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
) {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column: 0usize.into_expand(scope),
            length,
        };
        // The first thread of a row holds its first columns.
        let values = eval_stage(scope, inputs, held, results, at, &plan, stage, 0);
        for (o, value) in values.iter().enumerate() {
            let Raw::Bits(bits) = value.to_raw(scope, DType::F32) else {
                panic!("numbers of rows are f32")
            };
            let word = lane_of::expand(scope, bits, 0usize);
            let out = out.__expand_index_mut_method(scope, o.into());
            put_word::expand(scope, out, row, word);
        }
    })
}

/// The held inputs of the chunks from `first` on.
#[cube]
fn hold(
    inputs: &Inputs,
    row: usize,
    first: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] chunks: usize,
) -> Sequence<F4> {
    let width = comptime!(plan.width as usize);
    let last = (length - 1usize) / 4usize;
    let mut held = Sequence::<F4>::new();
    #[unroll]
    for k in 0..chunks {
        // Chunks past the end repeat the last one; what they give is left out.
        let column = min(first + k * width, last) * 4usize;
        #[unroll]
        for h in 0..comptime!(plan.held.len()) {
            held.push(held_input(inputs, row, column, length, plan.clone(), h));
        }
    }
    held
}

/// The values of reduction `fold` at the chunks that are held, from `first` on; what leaves the
/// reduction as it is at columns that are not there.
#[cube]
#[allow(clippy::too_many_arguments)]
fn fold_values(
    inputs: &Inputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    first: usize,
    length: usize,
    lowest: f32,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] fold: usize,
    #[comptime] chunks: usize,
) -> Sequence<F4> {
    let width = comptime!(plan.width as usize);
    let mode = comptime!(plan.modes[fold]);
    let last = (length - 1usize) / 4usize;
    let none = F4::new(identity(lowest, mode));
    let mut values = Sequence::<F4>::new();
    #[unroll]
    for k in 0..chunks {
        let chunk = first + k * width;
        let safe = min(chunk, last) * 4usize;
        let x = value(
            inputs,
            held,
            results,
            row,
            safe,
            length,
            plan.clone(),
            fold,
            0usize,
            k,
        );
        values.push(masked(x, chunk * 4usize, length, none, plan.aligned));
    }
    values
}

/// The result of a reduction, scaled.
#[cube]
fn fold_result(
    inputs: &Inputs,
    part: Part,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] fold: usize,
) -> f32 {
    let found = result(part, plan.clone(), comptime!(plan.modes[fold]));
    if comptime!(plan.scales[fold].is_some()) {
        found * float_param(inputs, comptime!(plan.scales[fold].unwrap_or(0)))
    } else {
        found
    }
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
    let last = (length - 1usize) / 4usize;
    let mut results = Sequence::<f32>::new();
    #[unroll]
    for round in 0..comptime!(plan.rounds.len()) {
        let count = comptime!(plan.rounds[round].len());
        // What each reduction of the round knows of this thread's chunks.
        let mut known = Array::<F4>::new(count);
        let mut sums = Array::<F4>::new(count);
        #[unroll]
        for i in 0..count {
            let mode = comptime!(plan.modes[plan.rounds[round][i]]);
            known[i] = F4::new(identity(lowest, mode));
            sums[i] = F4::new(0.0f32);
        }
        if comptime!(plan.chunks > 0) {
            #[unroll]
            for i in 0..count {
                let fold = comptime!(plan.rounds[round][i]);
                let values = fold_values(
                    inputs,
                    held,
                    &results,
                    row,
                    lane,
                    length,
                    lowest,
                    plan.clone(),
                    fold,
                    plan.chunks,
                );
                let before = Part {
                    known: known[i],
                    sum: sums[i],
                };
                let mode = comptime!(plan.modes[fold]);
                let part = absorb(before, &values, plan.chunks, mode, plan.native);
                known[i] = part.known;
                sums[i] = part.sum;
            }
        } else {
            let mut chunk = lane;
            while chunk <= last {
                let held = hold(inputs, row, chunk, length, plan.clone(), UNROLL);
                #[unroll]
                for i in 0..count {
                    let fold = comptime!(plan.rounds[round][i]);
                    let values = fold_values(
                        inputs,
                        &held,
                        &results,
                        row,
                        chunk,
                        length,
                        lowest,
                        plan.clone(),
                        fold,
                        UNROLL,
                    );
                    let before = Part {
                        known: known[i],
                        sum: sums[i],
                    };
                    let mode = comptime!(plan.modes[fold]);
                    let part = absorb(before, &values, UNROLL, mode, plan.native);
                    known[i] = part.known;
                    sums[i] = part.sum;
                }
                chunk += comptime!(UNROLL * plan.width as usize);
            }
        }
        #[unroll]
        for i in 0..count {
            let part = Part {
                known: known[i],
                sum: sums[i],
            };
            let fold = comptime!(plan.rounds[round][i]);
            results.push(fold_result(inputs, part, plan.clone(), fold));
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
    let width = comptime!(plan.width as usize);
    // Surplus threads repeat the last row, so that everybody meets at the barriers; they write
    // nothing.
    let row = min(at, rows - 1usize);
    let lane = UNIT_POS as usize % width;
    let last = (length - 1usize) / 4usize;
    let held = hold(inputs, row, lane, length, plan.clone(), plan.chunks);
    let results = reduced(inputs, &held, row, lane, length, lowest, plan.clone());
    if comptime!(plan.each.is_some()) {
        let stage = comptime!(plan.each.unwrap_or(0));
        if comptime!(plan.chunks > 0) {
            #[unroll]
            for k in 0..comptime!(plan.chunks) {
                let chunk = lane + k * width;
                if at < rows && chunk <= last {
                    let column = chunk * 4usize;
                    put_each(
                        inputs,
                        out,
                        &held,
                        &results,
                        row,
                        column,
                        length,
                        plan.clone(),
                        stage,
                        k,
                    );
                }
            }
        } else if at < rows {
            let mut chunk = lane;
            while chunk <= last {
                let held = hold(inputs, row, chunk, length, plan.clone(), UNROLL);
                #[unroll]
                for k in 0..UNROLL {
                    if chunk + k * width <= last {
                        let column = (chunk + k * width) * 4usize;
                        put_each(
                            inputs,
                            out,
                            &held,
                            &results,
                            row,
                            column,
                            length,
                            plan.clone(),
                            stage,
                            k,
                        );
                    }
                }
                chunk += comptime!(UNROLL * plan.width as usize);
            }
        }
    }
    if comptime!(plan.rows.is_some()) {
        let stage = comptime!(plan.rows.unwrap_or(0));
        if at < rows && lane == 0usize {
            let first = hold(inputs, row, 0usize, length, plan.clone(), 1usize);
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
            let column = min(lane + k * width, last) * 4usize;
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
                sums[i] = sums[i] + select(at < rows, x, F4::new(0.0f32));
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
