//! Any GPU through wgpu: Vulkan, Metal, DX12, GL, and WebGPU in a browser.
//!
//! This crate picks an adapter, and gives [`anymesh_launcher`] its memory (`memory.rs`), its queue
//! (`queue.rs`) and a way to make shaders of kernels (`compile.rs`); [`anymesh_shaders`] has the kernels.
//! Shaders are WGSL on every adapter: it is the path that also runs in browsers,
//! and software Vulkan drivers in the field crash on SPIR-V.

mod compile;
mod memory;
mod queue;

use anymesh_kernel::{Device, Error, Result};
use anymesh_launcher::{Engine, Launcher, Pieces};
use anymesh_shaders::CubeBackend;
use cubecl::{
    device::{WgpuDevice, WgpuDeviceKind},
    device_handle::DeviceHandle,
    wgpu::{AutoGraphicsApi, RuntimeOptions, WgpuSetup, try_init_setup_async, wgpu},
};
use cubecl_common::device::DeviceId;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

/// CubeCL's number for our kind of devices, unlike those of its own: each kind has its own threads.
const DEVICES: u16 = 0xcdd;

/// A GPU that wgpu can see.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Number to select it by.
    pub index: usize,
    /// The vendor's name for it.
    pub name: String,
    /// Vulkan, Metal, ...
    pub api: String,
    /// Driver name and version.
    pub driver: String,
    /// Whether it is a CPU behind a GPU interface.
    pub software: bool,
    #[cfg_attr(target_family = "wasm", allow(dead_code))]
    kind: WgpuDeviceKind,
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let software = if self.software { ", software" } else { "" };
        write!(f, "{} ({}, {}{software})", self.name, self.api, self.driver)
    }
}

fn describe(index: usize, info: &wgpu::AdapterInfo, kind: WgpuDeviceKind) -> Adapter {
    let driver = format!("{} {}", info.driver, info.driver_info)
        .trim()
        .to_string();
    Adapter {
        index,
        name: info.name.clone(),
        api: format!("{:?}", info.backend),
        driver,
        software: info.device_type == wgpu::DeviceType::Cpu,
        kind,
    }
}

fn unavailable(selector: Option<&str>, reason: String) -> Error {
    let device = selector.map_or_else(|| "wgpu".to_string(), |s| format!("wgpu:{s}"));
    let hint = "install a Vulkan driver (Debian: mesa-vulkan-drivers, which also has the software adapter), run `anymesh doctor` to see what is there, or use the cpu device".into();
    Error::DeviceUnavailable {
        device,
        reason,
        hint,
    }
}

/// The adapters of this machine, real GPUs and software ones.
#[cfg(not(target_family = "wasm"))]
pub fn adapters() -> Vec<Adapter> {
    let descriptor = wgpu::InstanceDescriptor {
        backends: wgpu::Backends::PRIMARY,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    };
    let instance = wgpu::Instance::new(descriptor);
    let found = cubecl::future::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    let mut counts = [0usize; 4];
    let mut next = |slot: usize| {
        counts[slot] += 1;
        counts[slot] - 1
    };
    found
        .iter()
        .enumerate()
        .map(|(index, adapter)| {
            let info = adapter.get_info();
            let kind = match info.device_type {
                wgpu::DeviceType::DiscreteGpu => WgpuDeviceKind::DiscreteGpu(next(0)),
                wgpu::DeviceType::IntegratedGpu => WgpuDeviceKind::IntegratedGpu(next(1)),
                wgpu::DeviceType::VirtualGpu => WgpuDeviceKind::VirtualGpu(next(2)),
                wgpu::DeviceType::Other => WgpuDeviceKind::Other(next(3)),
                wgpu::DeviceType::Cpu => WgpuDeviceKind::Cpu,
            };
            describe(index, &info, kind)
        })
        .collect()
}

