//! A device without memory: tensors have types and no values. It is how plans and rules are
//! explained at sizes that no machine could hold.

use crate::{
    Backend, Buffer, Capabilities, DType, Device, Error, Result, Shape,
    backend::{BoxFuture, Buffers, Kernel},
};
use std::{ops::Range, sync::LazyLock};

/// The device whose tensors have no values: ops run their checks, rules and reshards, and compute
/// nothing. There is one in a process, so that tensors of different calls meet.
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
///
/// # Any number of ranks
/// The ranks of a mesh on this device differ in the sizes of their parts only. So
/// [one rank](Mesh#without-values) stands for all of a mesh, the last one: part `i` of `p` of a
/// dimension of `n` is `[i * n / p, (i + 1) * n / p)`, hence no rank has a larger part of anything.
/// Where other ranks have empty parts, what an op does on those is tried too, so that its errors
/// show; sizes that differ otherwise take the same path.
///
/// # What is counted
/// A [device of one's own](Device::decorated) is without values as this one is and counts by
/// itself: [`Device::memory`] has the buffers that tensors of the held ranks would take there.
/// - On a [simulated mesh](Mesh::new) that is one rank, the largest: where a reshard sends anything,
///   the result is new memory, even if this very rank had it all.
/// - On a mesh that is [addressing](Mesh::addressing) one rank it is exactly that rank. Of several
///   addressed ranks it is the sum, less what they share because they compute the same.
/// - With a device for each rank ([`Mesh::over`]) each counts its own.
///
/// Memory inside of kernels and what a transport needs on the way is not counted. A plain tensor
/// that is put on a mesh of the same device is not copied: its parts are views that keep all of it.
///
/// ```
/// # use anymesh_core::{DType, Error, Mesh, Tensor, meta};
/// let device = meta().decorated(|backend, kernel| backend.launch(kernel));
/// let mesh = Mesh::new("dp=2048, tp=8", &device)?;
/// let w = Tensor::zeros([8192, 8192], DType::BF16, (&mesh, "[@dp, @tp]"))?;
/// assert_eq!(device.memory().in_use, 4 * 1024 * 2);
/// let rows = w.reshard("[@dp, _]")?;
/// assert_eq!(device.memory().in_use, 4 * 1024 * 2 + 4 * 8192 * 2);
/// assert_eq!(rows.shards()[77].1.dims(), [4, 8192]);
/// # Ok::<(), Error>(())
/// ```
pub fn meta() -> Device {
    static META: LazyLock<Device> = LazyLock::new(|| {
        Device::new(Meta(Capabilities {
            dtypes: DType::ALL.to_vec(),
            f64_math: true,
            max_buffer_bytes: u64::MAX,
            max_buffers: crate::map::MAX_BUFFERS,
            software: true,
            description: "no memory, no values".into(),
        }))
    });
    META.clone()
}

/// What is said where values are needed.
pub(crate) fn no_values(device: &str) -> Error {
    Error::Unsupported {
        device: device.into(),
        what: "reading values".into(),
        hint: "run the same program on the cpu device".into(),
    }
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

    fn placeholder(&self, bytes: usize) -> Option<Buffer> {
        Some(Buffer::new((), bytes))
    }

    fn download<'a>(&'a self, _: &'a Buffer, _: Range<usize>) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async { Err(no_values("meta")) })
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    /// All but products with a bias, which are composed as on the host.
    fn supports(&self, kernel: &Kernel) -> bool {
        !matches!(kernel, Kernel::Matmul(call) if call.bias.is_some())
    }

    /// Memory that is not there is counted as if it were.
    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        let buffer = |(dtype, shape): (DType, Shape)| Buffer::new((), shape.numel() * dtype.size());
        Ok(kernel.outputs().into_iter().map(buffer).collect())
    }
}
