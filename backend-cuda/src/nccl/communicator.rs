//! One rank of a group of GPUs.
//!
//! Communicators are non-blocking: the library answers "in progress" and is asked again until a
//! deadline, so that a peer that never comes is an error. (`NCCL_COMM_BLOCKING=1` in the environment
//! overrides that: calls cost the host less, and to meet a peer that never comes is to wait for the
//! abort of the [watch](super::Watch).)

use super::{
    Error, Library, Watch,
    lane::{Lane, Region},
    library::{Code, IN_PROGRESS, SUCCESS},
    native::Reduce,
};
use anymesh_kernel::{Buffer, Device};
use cudarc::nccl::sys::{ncclComm, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclUniqueId};
use std::{
    ffi::{c_char, c_int, c_void},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicPtr, Ordering},
    },
    time::{Duration, Instant},
};

/// What the members of a group must know to find each other.
pub type Id = [u8; 128];

/// A fresh one. One member makes it, the others are told.
pub fn new_id() -> Result<Id, Error> {
    let library = Library::open()?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: writes the id.
    let code = unsafe { (library.call.ncclGetUniqueId)(&mut id) };
    library.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
    Ok(id.internal.map(|c| c as u8))
}

/// How long the abort of a communicator waits for a thread that is inside a call of it. Past that
/// the call is one that blocks, and to abort from another thread is how it is ended.
const GRACE: Duration = Duration::from_secs(1);

/// A rank of a group, on a device of this process.
pub struct Communicator {
    library: &'static Library,
    pub(super) lane: Arc<Lane>,
    rank: usize,
    size: usize,
    watch: Arc<Watch>,
    /// Null once it is destroyed or aborted. Locked during every call of it but the abort.
    comm: Mutex<()>,
    raw: AtomicPtr<ncclComm>,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Communicator(rank {} of {} on {})",
            self.rank,
            self.size,
            self.lane.device()
        )
    }
}

