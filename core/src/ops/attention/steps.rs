//! Attention and its gradient as matrix products, a reduction and maps.

use super::{Attention, AttentionOptions, Sizes};
use crate::{
    Kind, Result, Tensor,
    backend::{Affine, ReduceOp},
    ops::{
        expr::{Expr, compute_type},
        sum_to,
    },
};
use smallvec::smallvec;

impl Sizes {
    /// The shape of the scores with the heads taken apart.
    pub(super) fn score_shape(&self) -> [usize; 5] {
        [self.batch, self.key_heads, self.group(), self.s, self.t]
    }

    /// A tensor `[b, hq, s, x]` with the queries of a group as one long run, which is one matrix
    /// product per key head.
    pub(super) fn fold(&self, x: &Tensor) -> Result<Tensor> {
        x.reshape([
            self.batch,
            self.key_heads,
            self.group() * self.s,
            x.dims()[3],
        ])
    }

    /// `a b^T` per key head.
    pub(super) fn products(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.fold(a)?
            .matmul_as(&b.transpose(2, 3)?, compute_type([a]))?
            .reshape(self.score_shape())
    }

    /// The factor on `b` of a product `scores b`.
    pub(super) fn folded_scores(&self, scores: &Tensor) -> Result<Tensor> {
        scores.reshape([self.batch, self.key_heads, self.group() * self.s, self.t])
    }

    /// The scaled scores, minus infinity where the key is not seen.
    pub(super) fn scores(
        &self,
        q: &Tensor,
        k: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let products = self.products(q, k)?;
        let spread = |mask: &Tensor| {
            mask.expand([self.batch, self.heads, self.s, self.t])?
                .reshape(self.score_shape())
        };
        let mask = options.mask.as_ref().map(spread).transpose()?;
        let (of_queries, of_keys) = match &options.documents {
            Some([queries, keys]) => (
                Some(queries.reshape([self.batch, 1, 1, self.s, 1])?),
                Some(keys.reshape([self.batch, 1, 1, 1, self.t])?),
            ),
            None => (None, None),
        };
        let expr = Expr::new(self.op, &[&products])
            .maybe(&[mask.as_ref(), of_queries.as_ref(), of_keys.as_ref()])
            .params(&[self.scale]);
        let behind = Affine {
            offset: self.t as i64 - self.s as i64,
            strides: smallvec![0, 0, 0, 1, -1],
        };
        let expr = if options.causal {
            expr.index(behind)
        } else {
            expr
        };
        expr.map(products.dtype(), |a| {
            let score = a.x[0] * a.p[0];
            let hidden = score.lit(f64::NEG_INFINITY);
            let score = match a.maybe[0] {
                Some(mask) if mask.kind() == Kind::Bool => mask.select(score, hidden),
                Some(mask) => score + mask,
                None => score,
            };
            let score = match (a.maybe[1], a.maybe[2]) {
                (Some(query), Some(key)) => query.eq(key).select(score, hidden),
                _ => score,
            };
            a.i.first()
                .map_or(score, |behind| behind.ge(0).select(score, hidden))
        })
    }

    /// `exp(score - lse)`; zero for queries that see nothing, whose scores and log-sum-exp are minus
    /// infinity and are not subtracted from each other.
    pub(super) fn probabilities(&self, scores: &Tensor, lse: &Tensor) -> Result<Tensor> {
        Expr::new(self.op, &[scores, lse]).map(scores.dtype(), |a| {
            let lse = a.x[1];
            let shift = lse.eq(f64::NEG_INFINITY).select(lse.lit(0.0), lse);
            (a.x[0] - shift).exp()
        })
    }

    pub(super) fn forward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Attention> {
        let kind = compute_type([q]);
        let scores = self.scores(q, k, options)?;
        let lse =
            Expr::new(self.op, &[&scores])
                .reduce(&[4], ReduceOp::LogSumExp, None, kind, |a| a.x[0])?;
        let p = self.folded_scores(&self.probabilities(&scores, &lse)?)?;
        let out = p
            .matmul_as(&v.cast(kind)?, q.dtype())?
            .reshape([self.batch, self.heads, self.s, self.dv])?;
        Ok(Attention {
            out,
            lse: lse.reshape([self.batch, self.heads, self.s])?,
        })
    }

    pub(super) fn backward(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        forward: &Attention,
        grad: &Tensor,
        options: &AttentionOptions,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        Ok(self
            .gradients([q, k, v], forward, grad, None, options, None)?
            .0)
    }

    /// The gradients of queries, keys and values, where the log-sum-exp may have a gradient of its
    /// own, and that of a mask that was added.
    pub(super) fn gradients(
        &self,
        [q, k, v]: [&Tensor; 3],
        forward: &Attention,
        grad: &Tensor,
        of_lse: Option<&Tensor>,
        options: &AttentionOptions,
        mask: Option<&Tensor>,
    ) -> Result<((Tensor, Tensor, Tensor), Option<Tensor>)> {
        let kind = compute_type([q]);
        let [b, h, g, s, t] = self.score_shape();
        let (q, k, v, grad) = (
            q.cast(kind)?,
            k.cast(kind)?,
            v.cast(kind)?,
            grad.cast(kind)?,
        );
        let p = self.probabilities(
            &self.scores(&q, &k, options)?,
            &forward.lse.reshape([b, h, g, s, 1])?,
        )?;
        let inner = Expr::new(self.op, &[&grad, &forward.out])
            .reduce(&[3], ReduceOp::Sum, None, kind, |a| a.x[0] * a.x[1])?
            .reshape([b, h, g, s, 1])?;
        let of_lse = of_lse.map(|g| g.reshape(inner.shape())).transpose()?;
        let dp = self.products(&grad, &v)?;
        let ds = |scale: f64| {
            Expr::new(self.op, &[&p, &dp, &inner])
                .maybe(&[of_lse.as_ref()])
                .params(&[scale])
                .map(kind, |a| {
                    let change = a.x[1] - a.x[2];
                    a.x[0] * a.maybe[0].map_or(change, |lse| change + lse) * a.p[0]
                })
        };
        let of_mask = |mask: &Tensor| {
            sum_to(self.op, &ds(1.0)?.reshape([b, h * g, s, t])?, mask.shape())?.cast(mask.dtype())
        };
        let of_mask = mask.map(of_mask).transpose()?;
        let (p, ds) = (
            self.folded_scores(&p)?,
            self.folded_scores(&ds(self.scale)?)?,
        );
        let dtype = forward.out.dtype();
        let dq = ds
            .matmul_as(&k, dtype)?
            .reshape([self.batch, self.heads, self.s, self.d])?;
        let dk = ds.transpose(2, 3)?.matmul_as(&self.fold(&q)?, dtype)?;
        let dv = p.transpose(2, 3)?.matmul_as(&self.fold(&grad)?, dtype)?;
        Ok(((dq, dk, dv), of_mask))
    }
}
