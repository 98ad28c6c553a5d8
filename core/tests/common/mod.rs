//! What the tests of moved elements share. Each test file is a program of its own and uses a part
//! of it.
#![allow(dead_code)]

use anymesh_core::{Device, Result, Tensor};

/// The CPU device.
pub(crate) fn device() -> Device {
    anymesh_backend_cpu::device()
}

/// A tensor that counts up from zero, so that every element names the place it came from.
pub(crate) fn counting(dims: &[usize]) -> Tensor {
    let values: Vec<i32> = (0..dims.iter().product::<usize>() as i32).collect();
    Tensor::from_slice(&values, dims, &device()).expect("counts")
}

/// All coordinates of a shape in row-major order.
pub(crate) fn coordinates(dims: &[usize]) -> Vec<Vec<usize>> {
    dims.iter().fold(vec![vec![]], |all, &n| {
        all.iter()
            .flat_map(|c| (0..n).map(|i| [&c[..], &[i]].concat()))
            .collect()
    })
}

/// The flat position of coordinates in a shape.
pub(crate) fn flat(dims: &[usize], at: &[usize]) -> i32 {
    dims.iter().zip(at).fold(0, |flat, (n, i)| flat * n + i) as i32
}

/// Checks the shape and every element of an i32 tensor against a function of the coordinates.
#[track_caller]
pub(crate) fn expect(actual: Result<Tensor>, dims: &[usize], element: impl Fn(&[usize]) -> i32) {
    let actual = actual.expect("the op runs");
    assert_eq!(actual.dims(), dims);
    let expected: Vec<i32> = coordinates(dims).iter().map(|at| element(at)).collect();
    assert_eq!(actual.to_vec::<i32>().expect("values"), expected);
}

/// Like [`expect`] for a tensor that counts up and was only viewed: what the layout says and what
/// the device reads must agree.
#[track_caller]
pub(crate) fn expect_view(
    actual: Result<Tensor>,
    dims: &[usize],
    element: impl Fn(&[usize]) -> i32,
) {
    let actual = actual.expect("the op runs");
    let positions: Vec<i32> = actual.layout().positions().map(|p| p as i32).collect();
    let expected: Vec<i32> = coordinates(dims).iter().map(|at| element(at)).collect();
    assert_eq!(positions, expected, "positions");
    let mut bytes = vec![0; actual.numel() * 4];
    actual.copy_bytes(&mut bytes).expect("a copy");
    assert_eq!(
        bytes,
        actual.to_bytes().expect("values"),
        "bytes that are read in place"
    );
    expect(Ok(actual), dims, element);
}