fn config() -> ncclConfig_t {
    // What the library's header calls undefined: it takes its own default.
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 23000,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

/// The number of a rank or a size as the library takes it.
fn number(n: usize) -> Result<c_int, Error> {
    c_int::try_from(n).map_err(|_| {
        Error::Device(anymesh_kernel::Error::argument(
            "connect",
            "size",
            format!("{n} ranks are more than NCCL can count"),
        ))
    })
}

/// Meets the other members of a group, of which this process has some: each with its device and its
/// rank. Returns when all of them have come, or with an error at the deadline.
pub fn connect(
    members: &[(&Device, usize)],
    id: &Id,
    size: usize,
    watch: &Arc<Watch>,
    deadline: Duration,
) -> Result<Vec<Arc<Communicator>>, Error> {
    let library = Library::open()?;
    watch.check()?;
    let id = ncclUniqueId {
        internal: id.map(|b| b as c_char),
    };
    let size_code = number(size)?;
    let lanes = members
        .iter()
        .map(|(device, rank)| Ok((super::lane_of(device)?, *rank, number(*rank)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let mut slots: Vec<(Arc<Lane>, usize, Slot)> = vec![];
    let mut config = config();
    let started = library.group(|| {
        for (lane, rank, rank_code) in lanes {
            lane.bind()?;
            let slot = Slot::new();
            // SAFETY: writes the communicator into the slot; the configuration is complete.
            let code = unsafe {
                (library.call.ncclCommInitRankConfig)(
                    slot.place(),
                    size_code,
                    id,
                    rank_code,
                    &mut config,
                )
            };
            slots.push((lane, rank, slot));
            library.check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
        }
        Ok(())
    });
    let comms: Vec<ncclComm_t> = slots
        .iter()
        .map(|(_, _, slot)| slot.get())
        .filter(|comm| !comm.is_null())
        .collect();
    let until = Instant::now() + deadline;
    let met = started.and_then(|()| settle(library, &comms, "connect", until, deadline, watch));
    if let Err(e) = met {
        for comm in comms {
            abort(library, comm);
        }
        slots.into_iter().for_each(|(_, _, slot)| slot.leave());
        return Err(e);
    }
    Ok(slots
        .into_iter()
        .map(|(lane, rank, slot)| Communicator::adopt(library, lane, rank, size, watch, slot.get()))
        .collect())
}

/// Where the library writes a communicator: maybe later, from a thread of its own.
struct Slot(Box<AtomicPtr<ncclComm>>);

impl Slot {
    fn new() -> Self {
        Self(Box::new(AtomicPtr::new(std::ptr::null_mut())))
    }

    fn place(&self) -> *mut ncclComm_t {
        self.0.as_ptr()
    }

    fn get(&self) -> ncclComm_t {
        self.0.load(Ordering::Acquire)
    }

    /// Where the library was given up it may still write.
    fn leave(self) {
        Box::leak(self.0);
    }
}

/// Asks until every communicator is done with what it was told.
fn settle(
    library: &Library,
    comms: &[ncclComm_t],
    what: &'static str,
    until: Instant,
    deadline: Duration,
    watch: &Watch,
) -> Result<(), Error> {
    let begin = Instant::now();
    for &comm in comms {
        loop {
            watch.check()?;
            let mut state: Code = SUCCESS;
            // SAFETY: a live communicator; writes its state.
            let code = unsafe { (library.call.ncclCommGetAsyncError)(comm, &mut state) };
            library.check("ncclCommGetAsyncError", code, comm)?;
            library.check(what, state, comm)?;
            if state != IN_PROGRESS {
                break;
            }
            let now = Instant::now();
            if now > until {
                return Err(Error::Late {
                    what,
                    seconds: deadline.as_secs_f64(),
                });
            }
            // Calls are queued in some ten microseconds, meetings take longer.
            match now - begin {
                short if short < Duration::from_micros(200) => std::hint::spin_loop(),
                short if short < Duration::from_millis(5) => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(500)),
            }
        }
    }
    Ok(())
}

/// Ends a communicator and everything it has on the device, in a thread of its own: one abort can
/// wait for another, and nobody here waits for it.
fn abort(library: &'static Library, comm: ncclComm_t) {
    struct Last(ncclComm_t);
    // SAFETY: an abort may come from any thread, and nobody uses the communicator after it.
    unsafe impl Send for Last {}
    let last = Last(comm);
    let ended = std::thread::Builder::new()
        .name("nccl-abort".into())
        .spawn(move || {
            let last = last;
            // SAFETY: as above.
            unsafe { (library.call.ncclCommAbort)(last.0) };
        });
    // Without a thread it is left alone: to abort it here could wait for ever.
    drop(ended);
}

impl Communicator {
    fn adopt(
        library: &'static Library,
        lane: Arc<Lane>,
        rank: usize,
        size: usize,
        watch: &Arc<Watch>,
        comm: ncclComm_t,
    ) -> Arc<Self> {
        let made = Arc::new(Self {
            library,
            lane,
            rank,
            size,
            watch: watch.clone(),
            comm: Mutex::new(()),
            raw: AtomicPtr::new(comm),
        });
        watch.guard(&made);
        made
    }

    /// Its number among the members.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Memory of its device for so many bytes, to be filled by a call.
    pub fn empty(&self, bytes: usize) -> Buffer {
        self.lane.empty(bytes)
    }

    /// Where a buffer of its device lies, from a byte on.
    pub fn region(&self, buffer: &Buffer, start: usize) -> Result<Region, Error> {
        self.lane.region(buffer, start)
    }

    /// A group of the members that give the same `color`, ordered by `key`; nothing for those that
    /// give none. Every member calls it.
    pub fn split(
        &self,
        color: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Arc<Self>>, Error> {
        /// The library's name for no group.
        const NO_COLOR: c_int = -1;
        let color = color.map_or(Ok(NO_COLOR), number)?;
        let key = number(key)?;
        let (slot, mut config) = (Slot::new(), config());
        self.lane.bind()?;
        let turn = self.lock()?;
        let parent = self.raw();
        // SAFETY: a live communicator; the new one is written into the slot, null without a color.
        let code = unsafe {
            (self.library.call.ncclCommSplit)(parent, color, key, slot.place(), &mut config)
        };
        let until = Instant::now() + deadline;
        let met = self
            .library
            .check("ncclCommSplit", code, parent)
            .and_then(|()| {
                // The parent tells how far it is; the new one is there when that is done.
                settle(
                    self.library,
                    &[parent],
                    "split",
                    until,
                    deadline,
                    &self.watch,
                )
            });
        drop(turn);
        if let Err(e) = met {
            slot.leave();
            return Err(self.watch.give_up(e));
        }
        let made = slot.get();
        if made.is_null() {
            return Ok(None);
        }
        let (rank, size) = self.numbers_of(made)?;
        let lane = self.lane.clone();
        Ok(Some(Self::adopt(
            self.library,
            lane,
            rank,
            size,
            &self.watch,
            made,
        )))
    }

    fn numbers_of(&self, comm: ncclComm_t) -> Result<(usize, usize), Error> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator; writes numbers.
        let codes = unsafe {
            [
                (self.library.call.ncclCommUserRank)(comm, &mut rank),
                (self.library.call.ncclCommCount)(comm, &mut size),
            ]
        };
        for code in codes {
            self.library.check("ncclCommCount", code, comm)?;
        }
        Ok((rank.max(0) as usize, size.max(0) as usize))
    }

    /// To be held during every call of it.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, ()>, Error> {
        let turn = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        self.watch.check()?;
        if self.raw().is_null() {
            return Err(Error::GivenUp(anymesh_kernel::Error::Transport {
                op: "nccl",
                detail: "the communicator is closed".into(),
                ranks: vec![],
            }));
        }
        Ok(turn)
    }

    pub(super) fn raw(&self) -> ncclComm_t {
        self.raw.load(Ordering::Acquire)
    }

    fn take(&self) -> ncclComm_t {
        self.raw.swap(std::ptr::null_mut(), Ordering::AcqRel)
    }

    /// Waits until the library has queued what these were told.
    pub(super) fn settle(
        all: &[Arc<Self>],
        what: &'static str,
        deadline: Duration,
    ) -> Result<(), Error> {
        let Some(first) = all.first() else {
            return Ok(());
        };
        let comms: Vec<ncclComm_t> = all.iter().map(|c| c.raw()).collect();
        let until = Instant::now() + deadline;
        settle(first.library, &comms, what, until, deadline, &first.watch)
    }

    pub(super) fn library(&self) -> &'static Library {
        self.library
    }

    /// An error that the library met by itself, such as a connection that broke. Nothing where
    /// somebody is in a call of it, who will see it.
    pub(super) fn trouble(&self) -> Option<Error> {
        let turn = match self.comm.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let comm = self.raw();
        if comm.is_null() {
            return None;
        }
        let mut state: Code = SUCCESS;
        // SAFETY: a live communicator, which the lock keeps; writes its state.
        let code = unsafe { (self.library.call.ncclCommGetAsyncError)(comm, &mut state) };
        let checked = self
            .library
            .check("ncclCommGetAsyncError", code, comm)
            .and_then(|()| self.library.check("communication", state, comm));
        drop(turn);
        checked.err()
    }

    /// Ends it and everything it has on the device. Returns at once; the abort happens in a thread.
    pub(super) fn abort(self: &Arc<Self>) {
        let this = self.clone();
        let ended = std::thread::Builder::new()
            .name("nccl-abort".into())
            .spawn(move || {
                // The watch has failed, so that who is inside a call leaves it soon.
                let until = Instant::now() + GRACE;
                let turn = loop {
                    match this.comm.try_lock() {
                        Ok(turn) => break Some(turn),
                        Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
                        Err(TryLockError::WouldBlock) if Instant::now() > until => break None,
                        Err(TryLockError::WouldBlock) => {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                };
                let comm = this.take();
                if !comm.is_null() {
                    // SAFETY: taken once, so aborted once; nobody uses it after.
                    unsafe { (this.library.call.ncclCommAbort)(comm) };
                }
                drop(turn);
                this.watch.aborted();
            });
        if ended.is_err() {
            self.watch.aborted();
        }
    }

    /// Finishes what is queued and frees it: every member calls it. What is not finished at the
    /// deadline is aborted.
    pub fn close(&self, deadline: Duration) -> Result<(), Error> {
        let Ok(turn) = self.lock() else {
            return Ok(());
        };
        let comm = self.take();
        // SAFETY: taken, so nobody else has it; the lock keeps those out who had it before.
        let code = unsafe { (self.library.call.ncclCommFinalize)(comm) };
        let until = Instant::now() + deadline;
        let finished = self
            .library
            .check("ncclCommFinalize", code, comm)
            .and_then(|()| settle(self.library, &[comm], "close", until, deadline, &self.watch));
        drop(turn);
        match finished {
            Ok(()) => {
                // SAFETY: finalized, so that this waits for nobody; taken, so destroyed once.
                let code = unsafe { (self.library.call.ncclCommDestroy)(comm) };
                self.library
                    .check("ncclCommDestroy", code, std::ptr::null_mut())
            }
            Err(e) => {
                abort(self.library, comm);
                Err(e)
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let comm = self.take();
        if !comm.is_null() {
            // Whoever did not close it did not wait for the others.
            abort(self.library, comm);
        }
    }
}

/// What one rank does in a call. Counts are in elements of the reduction, or in bytes.
#[derive(Clone, Debug)]
pub enum Op {
    /// The reduction of everybody's `from` into everybody's `to`.
    AllReduce {
        /// What it gives.
        from: Region,
        /// What it gets.
        to: Region,
        /// Elements.
        count: usize,
        /// How.
        reduce: Reduce,
    },
    /// Everybody's `from`, in the order of ranks.
    AllGather {
        /// What it gives.
        from: Region,
        /// What it gets.
        to: Region,
        /// Bytes that each gives.
        bytes: usize,
    },
    /// A piece of the reduction for each, in the order of ranks.
    ReduceScatter {
        /// What it gives: as many pieces as members.
        from: Region,
        /// What it gets: one piece.
        to: Region,
        /// Elements of a piece.
        count: usize,
        /// How.
        reduce: Reduce,
    },
    /// The root's `from` for everybody.
    Broadcast {
        /// What the root gives; not read elsewhere.
        from: Region,
        /// What it gets; may be `from` on the root.
        to: Region,
        /// Bytes.
        bytes: usize,
        /// Whose.
        root: usize,
    },
    /// To another rank.
    Send {
        /// What it gives.
        from: Region,
        /// Bytes.
        bytes: usize,
        /// To whom.
        peer: usize,
    },
    /// From another rank.
    Recv {
        /// What it gets.
        to: Region,
        /// Bytes.
        bytes: usize,
        /// From whom.
        peer: usize,
    },
}

impl Op {
    /// The memory it uses: what it reads, what it writes.
    pub(super) fn regions(&self) -> (Option<&Region>, Option<&Region>) {
        match self {
            Self::AllReduce { from, to, .. }
            | Self::AllGather { from, to, .. }
            | Self::ReduceScatter { from, to, .. }
            | Self::Broadcast { from, to, .. } => (Some(from), Some(to)),
            Self::Send { from, .. } => (Some(from), None),
            Self::Recv { to, .. } => (None, Some(to)),
        }
    }

    /// Queues it on the communicator's stream.
    ///
    /// # Safety
    /// The regions must hold what the counts say and stay until the stream has passed the call.
    pub(super) unsafe fn queue(&self, communicator: &Communicator) -> Result<(), Error> {
        const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;
        let (library, comm) = (communicator.library, communicator.raw());
        let (call, stream) = (&library.call, communicator.lane.stream());
        let read = |region: &Region| region.address as *const c_void;
        let write = |region: &Region| region.address as *mut c_void;
        // SAFETY: the caller's promise; the communicator is locked and alive.
        let (name, code) = unsafe {
            match self {
                Self::AllReduce {
                    from,
                    to,
                    count,
                    reduce,
                } => (
                    "ncclAllReduce",
                    (call.ncclAllReduce)(
                        read(from),
                        write(to),
                        *count,
                        reduce.element,
                        reduce.op,
                        comm,
                        stream,
                    ),
                ),
                Self::AllGather { from, to, bytes } => (
                    "ncclAllGather",
                    (call.ncclAllGather)(read(from), write(to), *bytes, BYTES, comm, stream),
                ),
                Self::ReduceScatter {
                    from,
                    to,
                    count,
                    reduce,
                } => (
                    "ncclReduceScatter",
                    (call.ncclReduceScatter)(
                        read(from),
                        write(to),
                        *count,
                        reduce.element,
                        reduce.op,
                        comm,
                        stream,
                    ),
                ),
                Self::Broadcast {
                    from,
                    to,
                    bytes,
                    root,
                } => (
                    "ncclBroadcast",
                    (call.ncclBroadcast)(
                        read(from),
                        write(to),
                        *bytes,
                        BYTES,
                        number(*root)?,
                        comm,
                        stream,
                    ),
                ),
                Self::Send { from, bytes, peer } => (
                    "ncclSend",
                    (call.ncclSend)(read(from), *bytes, BYTES, number(*peer)?, comm, stream),
                ),
                Self::Recv { to, bytes, peer } => (
                    "ncclRecv",
                    (call.ncclRecv)(write(to), *bytes, BYTES, number(*peer)?, comm, stream),
                ),
            }
        };
        library.check(name, code, comm)
    }
}
