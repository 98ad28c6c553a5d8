//! Writing elements at given places: scatter and its relatives.
//!
//! Nothing is changed in place: the result is a new tensor. Where several values meet in one place
//! they are applied in row-major order of the indices, so every run gives the same result: the last
//! one wins, or sums add up in that order.
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
//!
//! On a mesh the written dimension may be cut: every rank applies the updates that fall into its
//! part. Sums, minima and maxima may also be cut along the updates, which leaves partial results;
//! the destination of a sum then counts once. Which update is the last one cannot be told from a
//! part of them, so `Set` takes them whole.
//!
//! Gradients: of several values that were set at one place only the last one has one, and the
//! element that it replaced has none. Equal extremes share theirs.

mod count;
mod gradient;
mod local;

use super::{
    OpInfo, RuleForm, TRUTH,
    index::{
        check_coordinates, check_indices, check_not_empty, common_ones, letters, listed, nth, term,
    },
    op,
};
use crate::{
    Error, OperandType, Result, Shape, Tensor,
    backend::ScatterOp,
    grad::{Back, Pulled, record1},
    spmd::{
        Call, Local, Rule,
        built::{Data, is_true},
        plain,
        rule::Operands,
    },
};
use gradient::{Scattered, Spots};
use local::{Leading, add_at, add_slices, along_axis, check_types, leading_axes, put, with_parts};
use smallvec::{SmallVec, smallvec};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    SCATTER,
    PUT_ALONG_AXIS,
    INDEX_PUT,
    INDEX_ADD,
    SCATTER_ND,
    SCATTER_ND_ADD,
    BINCOUNT,
    ONE_HOT,
];

const SCATTER: OpInfo = OpInfo::new("scatter", RuleForm::built("scatter", scatter_rule));
const PUT_ALONG_AXIS: OpInfo = OpInfo::new("put_along_axis", RuleForm::built("put", put_rule));
const INDEX_PUT: OpInfo = OpInfo::new("index_put", RuleForm::built("index_put", index_put_rule));
const INDEX_ADD: OpInfo = OpInfo::new("index_add", RuleForm::built("index_add", index_add_rule));
const SCATTER_ND: OpInfo =
    OpInfo::new("scatter_nd", RuleForm::built("scatter_nd", scatter_nd_rule));
const SCATTER_ND_ADD: OpInfo = OpInfo::new(
    "scatter_nd_add",
    RuleForm::built("scatter_nd_add", scatter_nd_add_rule),
);
const BINCOUNT: OpInfo = op("bincount", "n, n -> b ; reduce n sum ; linear 1").runs(&["max"]);
const ONE_HOT: OpInfo = op("one_hot", "... -> ...c").without_gradient(TRUTH);

/// What is done where values meet; the functions below know it by its place here.
const MODES: [ScatterOp; 5] = [
    ScatterOp::Set,
    ScatterOp::Add,
    ScatterOp::Mul,
    ScatterOp::Min,
    ScatterOp::Max,
];

fn mode_data(mode: ScatterOp) -> i64 {
    MODES.iter().position(|m| *m == mode).unwrap_or(0) as i64
}

/// The clauses of a scatter: what may happen to the dimensions `of` that only updates have, and to
/// partial values. Of the operands only the destination counts once: updates that broadcast along a
/// dimension are added for each of its elements.
fn how(mode: i64, of: &str, updates: usize) -> String {
    let of = listed(of);
    let clauses = match MODES[mode as usize] {
        ScatterOp::Add => format!("reduce{of} sum ; linear 0 {updates}"),
        ScatterOp::Min => format!("reduce{of} min ; through min 0 {updates}"),
        ScatterOp::Max => format!("reduce{of} max ; through max 0 {updates}"),
        // A destination that ranks multiply with would count once for each of them.
        ScatterOp::Mul => format!("replicate{of} ; through prod 0 {updates}"),
        ScatterOp::Set => format!("replicate{of} ; through any 0 {updates}"),
    };
    format!("{clauses} ; addend 0")
}

/// The letters of dimensions `0..rank`, with another one for dimension `axis`.
fn letters_but(rank: usize, axis: usize, letter: char) -> String {
    (0..rank)
        .map(|d| if d == axis { letter } else { nth(d) })
        .collect()
}

