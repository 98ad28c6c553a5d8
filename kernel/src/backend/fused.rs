//! Calls of the fused families, which a backend may leave to be composed of others.

use super::View;

/// Fused ops over rows: softmax and the norms.
#[derive(Clone, Debug)]
pub struct RowCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[rows, n]`, dense.
    pub input: View,
    /// What to compute; the output has the shape and dtype of the input.
    pub mode: RowOp,
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
/// All views `[batch, heads, length, size]`, any strides. A query that sees no key gives zeros,
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
