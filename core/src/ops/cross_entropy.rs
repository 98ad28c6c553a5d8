//! Losses over classes. The softmax is never written to memory: a log-sum-exp and the picked logit
//! are all that is needed.
//!
//! The same is all that crosses where classes are cut over a mesh: logits stay where they are. Cut
//! positions leave partial sums; a mean divides by what all positions of all ranks weigh. The
//! gradient of the logits is the only tensor of their size that is written, and is cut as they are.
//!
//! As other losses (see `loss`) these are `f32` for inputs of up to 32 bits; the gradient has the
//! dtype of the logits.

mod fused;
mod gradient;

use super::{
    OpInfo, RuleForm,
    expr::{Args, Expr, check_float, compute_type},
    index::{gather_axes, take_along},
    loss::LossReduction,
};
use crate::{
    DType, Dims, Error, Result, Shape, Tensor,
    backend::ReduceOp,
    grad::{Back, recompute, record1},
    map::Val,
    spmd::{Call, Rule, built::is_true, plain, rule::Operands},
    tensor::Outputs,
};
use fused::PerPosition;
use smallvec::{SmallVec, smallvec};
use std::cell::OnceCell;

/// The ops of this file. Without a reduction positions pass, with one they leave partial sums.
pub const OPS: &[OpInfo] = &[CROSS_ENTROPY, CROSS_ENTROPY.named("nll_loss")];

const CROSS_ENTROPY: OpInfo =
    OpInfo::new("cross_entropy", RuleForm::built("classes", rule)).runs(&[
        "map",
        "reduce",
        "reshape",
        "unsqueeze",
        "take_along_axis",
        "lookup",
    ]);

/// `v` are the classes. The call says how many statistics of each position cross where they are
/// cut, whether the target is probabilities, whether positions are reduced, and whether what a mean
/// divides by and the log-sum-exp of each position are results too.
fn rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (statistics, soft, reduced, counts, lse) = (
        data[0],
        is_true(data, 1),
        is_true(data, 2),
        is_true(data, 3),
        is_true(data, 4),
    );
    let (x, positions) = if operands.rank(0) > 1 {
        ("nv...", "n...")
    } else {
        ("v", "")
    };
    let target = if soft { x } else { positions };
    let lse = match lse {
        true => format!(", {positions}"),
        false => String::new(),
    };
    let result = match (reduced, counts) {
        (false, _) => format!("{positions}{lse} ;"),
        (true, true) => format!(", {lse} ; reduce n ... sum ;"),
        (true, false) => format!("{lse} ; reduce n ... sum ;"),
    };
    let text = format!("{x}, {target}, v -> {result} stats v {statistics}");
    operands.read(&text, &[])
}

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
        Self {
            weight: None,
            ignore_index: Some(-100),
            label_smoothing: 0.0,
            reduction: LossReduction::Mean,
        }
    }
}

impl Tensor {
    /// Cross-entropy of logits `[c]`, `[n, c]` or `[n, c, d1, ...]` with classes (i32 or i64, the
    /// shape without `c`) or with probabilities (floats, the same shape).
    ///
    /// The loss of a position is `w[y] (lse - x[y])`, the log-sum-exp minus the logit of the
    /// target. With smoothing `e` it is
    /// `(1 - e) w[y] (lse - x[y]) + e / c sum_k w[k] (lse - x[k])`. The mean divides by the sum of
    /// `w[y]` over positions that are not ignored (so by their number without weights, and it is
    /// NaN where all are ignored); for probabilities by the number of positions.
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
            return Err(Error::argument(
                op,
                "label_smoothing",
                format!("label smoothing must be in 0..=1, got {smoothing}"),
            ));
        }
        Classes::check(op, self, target, options)?.run(self, target, options.weight.as_ref())
    }

    /// Negative log-likelihood: as [`cross_entropy`](Tensor::cross_entropy) with classes, for
    /// inputs that are log-probabilities already.
    #[track_caller]
    pub fn nll_loss(
        &self,
        target: &Tensor,
        weight: Option<&Tensor>,
        ignore_index: Option<i64>,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "nll_loss";
        if target.dtype().is_float() {
            return Err(Error::DType {
                op,
                dtype: target.dtype(),
                expected: "i32 or i64 classes",
            });
        }
        let options = CrossEntropyOptions {
            weight: weight.cloned(),
            ignore_index,
            label_smoothing: 0.0,
            reduction,
        };
        Classes::check(op, self, target, &options)?.run(self, target, weight)
    }
}

fn weighted<'b>(value: Val<'b>, weight: Option<Val<'b>>) -> Val<'b> {
    weight.map_or(value, |w| value * w)
}

