//! Losses over classes. The softmax is never written to memory: a log-sum-exp and the picked logit are all that is needed.
//!
//! The same is all that crosses where classes are cut over a mesh: logits stay where they are. Cut positions leave partial sums; a mean divides by what all
//! positions of all ranks weigh.

use super::{
    OpInfo,
    expr::{Args, Expr, check_float, compute_type},
    index::{gather_axes, take_along},
    loss::LossReduction,
    op,
};
use crate::{
    DType, Dims, Error, Result, Shape, Tensor,
    backend::ReduceOp,
    map::Val,
    spmd::{Call, Outputs, Rule, plain},
};
use smallvec::{SmallVec, smallvec};

/// The ops of this file, with a reduction: `v` are the classes. Without one, positions pass.
pub const OPS: &[OpInfo] =
    &[op("cross_entropy", "nv..., n..., v -> ; stats v 2 ; reduce n ... sum"), op("nll_loss", "nv..., n..., v -> ; stats v 1 ; reduce n ... sum")];

/// How [`Tensor::cross_entropy`] weighs classes and positions.
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions {
    /// A factor for each class, `[c]`.
    pub weight: Option<Tensor>,
    /// Positions with this class have no loss and do not count in the mean; -100 unless set.
    pub ignore_index: Option<i64>,
    /// The share of the target that is spread evenly over all classes.
    pub label_smoothing: f64,
    /// What becomes of the losses of all positions.
    pub reduction: LossReduction,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self { weight: None, ignore_index: Some(-100), label_smoothing: 0.0, reduction: LossReduction::Mean }
    }
}

impl Tensor {
    /// Cross-entropy of logits `[c]`, `[n, c]` or `[n, c, d1, ...]` with classes (i32 or i64, the shape without `c`) or with probabilities (floats, the
    /// same shape).
    ///
    /// The loss of a position is `w[y] (lse - x[y])`, the log-sum-exp minus the logit of the target. With smoothing `e` it is
    /// `(1 - e) w[y] (lse - x[y]) + e / c sum_k w[k] (lse - x[k])`. The mean divides by the sum of `w[y]` over positions that are not
    /// ignored (so by their number without weights, and it is NaN where all are ignored); for probabilities by the number of positions.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::cross_entropy::CrossEntropyOptions};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[0f32, 0.0, 5.0, 1.0], [2, 2], &device)?;
    /// let y = Tensor::from_slice(&[1i64, -100], [2], &device)?;
    /// assert_eq!(x.cross_entropy(&y, &CrossEntropyOptions::default())?.to_vec::<f32>()?, [2f32.ln()]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn cross_entropy(&self, target: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
        let op = "cross_entropy";
        let smoothing = options.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::Argument { op, detail: format!("label smoothing must be in 0..=1, got {smoothing}") });
        }
        Classes::check(op, self, target, options)?.run(self, target)
    }

    /// Negative log-likelihood: as [`cross_entropy`](Tensor::cross_entropy) with classes, for inputs that are log-probabilities already.
    #[track_caller]
    pub fn nll_loss(&self, target: &Tensor, weight: Option<&Tensor>, ignore_index: Option<i64>, reduction: LossReduction) -> Result<Tensor> {
        let op = "nll_loss";
        if target.dtype().is_float() {
            return Err(Error::DType { op, dtype: target.dtype(), expected: "i32 or i64 classes" });
        }
        let options = CrossEntropyOptions { weight: weight.cloned(), ignore_index, label_smoothing: 0.0, reduction };
        Classes::check(op, self, target, &options)?.run(self, target)
    }
}

fn weighted<'b>(value: Val<'b>, weight: Option<Val<'b>>) -> Val<'b> {
    weight.map_or(value, |w| value * w)
}

/// A checked problem.
struct Classes<'a> {
    op: &'static str,
    options: &'a CrossEntropyOptions,
    /// Whether inputs are logits; log-probabilities otherwise.
    logits: bool,
    /// Whether the target is probabilities.
    soft: bool,
    /// The class that does not count, if the target can name it.
    ignored: Option<i64>,
    /// The class axis.
    axis: usize,
    /// The number of classes.
    count: usize,
    /// The number of positions.
    positions: usize,
}

