//! Gradients of scatters: updates read theirs where they were written; the destination keeps its
//! own, but for what was overwritten.

use super::super::{PadMode, index_kind};
use crate::{
    DType, Place, Result, Shape, Tensor,
    backend::ScatterOp,
    grad::{Back, Pulled},
    ops::sum_to,
};
use smallvec::{SmallVec, smallvec};

/// The places that a scatter writes.
pub(super) enum Spots {
    /// See [`Tensor::scatter`].
    Along(i64, Tensor),
    /// See [`Tensor::put_along_axis`].
    Put(i64, Tensor),
    /// See [`Tensor::index_put`].
    Leading(SmallVec<[Tensor; 2]>),
}

impl Spots {
    /// What a tensor of the destination's shape has there.
    fn read(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Spots::Along(axis, index) => x.gather(*axis, index),
            Spots::Put(axis, index) => x.take_along_axis(*axis, index),
            Spots::Leading(indices) => {
                x.index_get(&indices.iter().collect::<SmallVec<[&Tensor; 4]>>())
            }
        }
    }

    fn write(&self, x: &Tensor, updates: &Tensor, mode: ScatterOp) -> Result<Tensor> {
        match self {
            Spots::Along(axis, index) => x.scatter(*axis, index, updates, mode),
            Spots::Put(axis, index) => x.put_along_axis(*axis, index, updates, mode),
            Spots::Leading(indices) => x.index_put(
                &indices.iter().collect::<SmallVec<[&Tensor; 4]>>(),
                updates,
                mode == ScatterOp::Add,
            ),
        }
    }
}

/// What the gradient of a scatter needs.
pub(super) struct Scattered {
    pub(super) op: &'static str,
    pub(super) mode: ScatterOp,
    pub(super) spots: Spots,
    dst: Shape,
    place: Place,
    updates: Shape,
    /// What the updates expand to, or are cut to.
    full: Shape,
    /// Destination, updates and result, for modes in which values matter.
    values: Option<[Tensor; 3]>,
}

impl Scattered {
    pub(super) fn new(
        op: &'static str,
        mode: ScatterOp,
        spots: Spots,
        dst: &Tensor,
        updates: &Tensor,
        full: Shape,
        out: &Tensor,
    ) -> Self {
        let values = (!matches!(mode, ScatterOp::Set | ScatterOp::Add))
            .then(|| [dst, updates, out].map(Clone::clone));
        Self {
            op,
            mode,
            spots,
            dst: dst.shape().clone(),
            place: dst.into(),
            updates: updates.shape().clone(),
            full,
            values,
        }
    }

    /// The gradients of the operands: the destination is the first, the updates are the last of
    /// `operands`.
    pub(super) fn pull(&self, back: &Back<'_>, operands: usize) -> Result<Pulled> {
        let g = back.grad()?;
        let last = operands - 1;
        let mut pulled: Pulled = smallvec![None; operands];
        match (&self.values, self.mode) {
            (Some([x, v, out]), ScatterOp::Mul) => {
                self.product(back, g, x, v, &back.out(0, out), &mut pulled)?
            }
            (Some([x, v, out]), _) => {
                // Those that are the extreme share its gradient.
                let v = self.expanded(v)?;
                let (here, there) = (x.eq(out)?, v.eq(&self.spots.read(out)?)?);
                let share = g.div(&self.spots.write(
                    &here.cast(g.dtype())?,
                    &there.cast(g.dtype())?,
                    ScatterOp::Add,
                )?)?;
                pulled[0] = back.wanted(0, || here.where_(&share, 0))?;
                pulled[last] = back.wanted(last, || {
                    self.reduced(&there.where_(&self.spots.read(&share)?, 0)?)
                })?;
            }
            (None, ScatterOp::Set) => {
                pulled[0] = back.wanted(0, || {
                    self.spots.write(g, &self.zero_updates(g)?, ScatterOp::Set)
                })?;
                pulled[last] = back.wanted(last, || {
                    self.reduced(&self.winners()?.where_(&self.spots.read(g)?, 0)?)
                })?;
            }
            (None, _) => {
                pulled[0] = back.needs(0).then(|| g.clone());
                pulled[last] = back.wanted(last, || self.reduced(&self.spots.read(g)?))?;
            }
        }
        Ok(pulled)
    }

