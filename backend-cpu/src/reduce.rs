//! Reductions. The space is seen as `[outer, reduced, inner]`; values come from the map program
//! block by block and are folded into one accumulator per output and part. Parts have a fixed size,
//! so the result is the same for any number of threads.

use crate::{
    copy,
    element::{Held, store},
    fold::{Arg, Extreme, Fold, LogSumExp, ProdFloat, ProdInt, SumFloat, SumInt},
    frame::{BLOCK, Src},
    map::{BoundProgram, Scratch},
    memory::Memory,
    parallel,
};
use anymesh_kernel::{
    Buffer, Dims, Error, Kind, Result,
    backend::{ReduceCall, ReduceOp},
};

/// Elements that one accumulator takes before another part begins.
const PART: usize = 1 << 15;
/// With this many independent pieces nothing needs to be cut further.
const ENOUGH: usize = 64;

/// The backend's reduce kernel.
pub(crate) fn reduce(call: &ReduceCall) -> Result<Buffer> {
    let (kind, scale) = (
        call.map.program.kinds[call.map.program.outputs[0].0 as usize],
        call.scale,
    );
    macro_rules! float {
        ($t:ty) => {
            match call.mode {
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
            match call.mode {
                ReduceOp::Sum => run(call, <$sum>::default()),
                ReduceOp::Prod => run(call, <$prod>::default()),
                ReduceOp::Max => run(call, Extreme::<$t, true>::default()),
                ReduceOp::Min => run(call, Extreme::<$t, false>::default()),
                ReduceOp::ArgMax => run(call, Arg::<$t, true>::default()),
                ReduceOp::ArgMin => run(call, Arg::<$t, false>::default()),
                ReduceOp::LogSumExp => Err(Error::DType {
                    op: call.map.op,
                    dtype: kind.dtype(),
                    expected: "a float",
                }),
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
        let last_reduced = (0..dims.len())
            .rev()
            .find(|d| is_reduced(d) && dims[*d] != 1);
        let first_inner = last_reduced.map_or(0, |d| d + 1);
        let mut order: Dims = (0..first_inner).filter(|d| !is_reduced(d)).collect();
        order.extend((0..dims.len()).filter(is_reduced));
        order.extend((first_inner..dims.len()).filter(|d| !is_reduced(d)));
        let size = |keep: &dyn Fn(&usize) -> bool| {
            (0..dims.len())
                .filter(keep)
                .map(|d| dims[d])
                .product::<usize>()
        };
        let (outer, reduced) = (
            size(&|d| !is_reduced(d) && *d < first_inner),
            size(&is_reduced),
        );
        let inner = size(&|d| !is_reduced(d) && *d >= first_inner);
        let part = if outer * inner.div_ceil(BLOCK) >= ENOUGH {
            reduced
        } else {
            (PART / inner.min(BLOCK)).max(1).min(reduced)
        };
        // Long rows are cut even where there are many of them: short chains of additions lose less.
        let part = if inner == 1 { part.min(PART) } else { part };
        (
            order,
            Self {
                outer,
                reduced,
                inner,
                part,
                parts: reduced.div_ceil(part),
            },
        )
    }
}

fn run<F: Fold>(call: &ReduceCall, fold: F) -> Result<Buffer> {
    let (order, space) = Space::new(call.map.shape.dims(), &call.axes);
    let straight = copy::straightened(&call.map.inputs)?;
    let inputs = straight.as_deref().unwrap_or(&call.map.inputs);
    let plan = BoundProgram::new(&call.map, inputs, Some(&order))?;
    let mut accs = vec![fold.start(); space.outer * space.parts * space.inner];
    if space.reduced * space.inner <= BLOCK {
        small_units(&plan, &fold, &space, &mut accs)?;
    } else {
        large_units(&plan, &fold, &space, &mut accs)?;
    }
    let mut results = Vec::with_capacity(space.outer * space.inner);
    for parts in accs.chunks_mut(space.parts * space.inner) {
        let (first, later) = parts.split_at_mut(space.inner);
        for part in later.chunks(space.inner) {
            first
                .iter_mut()
                .zip(part)
                .for_each(|(acc, later)| *acc = fold.join(*acc, *later));
        }
        results.extend(first.iter().map(|acc| fold.finish(*acc)));
    }
    let mut out = Memory::new(results.len().saturating_mul(call.dtype.size()))?;
    store(&results, call.dtype, out.bytes_mut());
    Ok(out.buffer())
}

/// Many reductions that fit one block together.
fn small_units<F: Fold>(
    plan: &BoundProgram<'_>,
    fold: &F,
    space: &Space,
    accs: &mut [F::Acc],
) -> Result<()> {
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
                        slab(fold, accs, values, space.inner, 0);
                    }
                });
            }
            Ok(())
        })
    })
}

