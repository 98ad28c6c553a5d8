//! The plan of a step: what every op of a step does, decided for all of them together before any of
//! them runs.
//!
//! [`plan`] runs a step without computing anything, writes down each call of an op on a mesh and
//! each reshard that sends something, and looks for choices that cost less in all than what each op
//! would choose by itself. What it gives is data: text, JSON, totals that are those of the
//! [`Ledger`](super::Ledger) when the step then runs [under it](with_plan).
//!
//! ```
//! # use anymesh_core::{DType, Mesh, Result, Tensor, meta, spmd::{self, Ledger, OnDifference, PlanOptions, StepPlan}};
//! fn step(mesh: &Mesh) -> Result<Tensor> {
//!     let x = Tensor::ones([64, 4], DType::F32, (mesh, "[@tp, _]"))?;
//!     let w = Tensor::ones([4, 8], DType::F32, (mesh, "[_, @tp]"))?;
//!     let v = Tensor::ones([8, 64], DType::F32, (mesh, "[@tp, _]"))?;
//!     x.matmul(&w)?.matmul(&v)?.sum(&[], false)
//! }
//! // By itself the first product gathers `w`, the smaller one, and the second pays for it.
//! let nothing = Mesh::new("tp=2", &meta())?;
//! let plan = spmd::plan(&PlanOptions::default(), || step(&nothing))?;
//! assert!(plan.bytes() < plan.eager().bytes);
//! // A plan is for any device, and survives as text.
//! let plan = StepPlan::from_json(&plan.to_json())?;
//! let mesh = Mesh::new("tp=2", &anymesh_backend_cpu::device())?;
//! let (y, ledger) = Ledger::record(|| spmd::with_plan(&plan, OnDifference::Error, || step(&mesh)));
//! assert_eq!(y?.item()?.to_f64(), 64.0 * 4.0 * 8.0 * 64.0);
//! assert_eq!(ledger.bytes(), plan.bytes());
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! # What is decided
//! For every call one of the assignments that its rule has, from which of their forms operands are
//! taken, and which forms are held for later steps. A start is what ops choose by themselves; a
//! change is kept where a run with it costs less. So a plan never costs more than no plan, and its
//! totals are what a run counted.
//!
//! Planning needs no values, so it works on meshes of any device, with the tensors that a program
//! has: nothing is computed or sent, and what a planned run computed cannot be read
//! ([`Error::Planned`](crate::Error::Planned)). The step runs several times: it must do the same
//! each time, on one thread, and what it changes outside of itself (a parameter that it updates)
//! is lost.

mod change;
mod explain;
mod follow;
mod json;
mod record;
mod run;
mod search;
mod session;
mod steps;
mod text;

pub use explain::{Explanation, PlanDiff, StepChange};
pub use run::{plan, with_plan};
pub(super) use session::{Directions, decide, hold, is_on, made};
pub use steps::PlannedStep;

use super::Fingerprint;
use std::sync::Arc;

/// What a plan is to be good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PlanFor {
    /// Few bytes received by the worst rank.
    #[default]
    Bytes,
    /// Little time under the cost model of the mesh.
    Seconds,
}

/// How a step is planned.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// What the plan is to be good at.
    pub target: PlanFor,
    /// How many bytes a rank may hold at any time of what the step computes, beside what there was
    /// before. Where there is room, parameters that were brought are held until they are read again.
    pub memory: Option<u64>,
    /// How many changes are tried, each by a run of the step without values. With 0 the plan is what
    /// ops choose by themselves.
    pub tries: usize,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            target: PlanFor::default(),
            memory: None,
            tries: 24,
        }
    }
}

/// What to do where a program does something else than its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnDifference {
    /// It is an error, which names the first op that differs.
    #[default]
    Error,
    /// From there on ops decide by themselves, and the ledger has a note.
    Auto,
}

/// What a step takes in all.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Totals {
    /// Bytes that the worst rank receives.
    pub bytes: u64,
    /// Seconds of communication under the cost model.
    pub seconds: f64,
    /// The most bytes that a rank holds at any time of what the step computes. Of ranks of one
    /// process it is the mean.
    pub memory: u64,
}

/// The plan of a step. See [the module's text](self).
#[derive(Clone, Debug, PartialEq)]
pub struct StepPlan {
    steps: Arc<[PlannedStep]>,
    totals: Totals,
    eager: Totals,
    fingerprint: Fingerprint,
}

impl StepPlan {
    /// Its steps, in order.
    pub fn steps(&self) -> &[PlannedStep] {
        &self.steps
    }

    /// Bytes that the worst rank receives.
    pub fn bytes(&self) -> u64 {
        self.totals.bytes
    }

    /// What it takes in all.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// What the step takes where every op decides by itself.
    pub fn eager(&self) -> Totals {
        self.eager
    }

    /// The decisions of a run under it.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}
