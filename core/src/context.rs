//! The scopes of one thread, carried into another.

use crate::{
    Dry,
    forms::{self, Held},
    grad, ledger, observe,
    overlap::{self, Overlap},
    promotion::{self, Promotion},
    spmd::{policy, trace},
};

/// The scopes that are in force where it was captured, to be entered by other threads.
///
/// A scope ([`no_grad`](crate::grad::no_grad), [`with_policy`](crate::spmd::with_policy),
/// [`with_kept`](crate::spmd::with_kept), [`with_held`](crate::spmd::with_held),
/// [`with_overlap`](crate::grad::with_overlap),
/// [`with_promotion`](crate::ops::with_promotion), [`Ledger::record`](crate::spmd::Ledger::record),
/// [`trace`](fn@crate::spmd::trace), [`compare`](fn@crate::compare::compare)) holds for the thread that runs its closure, and for no other: a
/// thread that is started inside of it begins with none. Work that is handed on takes the scopes
/// along with a context. Ledgers and traces get what the other thread does until their own closure
/// returns, in the order in which it happened.
///
/// ```
/// # use anymesh_core::{Context, Mesh, Tensor, spmd::Ledger};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("tp=2", &device)?;
/// let x = Tensor::from_slice(&[1f32, 2.0], [2], &device)?.to_mesh(&mesh, "[@tp]")?;
/// let (_, ledger) = Ledger::record(|| {
///     let context = Context::capture();
///     std::thread::scope(|threads| {
///         threads.spawn(|| context.run(|| x.reshard("[_]").map(drop)));
///     });
/// });
/// assert_eq!(ledger.entries.len(), 1);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Context {
    recording: grad::Recording,
    promotion: Promotion,
    policies: policy::Policies,
    held: Held,
    overlap: Overlap,
    ledgers: ledger::Ledgers,
    trace: trace::Listener,
    observer: observe::Observing,
    dry: Option<Dry>,
}

impl Context {
    /// The scopes of this thread.
    pub fn capture() -> Self {
        Self {
            recording: grad::Recording::capture(),
            promotion: promotion::current(),
            policies: policy::capture(),
            held: forms::capture(),
            overlap: overlap::capture(),
            ledgers: ledger::Ledgers::capture(),
            trace: trace::capture(),
            observer: observe::capture(),
            dry: Dry::current(),
        }
    }

    /// Runs `f` under these scopes instead of those of this thread, which are in force again
    /// afterwards, also where `f` panics.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        let _recording = self.recording.enter();
        let _promotion = promotion::enter(self.promotion);
        let _policies = policy::enter(self.policies.clone());
        let _held = forms::enter(self.held);
        let _overlap = overlap::enter(self.overlap);
        let _ledgers = self.ledgers.enter();
        let _trace = trace::enter(self.trace.clone());
        let _observer = observe::enter(self.observer.clone());
        Dry::enter(self.dry.clone(), f)
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}