/// Reductions that take several blocks each.
fn large_units<F: Fold>(
    plan: &BoundProgram<'_>,
    fold: &F,
    space: &Space,
    accs: &mut [F::Acc],
) -> Result<()> {
    // One piece: some columns (all, where they fit a block) of one part of one outer position.
    let piece = |o: usize, part: usize, tile: usize, accs: &mut [F::Acc]| {
        let rows = part * space.part..((part + 1) * space.part).min(space.reduced);
        if accs.len() > 1
            && let Some(values) = plan.in_place::<F::In>()
        {
            // All rows at once, so that accumulators need not be written between them.
            let start = (o * space.reduced + rows.start) * space.inner + tile * BLOCK;
            let len = (rows.len() - 1) * space.inner + accs.len();
            fold.slab(accs, &values[start..start + len], space.inner, rows.start);
            return Ok(());
        }
        Scratch::with(|scratch| {
            let at_once = if accs.len() == space.inner {
                (BLOCK / space.inner).max(1)
            } else {
                1
            };
            for r in rows.clone().step_by(at_once) {
                let count = at_once.min(rows.end - r);
                let start = (o * space.reduced + r) * space.inner + tile * BLOCK;
                let len = count * accs.len();
                let step = accs.len();
                with_values(plan.block(start..start + len, scratch)?, len, |values| {
                    slab(fold, accs, values, step, r)
                });
            }
            Ok(())
        })
    };
    let pieces = accs
        .chunks_mut(space.inner)
        .enumerate()
        .flat_map(|(i, accs)| {
            accs.chunks_mut(BLOCK)
                .enumerate()
                .map(move |(tile, accs)| (i / space.parts, i % space.parts, tile, accs))
        });
    parallel::try_each(plan.len(), pieces, |_, (o, part, tile, accs)| {
        piece(o, part, tile, accs)
    })
}

/// Gives `f` a slice, also where all values are the same.
fn with_values<T: Held>(src: Src<'_, T>, len: usize, f: impl FnOnce(&[T])) {
    match src {
        Src::Many(values) => f(values),
        Src::One(value) => f(&[value; BLOCK][..len]),
    }
}

