//! The watch over a set of communicators: every call has a deadline, and a failure ends them all.
//!
//! A collective whose peer is gone never ends by itself: its kernel spins on the GPU, and everything
//! behind it waits. So two threads look after the calls of a set. One asks events and communicators
//! how far they are, and lets go of memory. The other has a clock and nothing that could make it
//! wait: at a deadline, or when it is told, it first makes the failure known to the
//! [gates](crate::gate) of the devices, so that nobody can read what kernels are about to make of
//! data that never came, and then aborts every communicator from a thread of its own.

use super::{Communicator, Error, lane::Event, lane::Lane};
use anymesh_kernel::Error as KernelError;
use std::{
    any::Any,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Who is told of calls, and asked when one has trouble.
pub trait Observer: Send + Sync {
    /// The device has come to a call.
    fn started(&self, _ticket: u64) {}

    /// A call is done.
    fn finished(&self, _ticket: u64) {}

    /// Something is wrong, as far as this process can tell: a deadline passed, a connection broke.
    /// What the answer says is what everybody gets. It may take a moment, such as for asking others
    /// who is missing; calls wait meanwhile.
    fn trouble(&self, error: KernelError) -> KernelError {
        error
    }
}

/// An observer that looks away.
impl Observer for () {}

/// A call that is queued.
pub struct Call {
    what: &'static str,
    ticket: u64,
    deadline: Duration,
    /// The serial number of the first buffer it fills.
    first: u64,
    progress: Mutex<Progress>,
}

struct Progress {
    /// Nothing until the library has queued the call.
    spans: Option<Arc<Vec<Span>>>,
    /// Memory that must stay until it is done.
    pins: Vec<Arc<dyn Any + Send + Sync>>,
    started: Option<Instant>,
    done: bool,
}

/// A call on one device.
pub(super) struct Span {
    pub(super) lane: Arc<Lane>,
    pub(super) number: u64,
    pub(super) begin: Event,
    pub(super) end: Arc<Event>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Call({}, ticket {})", self.what, self.ticket)
    }
}

impl Call {
    pub(super) fn new(
        what: &'static str,
        ticket: u64,
        deadline: Duration,
        first: u64,
        pins: Vec<Arc<dyn Any + Send + Sync>>,
    ) -> Arc<Self> {
        let progress = Progress {
            spans: None,
            pins,
            started: None,
            done: false,
        };
        Arc::new(Self {
            what,
            ticket,
            deadline,
            first,
            progress: Mutex::new(progress),
        })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on its events tell how far it is.
    pub(super) fn queued(&self, spans: Vec<Span>) {
        self.progress().spans = Some(Arc::new(spans));
    }

    /// When the device came to it, if it has and is not done.
    fn running_since(&self) -> Option<Instant> {
        let progress = self.progress();
        progress.started.filter(|_| !progress.done)
    }

    /// Memory that nobody will ever know to be free again is kept for ever.
    pub(super) fn forget(&self) {
        let mut progress = self.progress();
        std::mem::forget(std::mem::take(&mut progress.pins));
        progress.done = true;
    }

    /// Asks the device; whether it just started, and whether it is done. The driver is asked without
    /// a lock: it may take its time, and the clock must not wait for it.
    fn look(&self) -> Result<(bool, bool), Error> {
        let (spans, started) = {
            let progress = self.progress();
            match &progress.spans {
                Some(spans) if !progress.done => (spans.clone(), progress.started.is_some()),
                _ => return Ok((false, progress.done)),
            }
        };
        let over = |events: &mut dyn Iterator<Item = &Event>| {
            for event in events {
                if !event.is_over()? {
                    return Ok(false);
                }
            }
            Ok::<bool, Error>(true)
        };
        if !started {
            if !over(&mut spans.iter().map(|span| &span.begin))? {
                return Ok((false, false));
            }
            self.progress().started = Some(Instant::now());
        }
        if !over(&mut spans.iter().map(|span| &*span.end))? {
            return Ok((!started, false));
        }
        for span in spans.iter() {
            span.lane.gate().finished(span.number);
        }
        let mut progress = self.progress();
        progress.done = true;
        let (pins, spans) = (std::mem::take(&mut progress.pins), progress.spans.take());
        drop(progress);
        drop((pins, spans));
        Ok((!started, true))
    }
}

/// Watches the communicators of one program: see the module's text.
pub struct Watch(Arc<Shared>);

struct Shared {
    observer: Arc<dyn Observer>,
    /// Asked in every turn of a waiting loop.
    failed: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failure: Option<KernelError>,
    /// Somebody has trouble and is asking what it is.
    asking: bool,
    calls: Vec<Arc<Call>>,
    communicators: Vec<Weak<Communicator>>,
    lanes: Vec<Arc<Lane>>,
    /// Aborts that are under way.
    aborting: usize,
    /// Since when the other thread waits for an answer of the driver.
    asking_driver: Option<Instant>,
    closed: bool,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state();
        write!(f, "Watch({} calls, {:?})", state.calls.len(), state.failure)
    }
}

