//! Gradients of lookups: added up where the elements were read.

use super::Lookup;
use crate::{
    Dims, Place, Result, Shape, Tensor,
    backend::ScatterOp,
    grad::{Back, Pulled, record},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

/// The zeros that a gradient is added to, where the operand lay.
pub(in crate::ops) struct Zeros {
    pub(super) shape: Shape,
    place: Place,
}

impl Zeros {
    pub(in crate::ops) fn like(x: &Tensor) -> Self {
        Self {
            shape: x.shape().clone(),
            place: x.into(),
        }
    }

    pub(in crate::ops) fn make(&self, gradient: &Tensor) -> Result<Tensor> {
        Tensor::zeros(&self.shape, gradient.dtype(), &self.place)
    }
}

/// Records an op that picks elements along `axis` of `x`: `forward` gives the values and their
/// positions (i32), which both lack that dimension where it is not kept. Each value hands its
/// gradient to the element that it is.
#[track_caller]
pub(in crate::ops) fn picked(
    op: &'static str,
    x: &Tensor,
    axis: usize,
    keepdim: bool,
    forward: impl FnOnce() -> Result<(Tensor, Tensor)>,
) -> Result<(Tensor, Tensor)> {
    let both = || forward().map(|(values, positions)| -> Outputs { smallvec![values, positions] });
    let mut out = record(op, &[x], both, |out| {
        let (zeros, positions) = (Zeros::like(x), out[1].clone());
        Ok(move |b: &Back<'_>| {
            let with_axis = |t: &Tensor| {
                if keepdim {
                    Ok(t.clone())
                } else {
                    t.unsqueeze(axis as i64)
                }
            };
            let g = with_axis(b.grad()?)?;
            Ok(smallvec![Some(zeros.make(&g)?.scatter(
                axis as i64,
                &with_axis(&positions)?,
                &g,
                ScatterOp::Add
            )?)])
        })
    })?;
    let positions = out.remove(1);
    Ok((out.remove(0), positions))
}

impl Lookup {
    /// The gradient of the source: that of the result, added where it was read.
    pub(super) fn pull(
        &self,
        src: &Tensor,
        axes: &[(usize, &Tensor)],
    ) -> impl Fn(&Back<'_>) -> Result<Pulled> + Send + Sync + 'static {
        let zeros = Zeros::like(src);
        let at: SmallVec<[(usize, Tensor); 2]> = axes
            .iter()
            .map(|(axis, index)| (*axis, (*index).clone()))
            .collect();
        // The indexed dimensions in front, as they are written.
        let order: Dims = at
            .iter()
            .map(|(axis, _)| *axis)
            .chain(self.kept.iter().copied())
            .collect();
        let (batch, front) = (self.batch.rank() as i64, self.front as i64);
        move |b: &Back<'_>| {
            let g = b.grad()?;
            if let [(axis, index)] = &at[..]
                && index.rank() == 1
            {
                return Ok(smallvec![Some(zeros.make(g)?.index_add(
                    *axis as i64,
                    index,
                    g
                )?)]);
            }
            let (from, to): (Dims<i64>, Dims<i64>) = (0..batch).map(|d| (front + d, d)).unzip();
            let indices: SmallVec<[&Tensor; 4]> = at.iter().map(|(_, index)| index).collect();
            let moved = zeros.make(g)?.reordered("permute", &order)?.index_put(
                &indices,
                &g.movedim(&from, &to)?,
                true,
            )?;
            let mut back: Dims = smallvec![0; order.len()];
            for (i, d) in order.iter().enumerate() {
                back[*d] = i;
            }
            Ok(smallvec![Some(moved.reordered("permute", &back)?)])
        }
    }
}
