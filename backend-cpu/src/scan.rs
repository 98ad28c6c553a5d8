//! Running reductions along one axis. Floats accumulate in `f64` and are rounded only where they
//! are stored.

use crate::{
    element::Held,
    fold::log_sum_exp_step,
    grid::dense,
    memory::{Memory, stored},
    parallel,
    scalar::{Float, Int},
};
use anymesh_kernel::{
    Buffer, Error, Kind, Result,
    backend::{ScanCall, ScanOp},
};

/// The backend's scan kernel.
pub(crate) fn scan(call: &ScanCall) -> Result<(Buffer, Option<Buffer>)> {
    match call.input.dtype.kind() {
        Kind::F32 => float::<f32>(call),
        Kind::F64 => float::<f64>(call),
        Kind::I32 => int::<i32>(call),
        Kind::I64 => int::<i64>(call),
        Kind::U32 => int::<u32>(call),
        Kind::Bool => match call.mode {
            ScanOp::Sum | ScanOp::Max => extreme::<u8, true>(call),
            ScanOp::Prod | ScanOp::Min => extreme::<u8, false>(call),
            ScanOp::LogSumExp => Err(not_a_float(call)),
        },
    }
}

fn not_a_float(call: &ScanCall) -> Error {
    Error::DType {
        op: "scan",
        dtype: call.input.dtype,
        expected: "a float",
    }
}

fn float<T: Float>(call: &ScanCall) -> Result<(Buffer, Option<Buffer>)> {
    match call.mode {
        ScanOp::Sum => run(
            call,
            0.0,
            |acc: f64, v: T, _| acc + v.wide(),
            |acc| (T::narrow(acc), 0),
        ),
        ScanOp::Prod => run(
            call,
            1.0,
            |acc: f64, v: T, _| acc * v.wide(),
            |acc| (T::narrow(acc), 0),
        ),
        ScanOp::Max => extreme::<T, true>(call),
        ScanOp::Min => extreme::<T, false>(call),
        ScanOp::LogSumExp => {
            let value = |(top, sum): (f64, f64)| {
                (
                    T::narrow(if top.is_finite() { top + sum.ln() } else { top }),
                    0,
                )
            };
            run(
                call,
                (f64::NEG_INFINITY, 0.0),
                |acc, v: T, _| log_sum_exp_step::<T>(acc, (v.wide(), 1.0)),
                value,
            )
        }
    }
}

fn int<T: Int>(call: &ScanCall) -> Result<(Buffer, Option<Buffer>)> {
    match call.mode {
        ScanOp::Sum => run(call, T::ZERO, |acc, v: T, _| acc.add(v), |acc| (acc, 0)),
        ScanOp::Prod => run(call, T::ONE, |acc, v: T, _| acc.mul(v), |acc| (acc, 0)),
        ScanOp::Max => extreme::<T, true>(call),
        ScanOp::Min => extreme::<T, false>(call),
        ScanOp::LogSumExp => Err(not_a_float(call)),
    }
}

/// The latest among equals, and the latest NaN, as in PyTorch.
fn extreme<T: Held, const MAX: bool>(call: &ScanCall) -> Result<(Buffer, Option<Buffer>)> {
    let start = (if MAX { T::LOWEST } else { T::HIGHEST }, 0);
    let step = |(best, place): (T, i32), v: T, at: usize| {
        #[allow(clippy::eq_op)]
        let (is_nan, stays_nan) = (v != v, best != best);
        let wins = is_nan || (!stays_nan && if MAX { v >= best } else { v <= best });
        if wins { (v, at as i32) } else { (best, place) }
    };
    run(call, start, step, |acc| acc)
}

