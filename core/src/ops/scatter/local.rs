//! Scatters on one device, which may hold only a part of what is written.

use super::super::{
    index::{Part, broadcast_all, check_indices, check_not_empty, index_axis, localize},
    launch::launch,
    map1, same_device,
};
use crate::{
    DType, Error, MapProgram, Result, Shape, Tensor,
    backend::{Affine, ScatterCall, ScatterOp},
};
use smallvec::{SmallVec, smallvec};

/// Where a scatter writes: the destination as rows, and the row of each position of `shape`.
struct Target<'a> {
    inner: usize,
    shape: &'a Shape,
    base: Affine,
    /// Index, size of its dimension, rows for one step.
    axes: &'a [(&'a Tensor, usize, usize)],
}

/// Runs a scatter of `updates` (`[shape.., inner]`) into a copy of `dst`.
fn run_scatter(
    op: &'static str,
    dst: &Tensor,
    target: &Target<'_>,
    updates: &Tensor,
    mode: ScatterOp,
) -> Result<Tensor> {
    for (index, ..) in target.axes {
        same_device(op, &[dst, updates, index])?;
    }
    check_types(op, dst, updates, mode)?;
    if updates.numel() == 0 {
        return Ok(dst.clone());
    }
    check_not_empty(op, dst)?;
    // A dense view may start in the middle of its buffer.
    let whole = if dst.is_contiguous() && dst.layout().offset == 0 {
        dst.clone()
    } else {
        map1(op, &MapProgram::cast(dst.dtype(), dst.dtype()), &[dst], &[])?
    };
    let axes = target
        .axes
        .iter()
        .map(|(index, len, stride)| index_axis(index, target.shape, *len, *stride as isize))
        .collect::<Result<_>>()?;
    let call = ScatterCall {
        op,
        dst: whole.view()?,
        rows: dst.numel() / target.inner,
        inner: target.inner,
        shape: target.shape.clone(),
        base: target.base.clone(),
        axes,
        updates: updates.view()?,
        mode,
    };
    Ok(launch(dst.mesh(), call)?.remove(0))
}

/// Scatters along one axis; `index` and `updates` have the same shape, and the rank of `dst`.
pub(super) fn along_axis(
    op: &'static str,
    dst: &Tensor,
    axis: usize,
    index: &Tensor,
    updates: &Tensor,
    mode: ScatterOp,
) -> Result<Tensor> {
    let strides = dst.shape().strides();
    let mut base = Affine {
        offset: 0,
        strides: strides.iter().map(|s| *s as i64).collect(),
    };
    base.strides[axis] = 0;
    let axes = [(index, dst.shape()[axis], strides[axis] as usize)];
    run_scatter(
        op,
        dst,
        &Target {
            inner: 1,
            shape: index.shape(),
            base,
            axes: &axes,
        },
        &updates.unsqueeze(-1)?,
        mode,
    )
}

/// Writes at indices of some axes on a rank that holds `part` of them: `write` gets the destination
/// and indices into it. Updates for other ranks go to one more slice, which is dropped.
pub(super) fn with_parts(
    op: &'static str,
    dst: &Tensor,
    axes: &[(usize, &Tensor)],
    part: impl Fn(usize) -> Option<Part>,
    write: impl Fn(&Tensor, &[&Tensor]) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut indices: SmallVec<[Tensor; 1]> =
        axes.iter().map(|(_, index)| (*index).clone()).collect();
    let mut cut: Option<(usize, Tensor)> = None;
    for (k, (axis, index)) in axes.iter().enumerate() {
        let Some(part) = part(*axis) else { continue };
        let (place, here) = localize(op, index, &part)?;
        indices[k] = place;
        cut = Some(match cut {
            Some((first, all)) => (first, all.logical_and(&here)?),
            None => (k, here),
        });
    }
    let Some((k, here)) = cut else {
        return write(dst, &indices.iter().collect::<SmallVec<[&Tensor; 4]>>());
    };
    if dst.numel() == 0 {
        return Ok(dst.clone());
    }
    let (axis, len) = (axes[k].0, dst.shape()[axes[k].0]);
    let elsewhere = Tensor::zeros(dst.shape().with(axis, 1), dst.dtype(), dst.device())?;
    let longer = Tensor::concat(&[dst, &elsewhere], axis as i64)?;
    indices[k] = here.where_(&indices[k], len as i64)?;
    write(&longer, &indices.iter().collect::<SmallVec<[&Tensor; 4]>>())?.narrow(axis as i64, 0, len)
}

/// [`with_parts`] for an index of one axis.
fn with_part(
    op: &'static str,
    dst: &Tensor,
    axis: usize,
    index: &Tensor,
    part: Option<Part>,
    write: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    with_parts(
        op,
        dst,
        &[(axis, index)],
        |_| part.clone(),
        |dst, indices| write(dst, indices[0]),
    )
}

/// A scatter at indices of the leading axes, checked.
pub(super) struct Leading {
    /// The common shape of the indices.
    pub(super) batch: Shape,
    /// What updates expand to.
    pub(super) full: Shape,
}