impl<'a> Classes<'a> {
    fn check(op: &'static str, x: &Tensor, target: &Tensor, options: &'a CrossEntropyOptions) -> Result<Self> {
        check_float(op, &[x])?;
        if x.rank() == 0 {
            return Err(Error::Shape { op, detail: "logits need a class axis: [c], [n, c] or [n, c, ...]".into() });
        }
        let soft = target.dtype().is_float();
        if !soft && !matches!(target.dtype(), DType::I32 | DType::I64) {
            return Err(Error::DType { op, dtype: target.dtype(), expected: "i32 or i64 classes, or probabilities of a float dtype" });
        }
        let axis = usize::from(x.rank() > 1);
        let count = x.dims()[axis];
        let positions = positions(x, axis);
        let expected = if soft { x.shape() } else { &positions };
        if target.shape() != expected {
            return Err(Error::Shape { op, detail: format!("a target of {} for {} must have shape {expected}", target.type_string(), x.type_string()) });
        }
        if count == 0 {
            return Err(Error::Shape { op, detail: format!("{} has no classes", x.shape()) });
        }
        if let Some(w) = &options.weight {
            check_float(op, &[w])?;
            if w.dims() != [count] {
                return Err(Error::Shape { op, detail: format!("{count} classes need weights [{count}], got {}", w.shape()) });
            }
        }
        let ignored = options.ignore_index.filter(|i| !soft && (target.dtype() == DType::I64 || i32::try_from(*i).is_ok()));
        Ok(Self { op, options, logits: op == "cross_entropy", soft, ignored, axis, count, positions: positions.numel() })
    }

    /// Whether the mean divides by what is counted and not by the number of positions.
    fn counts(&self) -> bool {
        self.options.reduction == LossReduction::Mean && !self.soft && (self.ignored.is_some() || self.options.weight.is_some())
    }

    #[track_caller]
    fn run(&self, x: &Tensor, target: &Tensor) -> Result<Tensor> {
        let (op, weight) = (self.op, self.options.weight.as_ref());
        let inputs: SmallVec<[&Tensor; 3]> = [x, target].into_iter().chain(weight).collect();
        let mut out = if plain(op, &inputs)? {
            self.losses(x, target, weight)?
        } else {
            let attrs = [i64::from(self.soft), self.options.reduction as i64, self.counts().into(), (self.options.label_smoothing > 0.0).into()];
            let rule = || Rule::new(&self.rule(), &[x.into(), target.into(), weight.into()], &[]);
            Call { op, inputs: &inputs, attrs: &attrs }.run_or(
                rule,
                |l| self.losses(&l[0], &l[1], l.inputs.get(2)),
                |inputs| self.losses(&inputs[0], &inputs[1], inputs.get(2)),
            )?
        };
        let total = out.remove(0);
        match out.pop() {
            Some(counted) => Expr::new(op, &[&total, &counted]).map(x.dtype(), |a| a.x[0] / a.x[1]),
            None => Ok(total),
        }
    }

    /// The rule: statistics are the log-sum-exp, the picked logit, its weight and the sum over classes.
    fn rule(&self) -> String {
        let (x, positions) = if self.axis == 1 { ("nv...", "n...") } else { ("v", "") };
        let target = if self.soft { x } else { positions };
        let statistics = [self.logits, !self.soft, !self.soft && self.options.weight.is_some(), self.options.label_smoothing > 0.0];
        let statistics = statistics.into_iter().filter(|s| *s).count();
        let result = match self.options.reduction {
            LossReduction::None => format!("{positions} ;"),
            _ if self.counts() => ", ; reduce n ... sum ;".into(),
            _ => "; reduce n ... sum ;".into(),
        };
        format!("{x}, {target}, v -> {result} stats v {statistics}")
    }

    /// The loss of every position, or their sum (scaled for a mean), or their sum and what it is to be divided by. Positions may be those of one rank.
    #[track_caller]
    fn losses(&self, x: &Tensor, target: &Tensor, weight: Option<&Tensor>) -> Result<Outputs> {
        let (op, kind) = (self.op, compute_type([x]));
        let column = weight.map(|w| w.reshape((self.axis..x.rank()).map(|d| if d == self.axis { self.count } else { 1 }).collect::<Shape>())).transpose()?;
        let lse = if self.logits { Some(Expr::new(op, &[x]).reduce(&[self.axis], ReduceOp::LogSumExp, None, kind, |a| a.x[0])?) } else { None };
        match &lse {
            Some(lse) if self.soft => self.soft(x, target, lse, column.as_ref()),
            _ => {
                let spread = match &lse {
                    Some(lse) if self.options.label_smoothing > 0.0 => {
                        let term = Expr::new(op, &[x, lse]).maybe(&[column.as_ref()]);
                        Some(term.reduce(&[self.axis], ReduceOp::Sum, None, kind, |a| weighted(a.x[1] - a.x[0], a.maybe[0]))?)
                    }
                    _ => None,
                };
                self.hard(x, target, weight, lse.as_ref(), spread.as_ref())
            }
        }
    }

