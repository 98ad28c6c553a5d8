//! What tests share: the device, numbers, and how results are held. Each folder of tests is a
//! program of its own and uses a part of it.
#![allow(dead_code)]

pub(crate) mod layer;

use anymesh_conformance::sweep::{self, Options, Precision};
use anymesh_core::{DType, Device, Element, Mesh, Result, Tensor};

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

/// Data of any dtype.
pub(crate) fn tensor<T: Element>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, &device()).expect("fits")
}

/// A vector.
pub(crate) fn i32s(values: &[i32]) -> Tensor {
    tensor(values, &[values.len()])
}

/// Small whole numbers: every sum of products of them is exact.
pub(crate) fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let data: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|i| ((i * 31 + seed * 17) % 11) as f32 - 5.0)
        .collect();
    tensor(&data, shape)
}

/// Small whole numbers, some of them equal, always the same.
pub(crate) fn whole_numbers(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect();
    tensor(&values, shape)
}

/// The elements as `f32`.
pub(crate) fn floats(t: &Tensor) -> Vec<f32> {
    t.cast(DType::F32)
        .expect("casts")
        .to_vec::<f32>()
        .expect("f32")
}

/// The values of a result, which must be `f32`.
#[track_caller]
pub(crate) fn get(result: Result<Tensor>) -> Vec<f32> {
    result.and_then(|t| t.to_vec()).expect("f32 values")
}

/// The values of a result, which must be `i32`.
#[track_caller]
pub(crate) fn ints(result: Result<Tensor>) -> Vec<i32> {
    result.and_then(|t| t.to_vec()).expect("i32 values")
}

/// The values of a result, which must be `bool`.
#[track_caller]
pub(crate) fn bools(result: Result<Tensor>) -> Vec<bool> {
    result.and_then(|t| t.to_vec()).expect("bool values")
}

/// A mesh of simulated ranks on the CPU.
pub(crate) fn mesh(axes: &str) -> Mesh {
    Mesh::new(axes, &device()).expect("a mesh")
}

/// Every rank holds what it should of a tensor, bit by bit.
#[track_caller]
pub(crate) fn same(sharded: &Tensor, whole: &Tensor) {
    near(sharded, whole, 0.0, "the tensor");
}

/// Every rank holds what it should of a tensor, up to a relative tolerance; bit by bit without one.
#[track_caller]
pub(crate) fn near(sharded: &Tensor, whole: &Tensor, tolerance: f64, what: &str) {
    let one = std::slice::from_ref;
    if let Err(why) = sweep::compare(precision(tolerance), one(sharded), one(whole)) {
        panic!("{what}: {why}");
    }
}

/// What a tolerance of zero and others ask for.
pub(crate) fn precision(tolerance: f64) -> Precision {
    match tolerance {
        0.0 => Precision::Bits,
        _ => Precision::Rounded(tolerance),
    }
}

/// Holds a function of tensors on three meshes, in at most `limit` layouts of its operands on each,
/// against what it gives for plain ones, also where that is an error.
#[track_caller]
pub(crate) fn hold(
    name: &str,
    precision: Precision,
    limit: usize,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) {
    let options = Options {
        limit: Some(limit),
        gradients: false,
        meshes: &["a=2", "a=3", "a=2, b=2"],
        ..Options::default()
    };
    let options = options.with_env().expect("the environment");
    sweep::hold(name, precision, inputs, &options, f).assert_right();
}
