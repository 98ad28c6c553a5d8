//! A layout priced stage by stage: what every rank of the pipeline computes, holds and sends.

use crate::{
    Layout, Machine, Model, Plan, Result, Weights, bytes,
    memory::{embedding_kept, head_kept, kept, state},
    work::{Clock, Group, Passes},
};
use anymesh_schedule::{Cost, Costs, Name};
use serde::Serialize;
use std::ops::{Add, Mul};

/// Bytes that a rank receives in a step, by axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bytes {
    /// Of the residual stream and the loss, between tensor parallel ranks.
    pub tp: f64,
    /// Of keys and values, between context parallel ranks.
    pub cp: f64,
    /// Of gradients and parameters, between ranks that have the same ones.
    pub dp: f64,
    /// Of activations and their gradients, between stages.
    pub pp: f64,
    /// Of tokens, between expert parallel ranks.
    pub ep: f64,
}

impl Bytes {
    /// By axis.
    pub fn parts(&self) -> [(&'static str, f64); 5] {
        [
            ("tp", self.tp),
            ("cp", self.cp),
            ("dp", self.dp),
            ("pp", self.pp),
            ("ep", self.ep),
        ]
    }
}

impl Add for Bytes {
    type Output = Bytes;

    fn add(self, other: Bytes) -> Bytes {
        Bytes {
            tp: self.tp + other.tp,
            cp: self.cp + other.cp,
            dp: self.dp + other.dp,
            pp: self.pp + other.pp,
            ep: self.ep + other.ep,
        }
    }
}

impl Mul<f64> for Bytes {
    type Output = Bytes;

    fn mul(self, by: f64) -> Bytes {
        Bytes {
            tp: self.tp * by,
            cp: self.cp * by,
            dp: self.dp * by,
            pp: self.pp * by,
            ep: self.ep * by,
        }
    }
}

impl Bytes {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.tp + self.cp + self.dp + self.pp + self.ep
    }
}

/// A stage of the pipeline on a rank: what it does with one micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stage {
    /// The rank of the pipeline that has it.
    pub rank: usize,
    /// Its layers.
    pub layers: usize,
    /// Its passes, in seconds. Of a schedule that has backward passes both whole and in halves, as
    /// they are on average.
    pub passes: Passes,
    /// Seconds of a backward pass for inputs, for weights, and of a whole one, where they are not what
    /// `passes` says: halves may gather again what a whole one gathers once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halves: Option<[f64; 3]>,
    /// Bytes that its layers keep from the forward to the backward pass.
    pub kept: f64,
    /// Bytes that embedding and head keep.
    pub ends: f64,
    /// Bytes that its forward pass needs besides.
    pub forward: f64,
    /// Bytes that its backward pass needs besides.
    pub backward: f64,
    /// Bytes of its parameters, gradients and optimizer state.
    pub state: [f64; 3],
    /// Bytes that its passes bring.
    pub bytes: Bytes,
    /// The ops that ran when its forward and its backward pass held most, where it was run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fullest: Option<[String; 2]>,
}

/// What a rank of the pipeline does once in a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rank {
    /// Its stages.
    pub stages: Vec<usize>,
    /// Parameters, gradients and optimizer state, in bytes.
    pub state: [f64; 3],
    /// What it receives in a whole step.
    pub bytes: Bytes,
    /// Seconds of data parallel communication that nothing hides.
    pub exposed: f64,
    /// Seconds of the optimizer.
    pub optimizer: f64,
    /// Bytes that adding up gradients and the update need besides.
    pub working: f64,
}

/// A step that is priced but for its schedule. Closed forms make one, and so does whoever ran the
/// stages of a model and counted: [`assemble`](crate::assemble) makes an estimate of it.
#[derive(Clone, Debug, Default)]
pub struct Priced {
    /// Stages, in order.
    pub stages: Vec<Stage>,
    /// Ranks of the pipeline.
    pub ranks: Vec<Rank>,
    /// Seconds from stage to stage.
    pub transfer: f64,
    /// The share of a pass that vanishes behind one that is joined to it.
    pub overlap: f64,
    /// Whether gradients have memory of their own all the time. Otherwise they come with the first
    /// backward pass of a step.
    pub gradients_stay: bool,
    /// Operations of the step, over all ranks.
    pub operations: f64,
}

/// A stage while it is priced.
#[derive(Clone, Copy, Debug, Default)]
struct Draft {
    layers: usize,
    passes: Passes,
    kept: f64,
    ends: f64,
    forward: f64,
    backward: f64,
    /// Parameters that all of `dp * cp` have.
    dense: f64,
    /// Of experts.
    experts: f64,
    /// Parameters of layers, and of those that are computed again.
    of_layers: f64,
    again: f64,
    /// Bytes of its passes with one micro-batch, but for the pipeline's.
    bytes: Bytes,
}