/// Folds values `[rows, inner]` into `inner` accumulators; the first row is number `at` of its
/// reduction.
fn slab<F: Fold>(fold: &F, accs: &mut [F::Acc], values: &[F::In], step: usize, at: usize) {
    match accs {
        [acc] => fold.row(acc, values, at),
        _ => fold.slab(accs, values, step, at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, coordinates, dense_view, random, read, values, views};
    use anymesh_kernel::{
        DType, MapProgram, Shape, View,
        backend::{MapCall, MapInput},
        map::Builder,
    };
    use smallvec::smallvec;

    const OPS: [ReduceOp; 7] = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::ArgMax,
        ReduceOp::ArgMin,
        ReduceOp::LogSumExp,
    ];

    fn run(
        view: &View,
        program: &MapProgram,
        axes: &[usize],
        op: ReduceOp,
        scale: Option<f64>,
        dtype: DType,
    ) -> Vec<f64> {
        let input = MapInput {
            view: view.clone(),
            window: None,
        };
        let map = MapCall {
            op: "test",
            program: program.clone(),
            shape: view.layout.shape.clone(),
            inputs: smallvec![input],
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        };
        read(
            &reduce(&ReduceCall {
                map,
                axes: axes.into(),
                mode: op,
                scale,
                dtype,
            })
            .expect("runs"),
            dtype,
        )
    }

    /// All values that meet in each output, in order.
    fn groups(view: &View, axes: &[usize]) -> Vec<Vec<f64>> {
        let dims = view.layout.shape.dims();
        let kept: Vec<usize> = (0..dims.len()).filter(|d| !axes.contains(d)).collect();
        let mut groups = vec![vec![]; kept.iter().map(|d| dims[*d]).product()];
        for (c, v) in coordinates(dims).iter().zip(values(view)) {
            groups[kept.iter().fold(0, |at, d| at * dims[*d] + c[*d])].push(v);
        }
        groups
    }

    fn naive(values: &[f64], op: ReduceOp) -> f64 {
        let first = |better: &dyn Fn(f64, f64) -> bool| {
            (1..values.len()).fold(0, |best, i| {
                if better(values[i], values[best]) || (values[i].is_nan() && !values[best].is_nan())
                {
                    i
                } else {
                    best
                }
            })
        };
        let (most, least) = (first(&|a, b| a > b), first(&|a, b| a < b));
        match op {
            ReduceOp::Sum => values.iter().sum(),
            ReduceOp::Prod => values.iter().product(),
            ReduceOp::Max => values[most],
            ReduceOp::Min => values[least],
            ReduceOp::ArgMax => most as f64,
            ReduceOp::ArgMin => least as f64,
            ReduceOp::LogSumExp => values.iter().map(|v| v.exp()).sum::<f64>().ln(),
        }
    }

    #[test]
    fn every_reduction_over_every_axis_of_every_layout_equals_the_plain_loop() {
        let shapes: [&[usize]; 7] = [
            &[],
            &[9],
            &[4, 3],
            &[2, 3, 4],
            &[1, 3, 1, 2],
            &[3, 2, 1100],
            &[1100, 3],
        ];
        for shape in shapes {
            for dtype in [
                DType::F32,
                DType::F64,
                DType::BF16,
                DType::I32,
                DType::I64,
                DType::U8,
                DType::Bool,
            ] {
                for set in 0..1usize << shape.len() {
                    let axes: Vec<usize> = (0..shape.len()).filter(|d| set >> d & 1 == 1).collect();
                    for view in views(shape, dtype, 11, true) {
                        let groups = groups(&view, &axes);
                        for op in OPS {
                            let is_arg = matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin);
                            let skip = (op == ReduceOp::LogSumExp && !dtype.is_float())
                                || (dtype == DType::Bool
                                    && matches!(op, ReduceOp::Sum | ReduceOp::Prod))
                                || (op == ReduceOp::Prod && dtype != DType::F64);
                            if skip {
                                continue;
                            }
                            let out = if is_arg { DType::I32 } else { dtype };
                            let got =
                                run(&view, &MapProgram::cast(dtype, dtype), &axes, op, None, out);
                            let wrap = |v: f64| {
                                if out == DType::U8 {
                                    f64::from(v as i64 as u8)
                                } else {
                                    v
                                }
                            };
                            let expected: Vec<f64> =
                                groups.iter().map(|g| wrap(naive(g, op))).collect();
                            let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-6 };
                            assert_close(
                                &got,
                                &expected,
                                tolerance,
                                &format!(
                                    "{op:?} {dtype} {shape:?} over {axes:?} of {:?}",
                                    view.layout
                                ),
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn large_reductions_are_cut_and_joined_correctly() {
        for (shape, axes) in [
            (vec![300_000], vec![0]),
            (vec![3, 70_000], vec![1]),
            (vec![50_000, 5], vec![0]),
            (vec![40, 5000], vec![0]),
            (vec![2, 20_000, 3], vec![1]),
        ] {
            let n = shape.iter().product();
            let view = dense_view(&random(n, 4, false), DType::F32, shape.clone());
            let groups = groups(&view, &axes);
            for op in [
                ReduceOp::Sum,
                ReduceOp::Max,
                ReduceOp::ArgMin,
                ReduceOp::LogSumExp,
            ] {
                let out = if op == ReduceOp::ArgMin {
                    DType::I32
                } else {
                    DType::F32
                };
                let got = run(
                    &view,
                    &MapProgram::cast(DType::F32, DType::F32),
                    &axes,
                    op,
                    None,
                    out,
                );
                let expected: Vec<f64> = groups.iter().map(|g| naive(g, op)).collect();
                assert_close(&got, &expected, 1e-7, &format!("{op:?} {shape:?}"));
            }
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        for (shape, axes) in [
            (vec![300_000], vec![0]),
            (vec![70_000, 5], vec![0]),
            (vec![500, 700], vec![1]),
        ] {
            let view = dense_view(&random(shape.iter().product(), 8, false), DType::F64, shape);
            let sum = || {
                run(
                    &view,
                    &MapProgram::cast(DType::F64, DType::F64),
                    &axes,
                    ReduceOp::Sum,
                    None,
                    DType::F64,
                )
            };
            let sums = [1, 2, 5].map(|n| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(n)
                    .build()
                    .expect("threads")
                    .install(sum)
            });
            assert!(sums[0] == sums[1] && sums[0] == sums[2]);
        }
    }

    #[test]
    fn ties_go_to_the_first_and_nan_to_the_first_nan() {
        let nan = f64::NAN;
        let view = dense_view(
            &[1.0, 3.0, 3.0, 0.0, 0.0, nan, 5.0, nan],
            DType::F32,
            [2, 4],
        );
        let program = MapProgram::cast(DType::F32, DType::F32);
        assert_eq!(
            run(&view, &program, &[1], ReduceOp::ArgMax, None, DType::I32),
            [1.0, 1.0]
        );
        assert_eq!(
            run(&view, &program, &[1], ReduceOp::ArgMin, None, DType::I32),
            [3.0, 1.0]
        );
        assert_eq!(
            run(&view, &program, &[0, 1], ReduceOp::ArgMax, None, DType::I32),
            [5.0]
        );
        assert_eq!(
            run(&view, &program, &[0], ReduceOp::ArgMax, None, DType::I32),
            [0.0, 1.0, 1.0, 1.0]
        );
        assert!(run(&view, &program, &[0, 1], ReduceOp::Max, None, DType::F32)[0].is_nan());
        let lowest = dense_view(&[f64::NEG_INFINITY; 3], DType::F32, [3]);
        assert_eq!(
            run(&lowest, &program, &[0], ReduceOp::ArgMax, None, DType::I32),
            [0.0]
        );
    }

    #[test]
    fn log_sum_exp_neither_overflows_nor_invents_nan() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let view = dense_view(
            &[-inf, -inf, 1000.0, 1000.0, inf, -inf, 1.0, nan],
            DType::F32,
            [4, 2],
        );
        let program = MapProgram::cast(DType::F32, DType::F32);
        for (view, axes) in [
            (view.clone(), [1]),
            (
                View {
                    layout: view.layout.permute(&[1, 0]),
                    ..view
                },
                [0],
            ),
        ] {
            let got = run(
                &view,
                &program,
                &axes,
                ReduceOp::LogSumExp,
                None,
                DType::F32,
            );
            assert_close(
                &got,
                &[-inf, 1000.0 + 2f64.ln(), inf, nan],
                1e-7,
                "log-sum-exp",
            );
        }
    }

    #[test]
    fn the_program_runs_in_front_and_the_scale_behind() {
        let b = Builder::new();
        let x = b.load(DType::F16);
        let program = b.finish(&[(x * x, DType::F16)]).expect("valid");
        let view = dense_view(&[300.0, 400.0], DType::F16, [2]);
        // Squares overflow f16; their mean times a small factor does not, because only the result
        // is stored.
        assert_eq!(
            run(
                &view,
                &program,
                &[0],
                ReduceOp::Sum,
                Some(0.5 / 125.0),
                DType::F16
            ),
            [1000.0]
        );
        let constant = MapProgram::cast(DType::F32, DType::F32);
        let expanded = View {
            layout: dense_view(&[2.0], DType::F32, [1])
                .layout
                .expand(&Shape::from([5000])),
            ..dense_view(&[2.0], DType::F32, [1])
        };
        assert_eq!(
            run(&expanded, &constant, &[0], ReduceOp::Sum, None, DType::F32),
            [10_000.0]
        );
    }

    #[test]
    fn sums_of_many_f32_are_correctly_rounded() {
        let n = 1 << 20;
        let view = dense_view(&vec![0.1; n], DType::F32, [n]);
        let got = run(
            &view,
            &MapProgram::cast(DType::F32, DType::F32),
            &[0],
            ReduceOp::Sum,
            None,
            DType::F32,
        );
        assert_eq!(got[0] as f32, (f64::from(0.1f32) * n as f64) as f32);
    }
}
