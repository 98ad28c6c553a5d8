//! Writing elements at given places: scatter and its relatives.
//!
//! Nothing is changed in place: the result is a new tensor. Where several values meet in one place they are applied in row-major
//! order of the indices, so every run gives the same result: the last one wins, or sums add up in that order.
//!
//! ```
//! # use anymesh_core::{Tensor, DType, backend::ScatterOp};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 2., 3.], [3], &device)?;
//! let index = Tensor::from_slice(&[0i32, -1, 0], [3], &device)?;
//! let src = Tensor::from_slice(&[10f32, 20., 30.], [3], &device)?;
//! assert_eq!(x.scatter(0, &index, &src, ScatterOp::Add)?.to_vec::<f32>()?, [41., 2., 23.]);
//! assert_eq!(x.scatter(0, &index, &src, ScatterOp::Set)?.to_vec::<f32>()?, [30., 2., 20.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    OpInfo, Operand,
    index::{broadcast_all, check_indices, check_not_empty, coordinates, index_axis},
    index_kind, map1, op, run_map, same_device,
};
use crate::{
    DType, Dims, Error, MapProgram, Result, Shape, Tensor,
    backend::{Affine, IndexAxis, ScatterCall, ScatterOp},
    map::Builder,
};

/// The ops of this file. `i` is a dimension that is written by index; it has to be whole on every rank.
pub const OPS: &[OpInfo] = &[
    op("scatter", "...i, ...j, ...j -> ...i ; replicate i j"),
    op("put_along_axis", "...i, ...j, ...j -> ...i ; replicate i j"),
    op("index_put", "i..., b, b... -> i... ; replicate i b"),
    op("index_add", "...i, j, ...j -> ...i ; replicate i ; reduce j sum ; linear 0 2"),
    op("scatter_nd", "bk, b... -> i... ; replicate i k ; reduce b sum ; linear 1"),
    op("scatter_nd_add", "i..., bk, b... -> i... ; replicate i k ; reduce b sum ; linear 0 2"),
    op("bincount", "n, n -> b ; replicate b ; reduce n sum"),
    op("one_hot", "... -> ...c"),
];

/// Where a scatter writes: the destination as rows, and the row of each position of `shape`.
struct Target<'a> {
    inner: usize,
    shape: &'a Shape,
    base: Affine,
    /// Index, size of its dimension, rows for one step.
    axes: &'a [(&'a Tensor, usize, usize)],
}

/// Runs a scatter of `updates` (`[shape.., inner]`) into a copy of `dst`.
fn run_scatter(op: &'static str, dst: &Tensor, target: &Target<'_>, updates: &Tensor, mode: ScatterOp) -> Result<Tensor> {
    for (index, ..) in target.axes {
        same_device(op, &[dst, updates, index])?;
    }
    if updates.dtype() != dst.dtype() {
        return Err(Error::DType { op, dtype: updates.dtype(), expected: "values of the destination's dtype: cast them" });
    }
    if dst.dtype() == DType::Bool && mode != ScatterOp::Set {
        return Err(Error::DType { op, dtype: DType::Bool, expected: "a number; bools can only be set" });
    }
    if updates.numel() == 0 {
        return Ok(dst.clone());
    }
    check_not_empty(op, dst)?;
    dst.device().check(dst.dtype(), dst.numel())?;
    // A dense view may start in the middle of its buffer.
    let whole = if dst.is_contiguous() && dst.layout().offset == 0 { dst.clone() } else { map1(op, &MapProgram::cast(dst.dtype(), dst.dtype()), &[dst], &[])? };
    let axes: Vec<IndexAxis> = target.axes.iter().map(|(index, len, stride)| index_axis(index, target.shape, *len, *stride as isize)).collect::<Result<_>>()?;
    let call = ScatterCall {
        op,
        dst: &whole.view()?,
        rows: dst.numel() / target.inner,
        inner: target.inner,
        shape: target.shape,
        base: &target.base,
        axes: &axes,
        updates: &updates.view()?,
        mode,
    };
    let buffer = dst.device().backend().scatter(&call)?;
    Ok(dst.result(Some(buffer), dst.dtype(), dst.shape().clone()))
}

/// Scatters along one axis; `index` and `updates` have the same shape, and the rank of `dst`.
fn along_axis(op: &'static str, dst: &Tensor, axis: usize, index: &Tensor, updates: &Tensor, mode: ScatterOp) -> Result<Tensor> {
    let strides = dst.shape().strides();
    let mut base = Affine { offset: 0, strides: strides.iter().map(|s| *s as i64).collect() };
    base.strides[axis] = 0;
    let axes = [(index, dst.shape()[axis], strides[axis] as usize)];
    run_scatter(op, dst, &Target { inner: 1, shape: index.shape(), base, axes: &axes }, &updates.unsqueeze(-1)?, mode)
}