/// The layers of each kind and what one of them costs.
struct Kind {
    weights: Weights,
    passes: Passes,
    kept: f64,
    again: f64,
    bytes: Bytes,
}

impl Priced {
    /// By closed forms.
    pub(crate) fn new(model: &Model, machine: &Machine, layout: &Layout, plan: &Plan) -> Priced {
        let clock = Clock {
            model,
            machine,
            layout,
        };
        let dense =
            (model.experts.as_ref()).map_or(model.layers, |e| e.dense_layers.min(model.layers));
        let kinds = [
            (dense > 0).then(|| clock.kind(0)),
            (dense < model.layers).then(|| clock.kind(dense)),
        ];
        let mut stages = vec![];
        let mut first = 0;
        for layers in &plan.split {
            let end = first + layers;
            let plain = end.min(dense).saturating_sub(first);
            let mut stage = clock.stage(&kinds, [plain, layers - plain]);
            stage.layers = *layers;
            stages.push(stage);
            first = end;
        }
        let last = stages.len() - 1;
        let owners = plan.schedule.placement().owners(layout.pp, layout.chunks);
        clock.ends(&mut stages, owners[0] != owners[last]);
        for stage in &mut stages {
            clock.sharded(stage);
        }
        let stride = layout.tp * layout.replicas();
        let pipeline = Group::new(machine, stride, layout.pp);
        let parts = if layout.cuts_stream() { layout.tp } else { 1 };
        let border = bytes::border(layout.tokens(), model.hidden as f64, 2.0, parts);
        let mut ranks = vec![];
        for rank in 0..layout.pp {
            let own = |s: &usize| owners[*s] == rank;
            let stages_of: Vec<usize> = (0..=last).filter(own).collect();
            let mut one = clock.rank(&stages, stages_of, plan.micros);
            // From the stage before and from the stage after, where others have them.
            let near =
                |a: usize, b: Option<usize>| b.is_some_and(|b| b <= last && owners[b] != owners[a]);
            let sides = (one.stages.iter()).map(|s| {
                usize::from(near(*s, s.checked_sub(1))) + usize::from(near(*s, Some(s + 1)))
            });
            one.bytes.pp = border * (sides.sum::<usize>() * plan.micros) as f64;
            if model.tied && owners[0] != owners[last] && [owners[0], owners[last]].contains(&rank)
            {
                // Both ends have the embedding; they sum its gradients.
                let whole = model.embedding() / layout.tp as f64 * layout.gradient_bytes as f64;
                let bytes = bytes::reduce(whole, 2);
                one.bytes.pp += bytes;
                one.exposed += clock.transfer(bytes, pipeline);
            }
            ranks.push(one);
        }
        // Joined passes of DualPipe hide the exchange with experts behind each other, and nothing
        // else; the schedule knows one share for all stages.
        let sum = |of: fn(&Draft) -> f64| stages.iter().map(of).sum::<f64>();
        let overlap = match plan.schedule {
            Name::DualPipeV => sum(|s| s.passes.f.ep) / sum(|s| s.passes.f.total()),
            _ => 0.0,
        };
        let done = stages.into_iter().enumerate().map(|(at, stage)| {
            let mut brings = stage.bytes;
            let sides = [at.checked_sub(1), (at < last).then_some(at + 1)];
            let apart = sides.iter().flatten().filter(|s| owners[**s] != owners[at]);
            brings.pp = border * apart.count() as f64;
            Stage {
                rank: owners[at],
                layers: stage.layers,
                passes: stage.passes,
                halves: None,
                kept: stage.kept,
                ends: stage.ends,
                forward: stage.forward,
                backward: stage.backward,
                state: clock.state(&stage),
                bytes: brings,
                fullest: None,
            }
        });
        Priced {
            stages: done.collect(),
            ranks,
            transfer: clock.transfer(border, pipeline),
            overlap,
            gradients_stay: true,
            operations: crate::estimate::flops(model, layout)[1],
        }
    }

    /// What the schedule is timed with.
    pub(crate) fn costs(&self) -> Costs {
        let cost = |stage: &Stage| {
            let (i, w) = (stage.passes.i.total(), stage.passes.w.total());
            let [i, w, b] = stage.halves.unwrap_or([i, w, i + w]);
            let f = stage.passes.f.total();
            Cost { f, i, w, b }
        };
        Costs {
            stages: self.stages.iter().map(cost).collect(),
            transfer: self.transfer,
            overlap: self.overlap,
        }
    }
}

