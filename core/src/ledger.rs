//! The ledger: every piece of communication, with the op and the line that caused it.

use crate::{
    Mesh, Result, Tensor, cost::Link, observe, profile, scoped::Scoped, transport::told,
    watch::watcher,
};
use anymesh_kernel::clock;
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
    /// How long the calling thread took or waited; a GPU may still be working, and a browser does
    /// not tell.
    pub time: Duration,
    /// How long the communication ran, beside the program or not: as long as the calling thread
    /// took, unless a [transport](crate::transport::Transport::start) carried it meanwhile. Only
    /// `time` counts where nobody waited for it before the ledger was closed.
    pub ran: Duration,
}

impl Entry {
    /// How long it ran while the program did something else.
    pub fn hidden(&self) -> Duration {
        self.ran.saturating_sub(self.time)
    }
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
pub(crate) type Caller = (&'static str, &'static Location<'static>);

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

    /// How long communication ran, in all entries.
    pub fn ran(&self) -> Duration {
        self.entries.iter().map(|e| e.ran).sum()
    }

    /// How much of [that](Self::ran) went on while the program did something else.
    pub fn hidden(&self) -> Duration {
        self.entries.iter().map(Entry::hidden).sum()
    }

    /// As JSON: a list of objects.
    pub fn to_json(&self) -> serde_json::Value {
        self.entries
            .iter()
            .map(|e| {
                serde_json::json!({
                    "op": e.op, "caller": e.caller, "kind": e.kind, "from": e.from, "to": e.to, "axes": e.axes, "recv_bytes": e.bytes, "modelled_seconds": e.modelled, "seconds": e.time.as_secs_f64(), "ran_seconds": e.ran.as_secs_f64(), "hidden_seconds": e.hidden().as_secs_f64(),
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
        )?;
        let (hidden, ran) = (self.hidden().as_secs_f64(), self.ran().as_secs_f64());
        if hidden > 0.0 {
            let percent = (100.0 * hidden / ran).floor();
            write!(f, "\nhidden {percent} % of {:.1} ms", ran * 1e3)?;
        }
        Ok(())
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

/// Until it is dropped, what runs is nobody's step.
pub(crate) fn on_nobodys_behalf() -> Scoped<Vec<Caller>> {
    Scoped::set(&OPS, Vec::new())
}

/// Until it is dropped, what ops communicate is on behalf of this one, which runs others. Nothing
/// for plain tensors, which never communicate, unless somebody asks for whom they compute.
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
    (!x.is_plain() || observe::is_observed() || profile::is_on()).then(|| enter(op, caller))
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

/// A clock, where there is one.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    #[cfg(not(target_family = "wasm"))]
    start: std::time::Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self {
            #[cfg(not(target_family = "wasm"))]
            start: std::time::Instant::now(),
        }
    }

    /// Nothing in a browser.
    pub(crate) fn elapsed(&self) -> Duration {
        #[cfg(not(target_family = "wasm"))]
        return self.start.elapsed();
        #[cfg(target_family = "wasm")]
        Duration::ZERO
    }
}

/// A step in the ledgers that were open when it began.
#[derive(Default)]
pub(crate) struct Begun {
    pages: Vec<(Page, usize)>,
    /// Its kind, bytes and axes, where the program is profiled.
    profiled: Option<(&'static str, u64, String)>,
}

impl Begun {
    /// Adds to how long the step ran, and how long the program waited for it.
    pub(crate) fn add(&self, ran: Duration, waited: Duration) {
        if let Some((kind, bytes, axes)) = &self.profiled {
            let start = clock().saturating_sub(ran);
            profile::sent(kind, *bytes, || axes.clone(), start, ran);
        }
        for (page, at) in &self.pages {
            let mut ledger = page.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(entry) = ledger.entries.get_mut(*at) {
                entry.ran += ran;
                entry.time += waited;
            }
        }
    }
}

/// Tells who watches of what a step sends, and whether a ledger is to have it.
fn is_written(sent: &Sent<'_>) -> bool {
    if let Some(watcher) = watcher().filter(|_| sent.bytes > 0) {
        watcher.sent(sent.bytes, sent.seconds);
    }
    sent.bytes > 0 && (OPEN.with_borrow(|open| !open.is_empty()) || profile::is_on())
}

/// Enters a step that sends something into the ledgers that are open, with the types before and
/// after, before it runs.
pub(crate) fn begin(sent: Sent<'_>, types: impl FnOnce() -> (String, String)) -> Begun {
    match is_written(&sent) {
        true => Begun {
            profiled: profile::is_on().then(|| (sent.kind, sent.bytes, names(&sent).join(" "))),
            ..enter_step(&sent, types(), Duration::ZERO)
        },
        false => Begun::default(),
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
    if !is_written(&sent) {
        return run();
    }
    let start = clock();
    let result = run()?;
    let took = clock().saturating_sub(start);
    enter_step(&sent, types(), took);
    profile::sent(
        sent.kind,
        sent.bytes,
        || names(&sent).join(" "),
        start,
        took,
    );
    Ok(result)
}

/// Writes an entry of what the calling thread took this long for.
fn enter_step(sent: &Sent<'_>, (from, to): (String, String), time: Duration) -> Begun {
    let (op, caller) = outermost().map_or(("reshard", String::new()), |(op, caller)| {
        (op, caller.to_string())
    });
    let entry = Entry {
        op,
        caller,
        kind: sent.kind,
        from,
        to,
        axes: names(sent),
        bytes: sent.bytes,
        modelled: sent.seconds,
        time,
        ran: time,
    };
    let write = |page: &Page| {
        let mut ledger = page.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.entries.push(entry.clone());
        (page.clone(), ledger.entries.len() - 1)
    };
    Begun {
        pages: OPEN.with_borrow(|open| open.iter().map(write).collect()),
        profiled: None,
    }
}

/// The names of the axes that a step goes along.
fn names(sent: &Sent<'_>) -> Vec<String> {
    let name = |axis: &usize| sent.mesh.axes()[*axis].0.clone();
    sent.axes.iter().map(name).collect()
}