/// The call says the axis, the mode, and for each dimension whether all of it is written and
/// whether all of the values are used. Others are whole.
fn scatter_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (axis, rank) = (data[0] as usize, operands.rank(0));
    let (written, used) = (
        |d: usize| is_true(data, 2 + 2 * d),
        |d: usize| is_true(data, 3 + 2 * d),
    );
    let spell = |there: &dyn Fn(usize) -> bool| -> String {
        (0..rank)
            .map(|d| if there(d) { nth(d) } else { '1' })
            .collect()
    };
    let dst: String = (0..rank)
        .map(|d| match written(d) {
            _ if d == axis => nth(rank),
            true => nth(d),
            false => '1',
        })
        .collect();
    let (at, from) = (spell(&written), spell(&|d| written(d) && used(d)));
    let clauses = how(data[1], &letters(axis, 1), 2);
    operands.read(&format!("{dst}, {at}, {from} -> {dst} ; {clauses}"), &[])
}

/// The call says the axis and the mode.
fn put_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (axis, rank) = (data[0] as usize, operands.rank(0));
    let mut ones = operands.ones(0);
    ones[axis] = operands.is_one(1, axis);
    let (all, dst) = (letters(0, rank), letters_but(rank, axis, nth(rank)));
    let (at, from) = (
        term(operands, 1, &ones, &all),
        term(operands, 2, &ones, &all),
    );
    let clauses = how(data[1], &letters(axis, 1), 2);
    operands.read(&format!("{dst}, {at}, {from} -> {dst} ; {clauses}"), &[])
}

/// The call says the mode.
fn index_put_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (rank, k) = (operands.rank(0), operands.count() - 2);
    let mut ones = common_ones(operands, 1..k + 1);
    let (dst, all) = (letters(0, rank), letters(rank, ones.len()));
    let at: String = (1..=k)
        .map(|i| format!(", {}", term(operands, i, &ones, &all)))
        .collect();
    ones.extend((k..rank).map(|d| operands.is_one(0, d)));
    let rest = letters(k, rank - k);
    let from = term(operands, k + 1, &ones, &format!("{all}{rest}"));
    let clauses = how(data[0], &all, k + 1);
    operands.read(&format!("{dst}{at}, {from} -> {dst} ; {clauses}"), &[])
}

/// The call says the axis.
fn index_add_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let rank = operands.rank(0);
    let (dst, at) = (letters(0, rank), letters(rank, 1));
    let from = letters_but(rank, data[0] as usize, nth(rank));
    let clauses = how(mode_data(ScatterOp::Add), &at, 2);
    operands.read(&format!("{dst}, {at}, {from} -> {dst} ; {clauses}"), &[])
}

/// The call says how many coordinates there are and the rank of the result. Dimensions that are not
/// indexed may be cut.
fn scatter_nd_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let (k, rank) = (data[0] as usize, data[1] as usize);
    let (batch, rest) = (letters(rank, operands.rank(0) - 1), letters(k, rank - k));
    let text = format!(
        "{batch}1, {batch}{rest} -> {}{rest} ; reduce{} sum ; linear 1",
        letters(0, k),
        listed(&batch)
    );
    operands.read(&text, &[])
}

/// The call says how many coordinates there are.
fn scatter_nd_add_rule(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let rank = operands.rank(0);
    let (dst, batch) = (letters(0, rank), letters(rank, operands.rank(1) - 1));
    let rest = letters(data[0] as usize, rank - data[0] as usize);
    let clauses = how(mode_data(ScatterOp::Add), &batch, 2);
    operands.read(
        &format!("{dst}, {batch}1, {batch}{rest} -> {dst} ; {clauses}"),
        &[],
    )
}

/// The shape that updates at coordinates must have.
fn check_updates(op: &'static str, dst: &Shape, index: &Tensor, updates: &Tensor) -> Result<usize> {
    let k = check_coordinates(op, index, dst.rank())?;
    let expected: Shape = index.dims()[..index.rank() - 1]
        .iter()
        .chain(&dst.dims()[k..])
        .copied()
        .collect();
    if *updates.shape() != expected {
        let detail = format!(
            "an index of shape {} into {dst} takes updates of shape {expected}, got {}",
            index.shape(),
            updates.shape()
        );
        return Err(Error::shape(
            op,
            [dst.into(), index.into(), OperandType::from(updates)],
            detail,
        ));
    }
    Ok(k)
}