impl Clock<'_> {
    fn kind(&self, layer: usize) -> Kind {
        let (model, layout) = (self.model, self.layout);
        let held = kept(model, layout, layer);
        let full = layout.recompute == crate::Recompute::Full;
        let stream = layout.tokens() * model.hidden as f64 * 2.0;
        let u = bytes::gather(stream, layout.tp) * self.units(layer);
        let again = if full { 1.0 } else { 0.0 };
        let context = self.context_bytes() * (1.0 + again + self.context_backward());
        let ep = match model.experts.as_ref().filter(|_| model.has_experts(layer)) {
            Some(e) => {
                let parts = if layout.cuts_stream() { layout.tp } else { 1 };
                let tokens = layout.tokens() / parts as f64;
                let send =
                    |bytes| bytes::dispatch(tokens, e.top_k, model.hidden as f64, bytes, layout.ep);
                let narrow = if layout.precision == crate::Precision::Fp8 {
                    1.0
                } else {
                    2.0
                };
                (2.0 + again) * (send(narrow) + send(2.0))
            }
            None => 0.0,
        };
        Kind {
            weights: model.weights(layer),
            passes: self.layer(layer),
            kept: held.kept,
            again: held.again,
            bytes: Bytes {
                tp: bytes::tensor_layer(u, layout.gathers_again(), full),
                cp: context,
                ep,
                ..Bytes::default()
            },
        }
    }

    /// A stage of so many layers of each kind.
    fn stage(&self, kinds: &[Option<Kind>; 2], counts: [usize; 2]) -> Draft {
        let layout = self.layout;
        let (tp, ep) = (layout.tp as f64, layout.ep as f64);
        let mut stage = Draft::default();
        for (kind, count) in kinds.iter().zip(counts) {
            let Some(kind) = kind.as_ref().filter(|_| count > 0) else {
                continue;
            };
            let count = count as f64;
            stage.passes += kind.passes * count;
            stage.kept += kind.kept * count;
            stage.dense += (kind.weights.cut / tp + kind.weights.whole) * count;
            stage.experts += kind.weights.experts / (tp * ep) * count;
            stage.of_layers = stage.dense + stage.experts;
            if layout.recompute == crate::Recompute::Full {
                stage.again = stage.of_layers;
            }
            stage.bytes.tp += kind.bytes.tp * count;
            stage.bytes.cp += kind.bytes.cp * count;
            stage.bytes.ep += kind.bytes.ep * count;
            stage.backward = stage.backward.max(kind.again);
            if layout.zero == 3 {
                // A layer is there while the next one is gathered.
                let whole = 2.0 * (kind.weights.cut / tp + kind.weights.whole);
                let gathered = 2.0 * (whole + 2.0 * kind.weights.experts / (tp * ep));
                stage.forward = stage.forward.max(gathered);
                stage.backward = stage.backward.max(gathered + kind.again);
            }
        }
        // The residual stream while it is gathered.
        if layout.cuts_stream() {
            let stream = layout.tokens() * self.model.hidden as f64 * 2.0;
            stage.forward += stream;
            stage.backward += 2.0 * stream;
        }
        stage
    }

    /// Embedding and head, which the first and the last stage have besides; tied ones that are `apart`
    /// are there twice.
    fn ends(&self, stages: &mut [Draft], apart: bool) {
        let last = stages.len() - 1;
        let (model, layout) = (self.model, self.layout);
        let tp = layout.tp as f64;
        let stream = layout.tokens() * model.hidden as f64 * 2.0;
        let u = bytes::gather(stream, layout.tp);
        let first = &mut stages[0];
        first.passes += self.embedding();
        first.ends += embedding_kept(model, layout);
        first.dense += model.embedding() / tp + (model.positions * model.hidden) as f64;
        first.bytes.tp += 2.0 * u;
        let head = &mut stages[last];
        head.passes += self.head();
        head.ends += head_kept(model, layout);
        head.dense += model.last_norm();
        if !model.tied || apart {
            head.dense += model.embedding() / tp;
        }
        let units = if layout.gathers_again() { 3.0 } else { 2.0 };
        head.bytes.tp += units * u + bytes::cross_entropy(layout.tokens(), layout.tp);
    }

    fn groups(&self) -> [Group; 2] {
        let layout = self.layout;
        let all = Group::new(self.machine, layout.tp, layout.replicas());
        let stride = layout.tp * layout.ep;
        [
            all,
            Group::new(self.machine, stride, layout.replicas() / layout.ep),
        ]
    }

    /// Bytes of parameters, gradients and optimizer.
    fn state(&self, stage: &Draft) -> [f64; 3] {
        let layout = self.layout;
        let sizes = [layout.replicas(), layout.replicas() / layout.ep];
        let mut all = [0.0; 3];
        for (parameters, size) in [stage.dense, stage.experts].into_iter().zip(sizes) {
            let held = state(parameters, layout.zero, size, layout.gradient_bytes);
            all.iter_mut().zip(held).for_each(|(all, one)| *all += one);
        }
        all
    }

    /// Gathers of parameters and scatters of gradients in every pass: ZeRO 3, and of gradients ZeRO 2.
    fn sharded(&self, stage: &mut Draft) {
        let layout = self.layout;
        if layout.zero < 2 {
            return;
        }
        let overlap = self.machine.coefficients.data_overlap;
        let sizes = [layout.replicas(), layout.replicas() / layout.ep];
        let parts = [stage.dense, stage.experts]
            .into_iter()
            .zip(sizes)
            .zip(self.groups());
        let all = stage.dense + stage.experts;
        // What backward passes gather again: all, or what they compute again.
        let second = match layout.regather {
            true => 1.0,
            false => stage.again / all,
        };
        let (mut gathers, mut scatters) = (0.0, 0.0);
        for ((parameters, size), group) in parts {
            let whole = bytes::gather(parameters * 2.0, size);
            let gradients = bytes::gather(parameters * layout.gradient_bytes as f64, size);
            gathers += self.collective(whole, group);
            scatters += self.collective(gradients, group);
            stage.bytes.dp += gradients;
            if layout.zero == 3 {
                stage.bytes.dp += whole * (1.0 + second);
            }
        }
        let passes = &mut stage.passes;
        let exposed = |bytes: f64, pass: f64| (bytes - overlap * pass).max(0.0);
        passes.w.dp += exposed(scatters, passes.w.total());
        if layout.zero == 3 {
            passes.f.dp += exposed(gathers, passes.f.total());
            passes.i.dp += exposed(gathers * second, passes.i.total());
            if !layout.regather {
                stage.ends += 2.0 * (all - stage.of_layers);
                stage.kept += 2.0 * (stage.of_layers - stage.again);
            }
        }
    }

    /// What a rank of the pipeline has and does once in a step.
    fn rank(&self, stages: &[Draft], own: Vec<usize>, micros: usize) -> Rank {
        let layout = self.layout;
        let overlap = self.machine.coefficients.data_overlap;
        let gradient = layout.gradient_bytes as f64;
        let mut rank = Rank::default();
        let sum = |of: fn(&Draft) -> f64| own.iter().map(|s| of(&stages[*s])).sum::<f64>();
        let each = [sum(|s| s.dense), sum(|s| s.experts)];
        let sizes = [layout.replicas(), layout.replicas() / layout.ep];
        let (mut before, mut after) = (0.0, 0.0);
        for ((parameters, size), group) in each.into_iter().zip(sizes).zip(self.groups()) {
            let held = state(parameters, layout.zero, size, layout.gradient_bytes);
            rank.state
                .iter_mut()
                .zip(held)
                .for_each(|(all, one)| *all += one);
            let gradients = bytes::gather(parameters * gradient, size);
            let weights = bytes::gather(parameters * 2.0, size);
            let (scattered, gathered) = match layout.zero {
                0 => (2.0 * gradients, 0.0),
                1 => (gradients, weights),
                2 => (0.0, weights),
                _ => (0.0, 0.0),
            };
            rank.bytes.dp += scattered + gathered;
            if scattered > 0.0 {
                after += self.collective(scattered, group);
            }
            if gathered > 0.0 {
                before += self.collective(gathered, group);
            }
            // Masters and two moments are read and written, weights written, gradients read for
            // their norm and for the update, and zeroed.
            let owned = if layout.zero >= 1 {
                parameters / size as f64
            } else {
                parameters
            };
            let traffic = (26.0 + 2.0 * gradient) * owned + gradient * parameters;
            rank.optimizer += self.traffic(traffic);
        }
        let passes =
            |of: fn(&Passes) -> f64| own.iter().map(|s| of(&stages[*s].passes)).sum::<f64>();
        let hidden = |bytes: f64, pass: f64| (bytes - overlap * pass).max(0.0);
        rank.exposed =
            hidden(after, passes(|p| p.backward())) + hidden(before, passes(|p| p.f.total()));
        let micros = micros as f64;
        rank.bytes.tp = micros * sum(|s| s.bytes.tp);
        rank.bytes.cp = micros * sum(|s| s.bytes.cp);
        rank.bytes.ep = micros * sum(|s| s.bytes.ep);
        rank.bytes.dp += micros * sum(|s| s.bytes.dp);
        rank.stages = own;
        rank
    }
}

/// Refuses what cannot be, and prices the rest.
pub(crate) fn priced(model: &Model, machine: &Machine, layout: &Layout) -> Result<(Plan, Priced)> {
    machine.check()?;
    let ranks = layout.ranks().unwrap_or(0);
    let plan = layout.check(model, ranks)?;
    let priced = Priced::new(model, machine, layout, &plan);
    Ok((plan, priced))
}
