//! Between a device and its users while a library works on its memory beside the kernels.
//!
//! Two things can be wrong with memory that such a library fills. It may not be filled *yet*: then
//! whoever reads it must first be queued behind the library. And it may never be filled, because a
//! peer died: then kernels have made garbage of garbage, and nobody may read that as values.
//!
//! The gate sees every launch and every read. It [joins](Gate::expect) a library's work when one of
//! its results is first used, so that kernels that do not need it run beside it. After a
//! [failure](Gate::fail) it answers every launch and every read with the error. Once the failure is
//! [healed](Gate::heal), memory from before the failed work is good again; what was made between the
//! start of that work and the healing stays unreadable for ever.

use anymesh_kernel::{
    Backend, Buffer, Capabilities, Device, Error, Kernel, Result,
    backend::{BoxFuture, Buffers, HostMemory, Launch, List, Steps},
};
use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Queues everything that comes later behind a library's work.
type Join = Box<dyn FnOnce() -> Result<()> + Send>;

/// What is known of work beside the kernels of a device.
#[derive(Default)]
pub(crate) struct Gate {
    /// Whether there is anything in `state` to look at: mostly there is not.
    shut: AtomicBool,
    state: Mutex<State>,
    joining: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Work that nothing was queued behind yet, oldest first. The work of a device happens in this
    /// order, so that to be behind one is to be behind those before it.
    expected: VecDeque<Expected>,
    failure: Option<Failure>,
    /// The serial numbers of buffers that failed work may have reached.
    lost: Vec<Range<u64>>,
}

struct Expected {
    number: u64,
    /// Of the buffers that it fills.
    serials: Vec<u64>,
    join: Join,
}

struct Failure {
    error: Error,
    /// The first buffer that it may have reached.
    since: u64,
}

impl State {
    fn is_lost(&self, serial: u64) -> bool {
        self.lost.iter().any(|range| range.contains(&serial))
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate")
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        let shut = state.failure.is_some() || !state.expected.is_empty() || !state.lost.is_empty();
        self.shut.store(shut, Ordering::Release);
    }

    /// Buffers that are being filled by work with this number; numbers rise. `join` is called before
    /// one of them is first used, unless the work is [finished](Gate::finished) by then.
    pub(crate) fn expect(
        &self,
        number: u64,
        serials: Vec<u64>,
        join: impl FnOnce() -> Result<()> + Send + 'static,
    ) {
        let join = Box::new(join);
        self.set(|state| {
            state.expected.push_back(Expected {
                number,
                serials,
                join,
            });
        });
    }

    /// All work up to this number is done.
    pub(crate) fn finished(&self, number: u64) {
        self.set(|state| state.expected.retain(|work| work.number > number));
    }

    /// Work that fills buffers from this serial number on will never be done.
    pub(crate) fn fail(&self, error: Error, since: u64) {
        self.set(|state| {
            state.expected.clear();
            match &mut state.failure {
                // The first reason is the one to tell.
                Some(failure) => failure.since = failure.since.min(since),
                none => *none = Some(Failure { error, since }),
            }
        });
    }

    /// Launches and reads go on; what failed work may have reached stays lost.
    pub(crate) fn heal(&self) {
        self.set(|state| {
            if let Some(failure) = state.failure.take() {
                state.lost.push(failure.since..Buffer::next_serial());
            }
        });
    }

