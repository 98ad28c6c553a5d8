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
    /// Whether everybody has all connections.
    go: bool,
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

    /// Everybody is ready.
    pub(crate) fn go(&self) {
        self.heard().go = true;
        self.changed.notify_all();
    }

    /// Waits until everybody is ready. What fails after that is for the calls to come: whoever was
    /// told to go has a cluster, and all were told.
    pub(crate) fn wait_for_go(&self, for_: Duration) -> Result<(), Option<Verdict>> {
        let waited = self
            .changed
            .wait_timeout_while(self.heard(), for_, |heard| {
                !heard.go && heard.verdict.is_none()
            });
        let (heard, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match heard.go {
            true => Ok(()),
            false => Err(heard.verdict.clone()),
        }
    }

    pub(crate) fn tell(&self, key: String, value: Vec<u8>) {
        self.heard().values.insert(key, value);
        self.changed.notify_all();
    }

    /// A value that the hub was asked for; a verdict or nothing where it does not come.
    #[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, atomic::AtomicUsize};

    fn died(process: usize) -> Verdict {
        Verdict::Died {
            process,
            detail: String::new(),
        }
    }

    #[test]
    fn the_first_verdict_counts_and_listeners_hear_it_once() {
        let (alarm, heard) = (Alarm::default(), Arc::new(AtomicUsize::new(0)));
        let listen = || {
            let heard = heard.clone();
            alarm.on_ring(move |verdict| {
                assert_eq!(*verdict, died(1));
                heard.fetch_add(1, Ordering::Relaxed);
            });
        };
        listen();
        assert!(!alarm.has_rung() && alarm.verdict().is_none());
        assert_eq!(alarm.ring(died(1)), died(1));
        assert_eq!(alarm.ring(died(2)), died(1));
        assert_eq!(heard.load(Ordering::Relaxed), 1);
        // Who comes later hears it at once.
        listen();
        assert_eq!(heard.load(Ordering::Relaxed), 2);
        assert!(alarm.has_rung());
        assert_eq!(alarm.wait(Duration::from_secs(600)), Some(died(1)));
    }

    #[test]
    fn waits_end_with_the_alarm_and_with_their_time() {
        let alarm = Arc::new(Alarm::default());
        assert_eq!(alarm.wait(Duration::from_millis(1)), None);
        let soon = Instant::now() + Duration::from_millis(1);
        assert_eq!(alarm.value("key", soon), Err(None));
        let ringing = alarm.clone();
        let thread = std::thread::spawn(move || ringing.ring(died(3)));
        let far = Instant::now() + Duration::from_secs(600);
        assert_eq!(alarm.value("key", far), Err(Some(died(3))));
        assert_eq!(thread.join().ok(), Some(died(3)));
        alarm.wait_until_left(&[1], Duration::from_secs(600));
        alarm.tell("key".into(), vec![7]);
        assert_eq!(alarm.value("key", far), Ok(vec![7]));
    }

    #[test]
    fn all_have_left_when_the_last_one_has() {
        let alarm = Arc::new(Alarm::default());
        assert!(alarm.left_since(1).is_none());
        alarm.left(1);
        assert!(alarm.left_since(1).is_some() && alarm.left_since(2).is_none());
        let leaving = alarm.clone();
        let thread = std::thread::spawn(move || leaving.left(2));
        alarm.wait_until_left(&[1, 2], Duration::from_secs(600));
        assert!(alarm.left_since(2).is_some() && thread.join().is_ok());
    }
}
