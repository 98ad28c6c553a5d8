//! A stage of the real model, run without values: two steps, of which the second is counted.

use super::{
    Setup,
    meter::{Amount, Counted, Item, Items, Meter},
};
use crate::{
    Module, Param, Pass, Result,
    data::Batch,
    models::Model,
    optim::{Accumulator, Optimizer},
    pipeline::{Given, Lent, Staged, on_mesh},
    trainer::LanguageModel,
};
use anymesh_core::{
    DType, Mesh, Tensor,
    grad::{Root, backward_from, backward_inputs},
    ops::{Rng, SequenceOrder},
};
use anymesh_simulate::{Bytes, Passes, Spent};
use std::collections::{BTreeMap, BTreeSet};

/// What a pass did, without its memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Work {
    pub(crate) spent: Spent,
    pub(crate) bytes: Bytes,
    pub(crate) operations: f64,
}

impl Work {
    fn of(counted: &Counted) -> Work {
        Work {
            spent: counted.spent,
            bytes: counted.bytes,
            operations: counted.operations,
        }
    }
}

/// What a stage does and holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ran {
    /// Forward, gradients of inputs (or a whole backward pass), gradients of weights.
    pub(crate) passes: [Work; 3],
    /// What the stage borrows at the beginning of a step, adding up gradients, clipping and updating,
    /// and what its loan gives back at the end.
    pub(crate) once: [Work; 4],
    /// Bytes kept from the forward to the backward pass.
    pub(crate) kept: f64,
    /// Bytes that passes and the end of the step need besides.
    pub(crate) needs: [f64; 3],
    /// Parameters, gradients, optimizer.
    pub(crate) state: [f64; 3],
    /// Bytes of the stream that come from another stage, one way.
    pub(crate) border: f64,
    /// The ops at the peaks of the passes.
    pub(crate) fullest: [String; 2],
    /// Seconds of both halves of a backward pass and of a whole one, where the schedule has both.
    pub(crate) halves: Option<[Spent; 3]>,
    /// By part of the step.
    pub(crate) items: BTreeMap<(&'static str, Item), Amount>,
}

impl Ran {
    pub(crate) fn passes(&self) -> Passes {
        let [f, i, w] = &self.passes;
        Passes {
            f: f.spent,
            i: i.spent,
            w: w.spent,
        }
    }
}

impl Ran {
    /// What was run with backward passes in halves, where `share` of them are whole.
    pub(crate) fn mixed(mut self, whole: &Ran, share: f64) -> Ran {
        self.halves = Some([
            self.passes[1].spent,
            self.passes[2].spent,
            whole.passes[1].spent,
        ]);
        for (own, other) in self.passes.iter_mut().zip(&whole.passes) {
            own.spent = own.spent * (1.0 - share) + other.spent * share;
            own.bytes = own.bytes * (1.0 - share) + other.bytes * share;
            own.operations = own.operations * (1.0 - share) + other.operations * share;
        }
        let mut items = BTreeMap::new();
        for (of, times) in [(&self.items, 1.0 - share), (&whole.items, share)] {
            for (key, amount) in of {
                let all: &mut Amount = items.entry(key.clone()).or_default();
                *all = all.plus(*amount, times);
            }
        }
        self.items = items;
        // Memory is that of the worse.
        self.kept = self.kept.max(whole.kept);
        for (own, other) in self.needs.iter_mut().zip(whole.needs) {
            *own = own.max(other);
        }
        self
    }
}

/// Some parameters of a model.
struct Part<'a> {
    model: &'a mut dyn Module,
    names: &'a BTreeSet<String>,
}

impl Module for Part<'_> {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        self.model.visit(path, &mut |name, p| {
            if self.names.contains(name) {
                f(name, p);
            }
        });
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        let names = self.names;
        self.model.visit_mut(path, &mut |name, p| {
            if names.contains(name) {
                f(name, p);
            }
        });
    }
}

