//! The real training step, counted without running it on anything: what it computes, sends and holds.
//!
//! [`measure`] takes what `anymesh train` takes, a [`RunConfig`], and a number of ranks. The model's
//! stages run on [`meta`](anymesh_core::meta) with the axes of all ranks: forward, backward, the
//! addition of gradients over ranks, clipping, the update. What they launch is priced by a
//! [`Machine`], what they send by the ledger, what they hold by the device's own count. The passes
//! are then put in the order of the run's schedule, which makes the same
//! [`Estimate`] that closed forms make, so that the two can be
//! [compared](anymesh_simulate::compare).
//!
//! One rank stands for all that differ in values only, and one stage for all that are alike.

mod axes;
mod meter;
mod numbers;
mod price;
mod report;
mod stage;

pub use axes::for_ranks;
pub use meter::{Amount, Item};
pub use numbers::{laid_out, layout_of, numbers, run_of, settings_of};
pub use report::{Measured, Part};

use crate::{
    Error, Result,
    config::{ModelChoice, RunConfig},
    data::{Batch, LoaderOptions},
    models::{ModelConfig, ModelFiles},
    nn::Heads,
    pipeline::{Pipeline, Split},
};
use anymesh_core::{Device, Mesh, meta, ops::SequenceOrder};
use anymesh_schedule::{Kind, Limits, Schedule, build};
use anymesh_simulate::{Estimate, Machine, Source, Subject, assemble};
use price::Class;
use stage::Ran;
use std::collections::BTreeMap;

/// What all runs of stages share.
pub(crate) struct Setup {
    pub(crate) run: RunConfig,
    pub(crate) config: ModelConfig,
    pub(crate) machine: Machine,
    pub(crate) axes: Vec<(String, usize)>,
    /// Rows and tokens of a micro-batch over all ranks.
    pub(crate) rows: [usize; 2],
    pub(crate) micros: usize,
}

/// Of the backward passes of a stage those that are whole, not in halves.
fn whole(schedule: &Schedule, stage: usize) -> usize {
    let actions = schedule.ranks.iter().flatten();
    let own = actions.filter(|a| a.stage == stage && a.kind == Kind::B);
    own.count()
}

impl Setup {
    pub(crate) fn mesh(&self, device: &Device) -> Result<Mesh> {
        on(&self.axes, device)
    }

    /// A micro-batch as the loader places it, in the order that the model wants.
    pub(crate) fn batch(&self, mesh: &Mesh, order: SequenceOrder) -> Result<Batch> {
        let sharding = LoaderOptions::default().sharding;
        let documents = !self.run.batch.mix_documents;
        stage::batch(mesh, self.rows, &sharding, documents, order)
    }
}

fn on(axes: &[(String, usize)], device: &Device) -> Result<Mesh> {
    Ok(match axes.is_empty() {
        true => Mesh::single(device),
        false => Mesh::new(&axes::text(axes), device)?,
    })
}

