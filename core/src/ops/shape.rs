//! Views that rearrange dimensions: no element moves, but where a reshape has no strides for it.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[0i32, 1, 2, 3, 4, 5], [2, 3], &device)?;
//! assert_eq!(x.permute(&[1, 0])?.to_vec::<i32>()?, [0, 3, 1, 4, 2, 5]);
//! assert_eq!(x.reshape([3, 2])?.dims(), [3, 2]);
//! assert_eq!(x.reshape_infer(&[-1, 2])?.dims(), [3, 2]);
//! assert_eq!(x.unsqueeze(0)?.expand([4, 2, 3])?.dims(), [4, 2, 3]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{OpInfo, reduce::summed, sum_to};
use crate::{
    Dims, Error, Layout, OperandType, Result, Shape, Tensor,
    grad::{Back, record, record1},
    reshard::Groups,
    spmd::{
        Call, Local,
        built::{Data, GRIDS, RESHAPE, VIEW, shape_data, view_data},
        parts_of, plain,
        policy::is_explicit,
    },
};
use smallvec::smallvec;

/// The ops of this file: elements keep their values, so partial values of every reduction pass. A
/// dimension that only the result has is whole.
pub const OPS: &[OpInfo] = &[
    RESHAPED,
    RESHAPED.named("flatten"),
    VIEWED.named("squeeze"),
    VIEWED.named("unsqueeze"),
    VIEWED.named("transpose"),
    VIEWED.named("permute"),
    VIEWED.named("movedim"),
    VIEWED.named("expand"),
    MESHGRID,
];

/// The steps of this file: a view on behalf of an op.
pub(super) const STEPS: &[OpInfo] = &[VIEWED];

pub(super) const VIEWED: OpInfo = OpInfo::new("view", VIEW);
const RESHAPED: OpInfo = OpInfo::new("reshape", RESHAPE);
const MESHGRID: OpInfo = OpInfo::new("meshgrid", GRIDS);

/// The order in which [`Tensor::meshgrid`] lays out its first two dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexing {
    /// Matrix order: the first tensor varies along dimension 0.
    Ij,
    /// Cartesian order: the first tensor varies along dimension 1, the second along dimension 0.
    Xy,
}

impl Tensor {
    /// The same memory under another layout; an empty result gets a plain layout, since its strides
    /// mean nothing.
    pub(super) fn viewed(&self, layout: Layout) -> Tensor {
        if layout.shape.numel() == 0 {
            self.with_layout(Layout::contiguous(layout.shape))
        } else {
            self.with_layout(layout)
        }
    }

    /// A view of what each rank holds, for a tensor on a mesh: dimension `i` of the result is
    /// dimension `to[i]` of this tensor, or a new one.
    #[track_caller]
    pub(super) fn view_parts(
        &self,
        op: &'static str,
        to: &[Option<usize>],
        local: impl Fn(&Local<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        Call::of(&VIEWED, &[self])
            .on_behalf_of(op)
            .data(&view_data(to))
            .run1(local)
    }

    /// Dimensions in the order `order`, without those that it does not name.
    #[track_caller]
    pub(super) fn reordered(&self, op: &'static str, order: &[usize]) -> Result<Tensor> {
        if order.len() == self.rank() {
            crate::observe::tell(|| serde_json::json!({ "as": "permute", "axes": order }));
        } else {
            let left = |d: &usize| !order.contains(d);
            let left: Dims = (0..self.rank()).filter(left).collect();
            crate::observe::tell(|| serde_json::json!({ "as": "squeeze", "axes": &left[..] }));
        }
        record1(
            op,
            &[self],
            || self.permuted(op, order),
            |_| {
                // Dimensions that were left out had size 1: they come back at the end, and go where
                // they were.
                let all: Dims = order
                    .iter()
                    .copied()
                    .chain((0..self.rank()).filter(|d| !order.contains(d)))
                    .collect();
                let mut back: Dims = smallvec![0; all.len()];
                for (i, d) in all.iter().enumerate() {
                    back[*d] = i;
                }
                Ok(move |b: &Back<'_>| {
                    let gradient = (b.grad()?.rank()..back.len())
                        .try_fold(b.grad()?.clone(), |g, _| g.unsqueeze(-1))?;
                    Ok(smallvec![Some(gradient.reordered(op, &back)?)])
                })
            },
        )
    }

