//! Where the largest and smallest elements are.

use super::{Reduce, as_is, front, reduced_shape, settled};
use crate::{
    DType, Dims, Error, Result, Tensor,
    backend::ReduceOp,
    ops::{Order, index::picked},
    spmd::built::Combine,
};

/// Position of an extreme along one axis, or in the flattened tensor.
#[track_caller]
fn position(
    x: &Tensor,
    op: &'static str,
    axis: Option<i64>,
    keepdim: bool,
    reduce: ReduceOp,
) -> Result<Tensor> {
    let axes: Dims = match axis {
        Some(axis) => smallvec::smallvec![x.shape().axis(op, axis)?],
        None => (0..x.rank()).collect(),
    };
    // Bools are compared as integers.
    let dtype = if x.dtype() == DType::Bool {
        DType::I32
    } else {
        x.dtype()
    };
    let program = front(op, x.dtype(), dtype, |v| v)?;
    Reduce {
        op,
        program: &program,
        operands: &[x],
        params: &[],
        axes: &axes,
        keepdim,
        reduce,
        scale: None,
        dtype: DType::I32,
        linear: false,
    }
    .run()
}

/// An extreme along one axis and its position, which gets its gradient.
#[track_caller]
fn extreme(
    x: &Tensor,
    op: &'static str,
    position_op: &'static str,
    axis: i64,
    keepdim: bool,
    (value_of, position_of): (ReduceOp, ReduceOp),
) -> Result<(Tensor, Tensor)> {
    picked(op, x, x.shape().axis(op, axis)?, keepdim, || {
        let axes = [x.shape().axis(op, axis)?];
        let x = settled(op, x, &axes, Combine::Statistics(2))?;
        Ok((
            as_is(&x, op, &[axis], keepdim, value_of, x.dtype())?,
            position(&x, position_op, Some(axis), keepdim, position_of)?,
        ))
    })
}

impl Tensor {
    /// Position (`i32`) of the first largest value along an axis, or in the flattened tensor. The
    /// first NaN counts as largest.
    #[track_caller]
    pub fn argmax(&self, axis: Option<i64>, keepdim: bool) -> Result<Tensor> {
        position(self, "argmax", axis, keepdim, ReduceOp::ArgMax)
    }

    /// Position (`i32`) of the first smallest value along an axis, or in the flattened tensor. The
    /// first NaN counts as smallest.
    #[track_caller]
    pub fn argmin(&self, axis: Option<i64>, keepdim: bool) -> Result<Tensor> {
        position(self, "argmin", axis, keepdim, ReduceOp::ArgMin)
    }

    /// The largest value along an axis, and the position (`i32`) where it first occurs.
    #[track_caller]
    pub fn max_with_indices(&self, axis: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        extreme(
            self,
            "max_with_indices",
            "argmax",
            axis,
            keepdim,
            (ReduceOp::Max, ReduceOp::ArgMax),
        )
    }

    /// The smallest value along an axis, and the position (`i32`) where it first occurs.
    #[track_caller]
    pub fn min_with_indices(&self, axis: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        extreme(
            self,
            "min_with_indices",
            "argmin",
            axis,
            keepdim,
            (ReduceOp::Min, ReduceOp::ArgMin),
        )
    }

    /// The middle value along an axis, or of the flattened tensor, and its position (`i32`). Of an
    /// even number of values it is the lower of the two in the middle. If any value is NaN, it is
    /// the first NaN. An empty axis has none, which is an error.
    #[track_caller]
    pub fn median(&self, axis: Option<i64>, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let op = "median";
        let Some(axis) = axis else {
            let (values, positions) = self.reshape([self.numel()])?.median(Some(0), false)?;
            let shape = reduced_shape(self.shape(), &self.shape().axes(op, &[])?, keepdim);
            return Ok((values.reshape(&shape)?, positions.reshape(&shape)?));
        };
        let at = self.shape().axis(op, axis)?;
        let Some(last) = self.dims()[at].checked_sub(1) else {
            return Err(Error::argument(op, "axis", "an empty axis has no median").of([self]));
        };
        picked(op, self, at, keepdim, || {
            let mut positions = self
                .argsort(axis, Order::Ascending)?
                .narrow(axis, last / 2, 1)?;
            if self.dtype().is_float() && self.numel() > 0 {
                let (largest, first) = self.max_with_indices(axis, true)?;
                positions = largest.isnan()?.where_(&first, &positions)?;
            }
            let values = self.take_along_axis(axis, &positions)?;
            if keepdim {
                Ok((values, positions))
            } else {
                Ok((values.squeeze(&[axis])?, positions.squeeze(&[axis])?))
            }
        })
    }
}
