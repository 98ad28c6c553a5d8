//! Deferred execution against eager one, on the device itself.

use crate::Suite;
use anymesh::{DType, Device, Result, Tensor, ops::Expr};

#[path = "../../engine/tests/random/hold.rs"]
mod hold;

pub(crate) const SUITE: Suite = &[
    (
        "random_programs_give_the_same_bits_deferred_and_not",
        random_programs_give_the_same_bits_deferred_and_not,
    ),
    (
        "a_value_minus_itself_is_nan_where_it_is_infinite",
        a_value_minus_itself_is_nan_where_it_is_infinite,
    ),
];

/// CubeCL makes a zero of `x - x`, whatever `x` is. Drivers of wgpu may: WGSL lets them assume that
/// there are no infinities.
fn a_value_minus_itself_is_nan_where_it_is_infinite(device: &Device) {
    let may_assume = device.name().starts_with("wgpu");
    let run = |device: &Device, values: &Tensor| -> Result<()> {
        let x = values.to_device(device)?;
        let twice = x.mul(2.0)?;
        let in_one = Expr::new("none", &[&twice]).map(x.dtype(), |a| a.x[0] - a.x[0])?;
        for none in [twice.sub(&twice)?, in_one] {
            let none = none.cast(DType::F32)?.to_vec::<f32>()?;
            assert_eq!(none[..2], [0.0, 0.0], "{} on {device}", x.dtype());
            let right = |x: &f32| x.is_nan() || may_assume && *x == 0.0;
            assert!(none[2..].iter().all(right), "{none:?} on {device}");
        }
        Ok(())
    };
    let eager = device.innermost();
    let host = anymesh::device("eager:cpu").expect("the CPU backend is always there");
    let values = [1.0f32, -3.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let values = Tensor::new(&values, &host).and_then(|x| x.cast(dtype));
        let values = values.expect("the host has all dtypes");
        for device in [eager, &anymesh_engine::deferred(eager)] {
            if device.supports(dtype) {
                run(device, &values).expect("runs");
            }
        }
    }
}

/// A GPU knows launches from the third time on, and lists of them from the time after that.
const TIMES: usize = 6;

/// `ANYMESH_PROGRAMS` says how many, `ANYMESH_SEED` from which on. Kernels are compiled for each, so
/// that they are few by default.
fn random_programs_give_the_same_bits_deferred_and_not(device: &Device) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let first = number("ANYMESH_SEED").unwrap_or(0);
    let count = number("ANYMESH_PROGRAMS").unwrap_or(10);
    let eager = device.innermost();
    // A GPU tells its faults when it is read: `faults.rs` has those.
    let gpu = !matches!(eager.backend().host_memory(0), Ok(Some(_)));
    hold::hold(eager, first..first + count, TIMES, gpu);
}
