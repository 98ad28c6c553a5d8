//! Writing launches down, and the moments at which they run.

use crate::{
    Options,
    graph::{Need, Node},
    run::Runner,
    value::{self, State},
};
use anymesh_kernel::{
    Backend, Buffer, Capabilities, Device, Dry, Error, Kernel, Result,
    backend::{BoxFuture, Buffers, Form, HostMemory, Launch, Views},
};
use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Launches to begin with after a read, where [`Options::ramp`] says so.
const FIRST: usize = 32;

/// The backend of a deferred device.
pub(crate) struct Deferred {
    inner: Device,
    options: Options,
    number: u64,
    waiting: Mutex<Waiting>,
    /// Who flushes. Taken before `waiting`, so that lists run in the order they were written in,
    /// and kept while one runs; others write on meanwhile.
    running: Mutex<Runner>,
}

/// What was written down.
struct Waiting {
    nodes: Vec<Option<Node>>,
    /// What they are: put together when each is at hand, which is faster than later.
    form: Form,
    bytes: u64,
    /// Launches after which it runs.
    limit: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deferred {
    pub(crate) fn new(inner: &Device, options: Options) -> Self {
        let number = value::next_queue();
        let mut deferred = Self {
            inner: inner.clone(),
            number,
            running: Mutex::new(Runner::new(inner, number, &options)),
            waiting: Mutex::new(Waiting {
                nodes: vec![],
                form: Form::like(None),
                bytes: 0,
                limit: 0,
            }),
            options,
        };
        let first = deferred.first();
        if let Ok(waiting) = deferred.waiting.get_mut() {
            waiting.limit = first;
        }
        deferred
    }

    /// Launches that wait at most after a read.
    fn first(&self) -> usize {
        let most = self.options.launches.max(1);
        if self.options.ramp {
            FIRST.min(most)
        } else {
            most
        }
    }

    /// Runs everything that waits, and returns whoever runs it. Of values that no launch reads those are
    /// there then that are needed.
    fn flush(&self, read: bool, need: Need<'_>) -> MutexGuard<'_, Runner> {
        let mut runner = lock(&self.running);
        let (mut nodes, form) = {
            let mut waiting = lock(&self.waiting);
            waiting.bytes = 0;
            waiting.limit = if read {
                self.first()
            } else {
                (waiting.limit * 2).min(self.options.launches.max(1))
            };
            // Into the memory of the list before it.
            let empty = std::mem::take(&mut runner.spare);
            let next = Form::like(Some(&waiting.form));
            let form = std::mem::replace(&mut waiting.form, next);
            (std::mem::replace(&mut waiting.nodes, empty), form)
        };
        let waits =
            |buffer: &&Buffer| matches!(value::state(self.number, buffer), Ok(State::Pending));
        let waited_for = match need {
            Need::None => false,
            Need::All => runner.has_stayed(),
            Need::Of(buffers) => buffers.iter().any(waits),
        };
        if !nodes.is_empty() || waited_for {
            // A scope of whoever flushes is not one of those who launched.
            Dry::enter(None, || runner.run(&mut nodes, form.done(), need));
        }
        nodes.clear();
        runner.spare = nodes;
        runner
    }

    fn check(&self, buffer: &Buffer) -> Result<()> {
        match value::state(self.number, buffer)? {
            State::Failed(error) => Err(error.clone()),
            State::Ready(_) | State::Pending => Ok(()),
        }
    }

    /// The inner buffer of one that does not wait any more.
    fn ready(&self, buffer: &Buffer) -> Result<Buffer> {
        match value::state(self.number, buffer)? {
            State::Ready(inner) => Ok(inner.clone()),
            State::Failed(error) => Err(error.clone()),
            State::Pending => Err(Error::DeviceFailed {
                device: self.inner.name().into(),
                detail: "a deferred value was never computed: this is a mistake of the engine; set ANYMESH_EAGER=1 to run without it".into(),
            }),
        }
    }
}

impl std::fmt::Debug for Deferred {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Deferred({:?})", self.inner.backend())
    }
}

impl Backend for Deferred {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.backend().capabilities()
    }

    fn upload(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.inner.backend().upload(bytes)?;
        lock(&self.waiting).bytes += bytes.len() as u64;
        Ok(buffer)
    }