/// The gradients of a sum: the destination has that of the result, the updates read theirs from it.
fn added(b: &Back<'_>, read: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Pulled> {
    let g = b.grad()?;
    Ok(smallvec![
        b.needs(0).then(|| g.clone()),
        None,
        b.wanted(2, || read(g))?
    ])
}

impl Tensor {
    /// Writes along one axis, in PyTorch's sense: `out[index[i][j]][j] = src[i][j]` for axis 0, for
    /// every position of `index`. `index` has the tensor's rank, is not larger than `src` anywhere,
    /// and not larger than the tensor but for `axis`.
    #[track_caller]
    pub fn scatter(
        &self,
        axis: i64,
        index: &Tensor,
        src: &Tensor,
        mode: ScatterOp,
    ) -> Result<Tensor> {
        let op = "scatter";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        let rank = self.rank();
        let fits = index.rank() == rank
            && src.rank() == rank
            && (0..rank).all(|d| {
                index.shape()[d] <= src.shape()[d]
                    && (d == axis || index.shape()[d] <= self.shape()[d])
            });
        if !fits {
            let detail = format!(
                "an index of shape {} with values of shape {} does not fit {} but for axis {axis}",
                index.shape(),
                src.shape(),
                self.type_string()
            );
            return Err(Error::shape(op, [self, index, src], detail));
        }
        check_types(op, self, src, mode)?;
        record1(
            op,
            &[self, index, src],
            || self.scattered(axis, index, src, mode),
            |out| {
                let kept = Scattered::new(
                    op,
                    mode,
                    Spots::Along(axis as i64, index.kept()),
                    self,
                    src,
                    index.shape().clone(),
                    out,
                );
                Ok(move |b: &Back<'_>| kept.pull(b, 3))
            },
        )
    }

    /// [`scatter`](Self::scatter) of operands that fit.
    #[track_caller]
    fn scattered(
        &self,
        axis: usize,
        index: &Tensor,
        src: &Tensor,
        mode: ScatterOp,
    ) -> Result<Tensor> {
        let (op, rank) = ("scatter", self.rank());
        // The first values, from `start` on, as many as the index has.
        let first = |src: &Tensor, index: &Tensor, start: &dyn Fn(usize) -> usize| {
            (0..rank).try_fold(src.clone(), |src, d| {
                if src.dims()[d] == index.dims()[d] {
                    Ok(src)
                } else {
                    src.narrow(d as i64, start(d), index.dims()[d])
                }
            })
        };
        if plain(op, &[self, index, src])? {
            return along_axis(op, self, axis, index, &first(src, index, &|_| 0)?, mode);
        }
        if index.numel() > 0 {
            check_not_empty(op, self)?;
        }
        // A dimension of the destination of which only the beginning is written is whole, and so is
        // one of which only the first values are used.
        let (written, used) = (
            |d: usize| d == axis || self.dims()[d] == index.dims()[d],
            |d: usize| src.dims()[d] == index.dims()[d],
        );
        let data: Data = [axis as i64, mode_data(mode)]
            .into_iter()
            .chain((0..rank).flat_map(|d| [written(d).into(), used(d).into()]))
            .collect();
        let local = |l: &Local<'_>| {
            let src = first(&l[2], &l[1], &|d| {
                if used(d) {
                    0
                } else {
                    l.part(nth(d)).map_or(0, |(part, _)| part.start)
                }
            })?;
            let part = |_| l.part(nth(rank));
            with_parts(op, &l[0], &[(axis, &l[1])], part, |dst, indices| {
                along_axis(op, dst, axis, indices[0], &src, mode)
            })
        };
        Call::of(&SCATTER, &[self, index, src])
            .data(&data)
            .run1(local)
    }

