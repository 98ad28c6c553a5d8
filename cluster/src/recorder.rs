//! The flight recorder: the last calls of a process, for the day on which one does not return.

use anymesh_core::spmd::{Decided as Decision, Fingerprint};
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// How many calls are remembered.
const CALLS: usize = 256;
/// How many are told when somebody asks: processes are never apart by many.
pub(crate) const TOLD: usize = 64;

/// What the file says it is.
pub(crate) const FORMAT: &str = "anymesh-flight-1";

/// Where a call stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// Begun, and nobody waits for it yet.
    Queued,
    Waiting,
    Done,
    Failed,
}

/// One call of a transport. The calls of two processes belong together where they have the same
/// group and number in it, or the same pair and number in that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// Its number in this process.
    pub(crate) n: u64,
    /// The processes that take part, as far as this one knows.
    pub(crate) group: Vec<usize>,
    /// Its number among the calls of the group, from 1; 0 where calls are known by their pairs.
    pub(crate) in_group: u64,
    pub(crate) op: String,
    /// What tells it from others of its kind: dtype and sizes.
    pub(crate) detail: String,
    pub(crate) digest: String,
    /// The line of the program.
    pub(crate) caller: String,
    /// The op that needed it.
    pub(crate) on_behalf_of: String,
    pub(crate) state: State,
    /// Processes that something must come from.
    pub(crate) waits_for: Vec<usize>,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) seconds: f64,
}

/// What a call has to do with another process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pair {
    pub(crate) peer: usize,
    /// How many calls there were between the two before.
    pub(crate) n: u64,
    pub(crate) digest: String,
}

/// A decision of the program, in its order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Decided {
    pub(crate) n: u64,
    pub(crate) op: String,
    pub(crate) caller: String,
    pub(crate) hash: String,
}

/// What a process knows of its last calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) format: String,
    pub(crate) process: usize,
    pub(crate) size: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
    pub(crate) error: Option<String>,
    pub(crate) unix_time: f64,
    pub(crate) calls: Vec<Call>,
    pub(crate) decisions: Vec<Decided>,
}

/// A call that begins.
pub(crate) struct Begun {
    pub(crate) op: &'static str,
    pub(crate) group: Arc<[usize]>,
    /// Whether all processes of the group make this call, so that it has a number in it.
    pub(crate) together: bool,
    pub(crate) detail: String,
    pub(crate) digest: u64,
    pub(crate) waits_for: Vec<usize>,
    /// For each peer the digest of what goes between the two.
    pub(crate) pairs: Vec<(usize, u64)>,
}

/// Remembers calls as they begin and end.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// A record without calls.
    own: Record,
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    calls: VecDeque<(Call, Instant)>,
    next: u64,
    in_groups: HashMap<Arc<[usize]>, u64>,
    in_pairs: HashMap<usize, u64>,
    decisions: Vec<Decided>,
    error: Option<String>,
}

impl Recorder {
    pub(crate) fn new(card: &crate::frame::Card) -> Self {
        Self {
            own: Record {
                format: FORMAT.into(),
                process: card.process,
                size: card.size,
                host: card.host.clone(),
                pid: card.pid,
                version: card.version.clone(),
                error: None,
                unix_time: 0.0,
                calls: vec![],
                decisions: vec![],
            },
            ring: Mutex::default(),
        }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call begins; its number, with which it ends.
    pub(crate) fn begin(&self, begun: Begun) -> u64 {
        let (on_behalf_of, caller) = match anymesh_core::transport::on_behalf_of() {
            Some((op, line)) => (op.to_string(), line.to_string()),
            None => Default::default(),
        };
        let decisions = decisions();
        let mut ring = self.ring();
        let n = ring.next;
        ring.next += 1;
        // Calls that go on beside the program are made by a thread that decides nothing.
        if !decisions.is_empty() {
            ring.decisions = decisions;
        }
        let in_group = match begun.together {
            true => count(&mut ring.in_groups, begun.group.clone()) + 1,
            false => 0,
        };
        let pair = |(peer, digest): (usize, u64)| Pair {
            peer,
            n: count(&mut ring.in_pairs, peer),
            digest: hex(digest),
        };
        let pairs = begun.pairs.into_iter().map(pair).collect();
        let call = Call {
            n,
            group: begun.group.to_vec(),
            in_group,
            op: begun.op.into(),
            detail: begun.detail,
            digest: hex(begun.digest),
            caller,
            on_behalf_of,
            state: State::Waiting,
            waits_for: begun.waits_for,
            pairs,
            seconds: 0.0,
        };
        if ring.calls.len() == CALLS {
            ring.calls.pop_front();
        }
        ring.calls.push_back((call, Instant::now()));
        n
    }

    /// The call ended so; `still` are the processes that it went on waiting for.
    pub(crate) fn end(&self, n: u64, state: State, still: Option<&[usize]>) {
        let mut ring = self.ring();
        let Some((call, since)) = ring.calls.iter_mut().rev().find(|(call, _)| call.n == n) else {
            return;
        };
        call.state = state;
        call.seconds = since.elapsed().as_secs_f64();
        if let Some(still) = still {
            call.waits_for = still.to_vec();
        }
    }

    /// The call goes on by itself until somebody waits for it, or somebody does now.
    pub(crate) fn is_now(&self, n: u64, state: State) {
        let mut ring = self.ring();
        if let Some((call, _)) = ring.calls.iter_mut().rev().find(|(call, _)| call.n == n) {
            call.state = state;
        }
    }

    /// Somebody else is waited for now.
    pub(crate) fn waits_for(&self, n: u64, processes: &[usize]) {
        let mut ring = self.ring();
        if let Some((call, _)) = ring.calls.iter_mut().rev().find(|(call, _)| call.n == n) {
            call.waits_for = processes.to_vec();
        }
    }

    /// What is known now of the last `most` calls.
    pub(crate) fn record(&self, most: usize) -> Record {
        let ring = self.ring();
        let skipped = ring.calls.len().saturating_sub(most);
        let call = |(call, since): &(Call, Instant)| Call {
            seconds: match call.state {
                State::Queued | State::Waiting => since.elapsed().as_secs_f64(),
                _ => call.seconds,
            },
            ..call.clone()
        };
        Record {
            calls: ring.calls.iter().skip(skipped).map(call).collect(),
            decisions: ring.decisions.clone(),
            error: ring.error.clone(),
            unix_time: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |t| t.as_secs_f64()),
            ..self.own.clone()
        }
    }

