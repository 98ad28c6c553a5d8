//! Reading elements at given places: gather and its relatives.
//!
//! Indices are `i32`, `i64` or `u32`. A negative index counts from the end: -1 is the last element.
//! Anything outside `-n..n` is [`Error::IndexOutOfRange`], on a GPU at the next read. All of them
//! are one kernel: an output that is read through a layout whose indexed dimensions do not move,
//! plus one offset for each index tensor.
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
//!
//! On a mesh an indexed dimension may be cut: every rank then reads what it holds and gives zeros
//! for the rest, which makes a partial sum (a partial `or` of bools). Indices are always those of
//! the whole tensor and are checked against its size.
//!
//! The gradient of a lookup is added up where the elements were read.

mod gradient;
mod local;

pub(super) use gradient::{Zeros, picked};
pub(super) use local::{Part, check_not_empty, index_axis, localize};

use super::{OpInfo, RuleForm, expr::Expr, sum_to};
use crate::{
    DType, Dims, Error, Layout, Result, Shape, Tensor,
    backend::ScatterOp,
    grad::{Back, record1},
    spmd::{
        Call, Local, Rule,
        built::{Data, is_true},
        plain,
        rule::Operands,
    },
};
use local::{Indexed, pick, run_gather, take};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// The ops of this file. A dimension that is indexed may be cut.
pub const OPS: &[OpInfo] = &[
    GATHER,
    TAKE,
    LOOKUP.named("index_select"),
    LOOKUP.named("index_get"),
    LOOKUP.named("gather_axes"),
    GATHER_ND,
    LOOKUP.named("embedding"),
];

/// The steps of this file: a lookup of several axes on behalf of an op.
pub(super) const STEPS: &[OpInfo] = &[LOOKUP];

const GATHER: OpInfo = OpInfo::new("gather", RuleForm::built("gather", gather_rule));
/// Of numbers, and of bools.
const TAKE: OpInfo = OpInfo::new(
    "take_along_axis",
    RuleForm::Variants(&[
        "...i, ...j -> ...j ; reduce i sum ; through any 0",
        "...i, ...j -> ...j ; reduce i or ; through any 0",
    ]),
);
const LOOKUP: OpInfo = OpInfo::new("lookup", RuleForm::built("lookup", lookup_rule));
const GATHER_ND: OpInfo = OpInfo::new("gather_nd", RuleForm::built("gather_nd", gather_nd_rule));

/// At most this many index tensors in one gather or scatter: kernels bind few buffers.
pub(super) const MAX_INDICES: usize = 4;

/// Refuses what cannot be an index.
pub(super) fn check_indices(op: &'static str, indices: &[&Tensor]) -> Result<()> {
    if indices.is_empty() || indices.len() > MAX_INDICES {
        return Err(Error::argument(
            op,
            "indices",
            format!(
                "{} index tensors were given: one call takes 1 to {MAX_INDICES}",
                indices.len()
            ),
        )
        .of(indices.iter().copied()));
    }
    match indices
        .iter()
        .map(|t| t.dtype())
        .find(|d| !matches!(d, DType::I32 | DType::I64 | DType::U32))
    {
        Some(dtype) => Err(Error::DType {
            op,
            dtype,
            expected: "i32, i64 or u32 indices",
        }),
        None => Ok(()),
    }
}

/// The common shape of several index tensors.
pub(super) fn broadcast_all(op: &'static str, tensors: &[&Tensor]) -> Result<Shape> {
    tensors
        .iter()
        .try_fold(Shape::scalar(), |shape, t| shape.broadcast(op, t.shape()))
}

/// The `d`-th letter of a rule that is written for given operands.
pub(super) fn nth(d: usize) -> char {
    char::from_u32('a' as u32 + d as u32).unwrap_or('?')
}

/// The term of operand `i`, which broadcasts to dimensions with these letters, of which `ones` have
/// size 1.
pub(super) fn term(operands: &Operands<'_>, i: usize, ones: &[bool], letters: &str) -> String {
    let lead = ones.len() - operands.rank(i);
    letters
        .chars()
        .skip(lead)
        .enumerate()
        .map(|(d, c)| {
            if operands.is_one(i, d) && !ones[lead + d] {
                '1'
            } else {
                c
            }
        })
        .collect()
}

/// Which dimensions have size 1 of those that some operands broadcast to.
pub(super) fn common_ones(operands: &Operands<'_>, of: Range<usize>) -> SmallVec<[bool; 6]> {
    let rank = of.clone().map(|i| operands.rank(i)).max().unwrap_or(0);
    let is_one = |d: usize| {
        of.clone().all(|i| {
            let lead = rank - operands.rank(i);
            d < lead || operands.is_one(i, d - lead)
        })
    };
    (0..rank).map(is_one).collect()
}

