//! A call on its way through the devices.

use super::{
    Error,
    lane::{Event, Lane},
};
use std::{
    any::Any,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A call that is queued.
pub struct Call {
    pub(super) what: &'static str,
    pub(super) ticket: u64,
    pub(super) deadline: Duration,
    /// The serial number of the first buffer it fills.
    pub(super) first: u64,
    added: Instant,
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
            added: Instant::now(),
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

    /// Since when it should be getting on: it is being queued, or the device has come to it.
    pub(super) fn running_since(&self) -> Option<Instant> {
        let progress = self.progress();
        match (progress.done, &progress.spans) {
            (true, _) => None,
            (false, None) => Some(self.added),
            (false, Some(_)) => progress.started,
        }
    }

    /// Whether the device is done with it.
    pub(super) fn is_done(&self) -> bool {
        self.progress().done
    }

    /// Memory that nobody will ever know to be free again is kept for ever.
    pub(super) fn forget(&self) {
        let mut progress = self.progress();
        std::mem::forget(std::mem::take(&mut progress.pins));
        progress.done = true;
    }

    /// Asks the device; whether it just started, and whether it is done. The driver is asked without
    /// a lock: it may take its time, and the clock must not wait for it.
    pub(super) fn look(&self) -> Result<(bool, bool), Error> {
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
