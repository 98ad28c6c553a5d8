//! Who wants to see each launch of a device, and how long it took.

use super::Device;
use crate::{
    Backend, Result,
    backend::{Buffers, Kernel},
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

type Hook = dyn Fn(&Kernel, Duration) + Send + Sync;

/// The hooks of a device.
#[derive(Default)]
pub(super) struct Hooks {
    /// Whether there is any: all that a launch looks at where nobody listens.
    any: AtomicBool,
    list: Mutex<Vec<(Timing, Arc<Hook>)>>,
}

impl Hooks {
    pub(super) fn listening(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn list(&self) -> MutexGuard<'_, Vec<(Timing, Arc<Hook>)>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches a kernel and tells everybody who listens.
    #[cold]
    pub(super) fn launch(&self, backend: &dyn Backend, kernel: Kernel) -> Result<Buffers> {
        let hooks = self.list().clone();
        let wait = hooks.iter().any(|(timing, _)| *timing == Timing::Done);
        finish(backend, wait)?;
        let (seen, clock) = (kernel.clone(), Clock::start());
        let buffers = backend.launch(kernel)?;
        let launched = clock.elapsed();
        finish(backend, wait)?;
        let done = clock.elapsed();
        for (timing, hook) in hooks {
            match timing {
                Timing::Launch => hook(&seen, launched),
                Timing::Done => hook(&seen, done),
            }
        }
        Ok(buffers)
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

/// Time since a start; none in a browser, where the standard library has no clock.
struct Clock(#[cfg(not(target_family = "wasm"))] std::time::Instant);

impl Clock {
    fn start() -> Self {
        Self(
            #[cfg(not(target_family = "wasm"))]
            std::time::Instant::now(),
        )
    }

    fn elapsed(&self) -> Duration {
        #[cfg(not(target_family = "wasm"))]
        return self.0.elapsed();
        #[cfg(target_family = "wasm")]
        Duration::ZERO
    }
}

/// A hook that listens until this is dropped. See [`Device::profile`].
#[must_use = "the hook listens until this is dropped"]
pub struct Profiling {
    device: Device,
    hook: Arc<Hook>,
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
        let hook: Arc<Hook> = Arc::new(hook);
        let mut list = self.0.hooks.list();
        list.push((timing, hook.clone()));
        self.0.hooks.any.store(true, Ordering::Relaxed);
        drop(list);
        Profiling {
            device: self.clone(),
            hook,
        }
    }
}

impl Drop for Profiling {
    fn drop(&mut self) {
        let hooks = &self.device.0.hooks;
        let mut list = hooks.list();
        list.retain(|(_, hook)| !Arc::ptr_eq(hook, &self.hook));
        hooks.any.store(!list.is_empty(), Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Profiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Profiling({})", self.device)
    }
}
