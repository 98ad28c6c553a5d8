//! The system's MPI as this process has it: initialised once, on a communicator of our own.
#![allow(unsafe_code)]

use super::requests::Requests;
use mpi::ffi;
use std::{
    ffi::{c_char, c_int},
    fmt,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicBool, atomic::Ordering, mpsc},
    time::{Duration, Instant},
};

/// Why MPI cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Trouble {
    /// It was initialised for less than a program with threads needs.
    Threads(&'static str),
    /// A call of it failed, in its own words.
    Failed(&'static str, String),
    /// Other processes did not come to this call in time.
    Late(&'static str),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads(why) => write!(f, "MPI cannot be called: {why}"),
            Self::Failed(call, text) => write!(f, "{call}: {text}"),
            Self::Late(call) => write!(
                f,
                "{call}: not all processes of the MPI job came to it in time"
            ),
        }
    }
}

/// MPI's answer as a result.
pub(super) fn check(call: &'static str, code: c_int) -> Result<(), Trouble> {
    match code as u32 {
        ffi::MPI_SUCCESS => Ok(()),
        _ => Err(Trouble::Failed(call, text_of(code))),
    }
}

/// An error code in words.
pub(super) fn text_of(code: c_int) -> String {
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len: c_int = 0;
    // SAFETY: the buffer has the size that MPI asks for, `len` is a valid place for its length.
    let answer =
        unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    let text = text.get(..len as usize).unwrap_or_default();
    match answer as u32 {
        ffi::MPI_SUCCESS => String::from_utf8_lossy(text).trim().to_string(),
        _ => format!("MPI error {code}"),
    }
}

/// The processes that the launcher started together.
#[derive(Debug)]
pub(crate) struct World {
    /// A duplicate of the world's, so that nothing the host program sends is mistaken for ours.
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    /// Which threads may call.
    level: Level,
    /// Whether it is for us to finalise.
    ours: bool,
    calls: Mutex<()>,
}

// SAFETY: the communicator is a handle that MPI lets every thread use which may call it at all;
// `World::enter` is what decides that, and every call is made under it.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Level {
    /// Only the thread that initialised MPI.
    Funneled,
    /// One thread at a time.
    Serialized,
    Multiple,
}

impl Level {
    /// Whether this thread may call at all.
    fn may_call(self) -> Result<(), Trouble> {
        if self != Self::Funneled {
            return Ok(());
        }
        let mut main: c_int = 0;
        // SAFETY: any thread may ask this; the place is valid.
        check("MPI_Is_thread_main", unsafe {
            ffi::MPI_Is_thread_main(&mut main)
        })?;
        match main {
            0 => Err(Trouble::Threads(
                "it was initialised for calls of one thread only (MPI_THREAD_FUNNELED), and this is \
                 another one",
            )),
            _ => Ok(()),
        }
    }
}

static WORLD: OnceLock<World> = OnceLock::new();

/// Whether a call was given up half-way: MPI may then still use memory that was leaked to it, and
/// `MPI_Finalize` would wait for processes that never come.
static BROKEN: AtomicBool = AtomicBool::new(false);

/// Whether MPI is finalised, by us.
static OVER: AtomicBool = AtomicBool::new(false);

/// Whether a cluster uses it that has not been left in good order.
static USED: AtomicBool = AtomicBool::new(false);

/// How long a process that ends waits for the others to end too, before it leaves without
/// finalising MPI.
const GOODBYE: Duration = Duration::from_secs(5);

unsafe extern "C" {
    /// Of the C library: `exit`, and so the end of `main`, calls the function.
    safe fn atexit(call: extern "C" fn()) -> c_int;
}

extern "C" fn at_exit() {
    if let Some(world) = WORLD.get()
        && !USED.load(Ordering::Acquire)
    {
        // There is nobody left to tell.
        let _ = world.leave(Instant::now() + GOODBYE);
    }
}

/// After this MPI is not to be finalised.
pub(super) fn give_up() {
    BROKEN.store(true, Ordering::Release);
}

