//! The gradient of every norm.

use super::{given, mean, variance};
use crate::{
    Dims, Result, Tensor,
    backend::ReduceOp,
    grad::{Back, Pulled, is_recording},
    map::Val,
    ops::expr::{Args, Expr, compute_type},
    ops::{OpInfo, RuleForm, broadcast_axes},
    spmd::{Call, plain, settled, without_partials},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

/// From the input, the gradient of the output, the weight and what is added, those of the input and
/// of as many parameters as are wanted: of the elements alone, with one and two sums over rows, and
/// of one and two such sums.
const PULL: OpInfo = OpInfo::new(
    "norm_pull",
    RuleForm::Variants(&[
        "...r, ...r, r, ...r -> ...r ; stats r 4",
        "...r, ...r, r, ...r -> ...r, r ; reduce ... sum ; stats r 4",
        "...r, ...r, r, ...r -> ...r, r, r ; reduce ... sum ; stats r 4",
        "...r, ...r, r, ...r -> r ; reduce ... sum ; stats r 4",
        "...r, ...r, r, ...r -> r, r ; reduce ... sum ; stats r 4",
    ]),
);

/// Which gradients of a norm are wanted.
#[derive(Clone, Copy)]
pub(super) struct Wants {
    pub(super) input: bool,
    pub(super) weight: bool,
    pub(super) bias: bool,
}

impl Wants {
    /// Which text of [`PULL`] has these results.
    fn variant(self) -> usize {
        let sums = usize::from(self.weight) + usize::from(self.bias);
        if self.input { sums } else { 2 + sums }
    }
}

/// Statistics that broadcast, of batch norm, and their own gradients.
pub(super) struct Statistics {
    pub(super) mean: Tensor,
    pub(super) var: Tensor,
    pub(super) gradients: [Option<Tensor>; 2],
}

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

    /// Which gradients are wanted.
    fn wants(&self, b: &Back<'_>) -> Wants {
        let weight = self.weight.is_some();
        Wants {
            input: (0..self.summands).any(|i| b.needs(i)),
            weight: weight && b.needs(self.summands),
            bias: self.bias.is_some() && b.needs(self.summands + usize::from(weight)),
        }
    }

    /// The gradients of the input and the parameters, each in the shape of the tensor that was
    /// kept, from the gradient of the output. The input and parameters are given in a shape in
    /// which they broadcast. What is `beside` is added to the gradient of the input.
    #[track_caller]
    pub(super) fn pull(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        parameters: [Option<&Tensor>; 2],
        g: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<Pulled> {
        let (wants, g) = (self.wants(b), self.settled(x, g)?);
        // What is partial or lies elsewhere is added as any sum is.
        let lies = |t: &&Tensor| wants.input && t.sharding() == g.sharding();
        let inside = beside.filter(lies);
        let mut made = self.gradients(wants, x, parameters, &g, inside)?;
        if let (true, None, Some(beside)) = (wants.input, inside, beside) {
            made[0] = beside.add(&made[0])?;
        }
        self.pulled(wants, made)
    }

    /// [`pull`](Self::pull) with statistics that are known, and that may have gradients of their
    /// own.
    #[track_caller]
    pub(super) fn pull_with(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        parameters: [Option<&Tensor>; 2],
        g: &Tensor,
        statistics: Statistics,
    ) -> Result<Pulled> {
        let (wants, g) = (self.wants(b), self.settled(x, g)?);
        let made = self.composed(wants, x, parameters, &g, Some(statistics))?;
        self.pulled(wants, made)
    }

    /// The gradient of the output in the shape of `x`, with nothing partial.
    #[track_caller]
    fn settled(&self, x: &Tensor, g: &Tensor) -> Result<Tensor> {
        settled(self.op, &g.reshape(x.shape())?, x, &self.axes)
    }

    /// What was made, for each operand and in its shape.
    fn pulled(&self, wants: Wants, made: Outputs) -> Result<Pulled> {
        let mut made = made.into_iter();
        let mut next = |kept: &Tensor, wanted: bool| {
            let made = if wanted { made.next() } else { None };
            made.map(|made| made.reshape(kept.shape())).transpose()
        };
        let mut pulled: Pulled = smallvec![next(&self.x, wants.input)?];
        if let Some(weight) = &self.weight {
            pulled.push(next(weight, wants.weight)?);
        }
        if let Some(bias) = &self.bias {
            pulled.push(next(bias, wants.bias)?);
        }
        Ok(pulled)
    }

    /// The gradients that are wanted: by one launch on each rank where rows are whole and a device
    /// has the kernel, else composed.
    #[track_caller]
    fn gradients(
        &self,
        wants: Wants,
        x: &Tensor,
        parameters: [Option<&Tensor>; 2],
        g: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<Outputs> {
        let [weight, bias] = parameters;
        let there = [x, g].into_iter().chain(weight).chain(beside);
        let operands: SmallVec<[&Tensor; 4]> = there.collect();
        if self.are_rows(wants, x, parameters) && !is_recording(&operands) {
            if !plain(self.op, &operands)? {
                let optional = [weight, beside];
                return Call::of(&PULL, &operands)
                    .on_behalf_of(self.op)
                    .variant(wants.variant())
                    .optional(2, &optional)
                    .bind('r', &self.axes)
                    .run_or(
                        |l| {
                            let [weight, beside] = given(l.inputs, 2, optional);
                            self.gradients(wants, &l[0], [weight, bias], &l[1], beside)
                        },
                        |inputs| {
                            let [weight, beside] = given(inputs, 2, optional);
                            let parameters = [weight, bias];
                            self.beside(wants, &inputs[0], parameters, &inputs[1], beside)
                        },
                    );
            }
            if let Some(made) = self.fused(wants, x, parameters, g, beside)? {
                return Ok(made);
            }
        }
        self.beside(wants, x, parameters, g, beside)
    }

    /// Whether the axes are whole rows with parameters of their own. Alone the gradient of a bias is
    /// one plain sum.
    fn are_rows(&self, wants: Wants, x: &Tensor, parameters: [Option<&Tensor>; 2]) -> bool {
        let first = x.rank() - self.axes.len();
        let covers = |p: &Tensor| p.dims() == &x.dims()[first..];
        self.axes.iter().copied().eq(first..x.rank())
            && parameters.into_iter().flatten().all(covers)
            && (wants.input || wants.weight)
    }

    /// [`composed`](Self::composed), with what is added to the gradient of the input.
    #[track_caller]
    fn beside(
        &self,
        wants: Wants,
        x: &Tensor,
        parameters: [Option<&Tensor>; 2],
        g: &Tensor,
        beside: Option<&Tensor>,
    ) -> Result<Outputs> {
        let mut made = self.composed(wants, x, parameters, g, None)?;
        if let (true, Some(beside)) = (wants.input, beside) {
            made[0] = beside.add(&made[0])?;
        }
        Ok(made)
    }

    /// The gradients that are wanted, as two reductions, a map of a few numbers and a map of all, and
    /// a sum for each parameter. Statistics are computed again where they are not given.
    ///
    /// With `h = (x - mean) r`, `r = 1 / sqrt(var + eps)` and means over what is normalised
    /// together, the input's gradient is `r (g w - mean(g w) - h mean(g w h))`.
    #[track_caller]
    fn composed(
        &self,
        wants: Wants,
        x: &Tensor,
        [weight, bias]: [Option<&Tensor>; 2],
        g: &Tensor,
        statistics: Option<Statistics>,
    ) -> Result<Outputs> {
        let (op, axes, kind) = (self.op, &self.axes, compute_type([x]));
        let n: usize = axes.iter().map(|d| x.dims()[*d]).product();
        let (center, var, [of_mean, of_var]) = match statistics {
            Some(known) => (Some(known.mean), known.var, known.gradients),
            None => {
                let center = if self.rms {
                    None
                } else {
                    Some(mean(op, x, axes, n)?)
                };
                let var = variance(op, x, center.as_ref(), axes, n)?;
                (center, var, [None, None])
            }
        };
        let root = Expr::new(op, &[&var])
            .params(&[self.eps])
            .map(kind, |a| (a.x[0] + a.p[0]).rsqrt())?;
        let mut made = Outputs::new();
        if wants.input {
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
            made.push(out.map(x.dtype(), |a| {
                let g = a.maybe[1].map_or(a.x[0], |weight| a.x[0] * weight);
                let line = a.x[1] * a.x[3];
                g * a.x[2] - a.maybe[0].map_or(line, |level| line + level)
            })?);
        }
        if let (true, Some(weight)) = (wants.weight, weight) {
            let terms = Expr::new(op, &[g, x, &root]).maybe(&[center.as_ref()]);
            made.push(sum_like(weight, x, terms, |a| a.x[0] * direction(a))?);
        }
        if let (true, Some(bias)) = (wants.bias, bias) {
            made.push(sum_like(bias, x, Expr::new(op, &[g]), |a| a.x[0])?);
        }
        Ok(made)
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
    let sum = match axes.is_empty() {
        true => expr.map(parameter.dtype(), f),
        false => expr.reduce(&axes, ReduceOp::Sum, None, parameter.dtype(), f),
    };
    sum?.reshape(parameter.shape())
}
