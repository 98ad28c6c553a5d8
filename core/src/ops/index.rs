//! Reading elements at given places: gather and its relatives.
//!
//! Indices are `i32`, `i64` or `u32`. A negative index counts from the end: -1 is the last element. Anything outside `-n..n` is
//! [`Error::IndexOutOfRange`], on a GPU at the next read. All of them are one kernel: an output that is read through a layout whose
//! indexed dimensions do not move, plus one offset for each index tensor.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[10f32, 11., 20., 21., 30., 31.], [3, 2], &device)?;
//! let rows = Tensor::from_slice(&[2i32, -3], [2], &device)?;
//! assert_eq!(x.index_select(0, &rows)?.to_vec::<f32>()?, [30., 31., 10., 11.]);
//! let columns = Tensor::from_slice(&[1i32, 0], [2], &device)?;
//! assert_eq!(x.index_get(&[&rows, &columns])?.to_vec::<f32>()?, [31., 10.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{OpInfo, op, same_device};
use crate::{
    DType, Dims, Error, Layout, Result, Shape, Tensor,
    backend::{GatherCall, IndexAxis},
};

/// The ops of this file. `i` is a dimension that is indexed; its source has to be whole on every rank.
pub const OPS: &[OpInfo] = &[
    op("gather", "...i, ...j -> ...j ; replicate i ; linear 0"),
    op("take_along_axis", "...i, ...j -> ...j ; replicate i ; linear 0"),
    op("index_select", "...i, j -> ...j ; replicate i ; linear 0"),
    op("index_get", "i..., b -> b... ; replicate i ; linear 0"),
    op("gather_axes", "i..., b -> b... ; replicate i ; linear 0"),
    op("gather_nd", "i..., bk -> b... ; replicate i k ; linear 0"),
    op("embedding", "vd, ... -> ...d ; masked v ; linear 0"),
];

/// At most this many index tensors in one gather or scatter: kernels bind few buffers.
pub(super) const MAX_INDICES: usize = 4;

/// Refuses what cannot be an index.
pub(super) fn check_indices(op: &'static str, indices: &[&Tensor]) -> Result<()> {
    if indices.is_empty() || indices.len() > MAX_INDICES {
        return Err(Error::Argument { op, detail: format!("{} index tensors were given: one call takes 1 to {MAX_INDICES}", indices.len()) });
    }
    match indices.iter().map(|t| t.dtype()).find(|d| !matches!(d, DType::I32 | DType::I64 | DType::U32)) {
        Some(dtype) => Err(Error::DType { op, dtype, expected: "i32, i64 or u32 indices" }),
        None => Ok(()),
    }
}

/// The common shape of several index tensors.
pub(super) fn broadcast_all(op: &'static str, tensors: &[&Tensor]) -> Result<Shape> {
    tensors.iter().try_fold(Shape::scalar(), |shape, t| shape.broadcast(op, t.shape()))
}

/// An index tensor as a kernel's operand over `shape`, for a dimension of size `len`.
pub(super) fn index_axis(index: &Tensor, shape: &Shape, len: usize, stride: isize) -> Result<IndexAxis> {
    let mut indices = index.view()?;
    indices.layout = indices.layout.expand(shape);
    Ok(IndexAxis { indices, len, stride })
}

/// An empty dimension has no element to take, whatever the index is.
pub(super) fn check_not_empty(op: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.numel() == 0 {
        return Err(Error::Shape { op, detail: format!("{} has no elements to index", tensor.type_string()) });
    }
    Ok(())
}

/// Runs a gather: `layout` reads `src` over the output's shape with stride 0 in the indexed dimensions; `axes` pairs dimensions of
/// `src` with index tensors that broadcast to that shape.
pub(crate) fn run_gather(op: &'static str, src: &Tensor, layout: Layout, axes: &[(usize, &Tensor)]) -> Result<Tensor> {
    let shape = layout.shape.clone();
    let elements = shape.checked_numel(op)?;
    for (_, index) in axes {
        same_device(op, &[src, index])?;
    }
    src.device().check(src.dtype(), elements)?;
    if elements == 0 {
        return Ok(src.result(None, src.dtype(), shape));
    }
    check_not_empty(op, src)?;
    let mut view = src.view()?;
    view.layout = layout;
    let axes: Vec<IndexAxis> =
        axes.iter().map(|(axis, index)| index_axis(index, &shape, src.shape()[*axis], src.layout().strides[*axis])).collect::<Result<_>>()?;
    let buffer = src.device().backend().gather(&GatherCall { op, src: &view, axes: &axes })?;
    Ok(src.result(Some(buffer), src.dtype(), shape))
}

