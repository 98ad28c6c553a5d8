//! Losses over classes, and the gradient of logits, as row programs: the logits are read once for
//! each.

use super::{Classes, unless, weighted};
use crate::{
    DType, Result, Tensor,
    backend::{CheckIndexCall, ReduceOp, RowArgs, RowBuilder},
    launch::check_index,
    map::Val,
    ops::row_program::Rows,
    tensor::Outputs,
};

/// What is known of each position: of the shape of the logits with one class.
pub(super) struct PerPosition {
    pub(super) lse: Tensor,
    /// The loss; zero where it does not count.
    pub(super) loss: Tensor,
    /// What the position weighs in a mean, where that is asked for.
    pub(super) weight: Option<Tensor>,
}

/// Whether the class of a column is the one that a row wants. The target was checked: what is left out
/// by this cast is no class.
fn is_class<'b>(column: Val<'b>, target: Val<'b>) -> Val<'b> {
    column.eq(target.cast(DType::I32))
}

/// The loss of a row from its log-sum-exp and its own logit, and where there are such its weight
/// and the loss spread over all classes.
fn term<'b>(
    a: &RowArgs<'b>,
    [lse, picked]: [usize; 2],
    [own, spread]: [Option<usize>; 2],
    ignored: Option<i64>,
) -> Val<'b> {
    let loss = weighted(a.r[lse] - a.r[picked], own.map(|own| a.r[own]));
    let loss = spread.map_or(loss, |all| loss * a.p[0] + a.r[all] * a.p[1]);
    unless(ignored, a.x[1], loss)
}

impl Classes {
    /// Logits as rows of classes, where classes are innermost.
    fn logits<'t>(
        &self,
        x: &'t Tensor,
        target: &Tensor,
        others: &[&Tensor],
    ) -> Result<Option<Rows<'t>>> {
        if self.soft || self.axis + 1 != x.rank() || i32::try_from(self.count).is_err() {
            return Ok(None);
        }
        let operands: Vec<&Tensor> = [x, target]
            .into_iter()
            .chain(others.iter().copied())
            .collect();
        Rows::new(self.op, x, 1, &operands)
    }

    /// The losses of logits by one launch; `None` where they are to be composed.
    #[track_caller]
    pub(super) fn fused(
        &self,
        x: &Tensor,
        target: &Tensor,
        weight: Option<&Tensor>,
    ) -> Result<Option<PerPosition>> {
        let others: Vec<&Tensor> = weight.into_iter().collect();
        let Some(rows) = self.logits(x, target, &others)? else {
            return Ok(None);
        };
        let mut inputs = vec![x.dtype(), target.dtype()];
        inputs.extend(weight.map(|weight| weight.dtype()));
        let mut b = RowBuilder::new(&inputs, 2);
        let lse = b.fold(ReduceOp::LogSumExp, None, |a| a.x[0])?;
        let picked = b.fold(ReduceOp::Sum, None, |a| {
            is_class(a.column(), a.x[1]).select(a.x[0], a.x[0].lit(0.0))
        })?;
        let own = match weight {
            Some(_) => Some(b.fold(ReduceOp::Sum, None, |a| {
                is_class(a.column(), a.x[1]).select(a.x[2], a.x[2].lit(0.0))
            })?),
            None => None,
        };
        let spread = match self.smoothing > 0.0 {
            true => Some(b.fold(ReduceOp::Sum, None, |a| {
                weighted(a.r[lse] - a.x[0], a.x.get(2).copied())
            })?),
            false => None,
        };
        let ignored = self.ignored;
        let counted = self.counts();
        if counted {
            b.rows(|a| {
                let one = own.map_or(a.r[lse].lit(1.0), |own| a.r[own]);
                [
                    a.r[lse],
                    term(a, [lse, picked], [own, spread], ignored),
                    unless(ignored, a.x[1], one),
                ]
            })?;
        } else {
            b.rows(|a| [a.r[lse], term(a, [lse, picked], [own, spread], ignored)])?;
        }
        let rows = rows.elements(x)?.per_row(target)?;
        let rows = match weight {
            Some(weight) => rows.per_column(weight)?,
            None => rows,
        };
        let Some(mut made) = rows.launch(b.finish()?, &self.shares())? else {
            return Ok(None);
        };
        // A reduction finds nothing where a class is none: that has to be looked for.
        let call = CheckIndexCall {
            op: self.op,
            indices: self.index(target)?.view()?,
            len: self.count,
        };
        check_index(x.device(), call)?;
        let shape = x.shape().with(self.axis, 1);
        let positions = |t: Tensor| t.reshape(&shape);
        let weight = match counted {
            true => Some(positions(made.remove(2))?),
            false => None,
        };
        Ok(Some(PerPosition {
            loss: positions(made.remove(1))?,
            lse: positions(made.remove(0))?,
            weight,
        }))
    }

    /// The gradient of logits by one launch, from the operands of the map that it is otherwise;
    /// `None` where it is to be that. Where `last`, nobody reads the logits after it. A part of all
    /// classes begins with `first`.
    #[track_caller]
    pub(super) fn fused_gradient(
        &self,
        (x, last, first): (&Tensor, bool, Option<usize>),
        target: &Tensor,
        lse: &Tensor,
        g: &Tensor,
        share: Option<&Tensor>,
        weight: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let others: Vec<&Tensor> = [lse, g].into_iter().chain(share).chain(weight).collect();
        let Some(rows) = self.logits(x, target, &others)? else {
            return Ok(None);
        };
        let mut inputs = vec![x.dtype(), target.dtype(), lse.dtype(), g.dtype()];
        inputs.extend(share.map(|share| share.dtype()));
        inputs.extend(weight.map(|weight| weight.dtype()));
        let mut factors = self.factors().to_vec();
        // A float is exactly as many numbers.
        if first.is_some_and(|_| self.count > 1 << 24) {
            return Ok(None);
        }
        factors.extend(first.map(|first| first as f64));
        let mut b = RowBuilder::new(&inputs, factors.len());
        b.each([x.dtype()], |a| {
            let column = match first {
                Some(_) => a.column() + a.p[3].cast(DType::I32),
                None => a.column(),
            };
            let is_own = is_class(column, a.x[1]);
            let wanted = if self.smoothing > 0.0 {
                is_own.select(a.p[0] + a.p[1], a.p[1])
            } else {
                is_own.select(a.p[0], a.p[0].lit(0.0))
            };
            let mut more = a.x[4..].iter().copied();
            let of_probability = share.and_then(|_| more.next()).unwrap_or(a.x[3]);
            let wanted = weighted(wanted, weight.and_then(|_| more.next()));
            let value = ((a.x[0] - a.x[2]).exp() * of_probability - wanted * a.x[3]) * a.p[2];
            [unless(self.ignored, a.x[1], value)]
        })?;
        let mut rows = rows
            .over(last)
            .elements(x)?
            .per_row(target)?
            .per_row(lse)?
            .per_row(g)?;
        if let Some(share) = share {
            rows = rows.per_row(share)?;
        }
        if let Some(weight) = weight {
            rows = rows.per_column(weight)?;
        }
        let made: Option<Outputs> = rows.launch(b.finish()?, &factors)?;
        Ok(made.map(|mut made| made.remove(0)))
    }
}
