//! Any transport, with calls that go on beside the program.

use super::{Arrived, Call, Message, Part, Pending, Transport, check::fail};
use crate::{
    DType, Error, Mesh, Reduction, Result, Shape, Tensor,
    ledger::{Clock, Ledgers},
};
use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A transport around another whose [started](Transport::start) calls are made by a thread, one
/// after the other.
///
/// Every call has its turn in the order in which calls were posted, so processes stay in step: one
/// that is not started waits for those before it, and runs on the thread of the program.
///
/// A started call that fails ends all later ones with the same error, started or not: what the other
/// processes got of it is not known, so nothing that follows would fit together. To go on, make a new
/// one. Other calls fail as they do without it, and can be repeated.
///
/// An exchange that the inner transport [posts](Transport::posts) has its turn only to begin: it goes
/// on by itself, and calls after it do not wait for it.
///
/// Where there are no threads, as in a browser, a call is made when it is started.
///
/// ```
/// # use anymesh_core::{Mesh, Reduction, Tensor, transport::{Background, Call, InProcess, Part, Transport}};
/// # use std::sync::Arc;
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("x=2", &device)?.with_transport(Background::new(Arc::new(InProcess)));
/// let part = |rank| Ok(Part::new(rank, &Tensor::from_slice(&[rank as i32, 10], [2], &device)?));
/// let parts = (0..2).map(part).collect::<Result<Vec<_>, anymesh_core::Error>>()?;
/// let transport = mesh.transport().expect("ours");
/// let call = Call::AllReduce { parts, reduction: Reduction::Sum };
/// let pending = transport.start(&mesh, call)?;
/// // The program does something else, and then:
/// let sums = pending.wait()?.answer;
/// assert_eq!(sums[1].as_ref().map(|t| t.to_vec::<i32>()), Some(Ok(vec![1, 20])));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Background {
    inner: Arc<dyn Transport>,
    name: String,
    line: Arc<Line>,
}

/// Where calls wait for their turn.
#[derive(Debug, Default)]
struct Line {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How many calls were posted, and how many had their turn.
    posted: u64,
    served: u64,
    /// Those that the thread is to make.
    jobs: VecDeque<Job>,
    /// The thread, if it is there.
    #[cfg(not(target_family = "wasm"))]
    thread: Option<std::thread::JoinHandle<()>>,
    /// Whether there will be no more calls.
    closed: bool,
    /// Why there is no going on.
    failed: Option<Error>,
}

/// A call that was started.
struct Job {
    number: u64,
    mesh: Mesh,
    call: Call,
    /// On whose behalf.
    of: Ledgers,
    answer: Arc<Answer>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "call {}: {}", self.number, self.call.name())
    }
}

/// Where the thread puts the result of a call.
#[derive(Debug, Default)]
struct Answer {
    result: Mutex<Option<Result<Outcome>>>,
    there: Condvar,
}

/// What came of a call that was started.
#[derive(Debug)]
enum Outcome {
    Made(Arrived),
    /// It goes on by itself.
    Posted(Box<dyn Pending>),
}

/// What was poisoned is still whole: nothing is written half under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Line {
    /// A place in the line; an error where there is no going on.
    fn post(&self) -> Result<u64> {
        let mut state = lock(&self.state);
        match &state.failed {
            Some(error) => Err(error.clone()),
            None => {
                state.posted += 1;
                Ok(state.posted - 1)
            }
        }
    }

    /// Waits for the turn of a call, which ends when what this returns is dropped.
    fn turn(&self, number: u64) -> Result<Turn<'_>> {
        let mut state = lock(&self.state);
        while state.served != number {
            state = (self.moved.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
        let failed = state.failed.clone();
        drop(state);
        let turn = Turn(self);
        match failed {
            Some(error) => Err(error),
            None => Ok(turn),
        }
    }

    fn fail(&self, error: &Error) {
        lock(&self.state)
            .failed
            .get_or_insert_with(|| error.clone());
    }

    /// A call on the thread of the program.
    fn call<R>(&self, run: impl FnOnce() -> Result<R>) -> Result<R> {
        let turn = self.turn(self.post()?)?;
        let result = catch_unwind(AssertUnwindSafe(run));
        if let Err(panic) = &result {
            self.fail(&panicked("call", &**panic));
        }
        drop(turn);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Makes a started call when its turn comes.
    fn serve(&self, transport: &dyn Transport, job: Job) {
        let Job {
            number,
            mesh,
            call,
            of,
            answer,
        } = job;
        let name = call.name();
        let result = self.turn(number).and_then(|_turn| {
            let _scope = of.enter();
            let run = || match is_posted(transport, &call) {
                true => transport.start(&mesh, call).map(Outcome::Posted),
                false => {
                    let start = Clock::start();
                    let answer = call.run(transport, &mesh)?;
                    let ran = start.elapsed();
                    Ok(Outcome::Made(Arrived { answer, ran }))
                }
            };
            let result = catch_unwind(AssertUnwindSafe(run))
                .unwrap_or_else(|panic| Err(panicked(name, &*panic)));
            // Before the turn ends, so that nobody comes in between.
            result.inspect_err(|error| self.fail(error))
        });
        *lock(&answer.result) = Some(result);
        answer.there.notify_all();
    }

    /// What the thread does until it is told that there will be no more.
    #[cfg_attr(target_family = "wasm", allow(dead_code))]
    fn work(&self, transport: &dyn Transport) {
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                self.serve(transport, job);
                state = lock(&self.state);
            } else if state.closed {
                return;
            } else {
                state = (self.moved.wait(state)).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// The turn of a call.
struct Turn<'a>(&'a Line);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).served += 1;
        self.0.moved.notify_all();
    }
}

