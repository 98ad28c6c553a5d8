//! Kernels compile where there is no GPU: CubeCL and NVRTC, up to what a driver would load.

use anymesh_core::{DType, Device, Result, Tensor, ops::Order};

/// A device that compiles, or why there is none.
fn device() -> Option<Device> {
    match anymesh_backend_cuda::compile_only() {
        Ok(device) => Some(device),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

#[test]
fn kernels_compile_and_are_not_run() -> Result<()> {
    let Some(device) = device() else {
        return Ok(());
    };
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?;
    for y in [
        x.exp()?,
        x.matmul(&x)?,
        x.softmax(-1)?,
        x.cumsum(0)?,
        x.sum(&[1], false)?,
    ] {
        let values = y.to_vec::<f32>()?;
        assert!(values.iter().all(|v| *v == 0.0), "{values:?}");
    }
    let order = x.argsort(0, Order::Ascending)?;
    assert_eq!(order.to_vec::<i32>()?, [0; 4]);
    let halves = x.cast(DType::BF16)?;
    assert_eq!(
        halves.matmul(&halves)?.cast(DType::F32)?.to_vec::<f32>()?,
        [0.0; 4]
    );
    Ok(())
}