/// A checked problem.
#[derive(Clone, Copy)]
struct Classes {
    op: &'static str,
    /// Whether classes have weights.
    weighted: bool,
    smoothing: f64,
    reduction: LossReduction,
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

/// What the gradient can take over from the forward pass.
#[derive(Default)]
struct ForwardValues {
    /// The log-sum-exp of each position, of size 1 along the classes.
    lse: OnceCell<Tensor>,
    /// What the sum was divided by.
    counted: OnceCell<Tensor>,
}

impl Classes {
    fn check(
        op: &'static str,
        x: &Tensor,
        target: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<Self> {
        check_float(op, &[x])?;
        if x.rank() == 0 {
            return Err(Error::shape(
                op,
                [x, target],
                "logits need a class axis: [c], [n, c] or [n, c, ...]",
            ));
        }
        let soft = target.dtype().is_float();
        if !soft && !matches!(target.dtype(), DType::I32 | DType::I64) {
            return Err(Error::DType {
                op,
                dtype: target.dtype(),
                expected: "i32 or i64 classes, or probabilities of a float dtype",
            });
        }
        let axis = usize::from(x.rank() > 1);
        let count = x.dims()[axis];
        let positions = positions(x, axis);
        let expected = if soft { x.shape() } else { &positions };
        if target.shape() != expected {
            return Err(Error::shape(
                op,
                [x, target],
                format!(
                    "a target of {} for {} must have shape {expected}",
                    target.type_string(),
                    x.type_string()
                ),
            ));
        }
        if count == 0 {
            return Err(Error::shape(
                op,
                [x, target],
                format!("{} has no classes", x.shape()),
            ));
        }
        if let Some(w) = &options.weight {
            check_float(op, &[w])?;
            if w.dims() != [count] {
                return Err(Error::shape(
                    op,
                    [x, target, w],
                    format!("{count} classes need weights [{count}], got {}", w.shape()),
                ));
            }
        }
        let ignored = options
            .ignore_index
            .filter(|i| !soft && (target.dtype() == DType::I64 || i32::try_from(*i).is_ok()));
        let CrossEntropyOptions {
            label_smoothing: smoothing,
            reduction,
            ..
        } = *options;
        let (weighted, logits) = (options.weight.is_some(), op == "cross_entropy");
        Ok(Self {
            op,
            weighted,
            smoothing,
            reduction,
            logits,
            soft,
            ignored,
            axis,
            count,
            positions: positions.numel(),
        })
    }

    /// Whether the mean divides by what is counted and not by the number of positions.
    fn counts(&self) -> bool {
        self.reduction == LossReduction::Mean
            && !self.soft
            && (self.ignored.is_some() || self.weighted)
    }

    #[track_caller]
    fn run(self, x: &Tensor, target: &Tensor, weight: Option<&Tensor>) -> Result<Tensor> {
        let inputs: SmallVec<[&Tensor; 3]> = [x, target].into_iter().chain(weight).collect();
        let found = ForwardValues::default();
        let forward = || self.value(&inputs, &found);
        crate::observe::tell(|| {
            let reduction = match self.reduction {
                LossReduction::None => "none",
                LossReduction::Mean => "mean",
                LossReduction::Sum => "sum",
            };
            serde_json::json!({ "label_smoothing": self.smoothing, "ignore_index": self.ignored, "reduction": reduction })
        });
        if weight.is_some_and(|w| w.requires_grad()) {
            // Weights are rarely learned: their gradient is that of the steps.
            let again = move |inputs: &[Tensor]| {
                let found = ForwardValues::default();
                let out = self.losses(&inputs[0], &inputs[1], inputs.get(2), &found)?;
                Ok(smallvec![self.divided(out, &found)?])
            };
            return Ok(recompute(self.op, &inputs, || Ok(smallvec![forward()?]), again)?.remove(0));
        }
        record1(self.op, &inputs, forward, |_| {
            let (x, target, weight) = (x.kept(), target.kept(), weight.cloned());
            let (lse, counted) = (found.lse.get().cloned(), found.counted.get().cloned());
            Ok(move |b: &Back<'_>| {
                self.pull(
                    b,
                    &x,
                    &target,
                    weight.as_ref(),
                    lse.as_ref(),
                    counted.as_ref(),
                )
            })
        })
    }

