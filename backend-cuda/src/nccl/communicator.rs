//! One rank of a group of GPUs.
//!
//! Communicators are of the blocking kind: a call of the library returns when it is queued, which it
//! is in some ten microseconds once members have met. One that must wait for a peer is ended by the
//! abort of the [watch](super::Watch), which comes from another thread; meeting for the first time
//! happens in a thread that is left behind at the deadline. (The non-blocking kind, which
//! `NCCL_COMM_BLOCKING=0` in the environment chooses, starts a thread for each call: measured, that
//! costs the host three times as much.)

use super::{
    Error, Library, Watch,
    connect::Slot,
    lane::{Lane, Region},
    library::{Code, IN_PROGRESS, SUCCESS},
};
use anymesh_kernel::Buffer;
use cudarc::nccl::sys::{ncclComm, ncclComm_t, ncclConfig_t};
use std::{
    ffi::c_int,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicPtr, Ordering},
    },
    time::{Duration, Instant},
};

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

pub(super) fn config() -> ncclConfig_t {
    // What the library's header calls undefined: it takes its own default.
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        // What version 2.18 had and nothing behind it: the library copies so many bytes, and later
        // versions have put fields where the structure's padding was.
        size: std::mem::offset_of!(ncclConfig_t, trafficClass),
        magic: 0xcafe_beef,
        version: 21800,
        blocking: 1,
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
pub(super) fn number(n: usize) -> Result<c_int, Error> {
    c_int::try_from(n).map_err(|_| {
        Error::Device(anymesh_kernel::Error::argument(
            "connect",
            "size",
            format!("{n} ranks are more than NCCL can count"),
        ))
    })
}

/// Asks until every communicator is done with what it was told.
pub(super) fn settle(
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
pub(super) fn abort(library: &'static Library, comm: ncclComm_t) {
    if comm.is_null() {
        return;
    }
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
    pub(super) fn adopt(
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
    pub fn empty(&self, bytes: usize) -> Result<Buffer, Error> {
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
