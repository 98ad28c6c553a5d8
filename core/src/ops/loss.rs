//! Losses that compare two or three tensors element by element or vector by vector. See
//! `cross_entropy` for classes.

use super::{
    OpInfo,
    activation::softplus,
    expr::{Args, Expr, check_float, check_same_shape, compute_type},
    similarity::p_norm,
};
use crate::{DType, Error, Result, Tensor, backend::ReduceOp, ledger::on_behalf_of, map::Val};

/// The ops of this file. With a reduction a cut of any dimension leaves a partial sum; without one
/// they are maps.
pub const OPS: &[OpInfo] = &[
    LOSS.named("mse_loss"),
    LOSS.named("l1_loss"),
    LOSS.named("smooth_l1_loss"),
    LOSS.named("huber_loss"),
    LOSS.named("bce_loss"),
    LOSS.named("bce_with_logits_loss"),
    LOSS.named("kl_div_loss"),
    LOSS.named("hinge_loss"),
    LOSS.named("hinge_embedding_loss"),
    LOSS.named("margin_ranking_loss"),
    LOSS.named("cosine_embedding_loss"),
    LOSS.named("triplet_margin_loss"),
    LOSS.named("gaussian_nll_loss"),
    LOSS.named("poisson_nll_loss"),
];

const LOSS: OpInfo = OpInfo::composed("loss", &["map", "reduce", "reshape"]);

/// What becomes of the losses of all positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LossReduction {
    /// One loss for each position.
    None,
    /// Their mean; NaN where there are none.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

impl LossReduction {
    /// Runs an expression that gives the loss of each position.
    #[track_caller]
    pub(crate) fn run(
        self,
        expr: Expr<'_>,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        let shape = expr.shape()?;
        let axes: crate::Dims = (0..shape.rank()).collect();
        let scale = match self {
            LossReduction::Mean => Some(1.0 / shape.numel() as f64),
            _ => None,
        };
        match self {
            LossReduction::None => expr.map(dtype, f),
            _ => expr
                .reduce(&axes, ReduceOp::Sum, scale, dtype, f)?
                .reshape(()),
        }
    }
}

/// A loss over tensors of one shape, in the dtype of the first.
#[track_caller]
fn pointwise<'a>(
    op: &'static str,
    tensors: &[&'a Tensor],
    params: &[f64],
    reduction: LossReduction,
    f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
) -> Result<Tensor> {
    check_float(op, tensors)?;
    check_same_shape(op, tensors)?;
    reduction.run(Expr::new(op, tensors).params(params), tensors[0].dtype(), f)
}

/// Refuses a scalar that is not positive (or negative, where zero is fine).
fn check_positive(op: &'static str, name: &str, value: f64, zero: bool) -> Result<()> {
    let fits = value.is_finite() && (value > 0.0 || (zero && value == 0.0));
    let sign = if zero { "not negative" } else { "positive" };
    if fits {
        Ok(())
    } else {
        Err(Error::Argument {
            op,
            detail: format!("{name} must be finite and {sign}, got {value}"),
        })
    }
}