    fn placeholder(&self, bytes: usize) -> Option<Buffer> {
        self.inner.backend().placeholder(bytes)
    }

    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            if let Some(fault) = self.flush(true, Need::Of(&[buffer])).take_fault() {
                return Err(fault);
            }
            let inner = self.ready(buffer)?;
            self.inner.backend().download(&inner, bytes).await
        })
    }

    fn in_place<'b>(&self, buffer: &'b Buffer) -> Option<&'b [u8]> {
        if let Ok(State::Pending) = value::state(self.number, buffer) {
            // The fault is told by the download that follows where nothing is in place.
            if self.flush(true, Need::Of(&[buffer])).has_fault() {
                return None;
            }
        }
        match value::state(self.number, buffer) {
            Ok(State::Ready(inner)) => self.inner.backend().in_place(inner),
            _ => None,
        }
    }

    fn host_memory(&self, bytes: usize) -> Result<Option<Box<dyn HostMemory>>> {
        self.inner.backend().host_memory(bytes)
    }

    fn inner(&self) -> Option<&Device> {
        Some(&self.inner)
    }

    fn resolve(&self, buffer: &Buffer) -> Result<Buffer> {
        if let State::Pending = value::state(self.number, buffer)? {
            drop(self.flush(false, Need::Of(&[buffer])));
        }
        self.inner.backend().resolve(&self.ready(buffer)?)
    }

    /// That is seen when it runs.
    fn is_sole(&self, _: &Buffer) -> bool {
        true
    }

    fn sync(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let fault = self.flush(true, Need::All).take_fault();
            let done = self.inner.backend().sync().await;
            fault.map_or(done, Err)
        })
    }

    fn supports(&self, kernel: &Kernel) -> bool {
        self.inner.backend().supports(kernel)
    }

    fn launch(&self, kernel: Kernel) -> Result<Buffers> {
        for view in kernel.operands() {
            self.check(&view.buffer)?;
        }
        if kernel.is_fused() && !self.inner.backend().supports(&kernel) {
            return Err(Error::Unsupported {
                device: self.inner.name().into(),
                what: format!("this {} by one kernel", kernel.op()),
                hint: "compose it of other ops".into(),
            });
        }
        // Not when the last launch was written down: whoever made it had not let go yet of what it read.
        let full = {
            let waiting = lock(&self.waiting);
            waiting.nodes.len() >= waiting.limit || waiting.bytes > self.options.bytes
        };
        if full {
            drop(self.flush(false, Need::None));
        }
        let mut bytes = 0;
        let outputs: Buffers = kernel
            .outputs()
            .iter()
            .map(|(dtype, shape)| {
                let size = shape.numel() * dtype.size();
                bytes += size as u64;
                value::pending(self.number, size)
            })
            .collect();
        let mut waiting = lock(&self.waiting);
        waiting.form.add(&kernel);
        waiting.nodes.push(Some(Node {
            kernel,
            outputs: outputs.clone(),
        }));
        waiting.bytes += bytes;
        drop(waiting);
        Ok(outputs)
    }

    /// Kernels that the device below may make one of are given to it as they are, after everything
    /// that waits.
    fn launch_all(&self, mut launches: Vec<Launch>) -> Result<Vec<Buffers>> {
        let one = launches.len() < 2 && launches.iter().all(|launch| launch.over.is_empty());
        if one || Dry::current().is_some() {
            let one = |launch: Launch| self.launch(launch.kernel);
            return launches.into_iter().map(one).collect();
        }
        let mut needed: Vec<&Buffer> = vec![];
        for launch in &launches {
            needed.extend(launch.kernel.operands().map(|view| &view.buffer));
            needed.extend(launch.over.iter().map(|(_, memory)| memory));
        }
        let runner = self.flush(false, Need::Of(&needed));
        // Nothing waits any more, so whoever still holds memory may read it.
        launches.iter_mut().for_each(Launch::keep_sole);
        for launch in &mut launches {
            for view in launch.kernel.operands_mut() {
                view.buffer = self.ready(&view.buffer)?;
            }
            for (_, memory) in &mut launch.over {
                *memory = self.ready(memory)?;
            }
        }
        let launched = self.inner.launch_all(launches)?;
        drop(runner);
        let buffers = |views: Views| views.into_iter().map(|view| view.buffer).collect();
        Ok(launched.into_iter().map(buffers).collect())
    }
}
