//! Views of some of the elements: slices, parts, diagonals and sliding windows.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[0i32, 1, 2, 3, 4, 5, 6], [7], &device)?;
//! assert_eq!(x.slice(0, Some(5), Some(1), -2)?.to_vec::<i32>()?, [5, 3]); // x[5:1:-2]
//! assert_eq!(x.slice(0, Some(-2), None, 1)?.to_vec::<i32>()?, [5, 6]); // x[-2:]
//! assert_eq!(x.unfold(0, 3, 2)?.to_vec::<i32>()?, [0, 1, 2, 2, 3, 4, 4, 5, 6]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{OpInfo, PadMode, create, shape::VIEWED};
use crate::{
    Dims, Error, Layout, Result, Shape, Tensor,
    grad::{Back, Part, record, record1},
    reshard::{Held, Recipe, lacked},
    split,
    spmd::rule::letter,
    tensor::Outputs,
};
use smallvec::smallvec;

/// The ops of this file. Of a dimension that is cut and of which some elements are taken, each rank
/// fetches what it lacks; the others make such a dimension whole. Partial values of every reduction
/// pass.
pub const OPS: &[OpInfo] = &[
    VIEWED.named("slice").runs(&["assemble"]),
    VIEWED.named("narrow").runs(&["assemble"]),
    VIEWED.named("split").runs(&["assemble"]),
    VIEWED.named("chunk").runs(&["assemble"]),
    VIEWED.named("unbind"),
    VIEWED.named("flip").runs(&["assemble"]),
    VIEWED.named("diagonal"),
    VIEWED.named("unfold"),
];

/// More views than this from one call, counted on every rank, are a mistake and would fill the
/// host's memory.
const MAX_PARTS: usize = 1 << 20;

