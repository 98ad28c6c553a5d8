//! Reductions of rows that become one launch with what is around them, and values that are made where
//! they are read.

mod support;

use anymesh_engine::Options;
use anymesh_kernel::{
    Device, View,
    backend::{ReduceCall, ReduceOp},
    map::{Builder, Val},
};
use smallvec::smallvec;
use support::{Seen, add, call, floats, one, read, seen, sum, watched_with};

/// Each element with the number of its row.
fn with_row(
    device: &Device,
    op: &'static str,
    x: &View,
    row: &View,
    f: impl for<'b> Fn(Val<'b>, Val<'b>) -> Val<'b>,
) -> View {
    let row = View {
        layout: (row.layout.unsqueeze(row.layout.shape.rank())).expand(&x.layout.shape),
        ..row.clone()
    };
    let b = Builder::new();
    let y = f(b.load(x.dtype), b.load(row.dtype));
    let program = b.finish(&[(y, x.dtype)]).expect("valid");
    let made = device.launch(call(op, &[x, &row], program));
    made.expect("launches").swap_remove(0)
}

fn rows(device: &Device, x: &View, mode: ReduceOp, scale: Option<f64>) -> View {
    let b = Builder::new();
    let program = b.finish(&[(b.load(x.dtype), x.dtype)]).expect("valid");
    let reduce = ReduceCall {
        map: call("along", &[x], program),
        axes: smallvec![x.layout.shape.rank() - 1],
        mode,
        scale,
        dtype: x.dtype,
    };
    device.launch(reduce).expect("launches").swap_remove(0)
}

/// A device that has row programs, and keeps nothing that it can make again.
fn along_rows(recipes: u64) -> (Device, Seen) {
    let mut options = Options::host();
    (options.rows, options.recipes) = (true, recipes);
    watched_with(options)
}

fn close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{a} {b}");
    }
}

#[test]
fn a_softmax_of_small_steps_is_one_row_program() {
    let values: Vec<f32> = (0..6 * 64).map(|i| (i * 37 % 101) as f32 / 20.0).collect();
    let softmax = |device: &Device, told: Option<&Seen>| {
        let x = floats(device, [2, 3, 64], &values);
        let top = rows(device, &x, ReduceOp::Max, None);
        let e = with_row(device, "exp", &x, &top, |x, top| ((x - top) * 0.5).exp());
        let sum = rows(device, &e, ReduceOp::Sum, None);
        let y = with_row(device, "div", &e, &sum, |e, sum| e / sum);
        let held = (sum.clone(), e.clone());
        drop((top, e, sum));
        let y = read(device, &y).expect("runs");
        if let Some(told) = told {
            assert_eq!(seen(told), ["row_program along+exp+along+div"]);
        }
        let of = [&held.0, &held.1].map(|view| read(device, view).expect("is there"));
        (y, of)
    };
    let (device, told) = along_rows(u64::MAX);
    let (y, [sum, e]) = softmax(&device, Some(&told));
    assert!(seen(&told).is_empty());
    let (expected, [sums, es]) = softmax(&anymesh_backend_cpu::device(), None);
    close(&y, &expected);
    close(&sum, &sums);
    close(&e, &es);
}

#[test]
fn a_norm_of_small_steps_is_one_row_program_with_its_numbers_of_rows() {
    let values: Vec<f32> = (0..6 * 64).map(|i| (i * 53 % 89) as f32 / 10.0).collect();
    let norm = |device: &Device| {
        let x = floats(device, [6, 64], &values);
        let mean = rows(device, &x, ReduceOp::Sum, Some(1.0 / 64.0));
        let off = with_row(device, "off", &x, &mean, |x, mean| x - mean);
        let square = one(device, "square", &off, |v| v * v);
        let var = rows(device, &square, ReduceOp::Sum, Some(1.0 / 64.0));
        let deviation = one(device, "root", &var, |v| (v + 1e-5).sqrt());
        let y = with_row(device, "div", &off, &deviation, |x, d| x / d);
        drop((mean, off, square, var));
        let y = read(device, &y).expect("runs");
        (y, read(device, &deviation).expect("is there"))
    };
    let (device, told) = along_rows(u64::MAX);
    let (y, deviation) = norm(&device);
    assert_eq!(seen(&told), ["row_program along+off+square+along+root+div"]);
    let (expected, deviations) = norm(&anymesh_backend_cpu::device());
    close(&y, &expected);
    close(&deviation, &deviations);
}

#[test]
fn what_is_only_held_is_made_where_it_is_read() {
    let (device, told) = along_rows(0);
    let x = floats(&device, [4], &[1.0, 2.0, 3.0, 4.0]);
    let y = one(&device, "double", &x, |v| v * 2.0);
    let sums = sum(&device, &x, 0);
    assert_eq!(read(&device, &sums), Ok(vec![10.0]));
    assert_eq!(seen(&told), ["reduce sum"]);
    // Read by a launch of a later list, and no more held: never stored.
    let z = one(&device, "next", &y, |v| v + 1.0);
    drop(y);
    assert_eq!(read(&device, &z), Ok(vec![3.0, 5.0, 7.0, 9.0]));
    assert_eq!(seen(&told), ["map double+next"]);
    // Asked for.
    let y = one(&device, "negative", &x, |v| -v);
    assert_eq!(read(&device, &sum(&device, &x, 0)), Ok(vec![10.0]));
    assert_eq!(read(&device, &y), Ok(vec![-1.0, -2.0, -3.0, -4.0]));
    assert_eq!(seen(&told), ["reduce sum", "map negative"]);
    // Nobody wants it any more.
    let y = one(&device, "negative", &x, |v| -v);
    assert_eq!(read(&device, &sum(&device, &x, 0)), Ok(vec![10.0]));
    drop(y);
    device.sync().expect("nothing is wrong");
    assert_eq!(seen(&told), ["reduce sum"]);
}

#[test]
fn what_is_made_of_more_than_itself_is_stored_and_a_sync_leaves_nothing() {
    let (device, told) = along_rows(0);
    let x = floats(&device, [2], &[1.0, 2.0]);
    let y = floats(&device, [2], &[3.0, 4.0]);
    let both = add(&device, &x, &y);
    let twice = one(&device, "double", &x, |v| v * 2.0);
    assert_eq!(read(&device, &sum(&device, &x, 0)), Ok(vec![3.0]));
    assert_eq!(seen(&told), ["map add", "reduce sum"]);
    device.sync().expect("nothing is wrong");
    assert_eq!(seen(&told), ["map double"]);
    assert_eq!(read(&device, &twice), Ok(vec![2.0, 4.0]));
    assert_eq!(read(&device, &both), Ok(vec![4.0, 6.0]));
    assert!(seen(&told).is_empty());
}

#[test]
fn what_changes_step_by_step_does_not_grow() {
    let (device, told) = along_rows(0);
    let mut x = floats(&device, [2], &[1.0, 2.0]);
    let other = floats(&device, [2], &[3.0, 4.0]);
    for _ in 0..8 {
        x = one(&device, "step", &x, |v| v * 0.5);
        read(&device, &sum(&device, &other, 0)).expect("runs");
    }
    let most = seen(&told)
        .iter()
        .map(|what| what.matches("step").count())
        .max();
    assert!(most <= Some(2), "{most:?}");
    assert_eq!(read(&device, &x), Ok(vec![1.0 / 256.0, 2.0 / 256.0]));
}