/// Whether a call has its turn only to begin.
fn is_posted(transport: &dyn Transport, call: &Call) -> bool {
    matches!(call, Call::Exchange { .. }) && transport.posts()
}

fn panicked(op: &'static str, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    fail(op, &[], format!("it panicked: {}", text.unwrap_or("?")))
}

/// A started call.
#[derive(Debug)]
struct Started {
    answer: Arc<Answer>,
    line: Arc<Line>,
}

impl Pending for Started {
    fn is_done(&self) -> bool {
        match &*lock(&self.answer.result) {
            None => false,
            Some(Ok(Outcome::Posted(pending))) => pending.is_done(),
            Some(_) => true,
        }
    }

    fn wait(self: Box<Self>) -> Result<Arrived> {
        let mut result = lock(&self.answer.result);
        let outcome = loop {
            match result.take() {
                Some(outcome) => break outcome?,
                None => {
                    let waited = self.answer.there.wait(result);
                    result = waited.unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(result);
        match outcome {
            Outcome::Made(arrived) => Ok(arrived),
            Outcome::Posted(pending) => pending.wait().inspect_err(|error| self.line.fail(error)),
        }
    }
}

impl Background {
    /// Calls of this transport, beside the program.
    pub fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        Arc::new(Self {
            name: inner.name().to_owned(),
            inner,
            line: Arc::default(),
        })
    }

    /// Returns when every call that was posted is made: before a program ends, because its end would
    /// end calls that others wait for. An error where a started one failed.
    pub fn settle(&self) -> Result<()> {
        self.line.call(|| Ok(()))
    }

    /// Whether there is a thread; the first call that is started makes it.
    #[cfg(not(target_family = "wasm"))]
    fn works(&self, state: &mut State) -> bool {
        if state.thread.is_none() {
            let (line, inner) = (self.line.clone(), self.inner.clone());
            let thread = std::thread::Builder::new().name("communication".into());
            state.thread = thread.spawn(move || line.work(&*inner)).ok();
        }
        state.thread.is_some()
    }

    #[cfg(target_family = "wasm")]
    fn works(&self, _: &mut State) -> bool {
        false
    }
}

impl Drop for Background {
    /// Calls that are posted know their mesh and so this transport: nothing is left to do. The thread
    /// ends here, so that the inner transport, which may have a goodbye to say, is not left to it.
    fn drop(&mut self) {
        let mut state = lock(&self.line.state);
        state.closed = true;
        #[cfg(not(target_family = "wasm"))]
        let thread = state.thread.take();
        drop(state);
        self.line.moved.notify_all();
        #[cfg(not(target_family = "wasm"))]
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Transport for Background {
    fn name(&self) -> &str {
        &self.name
    }

    fn overlaps(&self) -> bool {
        cfg!(not(target_family = "wasm"))
    }

    fn posts(&self) -> bool {
        self.inner.posts()
    }

    fn start(&self, mesh: &Mesh, call: Call) -> Result<Box<dyn Pending>> {
        call.check(mesh)?;
        let answer = Arc::new(Answer::default());
        let mut job = Job {
            number: 0,
            mesh: mesh.clone(),
            call,
            of: Ledgers::none(),
            answer: answer.clone(),
        };
        let started = Box::new(Started {
            answer,
            line: self.line.clone(),
        });
        let mut state = lock(&self.line.state);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        job.number = state.posted;
        state.posted += 1;
        // One that only begins, and that nobody is before, needs no other thread.
        let at_once = job.number == state.served && is_posted(&*self.inner, &job.call);
        if !at_once && self.works(&mut state) {
            state.jobs.push_back(job);
            drop(state);
            self.line.moved.notify_all();
        } else {
            drop(state);
            self.line.serve(&*self.inner, job);
        }
        Ok(started)
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner.deadline()
    }

    fn report(&self, rank: usize, error: &Error) {
        self.inner.report(rank, error);
    }

    fn hands_over(&self) -> bool {
        self.inner.hands_over()
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.line.call(|| self.inner.exchange(mesh, messages))
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.line.call(|| self.inner.barrier(mesh, group))
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        self.line
            .call(|| self.inner.all_reduce(mesh, parts, reduction))
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        self.line.call(|| self.inner.all_gather(mesh, parts, dim))
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        self.line
            .call(|| self.inner.reduce_scatter(mesh, parts, reduction, dim))
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Result<Vec<Option<Tensor>>> {
        self.line.call(|| self.inner.broadcast(mesh, root, group))
    }

    fn all_to_all(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        cut: usize,
        join: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        self.line
            .call(|| self.inner.all_to_all(mesh, parts, cut, join))
    }

    fn send(&self, mesh: &Mesh, part: Part, to: usize) -> Result<Option<Tensor>> {
        self.line.call(|| self.inner.send(mesh, part, to))
    }

    fn recv(
        &self,
        mesh: &Mesh,
        from: usize,
        dtype: DType,
        shape: Shape,
        to: usize,
    ) -> Result<Tensor> {
        self.line
            .call(|| self.inner.recv(mesh, from, dtype, shape, to))
    }
}
