//! The ledger: every piece of communication, with the op and the line that caused it.

use crate::{Mesh, Result, Tensor, cost::Link, scoped::Scoped, transport::told, watch::watcher};
use std::{
    cell::RefCell,
    fmt,
    panic::Location,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

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
    /// The mesh axes that data went along; none between meshes.
    pub axes: Vec<String>,
    /// Bytes that the worst rank received.
    pub bytes: u64,
    /// Seconds under the mesh's cost model.
    pub modelled: f64,
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
    /// What should be known besides: where a program went another way than its
    /// [plan](crate::spmd::plan).
    pub notes: Vec<String>,
}

/// An op, and the line that called it.
type Caller = (&'static str, &'static Location<'static>);

/// What is written to by every thread that works for a ledger.
type Page = Arc<Mutex<Ledger>>;

thread_local! {
    /// Ledgers that are being written.
    static OPEN: RefCell<Vec<Page>> = const { RefCell::new(Vec::new()) };
    /// The op that is running, outermost first.
    static OPS: RefCell<Vec<Caller>> = const { RefCell::new(Vec::new()) };
}

impl Ledger {
    /// Runs `f` and returns what it communicated. An outer ledger sees it too, and keeps it where
    /// `f` panics.
    ///
    /// It follows this thread. Work that `f` hands to other threads is written down where they
    /// [run](crate::Context::run) it under a context that was captured inside of `f`, and before
    /// `f` returns.
    pub fn record<T>(f: impl FnOnce() -> T) -> (T, Ledger) {
        let page = Page::default();
        let open = OPEN.with_borrow(|open| open.iter().chain([&page]).cloned().collect());
        let scope = Scoped::set(&OPEN, open);
        let result = f();
        drop(scope);
        let ledger = std::mem::take(&mut *page.lock().unwrap_or_else(PoisonError::into_inner));
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
                    "op": e.op, "caller": e.caller, "kind": e.kind, "from": e.from, "to": e.to, "axes": e.axes, "recv_bytes": e.bytes, "modelled_seconds": e.modelled, "seconds": e.time.as_secs_f64(),
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
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        write!(
            f,
            "{} steps, {} bytes received by the worst rank",
            self.entries.len(),
            self.bytes()
        )
    }
}

/// The ledgers that a thread writes, and the op on whose behalf.
#[derive(Clone)]
pub(crate) struct Ledgers {
    open: Vec<Page>,
    op: Option<Caller>,
}

/// Writes a note into every ledger that is open.
pub(crate) fn note(text: String) {
    OPEN.with_borrow(|open| {
        for page in open {
            let mut ledger = page.lock().unwrap_or_else(PoisonError::into_inner);
            ledger.notes.push(text.clone());
        }
    });
}

impl Ledgers {
    /// No ledgers, on behalf of the same op.
    pub(crate) fn none() -> Self {
        Self {
            open: vec![],
            op: outermost(),
        }
    }

    pub(crate) fn capture() -> Self {
        Self {
            open: OPEN.with_borrow(Vec::clone),
            op: outermost(),
        }
    }

    /// Until it is dropped, this thread writes to them.
    pub(crate) fn enter(&self) -> (Scoped<Vec<Page>>, Scoped<Vec<Caller>>) {
        (
            Scoped::set(&OPEN, self.open.clone()),
            Scoped::set(&OPS, self.op.into_iter().collect()),
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
pub(crate) fn outermost() -> Option<Caller> {
    OPS.with_borrow(|ops| ops.first().copied())
}

/// The line that called the op on whose behalf others run, or the caller of this.
#[track_caller]
pub(crate) fn caller() -> &'static Location<'static> {
    outermost().map_or(Location::caller(), |(_, caller)| caller)
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

/// What a step sends.
pub(crate) struct Sent<'a> {
    pub(crate) kind: &'static str,
    pub(crate) mesh: &'a Mesh,
    pub(crate) axes: &'a [usize],
    /// To the worst rank.
    pub(crate) bytes: u64,
    /// Under the mesh's cost model.
    pub(crate) seconds: f64,
}

impl<'a> Sent<'a> {
    /// What waits for `hops` neighbours in a row along some axes.
    pub(crate) fn along(
        kind: &'static str,
        mesh: &'a Mesh,
        axes: &'a [usize],
        hops: u64,
        bytes: u64,
    ) -> Self {
        let cost = mesh.cost();
        let slowest = (axes.iter().map(|a| cost.link(mesh, *a))).reduce(Link::slower);
        Self {
            kind,
            mesh,
            axes,
            bytes,
            seconds: slowest.map_or(0.0, |link| cost.ring_seconds(link, hops, bytes)),
        }
    }
}

/// Runs what sends something and, where a ledger is being written, enters it there with the types
/// before and after. What sends nothing is no communication.
pub(crate) fn write(
    sent: Sent<'_>,
    types: impl FnOnce() -> (String, String),
    run: impl FnOnce() -> Result<Tensor>,
) -> Result<Tensor> {
    let run = || told(sent.mesh, None, run());
    if let Some(watcher) = watcher().filter(|_| sent.bytes > 0) {
        watcher.sent(sent.bytes, sent.seconds);
    }
    if sent.bytes == 0 || OPEN.with_borrow(|open| open.is_empty()) {
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
    let name = |axis: &usize| sent.mesh.axes()[*axis].0.clone();
    let entry = Entry {
        op,
        caller,
        kind: sent.kind,
        from,
        to,
        axes: sent.axes.iter().map(name).collect(),
        bytes: sent.bytes,
        modelled: sent.seconds,
        time,
    };
    OPEN.with_borrow(|open| {
        for page in open {
            let mut ledger = page.lock().unwrap_or_else(PoisonError::into_inner);
            ledger.entries.push(entry.clone());
        }
    });
    Ok(result)
}
