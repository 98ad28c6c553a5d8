//! Profiling a program: what its devices, its memory and its communication did when, and which
//! line asked for it, as a file that [Perfetto](https://ui.perfetto.dev) opens and `anymesh profile`
//! explains.
//!
//! ```
//! # use anymesh_core::{Tensor, Timing, profile::Recording};
//! # let device = anymesh_backend_cpu::device();
//! # let path = std::env::temp_dir().join(format!("anymesh-doc-{}.json", std::process::id()));
//! let recording = Recording::start(&path, Timing::Done)?;
//! recording.watch(&device);
//! let x = Tensor::new(&[1f32, 2.0], &device)?;
//! (&x + &x)?;
//! recording.finish()?;
//! assert!(std::fs::read_to_string(&path)?.contains(r#""op":"add""#));
//! # std::fs::remove_file(&path)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A program that is not to be changed is profiled from outside: where the variable
//! [`VARIABLE`] names a folder, devices that are opened by name are [watched](follow), and every
//! process writes a file there. `anymesh profile -- PROGRAM` does that.
//!
//! # What is measured
//! With [`Timing::Done`] the device is waited for before and after each kernel, so each has a time of
//! its own; the program is slower than without, a device that works beside the host works alone, and
//! one that puts launches off to fuse them has nothing to fuse. With [`Timing::Launch`] nothing is
//! waited for: times are those of the host, and what a GPU does meanwhile is not seen.

mod event;
mod file;