    #[track_caller]
    fn permuted(&self, op: &'static str, order: &[usize]) -> Result<Tensor> {
        if !self.is_plain() {
            let to: Dims<Option<usize>> = order.iter().map(|d| Some(*d)).collect();
            return self.view_parts(op, &to, |l| l[0].reordered(op, order));
        }
        Ok(self.viewed(self.layout().permute(order)))
    }

    /// The elements in row-major order under another shape of the same size: a view where the
    /// strides allow, else a dense copy.
    ///
    /// On a mesh, dimensions that are split or merged keep their cuts where parts of the one are
    /// parts of the other. A dimension of groups that ranks have different numbers of keeps them too:
    /// what lies between the bounds is exchanged.
    ///
    /// ```
    /// # use anymesh_core::{DType, Mesh, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let mesh = Mesh::new("dp=2, tp=2", &device)?;
    /// let x = Tensor::arange(0, 24, 1, DType::I32, &device)?.reshape([4, 6])?.to_mesh(&mesh, "[@dp, @tp]")?;
    /// assert_eq!(x.reshape([2, 2, 2, 3])?.type_string(), "i32[2@dp, 2, 2@tp, 3]");
    /// assert_eq!(x.reshard("[@dp, _]")?.reshape([24])?.type_string(), "i32[24@dp]");
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn reshape(&self, dims: impl Into<Shape>) -> Result<Tensor> {
        self.reshaped("reshape", dims.into())
    }

