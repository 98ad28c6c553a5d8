//! Ops that copy elements to new places: joining, repeating, rolling, triangles.
//!
//! All outputs are dense. An input is read through a window of the output's space, so one kernel
//! fills the whole output and no kernel writes through strides.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1i32, 2, 3], [3], &device)?;
//! let y = Tensor::concat(&[&x, &x.flip(&[])?], 0)?;
//! assert_eq!(y.to_vec::<i32>()?, [1, 2, 3, 3, 2, 1]);
//! assert_eq!(x.roll(&[1], &[0])?.to_vec::<i32>()?, [3, 1, 2]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    Map, OpInfo, Operand, affine::diagonal_index, assemble::assembled, create, reduce::summed,
    shape::VIEWED,
};
use crate::{
    DType, Dims, Error, Layout, Result, Shape, Tensor,
    grad::{Back, record1},
    map::{Binary, Builder, MAX_INPUTS},
    reshard::Recipe,
    spmd::{
        Call, Local,
        built::{JOIN, REPEAT},
        plain,
        rule::letter,
    },
};
use smallvec::{SmallVec, smallvec};

/// The ops of this file. Of a dimension that is cut and that an op joins or rolls, each rank
/// fetches what it lacks. Zeros that an op puts in are zeros in every reduction of parts.
pub const OPS: &[OpInfo] = &[
    JOINED.named("concat").runs(&["assemble", "cast"]),
    JOINED.named("stack").runs(&["cast", "unsqueeze"]),
    VIEWED.named("roll").runs(&["assemble", "reshape"]),
    VIEWED.named("tile"),
    REPEATED,
    VIEWED.named("triu"),
    VIEWED.named("tril"),
    VIEWED.named("diag").runs(&["diagonal"]),
];

/// The steps of this file: tensors joined on behalf of an op.
pub(super) const STEPS: &[OpInfo] = &[JOINED];

const JOINED: OpInfo = OpInfo::new("join", JOIN);
const REPEATED: OpInfo = OpInfo::new("repeat_interleave", REPEAT);

/// More tensors than this are joined group by group on a mesh, because a rule knows its operands by
/// a bit each.
const JOIN_AT_ONCE: usize = 16;

impl Tensor {
    /// Joins tensors along an existing dimension. All other dimensions are equal; dtypes promote to
    /// a common one.
    #[track_caller]
    pub fn concat(tensors: &[&Tensor], axis: i64) -> Result<Tensor> {
        let op = "concat";
        let Some(first) = tensors.first() else {
            return Err(Error::argument(
                op,
                "tensors",
                "there is nothing to join: pass at least one tensor",
            ));
        };
        let axis = first.shape().axis(op, axis)?;
        if let Some(other) = tensors.iter().find(|t| {
            t.rank() != first.rank() || t.shape().with(axis, 0) != first.shape().with(axis, 0)
        }) {
            let detail = format!(
                "{} and {} differ in a dimension other than axis {axis}",
                first.type_string(),
                other.type_string()
            );
            return Err(Error::shape(op, [*first, *other], detail));
        }
        join(op, tensors, axis)
    }

    /// Joins tensors of one shape along a new dimension, which becomes dimension `axis` of the
    /// result. Dtypes promote.
    #[track_caller]
    pub fn stack(tensors: &[&Tensor], axis: i64) -> Result<Tensor> {
        let op = "stack";
        let Some(first) = tensors.first() else {
            return Err(Error::argument(
                op,
                "tensors",
                "there is nothing to stack: pass at least one tensor",
            ));
        };
        if let Some(other) = tensors.iter().find(|t| t.shape() != first.shape()) {
            return Err(Error::shape(
                op,
                [*first, *other],
                format!(
                    "{} and {} have different shapes",
                    first.type_string(),
                    other.type_string()
                ),
            ));
        }
        let rank = first.rank() as i64 + 1;
        let at = if axis < 0 { axis + rank } else { axis };
        if !(0..rank).contains(&at) {
            return Err(Error::Axis {
                op,
                axis,
                rank: rank as usize,
            });
        }
        let mut parts = Vec::with_capacity(tensors.len());
        for t in tensors {
            parts.push(t.unsqueeze(at)?);
        }
        join(op, &parts.iter().collect::<Vec<_>>(), at as usize)
    }

