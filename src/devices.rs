//! Choosing devices by name.

#![cfg(not(target_family = "wasm"))]

use anymesh_core::{Device, Error, Result};
use std::sync::{Mutex, Once, PoisonError};

/// A device that this build knows about, whether or not it can be opened.
#[derive(Clone, Debug)]
pub struct FoundDevice {
    /// The name [`device`] takes.
    pub name: String,
    /// What it is.
    pub description: String,
    /// Whether it is a CPU behind a GPU interface.
    pub software: bool,
    /// Why it cannot be used and what to do, where that is so.
    pub problem: Option<Error>,
}

/// Opens a device by name: `cpu`, `cuda`, `cuda:1`, `cuda:0:portable`, `wgpu`, `wgpu:2`,
/// `wgpu:llvmpipe`.
///
/// `wgpu` alone takes the first real GPU; a number or a part of an adapter's name takes that
/// adapter, also a software one.
///
/// # Deferred execution
/// On CUDA launches are written down and run when somebody reads or enough of them wait, with the same
/// bits (`anymesh_engine`); they are fused where such a list came before, with `ANYMESH_FUSE_FIRST=1`
/// always. What goes wrong in a launch, no memory among it, is told by the next read. With `eager:` in
/// front, as in `eager:cuda`, each launch runs when it is made, and with `deferred:` other devices put
/// off, too. Where the name does not say, `ANYMESH_EAGER=1` never puts off, and `ANYMESH_DEFERRED=1`
/// does on every device. The same name gives the same device, and tensors of a deferred device and of
/// the same one without it do not mix.
pub fn device(name: &str) -> Result<Device> {
    let (put_off, name) = match name.split_once(':') {
        Some(("deferred", rest)) => (true, rest),
        Some(("eager", rest)) => (false, rest),
        _ => {
            let pays = name == "cuda" || name.starts_with("cuda:");
            let put_off = pays || is_set("ANYMESH_DEFERRED");
            (put_off && !is_set("ANYMESH_EAGER"), name)
        }
    };
    let device = open(name)?;
    let device = match put_off {
        true => deferred(&device),
        false => device,
    };
    anymesh_core::profile::follow(&device);
    Ok(device)
}

/// Whether a variable says yes.
fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| !value.is_empty() && value != "0")
}

/// The deferred device around another one: one for each.
fn deferred(device: &Device) -> Device {
    static MADE: Mutex<Vec<(Device, Device)>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, around)) = made.iter().find(|(inner, _)| inner == device) {
        return around.clone();
    }
    let mut options = anymesh_engine::Options::of(device);
    options.first |= is_set("ANYMESH_FUSE_FIRST");
    let around = anymesh_engine::deferred_with(device, options);
    made.push((device.clone(), around.clone()));
    around
}

fn open(name: &str) -> Result<Device> {
    let (backend, selector) = name
        .split_once(':')
        .map_or((name, None), |(b, s)| (b, Some(s)));
    match backend {
        #[cfg(feature = "cpu")]
        "cpu" if selector.is_none() => Ok(anymesh_backend_cpu::device()),
        #[cfg(feature = "wgpu")]
        "wgpu" => anymesh_backend_wgpu::device(selector),
        #[cfg(feature = "cuda")]
        "cuda" => anymesh_backend_cuda::device(selector),
        _ => {
            let built: &[&str] = &[
                #[cfg(feature = "cpu")]
                "cpu",
                #[cfg(feature = "wgpu")]
                "wgpu",
                #[cfg(feature = "cuda")]
                "cuda",
            ];
            Err(Error::DeviceUnavailable {
                device: name.into(),
                reason: format!("this build has the backends {}", built.join(", ")),
                hint: "choose one of them, or rebuild with the feature of the backend (cpu, wgpu, cuda)".into(),
            })
        }
    }
}

/// The device to use when nobody chose one: `ANYMESH_DEVICE` if it is set, else CUDA, else a real
/// GPU through wgpu, else the CPU. Software GPUs are slower than the CPU backend and are never
/// taken by default. When it falls back it says so once.
pub fn default_device() -> Result<Device> {
    if let Ok(name) = std::env::var("ANYMESH_DEVICE") {
        return device(&name);
    }
    let mut reasons: Vec<String> = Vec::new();
    let gpus: &[&str] = &[
        #[cfg(feature = "cuda")]
        "cuda",
        #[cfg(feature = "wgpu")]
        "wgpu",
    ];
    for name in gpus {
        match device(name) {
            Ok(device) => return Ok(device),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    static SAY_ONCE: Once = Once::new();
    if !reasons.is_empty() {
        let why = reasons.join("\n  ");
        SAY_ONCE.call_once(|| eprintln!("anymesh: no GPU found, using the CPU.\n  {why}\n  Set ANYMESH_DEVICE=cpu to choose it without this message."));
    }
    device("cpu")
}

/// Every device of every backend of this build.
pub fn found() -> Vec<FoundDevice> {
    let mut list = Vec::new();
    #[cfg(feature = "cpu")]
    {
        let cpu = anymesh_backend_cpu::device();
        list.push(FoundDevice {
            name: "cpu".into(),
            description: cpu.backend().capabilities().description.clone(),
            software: false,
            problem: None,
        });
    }
    #[cfg(feature = "wgpu")]
    {
        let adapters = anymesh_backend_wgpu::adapters();
        if adapters.is_empty() {
            let problem = anymesh_backend_wgpu::device(None).err();
            list.push(FoundDevice {
                name: "wgpu".into(),
                description: "Vulkan, Metal, DX12 or GL".into(),
                software: false,
                problem,
            });
        }
        for adapter in adapters {
            list.push(FoundDevice {
                name: format!("wgpu:{}", adapter.index),
                description: adapter.to_string(),
                software: adapter.software,
                problem: None,
            });
        }
    }
    #[cfg(feature = "cuda")]
    match anymesh_backend_cuda::gpus() {
        Ok(gpus) => {
            for (index, description) in gpus.into_iter().enumerate() {
                list.push(FoundDevice {
                    name: format!("cuda:{index}"),
                    description,
                    software: false,
                    problem: None,
                });
            }
        }
        Err(problem) => list.push(FoundDevice {
            name: "cuda".into(),
            description: "NVIDIA GPUs".into(),
            software: false,
            problem: Some(problem),
        }),
    }
    list
}
