//! Bytes that a rank receives: the closed forms of collectives and of what a layer exchanges.
//!
//! `whole` and `local` are bytes of a value, `n` ranks of a group. All are exact for whole numbers.
//!
//! ```
//! use anymesh_simulate::bytes;
//! // The residual stream of 4096 tokens of width 8192 in bf16 over 8 ranks.
//! let u = bytes::gather(4096.0 * 8192.0 * 2.0, 8);
//! assert_eq!(u, 58_720_256.0);
//! assert_eq!(bytes::tensor_layer(u, false, false), 8.0 * u);
//! ```

/// An all-gather to, or a reduce-scatter of, `whole` bytes.
pub fn gather(whole: f64, n: usize) -> f64 {
    whole * (n as f64 - 1.0) / n as f64
}

/// A ring all-reduce of `whole` bytes.
pub fn reduce(whole: f64, n: usize) -> f64 {
    2.0 * gather(whole, n)
}

/// An all-to-all of `local` bytes of each rank.
pub fn exchange(local: f64, n: usize) -> f64 {
    gather(local, n)
}

/// What a layer of a tensor parallel model exchanges in a forward and a backward pass, where one
/// gather of the residual stream is `u`: four all-reduces, or as many pairs of gathers and
/// reduce-scatters, with two gathers more where inputs are gathered again (`regather`); and the
/// forward pass's once more if the layer is computed again.
pub fn tensor_layer(u: f64, regather: bool, again: bool) -> f64 {
    let regather = if regather { 2.0 } else { 0.0 };
    let repeat = if again { 4.0 } else { 0.0 };
    (8.0 + regather + repeat) * u
}

/// The loss over a vocabulary that `n` ranks share: the largest, the target's and the sum, of each
/// token in f32.
pub fn cross_entropy(tokens: f64, n: usize) -> f64 {
    3.0 * reduce(tokens * 4.0, n)
}

/// A layer's parameters gathered for the forward and for the backward pass, and its gradients
/// scattered (ZeRO 3).
pub fn sharded_layer(parameters: f64, bytes: f64, gradient_bytes: f64, n: usize) -> f64 {
    2.0 * gather(parameters * bytes, n) + gather(parameters * gradient_bytes, n)
}

/// Keys and values of `tokens` of a whole sequence, `width` elements in both together, over `n`
/// context parallel ranks, in a forward pass.
pub fn context_gather(tokens: f64, width: f64, bytes: f64, n: usize) -> f64 {
    gather(tokens * width * bytes, n)
}

/// Heads exchanged for sequence, in a forward pass: queries, keys and values there, results back.
pub fn context_heads(tokens: f64, queries: f64, width: f64, bytes: f64, n: usize) -> f64 {
    gather(tokens * (2.0 * queries + width) * bytes / n as f64, n)
}

/// Tokens sent to `chosen` experts each, or their results sent back.
pub fn dispatch(tokens: f64, chosen: usize, hidden: f64, bytes: f64, n: usize) -> f64 {
    exchange(tokens * chosen as f64 * hidden * bytes, n)
}

/// A micro-batch at the border of two stages; `parts` tensor parallel ranks send a part each.
pub fn border(tokens: f64, hidden: f64, bytes: f64, parts: usize) -> f64 {
    tokens * hidden * bytes / parts as f64
}