/// Scans the input, seen as `[outer, n, inner]`; `value` gives what is stored and its position.
fn run<T: Held, A: Copy + Send + Sync>(
    call: &ScanCall,
    start: A,
    step: impl Fn(A, T, usize) -> A + Sync,
    value: impl Fn(A) -> (T, i32) + Sync,
) -> Result<(Buffer, Option<Buffer>)> {
    let dims = call.input.layout.shape.dims();
    let (n, inner) = (
        dims[call.axis],
        dims[call.axis + 1..].iter().product::<usize>(),
    );
    let values = dense::<T>(&call.input)?;
    let unit = n * inner;
    let slab = |outer: usize, out: &mut [T], places: &mut [i32]| {
        let values = &values[outer * unit..(outer + 1) * unit];
        let mut accs = vec![start; inner];
        for r in 0..n {
            let row = r * inner..(r + 1) * inner;
            for ((acc, v), out) in accs
                .iter_mut()
                .zip(&values[row.clone()])
                .zip(&mut out[row.clone()])
            {
                *acc = step(*acc, *v, r);
                *out = value(*acc).0;
            }
            if let Some(places) = places.get_mut(row) {
                places
                    .iter_mut()
                    .zip(&accs)
                    .for_each(|(place, acc)| *place = value(*acc).1);
            }
        }
    };
    let mut places = Memory::elements::<i32>(if call.positions { values.len() } else { 0 })?;
    let out = stored(call.input.dtype, values.len(), |out: &mut [T]| {
        // Without positions every slab gets an empty slice for them.
        let mut places = places.typed_mut::<i32>();
        let mut slabs = Vec::with_capacity(values.len() / unit);
        for (outer, out) in out.chunks_mut(unit).enumerate() {
            let (here, rest) = places.split_at_mut(unit.min(places.len()));
            slabs.push((outer, out, here));
            places = rest;
        }
        parallel::each(
            values.len(),
            slabs.into_iter(),
            |_, (outer, out, places)| slab(outer, out, places),
        );
    })?;
    Ok((out.buffer(), call.positions.then(|| places.buffer())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, coordinates, dense_view, read, values, views};
    use anymesh_kernel::DType;

    fn naive(op: ScanOp, values: &[f64]) -> f64 {
        match op {
            ScanOp::Sum => values.iter().sum(),
            ScanOp::Prod => values.iter().product(),
            ScanOp::Max => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            ScanOp::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
            ScanOp::LogSumExp => values.iter().map(|v| v.exp()).sum::<f64>().ln(),
        }
    }

    #[test]
    fn every_scan_equals_the_reductions_of_its_prefixes() {
        for shape in [vec![6], vec![4, 3], vec![2, 5, 3]] {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::I32, DType::I64] {
                for view in views(&shape, dtype, 21, true) {
                    for axis in 0..shape.len() {
                        for op in [
                            ScanOp::Sum,
                            ScanOp::Prod,
                            ScanOp::Max,
                            ScanOp::Min,
                            ScanOp::LogSumExp,
                        ] {
                            if op == ScanOp::LogSumExp && !dtype.is_float() {
                                continue;
                            }
                            let (out, _) = scan(&ScanCall {
                                op: "test",
                                input: view.clone(),
                                axis,
                                mode: op,
                                positions: false,
                            })
                            .expect("runs");
                            let (data, strides) = (values(&view), view.layout.shape.strides());
                            let at = |c: &[usize]| {
                                c.iter()
                                    .zip(&strides)
                                    .map(|(c, s)| c * *s as usize)
                                    .sum::<usize>()
                            };
                            let expected: Vec<f64> = coordinates(&shape)
                                .iter()
                                .map(|c| {
                                    let mut c = c.clone();
                                    let last = c[axis];
                                    let prefix: Vec<f64> = (0..=last)
                                        .map(|i| {
                                            c[axis] = i;
                                            data[at(&c)]
                                        })
                                        .collect();
                                    naive(op, &prefix)
                                })
                                .collect();
                            let tolerance = if dtype == DType::F16 { 1e-3 } else { 1e-6 };
                            assert_close(
                                &read(&out, dtype),
                                &expected,
                                tolerance,
                                &format!("{op:?} {dtype} {shape:?} along {axis}"),
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn positions_are_of_the_latest_equal_and_nan_stays() {
        let nan = f64::NAN;
        let view = dense_view(
            &[1.0, 3.0, 3.0, 2.0, 2.0, nan, 9.0, 1.0],
            DType::F32,
            [2, 4],
        );
        let (values, places) = scan(&ScanCall {
            op: "test",
            input: view,
            axis: 1,
            mode: ScanOp::Max,
            positions: true,
        })
        .expect("runs");
        assert_close(
            &read(&values, DType::F32),
            &[1.0, 3.0, 3.0, 3.0, 2.0, nan, nan, nan],
            0.0,
            "values",
        );
        assert_eq!(
            read(&places.expect("asked for"), DType::I32),
            [0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 1.0, 1.0]
        );
    }

    #[test]
    fn long_sums_do_not_drift() {
        let n = 100_000;
        let view = dense_view(&vec![0.1; n], DType::F32, [n]);
        let (out, _) = scan(&ScanCall {
            op: "test",
            input: view,
            axis: 0,
            mode: ScanOp::Sum,
            positions: false,
        })
        .expect("runs");
        assert_eq!(
            read(&out, DType::F32)[n - 1] as f32,
            (f64::from(0.1f32) * n as f64) as f32
        );
    }
}