    /// Writes `rank-N.json` into a folder, with the error that ended the run.
    pub(crate) fn dump(&self, folder: &Path, error: &str) -> std::io::Result<PathBuf> {
        self.ring().error.get_or_insert_with(|| error.into());
        std::fs::create_dir_all(folder)?;
        let path = folder.join(format!("rank-{}.json", self.own.process));
        // First beside it: somebody may be reading the folder already.
        let part = folder.join(format!(".rank-{}.part", self.own.process));
        std::fs::write(&part, serde_json::to_vec_pretty(&self.record(CALLS))?)?;
        std::fs::rename(&part, &path)?;
        Ok(path)
    }
}

fn count<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, u64>, key: K) -> u64 {
    let count = counts.entry(key).or_default();
    *count += 1;
    *count - 1
}

pub(crate) fn hex(digest: u64) -> String {
    format!("{digest:016x}")
}

/// The last decisions of this thread.
fn decisions() -> Vec<Decided> {
    let decided = |d: Decision| Decided {
        n: d.number,
        op: d.op.into(),
        caller: d.caller.to_string(),
        hash: hex(d.hash),
    };
    Fingerprint::recent().into_iter().map(decided).collect()
}

/// A hash that is the same on every machine, of what makes a call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    pub(crate) fn word(self, word: u64) -> Self {
        let mixed = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Self(mixed ^ mixed >> 29)
    }

    pub(crate) fn text(self, text: &str) -> Self {
        let start = self.word(text.len() as u64);
        text.bytes().fold(start, |d, byte| d.word(byte.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Card;

    fn recorder() -> Recorder {
        Recorder::new(&Card {
            process: 3,
            size: 4,
            run: String::new(),
            program: String::new(),
            version: "1".into(),
            host: "h".into(),
            pid: 5,
            listens: ([127, 0, 0, 1], 1).into(),
        })
    }

    fn begun(peer: usize, together: bool) -> Begun {
        Begun {
            op: "all_reduce",
            group: [peer, 3].into(),
            together,
            detail: "f32[2]".into(),
            digest: 9,
            waits_for: vec![peer],
            pairs: vec![(peer, 9)],
        }
    }

    #[test]
    fn a_long_run_keeps_its_last_calls_with_their_numbers() {
        let recorder = recorder();
        let calls = CALLS as u64 + 100;
        for n in 0..calls {
            assert_eq!(recorder.begin(begun(1, true)), n);
            recorder.end(n, State::Done, None);
        }
        let record = recorder.record(CALLS);
        assert_eq!(record.calls.len(), CALLS);
        let last = &record.calls[CALLS - 1];
        assert_eq!((last.n, last.in_group), (calls - 1, calls));
        assert_eq!(last.pairs[0].n, calls - 1);
        assert_eq!(record.calls[0].n, 100);
        assert_eq!(recorder.record(2).calls, record.calls[CALLS - 2..]);
        // One that is forgotten may still end.
        recorder.end(0, State::Failed, None);
        recorder.waits_for(0, &[]);
    }

    #[test]
    fn groups_and_pairs_are_counted_apart() {
        let recorder = recorder();
        recorder.begin(begun(1, true));
        recorder.begin(begun(2, true));
        recorder.begin(begun(1, false));
        let numbers = |call: &Call| (call.in_group, call.pairs[0].n);
        let record = recorder.record(CALLS);
        let numbers: Vec<_> = record.calls.iter().map(numbers).collect();
        assert_eq!(numbers, [(1, 0), (1, 0), (0, 1)]);
    }

    #[test]
    fn what_a_call_waits_for_is_what_it_was_told_last() {
        let recorder = recorder();
        let call = recorder.begin(begun(1, false));
        recorder.waits_for(call, &[2]);
        assert_eq!(recorder.record(CALLS).calls[0].waits_for, [2]);
        recorder.end(call, State::Failed, Some(&[4]));
        let ended = &recorder.record(CALLS).calls[0];
        assert_eq!(
            (ended.state, &ended.waits_for[..]),
            (State::Failed, &[4][..])
        );
    }

    #[test]
    fn a_dump_is_read_again_and_keeps_the_first_error() {
        let recorder = recorder();
        recorder.begin(begun(1, true));
        let folder = std::env::temp_dir().join(format!("anymesh-flight-{}", std::process::id()));
        recorder.dump(&folder, "the first").unwrap();
        let path = recorder.dump(&folder, "a consequence").unwrap();
        let record: Record = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(path, folder.join("rank-3.json"));
        assert_eq!(record.error.as_deref(), Some("the first"));
        assert_eq!((record.process, record.calls.len()), (3, 1));
        assert!(record.unix_time > 1.6e9);
        std::fs::remove_dir_all(&folder).unwrap();
        // A folder that cannot be made is an error and no more.
        assert!(recorder.dump(Path::new("/proc/none/here"), "").is_err());
    }
}
