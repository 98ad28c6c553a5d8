//! Reductions. The space is seen as `[outer, reduced, inner]`; values come from the map program block by block and are folded into
//! one accumulator per output and part. Parts have a fixed size, so the result is the same for any number of threads.

use crate::{
    element::{Held, store},
    fold::{Arg, Extreme, Fold, LogSumExp, ProdFloat, ProdInt, SumFloat, SumInt},
    loops::Src,
    map::{BLOCK, Plan, Scratch},
    memory::Memory,
    parallel,
};
use anymesh_core::{
    Buffer, Dims, Error, Kind, Result,
    backend::{ReduceCall, ReduceOp},
};
use rayon::prelude::*;

/// Elements that one accumulator takes before another part begins.
const PART: usize = 1 << 15;
/// With this many independent pieces nothing needs to be cut further.
const ENOUGH: usize = 64;

/// The backend's reduce kernel.
pub(crate) fn reduce(call: &ReduceCall<'_>) -> Result<Buffer> {
    let (kind, scale) = (call.map.program.kinds[call.map.program.outputs[0].0 as usize], call.scale);
    macro_rules! float {
        ($t:ty) => {
            match call.op {
                ReduceOp::Sum => run(call, SumFloat::<$t>::new(scale)),
                ReduceOp::Prod => run(call, ProdFloat::<$t>::new(scale)),
                ReduceOp::Max => run(call, Extreme::<$t, true>::new(scale)),
                ReduceOp::Min => run(call, Extreme::<$t, false>::new(scale)),
                ReduceOp::ArgMax => run(call, Arg::<$t, true>::default()),
                ReduceOp::ArgMin => run(call, Arg::<$t, false>::default()),
                ReduceOp::LogSumExp => run(call, LogSumExp::<$t>::new(scale)),
            }
        };
    }
    macro_rules! int {
        ($t:ty, $sum:ty, $prod:ty) => {
            match call.op {
                ReduceOp::Sum => run(call, <$sum>::default()),
                ReduceOp::Prod => run(call, <$prod>::default()),
                ReduceOp::Max => run(call, Extreme::<$t, true>::default()),
                ReduceOp::Min => run(call, Extreme::<$t, false>::default()),
                ReduceOp::ArgMax => run(call, Arg::<$t, true>::default()),
                ReduceOp::ArgMin => run(call, Arg::<$t, false>::default()),
                ReduceOp::LogSumExp => Err(Error::DType { op: call.map.op, dtype: kind.dtype(), expected: "a float" }),
            }
        };
    }
    match kind {
        Kind::F32 => float!(f32),
        Kind::F64 => float!(f64),
        Kind::I32 => int!(i32, SumInt<i32>, ProdInt<i32>),
        Kind::I64 => int!(i64, SumInt<i64>, ProdInt<i64>),
        Kind::U32 => int!(u32, SumInt<u32>, ProdInt<u32>),
        // The sum of logical values is their `or`, the product their `and`.
        Kind::Bool => int!(u8, Extreme<u8, true>, Extreme<u8, false>),
    }
}

/// The sizes of the space and how it is cut.
struct Space {
    outer: usize,
    reduced: usize,
    inner: usize,
    /// Reduced positions per part.
    part: usize,
    parts: usize,
}

impl Space {
    /// The order of axes that brings the space into its form, and its sizes.
    fn new(dims: &[usize], axes: &[usize]) -> (Dims, Self) {
        let is_reduced = |d: &usize| axes.contains(d);
        let last_reduced = (0..dims.len()).rev().find(|d| is_reduced(d) && dims[*d] != 1);
        let first_inner = last_reduced.map_or(0, |d| d + 1);
        let mut order: Dims = (0..first_inner).filter(|d| !is_reduced(d)).collect();
        order.extend((0..dims.len()).filter(is_reduced));
        order.extend((first_inner..dims.len()).filter(|d| !is_reduced(d)));
        let size = |keep: &dyn Fn(&usize) -> bool| (0..dims.len()).filter(keep).map(|d| dims[d]).product::<usize>();
        let (outer, reduced) = (size(&|d| !is_reduced(d) && *d < first_inner), size(&is_reduced));
        let inner = size(&|d| !is_reduced(d) && *d >= first_inner);
        let part = if outer * inner.div_ceil(BLOCK) >= ENOUGH { reduced } else { (PART / inner.min(BLOCK)).max(1).min(reduced) };
        // Long rows are cut even where there are many of them: short chains of additions lose less.
        let part = if inner == 1 { part.min(PART) } else { part };
        (order, Self { outer, reduced, inner, part, parts: reduced.div_ceil(part) })
    }
}

