//! The memory of a device: buffers out of the [pool](crate::pool), slabs from the driver.
//!
//! CubeCL names memory by a handle and an offset. Here there is one handle, for all of the device's
//! addresses, and the offset is the address. So a launch looks nothing up, and memory is taken and
//! given back by the thread that needs it, without a word to the one that launches.

use crate::{
    log,
    pool::{MemoryUse, Pieces, Pool},
    trace,
};
use anymesh_kernel::{Error, Result};
use anymesh_shaders::{Arena, Memory, Reached};
use cubecl::{bytes::Bytes, client::Client, server::Handle};
use cubecl_common::device::ServiceId;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use std::{
    cell::RefCell,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// CubeCL's mark for memory that is written in place; see [`Arena::standing`]. Its streams have no
/// other meaning here.
pub(crate) const STANDING: StreamId = StreamId { value: u64::MAX };

/// Where slabs come from.
pub trait Slabs: Send + Sync + 'static {
    /// Memory of so many bytes, or nothing where there is none left.
    fn take(&self, bytes: u64) -> Result<Option<u64>, String>;

    /// Gives it back. Nothing that is queued may use it.
    fn give(&self, address: u64);
}

/// Addresses without memory, for a device that computes nothing.
#[derive(Debug, Default)]
pub struct NoSlabs(std::sync::atomic::AtomicU64);

impl Slabs for NoSlabs {
    fn take(&self, bytes: u64) -> Result<Option<u64>, String> {
        let used = (self.0).fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        Ok(Some((1 << 32) + used))
    }

    fn give(&self, _: u64) {}
}

/// The memory of one device.
#[derive(Clone)]
pub struct GpuArena {
    shared: Arc<Shared>,
    client: Client,
}

struct Shared {
    device: String,
    service: ServiceId,
    /// CubeCL's name for all of the device's addresses.
    everything: ManagedMemoryHandle,
    pool: Mutex<Pool>,
    pieces: Pieces,
    slabs: Box<dyn Slabs>,
    /// Waits until everything that is queued is done.
    drain: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// Tells whoever launches of memory that its last kernels used.
    reached: Box<dyn Fn(Places) + Send + Sync>,
}

/// Where memory lies that a kernel used without being given it: what it is known to have written,
/// and besides that, each by itself, how many places it read and then how many it wrote from that.
pub(crate) struct Places {
    pub(crate) done: Range<u64>,
    pub(crate) also: Vec<[usize; 2]>,
    pub(crate) places: Vec<Range<u64>>,
}

/// What a buffer holds of the pool.
struct Block {
    address: u64,
    shared: Arc<Shared>,
}

impl Drop for Block {
    fn drop(&mut self) {
        trace::gave(self.address);
        let mine = |later: &mut Option<Later>| {
            let later = later.as_mut();
            let later = later.filter(|later| later.of == Arc::as_ptr(&self.shared));
            later.map(|later| later.given.push(self.address))
        };
        if LATER.with_borrow_mut(mine).is_none() {
            self.shared.pool().give(self.address);
        }
    }
}

/// What a thread gives back while it holds the pool.
struct Later {
    of: *const Shared,
    given: Vec<u64>,
}

/// A pool that one thread holds, so that what it takes and gives back is seen by others all at once.
pub(crate) struct Hold<'a> {
    shared: &'a Arc<Shared>,
    pool: MutexGuard<'a, Pool>,
}

impl Hold<'_> {
    /// The pool itself.
    pub(crate) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Gives back what this thread has dropped.
    pub(crate) fn settle(&mut self) {
        LATER.with_borrow_mut(|later| {
            for address in later.iter_mut().flat_map(|later| later.given.drain(..)) {
                self.pool.give(address);
            }
        });
    }

    /// Memory that was taken.
    pub(crate) fn memory(&self, address: u64, bytes: usize) -> Memory {
        memory(self.shared, address, bytes)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.settle();
        LATER.set(None);
    }
}

/// Memory at an address that was taken.
fn memory(shared: &Arc<Shared>, address: u64, bytes: usize) -> Memory {
    let block = Block {
        address,
        shared: shared.clone(),
    };
    let mut handle = Handle::from_memory(
        shared.everything.clone(),
        shared.service,
        StreamId { value: 0 },
        // The offset is counted in.
        address + bytes as u64,
    );
    handle.offset_start = Some(address);
    Memory::owned(handle, bytes, Arc::new(block))
}

