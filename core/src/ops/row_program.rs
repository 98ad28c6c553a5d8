//! From tensors to a row program.

use crate::{
    Layout, Result, Tensor, View,
    backend::{RowProgram, RowProgramCall},
    grad::is_recording,
    launch::launch_fused,
    tensor::{Outputs, plain},
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Plain tensors as the inputs of a row program.
pub(crate) struct Rows<'t> {
    op: &'static str,
    like: &'t Tensor,
    shape: [usize; 2],
    /// How many of the last dimensions are a row.
    dims: usize,
    inputs: SmallVec<[View; 4]>,
    over: bool,
}

impl<'t> Rows<'t> {
    /// The rows along the last `dims` dimensions of `like`. There are none where operands lie on a
    /// mesh or are tracked (what is then to be recorded are the steps), and none without elements.
    pub(crate) fn new(
        op: &'static str,
        like: &'t Tensor,
        dims: usize,
        operands: &[&Tensor],
    ) -> Result<Option<Self>> {
        if like.numel() == 0 || !plain(op, operands)? || is_recording(operands) {
            return Ok(None);
        }
        let n = like.dims()[like.rank() - dims..].iter().product();
        Ok(Some(Self {
            op,
            like,
            shape: [like.numel() / n, n],
            dims,
            inputs: smallvec![],
            over: false,
        }))
    }

    /// Where `last`, the first input is read for the last time, and the first output may take its
    /// memory.
    pub(crate) fn over(mut self, last: bool) -> Self {
        self.over = last;
        self
    }

    /// How long rows are.
    pub(crate) fn length(&self) -> usize {
        self.shape[1]
    }

    fn push(mut self, mut view: View, offset: usize, strides: [isize; 2]) -> Self {
        view.layout = Layout {
            shape: self.shape.into(),
            strides: strides.into_iter().collect(),
            offset,
        };
        self.inputs.push(view);
        self
    }

    /// With the elements of a tensor of the common shape.
    pub(crate) fn elements(self, x: &Tensor) -> Result<Self> {
        debug_assert_eq!(x.shape(), self.like.shape());
        let view = x.view()?;
        let (offset, cut) = (view.layout.offset, x.rank() - self.dims);
        let step = |from: usize, to: usize| {
            let dims = view.layout.shape.dims()[from..to].iter();
            single_step(dims.copied().zip(view.layout.strides[from..to].to_vec()))
        };
        if let (Some(row), Some(column)) = (step(0, cut), step(cut, x.rank())) {
            return Ok(self.push(view, offset, [row, column]));
        }
        let dense = x.contiguous()?.view()?;
        let (offset, n) = (dense.layout.offset, self.shape[1]);
        Ok(self.push(dense, offset, [n as isize, 1]))
    }

    /// With a number for each row, in order, or one for all.
    pub(crate) fn per_row(self, x: &Tensor) -> Result<Self> {
        let dense = x.contiguous()?.view()?;
        let step = isize::from(x.numel() > 1);
        let offset = dense.layout.offset;
        Ok(self.push(dense, offset, [step, 0]))
    }

    /// With a number for each column, in order.
    pub(crate) fn per_column(self, x: &Tensor) -> Result<Self> {
        let dense = x.contiguous()?.view()?;
        let offset = dense.layout.offset;
        Ok(self.push(dense, offset, [0, 1]))
    }

    /// Runs a program over them: its outputs of elements in the common shape, then those of rows
    /// and of columns; `None` where the device has no kernel for it.
    pub(crate) fn launch(
        self,
        program: Arc<RowProgram>,
        params: &[f64],
    ) -> Result<Option<Outputs>> {
        let elements = program.dtypes()[0].len();
        let call = RowProgramCall {
            op: self.op,
            program,
            shape: self.shape.into(),
            inputs: self.inputs,
            params: params.iter().map(|p| crate::Scalar::Float(*p)).collect(),
            over: self.over,
        };
        let Some(mut made) = launch_fused(self.like.mesh(), call)? else {
            return Ok(None);
        };
        for out in &mut made[..elements] {
            *out = out.with_layout(Layout::contiguous(self.like.shape().clone()));
        }
        Ok(Some(made))
    }
}

/// The step between neighbours of dimensions that lie as one; `None` where they do not.
fn single_step(dims: impl DoubleEndedIterator<Item = (usize, isize)>) -> Option<isize> {
    let mut merged: Option<(isize, isize)> = None;
    for (size, stride) in dims.rev().filter(|(size, _)| *size != 1) {
        let reach = stride * size as isize;
        merged = match merged {
            None => Some((stride, reach)),
            Some((step, before)) if before == stride => Some((step, reach)),
            Some(_) => return None,
        };
    }
    Some(merged.map_or(1, |(step, _)| step))
}

#[cfg(test)]
mod tests {
    use super::single_step;

    #[test]
    fn dimensions_are_one_where_each_goes_on_where_the_next_ends() {
        let step = |dims: &[(usize, isize)]| single_step(dims.iter().copied());
        assert_eq!(step(&[(3, 8), (4, 2)]), Some(2));
        assert_eq!(step(&[(3, 8), (1, 77), (4, 2)]), Some(2));
        assert_eq!(step(&[(3, 9), (4, 2)]), None);
        assert_eq!(step(&[(3, 0), (4, 0)]), Some(0));
        assert_eq!(step(&[(3, 0), (4, 1)]), None);
        assert_eq!(step(&[(1, 5)]), Some(1));
    }
}