/// Bytes of the last rank's part of a tensor, which is the largest.
fn held(x: &Tensor) -> f64 {
    let (mesh, sharding) = (x.mesh(), x.sharding());
    let part = |(dim, n): (usize, &usize)| {
        let parts: usize = sharding.axes_of(dim).map(|a| mesh.size(a)).product();
        n.div_ceil(parts) as f64
    };
    let elements: f64 = x.dims().iter().enumerate().map(part).product();
    elements * x.dtype().size() as f64
}

/// The parameters of a stage: those of its layers, and of the ends that lie in it.
fn parameters(task: &LanguageModel, stage: usize) -> BTreeSet<String> {
    let model = &task.model;
    let last = task.stages() - 1;
    let first = model.embedding().name().to_string();
    let layer = |name: &str| name.split('.').find_map(|part| part.parse::<usize>().ok());
    let mut names = BTreeSet::new();
    model.visit("", &mut |name, p| {
        let at = match layer(name) {
            Some(layer) => model.split().stage_of(layer),
            // On a rank that has both ends it is the same which of them has it.
            _ if p.value().mesh() == task.mesh_of(last) && name != first => last,
            _ => 0,
        };
        if at == stage {
            names.insert(name.to_string());
        }
    });
    names
}

/// A stage that is being run.
struct Bench<'a> {
    setup: &'a Setup,
    meter: &'a Meter,
    task: LanguageModel,
    optimizer: Optimizer,
    batch: Batch,
    stage: usize,
    /// Whether backward passes are in halves.
    halves: bool,
    own: BTreeSet<String>,
    /// What the stage before gives, on its mesh, and whether it is tracked.
    came: Option<(Tensor, bool)>,
    /// The gradient that the stage after gives, on its mesh.
    back: Option<Tensor>,
    lent: Lent,
}

/// Runs a stage of a model whose stages have so many layers.
pub(crate) fn run(setup: &Setup, stage: usize, layers: &[usize], halves: bool) -> Result<Ran> {
    let meter = Meter::new(&setup.machine, &setup.axes);
    let mesh = setup.mesh(meter.device())?;
    let (mut stages, schedule) = setup.run.stages(&mesh)?;
    stages.layers = Some(layers.to_vec());
    let build = setup.run.build(&mesh, stages)?;
    let config = setup.config.with_layers(layers.iter().sum());
    let mut model: Model = config.build(&build)?;
    setup.run.equip(&mut model)?;
    let optimizer = setup.run.optimizer(&model, build.policy())?;
    let task = setup.run.task(model, build.policy(), schedule);
    let order = task.model.order(setup.run.batch.length)?;
    let batch = setup.batch(&mesh, order)?;
    let mut bench = Bench {
        setup,
        meter: &meter,
        own: parameters(&task, stage),
        came: None,
        back: None,
        lent: Lent::of(&task, stage)?,
        task,
        optimizer,
        batch,
        stage,
        halves,
    };
    bench.surround()?;
    // The first step is there so that the second finds everything as all others do.
    bench.step()?;
    bench.step()
}