    #[track_caller]
    pub(super) fn reshaped(&self, op: &'static str, shape: Shape) -> Result<Tensor> {
        if shape.checked_numel(op)? != self.numel() {
            return Err(Error::shape(
                op,
                [self.into(), OperandType::from(&shape)],
                format!(
                    "{} has {} elements, {shape} has {}",
                    self.type_string(),
                    self.numel(),
                    shape.numel()
                ),
            ));
        }
        if shape == *self.shape() {
            return Ok(self.clone());
        }
        let old = self.shape();
        crate::observe::tell(|| serde_json::json!({ "as": "reshape", "dims": shape.dims() }));
        record1(
            op,
            &[self],
            || self.under_shape(op, &shape),
            |_| {
                let old = old.clone();
                Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.reshaped(op, old.clone())?)]))
            },
        )
    }

    #[track_caller]
    fn under_shape(&self, op: &'static str, shape: &Shape) -> Result<Tensor> {
        if !self.is_plain() {
            if let Some(groups) = self.uneven_groups(shape).filter(|_| !is_explicit()) {
                return groups.regroup(self, shape);
            }
            return Call::of(&RESHAPED, &[self])
                .on_behalf_of(op)
                .data(&shape_data(shape))
                .run1(|l| l[0].reshaped(op, l.region(0, shape).shape.into()));
        }
        match self.layout().reshape(shape) {
            Some(layout) => Ok(self.viewed(layout)),
            None => Ok(self
                .contiguous()?
                .with_layout(Layout::contiguous(shape.clone()))),
        }
    }

    /// The dimension that a new shape takes apart or puts together, where parts of the one are not
    /// parts of the other, because the number of groups does not divide. All others stay as they
    /// are.
    fn uneven_groups(&self, shape: &Shape) -> Option<Groups> {
        let (from, to) = (self.dims(), shape.dims());
        let dim = from.iter().zip(to).position(|(a, b)| a != b)?;
        let apart = from[dim] > to[dim];
        let (flat, taken) = if apart { (from, to) } else { (to, from) };
        let more = taken.len().checked_sub(flat.len())?;
        let inner: Dims = taken.get(dim + 1..=dim + more)?.into();
        let count = taken[dim];
        let parts = parts_of(self, dim);
        let fits = more > 0
            && count.checked_mul(inner.iter().product()) == Some(flat[dim])
            && flat[dim + 1..] == taken[dim + 1 + more..]
            && (apart || !(dim + 1..=dim + more).any(|d| self.is_cut(d)));
        let uneven = parts > 1 && count >= parts && !count.is_multiple_of(parts);
        (fits && uneven).then_some(Groups {
            dim,
            count,
            inner,
            apart,
        })
    }

    /// [`reshape`](Tensor::reshape) where at most one dimension is -1 and takes whatever size is
    /// left.
    #[track_caller]
    pub fn reshape_infer(&self, dims: &[i64]) -> Result<Tensor> {
        let op = "reshape_infer";
        let wrong = |detail: String| Error::shape(op, [self], detail);
        let mut shape = Dims::with_capacity(dims.len());
        let mut free = None;
        for (i, &d) in dims.iter().enumerate() {
            match usize::try_from(d) {
                Ok(size) => shape.push(size),
                Err(_) if d == -1 && free.is_none() => {
                    free = Some(i);
                    shape.push(1);
                }
                Err(_) => {
                    return Err(wrong(format!(
                        "{dims:?}: sizes are not negative, but for one -1"
                    )));
                }
            }
        }
        if let Some(i) = free {
            let rest = Shape::from(shape.as_slice()).checked_numel(op)?;
            if rest == 0 {
                return Err(wrong(format!(
                    "{dims:?}: any size would do for -1 beside a dimension of size 0, give it"
                )));
            }
            if !self.numel().is_multiple_of(rest) {
                return Err(wrong(format!(
                    "{} has {} elements, which {dims:?} does not divide",
                    self.type_string(),
                    self.numel()
                )));
            }
            shape[i] = self.numel() / rest;
        }
        self.reshaped(RESHAPED.name, shape.into())
    }

    /// Merges dimensions `start..=end` into one. A 0-d tensor becomes a vector of one element.
    #[track_caller]
    pub fn flatten(&self, start: i64, end: i64) -> Result<Tensor> {
        let op = "flatten";
        let whole = if self.rank() == 0 {
            &Shape::from([1])
        } else {
            self.shape()
        };
        let (first, last) = (whole.axis(op, start)?, whole.axis(op, end)?);
        if first > last {
            return Err(Error::argument(
                op,
                "start",
                format!(
                    "start {start} comes after end {end} in rank {}",
                    self.rank()
                ),
            )
            .of([self]));
        }
        let mut dims: Dims = whole.dims()[..first].into();
        dims.push(Shape::from(&whole.dims()[first..=last]).checked_numel(op)?);
        dims.extend_from_slice(&whole.dims()[last + 1..]);
        self.reshaped(op, dims.into())
    }

    /// Removes the given dimensions of size 1; an empty list removes all of them. Another size at a
    /// given axis is an error.
    #[track_caller]
    pub fn squeeze(&self, axes: &[i64]) -> Result<Tensor> {
        let op = "squeeze";
        let named = self.shape().axes(op, axes)?;
        if let Some(&axis) = named
            .iter()
            .find(|&&axis| !axes.is_empty() && self.shape()[axis] != 1)
        {
            return Err(Error::shape(
                op,
                [self],
                format!("axis {axis} of {} is not of size 1", self.type_string()),
            ));
        }
        let kept: Dims = (0..self.rank())
            .filter(|&axis| self.shape()[axis] != 1 || !named.contains(&axis))
            .collect();
        self.reordered(op, &kept)
    }

    /// Adds a dimension of size 1 so that it becomes dimension `axis` of the result.
    #[track_caller]
    pub fn unsqueeze(&self, axis: i64) -> Result<Tensor> {
        let rank = self.rank() as i64 + 1;
        let at = if axis < 0 { axis + rank } else { axis };
        if !(0..rank).contains(&at) {
            return Err(Error::Axis {
                op: "unsqueeze",
                axis,
                rank: self.rank() + 1,
            });
        }
        let run = || {
            if self.is_plain() {
                return Ok(self.viewed(self.layout().unsqueeze(at as usize)));
            }
            let mut to: Dims<Option<usize>> = (0..self.rank()).map(Some).collect();
            to.insert(at as usize, None);
            self.view_parts("unsqueeze", &to, |l| l[0].unsqueeze(at))
        };
        crate::observe::tell(|| serde_json::json!({ "axis": at }));
        record1("unsqueeze", &[self], run, |_| {
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.squeeze(&[at])?)]))
        })
    }

    /// Swaps two dimensions.
    #[track_caller]
    pub fn transpose(&self, a: i64, b: i64) -> Result<Tensor> {
        let (a, b) = (
            self.shape().axis("transpose", a)?,
            self.shape().axis("transpose", b)?,
        );
        let mut order: Dims = (0..self.rank()).collect();
        order.swap(a, b);
        self.reordered("transpose", &order)
    }

    /// Swaps the last two dimensions; a tensor of rank 0 or 1 is its own transpose.
    #[track_caller]
    pub fn t(&self) -> Result<Tensor> {
        if self.rank() < 2 {
            Ok(self.clone())
        } else {
            self.transpose(-2, -1)
        }
    }

    /// Dimensions in the order `axes`, which names each of them once.
    #[track_caller]
    pub fn permute(&self, axes: &[i64]) -> Result<Tensor> {
        let op = "permute";
        if axes.len() != self.rank() {
            return Err(Error::argument(
                op,
                "axes",
                format!(
                    "{axes:?} names {} axes of a tensor of rank {}",
                    axes.len(),
                    self.rank()
                ),
            )
            .of([self]));
        }
        self.shape().axes(op, axes)?;
        let order = axes
            .iter()
            .map(|&axis| self.shape().axis(op, axis))
            .collect::<Result<Dims>>()?;
        self.reordered(op, &order)
    }

    /// Moves dimension `from[i]` to position `to[i]`; the others keep their order.
    #[track_caller]
    pub fn movedim(&self, from: &[i64], to: &[i64]) -> Result<Tensor> {
        let op = "movedim";
        if from.len() != to.len() {
            return Err(Error::argument(
                op,
                "to",
                format!("{} axes cannot move to {} positions", from.len(), to.len()),
            )
            .of([self]));
        }
        if from.is_empty() {
            return Ok(self.clone());
        }
        self.shape().axes(op, from)?;
        self.shape().axes(op, to)?;
        let mut order: Dims<Option<usize>> = smallvec![None; self.rank()];
        let mut moved = Dims::with_capacity(from.len());
        for (&f, &t) in from.iter().zip(to) {
            let source = self.shape().axis(op, f)?;
            order[self.shape().axis(op, t)?] = Some(source);
            moved.push(source);
        }
        let mut rest = (0..self.rank()).filter(|axis| !moved.contains(axis));
        let order: Dims = order
            .into_iter()
            .filter_map(|axis| axis.or_else(|| rest.next()))
            .collect();
        self.reordered(op, &order)
    }

    /// Repeats dimensions of size 1, and adds dimensions in front, to reach a shape, without memory
    /// (NumPy's broadcasting rule).
    #[doc(alias = "broadcast_to")]
    #[track_caller]
    pub fn expand(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let (op, shape) = ("expand", shape.into());
        shape.checked_numel(op)?;
        if self.shape().broadcast(op, &shape)? != shape {
            return Err(Error::shape(
                op,
                [self.into(), OperandType::from(&shape)],
                format!(
                    "{} does not expand to {shape}: only dimensions of size 1 repeat",
                    self.type_string()
                ),
            ));
        }
        if shape == *self.shape() {
            return Ok(self.clone());
        }
        let run = || {
            if self.is_plain() {
                return Ok(self.viewed(self.layout().expand(&shape)));
            }
            let lead = shape.rank() - self.rank();
            let source = |d: usize| d.checked_sub(lead).filter(|s| self.shape()[*s] == shape[d]);
            let to: Dims<Option<usize>> = (0..shape.rank()).map(source).collect();
            self.view_parts(op, &to, |l| {
                l[0].expand(Shape::from(l.region(0, &shape).shape))
            })
        };
        crate::observe::tell(|| serde_json::json!({ "as": "expand", "shape": shape.dims() }));
        record1(op, &[self], run, |_| {
            let old = self.shape().clone();
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(sum_to(op, b.grad()?, &old)?)]))
        })
    }

    /// For each of several vectors (or scalars) its values over the grid that all of them span, as
    /// views.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::Indexing};
    /// # let device = anymesh_backend_cpu::device();
    /// let (x, y) = (Tensor::from_slice(&[1i32, 2, 3], [3], &device)?, Tensor::from_slice(&[7i32, 8], [2], &device)?);
    /// let grids = Tensor::meshgrid(&[&x, &y], Indexing::Xy)?;
    /// assert_eq!(grids[0].to_vec::<i32>()?, [1, 2, 3, 1, 2, 3]);
    /// assert_eq!(grids[1].to_vec::<i32>()?, [7, 7, 7, 8, 8, 8]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn meshgrid(tensors: &[&Tensor], indexing: Indexing) -> Result<Vec<Tensor>> {
        if let Some(wrong) = tensors.iter().find(|t| t.rank() > 1) {
            return Err(Error::shape(
                "meshgrid",
                [*wrong],
                format!("{} is not a vector", wrong.type_string()),
            ));
        }
        let axis = |i: usize| match indexing {
            Indexing::Xy if i < 2 && tensors.len() > 1 => 1 - i,
            _ => i,
        };
        let shape: Shape = (0..tensors.len())
            .map(|i| tensors[axis(i)].numel())
            .collect();
        shape.checked_numel("meshgrid")?;
        let run = || {
            if !plain("meshgrid", tensors)? {
                return Ok(grids_of_parts(tensors, indexing, axis)?.into());
            }
            let grid = |(i, tensor): (usize, &&Tensor)| {
                let mut strides: Dims<isize> = smallvec![0; shape.rank()];
                strides[axis(i)] = tensor.layout().strides.first().copied().unwrap_or(0);
                tensor.viewed(Layout {
                    shape: shape.clone(),
                    strides,
                    offset: tensor.layout().offset,
                })
            };
            Ok(tensors.iter().enumerate().map(grid).collect())
        };
        let out = record("meshgrid", tensors, run, |_| {
            let vectors: Vec<(usize, Shape)> = tensors
                .iter()
                .enumerate()
                .map(|(i, t)| (axis(i), t.shape().clone()))
                .collect();
            Ok(move |b: &Back<'_>| {
                let of = |(i, (axis, shape)): (usize, &(usize, Shape))| match b.grad_of(i) {
                    Some(g) if b.needs(i) => {
                        let others: Dims = (0..g.rank()).filter(|d| d != axis).collect();
                        let sum = if others.is_empty() {
                            g.clone()
                        } else {
                            summed("meshgrid", g, &others)?
                        };
                        sum.reshape(shape).map(Some)
                    }
                    _ => Ok(None),
                };
                vectors.iter().enumerate().map(of).collect()
            })
        })?;
        Ok(out.into_vec())
    }
}

/// The grids of vectors on a mesh: a cut of one vector cuts its dimension of every grid.
#[track_caller]
fn grids_of_parts(
    tensors: &[&Tensor],
    indexing: Indexing,
    axis: impl Fn(usize) -> usize,
) -> Result<Vec<Tensor>> {
    // Rules know operands by a bit each, and no grid of so many dimensions has memory for its
    // elements.
    if tensors.len() > 31 {
        return Err(Error::argument(
            "meshgrid",
            "tensors",
            format!(
                "{} tensors on a mesh, at most 31 span a grid there",
                tensors.len()
            ),
        )
        .of(tensors.iter().copied()));
    }
    let along: Data = (0..tensors.len()).map(|d| axis(d) as i64).collect();
    let local = |l: &Local<'_>| {
        Ok(Tensor::meshgrid(&l.inputs.iter().collect::<Vec<_>>(), indexing)?.into())
    };
    Ok(Call::of(&MESHGRID, tensors)
        .data(&along)
        .run(local)?
        .into_vec())
}
