//! Row programs against plain loops.

use super::*;
use crate::testing::{assert_close, dense_view, random, read, values};
use anymesh_kernel::{
    Layout, Scalar, View,
    backend::{RowBuilder, RowProgram},
};
use std::sync::Arc;

fn call(
    program: Arc<RowProgram>,
    shape: [usize; 2],
    inputs: &[&View],
    params: &[f64],
) -> RowProgramCall {
    RowProgramCall {
        op: "test",
        program,
        shape: shape.into(),
        inputs: inputs.iter().copied().cloned().collect(),
        params: params.iter().map(|p| Scalar::Float(*p)).collect(),
        over: false,
    }
}

/// The same numbers for each row (`along` 0) or each column (1) of a shape.
fn spread(values: &[f64], dtype: DType, shape: [usize; 2], along: usize) -> View {
    let mut view = dense_view(values, dtype, [values.len()]);
    let mut strides = smallvec![0, 0];
    strides[1 - along] = 1;
    view.layout = Layout {
        shape: shape.into(),
        strides,
        offset: 0,
    };
    view
}

/// Gradients of a layer norm: of the input, and of weight and bias as sums of columns.
fn norm_backward(x: DType, g: DType, w: DType) -> Arc<RowProgram> {
    let mut b = RowBuilder::new(&[x, g, w], 2);
    let mean = b.fold(ReduceOp::Sum, Some(0), |a| a.x[0]).expect("valid");
    let var = b
        .fold(ReduceOp::Sum, Some(0), |a| {
            let c = a.x[0] - a.r[mean];
            c * c
        })
        .expect("valid");
    let along = b
        .fold(ReduceOp::Sum, Some(0), |a| {
            let h = (a.x[0] - a.r[mean]) * (a.r[var] + a.p[1]).rsqrt();
            a.x[1] * a.x[2] * h
        })
        .expect("valid");
    let level = b
        .fold(ReduceOp::Sum, Some(0), |a| a.x[1] * a.x[2])
        .expect("valid");
    b.each([x], |a| {
        let root = (a.r[var] + a.p[1]).rsqrt();
        let h = (a.x[0] - a.r[mean]) * root;
        [(a.x[1] * a.x[2] - a.r[level] - h * a.r[along]) * root]
    })
    .expect("valid");
    b.columns([w, w], |a| {
        let h = (a.x[0] - a.r[mean]) * (a.r[var] + a.p[1]).rsqrt();
        [a.x[1] * h, a.x[1]]
    })
    .expect("valid");
    b.finish().expect("valid")
}

#[test]
fn gradients_of_a_norm_and_of_its_parameters_come_from_one_call() {
    for (x, g, tolerance) in [
        (DType::F64, DType::F64, 1e-12),
        (DType::F32, DType::BF16, 1e-5),
        (DType::BF16, DType::F32, 2e-2),
    ] {
        let w = if x == DType::F64 { x } else { DType::F32 };
        // One row, rows of several blocks, more rows than a task has.
        for (rows, n) in [(1, 64), (5, 1500), (700, 130)] {
            let eps = 1e-5;
            let xs = dense_view(&random(rows * n, 1, false), x, [rows, n]);
            let gs = dense_view(&random(rows * n, 2, false), g, [rows, n]);
            let ws = spread(&random(n, 3, false), w, [rows, n], 0);
            let call = call(
                norm_backward(x, g, w),
                [rows, n],
                &[&xs, &gs, &ws],
                &[1.0 / n as f64, eps],
            );
            assert!(fits(&call));
            let out = row_program(&call).expect("runs");
            let (xv, gv, wv) = (values(&xs), values(&gs), values(&ws));
            let (mut dx, mut dw, mut db) = (vec![], vec![0.0; n], vec![0.0; n]);
            for r in 0..rows {
                let at = r * n..(r + 1) * n;
                let (x, g) = (&xv[at.clone()], &gv[at]);
                let mean = x.iter().sum::<f64>() / n as f64;
                let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                let h: Vec<f64> = x.iter().map(|x| (x - mean) / (var + eps).sqrt()).collect();
                let gw: Vec<f64> = g.iter().zip(&wv).map(|(g, w)| g * w).collect();
                let level = gw.iter().sum::<f64>() / n as f64;
                let along = gw.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / n as f64;
                for j in 0..n {
                    dx.push((gw[j] - level - h[j] * along) / (var + eps).sqrt());
                    dw[j] += g[j] * h[j];
                    db[j] += g[j];
                }
            }
            assert_close(&read(&out[0], x), &dx, tolerance, "input");
            assert_close(&read(&out[1], w), &dw, 2e-5, "weight");
            assert_close(&read(&out[2], w), &db, 1e-6, "bias");
        }
    }
}