impl Tensor {
    /// Squared differences.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::loss::LossReduction};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, 2.0], [2], &device)?;
    /// let y = Tensor::from_slice(&[2f32, 5.0], [2], &device)?;
    /// assert_eq!(x.mse_loss(&y, LossReduction::Mean)?.to_vec::<f32>()?, [5.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn mse_loss(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        pointwise("mse_loss", &[self, target], &[], reduction, |a| {
            (a.x[0] - a.x[1]) * (a.x[0] - a.x[1])
        })
    }

    /// Absolute differences.
    #[track_caller]
    pub fn l1_loss(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        pointwise("l1_loss", &[self, target], &[], reduction, |a| {
            (a.x[0] - a.x[1]).abs()
        })
    }

    /// `d^2 / (2 beta)` for absolute differences `d < beta`, else `d - beta / 2`. With `beta` 0 it
    /// is the L1 loss.
    #[track_caller]
    pub fn smooth_l1_loss(
        &self,
        target: &Tensor,
        beta: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        check_positive("smooth_l1_loss", "beta", beta, true)?;
        pointwise("smooth_l1_loss", &[self, target], &[beta], reduction, |a| {
            let (difference, beta) = (a.x[0] - a.x[1], a.p[0]);
            let d = difference.abs();
            d.lt(beta)
                .select(difference * difference * 0.5 / beta, d - beta * 0.5)
        })
    }

    /// `d^2 / 2` for absolute differences `d < delta`, else `delta (d - delta / 2)`.
    #[track_caller]
    pub fn huber_loss(
        &self,
        target: &Tensor,
        delta: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        check_positive("huber_loss", "delta", delta, false)?;
        pointwise("huber_loss", &[self, target], &[delta], reduction, |a| {
            let (difference, delta) = (a.x[0] - a.x[1], a.p[0]);
            let d = difference.abs();
            d.lt(delta)
                .select(difference * difference * 0.5, (d - delta * 0.5) * delta)
        })
    }

    /// Binary cross-entropy of probabilities: `-(t log x + (1 - t) log(1 - x))`, with logarithms
    /// not below -100.
    #[track_caller]
    pub fn bce_loss(&self, target: &Tensor, reduction: LossReduction) -> Result<Tensor> {
        pointwise("bce_loss", &[self, target], &[], reduction, |a| {
            let (x, t) = (a.x[0], a.x[1]);
            (t - 1.0) * (-x).log1p().max(-100.0) - t * x.log().max(-100.0)
        })
    }

    /// Binary cross-entropy of logits, without overflow. `pos_weight` broadcasts and multiplies the
    /// positive part of the loss.
    #[track_caller]
    pub fn bce_with_logits_loss(
        &self,
        target: &Tensor,
        pos_weight: Option<&Tensor>,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "bce_with_logits_loss";
        check_float(op, &[self, target])?;
        check_same_shape(op, &[self, target])?;
        if let Some(weight) = pos_weight {
            check_float(op, &[weight])?;
            if weight.shape().broadcast(op, self.shape())? != *self.shape() {
                return Err(Error::Shape {
                    op,
                    detail: format!(
                        "pos_weight {} does not broadcast to {}",
                        weight.shape(),
                        self.shape()
                    ),
                });
            }
        }
        reduction.run(
            Expr::new(op, &[self, target]).maybe(&[pos_weight]),
            self.dtype(),
            |a| {
                let (x, t) = (a.x[0], a.x[1]);
                let softplus = softplus(-x);
                let weighted =
                    a.maybe[0].map_or(softplus, |weight| softplus * ((weight - 1.0) * t + 1.0));
                (t.lit(1.0) - t) * x + weighted
            },
        )
    }

    /// Kullback-Leibler divergence of log-probabilities from `target`: `t (log t - x)`, 0 where `t`
    /// is 0. With `log_target` the target holds logarithms too. The mean is over all elements; for
    /// a mean over samples divide the sum by their number.
    #[track_caller]
    pub fn kl_div_loss(
        &self,
        target: &Tensor,
        log_target: bool,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        pointwise("kl_div_loss", &[self, target], &[], reduction, |a| {
            let (x, t) = (a.x[0], a.x[1]);
            if log_target {
                t.exp() * (t - x)
            } else {
                t.eq(0.0).select(t.lit(0.0), t * (t.log() - x))
            }
        })
    }

    /// `max(0, margin - t x)` for targets of 1 and -1.
    #[track_caller]
    pub fn hinge_loss(
        &self,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        pointwise("hinge_loss", &[self, target], &[margin], reduction, |a| {
            (a.p[0] - a.x[0] * a.x[1]).max(0.0)
        })
    }

    /// For distances `x`: `x` where the target is 1, `max(0, margin - x)` where it is -1.
    #[track_caller]
    pub fn hinge_embedding_loss(
        &self,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        pointwise(
            "hinge_embedding_loss",
            &[self, target],
            &[margin],
            reduction,
            |a| a.x[1].eq(1.0).select(a.x[0], (a.p[0] - a.x[0]).max(0.0)),
        )
    }

    /// `max(0, margin - t (self - other))`: with target 1 `self` should be the larger, with -1 the
    /// smaller.
    #[track_caller]
    pub fn margin_ranking_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        pointwise(
            "margin_ranking_loss",
            &[self, other, target],
            &[margin],
            reduction,
            |a| (a.p[0] - a.x[2] * (a.x[0] - a.x[1])).max(0.0),
        )
    }

    /// For vectors along the last axis: `1 - cos` where the target is 1, `max(0, cos - margin)`
    /// where it is -1. The target lacks the last axis.
    #[track_caller]
    pub fn cosine_embedding_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "cosine_embedding_loss";
        check_float(op, &[self, other, target])?;
        check_same_shape(op, &[self, other])?;
        let last = self.shape().axis(op, -1)?;
        if target.dims() != &self.dims()[..last] {
            return Err(Error::Shape {
                op,
                detail: format!(
                    "the target for {} must lack its last axis, got {}",
                    self.shape(),
                    target.shape()
                ),
            });
        }
        let _scope = on_behalf_of(op, self);
        let kind = compute_type([self, other]);
        let sum = |x: &Tensor, y: &Tensor| {
            Expr::new(op, &[x, y])
                .reduce(&[last], ReduceOp::Sum, None, kind, |a| a.x[0] * a.x[1])?
                .reshape(target.shape())
        };
        let (dot, left, right) = (sum(self, other)?, sum(self, self)?, sum(other, other)?);
        reduction.run(
            Expr::new(op, &[&dot, &left, &right, target]).params(&[margin, 1e-12]),
            self.dtype(),
            |a| {
                let cos = a.x[0] / ((a.x[1] + a.p[1]) * (a.x[2] + a.p[1])).sqrt();
                a.x[3]
                    .eq(1.0)
                    .select(cos.lit(1.0) - cos, (cos - a.p[0]).max(0.0))
            },
        )
    }

    /// `max(0, |self - positive| - |self - negative| + margin)` for vectors along the last axis,
    /// with `p`-norms of the differences plus 1e-6.
    #[track_caller]
    pub fn triplet_margin_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        margin: f64,
        p: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "triplet_margin_loss";
        check_float(op, &[self, positive, negative])?;
        check_same_shape(op, &[self, positive, negative])?;
        let last = self.shape().axis(op, -1)?;
        let _scope = on_behalf_of(op, self);
        let distance = |to: &Tensor| {
            p_norm(op, Expr::new(op, &[self, to]), last, p, |a| {
                a.x[0] - a.x[1] + 1e-6
            })?
            .reshape(&self.dims()[..last])
        };
        let (near, far) = (distance(positive)?, distance(negative)?);
        reduction.run(
            Expr::new(op, &[&near, &far]).params(&[margin]),
            self.dtype(),
            |a| (a.x[0] - a.x[1] + a.p[0]).max(0.0),
        )
    }

    /// Negative log-likelihood of `target` under normal distributions with these means and
    /// variances (not below `eps`): `(log v + (x - t)^2 / v) / 2`, with `full` also the constant
    /// `log(2 pi) / 2`. The variance broadcasts.
    #[track_caller]
    pub fn gaussian_nll_loss(
        &self,
        target: &Tensor,
        var: &Tensor,
        full: bool,
        eps: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "gaussian_nll_loss";
        check_positive(op, "eps", eps, true)?;
        check_float(op, &[self, target, var])?;
        check_same_shape(op, &[self, target])?;
        if var.shape().broadcast(op, self.shape())? != *self.shape() {
            return Err(Error::Shape {
                op,
                detail: format!(
                    "the variance {} does not broadcast to {}",
                    var.shape(),
                    self.shape()
                ),
            });
        }
        reduction.run(
            Expr::new(op, &[self, target, var]).params(&[eps]),
            self.dtype(),
            |a| {
                let (d, v) = (a.x[0] - a.x[1], a.x[2].max(a.p[0]));
                let loss = (v.log() + d * d / v) * 0.5;
                if full {
                    loss + 0.5 * std::f64::consts::TAU.ln()
                } else {
                    loss
                }
            },
        )
    }

    /// Negative log-likelihood of counts under Poisson distributions with these rates (or their
    /// logarithms, with `log_input`). `full` adds Stirling's approximation of `log t!` for counts
    /// above 1; `eps` keeps the logarithm of a zero rate finite.
    #[track_caller]
    pub fn poisson_nll_loss(
        &self,
        target: &Tensor,
        log_input: bool,
        full: bool,
        eps: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        check_positive("poisson_nll_loss", "eps", eps, true)?;
        pointwise(
            "poisson_nll_loss",
            &[self, target],
            &[eps],
            reduction,
            |a| {
                let (x, t) = (a.x[0], a.x[1]);
                let loss = if log_input {
                    x.exp() - t * x
                } else {
                    x - t * (x + a.p[0]).log()
                };
                let stirling = t * t.log() - t + (t * std::f64::consts::TAU).log() * 0.5;
                if full {
                    loss + t.gt(1.0).select(stirling, t.lit(0.0))
                } else {
                    loss
                }
            },
        )
    }
}
