//! The ledgers of several processes, held against each other.

use crate::{
    Error, Mesh, Result,
    fingerprint::Digest,
    ledger::{Entry, Ledger},
    transport::gather_bytes,
};
use anymesh_kernel::RankCall;
use std::{fmt, time::Duration};

/// What all processes of a mesh communicated: the same steps, which took each of them another time.
#[derive(Clone, Debug, PartialEq)]
pub struct GatheredLedger {
    /// The first rank of each process.
    pub ranks: Vec<usize>,
    /// The steps, in the order in which they happened.
    pub entries: Vec<GatheredEntry>,
}

/// One step of communication, in all processes.
#[derive(Clone, Debug, PartialEq)]
pub struct GatheredEntry {
    /// The step as this process saw it.
    pub entry: Entry,
    /// How long it took in each process.
    pub times: Vec<Duration>,
}

impl GatheredEntry {
    /// The least and the most time that it took a process. Who comes last waits least, so a large
    /// difference tells of a rank that is late.
    pub fn fastest_and_slowest(&self) -> (Duration, Duration) {
        let fastest = self.times.iter().min().copied().unwrap_or_default();
        (
            fastest,
            self.times.iter().max().copied().unwrap_or_default(),
        )
    }
}

impl GatheredLedger {
    /// Bytes that the worst rank received, summed over all steps.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.entry.bytes).sum()
    }
}

/// A table, one line for each step.
impl fmt::Display for GatheredLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.entries {
            let (fastest, slowest) = step.fastest_and_slowest();
            let e = &step.entry;
            writeln!(
                f,
                "{} {} {} -> {}: {} bytes/rank, {:.1} to {:.1} us, {}",
                e.op,
                e.kind,
                e.from,
                e.to,
                e.bytes,
                fastest.as_secs_f64() * 1e6,
                slowest.as_secs_f64() * 1e6,
                e.caller
            )?;
        }
        write!(
            f,
            "{} steps in {} processes, {} bytes received by the worst rank",
            self.entries.len(),
            self.ranks.len(),
            self.bytes()
        )
    }
}

/// What is told of a step: a hash of what it is, and nanoseconds.
const TOLD: usize = 16;

/// Everything about a step but the time it took.
fn digest(e: &Entry) -> u64 {
    let texts = [e.op, &e.caller, e.kind, &e.from, &e.to];
    let axes = e.axes.iter().map(String::as_str);
    let all = texts.into_iter().chain(axes);
    all.fold(Digest::default().word(e.bytes), Digest::text).0
}

impl Ledger {
    /// The ledgers of all processes of a mesh as one; each of them calls this with its own. They
    /// must have the same steps, or the error has the first that differs, as two processes have it.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, spmd::Ledger};
    /// # let mesh = Mesh::new("tp=2", &anymesh_backend_cpu::device())?;
    /// let x = Tensor::ones([4, 4], DType::F32, (&mesh, "[@tp, _]"))?;
    /// let (y, ledger) = Ledger::record(|| x.reshard("[_, _]"));
    /// let all = ledger.gather(&mesh)?;
    /// assert_eq!((all.ranks.len(), all.bytes()), (1, ledger.bytes()));
    /// # y?; Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn gather(&self, mesh: &Mesh) -> Result<GatheredLedger> {
        let told = self.entries.iter().flat_map(|e| {
            let nanos = u64::try_from(e.time.as_nanos()).unwrap_or(u64::MAX);
            digest(e)
                .to_le_bytes()
                .into_iter()
                .chain(nanos.to_le_bytes())
        });
        let told = gather_bytes(mesh, &told.collect::<Vec<u8>>())?;
        let steps: Vec<Vec<(u64, u64)>> = told.iter().map(|(_, bytes)| steps(bytes)).collect();
        let hash = |process: usize, step: usize| Some(steps[process].get(step)?.0);
        let longest = steps.iter().map(Vec::len).max().unwrap_or(0);
        let differs = |step: usize| {
            let other = (1..steps.len()).find(|p| hash(*p, step) != hash(0, step))?;
            Some((step, other))
        };
        if let Some((step, other)) = (0..longest).find_map(differs) {
            return Err(self.difference(mesh, step, other)?);
        }
        let time = |i: usize| {
            let of = |steps: &Vec<(u64, u64)>| Duration::from_nanos(steps[i].1);
            steps.iter().map(of).collect()
        };
        let entry = |(i, entry): (usize, &Entry)| GatheredEntry {
            entry: entry.clone(),
            times: time(i),
        };
        Ok(GatheredLedger {
            ranks: told.iter().map(|(rank, _)| *rank).collect(),
            entries: self.entries.iter().enumerate().map(entry).collect(),
        })
    }

    /// What the first process and another one have at a step where they differ.
    fn difference(&self, mesh: &Mesh, step: usize, other: usize) -> Result<Error> {
        let text = |e: &Entry| {
            let what = format!(
                "{} ({} {} -> {}, {} bytes)",
                e.op, e.kind, e.from, e.to, e.bytes
            );
            format!("{what}\n{}", e.caller)
        };
        let mine = self.entries.get(step).map(text).unwrap_or_default();
        let all = gather_bytes(mesh, mine.as_bytes())?;
        let call = |process: usize| {
            let (rank, bytes) = &all[process];
            let text = String::from_utf8_lossy(bytes);
            let (op, caller) = text.split_once('\n').unwrap_or(("nothing", "its end"));
            RankCall {
                rank: *rank,
                op: op.into(),
                caller: caller.into(),
            }
        };
        Ok(Error::Diverged {
            calls: Box::new([call(0), call(other)]),
        })
    }
}

/// The steps that a process told of: hash and nanoseconds.
fn steps(bytes: &[u8]) -> Vec<(u64, u64)> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
    let step = |step: &[u8]| (word(&step[..8]), word(&step[8..]));
    bytes.chunks_exact(TOLD).map(step).collect()
}
