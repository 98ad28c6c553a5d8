//! The programs of a row at four of its columns: what they read, and where what they give goes.

use super::RowPlan;
use crate::{
    intern::Interned,
    map::{Outputs, OutputsExpand, nth_of_width, store},
    program::{InRow, Inputs, InputsExpand, Known},
    reg::{Raw, Reg},
    words::{F4, I4, U4},
};
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// The inputs that are held, at four columns.
#[cube]
#[allow(unused_variables)]
pub(super) fn held_input(
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

/// Adds the shared values of the last chunk, whose inputs are held, to what is held.
#[cube]
#[allow(unused_variables)]
pub(super) fn hold_shared(
    inputs: &Inputs,
    held: &mut Sequence<F4>,
    row: usize,
    column: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] k: usize,
) {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column,
            length,
        };
        let Some(stage) = plan.shared else { return };
        let map = &plan.stages[stage];
        let loads = known_loads(scope, held, &plan, map.program.inputs.len(), k, false);
        let known = Known {
            loads,
            params: vec![None; map.program.params.len()],
            index: None,
        };
        for value in at.eval(scope, inputs, map, known, false) {
            match value {
                Reg::F(x) => held.__expand_push_method(scope, x),
                _ => panic!("only floats are shared"),
            }
        }
    })
}

/// What a stage with so many inputs need not load: inputs that are held of chunk `k`, and shared values
/// where they are there.
fn known_loads(
    scope: &Scope,
    held: &SequenceExpand<F4>,
    plan: &RowPlan,
    inputs: usize,
    k: usize,
    shared: bool,
) -> Vec<Option<Reg>> {
    let mut loads = vec![None; inputs];
    let first = k * (plan.held.len() + plan.values);
    let at = |place: usize| Some(Reg::F(*held.__expand_index_method(scope, place.into())));
    for (h, input) in plan.held.iter().enumerate() {
        loads[*input] = at(first + h);
    }
    if shared {
        for value in 0..plan.values {
            loads[inputs - plan.values + value] = at(first + plan.held.len() + value);
        }
    }
    loads
}

/// A splat of one number.
#[cube]
fn splat(x: f32) -> F4 {
    F4::new(x)
}

/// Emits a stage at four columns: chunk `k` of those that are held. What it gives is only `stored`,
/// or else computed with.
#[allow(clippy::too_many_arguments)]
fn eval_stage(
    scope: &Scope,
    inputs: &InputsExpand,
    held: &SequenceExpand<F4>,
    results: &SequenceExpand<f32>,
    at: InRow,
    plan: &RowPlan,
    stage: usize,
    k: usize,
    stored: bool,
) -> Vec<Reg> {
    let map = &plan.stages[stage];
    let mut known = Known {
        loads: known_loads(scope, held, plan, map.program.inputs.len(), k, true),
        params: vec![None; map.program.params.len()],
        index: None,
    };
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
    at.eval(scope, inputs, map, known, stored)
}

/// An output of a stage at four columns, a float.
#[cube]
#[allow(unused_variables, clippy::too_many_arguments)]
pub(super) fn value(
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
        match eval_stage(scope, inputs, held, results, at, &plan, stage, k, false)[output] {
            Reg::F(x) => x,
            _ => panic!("what is reduced is a float"),
        }
    })
}

#[cube]
fn first_lane(x: I4) -> i32 {
    x.extract(0usize)
}

/// The column that a stage of one `i32` names, which is the same in a whole row; `held` is of any
/// columns.
#[cube]
#[allow(unused_variables)]
pub(super) fn named_column(
    inputs: &Inputs,
    held: &Sequence<F4>,
    results: &Sequence<f32>,
    row: usize,
    length: usize,
    #[comptime] plan: Interned<RowPlan>,
    #[comptime] stage: usize,
) -> i32 {
    intrinsic!(|scope| {
        let at = InRow {
            row,
            column: 0usize.into_expand(scope),
            length,
        };
        match eval_stage(scope, inputs, held, results, at, &plan, stage, 0, false)[0] {
            Reg::I(x) => first_lane::expand(scope, x),
            _ => panic!("a column is an i32"),
        }
    })
}

/// Values of columns that are there, and something else for the others.
#[cube]
pub(super) fn masked(
    x: F4,
    column: usize,
    length: usize,
    other: F4,
    #[comptime] aligned: bool,
) -> F4 {
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
fn lane_of(bits: U4, #[comptime] lane: usize) -> u32 {
    bits.extract(lane)
}

#[cube]
fn pair_of(bits: U4, #[comptime] lane: usize) -> u32 {
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
pub(super) fn put_each(
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
        let values = eval_stage(scope, inputs, held, results, at, &plan, stage, k, true);
        let outputs = &plan.stages[stage].program.outputs;
        let dtypes: Vec<DType> = outputs.iter().map(|(_, dtype)| *dtype).collect();
        for (o, value) in values.iter().enumerate() {
            let (dtype, nth) = (dtypes[o], nth_of_width(&dtypes, o));
            let chunk = chunk_of::expand(scope, row, column, length);
            let raw = value.to_raw(scope, dtype);
            match plan.aligned {
                true => store(scope, out, nth, chunk, raw, dtype),
                false => store_words(scope, out, o, at, raw, dtype),
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
pub(super) fn put_row(
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
        let values = eval_stage(scope, inputs, held, results, at, &plan, stage, 0, false);
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
