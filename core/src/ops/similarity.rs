//! Vectors along an axis: their length, their direction, and the angle between them.

use super::{
    OpInfo,
    expr::{Args, Expr, check_eps, check_float, check_same_shape, compute_type},
};
use crate::{Error, Result, Tensor, backend::ReduceOp, ledger::on_behalf_of, map::Val};

/// The ops of this file, which are reductions and maps: a cut of the axis lets only sums cross.
pub const OPS: &[OpInfo] = &[
    OpInfo::composed("normalize", &["map", "reduce"]),
    OpInfo::composed("cosine_similarity", &["map", "reduce", "squeeze"]),
];

/// `(sum |v|^p)^(1/p)` along `axis` (which stays, of size 1), in the compute dtype. `p` is
/// positive; infinity gives the largest `|v|`.
#[track_caller]
pub(crate) fn p_norm(
    op: &'static str,
    expr: Expr<'_>,
    axis: usize,
    p: f64,
    value: impl for<'b> Fn(&Args<'b>) -> Val<'b>,
) -> Result<Tensor> {
    if p.is_nan() || p <= 0.0 {
        return Err(Error::Argument {
            op,
            detail: format!("the order of a norm must be positive, got {p}"),
        });
    }
    let kind = expr.compute_type();
    if p == f64::INFINITY {
        return expr.reduce(&[axis], ReduceOp::Max, None, kind, |a| value(a).abs());
    }
    if p == 1.0 {
        return expr.reduce(&[axis], ReduceOp::Sum, None, kind, |a| value(a).abs());
    }
    if p == 2.0 {
        let squares = expr.reduce(&[axis], ReduceOp::Sum, None, kind, |a| value(a) * value(a))?;
        return Expr::new(op, &[&squares]).map(kind, |a| unless_zero(a.x[0], a.x[0].sqrt()));
    }
    let powers = expr
        .params(&[p])
        .reduce(&[axis], ReduceOp::Sum, None, kind, |a| {
            unless_zero(value(a), value(a).abs().pow(a.p[0]))
        })?;
    Expr::new(op, &[&powers])
        .params(&[1.0 / p])
        .map(kind, |a| unless_zero(a.x[0], a.x[0].pow(a.p[0])))
}

/// Zero where `x` is, with a slope of zero: a vector of zeros has no direction to grow in, and an
/// infinite slope would make NaN of it.
pub(super) fn unless_zero<'b>(x: Val<'b>, y: Val<'b>) -> Val<'b> {
    x.eq(0.0).select(y.lit(0.0), y)
}

impl Tensor {
    /// Vectors along `axis` divided by their `p`-norm, or by `eps` where that is larger.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[3f32, 4.0, 0.0, 0.0], [2, 2], &device)?;
    /// assert_eq!(x.normalize(2.0, -1, 1e-12)?.to_vec::<f32>()?, [0.6, 0.8, 0.0, 0.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn normalize(&self, p: f64, axis: i64, eps: f64) -> Result<Tensor> {
        let op = "normalize";
        check_float(op, &[self])?;
        check_eps(op, eps)?;
        let axis = self.shape().axis(op, axis)?;
        if self.numel() == 0 {
            return Ok(self.clone());
        }
        let norm = p_norm(op, Expr::new(op, &[self]), axis, p, |a| a.x[0])?;
        Expr::new(op, &[self, &norm])
            .params(&[eps])
            .map(self.dtype(), |a| a.x[0] / a.x[1].max(a.p[0]))
    }

    /// The cosine of the angle between vectors along `axis`, each norm not below `eps`.
    #[track_caller]
    pub fn cosine_similarity(&self, other: &Tensor, axis: i64, eps: f64) -> Result<Tensor> {
        let op = "cosine_similarity";
        check_float(op, &[self, other])?;
        check_same_shape(op, &[self, other])?;
        check_eps(op, eps)?;
        let axis = self.shape().axis(op, axis)?;
        let _scope = on_behalf_of(op, self);
        let kind = compute_type([self, other]);
        let sum = |x: &Tensor, y: &Tensor| {
            Expr::new(op, &[x, y]).reduce(&[axis], ReduceOp::Sum, None, kind, |a| a.x[0] * a.x[1])
        };
        let (dot, left, right) = (sum(self, other)?, sum(self, self)?, sum(other, other)?);
        let out = Expr::new(op, &[&dot, &left, &right]).params(&[eps]);
        out.map(self.dtype(), |a| {
            a.x[0] / (a.x[1].sqrt().max(a.p[0]) * a.x[2].sqrt().max(a.p[0]))
        })?
        .squeeze(&[axis as i64])
    }
}
