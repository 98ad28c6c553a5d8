//! The host backend of anymesh: the embedded default that needs no driver, and the oracle every
//! other backend is held against.
//!
//! Correct first: sums of `f32` accumulate in `f64`, transcendental functions are computed in `f64`
//! and rounded once, and no result depends on the number of threads. Fast second: programs run over
//! cache-sized blocks, matrix products by tiles that stay in registers, and threads that wait for
//! work help with what is large.

#![deny(unsafe_code)]

mod attention;
mod conv;
mod copy;
mod crew;
mod element;
mod fastmath;
mod fold;
mod formulas;
mod frame;
mod functions;
mod grid;
mod grouped;
mod index;
mod loops;
mod map;
mod matmul;
mod matvec;
mod memory;
mod parallel;
mod product;
mod reduce;
mod row;
mod row_program;
mod scalar;
mod scan;
mod simd;
mod sort;
#[cfg(test)]
mod testing;

use anymesh_kernel::{
    Backend, Buffer, Capabilities, DType, Device, Error, Kernel, Result,
    backend::{BoxFuture, Buffers, HostMemory},
};
use memory::{MAX_BYTES, Memory, NAME, bytes_of};
use smallvec::smallvec;
use std::{ops::Range, sync::LazyLock};

/// The host as a device. There is one for the whole process.
///
/// ```
/// assert_eq!(anymesh_backend_cpu::device(), anymesh_backend_cpu::device());
/// ```
pub fn device() -> Device {
    static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::new(CpuBackend::new()));
    DEVICE.clone()
}

/// Runs kernels on the host, before the call returns: faults are returned by the call that met
/// them.
#[derive(Debug)]
pub struct CpuBackend {
    capabilities: Capabilities,
}

impl CpuBackend {
    /// A backend of its own; [`device`] is the one to share.
    pub fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let description = format!(
            "host CPU, {}, {threads} threads, {}",
            std::env::consts::ARCH,
            simd()
        );
        Self {
            capabilities: Capabilities {
                dtypes: DType::ALL.to_vec(),
                f64_math: true,
                max_buffer_bytes: MAX_BYTES,
                max_buffers: anymesh_kernel::map::MAX_BUFFERS,
                software: false,
                description,
            },
        }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

/// The vector instructions that matter, in words.
fn simd() -> &'static str {
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    return if std::arch::is_x86_feature_detected!("avx512f") {
        "AVX-512"
    } else if std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
    {
        "AVX2 and FMA"
    } else {
        "SSE2"
    };
    #[cfg(target_arch = "aarch64")]
    return "NEON";
    #[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
    return "portable code";
}

impl Backend for CpuBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        Ok(Memory::copy_of(bytes)?.buffer())
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        let copied = bytes_of(buffer).and_then(|all| {
            let detail = || format!("bytes {bytes:?} of a buffer of {}", all.len());
            all.get(bytes.clone())
                .map(<[u8]>::to_vec)
                .ok_or_else(|| Error::argument("download", "bytes", detail()))
        });
        Box::pin(std::future::ready(copied))
    }

    fn in_place<'b>(&self, buffer: &'b Buffer) -> Option<&'b [u8]> {
        bytes_of(buffer).ok()
    }

    fn host_memory(&self, bytes: usize) -> Result<Option<Box<dyn HostMemory>>> {
        Ok(Some(Box::new(Memory::new(bytes)?)))
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn supports(&self, kernel: &Kernel) -> bool {
        match kernel {
            Kernel::RowProgram(call) => row_program::fits(call),
            Kernel::Row(call) => row::fits(call),
            Kernel::Matmul(call) => matmul::fits(call),
            _ => true,
        }
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        Ok(match &kernel {
            Kernel::Map(call) => map::map(call)?,
            Kernel::Reduce(call) => smallvec![reduce::reduce(call)?],
            Kernel::Scan(call) => {
                let (values, positions) = scan::scan(call)?;
                std::iter::once(values).chain(positions).collect()
            }
            Kernel::Matmul(call) => smallvec![matmul::matmul(call)?],
            Kernel::Grouped(call) => smallvec![grouped::grouped(call)?],
            Kernel::Gather(call) => smallvec![index::gather(call)?],
            Kernel::CheckIndex(call) => {
                index::check(call)?;
                smallvec![]
            }
            Kernel::Scatter(call) => smallvec![index::scatter(call)?],
            Kernel::Search(call) => smallvec![sort::search(call)?],
            Kernel::Sort(call) => smallvec![sort::sort(call)?],
            Kernel::Conv(call) => smallvec![conv::conv(call)?],
            Kernel::Row(call) => row::row(call)?,
            Kernel::RowProgram(call) => row_program::row_program(call)?,
            Kernel::Attention(call) => {
                let (out, lse) = attention::attention(call)?;
                smallvec![out, lse]
            }
            Kernel::AttentionBackward(call) => attention::attention_backward(call)?,
        })
    }
}
