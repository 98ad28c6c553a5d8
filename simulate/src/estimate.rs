//! What a step costs.

use crate::{
    Bytes, Layout, Machine, Model, Recompute, Result, Spent,
    layout::Attention,
    stages::{Priced, Stage, priced},
};
use anymesh_schedule::{Kind, Schedule, Timing, build};
use serde::Serialize;

/// What the numbers of an estimate come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Source {
    /// Formulas of work, bytes and memory.
    #[default]
    #[serde(rename = "closed forms")]
    ClosedForms,
    /// The real step ran without values: its kernels, its ledger and its memory were counted.
    #[serde(rename = "the real step")]
    RealStep,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::ClosedForms => "closed forms",
            Source::RealStep => "the real step",
        })
    }
}

/// What a training step costs: on each rank of the pipeline, and all in all.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    /// What the numbers come from.
    pub source: Source,
    /// The model's name.
    pub model: String,
    /// The machine's name.
    pub machine: String,
    /// How it is laid out.
    pub layout: Layout,
    /// Ranks.
    pub ranks: usize,
    /// Micro-batches of a step.
    pub micros: usize,
    /// Layers of each stage.
    pub split: Vec<usize>,
    /// Seconds of a step.
    pub seconds: f64,
    /// Tokens in a second, over all ranks.
    pub tokens_per_second: f64,
    /// Operations that the model needs for a step: see [`Model::flops`].
    pub model_flops: f64,
    /// With what is computed again.
    pub hardware_flops: f64,
    /// The model's operations as a share of what the machine's peak would do meanwhile.
    pub mfu: f64,
    /// The idle share of the pipeline's time.
    pub bubble: f64,
    /// Where the seconds of the busiest rank go; they make the step.
    pub spent: Spent,
    /// Seconds of communication that nothing hides, of that rank: a part of `spent`.
    pub exposed: f64,
    /// Bytes that the rank that receives most receives in a step.
    pub bytes: Bytes,
    /// What each stage does with one micro-batch.
    pub stages: Vec<Stage>,
    /// What each rank of the pipeline holds at most.
    pub memory: Vec<Memory>,
    /// Bytes that a rank may hold.
    pub usable: f64,
    /// Whether every rank holds less.
    pub fits: bool,
    /// What is done in which order.
    #[serde(skip)]
    pub schedule: Schedule,
    /// When.
    #[serde(skip)]
    pub timing: Timing,
}

/// What a rank of the pipeline holds at its peak, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Which rank of the pipeline.
    pub rank: usize,
    /// Its stages.
    pub stages: Vec<usize>,
    /// Parameters.
    pub parameters: f64,
    /// Gradients.
    pub gradients: f64,
    /// State of the optimizer.
    pub optimizer: f64,
    /// What layers keep of micro-batches that are under way.
    pub activations: f64,
    /// What embedding, output product and loss keep of them.
    pub ends: f64,
    /// What the pass needs besides: what is computed again, and what is gathered.
    pub working: f64,
    /// All of it.
    pub total: f64,
    /// When this is, in seconds from the beginning of the step.
    pub at: f64,
    /// During which action, such as `0F3`, or `update`; with the op, where the step was run.
    pub during: String,
    /// Seconds and bytes: what the rank holds from when on. Passes are there with what they need
    /// at most.
    pub curve: Vec<(f64, f64)>,
}

/// What a training step of a model costs on a machine in a layout.
///
/// ```
/// use anymesh_simulate::{Layout, estimate, machine, preset};
/// let model = preset("llama-3-70b")?.model;
/// let layout = Layout { dp: 16, tp: 8, pp: 4, sequence: 8192, batch: 2048, ..Layout::default() };
/// let step = estimate(&model, &machine("h100")?, &layout)?;
/// assert_eq!((step.ranks, step.micros), (512, 128));
/// assert!(step.fits && (0.3..0.6).contains(&step.mfu), "{step}");
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
pub fn estimate(model: &Model, machine: &Machine, layout: &Layout) -> Result<Estimate> {
    let (plan, priced) = priced(model, machine, layout)?;
    let name = plan.schedule.to_string();
    let schedule = build(&name, layout.pp, layout.chunks, plan.micros)?;
    let step = Subject {
        source: Source::ClosedForms,
        model,
        machine,
        layout,
    };
    assemble(&step, schedule, &priced)
}

/// What an estimate is of.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// What the prices come from.
    pub source: Source,
    /// What is trained.
    pub model: &'a Model,
    /// On what.
    pub machine: &'a Machine,
    /// How; of a step that was run, its axes and sizes.
    pub layout: &'a Layout,
}