    #[track_caller]
    fn value(&self, inputs: &[&Tensor], found: &ForwardValues) -> Result<Tensor> {
        let (op, x, target, weight) = (self.op, inputs[0], inputs[1], inputs.get(2).copied());
        let out = if plain(op, inputs)? {
            self.losses(x, target, weight, found)?
        } else {
            // The log-sum-exp, the picked logit, its weight, and the sum over classes.
            let statistics = [
                self.logits,
                !self.soft,
                !self.soft && self.weighted,
                self.smoothing > 0.0,
            ];
            let data = [
                statistics.into_iter().filter(|s| *s).count() as i64,
                self.soft.into(),
                (self.reduction != LossReduction::None).into(),
                self.counts().into(),
                self.logits.into(),
            ];
            let of_rank = |inputs: &[Tensor]| {
                let of_rank = ForwardValues::default();
                let (x, target, weight) = (&inputs[0], &inputs[1], inputs.get(2));
                let mut out = self.losses(x, target, weight, &of_rank)?;
                if let Some(lse) = of_rank.lse.into_inner() {
                    out.push(lse.squeeze(&[self.axis as i64])?);
                }
                Ok(out)
            };
            let mut out = Call::of(&CROSS_ENTROPY, inputs)
                .on_behalf_of(op)
                .optional(2, &[weight])
                .data(&data)
                .run_or(
                    |l| of_rank(l.inputs),
                    |inputs| self.losses(&inputs[0], &inputs[1], inputs.get(2), found),
                )?;
            // Where classes are cut the steps found it.
            if self.logits && found.lse.get().is_none() {
                let lse = out.pop().map(|lse| lse.unsqueeze(self.axis as i64));
                lse.transpose()?.map(|lse| found.lse.set(lse));
            }
            out
        };
        self.divided(out, found)
    }

    /// The loss, or the sum of losses divided by what is counted.
    #[track_caller]
    fn divided(&self, mut out: Outputs, found: &ForwardValues) -> Result<Tensor> {
        let total = out.remove(0);
        match out.pop() {
            Some(counted) => {
                let counted = found.counted.get_or_init(|| counted);
                Expr::new(self.op, &[&total, counted]).map(total.dtype(), |a| a.x[0] / a.x[1])
            }
            None => Ok(total),
        }
    }

    /// The weights as a tensor that broadcasts to the logits.
    fn column(&self, x: &Tensor, weight: Option<&Tensor>) -> Result<Option<Tensor>> {
        weight
            .map(|w| {
                w.reshape(
                    (self.axis..x.rank())
                        .map(|d| if d == self.axis { w.numel() } else { 1 })
                        .collect::<Shape>(),
                )
            })
            .transpose()
    }

    #[track_caller]
    fn log_sum_exp(&self, x: &Tensor) -> Result<Tensor> {
        Expr::new(self.op, &[x]).reduce(
            &[self.axis],
            ReduceOp::LogSumExp,
            None,
            compute_type([x]),
            |a| a.x[0],
        )
    }

    /// The loss of every position, or their sum (scaled for a mean), or their sum and what it is to
    /// be divided by. Positions may be those of one rank.
    #[track_caller]
    fn losses(
        &self,
        x: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        found: &ForwardValues,
    ) -> Result<Outputs> {
        let (op, kind) = (self.op, compute_type([x]));
        if self.logits
            && let Some(each) = self.fused(x, target, weight)?
        {
            found.lse.get_or_init(|| each.lse.clone());
            return self.summed(x, &each);
        }
        let column = self.column(x, weight)?;
        let lse = if self.logits {
            Some(self.log_sum_exp(x)?)
        } else {
            None
        };
        if let Some(lse) = &lse {
            found.lse.get_or_init(|| lse.clone());
        }
        match &lse {
            Some(lse) if self.soft => self.soft(x, target, lse, column.as_ref()),
            _ => {
                let spread = match &lse {
                    Some(lse) if self.smoothing > 0.0 => {
                        let term = Expr::new(op, &[x, lse]).maybe(&[column.as_ref()]);
                        Some(term.reduce(&[self.axis], ReduceOp::Sum, None, kind, |a| {
                            weighted(a.x[1] - a.x[0], a.maybe[0])
                        })?)
                    }
                    _ => None,
                };
                self.hard(x, target, weight, lse.as_ref(), spread.as_ref())
            }
        }
    }

    /// The losses of all positions as they are wanted: each, or added up.
    #[track_caller]
    fn summed(&self, x: &Tensor, each: &PerPosition) -> Result<Outputs> {
        let kind = compute_type([x]);
        if self.reduction == LossReduction::None {
            return Ok(smallvec![each.loss.reshape(positions(x, self.axis))?]);
        }
        let sum = |t: &Tensor| self.all(Expr::new(self.op, &[t]), x.rank(), kind, |a| a.x[0]);
        [Some(&each.loss), each.weight.as_ref()]
            .into_iter()
            .flatten()
            .map(sum)
            .collect()
    }

