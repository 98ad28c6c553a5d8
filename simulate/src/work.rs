//! How long the passes of a layer take on a rank.

use crate::{
    Layout, Machine, Model, Recompute, bytes,
    layout::{Attention, Context, Precision},
};
use serde::Serialize;
use std::ops::{Add, AddAssign, Mul};

/// Where the seconds of a rank go. Communication counts as far as nothing hides it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    /// Matrix products and attention.
    pub products: f64,
    /// Kernels that wait for memory: norms, activations, softmax, dropout, losses.
    pub traffic: f64,
    /// Tensor parallel communication.
    pub tp: f64,
    /// Context parallel communication.
    pub cp: f64,
    /// Tokens to experts and back.
    pub ep: f64,
    /// Gradients and parameters between data parallel ranks.
    pub dp: f64,
    /// Waiting for other stages of the pipeline.
    pub pipeline: f64,
    /// The optimizer's update.
    pub optimizer: f64,
}

impl Spent {
    /// Its parts, by name.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("products", self.products),
            ("traffic", self.traffic),
            ("tp", self.tp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("dp", self.dp),
            ("pipeline", self.pipeline),
            ("optimizer", self.optimizer),
        ]
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|p| p.1).sum()
    }

    /// Communication that nothing hides.
    pub fn exposed(&self) -> f64 {
        self.tp + self.cp + self.ep + self.dp
    }
}

impl Add for Spent {
    type Output = Spent;

    fn add(self, other: Spent) -> Spent {
        Spent {
            products: self.products + other.products,
            traffic: self.traffic + other.traffic,
            tp: self.tp + other.tp,
            cp: self.cp + other.cp,
            ep: self.ep + other.ep,
            dp: self.dp + other.dp,
            pipeline: self.pipeline + other.pipeline,
            optimizer: self.optimizer + other.optimizer,
        }
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Spent) {
        *self = *self + other;
    }
}

impl Mul<f64> for Spent {
    type Output = Spent;

    fn mul(self, by: f64) -> Spent {
        Spent {
            products: self.products * by,
            traffic: self.traffic * by,
            tp: self.tp * by,
            cp: self.cp * by,
            ep: self.ep * by,
            dp: self.dp * by,
            pipeline: self.pipeline * by,
            optimizer: self.optimizer * by,
        }
    }
}

/// The passes of something, for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Passes {
    /// Forward.
    pub f: Spent,
    /// Gradients of inputs, and what is computed again for them; of everything, where a backward pass
    /// was counted as one.
    pub i: Spent,
    /// Gradients of weights.
    pub w: Spent,
}

impl Passes {
    /// All of them.
    pub fn all(&self) -> Spent {
        self.f + self.i + self.w
    }

    /// Seconds of both backward passes.
    pub fn backward(&self) -> f64 {
        self.i.total() + self.w.total()
    }
}

impl AddAssign for Passes {
    fn add_assign(&mut self, other: Passes) {
        self.f += other.f;
        self.i += other.i;
        self.w += other.w;
    }
}

impl Mul<f64> for Passes {
    type Output = Passes;

    fn mul(self, by: f64) -> Passes {
        Passes {
            f: self.f * by,
            i: self.i * by,
            w: self.w * by,
        }
    }
}

/// Ranks that talk to each other: every `stride`-th one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    stride: usize,
    size: usize,
    /// How many of them are in a node.
    near: usize,
}

impl Group {
    pub(crate) fn new(machine: &Machine, stride: usize, size: usize) -> Group {
        let near = (machine.node / stride.max(1)).max(1).min(size);
        Group { stride, size, near }
    }
}

/// Prices passes of one model on one machine in one layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock<'a> {
    pub(crate) model: &'a Model,
    pub(crate) machine: &'a Machine,
    pub(crate) layout: &'a Layout,
}

fn n(x: usize) -> f64 {
    x as f64
}