/// Letters `from .. from + n`.
pub(super) fn letters(from: usize, n: usize) -> String {
    (from..from + n).map(nth).collect()
}

/// The same, with spaces between them, as clauses name them.
pub(super) fn listed(letters: &str) -> String {
    letters.chars().flat_map(|c| [' ', c]).collect()
}

/// How lookups in parts of bools, or of numbers, combine: only one rank has something else than
/// zero.
fn combine(bools: bool) -> &'static str {
    if bools { "or" } else { "sum" }
}

/// Letters for the dimensions of the source, then for those of the batch. The call says whether the source is of
/// bools, how many dimensions stand before the batch, and which axes are indexed.
fn lookup_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (bools, front, axes) = (is_true(data, 0), data[1] as usize, &data[2..]);
    let rank = operands.rank(0);
    let ones = common_ones(operands, 1..operands.count());
    let batch = letters(rank, ones.len());
    let kept: String = (0..rank)
        .filter(|d| !axes.contains(&(*d as i64)))
        .map(nth)
        .collect();
    let (before, after) = kept.split_at(front);
    let indices: String = (1..operands.count())
        .map(|i| format!(", {}", term(operands, i, &ones, &batch)))
        .collect();
    let indexed = listed(
        &axes
            .iter()
            .map(|axis| nth(*axis as usize))
            .collect::<String>(),
    );
    let text = format!(
        "{}{indices} -> {before}{batch}{after} ; reduce{indexed} {} ; through any 0",
        letters(0, rank),
        combine(bools)
    );
    operands.read(&text, &[])
}

/// The call says the axis, whether the source is of bools, and for each dimension whether the
/// source is longer than the index there: that one is whole.
fn gather_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (axis, bools, longer, rank) = (
        data[0] as usize,
        is_true(data, 1),
        &data[2..],
        operands.rank(0),
    );
    let source: String = (0..rank)
        .map(|d| {
            if d == axis {
                nth(rank)
            } else if is_true(longer, d) {
                '1'
            } else {
                nth(d)
            }
        })
        .collect();
    let all = letters(0, rank);
    let text = format!(
        "{source}, {all} -> {all} ; reduce {} {} ; through any 0",
        nth(rank),
        combine(bools)
    );
    operands.read(&text, &[])
}

/// The call says how many coordinates there are, and whether the source is of bools.
fn gather_nd_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (k, bools, rank) = (data[0] as usize, is_true(data, 1), operands.rank(0));
    let (batch, rest) = (letters(rank, operands.rank(1) - 1), letters(k, rank - k));
    let text = format!(
        "{}{rest}, {batch}1 -> {batch}{rest} ; reduce{} {} ; through any 0",
        letters(0, k),
        listed(&letters(0, k)),
        combine(bools)
    );
    operands.read(&text, &[])
}

/// A lookup of several axes, checked: see [`Tensor::gather_axes`].
struct Lookup {
    /// The common shape of the indices.
    batch: Shape,
    /// Dimensions of the source that are not indexed.
    kept: Dims,
    /// How many of them stand before the batch in the result.
    front: usize,
}

impl Lookup {
    fn new(op: &'static str, src: &Tensor, axes: &[(usize, &Tensor)]) -> Result<Self> {
        let indices: Vec<&Tensor> = axes.iter().map(|(_, index)| *index).collect();
        check_indices(op, &indices)?;
        let mut sorted = Dims::new();
        for &(axis, _) in axes {
            if axis >= src.rank() || sorted.contains(&axis) {
                return Err(Error::Axis {
                    op,
                    axis: axis as i64,
                    rank: src.rank(),
                });
            }
            sorted.push(axis);
        }
        sorted.sort_unstable();
        let kept: Dims = (0..src.rank())
            .filter(|axis| !sorted.contains(axis))
            .collect();
        let adjacent = sorted.windows(2).all(|pair| pair[1] == pair[0] + 1);
        Ok(Self {
            batch: broadcast_all(op, &indices)?,
            kept,
            front: if adjacent { sorted[0] } else { 0 },
        })
    }

