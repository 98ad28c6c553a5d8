//! Losses over classes. The softmax is never written to memory: a log-sum-exp and the picked logit are all that is needed.

use super::{
    OpInfo,
    expr::{Args, Expr, check_float, compute_type},
    index::{Indexed, run_gather},
    loss::LossReduction,
    op, same_device,
};
use crate::{DType, Dims, Error, Result, Shape, Tensor, backend::ReduceOp, map::Val};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[op("cross_entropy", "nv, n -> n ; masked v"), op("nll_loss", "nv, n -> n ; masked v")];

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
    pub fn cross_entropy(&self, target: &Tensor, options: &CrossEntropyOptions) -> Result<Tensor> {
        let op = "cross_entropy";
        let smoothing = options.label_smoothing;
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::Argument { op, detail: format!("label smoothing must be in 0..=1, got {smoothing}") });
        }
        let classes = Classes::check(op, self, target, options)?;
        let kind = compute_type([self]);
        let lse = Expr::new(op, &[self]).reduce(&[classes.axis], ReduceOp::LogSumExp, None, kind, |a| a.x[0])?;
        if target.dtype().is_float() {
            return classes.soft(self, target, &lse);
        }
        let spread = if smoothing == 0.0 {
            None
        } else {
            let term = Expr::new(op, &[self, &lse]).maybe(&[classes.weight.as_ref()]);
            Some(term.reduce(&[classes.axis], ReduceOp::Sum, None, kind, |a| weighted(a.x[1] - a.x[0], a.maybe[0]))?)
        };
        classes.hard(self, target, Some(&lse), spread.as_ref())
    }

    /// Negative log-likelihood: as [`cross_entropy`](Tensor::cross_entropy) with classes, for inputs that are log-probabilities already.
    pub fn nll_loss(&self, target: &Tensor, weight: Option<&Tensor>, ignore_index: Option<i64>, reduction: LossReduction) -> Result<Tensor> {
        let op = "nll_loss";
        if target.dtype().is_float() {
            return Err(Error::DType { op, dtype: target.dtype(), expected: "i32 or i64 classes" });
        }
        let options = CrossEntropyOptions { weight: weight.cloned(), ignore_index, label_smoothing: 0.0, reduction };
        Classes::check(op, self, target, &options)?.hard(self, target, None, None)
    }
}

fn weighted<'b>(value: Val<'b>, weight: Option<Val<'b>>) -> Val<'b> {
    weight.map_or(value, |w| value * w)
}

/// A checked problem.
struct Classes<'a> {
    op: &'static str,
    options: &'a CrossEntropyOptions,
    /// The class axis of the logits.
    axis: usize,
    count: usize,
    /// The shape of the logits without classes.
    positions: Shape,
    /// `[c, 1, ...]`, beside the logits.
    weight: Option<Tensor>,
}

impl<'a> Classes<'a> {
    fn check(op: &'static str, x: &Tensor, target: &Tensor, options: &'a CrossEntropyOptions) -> Result<Self> {
        check_float(op, &[x])?;
        same_device(op, &[x, target])?;
        if x.rank() == 0 {
            return Err(Error::Shape { op, detail: "logits need a class axis: [c], [n, c] or [n, c, ...]".into() });
        }
        if !target.dtype().is_float() && !matches!(target.dtype(), DType::I32 | DType::I64) {
            return Err(Error::DType { op, dtype: target.dtype(), expected: "i32 or i64 classes, or probabilities of a float dtype" });
        }
        let axis = usize::from(x.rank() > 1);
        let count = x.dims()[axis];
        let mut positions: Dims = x.dims().into();
        positions.remove(axis);
        let positions = Shape::from(positions);
        let expected = if target.dtype().is_float() { x.shape() } else { &positions };
        if target.shape() != expected {
            return Err(Error::Shape { op, detail: format!("a target of {} for {} must have shape {expected}", target.type_string(), x.type_string()) });
        }
        if count == 0 {
            return Err(Error::Shape { op, detail: format!("{} has no classes", x.shape()) });
        }
        let weight = match &options.weight {
            Some(w) => {
                check_float(op, &[w])?;
                same_device(op, &[x, w])?;
                if w.dims() != [count] {
                    return Err(Error::Shape { op, detail: format!("{count} classes need weights [{count}], got {}", w.shape()) });
                }
                let mut column: Dims = smallvec::smallvec![1; x.rank() - axis];
                column[0] = count;
                Some(w.reshape(Shape::from(column))?)
            }
            None => None,
        };
        Ok(Self { op, options, axis, count, positions, weight })
    }

