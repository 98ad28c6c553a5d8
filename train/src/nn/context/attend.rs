//! Three ways to look along a sequence that is cut.

use super::{AXIS, ContextAttention};
use crate::{
    Error, Result,
    nn::{Attend, Heads, attention::attend_whole},
};
use anymesh_core::{
    Tensor,
    ops::{SequenceOptions, SequenceOrder},
};

/// Attention of `[b, heads, s, size]`, whose sequence is cut over `cp` or not in straight order:
/// where the queries lie.
#[track_caller]
pub(crate) fn across([q, k, v]: [&Tensor; 3], heads: Heads, options: &Attend) -> Result<Tensor> {
    let way = options.context.on(q.mesh(), heads)?;
    if way == ContextAttention::Heads && super::is_cut(q, 2) {
        return exchange([q, k, v], options);
    }
    let straight = options.order == SequenceOrder::Straight;
    let whole_scores = options.mask.is_some() || options.dropout.is_some();
    if whole_scores && (way == ContextAttention::Ring || !straight) {
        let (what, key) = match options.dropout {
            Some(_) => ("attention dropout needs", "context.attention"),
            None => ("a mask of one's own is for", "context"),
        };
        let detail = format!(
            "{what} the scores of all pairs in straight order: take the way of heads, or gather without balance"
        );
        return Err(Error::config(key, detail));
    }
    if whole_scores {
        let whole = |x: &Tensor| -> Result<Tensor> {
            let axis = x.mesh().axis(AXIS)?;
            Ok(x.reshard(x.sharding().whole().without(axis))?)
        };
        return attend_whole([q, &whole(k)?, &whole(v)?], options);
    }
    let sequence = SequenceOptions {
        scale: None,
        causal: options.causal,
        order: options.order,
        documents: options.documents.clone(),
    };
    Ok(match way {
        ContextAttention::Ring => q.ring_attention(k, v, &sequence)?,
        _ => q.gathered_attention(k, v, &sequence)?,
    })
}

/// Every rank gets whole sequences of some heads, and gives back what it has seen for its part of
/// all of them.
#[track_caller]
fn exchange([q, k, v]: [&Tensor; 3], options: &Attend) -> Result<Tensor> {
    let (axis, order) = (q.mesh().axis(AXIS)?, options.order);
    let heads = |x: &Tensor| -> Result<Tensor> {
        let cut = x.sharding().whole().without(axis).cut(1, axis);
        Ok(x.reshard(cut)?.from_order(2, order)?)
    };
    let whole = |x: &Option<Tensor>| -> Result<Option<Tensor>> {
        let whole = |x: &Tensor| x.reshard(x.sharding().whole().without(axis));
        Ok(x.as_ref().map(whole).transpose()?)
    };
    if options.mask.is_some() && order != SequenceOrder::Straight {
        let detail = "a mask of one's own is for sequences in straight order: leave out balance";
        return Err(Error::config("context.balance", detail));
    }
    let documents = match whole(&options.documents)? {
        Some(documents) => Some(documents.from_order(1, order)?),
        None => None,
    };
    let straight = Attend {
        mask: whole(&options.mask)?,
        documents,
        order: SequenceOrder::Straight,
        ..options.clone()
    };
    let lies = q.sharding().whole();
    let seen = attend_whole([&heads(q)?, &heads(k)?, &heads(v)?], &straight)?;
    Ok(seen.in_order(2, order)?.reshard(lies)?)
}