    /// Looks up on one device, which holds `part` of an axis where that is not all.
    fn run(
        &self,
        op: &'static str,
        src: &Tensor,
        axes: &[(usize, &Tensor)],
        part: impl Fn(usize) -> Option<Part>,
    ) -> Result<Tensor> {
        let (mut dims, mut strides) = (Dims::new(), Dims::<isize>::new());
        let keep = |axes: &[usize], dims: &mut Dims, strides: &mut Dims<isize>| {
            for &axis in axes {
                dims.push(src.shape()[axis]);
                strides.push(src.layout().strides[axis]);
            }
        };
        keep(&self.kept[..self.front], &mut dims, &mut strides);
        dims.extend_from_slice(self.batch.dims());
        strides.resize(dims.len(), 0);
        keep(&self.kept[self.front..], &mut dims, &mut strides);
        let layout = Layout {
            shape: dims.into(),
            strides,
            offset: src.layout().offset,
        };
        // The dimensions behind the batch do not move the indices.
        let place = |index: &Tensor| {
            index.viewed(
                (self.front..self.kept.len())
                    .fold(index.layout().clone(), |l, _| l.unsqueeze(l.shape.rank())),
            )
        };
        let placed: Vec<Tensor> = axes.iter().map(|(_, index)| place(index)).collect();
        let indexed: Vec<Indexed<'_>> = axes
            .iter()
            .zip(&placed)
            .map(|((axis, _), index)| Indexed {
                axis: *axis,
                index,
                part: part(*axis),
            })
            .collect();
        run_gather(op, src, layout, &indexed)
    }
}

/// Advanced indexing of some axes; see [`Tensor::gather_axes`].
#[track_caller]
pub(super) fn gather_axes(
    op: &'static str,
    src: &Tensor,
    axes: &[(usize, &Tensor)],
) -> Result<Tensor> {
    let lookup = Lookup::new(op, src, axes)?;
    let inputs: SmallVec<[&Tensor; 3]> = std::iter::once(src)
        .chain(axes.iter().map(|(_, index)| *index))
        .collect();
    crate::observe::tell(|| match (op, axes) {
        ("index_select", [(axis, _)]) => serde_json::json!({ "axis": axis }),
        _ => {
            let axes: Dims = axes.iter().map(|(axis, _)| *axis).collect();
            serde_json::json!({ "as": "gather_axes", "axes": &axes[..] })
        }
    });
    record1(
        op,
        &inputs,
        || look_up(op, src, axes, &inputs, &lookup),
        |_| Ok(lookup.pull(src, axes)),
    )
}

#[track_caller]
fn look_up(
    op: &'static str,
    src: &Tensor,
    axes: &[(usize, &Tensor)],
    inputs: &[&Tensor],
    lookup: &Lookup,
) -> Result<Tensor> {
    if plain(op, inputs)? {
        return lookup.run(op, src, axes, |_| None);
    }
    if lookup.batch.numel() > 0 && lookup.kept.iter().all(|d| src.dims()[*d] > 0) {
        check_not_empty(op, src)?;
    }
    let data: Data = [(src.dtype() == DType::Bool).into(), lookup.front as i64]
        .into_iter()
        .chain(axes.iter().map(|(axis, _)| *axis as i64))
        .collect();
    let local = |l: &Local<'_>| {
        let parts: Vec<(usize, &Tensor)> = axes
            .iter()
            .zip(&l.inputs[1..])
            .map(|((axis, _), index)| (*axis, index))
            .collect();
        Lookup::new(op, &l[0], &parts)?.run(op, &l[0], &parts, |axis| l.part(nth(axis)))
    };
    Call::of(&LOOKUP, inputs)
        .on_behalf_of(op)
        .data(&data)
        .run1(local)
}

/// How many coordinates the last dimension of an index holds.
pub(super) fn check_coordinates(op: &'static str, index: &Tensor, rank: usize) -> Result<usize> {
    check_indices(op, &[index])?;
    let Some((&k, _)) = index.dims().split_last() else {
        return Err(Error::shape(
            op,
            [index],
            "the index needs a last dimension that holds coordinates",
        ));
    };
    if k > rank {
        return Err(Error::shape(
            op,
            [index],
            format!("{k} coordinates were given for a tensor of rank {rank}"),
        ));
    }
    Ok(k)
}

/// Looks up coordinates on one device.
fn gather_nd(
    op: &'static str,
    src: &Tensor,
    index: &Tensor,
    part: impl Fn(usize) -> Option<Part>,
) -> Result<Tensor> {
    let coordinates = index.unbind(-1)?;
    if coordinates.is_empty() {
        let dims: Dims = index.dims()[..index.rank() - 1]
            .iter()
            .chain(src.dims())
            .copied()
            .collect();
        return src.expand(dims);
    }
    let axes: Vec<(usize, &Tensor)> = coordinates.iter().enumerate().collect();
    Lookup::new(op, src, &axes)?.run(op, src, &axes, part)
}