/// Opens the adapter with this number or part of its name (any case; `software` means a software
/// one); without a selector the first real GPU.
///
/// The same adapter gives the same device: tensors made through two calls can meet.
#[cfg(not(target_family = "wasm"))]
pub fn device(selector: Option<&str>) -> Result<Device> {
    use std::{collections::HashMap, sync::Mutex};
    static OPEN: Mutex<Option<HashMap<usize, Device>>> = Mutex::new(None);

    let adapters = adapters();
    let listed = || {
        adapters
            .iter()
            .map(|a| format!("{}: {a}", a.index))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let chosen = match selector {
        None => adapters.iter().find(|a| !a.software),
        Some("software") => adapters.iter().find(|a| a.software),
        Some(text) => match text.parse::<usize>() {
            Ok(index) => adapters.get(index),
            Err(_) => adapters
                .iter()
                .find(|a| a.name.to_lowercase().contains(&text.to_lowercase())),
        },
    };
    let Some(adapter) = chosen else {
        let reason = match (adapters.is_empty(), selector) {
            (true, _) => "no graphics driver was found".to_string(),
            (false, None) => format!(
                "only software adapters were found ({}), which are taken by name only",
                listed()
            ),
            (false, Some(text)) => format!("no adapter matches '{text}' among {}", listed()),
        };
        return Err(unavailable(selector, reason));
    };
    let mut open = OPEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = open.get_or_insert_default();
    if let Some(device) = open.get(&adapter.index) {
        return Ok(device.clone());
    }
    let device = cubecl::future::block_on(open_kind(adapter.kind.clone(), selector))?;
    open.insert(adapter.index, device.clone());
    Ok(device)
}

/// The browser's GPU. Call once and keep the device.
#[cfg(target_family = "wasm")]
pub async fn device_async() -> Result<Device> {
    open_kind(WgpuDeviceKind::DefaultDevice, None).await
}

async fn open_kind(kind: WgpuDeviceKind, selector: Option<&str>) -> Result<Device> {
    let device = WgpuDevice::new(kind.clone());
    let options =
        RuntimeOptions::try_default().map_err(|e| unavailable(selector, e.to_string()))?;
    let setup: WgpuSetup = try_init_setup_async::<AutoGraphicsApi>(&device, options)
        .await
        .map_err(|e| unavailable(selector, e.to_string()))?;
    let adapter = describe(0, &setup.adapter.get_info(), kind);
    let limits = setup.device.limits();
    let max_bytes = u64::from(limits.max_storage_buffer_binding_size).min(limits.max_buffer_size);
    let name = format!("wgpu:{}", adapter.name);
    // CubeCL looks at the adapter and says what kernels may use of it; its own queue is not needed.
    let id = cubecl_common::device::Device::to_id(&device);
    let properties = cubecl::Device::Wgpu(device).client().properties().clone();
    DeviceHandle::<Launcher>::shutdown(id);
    let buffers = Arc::<memory::Buffers>::default();
    let slabs = memory::WgpuSlabs {
        device: setup.device.clone(),
        buffers: buffers.clone(),
    };
    let lost = queue::Lost::of(&setup.device);
    static COUNT: AtomicU16 = AtomicU16::new(0);
    let engine = Engine::new(
        DeviceId::new(DEVICES, COUNT.fetch_add(1, Ordering::Relaxed)),
        name.clone(),
        Box::new(compile::Kernels::new(properties)),
        Box::new(queue::WgpuQueue::new(
            setup.device.clone(),
            setup.queue.clone(),
            buffers,
            lost,
        )),
        Box::new(slabs),
        Pieces::Buffers,
    )
    .map_err(|reason| unavailable(selector, reason))?;
    // No shader language of wgpu has transcendental functions for f64.
    let backend = CubeBackend::new(
        name,
        engine.client().clone(),
        Arc::new(engine.arena().clone()),
        adapter.to_string(),
        adapter.software,
        false,
        max_bytes,
    )?;
    Ok(Device::new(backend.with_repeats(engine.repeated())))
}