    /// What smoothing leaves of a target, and what it adds to every class.
    fn shares(&self) -> [f64; 2] {
        [1.0 - self.options.label_smoothing, self.options.label_smoothing / self.count as f64]
    }

    /// `sum_k t[k] w[k] (lse - x[k])` with smoothed probabilities `t`.
    fn soft(&self, x: &Tensor, target: &Tensor, lse: &Tensor) -> Result<Tensor> {
        let reduction = self.options.reduction;
        let term = Expr::new(self.op, &[x, target, lse]).maybe(&[self.weight.as_ref()]).params(&self.shares());
        if reduction == LossReduction::None {
            return term.reduce(&[self.axis], ReduceOp::Sum, None, x.dtype(), soft_term)?.reshape(&self.positions);
        }
        let axes: Dims = (0..x.rank()).collect();
        let scale = (reduction == LossReduction::Mean).then(|| 1.0 / self.positions.numel() as f64);
        term.reduce(&axes, ReduceOp::Sum, scale, x.dtype(), soft_term)?.reshape(())
    }

    /// The loss of classes from the log-sum-exp (none for log-probabilities) and the loss `spread` over all classes.
    fn hard(&self, x: &Tensor, target: &Tensor, lse: Option<&Tensor>, spread: Option<&Tensor>) -> Result<Tensor> {
        let (op, reduction) = (self.op, self.options.reduction);
        let ignored = self.options.ignore_index.filter(|i| target.dtype() == DType::I64 || i32::try_from(*i).is_ok());
        let target = target.unsqueeze(self.axis as i64)?;
        // Ignored positions read class 0. Negative classes would count from the end: they are moved out of range instead.
        let index = Expr::new(op, &[&target]).map(target.dtype(), |a| {
            let class = a.x[0].lt(0).select(a.x[0] - self.count as i64, a.x[0]);
            ignored.map_or(class, |i| a.x[0].eq(i).select(class.lit(0i64), class))
        })?;
        let pick = |from: &Tensor| {
            let from = from.expand(x.shape())?;
            let layout = crate::Layout { shape: index.shape().clone(), ..from.layout().slice(self.axis, 0, 0, self.count) };
            run_gather(op, &from, layout, &[Indexed { axis: self.axis, index: &index, part: None }])
        };
        let picked = pick(x)?;
        let weight = self.weight.as_ref().map(pick).transpose()?;
        let loss = |reduction: LossReduction, dtype| {
            let expr = Expr::new(op, &[&picked, &target]).maybe(&[lse, weight.as_ref(), spread]);
            reduction.run(expr.params(&self.shares()), dtype, |a| {
                let own = weighted(a.maybe[0].map_or(-a.x[0], |lse| lse - a.x[0]), a.maybe[1]);
                unless(ignored, a.x[1], a.maybe[2].map_or(own, |all| own * a.p[0] + all * a.p[1]))
            })
        };
        match reduction {
            LossReduction::Mean if ignored.is_some() || weight.is_some() => {
                let kind = compute_type([x]);
                let total = loss(LossReduction::Sum, kind)?;
                let counted = LossReduction::Sum.run(Expr::new(op, &[&target]).maybe(&[weight.as_ref()]), kind, |a| {
                    let one = a.x[0].builder().constant(1.0, kind.kind());
                    unless(ignored, a.x[0], a.maybe[0].unwrap_or(one))
                })?;
                Expr::new(op, &[&total, &counted]).map(x.dtype(), |a| a.x[0] / a.x[1])
            }
            _ => loss(reduction, x.dtype()),
        }?
        .reshape(if reduction == LossReduction::None { self.positions.clone() } else { Shape::scalar() })
    }
}

/// The loss of one class under smoothed probabilities.
fn soft_term<'b>(a: &Args<'b>) -> Val<'b> {
    weighted((a.x[1] * a.p[0] + a.p[1]) * (a.x[2] - a.x[0]), a.maybe[0])
}

/// Zero where the class is the ignored one.
fn unless<'b>(ignored: Option<i64>, class: Val<'b>, value: Val<'b>) -> Val<'b> {
    ignored.map_or(value, |i| class.eq(i).select(value.lit(0.0), value))
}
