//! A matrix product for each group of rows.

use crate::{
    grid::dense,
    matmul::{Matrix, Operand, SMALL, gemm, operand},
    memory::try_stored,
    parallel,
    scalar::Float,
};
use ::gemm::Parallelism;
use anymesh_kernel::{
    Buffer, Error, Kind, Result,
    backend::{GroupedCall, GroupedOp},
};
use std::ops::Range;

/// The last two dimensions of an operand, at matrix `index` of a stack.
fn matrix<'a, T: bytemuck::AnyBitPattern>(x: &'a Operand<'_, T>, index: usize) -> Matrix<'a, T> {
    let (rank, strides) = (x.layout.shape.rank(), &x.layout.strides);
    let step = if rank == 3 { strides[0] } else { 0 };
    Matrix {
        data: &x.data,
        start: (x.layout.offset as isize + index as isize * step) as usize,
        rows: strides[rank - 2],
        cols: strides[rank - 1],
    }
}

/// The matrix from row `row` on.
fn from_row<T>(matrix: Matrix<'_, T>, row: usize) -> Matrix<'_, T> {
    Matrix {
        start: (matrix.start as isize + row as isize * matrix.rows) as usize,
        ..matrix
    }
}

/// One product: which group, which of its rows are summed or multiplied, and where the result goes.
struct Part<'o, T> {
    group: usize,
    rows: Range<usize>,
    out: &'o mut [T],
}

/// Cuts `out` into the results of each group. Nothing is left of what is in no group.
fn parts<'o, T: Float>(
    mut out: &'o mut [T],
    rows: Vec<Range<usize>>,
    mode: GroupedOp,
    [k, m]: [usize; 2],
) -> Vec<Part<'o, T>> {
    let mut parts = Vec::with_capacity(rows.len());
    let mut at = 0;
    for (group, rows) in rows.into_iter().enumerate() {
        let (before, len) = match mode {
            GroupedOp::Rows => ((rows.start - at) * m, rows.len() * m),
            GroupedOp::Sums { .. } => (0, k * m),
        };
        let (skipped, rest) = out.split_at_mut(before);
        skipped.fill(T::zeroed());
        let (own, rest) = rest.split_at_mut(len);
        (out, at) = (rest, rows.end);
        if rows.is_empty() {
            own.fill(T::zeroed());
        } else {
            let out = own;
            parts.push(Part { group, rows, out });
        }
    }
    out.fill(T::zeroed());
    parts
}

fn float<T: Float>(call: &GroupedCall) -> Result<Buffer> {
    let [n, k, m] = call.sizes();
    let (a, b) = (operand::<T>(&call.a)?, operand::<T>(&call.b)?);
    let ends = dense::<i32>(&call.ends)?;
    let groups = GroupedCall::rows(&ends, call.first, call.groups(), n);
    let product = |part: Part<'_, T>, threads| {
        let Part { group, rows, out } = part;
        let left = from_row(matrix(&a, 0), rows.start);
        let (sizes, left, right) = match call.mode {
            GroupedOp::Rows => ([rows.len(), m, k], left, matrix(&b, group)),
            GroupedOp::Sums { .. } => (
                [k, m, rows.len()],
                left.t(),
                from_row(matrix(&b, 0), rows.start),
            ),
        };
        gemm((out, m), sizes, left, right, false, threads)
    };
    let len = match call.mode {
        GroupedOp::Rows => n * m,
        GroupedOp::Sums { groups } => groups * k * m,
    };
    let compute = |out: &mut [T]| {
        let parts = parts(out, groups, call.mode, [k, m]);
        if n * k * m < SMALL {
            (parts.into_iter()).try_for_each(|part| product(part, Parallelism::None))
        } else if parts.len() >= 2 * rayon::current_num_threads() {
            parallel::try_each(usize::MAX, parts.into_iter(), |_, part| {
                product(part, Parallelism::None)
            })
        } else {
            (parts.into_iter()).try_for_each(|part| product(part, Parallelism::Rayon(0)))
        }
    };
    Ok(try_stored(call.dtype, len, compute)?.buffer())
}

/// The backend's grouped product.
pub(crate) fn grouped(call: &GroupedCall) -> Result<Buffer> {
    match call.a.dtype.kind() {
        Kind::F32 => float::<f32>(call),
        Kind::F64 => float::<f64>(call),
        _ => Err(Error::DType {
            op: call.op,
            dtype: call.a.dtype,
            expected: "floats",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, dense_view, read, values, views};
    use anymesh_kernel::DType;

    #[test]
    fn every_layout_and_every_kind_of_ends_equals_the_plain_loop() {
        let (n, k, m, all) = (9, 5, 4, 4);
        for ends in [
            [2.0, 2.0, 7.0, 9.0],
            [0.0, 0.0, 0.0, 0.0],
            [3.0, 1.0, 5.0, 99.0],
            [-4.0, 9.0, 9.0, 9.0],
        ] {
            for (first, groups) in [(0, 4), (1, 2), (3, 1)] {
                for dtype in [DType::F32, DType::F64, DType::BF16] {
                    for sums in [false, true] {
                        let shape = if sums { vec![n, m] } else { vec![groups, k, m] };
                        let mode = match sums {
                            true => GroupedOp::Sums { groups },
                            false => GroupedOp::Rows,
                        };
                        for (a, b) in (views(&[n, k], dtype, 1, true).into_iter())
                            .zip(views(&shape, dtype, 2, true))
                        {
                            let (x, y) = (values(&a), values(&b));
                            let dtype = dtype.kind().dtype();
                            let call = GroupedCall {
                                op: "test",
                                a,
                                b,
                                ends: dense_view(&ends, DType::I32, [all]),
                                first,
                                mode,
                                dtype,
                            };
                            let mut expected = vec![0.0; if sums { groups * k * m } else { n * m }];
                            let mut row = 0;
                            for (g, end) in ends.iter().enumerate() {
                                let stop = (*end as isize).clamp(row as isize, n as isize) as usize;
                                for i in std::mem::replace(&mut row, stop)..stop {
                                    if g < first || g >= first + groups {
                                        continue;
                                    }
                                    for (p, j) in (0..k).flat_map(|p| (0..m).map(move |j| (p, j))) {
                                        let g = g - first;
                                        match sums {
                                            true => {
                                                expected[(g * k + p) * m + j] +=
                                                    x[i * k + p] * y[i * m + j]
                                            }
                                            false => {
                                                expected[i * m + j] +=
                                                    x[i * k + p] * y[(g * k + p) * m + j]
                                            }
                                        }
                                    }
                                }
                            }
                            let got = read(&grouped(&call).expect("runs"), dtype);
                            assert_close(&got, &expected, 0.0, &format!("{call:?}"));
                        }
                    }
                }
            }
        }
    }
}