    /// Writes along one axis, in NumPy's sense: the index broadcasts to the tensor but for `axis`,
    /// and the values broadcast to the index.
    #[track_caller]
    pub fn put_along_axis(
        &self,
        axis: i64,
        index: &Tensor,
        values: &Tensor,
        mode: ScatterOp,
    ) -> Result<Tensor> {
        let op = "put_along_axis";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        if index.rank() != self.rank() {
            return Err(Error::shape(
                op,
                [self, index, values],
                format!(
                    "{} and an index of shape {} differ in rank",
                    self.type_string(),
                    index.shape()
                ),
            ));
        }
        let shape = self.shape().with(axis, index.shape()[axis]);
        for (what, tensor) in [("an index", index), ("values", values)] {
            if tensor.shape().broadcast(op, &shape)? != shape {
                return Err(Error::shape(
                    op,
                    [self, index, values],
                    format!(
                        "{what} of shape {} do not expand to {shape}",
                        tensor.shape()
                    ),
                ));
            }
        }
        check_types(op, self, values, mode)?;
        record1(
            op,
            &[self, index, values],
            || self.put_along(axis, index, values, mode, &shape),
            |out| {
                let kept = Scattered::new(
                    op,
                    mode,
                    Spots::Put(axis as i64, index.kept()),
                    self,
                    values,
                    shape.clone(),
                    out,
                );
                Ok(move |b: &Back<'_>| kept.pull(b, 3))
            },
        )
    }

    /// [`put_along_axis`](Self::put_along_axis) of operands that fit, and expand to `shape`.
    #[track_caller]
    fn put_along(
        &self,
        axis: usize,
        index: &Tensor,
        values: &Tensor,
        mode: ScatterOp,
        shape: &Shape,
    ) -> Result<Tensor> {
        let op = "put_along_axis";
        if plain(op, &[self, index, values])? {
            return put(op, self, axis, index, values, mode, None);
        }
        if shape.numel() > 0 {
            check_not_empty(op, self)?;
        }
        let rank = self.rank();
        Call::of(&PUT_ALONG_AXIS, &[self, index, values])
            .data(&[axis as i64, mode_data(mode)])
            .run1(|l| put(op, &l[0], axis, &l[1], &l[2], mode, l.part(nth(rank))))
    }

    /// Writes at index tensors over the leading axes, as `self[i0, i1, ...] = values`, or `+=` with
    /// [`ScatterOp::Add`], where an index that occurs twice adds twice. The values expand to the
    /// common shape of the indices and the dimensions that are not indexed.
    #[track_caller]
    pub fn index_put(
        &self,
        indices: &[&Tensor],
        values: &Tensor,
        mode: ScatterOp,
    ) -> Result<Tensor> {
        let op = "index_put";
        let lead = Leading::new(op, self, indices, values)?;
        check_types(op, self, values, mode)?;
        let inputs: SmallVec<[&Tensor; 4]> = std::iter::once(self)
            .chain(indices.iter().copied())
            .chain([values])
            .collect();
        record1(
            op,
            &inputs,
            || self.put_leading(indices, values, mode, &inputs, &lead),
            |out| {
                let spots = Spots::Leading(indices.iter().map(|t| t.kept()).collect());
                let (kept, operands) = (
                    Scattered::new(op, mode, spots, self, values, lead.full.clone(), out),
                    inputs.len(),
                );
                Ok(move |b: &Back<'_>| kept.pull(b, operands))
            },
        )
    }

    /// [`index_put`](Self::index_put) of operands that fit.
    #[track_caller]
    fn put_leading(
        &self,
        indices: &[&Tensor],
        values: &Tensor,
        mode: ScatterOp,
        inputs: &[&Tensor],
        lead: &Leading,
    ) -> Result<Tensor> {
        let (op, full) = ("index_put", &lead.full);
        if plain(op, inputs)? {
            return leading_axes(op, self, indices, values, mode, |_| None);
        }
        if full.numel() > 0 {
            check_not_empty(op, self)?;
        }
        let k = indices.len();
        let local = |l: &Local<'_>| {
            let indices: SmallVec<[&Tensor; 4]> = l.inputs[1..=k].iter().collect();
            leading_axes(op, &l[0], &indices, &l[k + 1], mode, |axis| {
                l.part(nth(axis))
            })
        };
        Call::of(&INDEX_PUT, inputs)
            .data(&[mode_data(mode)])
            .run1(local)
    }

    /// Adds slice `j` of `src` to slice `index[j]` of this tensor along `axis`.
    #[track_caller]
    pub fn index_add(&self, axis: i64, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let op = "index_add";
        let axis = self.shape().axis(op, axis)?;
        check_indices(op, &[index])?;
        if index.rank() != 1 || *src.shape() != self.shape().with(axis, index.numel()) {
            let detail = format!(
                "{} cannot take values of shape {} at an index of shape {} along axis {axis}",
                self.type_string(),
                src.shape(),
                index.shape()
            );
            return Err(Error::shape(op, [self, index, src], detail));
        }
        check_types(op, self, src, ScatterOp::Add)?;
        record1(
            op,
            &[self, index, src],
            || self.slices_added(axis, index, src),
            |_| {
                let index = index.kept();
                Ok(move |b: &Back<'_>| added(b, |g| g.index_select(axis as i64, &index)))
            },
        )
    }

    /// [`index_add`](Self::index_add) of operands that fit.
    #[track_caller]
    fn slices_added(&self, axis: usize, index: &Tensor, src: &Tensor) -> Result<Tensor> {
        let op = "index_add";
        if plain(op, &[self, index, src])? {
            return add_slices(op, self, axis, index, src, None);
        }
        if src.numel() > 0 {
            check_not_empty(op, self)?;
        }
        Call::of(&INDEX_ADD, &[self, index, src])
            .data(&[axis as i64])
            .run1(|l| add_slices(op, &l[0], axis, &l[1], &l[2], l.part(nth(axis))))
    }

    /// A tensor of `shape` that is zero but where `index` points: the last dimension of `index`
    /// holds coordinates, and `updates` (`index.shape[..-1] + shape[k..]`) add up there.
    #[track_caller]
    pub fn scatter_nd(index: &Tensor, updates: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
        let (op, shape) = ("scatter_nd", shape.into());
        let k = check_updates(op, &shape, index, updates)?;
        record1(
            op,
            &[index, updates],
            || Tensor::scattered_nd(index, updates, &shape, k),
            |_| {
                let index = index.kept();
                Ok(move |b: &Back<'_>| Ok(smallvec![None, Some(b.grad()?.gather_nd(&index)?)]))
            },
        )
    }

    /// [`scatter_nd`](Self::scatter_nd) at `k` coordinates.
    #[track_caller]
    fn scattered_nd(index: &Tensor, updates: &Tensor, shape: &Shape, k: usize) -> Result<Tensor> {
        let op = "scatter_nd";
        // Dimensions that are not indexed may be cut.
        let local = |index: &Tensor, updates: &Tensor| {
            let dims: Shape = shape.dims()[..k]
                .iter()
                .chain(&updates.dims()[index.rank() - 1..])
                .copied()
                .collect();
            add_at(
                op,
                &Tensor::zeros(dims, updates.dtype(), updates.device())?,
                index,
                updates,
                |_| None,
            )
        };
        if plain(op, &[index, updates])? {
            return local(index, updates);
        }
        Call::of(&SCATTER_ND, &[index, updates])
            .data(&[k as i64, shape.rank() as i64])
            .run1(|l| local(&l[0], &l[1]))
    }

    /// Adds `updates` (`index.shape[..-1] + self.shape[k..]`) at coordinates, which are the last
    /// dimension (of size `k`) of `index`.
    #[track_caller]
    pub fn scatter_nd_add(&self, index: &Tensor, updates: &Tensor) -> Result<Tensor> {
        let op = "scatter_nd_add";
        let k = check_updates(op, self.shape(), index, updates)?;
        check_types(op, self, updates, ScatterOp::Add)?;
        record1(
            op,
            &[self, index, updates],
            || self.added_at(index, updates, k),
            |_| {
                let index = index.kept();
                Ok(move |b: &Back<'_>| added(b, |g| g.gather_nd(&index)))
            },
        )
    }

    /// [`scatter_nd_add`](Self::scatter_nd_add) at `k` coordinates.
    #[track_caller]
    fn added_at(&self, index: &Tensor, updates: &Tensor, k: usize) -> Result<Tensor> {
        let op = "scatter_nd_add";
        if plain(op, &[self, index, updates])? {
            return add_at(op, self, index, updates, |_| None);
        }
        if updates.numel() > 0 {
            check_not_empty(op, self)?;
        }
        Call::of(&SCATTER_ND_ADD, &[self, index, updates])
            .data(&[k as i64])
            .run1(|l| add_at(op, &l[0], &l[1], &l[2], |axis| l.part(nth(axis))))
    }
}