impl Shared {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, detail: String) -> Error {
        Error::DeviceFailed {
            device: self.device.clone(),
            detail,
        }
    }

    /// Gives back to the driver what is in no buffer, because somebody wants so many bytes.
    fn release(&self, pool: &mut Pool, bytes: u64) -> Result<()> {
        // What is cached may still be used by work that is queued. Nobody takes or gives memory
        // meanwhile: queued work holds none.
        (self.drain)().map_err(|e| self.failed(e))?;
        let unused = pool.release();
        log::say(1, || {
            format!(
                "{}: before {bytes} bytes are taken {} slabs go back, {:?}",
                self.device,
                unused.len(),
                pool.report()
            )
        });
        unused.into_iter().for_each(|slab| self.slabs.give(slab));
        Ok(())
    }

    fn take(&self, bytes: u64) -> Result<u64> {
        let mut pool = self.pool();
        if let Some(address) = pool.take(bytes) {
            return Ok(address);
        }
        if pool.is_wasteful() {
            self.release(&mut pool, bytes)?;
        }
        let [best, least] = self.pieces.slab(bytes);
        let grow = |pool: &mut Pool, size: u64| -> Result<Option<u64>> {
            let Some(slab) = self.slabs.take(size).map_err(|e| self.failed(e))? else {
                return Ok(None);
            };
            log::say(1, || {
                format!("{}: a slab of {size} bytes for {bytes}", self.device)
            });
            pool.add(slab, size, bytes);
            Ok(pool.take(bytes))
        };
        if let Some(address) = grow(&mut pool, best)? {
            return Ok(address);
        }
        self.release(&mut pool, bytes)?;
        for size in [best, least] {
            if let Some(address) = grow(&mut pool, size)? {
                return Ok(address);
            }
        }
        Err(Error::OutOfMemory {
            device: self.device.clone(),
            bytes,
        })
    }
}

impl std::fmt::Debug for GpuArena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuArena({})", self.shared.device)
    }
}

impl GpuArena {
    pub(crate) fn new(
        device: String,
        client: Client,
        slabs: Box<dyn Slabs>,
        pieces: Pieces,
        drain: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
        reached: Box<dyn Fn(Places) + Send + Sync>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                device,
                service: client.service_id(),
                everything: ManagedMemoryHandle::new(),
                pool: Mutex::new(Pool::new(pieces)),
                pieces,
                slabs,
                drain,
                reached,
            }),
            client,
        }
    }

    pub(crate) fn pieces(&self) -> Pieces {
        self.shared.pieces
    }

    /// How much of it is in use.
    pub fn report(&self) -> MemoryUse {
        self.shared.pool().report()
    }

    /// Holds the pool for this thread.
    pub(crate) fn hold(&self) -> Hold<'_> {
        let pool = self.shared.pool();
        LATER.set(Some(Later {
            of: Arc::as_ptr(&self.shared),
            given: vec![],
        }));
        Hold {
            shared: &self.shared,
            pool,
        }
    }
}

impl Arena for GpuArena {
    fn alloc(&self, bytes: usize) -> Result<Memory> {
        let shared = &self.shared;
        let address = shared.take(bytes as u64)?;
        trace::took(bytes as u64, address);
        let memory = memory(shared, address, bytes);
        TAKEN.with_borrow_mut(|taken| {
            if let Some(taken) = taken {
                taken.push(memory.clone());
            }
        });
        Ok(memory)
    }

    fn filled(&self, bytes: Vec<u8>) -> Result<Memory> {
        let memory = self.alloc(bytes.len())?;
        self.client
            .write(memory.handle(), Bytes::from_bytes_vec(bytes));
        Ok(memory)
    }

    fn refilled(&self, old: &Memory, bytes: Vec<u8>) -> Result<Memory> {
        // What is queued later runs later.
        (self.client).write(old.handle(), Bytes::from_bytes_vec(bytes));
        Ok(old.clone())
    }

    fn standing(&self, bytes: Vec<u8>) -> Result<Memory> {
        let memory = self.filled(bytes)?;
        let mut handle = memory.handle().clone();
        handle.stream = STANDING;
        let owner = memory.owner().clone();
        Ok(Memory::owned(handle, memory.bytes(), owner))
    }

    fn address(&self, memory: &Memory) -> Option<u64> {
        (self.shared.pieces == Pieces::OfSlabs).then(|| place(memory).start)
    }

    fn reached(&self, done: &Memory, also: &[Reached<'_>]) {
        (self.shared.reached)(Places {
            done: place(done),
            also: (also.iter())
                .map(|part| [part.reads.len(), part.writes.len()])
                .collect(),
            places: (also.iter())
                .flat_map(|part| part.reads.iter().chain(&part.writes).map(|m| place(m)))
                .collect(),
        });
    }
}

thread_local! {
    /// What this thread gives back while it holds a pool.
    static LATER: RefCell<Option<Later>> = const { RefCell::new(None) };
    /// What this thread takes, while somebody wants to know.
    static TAKEN: RefCell<Option<Vec<Memory>>> = const { RefCell::new(None) };
}

/// What a function returns and the memory that it took in this thread, all of which is held so far:
/// no two pieces share addresses.
pub(crate) fn taken_by<R>(function: impl FnOnce() -> R) -> (R, Vec<Memory>) {
    TAKEN.set(Some(vec![]));
    let done = function();
    (done, TAKEN.take().unwrap_or_default())
}

/// Where memory of a [`GpuArena`] lies.
pub fn place(memory: &Memory) -> Range<u64> {
    let start = memory.handle().offset_start.unwrap_or(0);
    start..start + memory.bytes() as u64
}