/// Advanced indexing of some axes; see [`Tensor::gather_axes`].
fn gather_axes(op: &'static str, src: &Tensor, axes: &[(usize, &Tensor)]) -> Result<Tensor> {
    let indices: Vec<&Tensor> = axes.iter().map(|(_, index)| *index).collect();
    check_indices(op, &indices)?;
    let mut sorted = Dims::new();
    for &(axis, _) in axes {
        if axis >= src.rank() || sorted.contains(&axis) {
            return Err(Error::Axis { op, axis: axis as i64, rank: src.rank() });
        }
        sorted.push(axis);
    }
    sorted.sort_unstable();
    let batch = broadcast_all(op, &indices)?;
    let kept: Dims = (0..src.rank()).filter(|axis| !sorted.contains(axis)).collect();
    let adjacent = sorted.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let front = if adjacent { sorted[0] } else { 0 };

    let (mut dims, mut strides) = (Dims::new(), Dims::<isize>::new());
    let keep = |axes: &[usize], dims: &mut Dims, strides: &mut Dims<isize>| {
        for &axis in axes {
            dims.push(src.shape()[axis]);
            strides.push(src.layout().strides[axis]);
        }
    };
    keep(&kept[..front], &mut dims, &mut strides);
    dims.extend_from_slice(batch.dims());
    strides.resize(dims.len(), 0);
    keep(&kept[front..], &mut dims, &mut strides);
    let layout = Layout { shape: dims.into(), strides, offset: src.layout().offset };

    // The dimensions behind the batch do not move the indices.
    let placed: Vec<(usize, Tensor)> = axes
        .iter()
        .map(|(axis, index)| {
            let layout = (front..kept.len()).fold(index.layout().clone(), |l, _| l.unsqueeze(l.shape.rank()));
            (*axis, index.viewed(layout))
        })
        .collect();
    let placed: Vec<(usize, &Tensor)> = placed.iter().map(|(axis, index)| (*axis, index)).collect();
    run_gather(op, src, layout, &placed)
}

/// The parts `[..., 0]` to `[..., k - 1]` of an index of coordinates, as views.
pub(super) fn coordinates(op: &'static str, index: &Tensor, rank: usize) -> Result<Vec<Tensor>> {
    check_indices(op, &[index])?;
    let Some((&k, _)) = index.dims().split_last() else {
        return Err(Error::Shape { op, detail: "the index needs a last dimension that holds coordinates".into() });
    };
    if k > rank {
        return Err(Error::Shape { op, detail: format!("{k} coordinates were given for a tensor of rank {rank}") });
    }
    index.unbind(-1)
}

impl Tensor {
    /// Picks along one axis, in PyTorch's sense: `out[i][j] = self[index[i][j]][j]` for axis 0. The index has the tensor's rank and is
    /// not larger in any other dimension (where it is smaller, only the first elements are used). For broadcasting of the other
    /// dimensions see [`take_along_axis`](Tensor::take_along_axis).
    pub fn gather(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        let op = "gather";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        let fits = index.rank() == self.rank() && (0..self.rank()).all(|d| d == axis || index.shape()[d] <= self.shape()[d]);
        if !fits {
            let detail = format!("an index of shape {} does not fit {} but for axis {axis}", index.shape(), self.type_string());
            return Err(Error::Shape { op, detail });
        }
        let mut layout = Layout { shape: index.shape().clone(), ..self.layout().clone() };
        layout.strides[axis] = 0;
        run_gather(op, self, layout, &[(axis, index)])
    }

    /// Picks along one axis, in NumPy's sense: as [`gather`](Tensor::gather), but all other dimensions of tensor and index broadcast.
    pub fn take_along_axis(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        let op = "take_along_axis";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        if index.rank() != self.rank() {
            return Err(Error::Shape { op, detail: format!("{} and an index of shape {} differ in rank", self.type_string(), index.shape()) });
        }
        let shape = self.shape().with(axis, 1).broadcast(op, &index.shape().with(axis, 1))?.with(axis, index.shape()[axis]);
        let one = self.layout().slice(axis, 0, 1, 1);
        let mut layout = Layout { shape: shape.clone(), ..one.expand(&shape.with(axis, 1)) };
        layout.strides[axis] = 0;
        run_gather(op, self, layout, &[(axis, index)])
    }

    /// Slices `index[0]`, `index[1]`, ... of dimension `axis`.
    pub fn index_select(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        let op = "index_select";
        let axis = self.shape().axis(op, axis)?;
        if index.rank() != 1 {
            return Err(Error::Shape { op, detail: format!("an index of shape {} was given, a vector is needed", index.shape()) });
        }
        gather_axes(op, self, &[(axis, index)])
    }

    /// Several index tensors over the leading axes, as `self[i0, i1, ...]` in NumPy: they broadcast together, and the dimensions that are not indexed follow.
    pub fn index_get(&self, indices: &[&Tensor]) -> Result<Tensor> {
        let axes: Vec<(usize, &Tensor)> = indices.iter().copied().enumerate().collect();
        gather_axes("index_get", self, &axes)
    }

    /// Index tensors over any axes, at most four. They broadcast together; their dimensions take the place of the indexed axes where those are
    /// neighbours, and come first otherwise (NumPy's rule).
    pub fn gather_axes(&self, axes: &[(usize, &Tensor)]) -> Result<Tensor> {
        gather_axes("gather_axes", self, axes)
    }

    /// Slices at coordinates: the last dimension of `index` holds the first `k` coordinates, so the result is
    /// `index.shape[..-1] + self.shape[k..]`.
    pub fn gather_nd(&self, index: &Tensor) -> Result<Tensor> {
        let op = "gather_nd";
        let parts = coordinates(op, index, self.rank())?;
        if parts.is_empty() {
            let dims: Dims = index.dims()[..index.rank() - 1].iter().chain(self.dims()).copied().collect();
            return self.expand(dims);
        }
        let axes: Vec<(usize, &Tensor)> = parts.iter().enumerate().collect();
        gather_axes(op, self, &axes)
    }

    /// Rows of this table `[v, d]` for ids of any shape: `ids.shape + [d]`.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        let op = "embedding";
        if self.rank() != 2 {
            return Err(Error::Shape { op, detail: format!("the table is {}, it needs two dimensions", self.type_string()) });
        }
        gather_axes(op, self, &[(0, ids)])
    }
}
