//! What one rank does with the tokens that came to it.

use anymesh_core::{
    DType, Result, Tensor,
    ops::{Order, Side},
};

/// The share of one rank.
pub(super) struct Share {
    /// The first of its experts.
    pub(super) first: usize,
    /// How many pairs of a token and one of these experts there are, at most.
    pub(super) pairs: usize,
}

/// The stacks of some experts, `[experts, inner, width]` twice and `[experts, width, inner]`.
pub(super) struct Stacks<'a> {
    pub(super) gate: &'a Tensor,
    pub(super) up: &'a Tensor,
    pub(super) down: &'a Tensor,
}

/// What the experts of this rank make of tokens `[n, width]`, weighed and added up for each token.
/// `chosen` are the experts of each, `[n, top_k]`, those of other ranks and numbers below 0 among
/// them, and `weights` are of the same shape.
///
/// Pairs are put in the order of experts, and within one in the order of tokens: so that each expert
/// has its tokens together, sums are in the order of experts, and the same tokens always lie the
/// same way.
pub(super) fn through(
    share: &Share,
    x: &Tensor,
    chosen: &Tensor,
    weights: &Tensor,
    stacks: &Stacks<'_>,
) -> Result<Tensor> {
    let (n, width) = (x.dims()[0], x.dims()[1]);
    let (top_k, experts) = (chosen.dims()[1], stacks.gate.dims()[0]);
    let pairs = share.pairs.min(n * top_k);
    let nothing = Tensor::zeros([n, width], x.dtype(), x)?;
    if pairs == 0 || experts == 0 {
        return Ok(nothing);
    }
    let first = share.first as i64;
    let chosen = chosen.reshape([n * top_k])?.sub(first)?;
    let mine = chosen.ge(0)?.logical_and(&chosen.lt(experts as i64)?)?;
    // Those of others go behind the last expert.
    let chosen = mine.where_(&chosen, experts as i64)?;
    let (sorted, order) = chosen.sort(0, Order::Ascending)?;
    let next = Tensor::arange(1, experts as i64 + 1, 1, DType::I32, x)?;
    let ends = sorted.searchsorted(&next, Side::Left)?;
    let order = order.narrow(0, 0, pairs)?;
    let token = order.floor_div(top_k as i64)?;

    let rows = x.index_select(0, &token)?;
    let product = |x: &Tensor, w: &Tensor| x.grouped_matmul(&w.transpose(1, 2)?, &ends);
    let inner = product(&rows, stacks.gate)?.swiglu2(&product(&rows, stacks.up)?)?;
    let out = product(&inner, stacks.down)?;
    let weights = weights.reshape([n * top_k])?.index_select(0, &order)?;
    let out = out.mul(&weights.cast(out.dtype())?.unsqueeze(1)?)?;
    nothing.index_add(0, &token, &out)
}
