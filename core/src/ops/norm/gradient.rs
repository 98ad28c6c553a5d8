//! The gradient of every norm.

use super::{mean, variance};
use crate::{
    Dims, Result, Tensor,
    backend::ReduceOp,
    grad::{Back, Pulled},
    map::Val,
    ops::broadcast_axes,
    ops::expr::{Args, Expr, compute_type},
    spmd::{settled, without_partials},
};

/// What the gradient of a norm needs.
pub(super) struct ForBackward {
    pub(super) op: &'static str,
    pub(super) x: Tensor,
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
    /// What is normalised over, of the shape that [`pull`](Self::pull) sees.
    pub(super) axes: Dims,
    pub(super) rms: bool,
    pub(super) eps: f64,
    /// How many of the first operands were added up to the input; each has its gradient.
    pub(super) summands: usize,
}

impl ForBackward {
    pub(super) fn new(
        op: &'static str,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        axes: Dims,
        rms: bool,
        eps: f64,
    ) -> Self {
        // Of the bias only shape and dtype matter.
        Self {
            op,
            x: x.kept(),
            weight: weight.cloned(),
            bias: bias.cloned(),
            axes,
            rms,
            eps,
            summands: 1,
        }
    }

    /// Whether the gradient of the input is wanted.
    pub(super) fn needs_input(&self, b: &Back<'_>) -> bool {
        (0..self.summands).any(|i| b.needs(i))
    }

    /// The gradients of the input and the parameters, each in the shape of the tensor that was
    /// kept, from the gradient of the output. The input and parameters are given in a shape in
    /// which they broadcast. Statistics are computed again where they are not given; they may have
    /// gradients of their own.
    ///
    /// With `h = (x - mean) r`, `r = 1 / sqrt(var + eps)` and means over what is normalised
    /// together, the input's gradient is `r (g w - mean(g w) - h mean(g w h))`: one row program, or
    /// two reductions, a map of a few numbers and a map of all.
    #[track_caller]
    pub(super) fn pull(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        g: &Tensor,
        statistics: Option<[Tensor; 2]>,
        [of_mean, of_var]: [Option<Tensor>; 2],
    ) -> Result<Pulled> {
        let (op, axes, kind) = (self.op, &self.axes, compute_type([x]));
        let n: usize = axes.iter().map(|d| x.dims()[*d]).product();
        let g = &settled(op, &g.reshape(x.shape())?, x, axes)?;
        if statistics.is_none()
            && of_mean.is_none()
            && of_var.is_none()
            && let Some(pulled) = self.fused(b, x, [weight, bias], g, None)?
        {
            return Ok(pulled);
        }
        let (center, var) = match statistics {
            Some([center, var]) => (Some(center), var),
            None => {
                let center = if self.rms {
                    None
                } else {
                    Some(mean(op, x, axes, n)?)
                };
                let var = variance(op, x, center.as_ref(), axes, n)?;
                (center, var)
            }
        };
        let root = Expr::new(op, &[&var])
            .params(&[self.eps])
            .map(kind, |a| (a.x[0] + a.p[0]).rsqrt())?;
        let mut pulled = Pulled::new();
        let input = || {
            let scale = Some(1.0 / n as f64);
            // The share of g w in the direction of h, and its mean where the mean was taken off.
            let along = Expr::new(op, &[g, x, &root]).maybe(&[center.as_ref(), weight]);
            let along = without_partials(along.reduce(axes, ReduceOp::Sum, scale, kind, |a| {
                a.maybe[1].map_or(a.x[0], |weight| a.x[0] * weight) * direction(a)
            })?)?;
            let slope = Expr::new(op, &[&root, &along])
                .maybe(&[of_var.as_ref()])
                .params(&[2.0 / n as f64]);
            let slope = slope.map(kind, |a| {
                let slope = a.x[0] * a.x[0] * a.x[1];
                a.maybe[0].map_or(slope, |var| slope - var * a.p[0])
            })?;
            let level = match &center {
                None => None,
                Some(center) => {
                    let level = Expr::new(op, &[g]).maybe(&[weight]);
                    let level =
                        without_partials(level.reduce(axes, ReduceOp::Sum, scale, kind, |a| {
                            a.maybe[0].map_or(a.x[0], |weight| a.x[0] * weight)
                        })?)?;
                    let level = Expr::new(op, &[&root, &level, &slope, center])
                        .maybe(&[of_mean.as_ref()])
                        .params(&[1.0 / n as f64]);
                    Some(level.map(kind, |a| {
                        let level = a.x[0] * a.x[1] - a.x[2] * a.x[3];
                        a.maybe[0].map_or(level, |mean| level - mean * a.p[0])
                    })?)
                }
            };
            let out = Expr::new(op, &[g, x, &root, &slope]).maybe(&[level.as_ref(), weight]);
            let out = out.map(x.dtype(), |a| {
                let g = a.maybe[1].map_or(a.x[0], |weight| a.x[0] * weight);
                let line = a.x[1] * a.x[3];
                g * a.x[2] - a.maybe[0].map_or(line, |level| line + level)
            })?;
            out.reshape(self.x.shape())
        };
        pulled.push(self.needs_input(b).then(input).transpose()?);
        if let (Some(kept), Some(weight)) = (&self.weight, weight) {
            pulled.push(b.wanted(self.summands, || {
                let terms = Expr::new(op, &[g, x, &root]).maybe(&[center.as_ref()]);
                sum_like(weight, x, terms, |a| a.x[0] * direction(a))?.reshape(kept.shape())
            })?);
        }
        if let (Some(kept), Some(bias)) = (&self.bias, bias) {
            let operand = self.summands - 1 + pulled.len();
            pulled.push(b.wanted(operand, || {
                sum_like(bias, x, Expr::new(op, &[g]), |a| a.x[0])?.reshape(kept.shape())
            })?);
        }
        Ok(pulled)
    }
}

/// The normalised input `(x - mean) r`, of a gradient, the input and `r`.
fn direction<'b>(a: &Args<'b>) -> Val<'b> {
    a.maybe[0].map_or(a.x[1], |mean| a.x[1] - mean) * a.x[2]
}

/// What an expression of the shape of `x` gives, summed to the shape of a parameter that broadcasts
/// to it.
#[track_caller]
fn sum_like(
    parameter: &Tensor,
    x: &Tensor,
    expr: Expr<'_>,
    f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
) -> Result<Tensor> {
    let axes = broadcast_axes(parameter.shape(), x.shape());
    if axes.is_empty() {
        expr.map(parameter.dtype(), f)
    } else {
        expr.reduce(&axes, ReduceOp::Sum, None, parameter.dtype(), f)
    }
}