impl World {
    /// Initialises MPI in the first call, unless the host program already has, and answers the same
    /// world in every call. All processes of the job make the first call.
    pub(crate) fn join(until: Instant) -> Result<&'static Self, Trouble> {
        static JOINING: Mutex<()> = Mutex::new(());
        let _one = JOINING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(world) = WORLD.get() {
            return Ok(world);
        }
        let ours = initialise(until)?;
        let level = level()?;
        level.may_call()?;
        let world = Self::duplicate(level, ours, until)?;
        if ours {
            atexit(at_exit);
        }
        Ok(WORLD.get_or_init(|| world))
    }

    fn duplicate(level: Level, ours: bool, until: Instant) -> Result<Self, Trouble> {
        // MPI writes the communicator here when the request is complete: leaked if it never is.
        // SAFETY: a constant of the MPI library.
        let place = Box::leak(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
        // SAFETY: constants of the MPI library.
        let (all, returns) = unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
        if ours {
            // What has no communicator of its own reports to the world's handler.
            // SAFETY: MPI is initialised, and the handles are MPI's own.
            check("MPI_Comm_set_errhandler", unsafe {
                ffi::MPI_Comm_set_errhandler(all, returns)
            })?;
        }
        let mut requests = Requests::default();
        // SAFETY: MPI is initialised; the place outlives the request.
        requests.add("MPI_Comm_idup", |request| unsafe {
            ffi::MPI_Comm_idup(all, place, request)
        })?;
        finish("MPI_Comm_idup", &mut requests, until)?;
        let comm = *place;
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator is complete, the places are valid.
        unsafe {
            check(
                "MPI_Comm_set_errhandler",
                ffi::MPI_Comm_set_errhandler(comm, returns),
            )?;
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut size))?;
        }
        Ok(Self {
            comm,
            rank: rank as usize,
            size: size as usize,
            level,
            ours,
            calls: Mutex::new(()),
        })
    }

    /// The number of this process in the job.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// How many processes the job has.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn comm(&self) -> ffi::MPI_Comm {
        self.comm
    }

    /// Leave to call MPI, for as long as the answer lives.
    pub(super) fn enter(&self) -> Result<Option<MutexGuard<'_, ()>>, Trouble> {
        match self.level {
            Level::Multiple => Ok(None),
            Level::Serialized => Ok(Some(
                self.calls.lock().unwrap_or_else(PoisonError::into_inner),
            )),
            Level::Funneled => self.level.may_call().map(|()| None),
        }
    }

    /// What process 0 gives, for all: every process of the job calls it.
    pub(crate) fn share(&self, bytes: &[u8], until: Instant) -> Result<Vec<u8>, Trouble> {
        let _call = self.enter()?;
        let len = self.broadcast((bytes.len() as u64).to_le_bytes().to_vec(), until)?;
        let len = len.try_into().map_or(0, u64::from_le_bytes);
        if len > c_int::MAX as u64 {
            let text = format!("{len} bytes are more than it takes");
            return Err(Trouble::Failed("MPI_Ibcast", text));
        }
        let mut memory = if self.rank == 0 {
            bytes.to_vec()
        } else {
            vec![]
        };
        memory.resize(len as usize, 0);
        if memory.is_empty() {
            return Ok(memory);
        }
        self.broadcast(memory, until)
    }

    /// Fills everybody's memory, which is of one size, with that of process 0.
    fn broadcast(&self, memory: Vec<u8>, until: Instant) -> Result<Vec<u8>, Trouble> {
        // Leaked if the call never ends.
        let memory = Box::leak(memory.into_boxed_slice());
        let mut requests = Requests::default();
        let (at, len) = (memory.as_mut_ptr(), memory.len() as c_int);
        // SAFETY: the memory has this size and outlives the request.
        requests.add("MPI_Ibcast", |request| unsafe {
            ffi::MPI_Ibcast(at.cast(), len, ffi::RSMPI_UINT8_T, 0, self.comm, request)
        })?;
        finish("MPI_Ibcast", &mut requests, until)?;
        // SAFETY: it was a box of a slice of this size, and the request is complete.
        Ok(
            unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(at, len as usize)) }
                .into_vec(),
        )
    }

    /// The clean end, which all processes of the job come to: MPI is finalised if it is ours and if
    /// nothing was given up. After a failure a process leaves without: the others may be dead.
    pub(crate) fn leave(&self, until: Instant) -> Result<(), Trouble> {
        if !self.ours || !self.alive() || BROKEN.load(Ordering::Acquire) {
            return Ok(());
        }
        let _call = self.enter()?;
        // MPI_Finalize has no deadline: first see that all are here.
        let mut requests = Requests::default();
        // SAFETY: the communicator is ours.
        requests.add("MPI_Ibarrier", |request| unsafe {
            ffi::MPI_Ibarrier(self.comm, request)
        })?;
        finish("MPI_Ibarrier", &mut requests, until)?;
        OVER.store(true, Ordering::Release);
        // SAFETY: initialised by us, not yet finalised, and no request of ours is open.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }

    /// A cluster begins.
    pub(super) fn in_use(&self) {
        USED.store(true, Ordering::Release);
    }

    /// It was left in good order.
    pub(super) fn unused(&self) {
        USED.store(false, Ordering::Release);
    }

    /// Whether wires may still be used.
    pub(super) fn alive(&self) -> bool {
        !OVER.load(Ordering::Acquire)
    }
}