/// [`Tensor::take_along_axis`] on behalf of an op.
#[track_caller]
pub(super) fn take_along(
    op: &'static str,
    src: &Tensor,
    axis: i64,
    index: &Tensor,
) -> Result<Tensor> {
    let axis = src.shape().axis(op, axis)?;
    check_indices(op, &[index])?;
    if index.rank() != src.rank() {
        return Err(Error::shape(
            op,
            [src, index],
            format!(
                "{} and an index of shape {} differ in rank",
                src.type_string(),
                index.shape()
            ),
        ));
    }
    let shape = src
        .shape()
        .with(axis, 1)
        .broadcast(op, &index.shape().with(axis, 1))?
        .with(axis, index.shape()[axis]);
    let run = || {
        if plain(op, &[src, index])? {
            return take(op, src, axis, index, None);
        }
        if shape.numel() > 0 {
            check_not_empty(op, src)?;
        }
        Call::of(&TAKE, &[src, index])
            .on_behalf_of(op)
            .variant(usize::from(src.dtype() == DType::Bool))
            .bind('i', &[axis])
            .bind('j', &[axis])
            .run1(|l| take(op, &l[0], axis, &l[1], l.part('i')))
    };
    crate::observe::tell(|| serde_json::json!({ "axis": axis }));
    record1(op, &[src, index], run, |_| {
        let (zeros, index, shape) = (
            Zeros::like(src),
            index.kept(),
            shape.with(axis, src.dims()[axis]),
        );
        Ok(move |b: &Back<'_>| {
            // Where the source was repeated, each repetition gets its own gradient first.
            let whole = zeros.make(b.grad()?)?.expand(&shape)?.put_along_axis(
                axis as i64,
                &index,
                b.grad()?,
                ScatterOp::Add,
            )?;
            Ok(smallvec![Some(sum_to(op, &whole, &zeros.shape)?)])
        })
    })
}

/// Zeros of a shape, but for one place along an axis each, which an index names and the gradient of
/// what was picked from there goes to. That is one elementwise program, which others may join.
fn at_one(axis: usize, shape: &Shape, index: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let n = shape[axis];
    let mut dims = vec![1; shape.rank()];
    dims[axis] = n;
    let places = Tensor::arange(0, n as i64, 1, DType::I32, index.device())?;
    let places = places.reshape(dims)?.expand(shape.clone())?;
    let of = Expr::new("gather", &[&places, index, grad]);
    of.map(grad.dtype(), |a| {
        let named = a.x[1].cast(DType::I32);
        // Counted from the end where it is negative.
        let here = a.x[0].eq(named).or(a.x[0].eq(named + n as i64));
        here.select(a.x[2], a.x[2].lit(0.0))
    })
}

