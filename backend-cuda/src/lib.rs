//! NVIDIA GPUs: the shared kernels compiled by NVRTC, and cuBLASLt for matrix products.
//!
//! Nothing of CUDA is needed to build; the driver, NVRTC and cuBLASLt are loaded when a device is
//! opened. Where one is missing the error says which and what to install.
//!
//! CubeCL is the compiler and `anymesh_launcher` makes launches; here is what only CUDA has: `compile`
//! makes cubins of kernels, which `disk` keeps, `stream` is the one stream of the driver on which
//! everything runs, `engine` opens GPUs.

mod compile;
mod cublaslt;
mod disk;
mod engine;
#[cfg(feature = "nccl")]
mod gate;
mod gpu;
#[cfg(feature = "nccl")]
pub mod nccl;
mod stream;

pub use anymesh_launcher::MemoryUse;

use anymesh_kernel::{Device, Error, Result};
use anymesh_launcher::Engine;
use anymesh_shaders::{Cores, CubeBackend};
use cudarc::driver::{CudaContext, sys};
use gpu::Gpu;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

fn unavailable(selector: Option<&str>, reason: String, hint: &str) -> Error {
    let device = selector.map_or_else(|| "cuda".to_string(), |s| format!("cuda:{s}"));
    Error::DeviceUnavailable {
        device,
        reason,
        hint: hint.into(),
    }
}

fn count(selector: Option<&str>) -> Result<usize> {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable(
            selector,
            "libcuda was not found".into(),
            "install the NVIDIA driver, or use the wgpu or cpu device",
        ));
    }
    let count = CudaContext::device_count().map_err(|e| {
        unavailable(
            selector,
            format!("the driver refused: {e}"),
            "check it with nvidia-smi",
        )
    })?;
    Ok(count.max(0) as usize)
}

/// How many GPUs this process may use, at least one. Nothing is opened on any of them.
pub fn gpu_count() -> Result<usize> {
    match count(None)? {
        0 => Err(no_such_gpu(None, 0)),
        count => Ok(count),
    }
}

fn no_such_gpu(selector: Option<&str>, count: usize) -> Error {
    unavailable(
        selector,
        format!("there are {count} NVIDIA GPUs"),
        "choose an index below that, or check CUDA_VISIBLE_DEVICES",
    )
}

fn context(index: usize, selector: Option<&str>) -> Result<Arc<CudaContext>> {
    let count = count(selector)?;
    if index >= count {
        return Err(no_such_gpu(selector, count));
    }
    CudaContext::new(index).map_err(|e| {
        unavailable(
            selector,
            format!("the driver refused: {e}"),
            "check it with nvidia-smi",
        )
    })
}

fn describe(context: &CudaContext) -> String {
    let name = context.name().unwrap_or_else(|_| "NVIDIA GPU".into());
    let (major, minor) = context.compute_capability().unwrap_or((0, 0));
    let memory = context.total_mem().unwrap_or(0) as f64 / f64::from(1 << 30);
    format!("{name} (compute capability {major}.{minor}, {memory:.0} GiB)")
}

/// The GPUs of this machine in words, by index.
pub fn gpus() -> Result<Vec<String>> {
    let first = context(0, None)?;
    let count = CudaContext::device_count().unwrap_or(1).max(1) as usize;
    let rest = (1..count).map(|i| context(i, None).map(|c| describe(&c)));
    std::iter::once(Ok(describe(&first))).chain(rest).collect()
}

/// A device, and what it works with.
#[derive(Clone)]
struct Opened {
    device: Device,
    engine: Engine,
    #[cfg(feature = "nccl")]
    context: Arc<CudaContext>,
    #[cfg(feature = "nccl")]
    gate: Arc<gate::Gate>,
    #[cfg(feature = "nccl")]
    lane: Arc<std::sync::OnceLock<Arc<nccl::Lane>>>,
}

#[cfg(feature = "nccl")]
impl Opened {
    /// Its communication stream, made when it is first asked for.
    fn lane(&self) -> Result<Arc<nccl::Lane>, nccl::Error> {
        if let Some(lane) = self.lane.get() {
            return Ok(lane.clone());
        }
        let name = self.device.name().to_string();
        let made = nccl::Lane::new(name, self.engine.clone(), &self.context, self.gate.clone())?;
        Ok(self.lane.get_or_init(|| Arc::new(made)).clone())
    }
}

/// Which kernels a device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kernels {
    /// The best for its GPU.
    Best,
    /// Those that every GPU from Ampere on can run.
    Ampere,
    /// Those that every GPU can run.
    Portable,
}

/// What was opened, by index and kernels.
static OPEN: Mutex<Option<HashMap<(usize, Kernels), Opened>>> = Mutex::new(None);

/// How a device was opened; nothing for one that is not this backend's, or is decorated.
fn opened(device: &Device) -> Option<Opened> {
    let open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut all = open.as_ref()?.values();
    // Also where it is seen through a device around it.
    let device = device.innermost();
    all.find(|opened| opened.device == *device).cloned()
}