/// What a step of a training run costs on so many ranks of a machine; on as many as its mesh has
/// where none are told. The mesh's `dp` is what is left of them.
///
/// ```
/// use anymesh_train::{config::{RunConfig, parse}, measure::measure};
/// let run: RunConfig = parse(
///     r#"
///     data = []
///     mesh = { axes = "pp=2, dp=2, tp=4", zero = 1, dtype = "bf16" }
///     batch = { global = 64, micro = 1, length = 2048 }
///     [model]
///     model_type = "llama"
///     vocab_size = 32000
///     hidden_size = 2048
///     intermediate_size = 5632
///     num_hidden_layers = 8
///     num_attention_heads = 16
///     "#,
///     &[] as &[&str],
/// )?;
/// let machine = anymesh_simulate::machine("h100").unwrap();
/// let step = measure(&run, Some(64), &machine)?;
/// assert_eq!((step.estimate.layout.dp, step.estimate.ranks), (8, 64));
/// assert_eq!(step.notes[0], "dp is 8, not 2: pp 2 * dp 2 * tp 4 is 16 ranks, not 64");
/// assert!(step.estimate.bytes.tp > 0.0 && step.estimate.fits);
/// println!("{step}");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn measure(run: &RunConfig, ranks: Option<usize>, machine: &Machine) -> Result<Measured> {
    machine.check().map_err(simulated)?;
    let (axes, mut notes) = for_ranks(&run.mesh.axes, ranks)?;
    let config = match run.model_choice()? {
        ModelChoice::New(config) => *config,
        ModelChoice::Trained(path) => ModelFiles::open(&path)?.config()?,
    };
    let model = numbers(&config)?;
    let mut run = run.clone();
    run.mesh.axes = axes::text(&axes);
    axes::check(&axes)?;
    let batch = run.batch.spec(axes::data_ranks(&axes) as u64).solve()?;
    let (micros, length) = (batch.accumulation as usize, run.batch.length);
    let mesh = on(&axes, &meta())?;
    if axes::size(&axes, "cp") > 1 {
        let heads = Heads {
            queries: model.heads,
            keys: model.kv_heads,
            size: model.head_size,
        };
        run.context.attention = run.context.attention.on(&mesh, heads)?;
    }
    let (stages, choice) = run.stages(&mesh)?;
    let split = config.split(&run.build(&mesh, stages)?)?;
    let schedule: Schedule = match split.stages() {
        1 => build("1f1b", 1, 1, micros)?,
        _ => {
            let pipeline: Pipeline = choice.pipeline(split.owners(), micros)?;
            pipeline.proof().schedule().clone()
        }
    };
    if let Some(live) = run.pipeline.memory {
        schedule.prove(&Limits::live(live))?;
    }
    let setup = Setup {
        rows: [(batch.global / batch.accumulation) as usize, length],
        micros,
        machine: machine.clone(),
        axes,
        config,
        run,
    };
    let classes = classes(&setup, &split, &schedule)?;
    let layout = layout_of(&setup.run, &setup.axes, &schedule.name)?;
    let priced = price::price(&setup, &split, &schedule, &classes);
    let subject = Subject {
        source: Source::RealStep,
        model: &model,
        machine,
        layout: &layout,
    };
    let estimate: Estimate = assemble(&subject, schedule, &priced).map_err(simulated)?;
    if classes.len() < split.stages() {
        let (ran, all) = (classes.len(), split.stages());
        notes.push(format!(
            "{ran} of {all} stages ran: the others are like one of these"
        ));
    }
    Ok(Measured::new(estimate, notes, &classes))
}

/// What closed forms or a schedule refuse.
pub(crate) fn simulated(error: anymesh_simulate::Error) -> Error {
    Error::config("simulate", error.to_string())
}

/// Runs one stage of each class: those that have as many layers, and the same neighbours.
fn classes(setup: &Setup, split: &Split, schedule: &Schedule) -> Result<Vec<Class>> {
    let last = split.stages() - 1;
    let owners = split.owners();
    let key = |s: usize| {
        let near = |other: Option<usize>| other.map(|o| owners[o] == owners[s]);
        let sides = [s.checked_sub(1), (s < last).then_some(s + 1)].map(near);
        let joined = whole(schedule, s);
        (split.layers(s).len(), sides, s == 0 || s == last, joined)
    };
    let mut found: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for stage in 0..split.stages() {
        // The turn of a V has neighbours that are its own rank's; ends borrow from each other.
        found.entry(key(stage)).or_default().push(stage);
    }
    let mut classes = vec![];
    for ((count, _, _, joined), stages) in found {
        let stage = stages[0];
        let alone = |n: usize, halves: bool| -> Result<Ran> {
            let mut own = vec![0; split.stages()];
            own[stage] = n;
            if n == 0 && last > 0 {
                // Patterns of parameters want something to fit.
                own[if stage == 0 { last } else { 0 }] = 1;
            }
            stage::run(setup, stage, &own, halves)
        };
        let ran = match joined {
            all if all == setup.micros => alone(count, false)?,
            0 => alone(count, true)?,
            some => {
                let share = some as f64 / setup.micros as f64;
                alone(count, true)?.mixed(&alone(count, false)?, share)
            }
        };
        // What a layer keeps is what one more keeps besides.
        let halves = joined < setup.micros;
        let layer = match count {
            0 => 0.0,
            1 => alone(2, halves)?.kept - ran.kept,
            n => (ran.kept - alone(1, halves)?.kept) / (n - 1) as f64,
        };
        let kept = layer * count as f64;
        let class = Class { ran, kept, stages };
        classes.push(class);
    }
    Ok(classes)
}
