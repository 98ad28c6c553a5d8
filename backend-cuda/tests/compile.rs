//! Kernels compile where there is no GPU: CubeCL and NVRTC, up to what a driver would load.

use anymesh_backend_cuda::{Model, compile_only};
use anymesh_core::{
    DType, Device, Result, Tensor,
    ops::{AttentionOptions, Order, attention::attention_backward},
};

/// A device that compiles, or why there is none.
fn device(model: Model) -> Option<Device> {
    match compile_only(model) {
        Ok(device) => Some(device),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

#[test]
fn kernels_compile_and_are_not_run() -> Result<()> {
    let Some(device) = device(Model::H200) else {
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

#[test]
fn attention_compiles_for_every_size_of_heads_on_each_kind_of_tensor_cores() -> Result<()> {
    for model in [Model::A100, Model::H200] {
        let Some(device) = device(model) else {
            return Ok(());
        };
        let sizes = [
            (DType::BF16, &[32, 64, 80, 128, 256][..]),
            (DType::F16, &[64]),
            (DType::F32, &[16, 32, 64, 128]),
        ];
        for (dtype, sizes) in sizes {
            for size in sizes {
                let x = Tensor::zeros([1, 2, 96, *size], dtype, &device)?;
                let options = AttentionOptions::causal();
                let forward = x.attention(&x, &x, &options)?;
                let (dq, dk, dv) = attention_backward(&x, &x, &x, &forward, &x, &options)?;
                for made in [&forward.out, &dq, &dk, &dv] {
                    let values = made.cast(DType::F32)?.to_vec::<f32>()?;
                    assert!(values.iter().all(|v| *v == 0.0));
                }
            }
        }
    }
    Ok(())
}
