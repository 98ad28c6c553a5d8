//! Transports and devices to test with.

pub(crate) use crate::support::device;
use anymesh_core::{
    Backend, Buffer, Capabilities, DType, Device, Mesh, Result, Tensor,
    backend::{BoxFuture, Buffers, Kernel},
    transport::{Message, Part, Transport, check_group},
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The values 0, 1, 2, .. of some type.
pub(crate) fn counting(dims: &[usize], dtype: DType) -> Tensor {
    let n: usize = dims.iter().product();
    Tensor::arange(0, n as i64, 1, dtype, &device())
        .and_then(|t| t.reshape(dims))
        .expect("counts")
}

/// Plain f32 parts of ranks 0, 1, ..
pub(crate) fn parts(values: &[&[f32]]) -> Vec<Part> {
    let tensor = |v: &[f32]| Tensor::from_slice(v, [v.len()], &device()).expect("a part");
    values
        .iter()
        .enumerate()
        .map(|(rank, v)| Part::new(rank, &tensor(v)))
        .collect()
}

/// The values of an answer, rank by rank.
pub(crate) fn values(answers: Vec<Option<Tensor>>) -> Vec<Vec<f32>> {
    answers
        .into_iter()
        .map(|t| t.expect("every rank is here").to_vec().expect("values"))
        .collect()
}

/// A transport with nothing but what is required: all ranks on the devices of this process.
#[derive(Debug)]
pub(crate) struct Minimal;

impl Transport for Minimal {
    fn name(&self) -> &str {
        "minimal"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        messages.iter().try_for_each(|m| m.check(mesh))?;
        messages
            .into_iter()
            .map(|m| {
                m.part
                    .data
                    .map(|t| t.to_device(mesh.device(m.to)))
                    .transpose()
            })
            .collect()
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        check_group("barrier", mesh, group.iter().copied())
    }
}

/// What a [`Counting`] device was asked to do.
#[derive(Debug, Default)]
pub(crate) struct Work {
    kernels: AtomicUsize,
    transfers: AtomicUsize,
}

impl Work {
    /// Kernels and transfers over the host since the last question.
    pub(crate) fn take(&self) -> (usize, usize) {
        (
            self.kernels.swap(0, Ordering::Relaxed),
            self.transfers.swap(0, Ordering::Relaxed),
        )
    }
}

/// A device that counts its kernels and its transfers over the host, and leaves the work to the
/// CPU.
#[derive(Debug)]
struct Counting(Device, Arc<Work>);

pub(crate) fn counting_device() -> (Device, Arc<Work>) {
    let work = Arc::new(Work::default());
    (Device::new(Counting(device(), work.clone())), work)
}

impl Backend for Counting {
    fn name(&self) -> &str {
        "counting"
    }

    fn capabilities(&self) -> &Capabilities {
        self.0.backend().capabilities()
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.1.transfers.fetch_add(1, Ordering::Relaxed);
        self.0.backend().upload(bytes)
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        self.1.transfers.fetch_add(1, Ordering::Relaxed);
        self.0.backend().download(buffer, bytes)
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        self.0.backend().sync()
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.1.kernels.fetch_add(1, Ordering::Relaxed);
        self.0.backend().launch(kernel)
    }
}