    /// Moves element `i` of dimension `axes[k]` to `i + shifts[k]`, wrapping around. With no axes
    /// and one shift the tensor is rolled as if it were flat.
    #[track_caller]
    pub fn roll(&self, shifts: &[i64], axes: &[i64]) -> Result<Tensor> {
        let op = "roll";
        if axes.is_empty() && shifts.len() == 1 {
            let flat = self.reshape([self.numel()])?;
            return flat.roll(shifts, &[0])?.reshape(self.shape());
        }
        if shifts.len() != axes.len() {
            return Err(Error::argument(
                op,
                "shifts",
                format!("{} shifts for {} axes", shifts.len(), axes.len()),
            )
            .of([self]));
        }
        if axes.is_empty() {
            return Ok(self.clone());
        }
        self.shape().axes(op, axes)?;
        let mut starts: Dims<(usize, usize)> = Dims::new();
        for (&shift, &axis) in shifts.iter().zip(axes) {
            let axis = self.shape().axis(op, axis)?;
            let size = self.shape()[axis];
            let start = if size == 0 {
                0
            } else {
                i128::from(shift).rem_euclid(size as i128) as usize
            };
            if start != 0 {
                starts.push((axis, start));
            }
        }
        if starts.is_empty() {
            return Ok(self.clone());
        }
        let run = || {
            if self.is_plain() {
                return self.rolled(&starts);
            }
            let recipe = |&(axis, start): &(usize, usize)| {
                let (n, left) = (self.dims()[axis], self.dims()[axis] - start);
                (
                    axis,
                    Recipe::of(n).take(0, left, 1, start).take(0, 0, 1, left),
                )
            };
            self.made(op, &starts.iter().map(recipe).collect(), |l| {
                l[0].rolled(&starts)
            })
        };
        record1(op, &[self], run, |_| {
            let back: Dims<i64> = starts.iter().map(|(_, start)| -(*start as i64)).collect();
            let axes: Dims<i64> = starts.iter().map(|(axis, _)| *axis as i64).collect();
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.roll(&back, &axes)?)]))
        })
    }

    /// [`roll`](Self::roll) of a plain tensor: for each axis, where its first element goes.
    fn rolled(&self, starts: &[(usize, usize)]) -> Result<Tensor> {
        starts.iter().try_fold(self.clone(), |t, &(axis, start)| {
            let size = t.shape()[axis];
            join(
                "roll",
                &[
                    &t.sliced("roll", axis, size - start, 1, start)?,
                    &t.sliced("roll", axis, 0, 1, size - start)?,
                ],
                axis,
            )
        })
    }

    /// Repeats the whole tensor `reps[i]` times along dimension `i`. As in NumPy, a shorter list is
    /// for the last dimensions and a longer one adds dimensions in front.
    #[track_caller]
    pub fn tile(&self, reps: &[usize]) -> Result<Tensor> {
        let op = "tile";
        let rank = self.rank().max(reps.len());
        let size = |i: usize| {
            (i + self.rank())
                .checked_sub(rank)
                .map_or(1, |d| self.shape()[d])
        };
        let rep = |i: usize| (i + reps.len()).checked_sub(rank).map_or(1, |d| reps[d]);
        let dims = (0..rank)
            .map(|i| size(i).checked_mul(rep(i)))
            .collect::<Option<Dims>>();
        let shape = Shape::from(dims.ok_or_else(|| {
            Error::argument(
                op,
                "reps",
                format!("{reps:?} copies of {} cannot be addressed", self.shape()),
            )
            .of([self])
        })?);
        shape.checked_numel(op)?;
        let apart: Shape = (0..rank).flat_map(|i| [rep(i), size(i)]).collect();
        let run = || {
            if !self.is_plain() {
                let to: Dims<Option<usize>> = (0..rank)
                    .map(|i| (i + self.rank()).checked_sub(rank).filter(|_| rep(i) == 1))
                    .collect();
                return self.view_parts(op, &to, |l| l[0].tile(reps));
            }
            if shape.numel() == 0 {
                return self.no_elements(self.dtype(), shape);
            }
            let stride = |i: usize| {
                (i + self.rank())
                    .checked_sub(rank)
                    .map_or(0, |d| self.layout().strides[d])
            };
            let strides = (0..rank).flat_map(|i| [0, stride(i)]).collect();
            self.with_layout(Layout {
                shape: apart.clone(),
                strides,
                offset: self.layout().offset,
            })
            .reshaped(op, shape)
        };
        record1(op, &[self], run, |_| {
            let (apart, old, copies) = (
                apart.clone(),
                self.shape().clone(),
                (0..rank).map(|i| 2 * i).collect::<Dims>(),
            );
            Ok(move |b: &Back<'_>| {
                Ok(smallvec![Some(
                    summed(op, &b.grad()?.reshape(&apart)?, &copies)?.reshape(&old)?
                )])
            })
        })
    }

    /// Repeats each element `n` times in place: `[a, b]` becomes `[a, a, b, b]`.
    #[track_caller]
    pub fn repeat_interleave(&self, n: usize, axis: i64) -> Result<Tensor> {
        let op = "repeat_interleave";
        let axis = self.shape().axis(op, axis)?;
        let size = self.shape()[axis].checked_mul(n);
        let size = size.ok_or_else(|| {
            Error::argument(
                op,
                "n",
                format!("{n} copies of {} cannot be addressed", self.shape()),
            )
            .of([self])
        })?;
        let shape = self.shape().with(axis, size);
        shape.checked_numel(op)?;
        if n == 1 {
            return Ok(self.clone());
        }
        record1(
            op,
            &[self],
            || self.repeated(op, n, axis, shape),
            |_| {
                let old = self.shape().clone();
                let apart: Shape = old.dims()[..=axis]
                    .iter()
                    .copied()
                    .chain([n])
                    .chain(old.dims()[axis + 1..].iter().copied())
                    .collect();
                Ok(move |b: &Back<'_>| {
                    Ok(smallvec![Some(
                        summed(op, &b.grad()?.reshape(&apart)?, &[axis + 1])?.reshape(&old)?
                    )])
                })
            },
        )
    }

    #[track_caller]
    fn repeated(&self, op: &'static str, n: usize, axis: usize, shape: Shape) -> Result<Tensor> {
        if !self.is_plain() {
            return Call::of(&REPEATED, &[self])
                .data(&[axis as i64, n as i64])
                .run1(|l| l[0].repeat_interleave(n, axis as i64));
        }
        if shape.numel() == 0 {
            return self.no_elements(self.dtype(), shape);
        }
        let inner = self.layout().unsqueeze(axis + 1);
        let repeated = inner.expand(&inner.shape.with(axis + 1, n));
        self.with_layout(repeated).reshaped(op, shape)
    }

    /// Keeps the elements on and above diagonal `k` of the last two dimensions, with zero below.
    /// Diagonal `k` holds the elements whose column is `k` more than their row.
    #[track_caller]
    pub fn triu(&self, k: i64) -> Result<Tensor> {
        self.triangle("triu", Binary::Ge, k)
    }

    /// Keeps the elements on and below diagonal `k` of the last two dimensions, with zero above.
    #[track_caller]
    pub fn tril(&self, k: i64) -> Result<Tensor> {
        self.triangle("tril", Binary::Le, k)
    }

    #[track_caller]
    fn triangle(&self, op: &'static str, keep: Binary, k: i64) -> Result<Tensor> {
        if self.rank() < 2 {
            return Err(Error::shape(
                op,
                [self],
                format!("{} has no last two dimensions", self.type_string()),
            ));
        }
        record1(
            op,
            &[self],
            || self.kept_triangle(op, keep, k),
            |_| Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.triangle(op, keep, k)?)])),
        )
    }

    #[track_caller]
    fn kept_triangle(&self, op: &'static str, keep: Binary, k: i64) -> Result<Tensor> {
        if !self.is_plain() {
            let start = |l: &Local<'_>, back: usize| {
                l.part(letter(self.rank() - back))
                    .map_or(0, |(range, _)| range.start as i64)
            };
            return self.view_parts(op, &self.without(&[]), |l| {
                l[0].triangle(op, keep, k.saturating_add(start(l, 2) - start(l, 1)))
            });
        }
        let dtype = self.dtype();
        let (index, kind) = diagonal_index(self.shape(), k);
        let b = Builder::new();
        let (x, diagonal) = (b.load(dtype), b.index(kind.dtype()));
        let kept = diagonal.binary(keep, diagonal.lit(0i64));
        let program = b.finish(&[(kept.select(x, zero(&b, dtype)), dtype)])?;
        Ok(Map {
            indices: &[index],
            ..Map::new(op, &program, self.shape())
        }
        .run(&[self.into()], self.device())?
        .remove(0))
    }

    /// A vector becomes a square matrix with it on diagonal `k` and zero elsewhere; a matrix gives
    /// its diagonal `k` as a vector.
    #[track_caller]
    pub fn diag(&self, k: i64) -> Result<Tensor> {
        let op = "diag";
        let too_large = || {
            Error::argument(
                op,
                "k",
                format!("diagonal {k} of {} is out of reach", self.type_string()),
            )
            .of([self])
        };
        match self.rank() {
            1 => {}
            2 => return self.diagonal(k, 0, 1),
            _ => {
                return Err(Error::shape(
                    op,
                    [self],
                    format!("{} is neither a vector nor a matrix", self.type_string()),
                ));
            }
        }
        let distance = usize::try_from(k.unsigned_abs()).map_err(|_| too_large())?;
        let size = self.numel().checked_add(distance).ok_or_else(too_large)?;
        let shape = Shape::from([size, size]);
        shape.checked_numel(op)?;
        let run = || {
            if self.is_plain() {
                return self.on_diagonal(shape, k);
            }
            // Each rank fills the rows of its elements, if there are no other rows.
            let to = [if k == 0 { Some(0) } else { None }, None];
            self.view_parts(op, &to, |l| {
                let region = l.region(0, &shape);
                l[0].on_diagonal(
                    region.shape.into(),
                    if k == 0 { region.start[0] as i64 } else { k },
                )
            })
        };
        record1(op, &[self], run, |_| {
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.diagonal(k, 0, 1)?)]))
        })
    }

    /// A matrix with a plain vector on diagonal `k` and zero elsewhere.
    fn on_diagonal(&self, shape: Shape, k: i64) -> Result<Tensor> {
        let (op, dtype) = ("diag", self.dtype());
        if self.numel() == 0 {
            return create::filled(op, shape, create::zero_scalar(dtype), dtype, &self.into());
        }
        // Row r of the matrix holds element r of the vector (r - |k| below the main diagonal),
        // which every column reads.
        let rows = self.with_layout(
            self.layout()
                .unsqueeze(1)
                .expand(&Shape::from([self.numel(), shape[1]])),
        );
        let (index, kind) = diagonal_index(&shape, k);
        let b = Builder::new();
        let (x, diagonal) = (b.load(dtype), b.index(kind.dtype()));
        let program = b.finish(&[(diagonal.eq(0i64).select(x, zero(&b, dtype)), dtype)])?;
        let start: Dims<isize> = smallvec![-k.min(0) as isize, 0];
        Ok(Map {
            indices: &[index],
            ..Map::new(op, &program, &shape)
        }
        .run(&[Operand::at(&rows, start)], self.device())?
        .remove(0))
    }
}