fn run<F: Fold>(call: &ReduceCall<'_>, fold: F) -> Result<Buffer> {
    let (order, space) = Space::new(call.map.shape.dims(), call.axes);
    let plan = Plan::new(&call.map, Some(&order))?;
    let mut accs = vec![fold.start(); space.outer * space.parts * space.inner];
    if space.reduced * space.inner <= BLOCK {
        small_units(&plan, &fold, &space, &mut accs)?;
    } else {
        large_units(&plan, &fold, &space, &mut accs)?;
    }
    let results: Vec<F::Out> = (0..space.outer * space.inner)
        .map(|i| {
            let (o, c) = (i / space.inner, i % space.inner);
            let at = |part: usize| accs[(o * space.parts + part) * space.inner + c];
            fold.finish((1..space.parts).fold(at(0), |acc, part| fold.join(acc, at(part))))
        })
        .collect();
    let mut out = Memory::zeroed(results.len().saturating_mul(call.dtype.size()))?;
    store(&results, call.dtype, out.bytes_mut());
    Ok(out.buffer())
}

/// Many reductions that fit one block together.
fn small_units<F: Fold>(plan: &Plan<'_>, fold: &F, space: &Space, accs: &mut [F::Acc]) -> Result<()> {
    let unit = space.reduced * space.inner;
    let group = (parallel::CHUNK / unit).max(1);
    parallel::try_chunks(accs, group * space.inner, plan.len(), |task, accs| {
        Scratch::with(|scratch| {
            let per_block = BLOCK / unit;
            for (i, accs) in accs.chunks_mut(per_block * space.inner).enumerate() {
                let start = (task * group + i * per_block) * unit;
                let len = accs.len() / space.inner * unit;
                with_values(plan.block(start..start + len, scratch)?, len, |values| {
                    for (accs, values) in accs.chunks_mut(space.inner).zip(values.chunks(unit)) {
                        slab(fold, accs, values, 0);
                    }
                });
            }
            Ok(())
        })
    })
}

/// Reductions that take several blocks each.
fn large_units<F: Fold>(plan: &Plan<'_>, fold: &F, space: &Space, accs: &mut [F::Acc]) -> Result<()> {
    // One piece: some columns (all, where they fit a block) of one part of one outer position.
    let piece = |o: usize, part: usize, tile: usize, accs: &mut [F::Acc]| {
        Scratch::with(|scratch| {
            let rows = part * space.part..((part + 1) * space.part).min(space.reduced);
            let at_once = if accs.len() == space.inner { (BLOCK / space.inner).max(1) } else { 1 };
            for r in rows.clone().step_by(at_once) {
                let count = at_once.min(rows.end - r);
                let start = (o * space.reduced + r) * space.inner + tile * BLOCK;
                let len = count * accs.len();
                with_values(plan.block(start..start + len, scratch)?, len, |values| slab(fold, accs, values, r));
            }
            Ok(())
        })
    };
    let pieces: Vec<_> = accs
        .chunks_mut(space.inner)
        .enumerate()
        .flat_map(|(i, accs)| accs.chunks_mut(BLOCK).enumerate().map(move |(tile, accs)| (i / space.parts, i % space.parts, tile, accs)))
        .collect();
    if plan.len() < parallel::THRESHOLD {
        return pieces.into_iter().try_for_each(|(o, part, tile, accs)| piece(o, part, tile, accs));
    }
    pieces.into_par_iter().try_for_each(|(o, part, tile, accs)| piece(o, part, tile, accs))
}

/// Gives `f` a slice, also where all values are the same.
fn with_values<T: Held>(src: Src<'_, T>, len: usize, f: impl FnOnce(&[T])) {
    match src {
        Src::Many(values) => f(values),
        Src::One(value) => f(&[value; BLOCK][..len]),
    }
}

/// Folds values `[rows, inner]` into `inner` accumulators; the first row is number `at` of its reduction.
fn slab<F: Fold>(fold: &F, accs: &mut [F::Acc], values: &[F::In], at: usize) {
    if let [acc] = accs {
        return fold.row(acc, values, at);
    }
    for (r, values) in values.chunks(accs.len()).enumerate() {
        for (acc, value) in accs.iter_mut().zip(values) {
            fold.one(acc, *value, at + r);
        }
    }
}
