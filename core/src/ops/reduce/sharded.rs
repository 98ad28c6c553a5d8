//! Reductions on a mesh: by their rule, and in two steps where parts of a reduced dimension combine by
//! more than a reduction.

use super::{REDUCED, Reduce, is_identity, over, reduced_shape};
use crate::{
    DType, Dims, Error, Place, Reduction, Result, Shape, Sharding, Tensor,
    backend::ReduceOp,
    spmd::{
        Call, Local,
        built::{Combine, reduce_data},
        parts_of,
    },
};

impl Reduce<'_> {
    /// Dimensions that are reduced may be cut: results are then partial, or (positions,
    /// log-sum-exp) combined from one result for each part.
    #[track_caller]
    pub(super) fn run_sharded(&self) -> Result<Tensor> {
        let (first, shape) = (self.operands[0], self.operands[0].shape());
        if shape.numel() == 0 {
            // The result has no elements, or is a constant.
            let out = reduced_shape(shape, self.axes, self.keepdim);
            return Place::from(first.mesh()).build(self.dtype, &out, |device, _| {
                let nothing = Tensor::nothing(first.dtype(), shape.clone(), device);
                self.of(&[&nothing], self.axes).run_plain()
            });
        }
        let reduction = self.reduction();
        // Partial values of the same reduction pass where nothing is done to them first.
        let passes = self.linear && !self.program.has_pole(self.params)
            || (self.operands.len() == 1 && is_identity(self.program));
        let combine = match reduction {
            Some(reduction) => Combine::By(reduction, passes),
            None if self.reduce == ReduceOp::LogSumExp => Combine::Statistics(1),
            None => Combine::Statistics(2),
        };
        let local = |l: &Local<'_>| {
            let parts: smallvec::SmallVec<[&Tensor; 3]> = l.inputs.iter().collect();
            let out = reduced_shape(l[0].shape(), self.axes, self.keepdim);
            match reduction.filter(|_| l[0].numel() == 0 && out.numel() > 0) {
                Some(reduction) => Tensor::full(
                    out,
                    reduction.identity(self.dtype),
                    self.dtype,
                    l[0].device(),
                ),
                None => self.of(&parts, self.axes).run_plain(),
            }
        };
        Call::of(&REDUCED, self.operands)
            .on_behalf_of(self.op)
            .data(&reduce_data(self.axes, self.keepdim, combine))
            .run1_or(local, |inputs| self.two_steps(inputs))
    }

    /// Where the results for the parts of reduced dimensions meet: each rank combines a part of
    /// another dimension, the first that has room; else every rank all of them.
    fn meeting(&self, x: &Tensor) -> Sharding {
        let reduced = |d: &usize| self.axes.contains(d);
        let cuts = x.sharding().cuts().filter(|(d, _)| reduced(d));
        let axes: Dims = cuts.map(|(_, axis)| axis).collect();
        let whole = (axes.iter()).fold(x.sharding().clone(), |s, axis| s.without(*axis));
        let parts: usize = axes.iter().map(|axis| x.mesh().size(*axis)).product();
        let room = |d: &usize| x.dims()[*d] / parts_of(x, *d) >= parts;
        match (0..x.rank()).find(|d| !reduced(d) && room(d)) {
            Some(d) => axes.iter().fold(whole, |s, axis| s.cut(d, *axis)),
            None => whole,
        }
    }

    /// One result for each part of the reduced dimensions, then those combined: only they cross.
    #[track_caller]
    fn two_steps(&self, operands: &[Tensor]) -> Result<Tensor> {
        let (x, keep) = (
            &operands[0],
            Reduce {
                keepdim: true,
                ..*self
            },
        );
        let mesh = x.mesh();
        let parts_of = |d: usize| {
            x.sharding()
                .axes_of(d)
                .map(|a| mesh.size(a))
                .product::<usize>()
        };
        let shape: Shape = (0..x.rank())
            .map(|d| {
                if self.axes.contains(&d) {
                    parts_of(d)
                } else {
                    x.dims()[d]
                }
            })
            .collect();
        let meeting = self.meeting(x);
        let each = |i: usize| operands.iter().map(|t| t.held(i)).collect::<Vec<_>>();
        let on_mesh = |dtype: DType, parts: Vec<Tensor>| {
            Tensor::from_parts(mesh, x.sharding().clone(), dtype, shape.clone(), parts)
                .reshard(&meeting)
        };
        let squeeze = |t: Tensor| {
            if self.keepdim {
                Ok(t)
            } else {
                t.squeeze(&self.axes.iter().map(|a| *a as i64).collect::<Vec<_>>())
            }
        };
        let ranks = || mesh.held();
        if self.reduce == ReduceOp::LogSumExp {
            let parts = ranks()
                .map(|(i, _)| {
                    keep.of(&each(i).iter().collect::<Vec<_>>(), self.axes)
                        .run_plain()
                })
                .collect::<Result<Vec<_>>>()?;
            let whole = on_mesh(self.dtype, parts)?;
            return over(
                &whole,
                self.op,
                self.axes,
                self.keepdim,
                ReduceOp::LogSumExp,
                self.dtype,
            );
        }
        let (extreme, reduction) = if self.reduce == ReduceOp::ArgMax {
            (ReduceOp::Max, Reduction::Max)
        } else {
            (ReduceOp::Min, Reduction::Min)
        };
        let dtype = self.program.outputs[0].1;
        let (mut values, mut positions) = (vec![], vec![]);
        for (i, rank) in ranks() {
            let parts = each(i);
            let out = reduced_shape(parts[0].shape(), self.axes, true);
            if parts[0].numel() == 0 && out.numel() > 0 {
                // A rank without elements never wins: its position is behind every other.
                values.push(Tensor::full(
                    &out,
                    reduction.identity(dtype),
                    dtype,
                    parts[0].device(),
                )?);
                positions.push(Tensor::full(&out, i32::MAX, DType::I32, parts[0].device())?);
                continue;
            }
            let refs: Vec<&Tensor> = parts.iter().collect();
            values.push(
                Reduce {
                    reduce: extreme,
                    dtype,
                    ..keep
                }
                .of(&refs, self.axes)
                .run_plain()?,
            );
            let at = keep.of(&refs, self.axes).run_plain()?;
            positions.push(global_positions(
                self.op,
                &at,
                self.axes,
                parts[0].dims(),
                &x.sharding().region(mesh, rank, x.shape()).start,
                x.dims(),
            )?);
        }
        let (values, positions) = (on_mesh(dtype, values)?, on_mesh(DType::I32, positions)?);
        let best = over(&values, self.op, self.axes, true, extreme, dtype)?;
        let mut wins = values.eq(&best)?;
        if dtype.is_float() {
            wins = wins.logical_or(&values.isnan()?.logical_and(&best.isnan()?)?)?;
        }
        squeeze(over(
            &wins.where_(&positions, i32::MAX)?,
            self.op,
            self.axes,
            true,
            ReduceOp::Min,
            DType::I32,
        )?)
    }
}

/// Positions in the reduced axes of a part, as positions in those of the whole.
fn global_positions(
    op: &'static str,
    at: &Tensor,
    axes: &[usize],
    part: &[usize],
    start: &[usize],
    whole: &[usize],
) -> Result<Tensor> {
    let number = |n: usize| i32::try_from(n).map_err(|_| Error::Positions { op, count: n });
    let (mut rest, mut out, mut stride) = (at.clone(), at.zeros_like()?, 1);
    for &axis in axes.iter().rev() {
        let coordinate = rest
            .remainder(number(part[axis])?)?
            .add(number(start[axis])?)?;
        rest = rest.floor_div(number(part[axis])?)?;
        out = out.add(&coordinate.mul(number(stride)?)?)?;
        stride *= whole[axis];
    }
    Ok(out)
}
