//! A device without memory: tensors have types and no values. It is how plans and rules are
//! explained at sizes that no machine could hold.

use crate::{
    Backend, Buffer, Capabilities, DType, Device, Error, Result, Shape,
    backend::{BoxFuture, Buffers, Kernel},
};
use std::ops::Range;

/// A device whose tensors have no values: ops run their checks, rules and reshards, and compute
/// nothing.
///
/// ```
/// # use anymesh_core::{DType, Error, Mesh, Tensor, meta, spmd::Ledger};
/// let device = meta();
/// let mesh = Mesh::new("dp=64, tp=8", &device)?;
/// let x = Tensor::zeros([1 << 20, 1 << 14], DType::BF16, &device)?.to_mesh(&mesh, "[@dp, _]")?;
/// let w = Tensor::zeros([1 << 14, 1 << 16], DType::BF16, &device)?.to_mesh(&mesh, "[@dp, @tp]")?;
/// let (y, ledger) = Ledger::record(|| x.matmul(&w));
/// assert_eq!(y?.type_string(), "bf16[1048576@dp, 65536@tp]");
/// assert_eq!(ledger.bytes(), (1 << 14) / 64 * 63 * (1 << 13) * 2, "the weight is gathered over dp");
/// # Ok::<(), Error>(())
/// ```
pub fn meta() -> Device {
    let capabilities = Capabilities {
        dtypes: DType::ALL.to_vec(),
        f64_math: true,
        max_buffer_bytes: u64::MAX,
        software: true,
        description: "no memory, no values".into(),
    };
    Device::new(Meta(capabilities))
}

#[derive(Debug)]
struct Meta(Capabilities);

impl Backend for Meta {
    fn name(&self) -> &str {
        "meta"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.0
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        Ok(Buffer::new((), bytes.len()))
    }

    fn download<'a>(&'a self, _: &'a Buffer, _: Range<usize>) -> BoxFuture<'a, Result<Vec<u8>>> {
        let hint = "run the same program on the cpu device".into();
        Box::pin(async {
            Err(Error::Unsupported {
                device: "meta".into(),
                what: "reading values".into(),
                hint,
            })
        })
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn supports(&self, _: &Kernel) -> bool {
        true
    }

    /// Memory that is not there is counted as if it were.
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        let buffer = |(dtype, shape): (DType, Shape)| Buffer::new((), shape.numel() * dtype.size());
        Ok(kernel.outputs().into_iter().map(buffer).collect())
    }
}