impl Clock<'_> {
    /// `count` products of m x k by k x n, whose result has `out` bytes an element.
    fn product(&self, [m, k, n]: [f64; 3], count: f64, out: f64, precision: Precision) -> f64 {
        let operations = 2.0 * m * k * n * count;
        let bytes = (2.0 * (m * k + k * n) + out * m * n) * count;
        let (machine, share) = (self.machine, self.machine.coefficients.products);
        machine.product(operations, bytes, machine.peak(precision), share)
    }

    /// Bytes read or written by kernels that do little else.
    pub(crate) fn traffic(&self, bytes: f64) -> f64 {
        self.machine.traffic(bytes)
    }

    /// A collective in which a rank receives so many bytes.
    pub(crate) fn collective(&self, bytes: f64, group: Group) -> f64 {
        self.machine.collective(bytes, group.stride, group.size)
    }

    /// From one rank to one other.
    pub(crate) fn transfer(&self, bytes: f64, group: Group) -> f64 {
        self.machine.transfer(bytes, group.stride, group.size)
    }

    /// Rows of tokens to the ranks of experts, or back. Between nodes a row goes once to each node.
    fn experts(&self, tokens: f64, bytes: f64) -> f64 {
        let (machine, c) = (self.machine, &self.machine.coefficients);
        let Some(e) = self.model.experts.as_ref().filter(|_| self.layout.ep > 1) else {
            return 0.0;
        };
        let group = Group::new(machine, self.layout.tp, self.layout.ep);
        let (size, near) = (n(group.size), n(group.near));
        let row = tokens * n(self.model.hidden) * bytes;
        let rows = n(e.top_k) * (size - 1.0) / size;
        let far = n(e.top_k) * (size - near) / size;
        let far = match e.nodes {
            0 => far,
            nodes => far.min(n(nodes) * (size - near) / size),
        };
        let inside = row * rows / (machine.inside.bandwidth * c.inside);
        let between = row * far / (machine.between.bandwidth * c.between);
        let latency = match group.near >= group.size {
            true => machine.inside.latency,
            false => machine.between.latency,
        };
        inside.max(between) + latency * size.log2().ceil()
    }

    /// A product with weights: forward, and both gradients.
    fn linear(&self, passes: &mut Passes, [m, k, n]: [f64; 3], count: f64) {
        let precision = self.layout.precision;
        passes.f.products += self.product([m, k, n], count, 2.0, precision);
        passes.i.products += self.product([m, n, k], count, 2.0, precision);
        // Gradients are read and written where they are summed up.
        let sum = 2.0 * self.layout.gradient_bytes as f64;
        passes.w.products += self.product([k, m, n], count, sum, precision);
    }

    /// A gather of the residual stream over tensor parallel ranks, in seconds.
    fn stream(&self) -> f64 {
        let tp = self.layout.tp;
        let whole = self.layout.tokens() * n(self.model.hidden) * 2.0;
        self.collective(bytes::gather(whole, tp), Group::new(self.machine, 1, tp))
    }

    /// Element-wise traffic, in bytes of a forward pass.
    fn elements(&self, passes: &mut Passes, bytes: f64) {
        passes.f.traffic += self.traffic(bytes);
        passes.i.traffic += self.traffic(bytes * self.machine.coefficients.backward);
    }

    /// A layer.
    pub(crate) fn layer(&self, layer: usize) -> Passes {
        let (model, layout) = (self.model, self.layout);
        let (tokens, tp) = (layout.tokens(), n(layout.tp));
        let h = n(model.hidden);
        let stream = if layout.cuts_stream() { tp } else { 1.0 };
        let dropout = if model.dropout { 1.0 } else { 0.0 };
        let mut passes = Passes::default();
        let heads = n(model.heads) / tp;
        let kv = (n(model.kv_heads) / tp).max(1.0);
        let (keys, values) = (n(model.key_size()), n(model.value_size()));
        match &model.latent {
            Some(l) => {
                let down = n(l.queries + l.keys + l.rotated);
                self.linear(&mut passes, [tokens / stream, h, down], 1.0);
                self.linear(&mut passes, [tokens, n(l.queries), heads * keys], 1.0);
                let up = heads * n(l.plain + l.values);
                self.linear(&mut passes, [tokens, n(l.keys), up], 1.0);
            }
            None => {
                let width = heads * keys + kv * (keys + values);
                self.linear(&mut passes, [tokens, h, width], 1.0);
            }
        }
        self.linear(&mut passes, [tokens, heads * values, h], 1.0);
        let core = self.attention(&mut passes);
        self.block(&mut passes, layer);
        // Two norms read and write, two sums read two and write one, with their masks.
        self.elements(&mut passes, tokens * h * (20.0 + 2.0 * dropout) / stream);
        if model.positions == 0 {
            // Rotations of queries and keys.
            self.elements(&mut passes, tokens * (heads + kv) * keys * 4.0);
        }
        self.tensor(&mut passes, layer);
        self.context(&mut passes, core.f.total());
        match layout.recompute {
            Recompute::None => {}
            Recompute::Selective if layout.attention == Attention::Plain => passes.i += core.f,
            Recompute::Selective => {}
            Recompute::Full => passes.i += passes.f,
        }
        passes
    }

    /// Scores, softmax, and the sums of values: also told alone.
    fn attention(&self, passes: &mut Passes) -> Passes {
        let (model, layout) = (self.model, self.layout);
        let mut core = Passes::default();
        let sequence = n(layout.sequence);
        let part = sequence / n(layout.cp);
        let count = n(layout.micro) * n(model.heads) / n(layout.tp);
        let (keys, values) = (n(model.key_size()), n(model.value_size()));
        match layout.attention {
            Attention::Plain => {
                let scores = self.product([part, keys, sequence], count, 2.0, Precision::Bf16);
                let sums = self.product([part, sequence, values], count, 2.0, Precision::Bf16);
                core.f.products = scores + sums;
                core.i.products = 2.0 * (scores + sums);
                let dropout = if model.dropout { 5.0 } else { 0.0 };
                self.elements(&mut core, count * part * sequence * (4.0 + dropout));
            }
            Attention::Flash => {
                let c = &self.machine.coefficients;
                let share = layout.attention.share();
                let operations = 2.0 * part * sequence * (keys + values) * share * count;
                let peak = self.machine.peak(Precision::Bf16) * c.flash;
                core.f.products = operations / peak + c.ramp;
                // Scores are computed again: five products, not four.
                core.i.products = 2.5 * operations / peak + c.ramp;
            }
        }
        *passes += core;
        core
    }

    /// The feed-forward block, or experts with their exchange.
    fn block(&self, passes: &mut Passes, layer: usize) {
        let (model, layout) = (self.model, self.layout);
        let (tokens, tp, h) = (layout.tokens(), n(layout.tp), n(model.hidden));
        let inner = n(model.matrices() - 1);
        let mut pair = |rows: f64, width: f64, count: f64| {
            self.linear(passes, [rows, h, inner * width / tp], count);
            self.linear(passes, [rows, width / tp, h], count);
            // The activation reads its inputs and writes one.
            self.elements(passes, rows * count * (inner + 1.0) * 2.0 * width / tp);
        };
        let Some(e) = model.experts.as_ref().filter(|_| model.has_experts(layer)) else {
            pair(tokens, n(model.ffn), 1.0);
            return;
        };
        let local = n(e.routed) / n(layout.ep);
        // With even use each rank gets as many rows as it sends.
        let rows = tokens * n(e.top_k);
        pair(rows / local, n(e.width), local);
        if e.shared > 0 {
            pair(tokens, n(e.shared * e.width), 1.0);
        }
        let stream = if layout.cuts_stream() { tp } else { 1.0 };
        self.linear(passes, [tokens / stream, h, n(e.routed)], 1.0);
        // Rows are put in the order of experts and back.
        self.elements(passes, rows * h * 8.0 / stream);
        let own = tokens / stream;
        let narrow = match layout.precision {
            Precision::Bf16 => 2.0,
            Precision::Fp8 => 1.0,
        };
        passes.f.ep += self.experts(own, narrow) + self.experts(own, 2.0);
        passes.i.ep += self.experts(own, 2.0) + self.experts(own, narrow);
    }

    /// Tensor parallel collectives of a layer: see [`bytes::tensor_layer`].
    fn tensor(&self, passes: &mut Passes, layer: usize) {
        if self.layout.tp <= 1 {
            return;
        }
        let u = self.stream() * self.units(layer);
        passes.f.tp += 4.0 * u;
        let backward = if self.layout.gathers_again() {
            6.0
        } else {
            4.0
        };
        let hidden = passes.w.products * self.machine.coefficients.tensor_overlap;
        passes.i.tp += (backward * u - hidden).max(0.0);
    }

    /// Gathers of a layer, as a multiple of a dense layer's: rows of experts are gathered for each
    /// expert that a token goes to.
    pub(crate) fn units(&self, layer: usize) -> f64 {
        match &self.model.experts {
            Some(e) if self.model.has_experts(layer) && self.layout.cuts_stream() => {
                0.5 + 0.5 * n(e.top_k)
            }
            _ => 1.0,
        }
    }

    /// Bytes of keys and values, or of heads, that a forward pass of a layer brings.
    pub(crate) fn context_bytes(&self) -> f64 {
        let (model, layout) = (self.model, self.layout);
        let tp = n(layout.tp);
        let kv = (n(model.kv_heads) / tp).max(1.0);
        let keys = match &model.latent {
            Some(l) => n(l.keys + l.rotated),
            None => kv * n(model.key_size() + model.value_size()),
        };
        let tokens = n(layout.micro) * n(layout.sequence);
        match layout.context {
            Context::Gather | Context::Ring => bytes::context_gather(tokens, keys, 2.0, layout.cp),
            Context::Heads => {
                let queries = n(model.heads) / tp * n(model.key_size());
                let keys = kv * n(model.key_size() + model.value_size());
                bytes::context_heads(tokens, queries, keys, 2.0, layout.cp)
            }
        }
    }

    /// How much of the forward pass's context bytes a backward pass brings.
    pub(crate) fn context_backward(&self) -> f64 {
        match self.layout.context {
            Context::Gather | Context::Ring => 2.0,
            Context::Heads => 1.0,
        }
    }

    fn context(&self, passes: &mut Passes, core: f64) {
        let layout = self.layout;
        if layout.cp <= 1 {
            return;
        }
        let group = Group::new(self.machine, layout.tp, layout.cp);
        let forward = self.collective(self.context_bytes(), group);
        let backward = forward * self.context_backward();
        let (f, i) = match layout.context {
            Context::Ring => ((forward - core).max(0.0), (backward - 2.0 * core).max(0.0)),
            _ => (forward, backward),
        };
        passes.f.cp += f;
        passes.i.cp += i;
    }

    /// The embedding.
    pub(crate) fn embedding(&self) -> Passes {
        let mut passes = Passes::default();
        let stream = if self.layout.cuts_stream() {
            n(self.layout.tp)
        } else {
            1.0
        };
        let width = self.layout.tokens() * n(self.model.hidden);
        passes.f.traffic += self.traffic(width * (4.0 + 2.0 / stream));
        passes.w.traffic += self.traffic(width * (2.0 + 2.0 * n(self.layout.gradient_bytes)));
        if self.layout.tp > 1 {
            let u = self.stream();
            passes.f.tp += if self.layout.cuts_stream() {
                u
            } else {
                2.0 * u
            };
            passes.w.tp += if self.layout.cuts_stream() { u } else { 0.0 };
        }
        passes
    }

    /// The last norm, the output product and the loss.
    pub(crate) fn head(&self) -> Passes {
        let mut passes = Passes::default();
        let (tokens, tp) = (self.layout.tokens(), n(self.layout.tp));
        let vocabulary = n(self.model.vocabulary) / tp;
        self.linear(&mut passes, [tokens, n(self.model.hidden), vocabulary], 1.0);
        // Logits become f32, are read for their largest and their sum, and become gradients.
        self.elements(&mut passes, tokens * vocabulary * 12.0);
        let stream = if self.layout.cuts_stream() { tp } else { 1.0 };
        self.elements(&mut passes, tokens * n(self.model.hidden) * 4.0 / stream);
        if self.layout.tp > 1 {
            let u = self.stream();
            let group = Group::new(self.machine, 1, self.layout.tp);
            let loss = bytes::cross_entropy(tokens, self.layout.tp);
            passes.f.tp += self.collective(loss, group);
            if self.layout.cuts_stream() {
                passes.f.tp += u;
            }
            let kept = self.layout.cuts_stream() && !self.layout.regather;
            passes.i.tp += if kept { u } else { 2.0 * u };
        }
        passes
    }
}
