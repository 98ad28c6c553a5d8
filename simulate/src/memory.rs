//! Bytes that a rank holds: parameters and optimizer, and what a layer keeps for its backward pass.

use crate::{Layout, Model, Recompute, layout::Attention};

/// Parameters, gradients and optimizer state of so many parameters over `n` ranks that have the same
/// ones: 2 bytes, `gradient_bytes`, and 12 bytes for each (Adam with f32 masters).
///
/// ```
/// use anymesh_simulate::state;
/// // ZeRO's own example: 7.5B parameters on 64 ranks.
/// let gb = |zero| (state(7.5e9, zero, 64, 2).iter().sum::<f64>() / 1e8).round() / 10.0;
/// assert_eq!([gb(0), gb(1), gb(2), gb(3)], [120.0, 31.4, 16.6, 1.9]);
/// ```
pub fn state(parameters: f64, zero: u8, n: usize, gradient_bytes: usize) -> [f64; 3] {
    let over = |stage: u8| if zero >= stage { n as f64 } else { 1.0 };
    [
        2.0 * parameters / over(3),
        gradient_bytes as f64 * parameters / over(2),
        12.0 * parameters / over(1),
    ]
}

/// What a layer keeps of a micro-batch, in bytes of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Kept {
    /// From its forward to its backward pass.
    pub kept: f64,
    /// Besides, while its backward pass runs: what is computed again.
    pub again: f64,
}

/// What a layer keeps of a micro-batch. For GPT these are the forms of arXiv 2205.05198 table 2; for
/// gates, shared keys, latent vectors and experts the saved tensors are counted the same way.
///
/// ```
/// use anymesh_simulate::{Attention, Layout, kept, preset};
/// let model = preset("gpt-22b")?.model;
/// let layout = Layout { tp: 8, micro: 4, attention: Attention::Plain, sequence_parallel: false, ..Layout::default() };
/// let sbh = 2048.0 * 4.0 * 6144.0;
/// let table = sbh * (10.0 + 24.0 / 8.0 + 5.0 * 64.0 * 2048.0 / (6144.0 * 8.0));
/// assert!((kept(&model, &layout, 0).kept - table).abs() < 1.0);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
pub fn kept(model: &Model, layout: &Layout, layer: usize) -> Kept {
    let n = |x: usize| x as f64;
    let (tokens, tp) = (layout.tokens(), n(layout.tp));
    let stream = if layout.cuts_stream() { tp } else { 1.0 };
    let h = n(model.hidden);
    let dropout = if model.dropout { 1.0 } else { 0.0 };
    // Inputs of two norms and of two groups of products, and two masks of a byte.
    let inputs = if layout.regather { stream } else { 1.0 };
    let mut each = (4.0 * h + 2.0 * h * dropout) / stream + 4.0 * h / inputs;
    // Queries, keys, values, and what the last product of attention reads.
    let heads = n(model.heads) / tp;
    let kv = match &model.latent {
        Some(l) => {
            each += 2.0 * n(l.queries + l.keys + l.rotated) / stream;
            heads
        }
        None => (n(model.kv_heads) / tp).max(1.0),
    };
    each += 2.0 * heads * n(model.key_size() + model.value_size());
    each += 2.0 * kv * n(model.key_size() + model.value_size());
    let squares = match layout.attention {
        // Probabilities, their mask, and what is left of them.
        Attention::Plain => n(model.heads) / tp * n(layout.sequence) * (2.0 + 3.0 * dropout),
        Attention::Flash => 0.0,
    };
    if layout.attention == Attention::Flash {
        // The logarithm of the sum of exponentials, of each head.
        each += 4.0 * heads;
    }
    // Inputs of the activation, and of the last product.
    let block = 2.0 * n(model.matrices()) / tp;
    each += match model.experts.as_ref().filter(|_| model.has_experts(layer)) {
        Some(e) => {
            let rows = n(e.top_k);
            // Rows that came for this rank's experts, and scores of the router.
            let inputs = rows * 2.0 * h / stream + 4.0 * n(e.routed) / stream;
            inputs + block * n(e.width) * (rows + n(e.shared))
        }
        None => block * n(model.ffn),
    };
    let input = 2.0 * h / stream;
    let (kept, again) = match layout.recompute {
        Recompute::None => (each + squares, 0.0),
        Recompute::Selective => (each, squares),
        Recompute::Full => (input, each + squares),
    };
    Kept {
        kept: tokens * kept,
        again: tokens * again,
    }
}

/// What the embedding keeps of a micro-batch: the mask of its dropout.
pub(crate) fn embedding_kept(model: &Model, layout: &Layout) -> f64 {
    let stream = if layout.cuts_stream() { layout.tp } else { 1 };
    match model.dropout {
        true => layout.tokens() * model.hidden as f64 / stream as f64,
        false => 0.0,
    }
}

/// What the last norm, the output product and the loss keep of a micro-batch: two inputs, and logits in
/// f32. With sequence parallel 4sbh/t (1 + v/h).
pub(crate) fn head_kept(model: &Model, layout: &Layout) -> f64 {
    let stream = if layout.cuts_stream() { layout.tp } else { 1 } as f64;
    let inputs = if layout.regather { stream } else { 1.0 };
    let inputs = model.hidden as f64 * (2.0 / stream + 2.0 / inputs);
    layout.tokens() * (inputs + 4.0 * model.vocabulary as f64 / layout.tp as f64)
}
