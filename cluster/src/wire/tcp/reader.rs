//! What comes from one peer: read by whoever waits for it, or, where it was posted, by a thread.

use super::{super::Receive, Broken, HEADER, Line, broken};
use crate::{
    frame::{Patience, read_all},
    wire::{Flying, Wait},
};
use anymesh_core::transport::Incoming;
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long a waiting loop sleeps before it looks whether it still makes sense.
const TURN: Duration = Duration::from_millis(20);

/// Messages from one peer, in their order.
#[derive(Debug, Default)]
pub(super) struct Reader {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The thread reads one.
    busy: bool,
    /// Whether there is a thread; the first that is posted makes it.
    thread: bool,
    /// How many messages were read.
    received: u64,
    /// Why nothing more can be read.
    fault: Option<Fault>,
}

/// Why a message was not read.
#[derive(Clone, Debug)]
enum Fault {
    Differs,
    Gone(String),
}

impl Fault {
    fn broken(&self, from: usize) -> Broken {
        match self {
            Self::Differs => Broken::Differs(from),
            Self::Gone(detail) => Broken::Gone(from, detail.clone()),
        }
    }
}

/// A message that was posted.
#[derive(Debug)]
struct Job {
    memory: Incoming,
    digest: u64,
    flight: Arc<Flight>,
    at: usize,
}

impl Reader {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread up, to see that the peer is dropped.
    pub(super) fn close(&self) {
        let _queue = self.queue();
        self.changed.notify_all();
    }

