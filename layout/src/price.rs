//! The closed form: what a block costs, from what a product does to operands that are cut.
//!
//! Along the axis `tp` an activation is in one of four [forms](Form). A product `y = x W^T` has three
//! factors, tokens, inputs and outputs; the axis cuts one of them or none, and that says in which
//! forms it takes `x` and `W` and gives `y`, and the same for their gradients:
//!
//! | cut | x | W `[out, in]` | y | dy | dx | dW |
//! |---|---|---|---|---|---|---|
//! | tokens | tokens | whole | tokens | tokens | tokens | partial |
//! | outputs | whole | dim 0 | features | features | partial | dim 0 |
//! | inputs | features | dim 1 | partial | whole | features | dim 1 |
//! | nothing | whole | whole | whole | whole | whole | whole |
//!
//! Bringing a tensor from one form to another costs what a reshard costs. Data-parallel axes cut the
//! tokens of every activation; along `fsdp` parameters are cut and gathered for each use, along `dp`
//! they are whole. Nothing here knows models: Megatron's cuts, Ulysses' exchange of heads and the
//! gathering of weights are what the table gives.

use crate::model::{Block, Matrix};
use anymesh_core::{
    DType,
    cost::{CostModel, Link},
};

/// How an activation lies along `tp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Form {
    Whole,
    /// Cut by tokens.
    Tokens,
    /// Cut by features.
    Features,
    /// A term of a sum on every rank.
    Partial,
}
use Form::{Features, Partial, Tokens, Whole};

/// Which factor of a product `tp` cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Factor {
    Tokens,
    Outputs,
    Inputs,
    Nothing,
}

pub(crate) const FACTORS: [Factor; 4] = [
    Factor::Tokens,
    Factor::Outputs,
    Factor::Inputs,
    Factor::Nothing,
];

/// The dimension of a stored matrix that `tp` cuts: of `[outputs, inputs]`.
pub(crate) type Stored = Option<usize>;

impl Factor {
    /// (x, y) forward.
    fn forward(self) -> (Form, Form) {
        match self {
            Factor::Tokens => (Tokens, Tokens),
            Factor::Outputs => (Whole, Features),
            Factor::Inputs => (Features, Partial),
            Factor::Nothing => (Whole, Whole),
        }
    }

    /// (dy, dx) backward.
    fn backward(self) -> (Form, Form) {
        match self {
            Factor::Tokens => (Tokens, Tokens),
            Factor::Outputs => (Features, Partial),
            Factor::Inputs => (Whole, Features),
            Factor::Nothing => (Whole, Whole),
        }
    }

    /// How the product takes its matrix.
    fn used(self) -> Stored {
        match self {
            Factor::Outputs => Some(0),
            Factor::Inputs => Some(1),
            _ => None,
        }
    }
}

/// One axis of the mesh.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    pub(crate) size: usize,
    pub(crate) wire: Link,
    pub(crate) ring: Link,
}

impl Axis {
    pub(crate) fn of(cost: &CostModel, name: &str, size: usize, apart: usize) -> Self {
        Self {
            size,
            wire: cost.link_of(name, size, apart),
            ring: cost.ring_of(name, size, apart),
        }
    }
}

/// The mesh and the machine of a candidate, with what is the same for all of its blocks.
pub(crate) struct Setting<'a> {
    pub(crate) cost: &'a CostModel,
    pub(crate) dtype: DType,
    pub(crate) width: f64,
    /// Of one data-parallel rank in one micro-batch.
    pub(crate) tokens: f64,
    pub(crate) dp: Axis,
    pub(crate) fsdp: Axis,
    pub(crate) tp: Axis,
    /// [`Whole`] or [`Tokens`].
    pub(crate) stream: Form,
}

/// Bytes that a rank receives along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Received {
    /// Activations and what else goes along `tp`.
    pub tp: f64,
    /// Parameters and their gradients along `fsdp`.
    pub fsdp: f64,
    /// Gradients of parameters along `dp`.
    pub dp: f64,
}