/// Scatters slices at indices of the leading axes; `updates` expands to the common shape of the indices and the remaining dimensions.
fn leading_axes(op: &'static str, dst: &Tensor, indices: &[&Tensor], updates: &Tensor, mode: ScatterOp) -> Result<Tensor> {
    check_indices(op, indices)?;
    if indices.len() > dst.rank() {
        return Err(Error::Shape { op, detail: format!("{} index tensors were given for {}", indices.len(), dst.type_string()) });
    }
    let batch = broadcast_all(op, indices)?;
    let (lead, rest) = dst.dims().split_at(indices.len());
    let inner = Shape::from(rest).checked_numel(op)?;
    let full: Shape = batch.dims().iter().chain(rest).copied().collect();
    if updates.shape().broadcast(op, &full)? != full {
        return Err(Error::Shape { op, detail: format!("values of shape {} do not expand to {full}", updates.shape()) });
    }
    let rows: Shape = batch.dims().iter().copied().chain([inner]).collect();
    let updates = updates.expand(&full)?.reshape(rows)?;
    let steps = Shape::from(lead).strides();
    let axes: Vec<(&Tensor, usize, usize)> = indices.iter().zip(lead.iter().zip(&steps)).map(|(index, (len, step))| (*index, *len, *step as usize)).collect();
    let base = Affine { offset: 0, strides: smallvec::smallvec![0; batch.rank()] };
    run_scatter(op, dst, &Target { inner, shape: &batch, base, axes: &axes }, &updates, mode)
}

impl Tensor {
    /// Writes along one axis, in PyTorch's sense: `out[index[i][j]][j] = src[i][j]` for axis 0, for every position of `index`. `index` has the tensor's
    /// rank, is not larger than `src` anywhere, and not larger than the tensor but for `axis`.
    pub fn scatter(&self, axis: i64, index: &Tensor, src: &Tensor, mode: ScatterOp) -> Result<Tensor> {
        let op = "scatter";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        let fits = index.rank() == self.rank()
            && src.rank() == self.rank()
            && (0..self.rank()).all(|d| index.shape()[d] <= src.shape()[d] && (d == axis || index.shape()[d] <= self.shape()[d]));
        if !fits {
            let detail =
                format!("an index of shape {} with values of shape {} does not fit {} but for axis {axis}", index.shape(), src.shape(), self.type_string());
            return Err(Error::Shape { op, detail });
        }
        let mut part = src.clone();
        for d in 0..self.rank() {
            part = part.narrow(d as i64, 0, index.shape()[d])?;
        }
        along_axis(op, self, axis, index, &part, mode)
    }

    /// Writes along one axis, in NumPy's sense: the index broadcasts to the tensor but for `axis`, and the values broadcast to the index.
    pub fn put_along_axis(&self, axis: i64, index: &Tensor, values: &Tensor, mode: ScatterOp) -> Result<Tensor> {
        let op = "put_along_axis";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        if index.rank() != self.rank() {
            return Err(Error::Shape { op, detail: format!("{} and an index of shape {} differ in rank", self.type_string(), index.shape()) });
        }
        let shape = self.shape().with(axis, index.shape()[axis]);
        for (what, tensor) in [("an index", index), ("values", values)] {
            if tensor.shape().broadcast(op, &shape)? != shape {
                return Err(Error::Shape { op, detail: format!("{what} of shape {} do not expand to {shape}", tensor.shape()) });
            }
        }
        along_axis(op, self, axis, &index.expand(&shape)?, &values.expand(&shape)?, mode)
    }

    /// Writes at index tensors over the leading axes, as `self[i0, i1, ...] = values` (or `+=` with `accumulate`, where an index that occurs twice
    /// adds twice). The values expand to the common shape of the indices and the dimensions that are not indexed.
    pub fn index_put(&self, indices: &[&Tensor], values: &Tensor, accumulate: bool) -> Result<Tensor> {
        leading_axes("index_put", self, indices, values, if accumulate { ScatterOp::Add } else { ScatterOp::Set })
    }

    /// Adds slice `j` of `src` to slice `index[j]` of this tensor along `axis`.
    pub fn index_add(&self, axis: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let op = "index_add";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        if index.rank() != 1 || *src.shape() != self.shape().with(axis, index.numel()) {
            let detail = format!("{} cannot take values of shape {} at an index of shape {} along axis {axis}", self.type_string(), src.shape(), index.shape());
            return Err(Error::Shape { op, detail });
        }
        let inner = Shape::from(&self.dims()[axis + 1..]).checked_numel(op)?;
        let shape = Shape::from(&src.dims()[..=axis]);
        let rows: Shape = shape.dims().iter().copied().chain([inner]).collect();
        let mut base = Affine { offset: 0, strides: Shape::from(&self.dims()[..=axis]).strides().iter().map(|s| *s as i64).collect() };
        base.strides[axis] = 0;
        run_scatter(op, self, &Target { inner, shape: &shape, base, axes: &[(index, self.shape()[axis], 1)] }, &src.reshape(rows)?, ScatterOp::Add)
    }