    /// Reads a message, after all that were posted before it.
    pub(super) fn read(
        &self,
        line: &Line,
        from: usize,
        digest: u64,
        bytes: &mut [u8],
        patience: &Patience<'_>,
    ) -> Result<(), Broken> {
        let mut queue = self.queue();
        while queue.busy || !queue.jobs.is_empty() {
            if let Some(fault) = &queue.fault {
                return Err(fault.broken(from));
            }
            let turn = patience.turn().map_err(|e| broken(from, &e))?;
            let waited = self.changed.wait_timeout(queue, turn);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(fault) = &queue.fault {
            return Err(fault.broken(from));
        }
        drop(queue);
        self.message(line, from, digest, bytes, patience).map(drop)
    }

    /// One message from the connection; how long its bytes were on their way.
    fn message(
        &self,
        line: &Line,
        from: usize,
        digest: u64,
        bytes: &mut [u8],
        patience: &Patience<'_>,
    ) -> Result<Duration, Broken> {
        let failed = |e: std::io::Error| broken(from, &e);
        let mut header = [0; HEADER];
        read_all(&line.stream, &mut header, patience).map_err(failed)?;
        let since = Instant::now();
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let mut queue = self.queue();
        if (word(0), word(8), word(16)) != (digest, bytes.len() as u64, queue.received) {
            return Err(Broken::Differs(from));
        }
        queue.received += 1;
        drop(queue);
        read_all(&line.stream, bytes, patience).map_err(failed)?;
        Ok(since.elapsed())
    }

    /// Queues a message of a flight.
    fn post(self: &Arc<Self>, line: &Arc<Line>, from: usize, job: Job) -> Result<(), Broken> {
        let mut queue = self.queue();
        if let Some(fault) = &queue.fault {
            return Err(fault.broken(from));
        }
        queue.jobs.push_back(job);
        if !queue.thread {
            let (reader, line) = (self.clone(), line.clone());
            let thread = thread::Builder::new().name("anymesh reader".into());
            let spawned = thread
                .stack_size(256 << 10)
                .spawn(move || reader.run(&line, from));
            if let Err(e) = spawned {
                return Err(Broken::Gone(
                    from,
                    format!("no thread can read from it: {e}"),
                ));
            }
            queue.thread = true;
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Reads what is posted until the peer is dropped.
    fn run(&self, line: &Line, from: usize) {
        // Whoever waits has the deadline; here somebody may be early by any time.
        let closed = || line.closed.load(Ordering::Relaxed);
        let patience = Patience {
            until: None,
            stopped: &closed,
        };
        let mut queue = self.queue();
        loop {
            let Some(mut job) = queue.jobs.pop_front() else {
                if closed() {
                    return;
                }
                let waited = self.changed.wait(queue);
                queue = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            let bytes = job.memory.bytes();
            let read = self.message(line, from, job.digest, bytes, &patience);
            queue = self.queue();
            queue.busy = false;
            match read {
                Ok(took) => job.flight.landed(job.at, job.memory, took),
                Err(why) => {
                    let fault = match why {
                        Broken::Differs(_) => Fault::Differs,
                        Broken::Gone(_, detail) => Fault::Gone(detail),
                        Broken::Late(_) | Broken::Stopped => Fault::Gone("it was left".into()),
                    };
                    job.flight.failed(fault.broken(from));
                    for job in queue.jobs.drain(..) {
                        job.flight.failed(fault.broken(from));
                    }
                    queue.fault = Some(fault);
                    self.changed.notify_all();
                    return;
                }
            }
            self.changed.notify_all();
        }
    }
}

/// Messages that were posted together.
#[derive(Debug)]
pub(super) struct Flight {
    state: Mutex<State>,
    changed: Condvar,
    /// Whom each comes from.
    from: Vec<usize>,
}

#[derive(Debug)]
struct State {
    memories: Vec<Option<Incoming>>,
    took: Duration,
    broken: Option<Broken>,
}

impl Flight {
    /// Posts receives, each with a memory of its own, to the readers of their peers.
    pub(super) fn post<'a>(
        memories: Vec<Incoming>,
        receives: &[Receive],
        reader: impl Fn(usize) -> Result<(&'a Arc<Reader>, &'a Arc<Line>), Broken>,
    ) -> Result<Arc<Self>, Broken> {
        let flight = Arc::new(Self {
            state: Mutex::new(State {
                memories: memories.iter().map(|_| None).collect(),
                took: Duration::ZERO,
                broken: None,
            }),
            changed: Condvar::new(),
            from: receives.iter().map(|r| r.from).collect(),
        });
        for (at, (memory, receive)) in memories.into_iter().zip(receives).enumerate() {
            let (reader, line) = reader(receive.from)?;
            let job = Job {
                memory,
                digest: receive.digest,
                flight: flight.clone(),
                at,
            };
            reader.post(line, receive.from, job)?;
        }
        Ok(flight)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn landed(&self, at: usize, memory: Incoming, took: Duration) {
        let mut state = self.state();
        state.memories[at] = Some(memory);
        state.took += took;
        self.changed.notify_all();
    }

    fn failed(&self, broken: Broken) {
        self.state().broken.get_or_insert(broken);
        self.changed.notify_all();
    }
}

impl Flying for Arc<Flight> {
    fn is_done(&self) -> bool {
        let state = self.state();
        state.broken.is_some() || state.memories.iter().all(Option::is_some)
    }

    fn land(self: Box<Self>, wait: &dyn Wait) -> Result<(Vec<Incoming>, Duration), Broken> {
        let mut state = self.state();
        loop {
            if let Some(broken) = state.broken.take() {
                return Err(broken);
            }
            if state.memories.iter().all(Option::is_some) {
                let memories = std::mem::take(&mut state.memories);
                return Ok((memories.into_iter().flatten().collect(), state.took));
            }
            // A process that has left closes its connections, which the reader sees.
            if wait.failed() {
                return Err(Broken::Stopped);
            }
            let left = wait.until().saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = state.memories.iter().zip(&self.from);
                let missing = missing.filter(|(memory, _)| memory.is_none());
                let mut late: Vec<usize> = missing.map(|(_, from)| *from).collect();
                late.sort_unstable();
                late.dedup();
                return Err(Broken::Late(late));
            }
            let waited = self.changed.wait_timeout(state, left.min(TURN));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
