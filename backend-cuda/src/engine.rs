//! GPUs that are open, and such as are not there.

use crate::{
    compile::Kernels,
    disk::Store,
    gpu::Gpu,
    stream::{GpuSlabs, GpuStream},
};
use anymesh_launcher::{Engine, NoSlabs, Nothing, Pieces};
use cubecl_common::device::DeviceId;
use cudarc::driver::CudaContext;
use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};

/// CubeCL's number for our kind of devices, unlike those of its own: each kind has its own threads.
const GPUS: u16 = 0xcda;

/// The same for devices that only compile.
const COMPILERS: u16 = 0xcdb;

/// The GPU of a context. The caller has checked that NVRTC can be loaded, and opens each GPU once.
pub(crate) fn open(index: u16, context: &Arc<CudaContext>) -> Result<Engine, String> {
    let gpu = Gpu::of(context).map_err(|e| e.to_string())?;
    if gpu.version < 70 {
        return Err(format!(
            "compute capability {}.{} is too old, kernels need 7.0",
            gpu.version / 10,
            gpu.version % 10
        ));
    }
    Engine::new(
        DeviceId::new(GPUS, index),
        format!("cuda:{index}"),
        Box::new(Kernels::new(gpu, Store::of_user())?),
        Box::new(GpuStream::new(context)?),
        Box::new(GpuSlabs(context.clone())),
        Pieces::OfSlabs,
    )
}

/// A device that compiles kernels for a GPU that is not there, and runs nothing.
pub(crate) fn compile_only(gpu: Gpu, store: Option<Store>) -> Result<Engine, String> {
    static COUNT: AtomicU16 = AtomicU16::new(0);
    Engine::new(
        DeviceId::new(COMPILERS, COUNT.fetch_add(1, Ordering::Relaxed)),
        "cuda:compile".into(),
        Box::new(Kernels::new(gpu, store)?),
        Box::new(Nothing),
        Box::<NoSlabs>::default(),
        Pieces::OfSlabs,
    )
}

#[cfg(test)]
mod tests;