use crate::{
    Buffer, Device, Profiling, Timing,
    ledger::{self, Caller},
};
use anymesh_kernel::{Launched, MemoryChange, Watch, clock};
use event::Event;
use file::Trace;
use std::{
    cell::Cell,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// The variable of the environment that names the folder of [`follow`].
pub const VARIABLE: &str = "ANYMESH_PROFILE";

/// The variable that says what is measured: `done` (or nothing) or `launch`.
pub const TIMING: &str = "ANYMESH_PROFILE_TIMING";

/// How many recordings there are: all that anybody looks at where there is none.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static TRACES: Mutex<Vec<Arc<Trace>>> = Mutex::new(Vec::new());

thread_local! {
    /// The rank that the thread computes for.
    static RANK: Cell<Option<u32>> = const { Cell::new(None) };
    /// Whether the thread is in a backward pass.
    static BACKWARD: Cell<bool> = const { Cell::new(false) };
    /// What the thread launched last, for the buffers that it then makes.
    static KERNEL: Cell<Option<&'static str>> = const { Cell::new(None) };
    /// A number for each thread that does something.
    static THREAD: u32 = {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
    /// Writes what is left when the thread ends. That of the main thread ends with the program.
    static LAST: Last = const { Last };
}

struct Last;

impl Drop for Last {
    fn drop(&mut self) {
        for trace in traces().iter() {
            trace.write();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn traces() -> MutexGuard<'static, Vec<Arc<Trace>>> {
    lock(&TRACES)
}

/// Whether anything is recorded.
#[inline]
pub(crate) fn is_on() -> bool {
    RUNNING.load(Ordering::Relaxed) > 0
}

/// On whose behalf a thread does something.
#[derive(Clone, Copy)]
struct Behalf {
    caller: Option<Caller>,
    thread: u32,
    rank: Option<u32>,
    backward: bool,
}

impl Behalf {
    fn now() -> Self {
        let _ = LAST.try_with(|_| ());
        Self {
            caller: ledger::outermost(),
            thread: THREAD.try_with(|thread| *thread).unwrap_or(u32::MAX),
            rank: RANK.try_with(Cell::get).ok().flatten(),
            backward: BACKWARD.try_with(Cell::get).unwrap_or(false),
        }
    }
}

/// Sets a variable of the thread for as long as it lives.
pub(crate) struct Marked<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Marked<T> {
    fn drop(&mut self) {
        let _ = self.0.try_with(|variable| variable.set(self.1));
    }
}

/// Until it is dropped, what this thread does is for a rank.
#[inline]
pub(crate) fn for_rank(rank: usize) -> Option<Marked<Option<u32>>> {
    is_on().then(|| Marked(&RANK, RANK.replace(u32::try_from(rank).ok())))
}

/// Until it is dropped, what this thread does is part of a backward pass.
#[inline]
pub(crate) fn backward() -> Option<Marked<bool>> {
    is_on().then(|| Marked(&BACKWARD, BACKWARD.replace(true)))
}

/// Tells every recording of what was sent.
pub(crate) fn sent(
    kind: &'static str,
    bytes: u64,
    axes: impl FnOnce() -> String,
    start: Duration,
    took: Duration,
) {
    if !is_on() {
        return;
    }
    let (on, axes) = (Behalf::now(), axes());
    for trace in traces().iter() {
        trace.push(Event::Sent {
            on,
            kind,
            bytes,
            axes: axes.clone(),
            start,
            took,
        });
    }
}

/// What the host reads of a device, from now on until it is dropped.
pub(crate) struct Reading {
    start: Duration,
    bytes: u64,
}

/// Begins to read.
pub(crate) fn reading(bytes: usize) -> Option<Reading> {
    is_on().then(|| Reading {
        start: clock(),
        bytes: bytes as u64,
    })
}

impl Drop for Reading {
    fn drop(&mut self) {
        let (on, took) = (Behalf::now(), clock().saturating_sub(self.start));
        for trace in traces().iter() {
            trace.push(Event::Moved {
                on,
                what: "read",
                bytes: self.bytes,
                start: self.start,
                took,
            });
        }
    }
}

/// A recording of what the devices it [watches](Self::watch) do, and of everything that is sent,
/// into a file. It goes on until it is [finished](Self::finish) or dropped; what was seen until then
/// is in the file also where the program ends before.
#[derive(Debug)]
pub struct Recording {
    trace: Arc<Trace>,
    watched: Mutex<Vec<(Device, Profiling)>>,
}

impl Recording {
    /// Begins to record into a file.
    pub fn start(path: impl AsRef<Path>, timing: Timing) -> io::Result<Self> {
        let trace = Trace::create(path.as_ref(), timing)?;
        traces().push(trace.clone());
        RUNNING.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            trace,
            watched: Mutex::default(),
        })
    }

    /// Records what a device does from now on. Once is enough.
    pub fn watch(&self, device: &Device) {
        let mut watched = lock(&self.watched);
        if watched.iter().any(|(other, _)| other == device) {
            return;
        }
        let number = self.trace.add_device(device, watched.len());
        let on_device = OnDevice {
            trace: self.trace.clone(),
            number,
        };
        let watching = device.watch(self.trace.timing(), Arc::new(on_device));
        watched.push((device.clone(), watching));
    }

    /// Ends it; an error where something could not be written.
    pub fn finish(self) -> io::Result<()> {
        lock(&self.watched).clear();
        self.trace.write();
        self.trace.error()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
        traces().retain(|trace| !Arc::ptr_eq(trace, &self.trace));
        lock(&self.watched).clear();
        self.trace.write();
    }
}

/// Records what a device does for as long as the program runs, if the environment says so
/// ([`VARIABLE`]). Devices that are opened by name are followed without being asked.
pub fn follow(device: &Device) {
    static RECORDING: OnceLock<Option<Recording>> = OnceLock::new();
    let recording = RECORDING.get_or_init(|| {
        let folder = PathBuf::from(std::env::var_os(VARIABLE)?);
        let timing = match std::env::var(TIMING).as_deref() {
            Ok("launch") => Timing::Launch,
            _ => Timing::Done,
        };
        let path = folder.join(format!("{}.trace.json", std::process::id()));
        let started =
            std::fs::create_dir_all(&folder).and_then(|()| Recording::start(&path, timing));
        match started {
            Ok(recording) => Some(recording),
            Err(error) => {
                eprintln!("anymesh: nothing is profiled: {}: {error}", path.display());
                None
            }
        }
    });
    if let Some(recording) = recording {
        recording.watch(device);
    }
}

/// A device of a recording.
struct OnDevice {
    trace: Arc<Trace>,
    number: usize,
}

impl Watch for OnDevice {
    fn launched(&self, launched: &Launched<'_>) {
        KERNEL.set(Some(launched.kernel.op()));
        let sizes: Vec<String> = (launched.kernel.outputs().iter())
            .map(|(dtype, shape)| format!("{dtype}{shape}"))
            .collect();
        self.trace.push(Event::Launched {
            on: Behalf::now(),
            device: self.number,
            kernel: launched.kernel.op(),
            family: launched.kernel.family(),
            outputs: sizes.join(" "),
            start: launched.start,
            host: launched.host,
            done: launched.done,
        });
    }

    fn uploaded(&self, bytes: u64, start: Duration, took: Duration) {
        KERNEL.set(Some("upload"));
        self.trace.push(Event::Moved {
            on: Behalf::now(),
            what: "upload",
            bytes,
            start,
            took,
        });
    }

    fn memory(&self, change: &MemoryChange) {
        self.trace.push(Event::Memory {
            on: Behalf::now(),
            kernel: KERNEL.try_with(Cell::get).ok().flatten(),
            device: self.number,
            at: clock(),
            change: *change,
        });
    }
}

/// The number of the next buffer, so that what is older than a recording can be told.
fn first_serial() -> u64 {
    Buffer::next_serial()
}