/// What blocks cost a rank: seconds, bytes received, bytes held.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Price {
    /// Kernels, of which `again` would run twice under recompute.
    pub compute: f64,
    /// Of `compute`, the forward pass.
    pub again: f64,
    /// Communication that the next kernel waits for.
    pub exposed: f64,
    /// Of `exposed`, the forward pass.
    pub exposed_again: f64,
    /// Communication for each micro-batch that can run under kernels.
    pub hidden: f64,
    /// The same, once a step.
    pub once: f64,
    /// For each micro-batch, with `dp` once a step.
    pub received: Received,
    /// Of `received.tp`, the forward pass.
    pub received_again: f64,
    /// Elements of parameters held.
    pub parameters: f64,
    /// Bytes of activations that wait for the backward pass.
    pub activations: f64,
    /// Of them, those of the stream at the block's entry.
    pub entry: f64,
    /// Bytes that are held only while the block runs.
    pub working: f64,
}

impl Price {
    /// This, and `count` times another.
    pub(crate) fn plus(mut self, other: &Price, count: f64) -> Price {
        self.compute += count * other.compute;
        self.again += count * other.again;
        self.exposed += count * other.exposed;
        self.exposed_again += count * other.exposed_again;
        self.hidden += count * other.hidden;
        self.once += count * other.once;
        self.received.tp += count * other.received.tp;
        self.received.fsdp += count * other.received.fsdp;
        self.received.dp += count * other.received.dp;
        self.received_again += count * other.received_again;
        self.parameters += count * other.parameters;
        self.activations += count * other.activations;
        self.entry += count * other.entry;
        self.working = self.working.max(other.working);
        self
    }

    /// Seconds of a step.
    pub fn seconds(&self, cost: &CostModel, microbatches: usize, recompute: bool) -> f64 {
        let (compute, exposed) = match recompute {
            true => (self.compute + self.again, self.exposed + self.exposed_again),
            false => (self.compute, self.exposed),
        };
        let m = microbatches as f64;
        m * exposed + cost.overlapped(m * compute, m * self.hidden + self.once)
    }
}

/// How the matrices of a block are stored and used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cuts {
    pub(crate) reads: (Stored, Factor),
    pub(crate) middle: Form,
    pub(crate) writes: (Stored, Factor),
}

