//! How the members of a group meet.

use super::{
    Communicator, Error, Library, Watch,
    communicator::{abort, config, number, settle},
    lane::Lane,
};
use anymesh_kernel::Device;
use cudarc::nccl::sys::{ncclComm, ncclComm_t, ncclUniqueId};
use std::{
    ffi::{c_char, c_int},
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
        mpsc::RecvTimeoutError,
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
    let until = Instant::now() + deadline;
    let (slots, started) = begin(library, lanes, size_code, id, until, deadline, watch)?;
    let comms: Vec<ncclComm_t> = slots
        .iter()
        .map(|(_, _, slot)| slot.get())
        .filter(|comm| !comm.is_null())
        .collect();
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

/// Places for communicators that were begun, and whether all were.
type Begun = (Vec<(Arc<Lane>, usize, Slot)>, Result<(), Error>);

/// Tells the library of all members of this process, in a thread of its own: where the environment
/// has made communicators block, that would wait for others without an end.
fn begin(
    library: &'static Library,
    lanes: Vec<(Arc<Lane>, usize, c_int)>,
    size: c_int,
    id: ncclUniqueId,
    until: Instant,
    deadline: Duration,
    watch: &Watch,
) -> Result<Begun, Error> {
    let (tell, told) = std::sync::mpsc::channel::<Begun>();
    let run = move || {
        let mut slots = vec![];
        let mut config = config();
        let started = library.group(|| {
            for (lane, rank, rank_code) in lanes {
                lane.bind()?;
                let slot = Slot::new();
                let place = slot.place();
                slots.push((lane, rank, slot));
                // SAFETY: writes the communicator into the slot; the configuration is complete.
                let code = unsafe {
                    (library.call.ncclCommInitRankConfig)(place, size, id, rank_code, &mut config)
                };
                library.check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
            }
            Ok(())
        });
        if let Err(unheard) = tell.send((slots, started)) {
            // Nobody waits any more.
            for (_, _, slot) in unheard.0.0 {
                abort(library, slot.get());
                slot.leave();
            }
        }
    };
    let thread = std::thread::Builder::new().name("nccl-connect".into());
    thread.spawn(run).map_err(|e| Error::Driver {
        call: "connect",
        detail: format!("no thread can be started: {e}"),
    })?;
    loop {
        watch.check()?;
        match told.recv_timeout(Duration::from_millis(20)) {
            Ok(begun) => return Ok(begun),
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            Err(_) => {
                return Err(Error::Late {
                    what: "connect",
                    seconds: deadline.as_secs_f64(),
                });
            }
        }
    }
}

/// Where the library writes a communicator: maybe later, from a thread of its own.
pub(super) struct Slot(Box<AtomicPtr<ncclComm>>);

impl Slot {
    pub(super) fn new() -> Self {
        Self(Box::new(AtomicPtr::new(std::ptr::null_mut())))
    }

    pub(super) fn place(&self) -> *mut ncclComm_t {
        self.0.as_ptr()
    }

    pub(super) fn get(&self) -> ncclComm_t {
        self.0.load(Ordering::Acquire)
    }

    /// Where the library was given up it may still write.
    pub(super) fn leave(self) {
        Box::leak(self.0);
    }
}
