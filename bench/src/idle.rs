//! A device whose kernels do nothing: what a program takes on it is what the host takes.

use anymesh_core::{
    Buffer, DType, Device, Result,
    backend::{Backend, BoxFuture, Buffers, Capabilities, Kernel},
};
use std::ops::Range;

/// A device beside the host, as a GPU is, that has every kernel and makes none of them: results are
/// handed out at once, and whoever reads gets zeros. Programs do on it what they do on a GPU, up to
/// the launch.
///
/// ```
/// use anymesh_core::Tensor;
/// let device = anymesh_bench::idle();
/// let x = Tensor::new(&[1f32, 2.0], &device)?;
/// assert!(device.runs_kernels());
/// assert_eq!(x.exp()?.to_vec::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn idle() -> Device {
    Device::new(Idle {
        capabilities: Capabilities {
            dtypes: DType::ALL.to_vec(),
            f64_math: true,
            max_buffer_bytes: u64::MAX,
            max_buffers: 16,
            software: true,
            description: "nothing: kernels are not made".into(),
        },
    })
}

#[derive(Debug)]
struct Idle {
    capabilities: Capabilities,
}

impl Backend for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        Ok(Buffer::new((), bytes.len()))
    }

    fn download<'a>(
        &'a self,
        _: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move { Ok(vec![0; bytes.len()]) })
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn supports(&self, _: &Kernel) -> bool {
        true
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        let outputs = kernel.outputs();
        let bytes = |(dtype, shape): &(DType, anymesh_core::Shape)| shape.numel() * dtype.size();
        Ok((outputs.iter())
            .map(|output| Buffer::new((), bytes(output)))
            .collect())
    }
}
