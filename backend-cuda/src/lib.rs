//! NVIDIA GPUs: the shared kernels compiled by NVRTC, and cuBLASLt for matrix products.
//!
//! Nothing of CUDA is needed to build; the driver, NVRTC and cuBLASLt are loaded when a device is
//! opened. Where one is missing the error says which and what to install.

mod cublaslt;
#[cfg(feature = "nccl")]
mod gate;
#[cfg(feature = "nccl")]
pub mod nccl;

use anymesh_kernel::{Device, Error, Result};
use anymesh_shaders::CubeBackend;
use cudarc::driver::{CudaContext, sys};
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
    #[cfg(feature = "nccl")]
    client: cubecl::prelude::Client,
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
        let made = nccl::Lane::new(name, self.client.clone(), &self.context, self.gate.clone())?;
        Ok(self.lane.get_or_init(|| Arc::new(made)).clone())
    }
}

/// What was opened, by index and whether it is portable.
static OPEN: Mutex<Option<HashMap<(usize, bool), Opened>>> = Mutex::new(None);

/// How a device was opened; nothing for one that is not this backend's, or is decorated.
#[cfg(feature = "nccl")]
fn opened(device: &Device) -> Option<Opened> {
    let open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut all = open.as_ref()?.values();
    // Also where it is seen through a device around it.
    let device = device.innermost();
    all.find(|opened| opened.device == *device).cloned()
}

/// Opens a GPU: `None` or `0` the first, `1` the second; with `:portable` behind the index matrix
/// products use the portable kernel instead of cuBLASLt. The same selector gives the same device.
pub fn device(selector: Option<&str>) -> Result<Device> {
    let text = selector.unwrap_or("0");
    let (number, portable) = text
        .strip_suffix(":portable")
        .map_or((text, false), |n| (n, true));
    let index: usize = number.parse().map_err(|_| {
        unavailable(
            selector,
            format!("'{number}' is not a GPU index"),
            "write cuda, cuda:0 or cuda:0:portable",
        )
    })?;
    let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = open.get_or_insert_default();
    if let Some(opened) = open.get(&(index, portable)) {
        return Ok(opened.device.clone());
    }
    let context = context(index, selector)?;
    // SAFETY: only tries to open the library.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(unavailable(
            selector,
            "libnvrtc was not found".into(),
            "install the CUDA toolkit's NVRTC (package cuda-nvrtc) and put it on LD_LIBRARY_PATH",
        ));
    }
    let cuda = cubecl::Device::cuda(index).map_err(|e| {
        unavailable(
            selector,
            e.to_string(),
            "check the installation with nvidia-smi",
        )
    })?;
    let name = format!("cuda:{index}{}", if portable { ":portable" } else { "" });
    let limit = context.total_mem().map_or(u64::MAX, |bytes| bytes as u64);
    let client = cuda.client();
    let mut backend =
        CubeBackend::new(name, client.clone(), describe(&context), false, true, limit)
            .with_native_functions();
    if !portable && matches!(context.compute_capability(), Ok((9, 0))) {
        backend = backend.with_hopper();
    }
    let mut device = Device::new(backend);
    if !portable {
        device = cublaslt::with_products(&device, client.clone(), &context).map_err(|e| {
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
        #[cfg(feature = "nccl")]
        client,
        #[cfg(feature = "nccl")]
        context,
        #[cfg(feature = "nccl")]
        gate,
        #[cfg(feature = "nccl")]
        lane: Arc::default(),
    };
    open.insert((index, portable), opened);
    Ok(device)
}