    /// What smoothing leaves of a target, and what it adds to every class.
    fn shares(&self) -> [f64; 2] {
        [1.0 - self.options.label_smoothing, self.options.label_smoothing / self.count as f64]
    }

    /// All positions at once, times `scale` where a mean is asked for.
    #[track_caller]
    fn all(&self, expr: Expr<'_>, rank: usize, dtype: DType, f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>) -> Result<Tensor> {
        let axes: Dims = (0..rank).collect();
        let scale = (self.options.reduction == LossReduction::Mean && !self.counts()).then(|| 1.0 / self.positions as f64);
        expr.reduce(&axes, ReduceOp::Sum, scale, dtype, f)?.reshape(())
    }

    /// `sum_k t[k] w[k] (lse - x[k])` with smoothed probabilities `t`.
    #[track_caller]
    fn soft(&self, x: &Tensor, target: &Tensor, lse: &Tensor, column: Option<&Tensor>) -> Result<Outputs> {
        let term = Expr::new(self.op, &[x, target, lse]).maybe(&[column]).params(&self.shares());
        Ok(smallvec![match self.options.reduction {
            LossReduction::None => term.reduce(&[self.axis], ReduceOp::Sum, None, x.dtype(), soft_term)?.reshape(positions(x, self.axis))?,
            _ => self.all(term, x.rank(), x.dtype(), soft_term)?,
        }])
    }

    /// The loss of classes from the log-sum-exp (none for log-probabilities) and the loss `spread` over all classes.
    #[track_caller]
    fn hard(&self, x: &Tensor, target: &Tensor, weight: Option<&Tensor>, lse: Option<&Tensor>, spread: Option<&Tensor>) -> Result<Outputs> {
        let (op, ignored) = (self.op, self.ignored);
        let target = target.unsqueeze(self.axis as i64)?;
        // Ignored positions read class 0. Negative classes would count from the end: they are moved out of range instead.
        let index = Expr::new(op, &[&target]).map(target.dtype(), |a| {
            let class = a.x[0].lt(0).select(a.x[0] - self.count as i64, a.x[0]);
            ignored.map_or(class, |i| a.x[0].eq(i).select(class.lit(0i64), class))
        })?;
        let picked = take_along(op, x, self.axis as i64, &index)?;
        let weight = weight.map(|w| gather_axes(op, w, &[(0, &index)])).transpose()?;
        let expr = Expr::new(op, &[&picked, &target]).maybe(&[lse, weight.as_ref(), spread]).params(&self.shares());
        let kind = compute_type([x]);
        Ok(match self.options.reduction {
            LossReduction::None => smallvec![expr.map(x.dtype(), |a| hard_term(a, ignored))?.reshape(positions(x, self.axis))?],
            _ if self.counts() => {
                let total = self.all(expr, x.rank(), kind, |a| hard_term(a, ignored))?;
                let counted = self.all(Expr::new(op, &[&target]).maybe(&[weight.as_ref()]), x.rank(), kind, |a| {
                    let one = a.x[0].builder().constant(1.0, kind.kind());
                    unless(ignored, a.x[0], a.maybe[0].unwrap_or(one))
                })?;
                smallvec![total, counted]
            }
            _ => smallvec![self.all(expr, x.rank(), x.dtype(), |a| hard_term(a, ignored))?],
        })
    }
}

/// The shape of logits without classes.
fn positions(x: &Tensor, axis: usize) -> Shape {
    let mut dims: Dims = x.dims().into();
    dims.remove(axis);
    dims.into()
}

/// The loss of the target's class.
fn hard_term<'b>(a: &Args<'b>, ignored: Option<i64>) -> Val<'b> {
    let own = weighted(a.maybe[0].map_or(-a.x[0], |lse| lse - a.x[0]), a.maybe[1]);
    unless(ignored, a.x[1], a.maybe[2].map_or(own, |all| own * a.p[0] + all * a.p[1]))
}

/// The loss of one class under smoothed probabilities.
fn soft_term<'b>(a: &Args<'b>) -> Val<'b> {
    weighted((a.x[1] * a.p[0] + a.p[1]) * (a.x[2] - a.x[0]), a.maybe[0])
}

/// Zero where the class is the ignored one.
fn unless<'b>(ignored: Option<i64>, class: Val<'b>, value: Val<'b>) -> Val<'b> {
    ignored.map_or(value, |i| class.eq(i).select(value.lit(0.0), value))
}