/// What a step costs whose stages are priced, in the order of a schedule. Both sources of prices end
/// here.
pub fn assemble(step: &Subject<'_>, schedule: Schedule, priced: &Priced) -> Result<Estimate> {
    let (model, machine, layout) = (step.model, step.machine, step.layout);
    let timing = schedule.timing(&priced.costs())?;
    let micros = schedule.micros;
    let pipeline = priced.ranks.len();
    // Every rank needs the norm of all gradients before it updates.
    let end = |rank: usize| {
        let spans = timing.spans[rank].iter().map(|s| s.end);
        spans.fold(0.0, f64::max)
    };
    let done = |rank: usize| end(rank) + priced.ranks[rank].exposed;
    let last = (0..pipeline)
        .max_by(|a, b| done(*a).total_cmp(&done(*b)))
        .unwrap_or(0);
    let updates = priced.ranks.iter().map(|r| r.optimizer).fold(0.0, f64::max);
    let seconds = done(last) + updates;
    let memory: Vec<Memory> = (0..pipeline)
        .map(|r| peak(priced, &schedule, &timing, r, [end(r), seconds]))
        .collect();
    let busiest = (0..pipeline)
        .max_by(|a, b| timing.busy[*a].total_cmp(&timing.busy[*b]))
        .unwrap_or(0);
    let mut spent = Spent::default();
    for stage in &priced.ranks[busiest].stages {
        spent += priced.stages[*stage].passes.all() * micros as f64;
    }
    // Joined passes keep a rank less long than one after the other: what vanishes is the exchange with
    // experts.
    let hidden = (spent.total() - timing.busy[busiest]).max(0.0);
    spent.ep = (spent.ep - hidden).max(0.0);
    spent.dp += priced.ranks[busiest].exposed;
    spent.optimizer = updates;
    // What is left over; less than rounding is nothing.
    let rest = seconds - spent.total();
    spent.pipeline = if rest > 1e-9 * seconds { rest } else { 0.0 };
    let received = priced.ranks.iter().map(|r| r.bytes);
    let bytes = received
        .max_by(|a, b| a.total().total_cmp(&b.total()))
        .unwrap_or_default();
    let ranks = layout.ranks().unwrap_or(0);
    let [model_flops, _] = flops(model, layout);
    let usable = machine.usable();
    let peak = machine.peak(layout.precision) * ranks as f64;
    Ok(Estimate {
        source: step.source,
        model: model.name.clone(),
        machine: machine.name.clone(),
        layout: layout.clone(),
        ranks,
        micros,
        split: priced.stages.iter().map(|s| s.layers).collect(),
        seconds,
        tokens_per_second: (layout.batch * layout.sequence) as f64 / seconds,
        model_flops,
        hardware_flops: priced.operations,
        mfu: model_flops / (seconds * peak),
        bubble: timing.fraction,
        exposed: spent.exposed(),
        spent,
        bytes,
        stages: priced.stages.clone(),
        fits: memory.iter().all(|m| m.total <= usable),
        memory,
        usable,
        schedule,
        timing,
    })
}

/// Operations of a step: the model's, and those that are done.
pub(crate) fn flops(model: &Model, layout: &Layout) -> [f64; 2] {
    let tokens = (layout.batch * layout.sequence) as f64;
    let needed = model.flops(layout.sequence, layout.attention);
    let attention = model.attention(layout.sequence, layout.attention);
    let forward = needed / 3.0 - 2.0 * model.embedding();
    let again = match (layout.recompute, layout.attention) {
        // A flash kernel computes its scores again in any case: half of a forward pass.
        (Recompute::Full, Attention::Flash) => forward + 0.5 * attention,
        (_, Attention::Flash) => 0.5 * attention,
        (Recompute::Full, Attention::Plain) => forward,
        (Recompute::Selective, Attention::Plain) => attention,
        (Recompute::None, Attention::Plain) => 0.0,
    };
    [tokens * needed, tokens * (needed + again)]
}

/// Goes through a rank's list and finds the moment at which it holds most. Passes end at `end`, the
/// step at `step`.
fn peak(
    priced: &Priced,
    schedule: &Schedule,
    timing: &Timing,
    rank: usize,
    [end, step]: [f64; 2],
) -> Memory {
    let own = &priced.ranks[rank];
    let [parameters, gradients, optimizer] = own.state;
    let mut most = Memory {
        rank,
        stages: own.stages.clone(),
        parameters,
        gradients,
        optimizer,
        activations: 0.0,
        ends: 0.0,
        working: 0.0,
        total: 0.0,
        at: 0.0,
        during: "nothing".into(),
        curve: vec![],
    };
    // In counts, so that what is freed is what was kept, to the last byte.
    let mut alive = vec![0usize; priced.stages.len()];
    let sum = |alive: &[usize], of: fn(&Stage) -> f64| -> f64 {
        let stages = own.stages.iter();
        stages
            .map(|s| alive[*s] as f64 * of(&priced.stages[*s]))
            .sum()
    };
    let mut come = priced.gradients_stay;
    let mut curve = vec![];
    for (action, span) in schedule.ranks[rank].iter().zip(&timing.spans[rank]) {
        if !action.kind.computes() {
            continue;
        }
        let stage = &priced.stages[action.stage];
        let forward = action.kind == Kind::F;
        let working = match action.kind {
            Kind::F => {
                alive[action.stage] += 1;
                stage.forward
            }
            Kind::B | Kind::I => stage.backward,
            _ => 0.0,
        };
        come |= !forward;
        let held = if come { gradients } else { 0.0 };
        let (activations, ends) = (sum(&alive, |s| s.kept), sum(&alive, |s| s.ends));
        let total = parameters + held + optimizer + activations + ends + working;
        if total > most.total {
            let op = stage
                .fullest
                .as_ref()
                .map(|ops| &ops[usize::from(!forward)]);
            most.gradients = held;
            most.activations = activations;
            most.ends = ends;
            most.working = working;
            most.total = total;
            most.at = if forward { span.end } else { span.start };
            most.during = match op.filter(|op| !op.is_empty()) {
                Some(op) => format!("{action} in {op}"),
                None => action.to_string(),
            };
        }
        curve.push((span.start, total));
        if matches!(action.kind, Kind::B | Kind::W) {
            alive[action.stage] = alive[action.stage].saturating_sub(1);
        }
        curve.push((span.end, total - working));
    }
    let update = parameters + gradients + optimizer + own.working;
    if update > most.total {
        most.gradients = gradients;
        (most.activations, most.ends) = (0.0, 0.0);
        (most.working, most.total, most.at) = (own.working, update, end);
        most.during = "update".into();
    }
    curve.push((end, update));
    curve.push((step, update - own.working));
    most.curve = curve;
    most
}
