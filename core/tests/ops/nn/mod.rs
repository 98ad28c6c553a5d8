//! Neural-network ops against loops over `f64` written from their definitions.

mod attention;
mod classes;
mod features;
mod fused;
mod losses;
mod norms;
mod softmax;

use anymesh_core::{DType, Device, Tensor};
use std::sync::LazyLock;

static DEVICE: LazyLock<Device> = LazyLock::new(anymesh_backend_cpu::device);

/// Reproducible values in a range.
fn values(n: usize, low: f64, high: f64, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    (0..n).map(|_| low + (high - low) * next()).collect()
}

/// A tensor of `f64`, so that definitions are compared and not rounding.
fn tensor(data: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, &*DEVICE).expect("data fits the shape")
}

fn ints(data: &[i64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, &*DEVICE).expect("data fits the shape")
}

fn read(x: &Tensor) -> Vec<f64> {
    x.cast(DType::F64)
        .and_then(|x| x.to_vec())
        .expect("readable")
}

/// Equal up to `tolerance`, relative above 1 and absolute below.
#[track_caller]
fn assert_close(actual: &Tensor, expected: &[f64], tolerance: f64) {
    let actual = read(actual);
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let same =
            a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= tolerance * e.abs().max(1.0);
        assert!(same, "element {i} is {a}, expected {e}");
    }
}
