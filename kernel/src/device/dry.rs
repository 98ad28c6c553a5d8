//! Work that is planned and not done.

use crate::{
    Buffer, Error, MemoryUse, Result,
    backend::{Buffers, Meter, OutputTypes},
};
use std::{cell::RefCell, sync::Arc};

/// A scope in which devices compute nothing: a launch is checked and gives buffers with nothing in
/// them, and nothing can be read. So a program can be planned as it stands, on the devices and with
/// the tensors that it has.
///
/// The buffers are counted here and not by their devices. They are of no use outside of the scope:
/// a kernel that is to read one, or a program that wants its bytes, gets [`Error::Planned`].
///
/// ```
/// # use anymesh_kernel::{Dry, Error};
/// # let device = anymesh_backend_cpu::device();
/// let dry = Dry::default();
/// let buffer = dry.run(|| device.upload(&[0; 1000]))?;
/// assert_eq!((dry.memory().in_use, device.memory().in_use), (1000, 0));
/// let bytes = pollster::block_on(device.backend().download(&buffer, 0..4));
/// assert!(matches!(bytes, Err(Error::Planned { .. })));
/// # Ok::<(), anymesh_kernel::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Dry(Arc<Meter>);

/// What a buffer of such a scope holds.
pub(crate) struct Planned;

thread_local! {
    static NOW: RefCell<Option<Dry>> = const { RefCell::new(None) };
}

/// Ends a scope, also where it panics.
struct Scope(Option<Dry>);

impl Drop for Scope {
    fn drop(&mut self) {
        let before = self.0.take();
        let _ = NOW.try_with(|now| now.replace(before));
    }
}

impl Dry {
    /// Runs `f` on this thread without computing anything.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        Self::enter(Some(self.clone()), f)
    }

    /// Runs `f` on this thread in a scope of another, or in none.
    pub fn enter<T>(scope: Option<Self>, f: impl FnOnce() -> T) -> T {
        let _scope = Scope(NOW.replace(scope));
        f()
    }

    /// The scope that this thread is in.
    pub fn current() -> Option<Self> {
        NOW.with_borrow(Clone::clone)
    }

    /// Whether this thread computes nothing.
    pub fn is_on() -> bool {
        NOW.with_borrow(Option::is_some)
    }

    /// Refuses to read values in such a scope.
    pub fn check(what: &'static str) -> Result<()> {
        match Self::is_on() {
            true => Err(Error::Planned { what }),
            false => Ok(()),
        }
    }

    /// What its buffers would hold, on all devices together.
    pub fn memory(&self) -> MemoryUse {
        self.0.read()
    }

    /// Starts measuring the peak of [`memory`](Self::memory) anew.
    pub fn reset_peak(&self) {
        self.0.reset_peak();
    }

    /// A buffer with nothing in it.
    pub(super) fn buffer(&self, bytes: usize) -> Buffer {
        let mut buffer = Buffer::new(Planned, bytes);
        buffer.count(&self.0);
        buffer
    }

    /// What a launch would give.
    pub(super) fn launch(&self, outputs: &OutputTypes) -> Buffers {
        let bytes = outputs
            .iter()
            .map(|(dtype, shape)| shape.numel() * dtype.size());
        bytes.map(|bytes| self.buffer(bytes)).collect()
    }
}