#[test]
fn what_is_the_same_in_a_row_can_be_an_output_a_reduction_and_a_sum_of_columns() {
    // Rows that share a block, and rows of several blocks.
    for (rows, n) in [(7, 100), (3, 2500)] {
        let x = dense_view(&random(rows * n, 4, false), DType::F32, [rows, n]);
        let mut b = RowBuilder::new(&[DType::F32], 0);
        let top = b.fold(ReduceOp::Max, None, |a| a.x[0]).expect("valid");
        let all = b
            .fold(ReduceOp::Sum, None, |a| a.r[top] * 0.5)
            .expect("valid");
        b.each([DType::F32; 3], |a| {
            [a.r[top] * 2.0, a.r[all], a.x[0] - a.r[top] * 2.0]
        })
        .expect("valid");
        b.columns([DType::F32], |a| [a.r[top] + 1.0])
            .expect("valid");
        let program = b.finish().expect("valid");
        let out = row_program(&call(program, [rows, n], &[&x], &[])).expect("runs");
        let xs = values(&x);
        let tops: Vec<f64> = (xs.chunks(n))
            .map(|row| row.iter().copied().fold(f64::MIN, f64::max))
            .collect();
        let each = |f: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            (0..rows * n).map(|i| f(i, tops[i / n])).collect()
        };
        let read = |k: usize| read(&out[k], DType::F32);
        assert_close(&read(0), &each(&|_, top| top * 2.0), 1e-6, "twice the top");
        let sums = each(&|_, top| top * 0.5 * n as f64);
        assert_close(&read(1), &sums, 1e-6, "the sum");
        assert_close(
            &read(2),
            &each(&|i, top| xs[i] - top * 2.0),
            1e-6,
            "elements",
        );
        let columns = vec![tops.iter().map(|top| top + 1.0).sum::<f64>(); n];
        assert_close(&read(3), &columns, 1e-6, "columns");
    }
}

#[test]
fn reductions_with_columns_and_numbers_of_rows_give_numbers_of_rows() {
    let (rows, n) = (40, 2100);
    let x = dense_view(&random(rows * n, 5, false), DType::F32, [rows, n]);
    let own: Vec<f64> = (0..rows).map(|r| (r * 53 % n) as f64).collect();
    let labels = spread(&own, DType::I32, [rows, n], 1);
    let mut b = RowBuilder::new(&[DType::F32, DType::I32], 1);
    let lse = b
        .fold(ReduceOp::LogSumExp, None, |a| a.x[0])
        .expect("valid");
    let picked = b
        .fold(ReduceOp::Sum, None, |a| {
            a.column().eq(a.x[1]).select(a.x[0], a.x[0].lit(0.0))
        })
        .expect("valid");
    let (top, low) = (
        b.fold(ReduceOp::Max, Some(0), |a| a.x[0]).expect("valid"),
        b.fold(ReduceOp::Min, None, |a| a.x[0]).expect("valid"),
    );
    b.rows(|a| [a.r[lse] - a.r[picked], a.r[top], a.r[low]])
        .expect("valid");
    let call = call(
        b.finish().expect("valid"),
        [rows, n],
        &[&x, &labels],
        &[2.0],
    );
    let out = row_program(&call).expect("runs");
    let xs = values(&x);
    let of = |f: &dyn Fn(usize, &[f64]) -> f64| -> Vec<f64> {
        xs.chunks(n).enumerate().map(|(r, row)| f(r, row)).collect()
    };
    let loss = of(&|r, row| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[own[r] as usize]);
    assert_close(&read(&out[0], DType::F32), &loss, 1e-6, "loss");
    let most = of(&|_, row| 2.0 * row.iter().copied().fold(f64::MIN, f64::max));
    assert_close(&read(&out[1], DType::F32), &most, 1e-6, "largest, twice");
    let least = of(&|_, row| row.iter().copied().fold(f64::MAX, f64::min));
    assert_close(&read(&out[2], DType::F32), &least, 0.0, "smallest");
}