    /// A tensor of `shape` that is zero but where `index` points: the last dimension of `index` holds coordinates, and `updates`
    /// (`index.shape[..-1] + shape[k..]`) add up there.
    pub fn scatter_nd(index: &Tensor, updates: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
        let zeros = Tensor::zeros(shape, updates.dtype(), updates.device())?;
        scatter_nd("scatter_nd", &zeros, index, updates)
    }

    /// Adds `updates` (`index.shape[..-1] + self.shape[k..]`) at coordinates, which are the last dimension (of size `k`) of `index`.
    pub fn scatter_nd_add(&self, index: &Tensor, updates: &Tensor) -> Result<Tensor> {
        scatter_nd("scatter_nd_add", self, index, updates)
    }

    /// How often each of `0..bins` occurs in a vector (i32), or the sum of its weights (in their dtype). A value outside that range, also a negative one,
    /// is [`Error::IndexOutOfRange`]. Reads nothing back.
    pub fn bincount_bins(&self, weights: Option<&Tensor>, bins: usize) -> Result<Tensor> {
        let op = "bincount";
        check_indices(op, &[self])?;
        if self.rank() != 1 || weights.is_some_and(|w| w.shape() != self.shape()) {
            return Err(Error::Shape { op, detail: format!("counts a vector with as many weights, got shape {}", self.shape()) });
        }
        let updates = match weights {
            Some(weights) => weights.clone(),
            None => Tensor::scalar(1i32, self.device())?.expand(self.shape())?,
        };
        // A negative index would count from the end; here it is an error, so it is moved where it is one.
        let b = Builder::new();
        let x = b.load(self.dtype());
        let lowest = if self.dtype() == DType::I64 { i64::MIN } else { i64::from(i32::MIN) };
        let checked = if self.dtype() == DType::U32 { x } else { x.lt(0).select(x.lit(lowest), x) };
        let index = map1(op, &b.finish(&[(checked, self.dtype())])?, &[self], &[])?;
        let zeros = Tensor::zeros([bins], updates.dtype(), self.device())?;
        leading_axes(op, &zeros, &[&index], &updates, ScatterOp::Add)
    }

    /// [`bincount_bins`](Tensor::bincount_bins) with as many bins as the largest value needs, at least `minlength`. Reads that value from the device.
    pub async fn bincount_async(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        let op = "bincount";
        check_indices(op, &[self])?;
        let bins = if self.numel() == 0 { 0 } else { self.max(&[], false)?.item_async().await?.to_i64().saturating_add(1) };
        self.bincount_bins(weights, minlength.max(usize::try_from(bins).unwrap_or(0)))
    }

    /// [`bincount_async`](Tensor::bincount_async), waiting for the read.
    #[cfg(not(target_family = "wasm"))]
    pub fn bincount(&self, weights: Option<&Tensor>, minlength: usize) -> Result<Tensor> {
        pollster::block_on(self.bincount_async(weights, minlength))
    }

    /// One more dimension of size `classes` (i32) that is 1 at the element's value and 0 elsewhere; all 0 for a value outside `0..classes`.
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        let op = "one_hot";
        check_indices(op, &[self])?;
        let dims: Dims = self.dims().iter().copied().chain([classes]).collect();
        // Where u32 wraps to i32 it becomes negative, which no class is.
        let dtype = if self.dtype() == DType::I64 { DType::I64 } else { index_kind(classes).dtype() };
        let b = Builder::new();
        let hit = b.load(self.dtype()).cast(dtype).eq(b.index(index_kind(classes)).cast(dtype));
        let program = b.finish(&[(hit, DType::I32)])?;
        let mut class = Affine { offset: 0, strides: smallvec::smallvec![0; dims.len()] };
        class.strides[self.rank()] = 1;
        let column = self.unsqueeze(-1)?;
        Ok(run_map(op, &program, &dims.into(), &[Operand::from(&column)], &[class], &[], self.device())?.remove(0))
    }
}

fn scatter_nd(op: &'static str, dst: &Tensor, index: &Tensor, updates: &Tensor) -> Result<Tensor> {
    let parts = coordinates(op, index, dst.rank())?;
    let expected: Shape = index.dims()[..index.rank() - 1].iter().chain(&dst.dims()[parts.len()..]).copied().collect();
    if *updates.shape() != expected {
        let detail = format!("an index of shape {} into {} takes updates of shape {expected}, got {}", index.shape(), dst.type_string(), updates.shape());
        return Err(Error::Shape { op, detail });
    }
    let indices: Vec<&Tensor> = parts.iter().collect();
    leading_axes(op, dst, &indices, updates, ScatterOp::Add)
}