impl Leading {
    pub(super) fn new(
        op: &'static str,
        dst: &Tensor,
        indices: &[&Tensor],
        updates: &Tensor,
    ) -> Result<Self> {
        check_indices(op, indices)?;
        if indices.len() > dst.rank() {
            return Err(Error::Shape {
                op,
                detail: format!(
                    "{} index tensors were given for {}",
                    indices.len(),
                    dst.type_string()
                ),
            });
        }
        let batch = broadcast_all(op, indices)?;
        let full: Shape = batch
            .dims()
            .iter()
            .chain(&dst.dims()[indices.len()..])
            .copied()
            .collect();
        if updates.shape().broadcast(op, &full)? != full {
            return Err(Error::Shape {
                op,
                detail: format!(
                    "values of shape {} do not expand to {full}",
                    updates.shape()
                ),
            });
        }
        Ok(Self { batch, full })
    }

    /// Scatters slices on one device; `updates` expands to the common shape of the indices and the
    /// remaining dimensions.
    fn run(
        &self,
        op: &'static str,
        dst: &Tensor,
        indices: &[&Tensor],
        updates: &Tensor,
        mode: ScatterOp,
    ) -> Result<Tensor> {
        let (lead, rest) = dst.dims().split_at(indices.len());
        let inner = Shape::from(rest).checked_numel(op)?;
        let rows: Shape = self.batch.dims().iter().copied().chain([inner]).collect();
        let updates = updates.expand(&self.full)?.reshape(rows)?;
        let steps = Shape::from(lead).strides();
        let axes: Vec<(&Tensor, usize, usize)> = indices
            .iter()
            .zip(lead.iter().zip(&steps))
            .map(|(index, (len, step))| (*index, *len, *step as usize))
            .collect();
        let base = Affine {
            offset: 0,
            strides: smallvec![0; self.batch.rank()],
        };
        run_scatter(
            op,
            dst,
            &Target {
                inner,
                shape: &self.batch,
                base,
                axes: &axes,
            },
            &updates,
            mode,
        )
    }
}

/// Scatters slices on one device that holds `part` of an axis where that is not all.
pub(super) fn leading_axes(
    op: &'static str,
    dst: &Tensor,
    indices: &[&Tensor],
    updates: &Tensor,
    mode: ScatterOp,
    part: impl Fn(usize) -> Option<Part>,
) -> Result<Tensor> {
    let axes: SmallVec<[(usize, &Tensor); 4]> = indices.iter().copied().enumerate().collect();
    with_parts(op, dst, &axes, part, |dst, indices| {
        Leading::new(op, dst, indices, updates)?.run(op, dst, indices, updates, mode)
    })
}

/// Adds at coordinates on one device.
pub(super) fn add_at(
    op: &'static str,
    dst: &Tensor,
    index: &Tensor,
    updates: &Tensor,
    part: impl Fn(usize) -> Option<Part>,
) -> Result<Tensor> {
    let coordinates = index.unbind(-1)?;
    leading_axes(
        op,
        dst,
        &coordinates.iter().collect::<Vec<_>>(),
        updates,
        ScatterOp::Add,
        part,
    )
}

/// An op that has no meaning for the dtypes given.
pub(super) fn check_types(
    op: &'static str,
    dst: &Tensor,
    updates: &Tensor,
    mode: ScatterOp,
) -> Result<()> {
    if updates.dtype() != dst.dtype() {
        return Err(Error::DType {
            op,
            dtype: updates.dtype(),
            expected: "values of the destination's dtype: cast them",
        });
    }
    if dst.dtype() == DType::Bool && mode != ScatterOp::Set {
        return Err(Error::DType {
            op,
            dtype: DType::Bool,
            expected: "a number; bools can only be set",
        });
    }
    Ok(())
}

/// Writes along one axis on one device; the index and the values expand to `dst` but for `axis`.
pub(super) fn put(
    op: &'static str,
    dst: &Tensor,
    axis: usize,
    index: &Tensor,
    values: &Tensor,
    mode: ScatterOp,
    part: Option<Part>,
) -> Result<Tensor> {
    with_part(op, dst, axis, index, part, |dst, index| {
        let shape = dst.shape().with(axis, index.shape()[axis]);
        along_axis(
            op,
            dst,
            axis,
            &index.expand(&shape)?,
            &values.expand(&shape)?,
            mode,
        )
    })
}

/// Adds slices along one axis on one device.
pub(super) fn add_slices(
    op: &'static str,
    dst: &Tensor,
    axis: usize,
    index: &Tensor,
    src: &Tensor,
    part: Option<Part>,
) -> Result<Tensor> {
    with_part(op, dst, axis, index, part, |dst, index| {
        let inner = Shape::from(&dst.dims()[axis + 1..]).checked_numel(op)?;
        let shape = Shape::from(&src.dims()[..=axis]);
        let rows: Shape = shape.dims().iter().copied().chain([inner]).collect();
        let mut base = Affine {
            offset: 0,
            strides: Shape::from(&dst.dims()[..=axis])
                .strides()
                .iter()
                .map(|s| *s as i64)
                .collect(),
        };
        base.strides[axis] = 0;
        let axes = [(index, dst.shape()[axis], 1)];
        run_scatter(
            op,
            dst,
            &Target {
                inner,
                shape: &shape,
                base,
                axes: &axes,
            },
            &src.reshape(rows)?,
            ScatterOp::Add,
        )
    })
}