    /// What smoothing leaves of a target, and what it adds to every class.
    fn shares(&self) -> [f64; 2] {
        [1.0 - self.smoothing, self.smoothing / self.count as f64]
    }

    /// The factor on the sum of losses: one over the number of positions for a mean that counts
    /// all.
    fn scale(&self) -> Option<f64> {
        (self.reduction == LossReduction::Mean && !self.counts())
            .then(|| 1.0 / self.positions as f64)
    }

    /// All positions at once, scaled.
    #[track_caller]
    fn all(
        &self,
        expr: Expr<'_>,
        rank: usize,
        dtype: DType,
        f: impl for<'b> FnOnce(&Args<'b>) -> Val<'b>,
    ) -> Result<Tensor> {
        let axes: Dims = (0..rank).collect();
        expr.reduce(&axes, ReduceOp::Sum, self.scale(), dtype, f)?
            .reshape(())
    }

    /// `sum_k t[k] w[k] (lse - x[k])` with smoothed probabilities `t`.
    #[track_caller]
    fn soft(
        &self,
        x: &Tensor,
        target: &Tensor,
        lse: &Tensor,
        column: Option<&Tensor>,
    ) -> Result<Outputs> {
        let term = Expr::new(self.op, &[x, target, lse])
            .maybe(&[column])
            .params(&self.shares());
        let kind = compute_type([x]);
        Ok(smallvec![match self.reduction {
            LossReduction::None => term
                .reduce(&[self.axis], ReduceOp::Sum, None, kind, soft_term)?
                .reshape(positions(x, self.axis))?,
            _ => self.all(term, x.rank(), kind, soft_term)?,
        }])
    }

    /// The classes to read. Ignored positions read class 0. Negative classes would count from the
    /// end: they are moved out of range instead.
    #[track_caller]
    fn index(&self, target: &Tensor) -> Result<Tensor> {
        Expr::new(self.op, &[target]).map(target.dtype(), |a| {
            let class = a.x[0].lt(0).select(a.x[0] - self.count as i64, a.x[0]);
            self.ignored
                .map_or(class, |i| a.x[0].eq(i).select(class.lit(0i64), class))
        })
    }

    /// The loss of classes from the log-sum-exp (none for log-probabilities) and the loss `spread`
    /// over all classes.
    #[track_caller]
    fn hard(
        &self,
        x: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        lse: Option<&Tensor>,
        spread: Option<&Tensor>,
    ) -> Result<Outputs> {
        let (op, ignored) = (self.op, self.ignored);
        let target = target.unsqueeze(self.axis as i64)?;
        let index = self.index(&target)?;
        let picked = take_along(op, x, self.axis as i64, &index)?;
        let weight = weight
            .map(|w| gather_axes(op, w, &[(0, &index)]))
            .transpose()?;
        let expr = Expr::new(op, &[&picked, &target])
            .maybe(&[lse, weight.as_ref(), spread])
            .params(&self.shares());
        let kind = compute_type([x]);
        Ok(match self.reduction {
            LossReduction::None => smallvec![
                expr.map(kind, |a| hard_term(a, ignored))?
                    .reshape(positions(x, self.axis))?
            ],
            _ if self.counts() => {
                let total = self.all(expr, x.rank(), kind, |a| hard_term(a, ignored))?;
                let counted = self.all(
                    Expr::new(op, &[&target]).maybe(&[weight.as_ref()]),
                    x.rank(),
                    kind,
                    |a| {
                        let one = a.x[0].builder().constant(1.0, kind);
                        unless(ignored, a.x[0], a.maybe[0].unwrap_or(one))
                    },
                )?;
                smallvec![total, counted]
            }
            _ => smallvec![self.all(expr, x.rank(), kind, |a| hard_term(a, ignored))?],
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
    unless(
        ignored,
        a.x[1],
        a.maybe[2].map_or(own, |all| own * a.p[0] + all * a.p[1]),
    )
}

/// The loss of one class under smoothed probabilities.
fn soft_term<'b>(a: &Args<'b>) -> Val<'b> {
    weighted((a.x[1] * a.p[0] + a.p[1]) * (a.x[2] - a.x[0]), a.maybe[0])
}

/// Zero where the class is the ignored one.
fn unless<'b>(ignored: Option<i64>, class: Val<'b>, value: Val<'b>) -> Val<'b> {
    ignored.map_or(value, |i| class.eq(i).select(value.lit(0.0), value))
}