impl Tensor {
    /// Picks along one axis, in PyTorch's sense: `out[i][j] = self[index[i][j]][j]` for axis 0. The
    /// index has the tensor's rank and is not larger in any other dimension (where it is smaller,
    /// only the first elements are used). For broadcasting of the other dimensions see
    /// [`take_along_axis`](Tensor::take_along_axis).
    #[track_caller]
    pub fn gather(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        let op = "gather";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        let fits = index.rank() == self.rank()
            && (0..self.rank()).all(|d| d == axis || index.shape()[d] <= self.shape()[d]);
        if !fits {
            let detail = format!(
                "an index of shape {} does not fit {} but for axis {axis}",
                index.shape(),
                self.type_string()
            );
            return Err(Error::shape(op, [self, index], detail));
        }
        crate::observe::tell(|| serde_json::json!({ "axis": axis }));
        record1(
            op,
            &[self, index],
            || self.gathered(axis, index),
            |_| {
                let (zeros, index) = (Zeros::like(self), index.kept());
                let only = index.shape()[axis] == 1
                    && (0..self.rank()).all(|d| d == axis || index.dims()[d] == self.dims()[d])
                    && index.numel() > 0
                    && plain(op, &[self, &index])?;
                let shape = self.shape().clone();
                Ok(move |b: &Back<'_>| {
                    if only {
                        return Ok(smallvec![Some(at_one(axis, &shape, &index, b.grad()?)?)]);
                    }
                    Ok(smallvec![Some(zeros.make(b.grad()?)?.scatter(
                        axis as i64,
                        &index,
                        b.grad()?,
                        ScatterOp::Add
                    )?)])
                })
            },
        )
    }

    /// [`gather`](Self::gather) with an index that fits.
    #[track_caller]
    fn gathered(&self, axis: usize, index: &Tensor) -> Result<Tensor> {
        let op = "gather";
        if plain(op, &[self, index])? {
            return pick(op, self, axis, index, None);
        }
        if index.numel() > 0 {
            check_not_empty(op, self)?;
        }
        // A dimension of which only the first elements are used is whole; a rank takes those that
        // its part of the index is for.
        let rank = self.rank();
        let longer = |d: usize| d != axis && self.dims()[d] != index.dims()[d];
        let data: Data = [axis as i64, (self.dtype() == DType::Bool).into()]
            .into_iter()
            .chain((0..rank).map(|d| longer(d).into()))
            .collect();
        let local = |l: &Local<'_>| {
            let mut src = l[0].clone();
            for d in (0..rank).filter(|d| longer(*d)) {
                src = src.narrow(
                    d as i64,
                    l.part(nth(d)).map_or(0, |(part, _)| part.start),
                    l[1].dims()[d],
                )?;
            }
            pick(op, &src, axis, &l[1], l.part(nth(rank)))
        };
        Call::of(&GATHER, &[self, index]).data(&data).run1(local)
    }

    /// Picks along one axis, in NumPy's sense: as [`gather`](Tensor::gather), but all other
    /// dimensions of tensor and index broadcast.
    #[track_caller]
    pub fn take_along_axis(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        take_along("take_along_axis", self, axis, index)
    }

    /// Slices `index[0]`, `index[1]`, ... of dimension `axis`.
    #[track_caller]
    pub fn index_select(&self, axis: i64, index: &Tensor) -> Result<Tensor> {
        let op = "index_select";
        let axis = self.shape().axis(op, axis)?;
        if index.rank() != 1 {
            return Err(Error::shape(
                op,
                [self, index],
                format!(
                    "an index of shape {} was given, a vector is needed",
                    index.shape()
                ),
            ));
        }
        gather_axes(op, self, &[(axis, index)])
    }

    /// Several index tensors over the leading axes, as `self[i0, i1, ...]` in NumPy: they broadcast
    /// together, and the dimensions that are not indexed follow.
    #[track_caller]
    pub fn index_get(&self, indices: &[&Tensor]) -> Result<Tensor> {
        let axes: Vec<(usize, &Tensor)> = indices.iter().copied().enumerate().collect();
        gather_axes("index_get", self, &axes)
    }

    /// Index tensors over any axes, at most four. They broadcast together; their dimensions take
    /// the place of the indexed axes where those are neighbours, and come first otherwise (NumPy's
    /// rule).
    #[track_caller]
    pub fn gather_axes(&self, axes: &[(usize, &Tensor)]) -> Result<Tensor> {
        gather_axes("gather_axes", self, axes)
    }

    /// Slices at coordinates: the last dimension of `index` holds the first `k` coordinates, so the
    /// result is `index.shape[..-1] + self.shape[k..]`.
    #[track_caller]
    pub fn gather_nd(&self, index: &Tensor) -> Result<Tensor> {
        let op = "gather_nd";
        let k = check_coordinates(op, index, self.rank())?;
        record1(
            op,
            &[self, index],
            || self.at_coordinates(k, index),
            |_| {
                let (zeros, index) = (Zeros::like(self), index.kept());
                Ok(move |b: &Back<'_>| {
                    let g = b.grad()?;
                    // Without coordinates every result is the whole source.
                    Ok(smallvec![Some(if k == 0 {
                        sum_to(op, g, &zeros.shape)?
                    } else {
                        zeros.make(g)?.scatter_nd_add(&index, g)?
                    })])
                })
            },
        )
    }

    /// [`gather_nd`](Self::gather_nd) at `k` coordinates.
    #[track_caller]
    fn at_coordinates(&self, k: usize, index: &Tensor) -> Result<Tensor> {
        let op = "gather_nd";
        if plain(op, &[self, index])? {
            return gather_nd(op, self, index, |_| None);
        }
        if index.numel() > 0 && self.dims()[k..].iter().all(|n| *n > 0) {
            check_not_empty(op, self)?;
        }
        Call::of(&GATHER_ND, &[self, index])
            .data(&[k as i64, (self.dtype() == DType::Bool).into()])
            .run1(|l| gather_nd(op, &l[0], &l[1], |axis| l.part(nth(axis))))
    }

    /// Rows of this table `[v, d]` for ids of any shape: `ids.shape + [d]`.
    #[track_caller]
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        let op = "embedding";
        if self.rank() != 2 {
            return Err(Error::shape(
                op,
                [self, ids],
                format!(
                    "the table is {}, it needs two dimensions",
                    self.type_string()
                ),
            ));
        }
        gather_axes(op, self, &[(0, ids)])
    }
}