impl Watch {
    /// With its two threads, which end with it.
    pub fn new(observer: Arc<dyn Observer>) -> Result<Arc<Self>, KernelError> {
        let shared = Arc::new(Shared {
            observer,
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let threads: [(&str, fn(&Shared)); 2] = [
            ("nccl-progress", Shared::follow),
            ("nccl-clock", Shared::clock),
        ];
        let watch = Arc::new(Self(shared.clone()));
        for (name, run) in threads {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(name.into())
                .spawn(move || run(&shared))
                .map_err(|e| KernelError::DeviceFailed {
                    device: "the host".into(),
                    detail: format!("no thread can be started: {e}"),
                })?;
        }
        Ok(watch)
    }

    /// Why everything was given up, if it was.
    pub fn failure(&self) -> Option<KernelError> {
        if !self.0.failed.load(Ordering::Acquire) {
            return None;
        }
        self.0.state().failure.clone()
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.failure().map_or(Ok(()), |e| Err(Error::GivenUp(e)))
    }

    /// Gives everything up: calls end, later ones and all reads of the devices get this error. The
    /// first reason counts.
    pub fn abort(&self, reason: KernelError) {
        self.0.fail(reason);
    }

    /// Gives everything up because of what a call met; what everybody gets.
    pub(super) fn give_up(&self, error: Error) -> Error {
        match error {
            Error::GivenUp(_) => error,
            error => Error::GivenUp(self.0.trouble(error.into())),
        }
    }

    /// The same for an error that was met beside a call, as others know it.
    pub fn end(&self, error: Error) -> KernelError {
        self.give_up(error).into()
    }

    /// Whether no abort is under way any more, once `limit` has passed at the latest.
    pub fn quiet(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let mut state = self.0.state();
        while state.aborting > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.0.wait(state, left);
        }
        true
    }

    pub(super) fn guard(&self, communicator: &Arc<Communicator>) {
        let mut state = self.0.state();
        state.communicators.retain(|c| c.strong_count() > 0);
        state.communicators.push(Arc::downgrade(communicator));
        let lane = &communicator.lane;
        if !state.lanes.iter().any(|known| Arc::ptr_eq(known, lane)) {
            state.lanes.push(lane.clone());
        }
        if state.failure.is_some() {
            state.aborting += 1;
            drop(state);
            communicator.abort();
        }
    }

    pub(super) fn aborted(&self) {
        let mut state = self.0.state();
        state.aborting = state.aborting.saturating_sub(1);
        self.0.changed.notify_all();
    }

    /// Watches a call from before the library is told of it.
    pub(super) fn add(&self, call: &Arc<Call>) -> Result<(), Error> {
        let mut state = self.0.state();
        if let Some(failure) = &state.failure {
            return Err(Error::GivenUp(failure.clone()));
        }
        state.calls.push(call.clone());
        self.0.changed.notify_all();
        Ok(())
    }

    /// Waits until a call is done, which its deadline and the watch see to.
    pub fn wait(&self, call: &Call) -> Result<(), Error> {
        let mut state = self.0.state();
        loop {
            if call.progress().done {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(Error::GivenUp(failure.clone()));
            }
            state = self.0.wait(state, Duration::from_millis(100));
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.changed
            .wait_timeout(state, limit)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Asks what the trouble is, once, and gives up with the answer.
    fn trouble(&self, error: KernelError) -> KernelError {
        let mut state = self.state();
        while state.asking && state.failure.is_none() {
            state = self.wait(state, Duration::from_millis(100));
        }
        if let Some(failure) = &state.failure {
            return failure.clone();
        }
        state.asking = true;
        drop(state);
        let answer = self.observer.trouble(error);
        self.fail(answer)
    }

    /// The failure that counts.
    fn fail(&self, error: KernelError) -> KernelError {
        let mut state = self.state();
        if let Some(first) = &state.failure {
            return first.clone();
        }
        // First those who read are told, then those are let go for whom they wait.
        let first = |call: &Arc<Call>| call.first;
        let since = state.calls.iter().map(first).min();
        let since = since.unwrap_or_else(anymesh_kernel::Buffer::next_serial);
        for lane in &state.lanes {
            lane.gate().fail(error.clone(), since);
        }
        state.failure = Some(error.clone());
        self.failed.store(true, Ordering::Release);
        let all: Vec<Arc<Communicator>> = state
            .communicators
            .drain(..)
            .filter_map(|c| c.upgrade())
            .collect();
        state.aborting += all.len();
        drop(state);
        self.changed.notify_all();
        for communicator in all {
            communicator.abort();
        }
        error
    }

    /// The thread with the clock.
    fn clock(&self) {
        let mut state = self.state();
        while !state.closed {
            let now = Instant::now();
            let late = |since: Instant, call: &Call| now.duration_since(since) > call.deadline;
            let found = match state.failure {
                Some(_) => None,
                None => state.calls.iter().find_map(|call| {
                    let stuck = state.asking_driver.filter(|since| late(*since, call));
                    let running = || call.running_since().filter(|since| late(*since, call));
                    stuck.or_else(running).map(|_| call.clone())
                }),
            };
            state = match found {
                Some(call) => {
                    drop(state);
                    let late = Error::Late {
                        what: call.what,
                        seconds: call.deadline.as_secs_f64(),
                    };
                    self.trouble(late.into());
                    self.state()
                }
                None if state.calls.is_empty() => self.wait(state, Duration::from_secs(3600)),
                None => self.wait(state, Duration::from_millis(20)),
            };
        }
    }

    /// The thread that asks how far calls are.
    fn follow(&self) {
        let mut pause = Duration::from_micros(200);
        let mut asked = Instant::now();
        loop {
            let mut state = self.state();
            if state.closed && state.calls.is_empty() {
                return;
            }
            if state.calls.is_empty() {
                // Also without calls a communicator can break.
                drop(self.wait(state, Duration::from_secs(1)));
                pause = Duration::from_micros(200);
            } else {
                let calls = state.calls.clone();
                state.asking_driver = Some(Instant::now());
                drop(state);
                let progress = self.look(&calls);
                self.state().asking_driver = None;
                if !progress {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(2));
                } else {
                    pause = Duration::from_micros(200);
                }
            }
            if asked.elapsed() > Duration::from_millis(100) {
                asked = Instant::now();
                self.ask_communicators();
            }
        }
    }

    /// Whether one of the calls is further.
    fn look(&self, calls: &[Arc<Call>]) -> bool {
        let mut progress = false;
        let mut ended = vec![];
        for call in calls {
            match call.look() {
                Ok((started, done)) => {
                    progress |= started | done;
                    if started {
                        self.observer.started(call.ticket);
                    }
                    if done {
                        ended.push(call.clone());
                        if !self.failed.load(Ordering::Acquire) {
                            self.observer.finished(call.ticket);
                        }
                    }
                }
                Err(e) => {
                    // The device itself is gone; its memory with it.
                    ended.push(call.clone());
                    self.trouble(KernelError::DeviceFailed {
                        device: "cuda".into(),
                        detail: e.to_string(),
                    });
                }
            }
        }
        if !ended.is_empty() {
            self.state()
                .calls
                .retain(|call| !ended.iter().any(|done| Arc::ptr_eq(call, done)));
            self.changed.notify_all();
        }
        progress
    }

    fn ask_communicators(&self) {
        if self.failed.load(Ordering::Acquire) {
            return;
        }
        let all: Vec<Arc<Communicator>> = self
            .state()
            .communicators
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        if let Some(error) = all.iter().find_map(|c| c.trouble()) {
            self.trouble(error.into());
        }
    }
}
