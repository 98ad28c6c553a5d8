//! The ledger: every piece of communication, with the op and the line that caused it.

use crate::{Result, Tensor};
use std::{cell::RefCell, fmt, panic::Location, time::Duration};

/// One step of communication.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The op that needed it; `reshard` where the program asked for it.
    pub op: &'static str,
    /// The line that called the op.
    pub caller: String,
    /// What was done, such as `all-gather`.
    pub kind: &'static str,
    /// The tensor's type before.
    pub from: String,
    /// The tensor's type after.
    pub to: String,
    /// Bytes that the worst rank received.
    pub bytes: u64,
    /// How long the calling thread took; a GPU may still be working, and a browser does not tell.
    pub time: Duration,
}

/// What was communicated during a [`Ledger::record`].
///
/// ```
/// # use anymesh_core::{Mesh, Tensor, spmd::Ledger};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("tp=2", &device)?;
/// let x = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], &device)?.to_mesh(&mesh, "[_, @tp]")?;
/// // Each rank keeps the sum of one row, so that is all it receives.
/// let (y, ledger) = Ledger::record(|| x.exp()?.sum(&[1], false)?.exp());
/// assert_eq!(ledger.entries.len(), 1, "only the sums cross");
/// assert_eq!((ledger.entries[0].op, ledger.bytes()), ("exp", 4));
/// # y?; Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    /// In the order in which they happened.
    pub entries: Vec<Entry>,
}

thread_local! {
    /// Ledgers that are being written, innermost last.
    static OPEN: RefCell<Vec<Ledger>> = const { RefCell::new(Vec::new()) };
    /// The op that is running, outermost first.
    static OPS: RefCell<Vec<(&'static str, &'static Location<'static>)>> = const { RefCell::new(Vec::new()) };
}

impl Ledger {
    /// Runs `f` and returns what it communicated on this thread. An outer ledger sees it too.
    pub fn record<T>(f: impl FnOnce() -> T) -> (T, Ledger) {
        OPEN.with_borrow_mut(|open| open.push(Ledger::default()));
        let result = f();
        let ledger = OPEN.with_borrow_mut(|open| {
            let ledger = open.pop().unwrap_or_default();
            if let Some(outer) = open.last_mut() {
                outer.entries.extend(ledger.entries.iter().cloned());
            }
            ledger
        });
        (result, ledger)
    }

    /// The sum over all entries.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.bytes).sum()
    }

    /// As JSON: a list of objects.
    pub fn to_json(&self) -> serde_json::Value {
        self.entries
            .iter()
            .map(|e| {
                serde_json::json!({
                    "op": e.op, "caller": e.caller, "kind": e.kind, "from": e.from, "to": e.to, "recv_bytes": e.bytes, "seconds": e.time.as_secs_f64(),
                })
            })
            .collect()
    }
}

/// A table, one line for each step.
impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |of: fn(&Entry) -> usize, least: usize| {
            self.entries.iter().map(of).max().unwrap_or(0).max(least)
        };
        let (op, kind, from, to) = (
            width(|e| e.op.len(), 2),
            width(|e| e.kind.len(), 4),
            width(|e| e.from.len(), 4),
            width(|e| e.to.len(), 2),
        );
        writeln!(
            f,
            "{:op$}  {:kind$}  {:from$}  {:to$}  {:>12}  {:>10}  caller",
            "op", "kind", "from", "to", "bytes/rank", "time"
        )?;
        for e in &self.entries {
            let time = format!("{:.1} us", e.time.as_secs_f64() * 1e6);
            writeln!(
                f,
                "{:op$}  {:kind$}  {:from$}  {:to$}  {:>12}  {time:>10}  {}",
                e.op, e.kind, e.from, e.to, e.bytes, e.caller
            )?;
        }
        write!(
            f,
            "{} steps, {} bytes received by the worst rank",
            self.entries.len(),
            self.bytes()
        )
    }
}

/// Ends the op that [`enter`] began.
pub(crate) struct Scope;

impl Drop for Scope {
    fn drop(&mut self) {
        OPS.with_borrow_mut(|ops| {
            ops.pop();
        });
    }
}

/// Says on whose behalf the next steps are.
pub(crate) fn enter(op: &'static str, caller: &'static Location<'static>) -> Scope {
    OPS.with_borrow_mut(|ops| ops.push((op, caller)));
    Scope
}

/// The op on whose behalf others run, and the line that called it.
pub(crate) fn outermost() -> Option<(&'static str, &'static Location<'static>)> {
    OPS.with_borrow(|ops| ops.first().copied())
}

/// Until it is dropped, what ops communicate is on behalf of this one, which runs others. Nothing
/// for plain tensors, which never communicate.
#[track_caller]
pub(crate) fn on_behalf_of(op: &'static str, x: &Tensor) -> Option<Scope> {
    on_behalf_of_caller(op, x, Location::caller())
}

/// [`on_behalf_of`] for an op that was called from `caller` and runs later.
pub(crate) fn on_behalf_of_caller(
    op: &'static str,
    x: &Tensor,
    caller: &'static Location<'static>,
) -> Option<Scope> {
    (!x.is_plain()).then(|| enter(op, caller))
}

/// Runs what sends `bytes` to the worst rank and, where a ledger is being written, enters it there
/// with the types before and after. What sends nothing is no communication.
pub(crate) fn write(
    kind: &'static str,
    bytes: u64,
    types: impl FnOnce() -> (String, String),
    run: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    if bytes == 0 || OPEN.with_borrow(|open| open.is_empty()) {
        return run();
    }
    #[cfg(not(target_family = "wasm"))]
    let start = std::time::Instant::now();
    let result = run()?;
    #[cfg(not(target_family = "wasm"))]
    let time = start.elapsed();
    #[cfg(target_family = "wasm")]
    let time = Duration::ZERO;
    let (op, caller) = outermost().map_or(("reshard", String::new()), |(op, caller)| {
        (op, caller.to_string())
    });
    let (from, to) = types();
    let entry = Entry {
        op,
        caller,
        kind,
        from,
        to,
        bytes,
        time,
    };
    OPEN.with_borrow_mut(|open| {
        if let Some(ledger) = open.last_mut() {
            ledger.entries.push(entry);
        }
    });
    Ok(result)
}
