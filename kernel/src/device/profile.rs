//! Who wants to see each launch of a device, and how long it took.

use super::Device;
use crate::{
    Backend, Buffer, Result,
    backend::{Buffers, Kernel, Launch},
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// What the duration of a launch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// How long the host took to launch it. A GPU may still be working.
    Launch,
    /// How long it was until the result was there: the device is waited for before and after each
    /// launch, which makes a GPU slower. A fault is returned by the launch that met it.
    Done,
}

/// Time since the program first asked for it, the same for all devices and threads. Always zero in
/// a browser, where the standard library has no clock.
pub fn clock() -> Duration {
    #[cfg(not(target_family = "wasm"))]
    {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        START.get_or_init(std::time::Instant::now).elapsed()
    }
    #[cfg(target_family = "wasm")]
    Duration::ZERO
}

/// A launch that was made.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Launched<'a> {
    /// What was launched.
    pub kernel: &'a Kernel,
    /// When, by the [`clock`].
    pub start: Duration,
    /// How long the host took to launch it.
    pub host: Duration,
    /// How long it was until the result was there, if somebody who watches wanted to know: then the
    /// device had nothing else to do.
    pub done: Option<Duration>,
}

/// A buffer that was made or that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryChange {
    /// The number of the [buffer](crate::Buffer::serial).
    pub serial: u64,
    /// Its size.
    pub bytes: u64,
    /// Whether it was made; else it is gone.
    pub made: bool,
    /// The bytes that are in use on the device after that.
    pub in_use: u64,
}

/// Somebody who sees what happens on a device: see [`Device::watch`]. Everything is told on the
/// thread that does it, and nothing of it may compute on the device.
pub trait Watch: Send + Sync {
    /// A launch was made.
    fn launched(&self, launched: &Launched<'_>) {
        let _ = launched;
    }

    /// The host wrote this many bytes to the device, from `start` of the [`clock`] on.
    fn uploaded(&self, bytes: u64, start: Duration, took: Duration) {
        let _ = (bytes, start, took);
    }

    /// A buffer was made or is gone.
    fn memory(&self, change: &MemoryChange) {
        let _ = change;
    }
}

/// A function that is shown kernels.
struct Hook<F>(Timing, F);

impl<F: Fn(&Kernel, Duration) + Send + Sync> Watch for Hook<F> {
    fn launched(&self, launched: &Launched<'_>) {
        let took = match self.0 {
            Timing::Launch => launched.host,
            Timing::Done => launched.done.unwrap_or(launched.host),
        };
        (self.1)(launched.kernel, took);
    }
}

/// Who watches a device.
#[derive(Default)]
pub(super) struct Hooks {
    /// Whether there is any: all that a launch looks at where nobody does.
    any: AtomicBool,
    list: Mutex<Vec<(Timing, Arc<dyn Watch>)>>,
}