    /// Refuses everything after a failure.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.shut.load(Ordering::Acquire) {
            return Ok(());
        }
        match &self.state().failure {
            Some(failure) => Err(failure.error.clone()),
            None => Ok(()),
        }
    }

    /// Refuses a buffer that the library itself is to read: its own work is in order.
    pub(crate) fn usable(&self, device: &str, buffer: &Buffer) -> Result<()> {
        self.check()?;
        if self.shut.load(Ordering::Acquire) && self.state().is_lost(buffer.serial()) {
            return Err(lost(device));
        }
        Ok(())
    }

    /// To be called before these buffers are used.
    pub(crate) fn enter<'b>(
        &self,
        device: &str,
        buffers: impl Iterator<Item = &'b Buffer>,
    ) -> Result<()> {
        if !self.shut.load(Ordering::Acquire) {
            return Ok(());
        }
        self.pass(|state| {
            let mut last = None;
            for serial in buffers.map(Buffer::serial) {
                if state.is_lost(serial) {
                    return Err(lost(device));
                }
                let expected = |work: &Expected| work.serials.contains(&serial);
                last = last.max(state.expected.iter().rposition(expected));
            }
            Ok(last)
        })
    }

    /// To be called before everything is waited for.
    fn enter_all(&self) -> Result<()> {
        if !self.shut.load(Ordering::Acquire) {
            return Ok(());
        }
        self.pass(|state| Ok(state.expected.len().checked_sub(1)))
    }

    /// Joins the work up to the one that `find` names.
    fn pass(&self, find: impl FnOnce(&State) -> Result<Option<usize>>) -> Result<()> {
        // Whoever comes next must find it joined, and yet a failure must be told at any time: the
        // driver is called under a lock that only those who join take.
        let _turn = self.joining.lock().unwrap_or_else(PoisonError::into_inner);
        let work = {
            let mut state = self.state();
            if let Some(failure) = &state.failure {
                return Err(failure.error.clone());
            }
            match find(&state)? {
                Some(last) => state.expected.drain(..=last).next_back(),
                None => None,
            }
        };
        let joined = work.map_or(Ok(()), |work| (work.join)());
        self.set(|_| {});
        joined
    }
}

fn lost(device: &str) -> Error {
    Error::DeviceFailed {
        device: device.into(),
        detail: "a tensor was made while communication had failed, so its values are garbage: drop the tensors of that time and load them from the last checkpoint".into(),
    }
}

/// The device, seen through a gate.
pub(crate) fn behind(gate: Arc<Gate>, inner: &Device) -> Device {
    Device::new(Gated {
        gate,
        inner: inner.clone(),
    })
}

#[derive(Debug)]
struct Gated {
    gate: Arc<Gate>,
    inner: Device,
}

impl Backend for Gated {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.backend().capabilities()
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        self.inner.backend().upload(bytes)
    }

    fn placeholder(&self, bytes: usize) -> Option<Buffer> {
        self.inner.backend().placeholder(bytes)
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            self.gate.enter(self.name(), std::iter::once(buffer))?;
            let values = self.inner.backend().download(buffer, bytes).await;
            // A failure is told before the work behind it is let go, so that garbage cannot have
            // arrived without it being known here.
            self.gate.check()?;
            values
        })
    }

    fn in_place<'b>(&self, buffer: &'b Buffer) -> Option<&'b [u8]> {
        self.inner.backend().in_place(buffer)
    }

    fn host_memory(&self, bytes: usize) -> Result<Option<Box<dyn HostMemory>>> {
        self.inner.backend().host_memory(bytes)
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            self.gate.enter_all()?;
            let done = self.inner.backend().sync().await;
            self.gate.check()?;
            done
        })
    }

    fn supports(&self, kernel: &Kernel) -> bool {
        self.inner.backend().supports(kernel)
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        self.gate
            .enter(self.name(), kernel.operands().map(|view| &view.buffer))?;
        self.inner.backend().launch(kernel)
    }

    fn list<'a>(&'a self, list: &List<'_>) -> Option<Box<dyn Steps + 'a>> {
        // While something is expected from other devices each launch waits for its own operands.
        match self.gate.shut.load(Ordering::Acquire) {
            true => None,
            false => self.inner.backend().list(list),
        }
    }

    fn launch_all(&self, launches: Vec<Launch>) -> Result<Vec<Buffers>> {
        let views = launches.iter().flat_map(|launch| launch.kernel.operands());
        self.gate
            .enter(self.name(), views.map(|view| &view.buffer))?;
        self.inner.backend().launch_all(launches)
    }
}

#[cfg(test)]
mod tests;
