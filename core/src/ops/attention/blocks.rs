//! Attention of a rank's queries over a part of the keys at a time.
//!
//! The results of parts are put together by their log-sum-exp: each weighs as much as its share of
//! all exponentials. The gradient needs no such thing: with the log-sum-exp of all parts, what each
//! part adds to the gradients is exact.

use super::{Attention, AttentionOptions, attention_backward, heads::KeyHeads, order::Look};
use crate::{
    Result, Tensor,
    ops::{
        PadMode,
        expr::{Expr, compute_type},
    },
};
use std::ops::Range;

/// What one rank looks with; plain tensors.
pub(super) struct Queries {
    pub(super) op: &'static str,
    /// `[b, hq, s, d]`.
    pub(super) q: Tensor,
    /// `[b, s]`.
    pub(super) documents: Option<Tensor>,
    pub(super) scale: f64,
    /// Which of the rank's key heads they read.
    pub(super) heads: KeyHeads,
}

/// What is looked at: keys and values `[b, hk, t, d]` and their documents `[b, t]`.
#[derive(Clone)]
pub(super) struct Keys {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) documents: Option<Tensor>,
}

/// Some places of a dimension.
fn places(x: &Tensor, dim: usize, range: &Range<usize>) -> Result<Tensor> {
    match *range == (0..x.dims()[dim]) {
        true => Ok(x.clone()),
        false => x.narrow(dim as i64, range.start, range.len()),
    }
}

impl Queries {
    fn options(&self, keys: &Keys, look: &Look) -> Result<AttentionOptions> {
        let documents = match (&self.documents, &keys.documents) {
            (Some(own), Some(theirs)) => Some([
                places(own, 1, &look.queries)?,
                places(theirs, 1, &look.keys)?,
            ]),
            _ => None,
        };
        Ok(AttentionOptions {
            scale: Some(self.scale),
            causal: look.causal,
            mask: None,
            documents,
        })
    }

    fn read(&self, x: &Tensor, look: &Look) -> Result<Tensor> {
        self.heads.of(&places(x, 2, &look.keys)?)
    }

    /// What the queries of a look see.
    pub(super) fn look(&self, keys: &Keys, look: &Look) -> Result<Attention> {
        let q = places(&self.q, 2, &look.queries)?;
        let (k, v) = (self.read(&keys.k, look)?, self.read(&keys.v, look)?);
        q.attention(&k, &v, &self.options(keys, look)?)
    }

    /// What a look adds to the gradients of its queries, of its keys and of its values, from what all
    /// looks together saw.
    pub(super) fn look_back(
        &self,
        keys: &Keys,
        look: &Look,
        forward: &Attention,
        grad: &Tensor,
    ) -> Result<[Tensor; 3]> {
        let own = |x: &Tensor| places(x, 2, &look.queries);
        let forward = Attention {
            out: own(&forward.out)?,
            lse: own(&forward.lse)?,
        };
        let (dq, dk, dv) = attention_backward(
            &own(&self.q)?,
            &self.read(&keys.k, look)?,
            &self.read(&keys.v, look)?,
            &forward,
            &own(grad)?,
            &self.options(keys, look)?,
        )?;
        let wide = compute_type([&self.q]);
        Ok([
            dq.cast(wide)?,
            self.heads.back(&dk)?.cast(wide)?,
            self.heads.back(&dv)?.cast(wide)?,
        ])
    }

    /// What was seen before, with what a look at other keys saw.
    pub(super) fn merged(&self, seen: Attention, new: Attention, look: &Look) -> Result<Attention> {
        let (before, range) = (self.q.dims()[2], &look.queries);
        let old = Attention {
            out: places(&seen.out, 2, range)?,
            lse: places(&seen.lse, 2, range)?,
        };
        let both = together(self.op, &old, &new)?;
        if *range == (0..before) {
            return Ok(both);
        }
        let put = |x: &Tensor, new: &Tensor| put_between(x, new, range);
        Ok(Attention {
            out: put(&seen.out, &both.out)?,
            lse: put(&seen.lse, &both.lse)?,
        })
    }
}

/// A tensor with other places of dimension 2 in a range.
fn put_between(x: &Tensor, new: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    let all = x.dims()[2];
    let before = places(x, 2, &(0..range.start))?;
    let behind = places(x, 2, &(range.end..all))?;
    let pieces: Vec<&Tensor> = [&before, new, &behind]
        .into_iter()
        .filter(|piece| piece.dims()[2] > 0)
        .collect();
    Tensor::concat(&pieces, 2)
}

/// What the same queries see of two lots of keys, each in the dtype that is computed in.
fn together(op: &'static str, a: &Attention, b: &Attention) -> Result<Attention> {
    let wide = a.lse.dtype();
    let lse = Expr::new(op, &[&a.lse, &b.lse]).map(wide, |x| {
        let (high, low) = (x.x[0].max(x.x[1]), x.x[0].min(x.x[1]));
        let both = high + (low - high).exp().log1p();
        // Queries that see nothing of either.
        high.eq(f64::NEG_INFINITY).select(high, both)
    })?;
    let column = |lse: &Tensor| lse.unsqueeze(3);
    let (of_a, of_b, of_both) = (column(&a.lse)?, column(&b.lse)?, column(&lse)?);
    let out = Expr::new(op, &[&a.out, &b.out, &of_a, &of_b, &of_both]).map(wide, |x| {
        let (nothing, both) = (x.x[0].lit(0.0), x.x[4]);
        let share = |n: usize| {
            let (out, lse) = (x.x[n], x.x[n + 2]);
            let share = (lse - both).exp() * out;
            lse.eq(f64::NEG_INFINITY).select(nothing, share)
        };
        share(0) + share(1)
    })?;
    Ok(Attention { out, lse })
}

/// A sum over looks, of which one more is for some places of dimension 2 of so many.
pub(super) fn added(
    sum: Option<Tensor>,
    more: Tensor,
    range: &Range<usize>,
    all: usize,
) -> Result<Tensor> {
    match (sum, *range == (0..all)) {
        (None, true) => Ok(more),
        (Some(sum), true) => sum.add(&more),
        (None, false) => more.pad(
            &[(0, 0), (0, 0), (range.start, all - range.end), (0, 0)],
            PadMode::Constant(0.0.into()),
        ),
        (Some(sum), false) => {
            let new = places(&sum, 2, range)?.add(&more)?;
            put_between(&sum, &new, range)
        }
    }
}
