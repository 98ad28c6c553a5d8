//! Reading ahead.

use super::{Loader, Rows, Step};
use crate::{Error, Result};
use std::{
    sync::mpsc::{Receiver, sync_channel},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Global batches in order, read ahead by a thread, which ends when this is dropped. An error comes
/// in the place of its batch, and is the last.
#[derive(Debug)]
pub struct Steps {
    loader: Loader,
    consumed: u64,
    waited: Duration,
    done: bool,
    /// Gone where nothing is read ahead.
    ahead: Option<Ahead>,
}

#[derive(Debug)]
struct Ahead {
    /// Gone when it is time to end.
    rows: Option<Receiver<Result<Option<Rows>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Steps {
    pub(super) fn new(loader: Loader, consumed: u64) -> Self {
        let depth = loader.options().ahead;
        let ahead = (depth > 0).then(|| Ahead::new(loader.clone(), consumed, depth));
        Self {
            loader,
            consumed,
            waited: Duration::ZERO,
            done: false,
            ahead: ahead.flatten(),
        }
    }

    /// How many samples were consumed: what a checkpoint keeps.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// How long the program waited for batches to be read, altogether.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    fn rows(&mut self) -> Result<Option<Rows>> {
        let rows = self.ahead.as_ref().map(|ahead| &ahead.rows);
        let Some(Some(rows)) = rows else {
            return self.loader.read(self.consumed);
        };
        rows.recv().unwrap_or_else(|_| {
            let detail = "the thread that reads ahead panicked: its message tells why";
            Err(Error::config("data", detail))
        })
    }

    fn step(&mut self) -> Result<Option<Step>> {
        let began = Instant::now();
        let rows = self.rows();
        let waited = began.elapsed();
        self.waited += waited;
        let Some(rows) = rows? else {
            return Ok(None);
        };
        let step = self.loader.place(&rows, waited)?;
        self.consumed = step.positions.end;
        Ok(Some(step))
    }
}

impl Iterator for Steps {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Result<Step>> {
        if self.done {
            return None;
        }
        let step = self.step().transpose();
        self.done = !matches!(step, Some(Ok(_)));
        step
    }
}

impl Ahead {
    /// None where the system gives no thread: then batches are read when they are asked for.
    fn new(loader: Loader, mut consumed: u64, depth: usize) -> Option<Self> {
        let (send, rows) = sync_channel(depth);
        let read = move || {
            loop {
                let rows = loader.read(consumed);
                let more = match &rows {
                    Ok(Some(rows)) => Some(rows.positions.end),
                    Ok(None) | Err(_) => None,
                };
                // Nobody waits for it any more, or there is no more.
                match (send.send(rows), more) {
                    (Ok(()), Some(next)) => consumed = next,
                    _ => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name("anymesh-data".into());
        let thread = thread.spawn(read).ok()?;
        Some(Self {
            rows: Some(rows),
            thread: Some(thread),
        })
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        // Its next send fails, and it ends.
        self.rows = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
