//! Calls of the fused families, which a backend may leave to be composed of others.

use super::{OutputTypes, View};
use smallvec::smallvec;

/// Fused ops over rows: softmax and the norms.
#[derive(Clone, Debug)]
pub struct RowCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[rows, n]`, dense.
    pub input: View,
    /// Of the input's shape and dtype, dense: added to the input before anything else. The sum,
    /// rounded to the dtype, is then a first output, and what is computed is of it.
    pub residual: Option<View>,
    /// What to compute; the output has the shape and dtype of the input.
    pub mode: RowOp,
}

impl RowCall {
    /// What its launch gives: the sum, where there is one, and what was computed.
    pub(super) fn outputs(&self) -> OutputTypes {
        let like = |view: &View| (view.dtype, view.layout.shape.clone());
        (self.residual.iter().chain([&self.input]))
            .map(like)
            .collect()
    }
}

/// See [`RowCall`].
#[derive(Clone, Debug)]
pub enum RowOp {
    /// `exp(x - max) / sum`.
    Softmax,
    /// `x - max - log(sum)`.
    LogSoftmax,
    /// `(x - mean) / sqrt(var + eps) * weight + bias`, or without the mean for RMS norm.
    Norm {
        /// Leave the mean alone.
        rms: bool,
        /// Added under the root.
        eps: f64,
        /// Factors: a dense vector of `groups * channels` elements, of any float dtype.
        weight: Option<View>,
        /// Summands, as many.
        bias: Option<View>,
        /// Row `r`, column `j` uses parameter `(r % groups) * channels + j / inner`.
        groups: usize,
        /// Parameters per row.
        channels: usize,
        /// Neighbouring columns that share a parameter.
        inner: usize,
    },
}

/// `softmax(q k^T * scale) v` with grouped heads: query head `h` reads key head `h / (hq / hk)`.
/// These views are `[batch, heads, length, size]`, any strides. A query that sees no key gives zeros,
/// with a log-sum-exp of minus infinity.
#[derive(Clone, Debug)]
pub struct AttentionCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[b, hq, s, d]`.
    pub q: View,
    /// `[b, hk, t, d]` where `hk` divides `hq`.
    pub k: View,
    /// `[b, hk, t, dv]`.
    pub v: View,
    /// Factor on the scores.
    pub scale: f64,
    /// Query `i` sees keys `0 ..= i + t - s`.
    pub causal: bool,
    /// The document of each query `[b, s]` and of each key `[b, t]`, by number: `i32`, in any order
    /// and of any strides. A query sees keys of its own document.
    pub documents: Option<[View; 2]>,
    /// How results and gradients lie in memory.
    pub order: AttentionOrder,
}

/// How the results and gradients of attention lie in memory: the buffers of a launch are dense in
/// the shapes said here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum AttentionOrder {
    /// A head after the other: `[batch, heads, length, size]`.
    #[default]
    Heads,
    /// The heads of a position next to each other, as products make and take them:
    /// `[batch, length, heads, size]`.
    Positions,
    /// The result as with [`Positions`](Self::Positions), and the three gradients in one buffer
    /// `[batch, length, hq + 2 hk, size]`: at each position the heads of queries, keys and values.
    Packed,
}

impl AttentionOrder {
    /// The order in which the operands of a call lie, so that results can be read as they are: as
    /// [`Packed`](Self::Packed) where one product made all three.
    ///
    /// ```
    /// use anymesh_kernel::{Buffer, DType, Layout, View, backend::AttentionOrder};
    /// let buffer = Buffer::new((), 2 * 8 * 12 * 16 * 2);
    /// let part = |first, heads| View {
    ///     buffer: buffer.clone(),
    ///     dtype: DType::BF16,
    ///     layout: Layout::contiguous([2, 8, 12, 16].into())
    ///         .slice(2, first, 1, heads)
    ///         .permute(&[0, 2, 1, 3]),
    /// };
    /// let (q, k, v) = (part(0, 8), part(8, 2), part(10, 2));
    /// assert_eq!(AttentionOrder::of(&q, &k, &v), AttentionOrder::Packed);
    /// assert_eq!(AttentionOrder::of(&q, &v, &k), AttentionOrder::Positions);
    /// ```
    pub fn of(q: &View, k: &View, v: &View) -> Self {
        let strides = &q.layout.strides;
        if strides[1] >= strides[2] {
            return Self::Heads;
        }
        let (heads, size) = (q.layout.shape[1], q.layout.shape[3]);
        let key_heads = k.layout.shape[1];
        let row = (heads + 2 * key_heads) * size;
        let packed = [row * q.layout.shape[2], size, row, 1].map(|s| s as isize);
        let lies = |view: &View, first: usize| {
            let dims = view.layout.shape.dims();
            view.buffer.same(&q.buffer)
                && view.dtype == q.dtype
                && (dims[2], dims[3]) == (q.layout.shape[2], size)
                && view.layout.offset == q.layout.offset + first * size
                && (dims.iter().zip(&view.layout.strides).zip(packed))
                    .all(|((n, stride), packed)| *n == 1 || *stride == packed)
        };
        if lies(q, 0) && lies(k, heads) && lies(v, heads + key_heads) {
            Self::Packed
        } else {
            Self::Positions
        }
    }
}

/// Gradients of attention from what the forward pass left.
#[derive(Clone, Debug)]
pub struct AttentionBackwardCall {
    /// The forward call.
    pub forward: AttentionCall,
    /// Its result.
    pub out: View,
    /// Its log-sum-exp `[b, hq, s]`, f32 (f64 for f64 inputs).
    pub lse: View,
    /// Gradient of the result.
    pub grad: View,
}

impl AttentionCall {
    /// What it reads.
    pub(super) fn views(&self) -> impl Iterator<Item = &View> {
        [&self.q, &self.k, &self.v]
            .into_iter()
            .chain(self.documents.iter().flatten())
    }

    /// What it reads, to be changed.
    pub(super) fn views_mut(&mut self) -> impl Iterator<Item = &mut View> {
        [&mut self.q, &mut self.k, &mut self.v]
            .into_iter()
            .chain(self.documents.iter_mut().flatten())
    }

    /// What its launch gives: the result and the log-sum-exps.
    pub(super) fn outputs(&self) -> OutputTypes {
        let (dtype, q) = (self.q.dtype, &self.q.layout.shape);
        let (batch, heads, queries, size) = (q[0], q[1], q[2], self.v.layout.shape[3]);
        let out = match self.order {
            AttentionOrder::Heads => [batch, heads, queries, size],
            AttentionOrder::Positions | AttentionOrder::Packed => [batch, queries, heads, size],
        };
        smallvec![
            (dtype, out.into()),
            (dtype.kind().dtype(), [batch, heads, queries].into())
        ]
    }
}

impl AttentionBackwardCall {
    /// What its launch gives: the gradients for queries, keys and values, or one of all.
    pub(super) fn outputs(&self) -> OutputTypes {
        let AttentionCall { q, k, v, order, .. } = &self.forward;
        match order {
            AttentionOrder::Heads => [q, k, v]
                .map(|view| (view.dtype, view.layout.shape.clone()))
                .into_iter()
                .collect(),
            AttentionOrder::Positions => [q, k, v]
                .map(|view| (view.dtype, view.layout.permute(&[0, 2, 1, 3]).shape))
                .into_iter()
                .collect(),
            AttentionOrder::Packed => {
                let shape = &q.layout.shape;
                let heads = shape[1] + 2 * k.layout.shape[1];
                smallvec![(q.dtype, [shape[0], shape[2], heads, shape[3]].into())]
            }
        }
    }
}