    /// Zeros for every place that is written.
    fn zero_updates(&self, like: &Tensor) -> Result<Tensor> {
        match &self.spots {
            Spots::Along(_, index) => Tensor::zeros(&self.full, like.dtype(), index),
            _ => Tensor::zeros((), like.dtype(), &self.place.mesh),
        }
    }

    /// Which updates were the last at their place: they are numbered, written, and those that find
    /// their own number were.
    fn winners(&self) -> Result<Tensor> {
        // Where whole slices are written, one number for each slice is enough.
        let slices = match &self.spots {
            Spots::Leading(indices) => self.dst.rank() - indices.len(),
            _ => 0,
        };
        let written: Shape = self.full.dims()[..self.full.rank() - slices].into();
        let dtype = index_kind(written.numel()).dtype();
        let numbers = Tensor::arange(0, written.numel() as i64, 1, dtype, &self.place.mesh)?
            .reshape(&written)?;
        let nothing = Tensor::zeros(
            &self.dst.dims()[..self.dst.rank() - slices],
            dtype,
            &self.place.mesh,
        )?;
        let won = self
            .spots
            .read(&self.spots.write(&nothing, &numbers, ScatterOp::Set)?)?
            .eq(&numbers)?;
        won.reshape(
            written
                .dims()
                .iter()
                .copied()
                .chain(std::iter::repeat_n(1, slices))
                .collect::<Shape>(),
        )
    }

    /// Updates as they are written: for each place one.
    fn expanded(&self, updates: &Tensor) -> Result<Tensor> {
        match self.spots {
            Spots::Along(..) => (0..self.full.rank()).try_fold(updates.clone(), |t, d| {
                if t.dims()[d] == self.full[d] {
                    Ok(t)
                } else {
                    t.narrow(d as i64, 0, self.full[d])
                }
            }),
            _ => updates.expand(&self.full),
        }
    }

    /// The gradient of the updates from that of the expanded ones.
    fn reduced(&self, gradient: &Tensor) -> Result<Tensor> {
        match self.spots {
            Spots::Along(..) => {
                let unused: Vec<(usize, usize)> = self
                    .updates
                    .dims()
                    .iter()
                    .zip(gradient.dims())
                    .map(|(all, used)| (0, all - used))
                    .collect();
                gradient.pad(&unused, PadMode::Constant(0.0.into()))
            }
            _ => sum_to(self.op, gradient, &self.updates),
        }
    }

    /// The gradients of `out`, a product of `x` and the values `v` for a place.
    fn product(
        &self,
        back: &Back<'_>,
        g: &Tensor,
        x: &Tensor,
        v: &Tensor,
        out: &Tensor,
        pulled: &mut Pulled,
    ) -> Result<()> {
        let last = pulled.len() - 1;
        let v = self.expanded(v)?;
        pulled[0] = back.wanted(0, || {
            self.spots
                .write(&x.ones_like()?, &v, ScatterOp::Mul)?
                .mul(g)
        })?;
        if !back.needs(last) {
            return Ok(());
        }
        // A value that is not zero divides the product. For one that is zero, the others count:
        // their product is zero too where there is a second zero, and that one (the sum of all
        // zeros but the own) is still written as a factor, since it has a derivative.
        let zero = v.eq(0)?;
        let quotient = self.spots.read(&g.mul(out)?)?.div(&zero.where_(1, &v)?)?;
        let zeros = self.spots.read(&self.spots.write(
            &Tensor::zeros(&self.dst, DType::I32, &self.place)?,
            &zero.cast(DType::I32)?,
            ScatterOp::Add,
        )?)?;
        let others = self.spots.read(&g.mul(&self.spots.write(
            x,
            &zero.where_(1, &v)?,
            ScatterOp::Mul,
        )?)?)?;
        let nothing = Tensor::zeros(&self.dst, v.dtype(), &self.place)?;
        let second = self
            .spots
            .read(
                &self
                    .spots
                    .write(&nothing, &zero.where_(&v, 0)?, ScatterOp::Add)?,
            )?
            .sub(&v)?;
        let factor = zeros.eq(1)?.where_(1, &zeros.eq(2)?.where_(&second, 0)?)?;
        pulled[last] = Some(self.reduced(&zero.where_(&others.mul(&factor)?, &quotient)?)?);
        Ok(())
    }
}
