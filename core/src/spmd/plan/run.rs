//! Planning a step, and running it under its plan.

use super::{
    OnDifference, PlanOptions, StepPlan, Totals,
    record::Record,
    search,
    session::{self, Guide, Session, Way},
    steps::steps,
};
use crate::{
    Dry, Error, Result, Tensor, fingerprint, forms,
    ledger::{self, Ledgers},
    spmd::{Fingerprint, trace},
};
use std::{rc::Rc, sync::Arc};

/// What a run without values did.
pub(super) struct Run {
    pub(super) records: Vec<Record>,
    pub(super) fingerprint: Fingerprint,
    pub(super) totals: Totals,
    /// Ranks of this process, which hold about as much each.
    pub(super) ranks: u64,
}

/// A step that can be run without values.
pub(super) struct Planner<'a> {
    step: &'a dyn Fn() -> Result<()>,
}

impl Planner<'_> {
    /// Runs the step without values and without anybody noticing.
    pub(super) fn run(&self, way: Way) -> Result<Run> {
        let dry = Dry::default();
        let _uncounted = fingerprint::uncounted();
        let _ledgers = Ledgers::none().enter();
        let _trace = trace::enter(None);
        let aside = forms::aside();
        let session = Session::new(way, Some(dry.clone()));
        let ((result, session), fingerprint) =
            dry.run(|| Fingerprint::record(|| session.run(self.step)));
        drop(aside);
        let session = session.ok_or_else(nested)?;
        result?;
        if let Some(error) = early(&session) {
            return Err(error);
        }
        let records = session.records();
        let held = records.iter().map(|r| r.mesh.held().len() as u64);
        let ranks = held.max().unwrap_or(1);
        let totals = Totals {
            bytes: records.iter().map(|r| r.bytes).sum(),
            seconds: records.iter().map(|r| r.seconds).sum(),
            memory: dry.memory().peak / ranks,
        };
        Ok(Run {
            records,
            fingerprint,
            totals,
            ranks,
        })
    }

    pub(super) fn guided(&self, guide: &Guide) -> Result<Run> {
        self.run(Way::Guided(Rc::new(guide.clone())))
    }
}

/// The error where a program ended before its plan did.
fn early(session: &Session) -> Option<Error> {
    let (number, planned) = session.unreached()?;
    Some(Error::PlanDiffers {
        number,
        planned,
        found: "the end".into(),
        detail: "the program ended before its plan".into(),
    })
}

fn nested() -> Error {
    Error::argument(
        "plan",
        "step",
        "a step that is planned or runs under a plan cannot be planned, or run under another plan",
    )
}

/// The plan of a step, which is run several times without computing anything. See the
/// [module's text](super) for an example.
///
/// What ops had brought before and still hold is let go first, so that the plan does not depend on
/// what ran before the step.
pub fn plan<T>(options: &PlanOptions, step: impl Fn() -> Result<T>) -> Result<StepPlan> {
    if session::is_on() {
        return Err(nested());
    }
    forms::release_all();
    planned(options, &|| step().map(drop))
}

fn planned(options: &PlanOptions, step: &dyn Fn() -> Result<()>) -> Result<StepPlan> {
    if session::is_on() {
        return Err(nested());
    }
    let planner = Planner { step };
    let (eager, found) = search::best(&planner, options)?;
    let taken: Arc<[_]> = steps(&found.records, found.ranks)?.into();
    // Once more, as it will run: what is held is held as long as it is needed and not longer.
    let run = planner.run(Way::Planned(taken.clone(), OnDifference::Error))?;
    let mut taken = taken.to_vec();
    for (step, record) in taken.iter_mut().zip(&run.records) {
        step.bytes = record.bytes;
        step.seconds = record.seconds;
        step.memory = record.memory / run.ranks;
    }
    if let Some(bound) = options.memory.filter(|bound| run.totals.memory > *bound) {
        return Err(Error::PlanMemory {
            needed: run.totals.memory,
            bound,
            eager: eager.memory,
        });
    }
    Ok(StepPlan {
        steps: taken.into(),
        totals: run.totals,
        eager,
        fingerprint: run.fingerprint,
    })
}

/// Runs a step under its plan: every call takes what the plan says, without deciding anew. It holds
/// on this thread.
///
/// A call is known by its number, its op and rule, and the types of its operands; the mesh by the
/// names and sizes of its axes. So a plan that was made [without values](crate::meta()) is for any
/// device and any process.
pub fn with_plan<T>(
    plan: &StepPlan,
    on_difference: OnDifference,
    step: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if session::is_on() {
        return Err(nested());
    }
    let way = Way::Planned(plan.steps.clone(), on_difference);
    let (result, session) = Session::new(way, None).run(step);
    let result = result?;
    let Some(session) = session else {
        return Ok(result);
    };
    match (early(&session), session.difference, on_difference) {
        (Some(error), _, OnDifference::Error) | (_, Some(error), OnDifference::Error) => Err(error),
        (Some(error), ..) => {
            ledger::note(error.to_string());
            Ok(result)
        }
        _ => Ok(result),
    }
}

impl Tensor {
    /// The plan of the [`backward`](Self::backward) pass from this scalar, made from the tape alone:
    /// nothing is computed, and nothing of the tape is used up.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor, spmd::{Ledger, OnDifference, PlanOptions, with_plan}};
    /// let mesh = Mesh::new("tp=2", &anymesh_backend_cpu::device())?;
    /// let x = Tensor::ones([4, 8], DType::F32, (&mesh, "[@tp, _]"))?;
    /// let w = Tensor::ones([8, 8], DType::F32, (&mesh, "[@tp, _]"))?.require_grad()?;
    /// let loss = x.linear(&w, None)?.square()?.sum(&[], false)?;
    /// let plan = loss.plan_backward(&PlanOptions::default())?;
    /// let (grads, ledger) = Ledger::record(|| with_plan(&plan, OnDifference::Error, || loss.backward()));
    /// assert_eq!(ledger.bytes(), plan.bytes());
    /// assert_eq!(grads?.of(&w)?.to_vec::<f32>()?, [64.0; 64]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn plan_backward(&self, options: &PlanOptions) -> Result<StepPlan> {
        planned(options, &|| self.backward().map(drop))
    }
}
