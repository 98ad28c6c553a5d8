//! Gradients of losses over classes. With the probabilities `p`, the weights `w` and the (smoothed)
//! target `t`, that of the logits is `p sum(w t) - w t` times the gradient of the loss: one map,
//! which reads the logits once.

use super::{Classes, unless, weighted};
use crate::{
    Result, Tensor,
    backend::{Affine, ReduceOp},
    grad::{Back, Pulled, is_recording},
    ops::{
        OpInfo,
        expr::{Expr, compute_type},
        index::gather_axes,
        loss::LossReduction,
        op,
    },
    spmd::{Call, Local, plain, without_partials},
};
use smallvec::{SmallVec, smallvec};

/// From logits, their targets, log-sum-exps and gradients of losses, what weights make of these, and
/// the weights, the gradient of the logits. Nothing crosses, also where classes are cut.
const PULL: OpInfo = op("cross_entropy_pull", "...v, ..., ..., ..., ..., v -> ...v");

impl Classes {
    #[track_caller]
    pub(super) fn pull(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
        lse: Option<&Tensor>,
        counted: Option<&Tensor>,
    ) -> Result<Pulled> {
        let g = without_partials(b.grad()?.clone())?;
        // The gradient of the loss of a position.
        let g = match (self.reduction, counted) {
            (LossReduction::None, _) => g.unsqueeze(self.axis as i64)?,
            (_, Some(counted)) => g.div(counted)?,
            _ => g,
        };
        let column = self.column(x, weight)?;
        if !self.logits {
            return Ok(smallvec![Some(self.pull_likelihood(
                x,
                target,
                &g,
                column.as_ref()
            )?)]);
        }
        // What was found is not tracked: a pass that is recorded needs it as a function of the
        // logits.
        let lse = match lse {
            Some(lse) if !is_recording(&[x]) => lse.clone(),
            _ => without_partials(self.log_sum_exp(x)?)?,
        };
        if self.soft {
            return self.pull_soft(b, x, target, &lse, &g, column.as_ref());
        }
        let last = b.is_last_of(x);
        Ok(smallvec![Some(self.pull_hard(
            (x, last),
            target,
            &lse,
            &g,
            weight,
            column.as_ref()
        )?)])
    }

    /// The number of the class of each logit, of classes from `first` on.
    fn class(&self, x: &Tensor, first: usize) -> Affine {
        Affine {
            offset: first as i64,
            strides: (0..x.rank()).map(|d| i64::from(d == self.axis)).collect(),
        }
    }

    /// What multiplies the gradient: the smoothed target's two parts and the scale.
    pub(super) fn factors(&self) -> [f64; 3] {
        let [own, all] = self.shares();
        [own, all, self.scale().unwrap_or(1.0)]
    }

    /// Of log-probabilities: minus the weight at the target.
    #[track_caller]
    fn pull_likelihood(
        &self,
        x: &Tensor,
        target: &Tensor,
        g: &Tensor,
        column: Option<&Tensor>,
    ) -> Result<Tensor> {
        // The log-probabilities are not read: they lend their shape and how they lie.
        let target = target.unsqueeze(self.axis as i64)?;
        let expr = Expr::new(self.op, &[x, &target, g])
            .maybe(&[column])
            .params(&[self.scale().unwrap_or(1.0)])
            .index(self.class(x, 0));
        expr.map(x.dtype(), |a| {
            let own = a.i[0]
                .cast(target.dtype())
                .eq(a.x[1])
                .select(weighted(-a.x[2] * a.p[0], a.maybe[0]), a.x[2].lit(0.0));
            unless(self.ignored, a.x[1], own)
        })
    }

    #[track_caller]
    fn pull_hard(
        &self,
        (x, last): (&Tensor, bool),
        target: &Tensor,
        lse: &Tensor,
        g: &Tensor,
        weight: Option<&Tensor>,
        column: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (op, kind, target) = (
            self.op,
            compute_type([x]),
            target.unsqueeze(self.axis as i64)?,
        );
        // The sum of the weighted target, times the gradient; the gradient itself without weights.
        let share = match weight {
            None => None,
            Some(weight) => {
                let own = gather_axes(op, weight, &[(0, &self.index(&target)?)])?;
                let all = Expr::new(op, &[weight])
                    .reduce(&[0], ReduceOp::Sum, None, kind, |a| a.x[0])?
                    .reshape(())?;
                Some(
                    Expr::new(op, &[&own, &all, g])
                        .params(&self.factors())
                        .map(kind, |a| (a.x[0] * a.p[0] + a.x[1] * a.p[1]) * a.x[2])?,
                )
            }
        };
        let (share, classes) = (share.as_ref(), [weight, column]);
        let operands = [Some(x), Some(&target), Some(lse), Some(g), share, weight];
        let operands: SmallVec<[&Tensor; 6]> = operands.into_iter().flatten().collect();
        if self.axis + 1 == x.rank() && !plain(op, &operands)? && !is_recording(&operands) {
            return self.on_ranks((x, last), [&target, lse, g], share, weight);
        }
        self.of_logits((x, last, None), [&target, lse, g], share, classes)
    }