impl Hooks {
    pub(super) fn listening(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn list(&self) -> MutexGuard<'_, Vec<(Timing, Arc<dyn Watch>)>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a kernel and tells everybody who watches.
    #[cold]
    pub(super) fn launch(&self, backend: &dyn Backend, kernel: Kernel) -> Result<Buffers> {
        let hooks = self.list().clone();
        let wait = hooks.iter().any(|(timing, _)| *timing == Timing::Done);
        finish(backend, wait)?;
        let (seen, start) = (kernel.clone(), clock());
        let buffers = backend.launch(kernel)?;
        let host = clock() - start;
        finish(backend, wait)?;
        let launched = Launched {
            kernel: &seen,
            start,
            host,
            done: wait.then(|| clock() - start),
        };
        for (_, watch) in hooks {
            watch.launched(&launched);
        }
        Ok(buffers)
    }

    /// Launches kernels together and tells everybody who watches of each, with its share of the
    /// host's time. Where somebody wants to know how long each takes they are launched one by one.
    #[cold]
    pub(super) fn launch_all(
        &self,
        backend: &dyn Backend,
        launches: Vec<Launch>,
    ) -> Result<Vec<Buffers>> {
        let hooks = self.list().clone();
        if hooks.iter().any(|(timing, _)| *timing == Timing::Done) {
            return launches
                .into_iter()
                .map(|launch| self.launch(backend, launch.kernel))
                .collect();
        }
        let seen: Vec<Kernel> = launches.iter().map(|l| l.kernel.clone()).collect();
        let start = clock();
        let buffers = backend.launch_all(launches)?;
        let share = (clock() - start) / seen.len().max(1) as u32;
        for (k, kernel) in seen.iter().enumerate() {
            let launched = Launched {
                kernel,
                start: start + share * k as u32,
                host: share,
                done: None,
            };
            for (_, watch) in &hooks {
                watch.launched(&launched);
            }
        }
        Ok(buffers)
    }

    /// Uploads and tells everybody who watches.
    #[cold]
    pub(super) fn upload(&self, backend: &dyn Backend, bytes: &[u8]) -> Result<Buffer> {
        let (hooks, start) = (self.list().clone(), clock());
        let buffer = backend.upload(bytes)?;
        let took = clock() - start;
        for (_, watch) in hooks {
            watch.uploaded(bytes.len() as u64, start, took);
        }
        Ok(buffer)
    }
}

#[cfg(not(target_family = "wasm"))]
fn finish(backend: &dyn Backend, wait: bool) -> Result<()> {
    if wait {
        pollster::block_on(backend.sync())
    } else {
        Ok(())
    }
}

/// Nothing can be waited for in a browser.
#[cfg(target_family = "wasm")]
fn finish(_: &dyn Backend, _: bool) -> Result<()> {
    Ok(())
}

/// Somebody watches a device until this is dropped. See [`Device::profile`], [`Device::watch`].
#[must_use = "the device is watched until this is dropped"]
pub struct Profiling {
    device: Device,
    watch: Arc<dyn Watch>,
}

impl Device {
    /// Shows `hook` each kernel that is launched here, by any thread, and how long it took, until
    /// the returned guard is dropped. In browsers all durations are zero. The hook may not compute
    /// on this device.
    ///
    /// On a device that puts work off (`anymesh_engine`) it sees what the program asks for: with
    /// [`Timing::Launch`] the duration is that of writing it down, and with [`Timing::Done`] every
    /// kernel runs by itself, unfused, so that its time is its own. The launches that are made in the
    /// end are seen by a hook on its [`innermost`](Device::innermost) device.
    ///
    /// ```
    /// # use anymesh_kernel::{DType, Layout, Timing, View, backend::SortCall};
    /// # use std::sync::mpsc;
    /// # let device = anymesh_backend_cpu::device();
    /// let input = View {
    ///     buffer: device.upload(&[3, 1, 2])?,
    ///     dtype: DType::U8,
    ///     layout: Layout::contiguous([3].into()),
    /// };
    /// let (sender, seen) = mpsc::channel();
    /// let profiling = device.profile(Timing::Done, move |kernel, took| {
    ///     let _ = sender.send(format!("{} by a {} kernel in {took:?}", kernel.op(), kernel.family()));
    /// });
    /// device.launch(SortCall { op: "argsort", input, descending: false })?;
    /// drop(profiling);
    /// assert!(seen.iter().next().unwrap().starts_with("argsort by a sort kernel in "));
    /// # Ok::<(), anymesh_kernel::Error>(())
    /// ```
    pub fn profile(
        &self,
        timing: Timing,
        hook: impl Fn(&Kernel, Duration) + Send + Sync + 'static,
    ) -> Profiling {
        self.watch(timing, Arc::new(Hook(timing, hook)))
    }

    /// Tells `watch` of every launch, upload and buffer of this device, until the returned guard is
    /// dropped. With [`Timing::Done`] the device is waited for before and after each launch.
    ///
    /// ```
    /// # use anymesh_kernel::{Device, MemoryChange, Timing, Watch};
    /// # use std::sync::{Arc, Mutex};
    /// #[derive(Default)]
    /// struct Sizes(Mutex<Vec<u64>>);
    ///
    /// impl Watch for Sizes {
    ///     fn memory(&self, change: &MemoryChange) {
    ///         self.0.lock().unwrap().push(change.in_use);
    ///     }
    /// }
    ///
    /// let (device, sizes) = (Device::new(anymesh_backend_cpu::CpuBackend::new()), Arc::<Sizes>::default());
    /// let watching = device.watch(Timing::Launch, sizes.clone());
    /// drop(device.upload(&[0; 100])?);
    /// drop(watching);
    /// assert_eq!(*sizes.0.lock().unwrap(), [100, 0]);
    /// # Ok::<(), anymesh_kernel::Error>(())
    /// ```
    pub fn watch(&self, timing: Timing, watch: Arc<dyn Watch>) -> Profiling {
        let mut list = self.0.hooks.list();
        list.push((timing, watch.clone()));
        self.0.hooks.any.store(true, Ordering::Relaxed);
        drop(list);
        self.0.memory.add_watch(&watch);
        Profiling {
            device: self.clone(),
            watch,
        }
    }
}

impl Drop for Profiling {
    fn drop(&mut self) {
        let hooks = &self.device.0.hooks;
        let mut list = hooks.list();
        list.retain(|(_, watch)| !Arc::ptr_eq(watch, &self.watch));
        hooks.any.store(!list.is_empty(), Ordering::Relaxed);
        drop(list);
        self.device.0.memory.remove_watch(&self.watch);
    }
}

impl std::fmt::Debug for Profiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Profiling({})", self.device)
    }
}