fn zero(b: &Builder, dtype: DType) -> crate::map::Val<'_> {
    b.constant(create::zero_scalar(dtype), dtype)
}

/// Joins tensors that are known to fit along `axis`, as many at a time as a kernel takes.
#[track_caller]
pub(super) fn join(op: &'static str, tensors: &[&Tensor], axis: usize) -> Result<Tensor> {
    let dtype = tensors
        .iter()
        .fold(tensors[0].dtype(), |dtype, t| dtype.promote(t.dtype()));
    let size = tensors
        .iter()
        .try_fold(0usize, |sum, t| sum.checked_add(t.shape()[axis]));
    let shape = tensors[0].shape().with(
        axis,
        size.ok_or_else(|| Error::SizeOverflow {
            op,
            shape: tensors[0].shape().with(axis, usize::MAX).into(),
        })?,
    );
    shape.checked_numel(op)?;
    record1(
        op,
        tensors,
        || joined(op, tensors, axis, dtype, shape),
        |_| {
            let pieces: Vec<(usize, DType)> = tensors
                .iter()
                .map(|t| (t.shape()[axis], t.dtype()))
                .collect();
            Ok(move |b: &Back<'_>| {
                let (gradient, mut end) = (b.grad()?, 0);
                let piece = |(i, (len, dtype)): (usize, &(usize, DType))| {
                    end += len;
                    b.wanted(i, || {
                        gradient.narrow(axis as i64, end - len, *len)?.cast(*dtype)
                    })
                };
                pieces.iter().enumerate().map(piece).collect()
            })
        },
    )
}