    /// The gradient of logits on a mesh, where classes are innermost: one launch for each rank, for
    /// the classes that it has.
    #[track_caller]
    fn on_ranks(
        &self,
        (x, last): (&Tensor, bool),
        each: [&Tensor; 3],
        share: Option<&Tensor>,
        weight: Option<&Tensor>,
    ) -> Result<Tensor> {
        // Numbers of positions as dimensions of their own, and back.
        let flat = |t: &Tensor| match t.rank() == x.rank() {
            true => t.squeeze(&[-1]),
            false => Ok(t.clone()),
        };
        let back = |t: &Tensor| match t.rank() + 1 == x.rank() {
            true => t.unsqueeze(-1),
            false => Ok(t.clone()),
        };
        let [target, lse, g] = each.map(flat);
        let (target, lse, g, share) = (target?, lse?, g?, share.map(flat).transpose()?);
        let there = [
            Some(x),
            Some(&target),
            Some(&lse),
            Some(&g),
            share.as_ref(),
            weight,
        ];
        let operands: SmallVec<[&Tensor; 6]> = there.into_iter().flatten().collect();
        let local = |l: &Local<'_>| {
            let inputs = l.inputs;
            let last = last && l.is_as_given(0, x);
            let is_cut = inputs[0].dims()[self.axis] != self.count;
            let first = is_cut.then(|| l.region(0, x.shape()).start[self.axis]);
            let mut more = inputs[4..].iter();
            let share = share
                .as_ref()
                .and_then(|_| more.next())
                .map(back)
                .transpose()?;
            let weight = weight.and_then(|_| more.next());
            let column = self.column(&inputs[0], weight)?;
            let [target, lse, g] = [1, 2, 3].map(|i| back(&inputs[i]));
            self.of_logits(
                (&inputs[0], last, first),
                [&target?, &lse?, &g?],
                share.as_ref(),
                [weight, column.as_ref()],
            )
        };
        Call::of(&PULL, &operands)
            .on_behalf_of(self.op)
            .optional(4, &[share.as_ref(), weight])
            .run1(local)
    }

    /// The gradient of logits from what is known of each position, of the shape of the logits with
    /// one class, and of each class. Where they are a part of all classes, these begin with `first`.
    #[track_caller]
    fn of_logits(
        &self,
        (x, last, first): (&Tensor, bool, Option<usize>),
        [target, lse, g]: [&Tensor; 3],
        share: Option<&Tensor>,
        [weight, column]: [Option<&Tensor>; 2],
    ) -> Result<Tensor> {
        let made = self.fused_gradient((x, last, first), target, lse, g, share, weight)?;
        if let Some(out) = made {
            return Ok(out);
        }
        let expr = Expr::new(self.op, &[x, lse, target, g])
            .maybe(&[share, column])
            .params(&self.factors())
            .index(self.class(x, first.unwrap_or(0)));
        expr.map(x.dtype(), |a| {
            let is_own = a.i[0].cast(target.dtype()).eq(a.x[2]);
            let wanted = if self.smoothing > 0.0 {
                is_own.select(a.p[0] + a.p[1], a.p[1])
            } else {
                is_own.select(a.p[0], a.p[0].lit(0.0))
            };
            let of_probability = a.maybe[0].unwrap_or(a.x[3]);
            unless(
                self.ignored,
                a.x[2],
                ((a.x[0] - a.x[1]).exp() * of_probability - weighted(wanted, a.maybe[1]) * a.x[3])
                    * a.p[2],
            )
        })
    }

    #[track_caller]
    fn pull_soft(
        &self,
        b: &Back<'_>,
        x: &Tensor,
        target: &Tensor,
        lse: &Tensor,
        g: &Tensor,
        column: Option<&Tensor>,
    ) -> Result<Pulled> {
        let (op, kind) = (self.op, compute_type([x]));
        let of_logits = b.wanted(0, || {
            let total = Expr::new(op, &[target])
                .maybe(&[column])
                .params(&self.shares());
            let total =
                without_partials(total.reduce(&[self.axis], ReduceOp::Sum, None, kind, |a| {
                    weighted(a.x[0] * a.p[0] + a.p[1], a.maybe[0])
                })?)?;
            let expr = Expr::new(op, &[x, target, lse, g, &total])
                .maybe(&[column])
                .params(&self.factors());
            expr.map(x.dtype(), |a| {
                ((a.x[0] - a.x[2]).exp() * a.x[4] - weighted(a.x[1] * a.p[0] + a.p[1], a.maybe[0]))
                    * a.x[3]
                    * a.p[2]
            })
        })?;
        let of_target = b.wanted(1, || {
            let expr = Expr::new(op, &[x, lse, g])
                .maybe(&[column])
                .params(&self.factors());
            expr.map(target.dtype(), |a| {
                weighted(a.x[1] - a.x[0], a.maybe[0]) * a.x[2] * a.p[0] * a.p[2]
            })
        })?;
        Ok(smallvec![of_logits, of_target])
    }
}
