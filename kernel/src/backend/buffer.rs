//! Memory of a device, and what is known of it on the host: its size, and who counts it.

use crate::{
    DType, Error, Layout, MemoryChange, Result,
    device::{Planned, Watch},
};
use smallvec::SmallVec;
use std::{
    any::Any,
    fmt::Debug,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// A backend's memory. Shared, never written after the kernel that fills it was queued.
#[derive(Clone)]
pub struct Buffer(Arc<Shared<dyn Any + Send + Sync>>);

/// One allocation with the backend's own type at its end.
struct Shared<T: ?Sized> {
    bytes: u64,
    serial: u64,
    /// The device that counts it, if one does.
    meter: Option<Arc<Meter>>,
    data: T,
}

impl<T: ?Sized> Drop for Shared<T> {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            meter.remove(self.serial, self.bytes);
        }
    }
}

/// How many buffers were made.
static MADE: AtomicU64 = AtomicU64::new(0);

/// The buffers that a launch made: one for each output, mostly one.
pub type Buffers = SmallVec<[Buffer; 1]>;

impl Buffer {
    /// Wraps the backend's own type, which takes `bytes` of the device's memory.
    pub fn new<T: Any + Send + Sync>(data: T, bytes: usize) -> Self {
        Self(Arc::new(Shared {
            bytes: bytes as u64,
            serial: MADE.fetch_add(1, Ordering::Relaxed),
            meter: None,
            data,
        }))
    }

    /// The backend's own type again; an error where the buffer belongs to another backend.
    pub fn get<T: Any>(&self) -> Result<&T> {
        self.0.data.downcast_ref().ok_or_else(|| {
            if self.0.data.is::<Planned>() {
                return Error::Planned {
                    what: "reading a result",
                };
            }
            Error::argument(
                "buffer",
                "buffer",
                "a buffer of another backend was passed in",
            )
        })
    }

    /// The memory it takes on its device.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// A number of its own. What is computed from a buffer has a higher one.
    pub fn serial(&self) -> u64 {
        self.0.serial
    }

    /// A number above those of all buffers so far, and not above those to come.
    pub fn next_serial() -> u64 {
        MADE.load(Ordering::Relaxed)
    }

    /// Whether two handles share the same memory.
    pub fn same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How many handles share this memory now. Where all of them are known, nobody else can read it.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Refuses a buffer of a scope in which [nothing is computed](crate::Dry), as reading it would.
    pub fn check_computed(&self) -> Result<()> {
        match self.0.data.is::<Planned>() {
            true => Err(Error::Planned {
                what: "reading a result",
            }),
            false => Ok(()),
        }
    }

    /// Counts a buffer that was just made as memory in use until its last handle is dropped. One
    /// that is shared already was counted when it was made.
    pub(crate) fn count(&mut self, meter: &Arc<Meter>) {
        if let Some(shared) = Arc::get_mut(&mut self.0)
            && shared.meter.is_none()
        {
            meter.add(shared.serial, shared.bytes);
            shared.meter = Some(meter.clone());
        }
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Buffer({:p}, {} bytes)",
            Arc::as_ptr(&self.0),
            self.0.bytes
        )
    }
}

/// A buffer read through a layout.
#[derive(Clone, Debug)]
pub struct View {
    /// The memory.
    pub buffer: Buffer,
    /// What the elements are.
    pub dtype: DType,
    /// Where they are.
    pub layout: Layout,
}

/// The results of a launch, each dense.
pub type Views = SmallVec<[View; 1]>;

/// The memory that the tensors of a device hold, in bytes. What a backend needs for itself (scratch
/// memory of a kernel, freed memory that is kept for the next tensor) is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Now.
    pub in_use: u64,
    /// The most there was at any time, since the device was opened or the peak was
    /// [reset](crate::Device::reset_peak).
    pub peak: u64,
}

/// Counts the buffers of one device.
#[derive(Default)]
pub(crate) struct Meter {
    in_use: AtomicU64,
    peak: AtomicU64,
    /// Whether somebody is told: all that is looked at where nobody is.
    watched: AtomicBool,
    watches: Mutex<Vec<Arc<dyn Watch>>>,
}

impl Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Meter({:?})", self.read())
    }
}

impl Meter {
    fn add(&self, serial: u64, bytes: u64) {
        // A device without memory holds tensors of any size.
        let now = self
            .in_use
            .fetch_add(bytes, Ordering::Relaxed)
            .wrapping_add(bytes);
        // Mostly a plain read: the peak moves seldom.
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        if self.watched.load(Ordering::Relaxed) {
            self.tell(serial, bytes, true, now);
        }
    }

    /// So many bytes were in use beside the others, and are no more.
    pub(crate) fn pass(&self, bytes: u64) {
        let most = (self.in_use.load(Ordering::Relaxed)).wrapping_add(bytes);
        self.peak.fetch_max(most, Ordering::Relaxed);
    }

    fn remove(&self, serial: u64, bytes: u64) {
        let before = self.in_use.fetch_sub(bytes, Ordering::Relaxed);
        if self.watched.load(Ordering::Relaxed) {
            self.tell(serial, bytes, false, before.wrapping_sub(bytes));
        }
    }

    #[cold]
    fn tell(&self, serial: u64, bytes: u64, made: bool, in_use: u64) {
        let change = MemoryChange {
            serial,
            bytes,
            made,
            in_use,
        };
        let watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        for watch in watches.iter() {
            watch.memory(&change);
        }
    }

    pub(crate) fn add_watch(&self, watch: &Arc<dyn Watch>) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        watches.push(watch.clone());
        self.watched.store(true, Ordering::Relaxed);
    }

    pub(crate) fn remove_watch(&self, watch: &Arc<dyn Watch>) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|other| !Arc::ptr_eq(other, watch));
        self.watched.store(!watches.is_empty(), Ordering::Relaxed);
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    pub(crate) fn read(&self) -> MemoryUse {
        let in_use = self.in_use.load(Ordering::Relaxed);
        MemoryUse {
            in_use,
            peak: self.peak.load(Ordering::Relaxed).max(in_use),
        }
    }

    pub(crate) fn reset_peak(&self) {
        self.peak
            .store(self.in_use.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
