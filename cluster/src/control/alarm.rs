//! The alarm: whether the cluster has failed, which every waiting loop looks at.

use super::message::Verdict;
use std::{
    collections::HashMap,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Shared by everything that waits in a process.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    rung: AtomicBool,
    /// Whether anybody has left.
    any_left: AtomicBool,
    state: Mutex<Heard>,
    changed: Condvar,
}

/// What was heard from the hub.
#[derive(Debug, Default)]
struct Heard {
    /// The first verdict: later ones are consequences.
    verdict: Option<Verdict>,
    /// Who ended as it should, and when.
    left: HashMap<usize, Instant>,
    values: HashMap<String, Vec<u8>>,
    /// Called once when the alarm rings, for engines that must be told.
    listeners: Vec<Listener>,
}

struct Listener(Box<dyn FnOnce(&Verdict) + Send>);

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

impl Alarm {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has rung. Costs one load.
    pub(crate) fn has_rung(&self) -> bool {
        self.rung.load(Ordering::Relaxed)
    }

    /// Why it has rung.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.heard().verdict.clone()
    }

    /// Rings, unless it has already; the verdict that counts.
    pub(crate) fn ring(&self, verdict: Verdict) -> Verdict {
        let mut heard = self.heard();
        let verdict = heard.verdict.get_or_insert(verdict).clone();
        self.rung.store(true, Ordering::Relaxed);
        let listeners = std::mem::take(&mut heard.listeners);
        drop(heard);
        self.changed.notify_all();
        for Listener(listener) in listeners {
            listener(&verdict);
        }
        verdict
    }

    /// Calls `listener` when it rings, or now if it has.
    pub(crate) fn on_ring(&self, listener: impl FnOnce(&Verdict) + Send + 'static) {
        let mut heard = self.heard();
        match heard.verdict.clone() {
            Some(verdict) => {
                drop(heard);
                listener(&verdict);
            }
            None => heard.listeners.push(Listener(Box::new(listener))),
        }
    }

    /// Waits for a verdict.
    pub(crate) fn wait(&self, for_: Duration) -> Option<Verdict> {
        let heard = self.heard();
        let waited = self
            .changed
            .wait_timeout_while(heard, for_, |heard| heard.verdict.is_none());
        let (heard, _) = waited.unwrap_or_else(PoisonError::into_inner);
        heard.verdict.clone()
    }

    pub(crate) fn left(&self, process: usize) {
        self.heard()
            .left
            .entry(process)
            .or_insert_with(Instant::now);
        self.any_left.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// How long ago a process ended as it should. Costs one load where none has.
    pub(crate) fn left_since(&self, process: usize) -> Option<Duration> {
        if !self.any_left.load(Ordering::Relaxed) {
            return None;
        }
        self.heard().left.get(&process).map(Instant::elapsed)
    }

    pub(crate) fn tell(&self, key: String, value: Vec<u8>) {
        self.heard().values.insert(key, value);
        self.changed.notify_all();
    }

    /// A value that the hub was asked for; a verdict or nothing where it does not come.
    pub(crate) fn value(&self, key: &str, until: Instant) -> Result<Vec<u8>, Option<Verdict>> {
        let left = until.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(self.heard(), left, |heard| {
                heard.verdict.is_none() && !heard.values.contains_key(key)
            });
        let (heard, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match heard.values.get(key) {
            Some(value) => Ok(value.clone()),
            None => Err(heard.verdict.clone()),
        }
    }

    /// Waits until all of these have left or the alarm rings.
    pub(crate) fn wait_until_left(&self, processes: &[usize], for_: Duration) {
        let waited = self
            .changed
            .wait_timeout_while(self.heard(), for_, |heard| {
                heard.verdict.is_none() && !processes.iter().all(|p| heard.left.contains_key(p))
            });
        drop(waited);
    }
}