/// The first element, the step and the number of the elements `start:stop:step` of a dimension, in
/// Python's sense. The step of fewer than two is 1.
pub(crate) fn span(
    op: &'static str,
    size: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> Result<(usize, isize, usize)> {
    if step == 0 {
        return Err(Error::argument(
            op,
            "step",
            "the step is zero: use 1 to keep every element or a negative step to walk backwards",
        ));
    }
    // i128 holds every sum of two bounds.
    let (size, step) = (size as i128, i128::from(step));
    let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
    let bound = |given: Option<i64>, default: i128| match given.map(i128::from) {
        None => default,
        Some(i) => (if i < 0 { i + size } else { i }).clamp(low, high),
    };
    let (start, stop) = if step > 0 {
        (bound(start, low), bound(stop, high))
    } else {
        (bound(start, high), bound(stop, low))
    };
    let distance = if step > 0 { stop - start } else { start - stop };
    let len = if distance <= 0 {
        0
    } else {
        (distance - 1) / step.abs() + 1
    };
    // A single element has no step; any other step is smaller than the dimension.
    let step = if len > 1 { step as isize } else { 1 };
    Ok((start.max(0) as usize, step, len as usize))
}

impl Tensor {
    /// Elements `start:stop:step` of dimension `axis` with Python's meaning: bounds may be missing,
    /// negative (from the end) or too large (clamped); a negative step walks backwards. A view.
    #[track_caller]
    pub fn slice(
        &self,
        axis: i64,
        start: Option<i64>,
        stop: Option<i64>,
        step: i64,
    ) -> Result<Tensor> {
        let op = "slice";
        let axis = self.shape().axis(op, axis)?;
        let (start, step, len) = span(op, self.shape()[axis], start, stop, step)?;
        self.sliced(op, axis, start, step, len)
    }

    /// A slice whose elements are known to exist.
    #[track_caller]
    pub(super) fn sliced(
        &self,
        op: &'static str,
        axis: usize,
        start: usize,
        step: isize,
        len: usize,
    ) -> Result<Tensor> {
        let shape = self.shape().with(axis, len);
        if shape == *self.shape() && (step == 1 || len < 2) && start == 0 {
            return Ok(self.clone());
        }
        let run = || {
            if !self.is_plain() {
                let recipe = Recipe::of(self.dims()[axis]).take(0, start, step, len);
                return self.made(op, &smallvec![(axis, recipe)], |l| {
                    l[0].sliced(op, axis, start, step, len)
                });
            }
            let layout = if shape.numel() == 0 {
                Layout::contiguous(shape)
            } else {
                self.layout().slice(axis, start, step, len)
            };
            Ok(self.with_layout(layout))
        };
        let size = self.dims()[axis];
        if step > 0 && len > 0 {
            let stop = start + (len - 1) * step.unsigned_abs() + 1;
            crate::observe::tell(
                || serde_json::json!({ "as": "slice", "axis": axis, "start": start, "stop": stop, "step": step }),
            );
        }
        record1(op, &[self], run, |_| {
            Ok(move |b: &Back<'_>| {
                let gradient = b.grad()?.clone();
                if step != 1 {
                    return Ok(smallvec![Some(
                        gradient.unsliced(op, axis, start, step, size)?
                    )]);
                }
                let part = Part {
                    op,
                    axis,
                    start,
                    size,
                    gradient,
                };
                let given = b.leave(part);
                Ok(smallvec![given.map(|part| part.whole()).transpose()?])
            })
        })
    }

    /// What a slice was taken from, with zeros for the rest of the dimension: the gradient of
    /// [`sliced`](Self::sliced).
    #[track_caller]
    pub(crate) fn unsliced(
        &self,
        op: &'static str,
        axis: usize,
        start: usize,
        step: isize,
        size: usize,
    ) -> Result<Tensor> {
        let (len, apart) = (self.dims()[axis], step.unsigned_abs());
        // Backwards, the last element of the slice is the first in the dimension.
        let backwards = step < 0 && len > 0;
        let first = if backwards {
            start - (len - 1) * apart
        } else {
            start
        };
        let after = size - first - if len > 0 { (len - 1) * apart + 1 } else { 0 };
        let run = || {
            if !self.is_plain() {
                let (from, by) = if backwards { (len - 1, -1) } else { (0, 1) };
                let recipe = Recipe::of(len).fill(first);
                let recipe = recipe.spread(0, from, by, len, apart).fill(after);
                return self.made(op, &smallvec![(axis, recipe)], |l| {
                    l[0].unsliced(op, axis, start, step, size)
                });
            }
            let ordered = if backwards {
                self.reversed(&[axis])?
            } else {
                self.clone()
            };
            let zero = create::zero_scalar(self.dtype());
            ordered.apart(axis, apart, zero)?.padded(axis, first, after)
        };
        record1(op, &[self], run, |_| {
            Ok(move |b: &Back<'_>| {
                Ok(smallvec![Some(
                    b.grad()?.sliced(op, axis, start, step, len)?
                )])
            })
        })
    }

    /// Zeros before and after the elements of one dimension.
    #[track_caller]
    pub(super) fn padded(&self, axis: usize, before: usize, after: usize) -> Result<Tensor> {
        let mut pairs: Dims<(usize, usize)> = smallvec![(0, 0); self.rank()];
        pairs[axis] = (before, after);
        self.pad(&pairs, PadMode::Constant(0.into()))
    }

    /// The dimensions of a view that touches `axes` and leaves the others as they are.
    pub(super) fn without(&self, axes: &[usize]) -> Dims<Option<usize>> {
        (0..self.rank())
            .map(|d| (!axes.contains(&d)).then_some(d))
            .collect()
    }

    /// This tensor with a dimension whole on every rank: before several slices are taken of it, so
    /// that it moves once.
    #[track_caller]
    fn whole_along(&self, op: &'static str, axis: usize) -> Result<Tensor> {
        if self.is_plain() {
            Ok(self.clone())
        } else {
            self.view_parts(op, &self.without(&[axis]), |l| Ok(l[0].clone()))
        }
    }

    /// Elements `start .. start + len` of dimension `axis`, all of which must exist. A view.
    #[track_caller]
    pub fn narrow(&self, axis: i64, start: usize, len: usize) -> Result<Tensor> {
        let op = "narrow";
        let axis = self.shape().axis(op, axis)?;
        match start.checked_add(len) {
            Some(end) if end <= self.shape()[axis] => self.sliced(op, axis, start, 1, len),
            _ => Err(Error::argument(
                op,
                "len",
                format!(
                    "{len} elements from {start} on are not all in axis {axis} of {}",
                    self.type_string()
                ),
            )
            .of([self])),
        }
    }

    /// Neighbouring parts of the given sizes, which add up to the size of dimension `axis`. Views.
    #[track_caller]
    pub fn split(&self, sizes: &[usize], axis: i64) -> Result<Vec<Tensor>> {
        let op = "split";
        let axis = self.shape().axis(op, axis)?;
        let total = sizes.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        if total != Some(self.shape()[axis]) {
            return Err(Error::argument(
                op,
                "sizes",
                format!(
                    "sizes {sizes:?} do not add up to axis {axis} of {}",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        if sizes.len() == 1 {
            return Ok(vec![self.clone()]);
        }
        self.pieces(op, axis, sizes, false)
    }

    /// Whether ranks receive less if a dimension that is cut is made whole than if they fetch what
    /// they lack for each of these parts of it.
    fn is_cheaper_whole(&self, axis: usize, sizes: &[usize]) -> Result<bool> {
        if self.is_plain() || !self.is_cut(axis) {
            return Ok(false);
        }
        let (mesh, shape, sharding) = (self.mesh(), self.shape(), self.sharding());
        let gathered = (sharding.axes_of(axis)).fold(sharding.clone(), |s, a| s.without(a));
        let held = Held::new(mesh, shape, self.dtype(), sharding);
        let (mut left, mut start) = (held.lacks(&gathered), 0);
        for &len in sizes {
            let recipe = Recipe::of(shape[axis]).take(0, start, 1, len);
            let Some(rest) = left.checked_sub(lacked(mesh, shape, sharding, &[(axis, recipe)]))
            else {
                return Ok(true);
            };
            (left, start) = (rest, start + len);
        }
        Ok(false)
    }

    /// Neighbouring parts of these sizes, which are all of the dimension, with `whole` on every rank.
    /// The gradients of the parts are joined again.
    #[track_caller]
    fn pieces(
        &self,
        op: &'static str,
        axis: usize,
        sizes: &[usize],
        whole: bool,
    ) -> Result<Vec<Tensor>> {
        let ranks = self.mesh().held().len();
        if sizes.len().saturating_mul(ranks) >= MAX_PARTS {
            return Err(Error::argument(op, "sizes", format!(
                    "{} parts on {ranks} ranks: fewer than {MAX_PARTS} in all, slice the ones that are needed",
                    sizes.len()
                )).of([self]));
        }
        let run = || {
            let (mut start, mut out) = (0, Outputs::with_capacity(sizes.len()));
            let from = if whole && self.is_cut(axis) || self.is_cheaper_whole(axis, sizes)? {
                self.whole_along(op, axis)?
            } else {
                self.clone()
            };
            for &len in sizes {
                out.push(from.sliced(op, axis, start, 1, len)?);
                start += len;
            }
            Ok(out)
        };
        let out = record(op, &[self], run, |_| {
            let shapes: Vec<Shape> = sizes.iter().map(|n| self.shape().with(axis, *n)).collect();
            Ok(move |b: &Back<'_>| {
                let known = b.grad()?;
                let gradient = |(i, shape): (usize, &Shape)| match b.grad_of(i) {
                    Some(g) => Ok(g.clone()),
                    None => Tensor::zeros(shape, known.dtype(), known.mesh()),
                };
                let parts = shapes
                    .iter()
                    .enumerate()
                    .map(gradient)
                    .collect::<Result<Vec<_>>>()?;
                Ok(smallvec![Some(Tensor::concat(
                    &parts.iter().collect::<Vec<_>>(),
                    axis as i64
                )?)])
            })
        })?;
        Ok(out.into_vec())
    }

    /// `n` neighbouring parts of dimension `axis` whose sizes differ by at most one: part `i` holds
    /// `i * size / n .. (i + 1) * size / n`, the same cut that shards a dimension over `n` ranks.
    /// Parts may be empty. Views.
    #[track_caller]
    pub fn chunk(&self, n: usize, axis: i64) -> Result<Vec<Tensor>> {
        let op = "chunk";
        let axis = self.shape().axis(op, axis)?;
        if n == 0 || n > MAX_PARTS {
            return Err(Error::argument(
                op,
                "n",
                format!("cannot cut a dimension into {n} parts: give 1 to {MAX_PARTS}"),
            ));
        }
        if n == 1 {
            return Ok(vec![self.clone()]);
        }
        let sizes: Vec<usize> = (0..n)
            .map(|i| split(self.shape()[axis], i, n).len())
            .collect();
        self.pieces(op, axis, &sizes, false)
    }

    /// The slices at each index of dimension `axis`, without that dimension. Views.
    #[track_caller]
    pub fn unbind(&self, axis: i64) -> Result<Vec<Tensor>> {
        let op = "unbind";
        let axis = self.shape().axis(op, axis)?;
        let kept: Dims = (0..self.rank()).filter(|&d| d != axis).collect();
        let size = self.shape()[axis];
        if size > MAX_PARTS {
            return Err(Error::argument(
                op,
                "axis",
                format!(
                    "{} would give {size} tensors: slice the ones that are needed",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        // A dimension that is taken away cannot stay cut.
        let slices = self.pieces(op, axis, &vec![1; size], true)?;
        // Not in a closure, which would not know who called.
        let mut out = Vec::with_capacity(slices.len());
        for slice in &slices {
            out.push(slice.reordered(op, &kept)?);
        }
        Ok(out)
    }

    /// Reverses the given dimensions; an empty list reverses all. A view.
    #[track_caller]
    pub fn flip(&self, axes: &[i64]) -> Result<Tensor> {
        let op = "flip";
        let mut axes = self.shape().axes(op, axes)?;
        axes.retain(|axis| self.shape()[*axis] > 1);
        if axes.is_empty() {
            return Ok(self.clone());
        }
        let run = || {
            if self.is_plain() {
                return self.reversed(&axes);
            }
            let recipe = |&axis: &usize| {
                let n = self.dims()[axis];
                (axis, Recipe::of(n).take(0, n - 1, -1, n))
            };
            self.made(op, &axes.iter().map(recipe).collect(), |l| {
                l[0].reversed(&axes)
            })
        };
        record1(op, &[self], run, |_| {
            let axes: Dims<i64> = axes.iter().map(|a| *a as i64).collect();
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.flip(&axes)?)]))
        })
    }

    /// [`flip`](Self::flip) of a plain tensor.
    fn reversed(&self, axes: &[usize]) -> Result<Tensor> {
        axes.iter().try_fold(self.clone(), |t, &axis| {
            let size = t.shape()[axis];
            t.sliced("flip", axis, size - 1, -1, size)
        })
    }

    /// The elements whose coordinates satisfy `axis2 - axis1 == offset`, as a last dimension in
    /// place of the two. A view.
    #[track_caller]
    pub fn diagonal(&self, offset: i64, axis1: i64, axis2: i64) -> Result<Tensor> {
        let op = "diagonal";
        let (rows, cols) = (self.shape().axis(op, axis1)?, self.shape().axis(op, axis2)?);
        if rows == cols {
            return Err(Error::Axis {
                op,
                axis: axis2,
                rank: self.rank(),
            });
        }
        let distance = usize::try_from(offset.unsigned_abs()).unwrap_or(usize::MAX);
        let (down, right) = if offset < 0 {
            (distance, 0)
        } else {
            (0, distance)
        };
        let len = self.shape()[rows]
            .saturating_sub(down)
            .min(self.shape()[cols].saturating_sub(right));
        let (height, width) = (self.shape()[rows], self.shape()[cols]);
        record1(
            op,
            &[self],
            || self.diagonal_view(op, offset, (rows, cols), (down, right), len),
            |_| {
                Ok(move |b: &Back<'_>| {
                    Ok(smallvec![Some(b.grad()?.on_diagonals(
                        offset,
                        (rows, cols),
                        (height, width)
                    )?)])
                })
            },
        )
    }

    /// The last dimension on a diagonal of two new ones of these sizes, with zeros elsewhere: the
    /// gradient of [`diagonal`](Self::diagonal).
    #[track_caller]
    pub(super) fn on_diagonals(
        &self,
        offset: i64,
        (rows, cols): (usize, usize),
        (height, width): (usize, usize),
    ) -> Result<Tensor> {
        let down = usize::try_from(-offset.min(0))
            .unwrap_or(usize::MAX)
            .min(height);
        let len = self.dims()[self.rank() - 1];
        // Every column reads the element of its row; the diagonal keeps one of them.
        let column = self
            .padded(self.rank() - 1, down, height - down - len)?
            .unsqueeze(-1)?;
        let keep = Tensor::eye(height, width, offset, crate::DType::Bool, self.mesh())?;
        let square = keep.where_(&column, 0)?;
        square.movedim(&[-2, -1], &[rows as i64, cols as i64])
    }

    #[track_caller]
    fn diagonal_view(
        &self,
        op: &'static str,
        offset: i64,
        (rows, cols): (usize, usize),
        (down, right): (usize, usize),
        len: usize,
    ) -> Result<Tensor> {
        let kept: Dims = (0..self.rank())
            .filter(|&d| d != rows && d != cols)
            .collect();
        if !self.is_plain() {
            // A diagonal that meets every row (or every column) may be cut as they are: each rank
            // has its part of it, further along.
            let cut = |d: usize| self.sharding().axes_of(d).next().is_some();
            let (by_rows, by_cols) = (
                down == 0 && len == self.shape()[rows],
                right == 0 && len == self.shape()[cols],
            );
            let along = if by_cols && (!by_rows || (cut(cols) && !cut(rows))) {
                Some(cols)
            } else {
                by_rows.then_some(rows)
            };
            let to: Dims<Option<usize>> = kept.iter().map(|d| Some(*d)).chain([along]).collect();
            return self.view_parts(op, &to, |l| {
                let start = along
                    .and_then(|d| l.part(letter(d)))
                    .map_or(0, |(range, _)| range.start as i64);
                l[0].diagonal(
                    if along == Some(rows) {
                        offset + start
                    } else {
                        offset - start
                    },
                    rows as i64,
                    cols as i64,
                )
            });
        }
        let mut dims: Dims = kept.iter().map(|&d| self.shape()[d]).collect();
        dims.push(len);
        if dims.contains(&0) {
            return Ok(self.with_layout(Layout::contiguous(dims.into())));
        }
        let old = self.layout();
        let mut strides: Dims<isize> = kept.iter().map(|&d| old.strides[d]).collect();
        strides.push(old.strides[rows] + old.strides[cols]);
        let offset = old.offset as isize
            + down as isize * old.strides[rows]
            + right as isize * old.strides[cols];
        Ok(self.with_layout(Layout {
            shape: dims.into(),
            strides,
            offset: offset as usize,
        }))
    }

    /// Windows of `size` elements of dimension `axis`, one every `step`, laid along a new last
    /// dimension. A view: windows may overlap.
    #[track_caller]
    pub fn unfold(&self, axis: i64, size: usize, step: usize) -> Result<Tensor> {
        let op = "unfold";
        let axis = self.shape().axis(op, axis)?;
        let whole = self.shape()[axis];
        if step == 0 || size > whole {
            return Err(Error::argument(
                op,
                "size",
                format!(
                    "windows of {size} elements every {step} do not fit axis {axis} of {}",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        let windows = (whole - size) / step + 1;
        let mut dims: Dims = self.dims().into();
        dims[axis] = windows;
        dims.push(size);
        let shape = Shape::from(dims);
        shape.checked_numel(op)?;
        record1(
            op,
            &[self],
            || self.windows(op, axis, size, step, shape),
            |_| {
                Ok(move |b: &Back<'_>| {
                    Ok(smallvec![Some(b.grad()?.fold_windows(axis, step, whole)?)])
                })
            },
        )
    }

    /// Windows added up where they overlap, in a dimension of size `whole`: the gradient of
    /// [`unfold`](Self::unfold).
    #[track_caller]
    fn fold_windows(&self, axis: usize, step: usize, whole: usize) -> Result<Tensor> {
        let rank = self.rank();
        let (count, size) = (self.dims()[axis], self.dims()[rank - 1]);
        let shape: Shape = (0..rank - 1)
            .map(|d| if d == axis { whole } else { self.dims()[d] })
            .collect();
        let zeros = Tensor::zeros(shape, self.dtype(), self.mesh())?;
        let values = self.movedim(&[-1], &[axis as i64 + 1])?;
        let values = values.reshape(
            (0..rank - 1)
                .map(|d| {
                    if d == axis {
                        count * size
                    } else {
                        self.dims()[d]
                    }
                })
                .collect::<Shape>(),
        )?;
        let starts = Tensor::arange(0, count as i64, 1, crate::DType::I64, self.mesh())?
            .mul(step as i64)?
            .unsqueeze(1)?;
        let places = starts
            .add(&Tensor::arange(
                0,
                size as i64,
                1,
                crate::DType::I64,
                self.mesh(),
            )?)?
            .reshape([count * size])?;
        zeros.index_add(axis as i64, &places, &values)
    }

    #[track_caller]
    fn windows(
        &self,
        op: &'static str,
        axis: usize,
        size: usize,
        step: usize,
        shape: Shape,
    ) -> Result<Tensor> {
        let windows = shape[axis];
        if !self.is_plain() {
            let mut to = self.without(&[axis]);
            to.push(None);
            return self.view_parts(op, &to, |l| l[0].unfold(axis as i64, size, step));
        }
        if shape.numel() == 0 {
            return Ok(self.with_layout(Layout::contiguous(shape)));
        }
        let old = self.layout();
        let mut strides = old.strides.clone();
        strides.push(old.strides[axis]);
        // Where there is one window its step is never taken, and may be too large to multiply.
        strides[axis] = if windows > 1 {
            old.strides[axis] * step as isize
        } else {
            0
        };
        Ok(self.with_layout(Layout {
            shape,
            strides,
            offset: old.offset,
        }))
    }
}