impl Setting<'_> {
    fn bytes(&self, elements: f64) -> f64 {
        elements * self.dtype.size() as f64
    }

    /// Bytes received and seconds to bring something from one form to another along `tp`; `None`
    /// where no reshard does it. `bytes` are those of the whole, on the ranks of the group.
    fn bring(&self, from: Form, to: Form, bytes: f64) -> Option<(f64, f64)> {
        let k = self.tp.size as f64;
        let share = bytes * (k - 1.0) / k;
        let (received, hops, link) = match (from, to) {
            _ if self.tp.size == 1 => return Some((0.0, 0.0)),
            (Whole, Whole | Tokens | Features) | (Tokens, Tokens) | (Features, Features) => {
                return Some((0.0, 0.0));
            }
            (Tokens | Features, Whole) => (share, k - 1.0, self.tp.ring),
            (Tokens, Features) | (Features, Tokens) => (share / k, k - 1.0, self.tp.wire),
            (Partial, Whole) => (2.0 * share, 2.0 * (k - 1.0), self.tp.ring),
            (Partial, Tokens | Features) => (share, k - 1.0, self.tp.ring),
            (_, Partial) => return None,
        };
        let seconds = self
            .cost
            .ring_seconds(link, hops as u64, received.round() as u64);
        Some((received, seconds))
    }

    /// A gather or (`rounds` = 2) an all-reduce of so many whole bytes along an axis.
    fn ring(&self, axis: Axis, rounds: f64, bytes: f64) -> (f64, f64) {
        let k = axis.size as f64;
        if axis.size == 1 || bytes == 0.0 {
            return (0.0, 0.0);
        }
        let received = rounds * bytes * (k - 1.0) / k;
        let hops = (rounds * (k - 1.0)) as u64;
        let seconds = self
            .cost
            .ring_seconds(axis.ring, hops, received.round() as u64);
        (received, seconds)
    }

    /// How much of the whole a rank has in a form; `units` may not divide evenly.
    fn share(&self, form: Form, units: usize) -> f64 {
        let t = self.tp.size;
        match form {
            Whole | Partial => 1.0,
            Tokens => 1.0 / t as f64,
            Features => units.div_ceil(t) as f64 / units.max(1) as f64,
        }
    }

    /// What a block costs with its matrices cut in a way; `None` where that makes no sense.
    pub(crate) fn block(&self, block: &Block, cuts: &Cuts) -> Option<Price> {
        let middle = &block.middle;
        let features = middle.units >= self.tp.size;
        if (middle.mixes_tokens && cuts.middle == Tokens) || (cuts.middle == Features && !features)
        {
            return None;
        }
        let mut price = Price::default();
        let stream = self.bytes(self.tokens * self.width);
        let lookup = block.reads.iter().any(|m| m.lookup);
        // The stream in the form that the matrices read; indices are everywhere.
        let (taken, given) = cuts.reads.1.forward();
        let (asked, back) = cuts.reads.1.backward();
        if !lookup {
            self.move_both(
                &mut price,
                (self.stream, taken),
                (back, self.stream),
                stream,
            )?;
        }
        for matrix in &block.reads {
            let result = self.bytes(self.tokens * matrix.outputs as f64);
            // What is looked up goes into the stream as it is.
            let to = if block.writes.is_none() && lookup {
                self.stream
            } else {
                cuts.middle
            };
            self.move_both(&mut price, (given, to), (to, asked), result)?;
            self.matrix(&mut price, block, matrix, cuts.reads)?;
        }
        if let Some(matrix) = &block.writes {
            let (taken, given) = cuts.writes.1.forward();
            let (asked, back) = cuts.writes.1.backward();
            let inner = self.bytes(self.tokens * matrix.inputs as f64);
            self.move_both(&mut price, (cuts.middle, taken), (back, cuts.middle), inner)?;
            self.move_both(
                &mut price,
                (given, self.stream),
                (self.stream, asked),
                stream,
            )?;
            self.matrix(&mut price, block, matrix, cuts.writes)?;
        }
        self.between(&mut price, block, cuts);
        // What waits for the backward pass: the stream, what the matrices read, the middle.
        let whole_stream = stream * self.share(self.stream, 1);
        let read = if lookup {
            0.0
        } else {
            stream * self.share(taken, 1)
        };
        let kept = self.bytes(self.tokens * middle.kept) * self.share(cuts.middle, middle.units);
        price.entry = if lookup { 0.0 } else { whole_stream };
        price.activations = block.kept * whole_stream + read + kept;
        // Results and gradients of the widest product, beside what is kept.
        price.working += kept.max(read);
        Some(price)
    }

    /// A reshard in the forward pass and the one of the gradient in the backward pass.
    fn move_both(
        &self,
        price: &mut Price,
        forward: (Form, Form),
        backward: (Form, Form),
        bytes: f64,
    ) -> Option<()> {
        let (received, seconds) = self.bring(forward.0, forward.1, bytes)?;
        price.received.tp += received;
        price.received_again += received;
        price.exposed += seconds;
        price.exposed_again += seconds;
        let (received, seconds) = self.bring(backward.0, backward.1, bytes)?;
        price.received.tp += received;
        price.exposed += seconds;
        Some(())
    }

    /// The kernels of a product, its matrix on the way from storage and its gradient on the way
    /// back.
    fn matrix(
        &self,
        price: &mut Price,
        block: &Block,
        matrix: &Matrix,
        (stored, factor): (Stored, Factor),
    ) -> Option<()> {
        let t = self.tp.size as f64;
        let sizes = [matrix.outputs, matrix.inputs];
        if [stored, factor.used()]
            .into_iter()
            .flatten()
            .any(|dim| sizes[dim] < self.tp.size)
        {
            return None;
        }
        let uneven = self.share(Features, block.middle.units) * t;
        let part = match factor {
            Factor::Nothing => 1.0,
            Factor::Tokens => 1.0 / t,
            _ => uneven.max(1.0) / t,
        };
        let (tokens, elements) = (self.tokens, matrix.elements());
        let touched = |m: f64, n: f64| self.bytes(m + n);
        if matrix.lookup {
            let rows = tokens * matrix.outputs as f64;
            let seconds = self
                .cost
                .kernel_seconds(self.dtype, 0.0, touched(rows, rows));
            price.compute += 3.0 * seconds;
            price.again += seconds;
        } else {
            let activations = tokens * (matrix.inputs + matrix.outputs) as f64;
            let seconds = self.cost.kernel_seconds(
                self.dtype,
                2.0 * tokens * elements * part,
                touched(activations * part, elements * part),
            );
            price.compute += 3.0 * seconds;
            price.again += seconds;
        }
        let bytes = self.bytes(elements);
        let form = |dim: Stored| match dim {
            Some(0) => Features,
            Some(_) => Tokens,
            None => Whole,
        };
        // Dimensions of a matrix are two ways of being cut, as tokens and features are.
        let (lies, used) = (form(stored), form(factor.used()));
        let gradient = match factor {
            Factor::Tokens => Partial,
            _ => used,
        };
        // Forward, backward, gradient.
        for (from, to) in [(lies, used), (lies, used), (gradient, lies)] {
            let (received, seconds) = self.bring(from, to, bytes)?;
            price.received.tp += received;
            price.exposed += seconds;
        }
        // Along the data-parallel axes it is what a rank of tp has of it.
        let cut = |dim: Stored| dim.map_or(1.0, |_| 1.0 / t);
        let (whole, held) = (bytes * cut(factor.used()), elements * cut(stored));
        let (gathers, seconds) = self.ring(self.fsdp, 1.0, whole);
        price.received.fsdp += 3.0 * gathers;
        price.hidden += 3.0 * seconds;
        let (received, seconds) = self.ring(self.dp, 2.0, self.bytes(held) / self.fsdp.size as f64);
        price.received.dp += received;
        price.once += seconds;
        price.parameters += held / self.fsdp.size as f64;
        if self.fsdp.size > 1 {
            // The gathered matrix, the next one, and a whole gradient.
            price.working += 3.0 * whole;
        }
        Some(())
    }

    /// Elementwise kernels, products of the middle, statistics and small parameters.
    fn between(&self, price: &mut Price, block: &Block, cuts: &Cuts) {
        let middle = &block.middle;
        let share = self.share(cuts.middle, middle.units);
        let on_stream = block.touched * self.width * self.share(self.stream, 1);
        let touched = self.bytes(self.tokens * (on_stream + middle.touched * share));
        let products = self.tokens * middle.products * share;
        let elementwise = self.cost.kernel_seconds(self.dtype, 0.0, touched);
        let inside = if products > 0.0 {
            self.cost.kernel_seconds(self.dtype, products, 0.0)
        } else {
            0.0
        };
        price.compute += elementwise + 3.5 * inside;
        price.again += elementwise / 3.0 + inside;
        if cuts.middle == Features && middle.statistics > 0.0 {
            let (received, seconds) =
                self.ring(self.tp, 2.0, self.tokens * middle.statistics * 4.0);
            price.received.tp += received;
            price.received_again += received;
            price.exposed += seconds;
            price.exposed_again += seconds;
        }
        for (_, elements) in &block.vectors {
            let bytes = self.bytes(*elements as f64);
            // Their gradients are sums over tokens; a gradient of the stream that is partial is cut by
            // tokens on its way.
            if self.stream == Tokens || cuts.reads.1.backward().1 == Partial {
                let (received, seconds) = self.ring(self.tp, 2.0, bytes);
                price.received.tp += received;
                price.exposed += seconds;
            }
            let (received, seconds) = self.ring(self.fsdp, 2.0, bytes);
            price.received.fsdp += received;
            price.once += seconds;
            let (received, seconds) = self.ring(self.dp, 2.0, bytes);
            price.received.dp += received;
            price.once += seconds;
            price.parameters += *elements as f64;
        }
    }
}