#[track_caller]
fn joined(
    op: &'static str,
    tensors: &[&Tensor],
    axis: usize,
    dtype: DType,
    shape: Shape,
) -> Result<Tensor> {
    if !plain(op, tensors)? {
        return join_parts(op, tensors, axis, dtype);
    }
    if shape.numel() == 0 {
        return tensors[0].no_elements(dtype, shape);
    }
    if let Some(whole) = side_by_side(tensors, axis, &shape)? {
        return Ok(whole);
    }
    let mut parts: Vec<Tensor> = tensors
        .iter()
        .filter(|t| t.numel() > 0)
        .map(|t| (*t).clone())
        .collect();
    if parts.len() > 1 {
        // Before the first round of kernels, not after it.
        tensors[0].device().check(dtype, shape.numel())?;
    }
    while parts.len() > 1 {
        parts = parts
            .chunks(MAX_INPUTS)
            .map(|group| join_few(op, group, axis, dtype))
            .collect::<Result<_>>()?;
    }
    parts.remove(0).cast(dtype)
}

/// The whole of tensors that already lie beside each other in one buffer, such as the parts that
/// `split` gives.
fn side_by_side(tensors: &[&Tensor], axis: usize, shape: &Shape) -> Result<Option<Tensor>> {
    let mut views = Vec::with_capacity(tensors.len());
    for t in tensors.iter().filter(|t| t.numel() > 0) {
        views.push(t.view()?);
    }
    let mut end = views[0].layout.offset as isize;
    for view in &views {
        let (layout, first) = (&view.layout, &views[0]);
        let lies = view.buffer.serial() == first.buffer.serial()
            && view.dtype == first.dtype
            && layout.strides == first.layout.strides
            && layout.offset as isize == end;
        if !lies {
            return Ok(None);
        }
        end += layout.shape[axis] as isize * layout.strides[axis];
    }
    let mut whole = views.swap_remove(0);
    whole.layout.shape = shape.clone();
    Ok(Some(Tensor::from_view(whole, tensors[0].mesh())))
}