/// Whether it was this that initialised MPI. In a thread of its own, because `MPI_Init_thread`
/// waits for all processes of the job for as long as it takes: given up, the thread is left behind.
fn initialise(until: Instant) -> Result<bool, Trouble> {
    let mut done: c_int = 0;
    // SAFETY: both may be asked at any time; the place is valid.
    unsafe {
        check("MPI_Finalized", ffi::MPI_Finalized(&mut done))?;
        if done != 0 {
            let text = "the program has already finalised MPI".to_string();
            return Err(Trouble::Failed("MPI_Init_thread", text));
        }
        check("MPI_Initialized", ffi::MPI_Initialized(&mut done))?;
    }
    if done != 0 {
        return Ok(false);
    }
    let (tell, told) = mpsc::channel();
    let start = move || {
        let mut got: c_int = 0;
        // SAFETY: called once, under the lock of `World::join`; no arguments are passed on.
        let code = unsafe {
            ffi::MPI_Init_thread(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                ffi::RSMPI_THREAD_MULTIPLE,
                &mut got,
            )
        };
        // SAFETY: a constant of the MPI library.
        let funneled = got == unsafe { ffi::RSMPI_THREAD_FUNNELED };
        let answer = check("MPI_Init_thread", code).and_then(|()| match funneled {
            true => Err(Trouble::Threads(
                "this MPI allows calls of one thread only (MPI_THREAD_FUNNELED): initialise it in the \
                 thread that computes, before the cluster",
            )),
            false => Ok(true),
        });
        // Nobody listens any more if it came too late.
        let _ = tell.send(answer);
    };
    let thread = std::thread::Builder::new().name("mpi-init".into());
    thread.spawn(start).map_err(|e| {
        Trouble::Failed(
            "MPI_Init_thread",
            format!("no thread could be started: {e}"),
        )
    })?;
    match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(answer) => answer,
        Err(_) => {
            give_up();
            Err(Trouble::Late("MPI_Init_thread"))
        }
    }
}

/// Which threads may call.
fn level() -> Result<Level, Trouble> {
    let mut level: c_int = 0;
    // SAFETY: MPI is initialised; the place is valid, the rest are constants of the library.
    let (single, funneled, serialized) = unsafe {
        check("MPI_Query_thread", ffi::MPI_Query_thread(&mut level))?;
        (
            ffi::RSMPI_THREAD_SINGLE,
            ffi::RSMPI_THREAD_FUNNELED,
            ffi::RSMPI_THREAD_SERIALIZED,
        )
    };
    match level {
        l if l == single => Err(Trouble::Threads(
            "it was initialised for a program without threads (MPI_THREAD_SINGLE); ask \
             MPI_Init_thread for MPI_THREAD_FUNNELED or more",
        )),
        l if l == funneled => Ok(Level::Funneled),
        l if l == serialized => Ok(Level::Serialized),
        _ => Ok(Level::Multiple),
    }
}

/// Waits for all requests of a call.
fn finish(call: &'static str, requests: &mut Requests, until: Instant) -> Result<(), Trouble> {
    loop {
        let mut failed = None;
        requests.test(|_, outcome| {
            if let Err(e) = outcome {
                failed = Some(Trouble::Failed(call, e.to_string()));
            }
        })?;
        match failed {
            Some(failed) => {
                give_up();
                return Err(failed);
            }
            None if requests.open() == 0 => return Ok(()),
            None if Instant::now() >= until => {
                give_up();
                return Err(Trouble::Late(call));
            }
            // These calls happen once in a program.
            None => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