/// How much memory of its GPU a device uses; nothing for a device that was not opened by [`device`],
/// or is decorated. Devices of one GPU share its memory.
pub fn memory_use(device: &Device) -> Option<MemoryUse> {
    opened(device).map(|opened| opened.engine.arena().report())
}

/// A GPU that need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// NVIDIA A100, compute capability 8.0.
    A100,
    /// NVIDIA H200, compute capability 9.0.
    H200,
}

/// A device that compiles the kernels it is given, for such a GPU, and runs none of them: to see
/// where there is no GPU whether kernels compile. What is read from it is zero, or the error of the
/// kernel that could not be compiled. Needs NVRTC, but no driver.
pub fn compile_only(model: Model) -> Result<Device> {
    check_nvrtc(None)?;
    let gpu = match model {
        Model::A100 => Gpu::a100(),
        Model::H200 => Gpu::h200(),
    };
    let (name, cores) = (format!("{} (compiles only)", gpu.name), gpu.cores());
    let engine = engine::compile_only(gpu, None)
        .map_err(|e| unavailable(None, e, "check the installation of NVRTC"))?;
    let backend = backend("cuda:compile".into(), &engine, name, u64::MAX)?;
    Ok(Device::new(backend.with_cores(cores)))
}

fn check_nvrtc(selector: Option<&str>) -> Result<()> {
    // SAFETY: only tries to open the library.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Ok(());
    }
    Err(unavailable(
        selector,
        "libnvrtc was not found".into(),
        "install the CUDA toolkit's NVRTC (package cuda-nvrtc) and put it on LD_LIBRARY_PATH",
    ))
}

/// Buffers of a kernel at most: there is no limit but registers.
const BUFFERS: usize = 16;

fn backend(name: String, engine: &Engine, description: String, limit: u64) -> Result<CubeBackend> {
    let (client, arena) = (engine.client().clone(), Arc::new(engine.arena().clone()));
    CubeBackend::new(name, client, arena, description, false, true, limit).map(|backend| {
        backend
            .with_native_functions()
            .with_buffers(BUFFERS)
            .with_repeats(engine.repeated())
    })
}

/// Opens a GPU: `None` or `0` the first, `1` the second. With `:portable` behind the index matrix
/// products and attention use the portable kernels instead of cuBLASLt and tensor cores, with
/// `:ampere` the kernels of a GPU before Hopper. The same selector gives the same device.
pub fn device(selector: Option<&str>) -> Result<Device> {
    let text = selector.unwrap_or("0");
    let (number, kernels) = match text.split_once(':') {
        Some((number, "portable")) => (number, Kernels::Portable),
        Some((number, "ampere")) => (number, Kernels::Ampere),
        _ => (text, Kernels::Best),
    };
    let portable = kernels == Kernels::Portable;
    let index: usize = number.parse().map_err(|_| {
        unavailable(
            selector,
            format!("'{number}' is not a GPU index"),
            "write cuda, cuda:0, cuda:0:ampere or cuda:0:portable",
        )
    })?;
    let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = open.get_or_insert_default();
    if let Some(opened) = open.get(&(index, kernels)) {
        return Ok(opened.device.clone());
    }
    let context = context(index, selector)?;
    check_nvrtc(selector)?;
    let shared = open.iter().find(|((of, _), _)| *of == index);
    let engine = match shared {
        Some((_, opened)) => opened.engine.clone(),
        None => u16::try_from(index)
            .map_err(|e| e.to_string())
            .and_then(|index| engine::open(index, &context))
            .map_err(|e| unavailable(selector, e, "check the installation with nvidia-smi"))?,
    };
    let suffix = match kernels {
        Kernels::Best => "",
        Kernels::Ampere => ":ampere",
        Kernels::Portable => ":portable",
    };
    let name = format!("cuda:{index}{suffix}");
    let limit = context.total_mem().map_or(u64::MAX, |bytes| bytes as u64);
    let backend = backend(name, &engine, describe(&context), limit)?;
    let gpu = Gpu::of(&context).map_err(|e| {
        unavailable(
            selector,
            e.to_string(),
            "check the installation with nvidia-smi",
        )
    })?;
    let cores = match kernels {
        Kernels::Best => gpu.cores(),
        Kernels::Ampere => gpu.cores().map(|_| Cores::Mma),
        Kernels::Portable => None,
    };
    let mut device = Device::new(backend.with_cores(cores));
    if !portable {
        device = cublaslt::with_products(&device, &engine, &context).map_err(|e| {
            unavailable(
                selector,
                format!("cuBLASLt could not be loaded: {e}"),
                "install libcublas and put it on LD_LIBRARY_PATH, or choose cuda:0:portable",
            )
        })?;
    }
    #[cfg(feature = "nccl")]
    let gate = Arc::<gate::Gate>::default();
    #[cfg(feature = "nccl")]
    let device = gate::behind(gate.clone(), &device);
    let opened = Opened {
        device: device.clone(),
        engine,
        #[cfg(feature = "nccl")]
        context,
        #[cfg(feature = "nccl")]
        gate,
        #[cfg(feature = "nccl")]
        lane: Arc::default(),
    };
    open.insert((index, kernels), opened);
    Ok(device)
}