#[test]
fn rows_may_lie_apart_and_turned_around() {
    let (rows, n) = (300, 260);
    let whole = dense_view(&random(rows * 2 * n, 7, false), DType::F32, [n, 2 * rows]);
    // Every second column of the memory, as rows.
    let view = View {
        layout: whole.layout.slice(1, 1, 2, rows).permute(&[1, 0]),
        ..whole.clone()
    };
    let mut b = RowBuilder::new(&[DType::F32], 0);
    let sum = b.fold(ReduceOp::Sum, None, |a| a.x[0]).expect("valid");
    b.each([DType::F32, DType::BF16], |a| [a.x[0] - a.r[sum], a.x[0]])
        .expect("valid");
    let call = call(b.finish().expect("valid"), [rows, n], &[&view], &[]);
    let out = row_program(&call).expect("runs");
    let xs = values(&view);
    let less: Vec<f64> = xs
        .chunks(n)
        .flat_map(|row| {
            let sum: f64 = row.iter().sum();
            row.iter().map(move |x| x - sum)
        })
        .collect();
    assert_close(&read(&out[0], DType::F32), &less, 1e-6, "less the sum");
    assert_close(&read(&out[1], DType::BF16), &xs, 4e-3, "copied");
}

#[test]
fn a_row_that_shares_a_block_has_the_bits_that_it_has_alone() {
    let (rows, dtype) = (23, DType::F32);
    for n in [48, 100, 256, 340, 700] {
        let (x, g) = (random(rows * n, 1, false), random(rows * n, 2, false));
        let w = random(n, 3, false);
        let run = |rows: std::ops::Range<usize>| {
            let shape = [rows.len(), n];
            let own = rows.start * n..rows.end * n;
            let (x, g) = (
                dense_view(&x[own.clone()], dtype, shape),
                dense_view(&g[own], dtype, shape),
            );
            let inputs = [&x, &g, &spread(&w, dtype, shape, 0)];
            let params = [1.0 / n as f64, 1e-5];
            let call = call(norm_backward(dtype, dtype, dtype), shape, &inputs, &params);
            read(&row_program(&call).expect("runs")[0], dtype)
        };
        let alone: Vec<f64> = (0..rows).flat_map(|row| run(row..row + 1)).collect();
        assert_eq!(run(0..rows), alone, "rows of {n}");
    }
}

#[test]
fn a_gradient_of_a_norm_that_is_compiled_ahead_has_the_bits_of_its_program() {
    assert_eq!(norm::ALL.len(), 38);
    for (program, which) in norm::ALL.iter() {
        for (rows, n) in [(1, 64), (3, 2500), (700, 50)] {
            let elements = |seed| {
                let mut values = random(rows * n, seed, false);
                values[n / 2] = [0.0, f64::INFINITY, -0.0, f64::NAN][seed as usize % 4];
                dense_view(&values, DType::F32, [rows, n])
            };
            let weight = spread(&random(n, 3, false), DType::F32, [rows, n], 0);
            let mut inputs = vec![elements(0), elements(2)];
            inputs.extend(which.weight.map(|_| weight));
            inputs.extend(which.beside.map(|_| elements(5)));
            let inputs: Vec<&View> = inputs.iter().collect();
            let params = [1.0 / n as f64, 1e-5];
            let call = call(Arc::new(program.clone()), [rows, n], &inputs, &params);
            assert!(Norm::of(&call).expect("of this backend").is_some());
            let both = [run::<f32>(&call), interpreted::<f32>(&call)];
            let [got, expected] = both.map(|made| {
                let made = made.expect("runs");
                let values = made.iter().flat_map(|made| read(made, DType::F32));
                // The sign of zero counts, the bits of a NaN do not.
                let bits = |x: f64| if x.is_nan() { u64::MAX } else { x.to_bits() };
                values.map(bits).collect::<Vec<u64>>()
            });
            assert!(got == expected, "{which:?} of {rows} rows of {n}");
        }
    }
}