impl Bench<'_> {
    fn here(&self) -> &Mesh {
        self.task.mesh_of(self.stage)
    }

    fn pass(&self) -> Pass {
        Pass::train(Rng::new(self.setup.run.run.seed))
    }

    /// What the stages around it give: only the first of them computes something, the others have no
    /// layers.
    fn surround(&mut self) -> Result<()> {
        let (stage, nothing) = (
            self.stage,
            Given {
                inputs: &[],
                borrowed: &[],
            },
        );
        if stage > 0 {
            let gave = self.task.forward(0, &nothing, &self.batch, &self.pass())?;
            let before = self.task.mesh_of(stage - 1);
            let x = on_mesh(&gave[0].detach(), before)?;
            self.came = Some((x, gave[0].requires_grad()));
        }
        if stage + 1 < self.task.stages() {
            let inputs = self.arrive()?;
            let given = Given {
                inputs: &inputs,
                borrowed: &self.lent.copies,
            };
            let gave = self
                .task
                .forward(stage, &given, &self.batch, &self.pass())?;
            let like = gave[0].detach().zeros_like()?;
            self.back = Some(on_mesh(&like, self.task.mesh_of(stage + 1))?);
        }
        Ok(())
    }

    /// The stream of the stage before, here.
    fn arrive(&self) -> Result<Vec<Tensor>> {
        Ok(match &self.came {
            None => vec![],
            Some((x, tracked)) => {
                let x = on_mesh(x, self.here())?;
                vec![if *tracked { x.require_grad()? } else { x }]
            }
        })
    }

    fn step(&mut self) -> Result<Ran> {
        let mut ran = Ran::default();
        let (lent, borrowed) = self.meter.count(|| Lent::of(&self.task, self.stage))?;
        self.lent = lent;
        ran.note("borrow", &borrowed.items);
        ran.once[0] = Work::of(&borrowed);
        let mut sums = Accumulator::default();
        // The second micro-batch adds its gradients to those of the first, as all others do.
        let several = self.setup.micros > 1;
        if several {
            self.micro(&mut sums)?;
        }
        let [f, i, w] = self.micro(&mut sums)?;
        for (at, (name, counted)) in [("forward", &f), ("backward", &i), ("weights", &w)]
            .into_iter()
            .enumerate()
        {
            ran.note(name, &counted.items);
            ran.passes[at] = Work::of(counted);
        }
        let gradients: f64 = sums.sums().values().map(held).sum();
        let lent: f64 = self.lent.sums.iter().flatten().map(held).sum();
        ran.kept = f.after.max(if self.halves { i.after } else { 0.0 }) - f.before;
        if let Some((x, _)) = self.came.as_ref().filter(|(x, _)| x.mesh() == self.here()) {
            ran.kept += held(x);
        }
        // Gradients that come with this pass are counted as such.
        let new = if several { 0.0 } else { gradients + lent };
        let most = i.peak.max(w.peak);
        ran.needs = [f.peak - f.after, (most - i.before - new).max(0.0), 0.0];
        ran.fullest = [
            f.op.into(),
            if i.peak >= w.peak { i.op } else { w.op }.into(),
        ];
        ran.border = self.border();

        let before = self.meter.device().memory().in_use as f64;
        // The trainer keeps the sums until it knows that the step was good.
        let mut adding = sums.clone();
        let Bench {
            task, optimizer, ..
        } = self;
        let mut part = Part {
            model: &mut task.model,
            names: &self.own,
        };
        let (placed, reduce) = self.meter.count(|| adding.finish(&part))?;
        let (_, update) = self
            .meter
            .count(|| optimizer.step(&mut part, placed, 1.0))?;
        drop((adding, sums));
        ran.needs[2] = reduce.peak.max(update.peak) - before;
        ran.note("reduce", &reduce.items);
        ran.note("update", &update.items);
        ran.once[1] = Work::of(&reduce);
        ran.once[2] = Work::of(&update);
        let (_, returned) = self.meter.count(|| {
            for (b, sum) in self.lent.of.iter().zip(&self.lent.sums) {
                if let Some(sum) = sum {
                    on_mesh(sum, b.value.mesh())?;
                }
            }
            Ok(())
        })?;
        ran.note("return", &returned.items);
        ran.once[3] = Work::of(&returned);
        ran.state = self.state()?;
        ran.state[1] = gradients + lent;
        Ok(ran)
    }

    /// Parameters and optimizer; not gradients.
    fn state(&self) -> Result<[f64; 3]> {
        let (mut parameters, mut optimizer) = (0.0, 0.0);
        parameters += self.lent.copies.iter().map(held).sum::<f64>();
        self.task.model.visit("", &mut |name, p| {
            if !self.own.contains(name) {
                return;
            }
            match p.working() {
                Some(weight) => {
                    parameters += held(weight);
                    optimizer += held(p.value());
                }
                None => parameters += held(p.value()),
            }
        });
        for name in &self.own {
            let state = self.optimizer.state_of(name);
            optimizer += state.iter().map(held).sum::<f64>();
        }
        Ok([parameters, 0.0, optimizer])
    }

    /// Bytes of the stream that come from a neighbour on another rank.
    fn border(&self) -> f64 {
        let sides = [self.came.as_ref().map(|c| &c.0), self.back.as_ref()];
        let apart = sides.into_iter().flatten();
        let apart = apart.filter(|x| x.mesh() != self.here());
        apart.map(held).fold(0.0, f64::max)
    }

    /// One micro-batch, forward and backward.
    fn micro(&mut self, sums: &mut Accumulator) -> Result<[Counted; 3]> {
        let (stage, pass) = (self.stage, self.pass());
        let last = stage + 1 == self.task.stages();
        let ((inputs, roots), forward) = self.meter.count(|| {
            let inputs = self.arrive()?;
            let given = Given {
                inputs: &inputs,
                borrowed: &self.lent.copies,
            };
            let mut gave = self.task.forward(stage, &given, &self.batch, &pass)?;
            if last {
                gave = vec![gave[0].mul(1.0)?];
            }
            let tracked = gave.iter().filter(|x| x.requires_grad());
            let roots = tracked.map(Root::of).collect::<Result<Vec<_>, _>>()?;
            let inputs: Vec<Tensor> = inputs.into_iter().filter(|x| x.requires_grad()).collect();
            Ok((inputs, roots))
        })?;
        let seeds = |back: &Option<Tensor>| -> Result<Option<Vec<Tensor>>> {
            let here = self.here();
            let seed = back.as_ref().map(|x| on_mesh(x, here)).transpose()?;
            Ok(seed.map(|s| vec![s]))
        };
        if !self.halves {
            let ((found, of_input), backward) = self.meter.count(|| {
                let seeds = seeds(&self.back)?;
                let found = backward_from(&roots, seeds.as_deref())?;
                drop((roots, seeds));
                let of_input = inputs.first().map(|x| found.get(x)).transpose()?;
                sums.add(&self.task.model, &found)?;
                Ok((found, of_input))
            })?;
            drop(of_input);
            self.lent.add(&found)?;
            return Ok([forward, backward, Counted::default()]);
        }
        let (rest, first) = self.meter.count(|| {
            let seeds = seeds(&self.back)?;
            let of: Vec<&Tensor> = inputs.iter().collect();
            let (of_inputs, rest) = backward_inputs(&roots, seeds.as_deref(), &of)?;
            drop((roots, seeds, of_inputs));
            drop(inputs);
            Ok(rest)
        })?;
        let (found, second) = self.meter.count(|| {
            let found = rest.backward()?;
            sums.add(&self.task.model, &found)?;
            Ok(found)
        })?;
        self.lent.add(&found)?;
        Ok([forward, first, second])
    }
}

impl Ran {
    fn note(&mut self, part: &'static str, items: &Items) {
        for (item, amount) in items {
            let all = self.items.entry((part, item.clone())).or_default();
            *all = all.plus(*amount, 1.0);
        }
    }
}

/// Tokens of nobody, as a loader would place them.
pub(crate) fn batch(
    mesh: &Mesh,
    [rows, length]: [usize; 2],
    sharding: &str,
    documents: bool,
    order: SequenceOrder,
) -> Result<Batch> {
    let empty = || Tensor::zeros([rows, length], DType::I32, (mesh, sharding));
    Ok(Batch {
        ids: empty()?,
        labels: empty()?,
        documents: documents.then(empty).transpose()?,
        positions: documents.then(empty).transpose()?,
        order,
    })
}