/// [`join`] on a mesh: other dimensions are cut alike. All are partial or none is, so that a part
/// that is whole counts once.
#[track_caller]
fn join_parts(op: &'static str, tensors: &[&Tensor], axis: usize, dtype: DType) -> Result<Tensor> {
    let mut parts = Vec::with_capacity(tensors.len());
    for t in tensors {
        parts.push(t.cast(dtype)?);
    }
    while parts.len() > 1 {
        let mut joined = Vec::with_capacity(parts.len().div_ceil(JOIN_AT_ONCE));
        for group in parts.chunks(JOIN_AT_ONCE) {
            let inputs: SmallVec<[&Tensor; 8]> = group.iter().collect();
            let local = |l: &Local<'_>| {
                join(
                    op,
                    &l.inputs.iter().collect::<SmallVec<[&Tensor; 8]>>(),
                    axis,
                )
            };
            joined.push(if inputs.iter().any(|t| t.is_cut(axis)) {
                let sizes: SmallVec<[usize; 8]> = inputs.iter().map(|t| t.dims()[axis]).collect();
                let recipe = (sizes.iter().enumerate())
                    .fold(Recipe::of_each(&sizes), |r, (i, n)| r.take(i, 0, 1, *n));
                assembled(op, &inputs, &smallvec![(axis, recipe)], None, local)?
            } else {
                Call::of(&JOINED, &inputs)
                    .on_behalf_of(op)
                    .data(&[axis as i64])
                    .run1(local)?
            });
        }
        parts = joined;
    }
    Ok(parts.remove(0))
}

/// One kernel over the windows of at most [`MAX_INPUTS`] tensors with elements.
fn join_few(op: &'static str, parts: &[Tensor], axis: usize, dtype: DType) -> Result<Tensor> {
    if let [one] = parts {
        return Ok(one.clone());
    }
    let b = Builder::new();
    let mut joined = b.load(parts[0].dtype()).cast(dtype);
    let mut end = parts[0].shape()[axis];
    let mut operands = vec![Operand::at(&parts[0], smallvec![0; parts[0].rank()])];
    for part in &parts[1..] {
        let x = b.load(part.dtype());
        joined = x.inside().select(x.cast(dtype), joined);
        let mut start: Dims<isize> = smallvec![0; part.rank()];
        start[axis] = end as isize;
        end += part.shape()[axis];
        operands.push(Operand::at(part, start));
    }
    let program = b.finish(&[(joined, dtype)])?;
    Ok(Map::new(op, &program, &parts[0].shape().with(axis, end))
        .run(&operands, parts[0].device())?
        .remove(0))
}
