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
    OpInfo, TRUTH,
    index::{check_coordinates, check_indices, check_not_empty, letters, listed, nth, term},
    op, op_without_gradient,
};
use crate::{
    Error, Result, Shape, Tensor,
    backend::ScatterOp,
    grad::{Back, Pulled, record1},
    spmd::{Call, Local, Rule, plain, rule::Given},
};
use gradient::{Scattered, Spots};
use local::{Leading, add_at, add_slices, along_axis, check_types, leading_axes, put, with_parts};
use smallvec::{SmallVec, smallvec};

/// The ops of this file. `i` is a dimension that is written by index, `j` and `b` are those of the
/// updates. Where the rule depends on axes, it stands here for the last or the leading ones; where
/// it depends on what is done, for a sum (the others: see [`how`]).
pub const OPS: &[OpInfo] = &[
    op(
        "scatter",
        "...i, ...j, ...j -> ...i ; reduce j sum ; linear 0 2",
    ),
    op(
        "put_along_axis",
        "...i, ...j, ...j -> ...i ; reduce j sum ; linear 0 2",
    ),
    op(
        "index_put",
        "i..., b, b... -> i... ; reduce b sum ; linear 0 2",
    ),
    op(
        "index_add",
        "...i, j, ...j -> ...i ; reduce j sum ; linear 0 2",
    ),
    op("scatter_nd", "b1, b... -> i... ; reduce b sum ; linear 1"),
    op(
        "scatter_nd_add",
        "i..., b1, b... -> i... ; reduce b sum ; linear 0 2",
    ),
    op("bincount", BINCOUNT),
    op_without_gradient("one_hot", ONE_HOT, TRUTH),
];

const BINCOUNT: &str = "n, n -> b ; reduce n sum ; linear 1";
const ONE_HOT: &str = "... -> ...c";

/// What may happen to the dimensions `of` that only updates have, and to partial values.
fn how(mode: ScatterOp, of: &str, updates: usize) -> String {
    let of = listed(of);
    match mode {
        ScatterOp::Add => format!("reduce{of} sum ; linear 0 {updates}"),
        ScatterOp::Min => format!("reduce{of} min ; through min 0 {updates}"),
        ScatterOp::Max => format!("reduce{of} max ; through max 0 {updates}"),
        // A destination that ranks multiply with would count once for each of them.
        ScatterOp::Mul => format!("replicate{of} ; through prod 0 {updates}"),
        ScatterOp::Set => format!("replicate{of} ; through any 0 {updates}"),
    }
}

/// The rule of a scatter: of its operands only the destination counts once. Updates that broadcast
/// along a dimension are added for each of its elements.
fn rule(text: &str, given: &[Given<'_>]) -> Result<Rule> {
    Ok(Rule {
        addends: 1,
        ..Rule::new(text, given, &[])?
    })
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
        return Err(Error::Shape { op, detail });
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
            return Err(Error::Shape { op, detail });
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
                    Spots::Along(axis as i64, index.clone()),
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
        let masks = (0..rank).fold(0, |mask, d| {
            mask | i64::from(written(d)) << (2 * d) | i64::from(used(d)) << (2 * d + 1)
        });
        let rule = || {
            let spell = |letter: &dyn Fn(usize) -> Option<char>| {
                (0..rank)
                    .map(|d| letter(d).unwrap_or('1'))
                    .collect::<String>()
            };
            let dst = spell(&|d| {
                if d == axis {
                    Some(nth(rank))
                } else {
                    written(d).then(|| nth(d))
                }
            });
            let (at, from) = (
                spell(&|d| written(d).then(|| nth(d))),
                spell(&|d| (written(d) && used(d)).then(|| nth(d))),
            );
            rule(
                &format!(
                    "{dst}, {at}, {from} -> {dst} ; {}",
                    how(mode, &letters(axis, 1), 2)
                ),
                &[self.into(), index.into(), src.into()],
            )
        };
        let local = |l: &Local<'_>| {
            let src = first(&l[2], &l[1], &|d| {
                if used(d) {
                    0
                } else {
                    l.part(nth(d)).map_or(0, |(part, _)| part.start)
                }
            })?;
            let part = |_| l.part(nth(rank));
            Ok(smallvec![with_parts(
                op,
                &l[0],
                &[(axis, &l[1])],
                part,
                |dst, indices| along_axis(op, dst, axis, indices[0], &src, mode)
            )?])
        };
        Ok(Call {
            op,
            inputs: &[self, index, src],
            attrs: &[axis as i64, mode as i64, masks],
        }
        .run(rule, local)?
        .remove(0))
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
            return Err(Error::Shape {
                op,
                detail: format!(
                    "{} and an index of shape {} differ in rank",
                    self.type_string(),
                    index.shape()
                ),
            });
        }
        let shape = self.shape().with(axis, index.shape()[axis]);
        for (what, tensor) in [("an index", index), ("values", values)] {
            if tensor.shape().broadcast(op, &shape)? != shape {
                return Err(Error::Shape {
                    op,
                    detail: format!(
                        "{what} of shape {} do not expand to {shape}",
                        tensor.shape()
                    ),
                });
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
                    Spots::Put(axis as i64, index.clone()),
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
        let rule = || {
            let all = letters(0, rank);
            let dst: String = (0..rank)
                .map(|d| nth(if d == axis { rank } else { d }))
                .collect();
            let (at, from) = (
                term(index.shape(), shape, &all),
                term(values.shape(), shape, &all),
            );
            rule(
                &format!(
                    "{dst}, {at}, {from} -> {dst} ; {}",
                    how(mode, &letters(axis, 1), 2)
                ),
                &[self.into(), index.into(), values.into()],
            )
        };
        let local = |l: &Local<'_>| {
            Ok(smallvec![put(
                op,
                &l[0],
                axis,
                &l[1],
                &l[2],
                mode,
                l.part(nth(rank))
            )?])
        };
        Ok(Call {
            op,
            inputs: &[self, index, values],
            attrs: &[axis as i64, mode as i64],
        }
        .run(rule, local)?
        .remove(0))
    }

    /// Writes at index tensors over the leading axes, as `self[i0, i1, ...] = values` (or `+=` with
    /// `accumulate`, where an index that occurs twice adds twice). The values expand to the common
    /// shape of the indices and the dimensions that are not indexed.
    #[track_caller]
    pub fn index_put(
        &self,
        indices: &[&Tensor],
        values: &Tensor,
        accumulate: bool,
    ) -> Result<Tensor> {
        let op = "index_put";
        let mode = if accumulate {
            ScatterOp::Add
        } else {
            ScatterOp::Set
        };
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
                let spots = Spots::Leading(indices.iter().map(|t| (*t).clone()).collect());
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
        let (op, Leading { batch, full }) = ("index_put", lead);
        if plain(op, inputs)? {
            return leading_axes(op, self, indices, values, mode, |_| None);
        }
        if full.numel() > 0 {
            check_not_empty(op, self)?;
        }
        let (rank, k) = (self.rank(), indices.len());
        let rule = || {
            let (dst, all) = (letters(0, rank), letters(rank, batch.rank()));
            let at: String = indices
                .iter()
                .map(|index| format!(", {}", term(index.shape(), batch, &all)))
                .collect();
            let from = term(
                values.shape(),
                full,
                &format!("{all}{}", letters(k, rank - k)),
            );
            let given: SmallVec<[Given<'_>; 4]> = inputs.iter().map(|t| (*t).into()).collect();
            rule(
                &format!("{dst}{at}, {from} -> {dst} ; {}", how(mode, &all, k + 1)),
                &given,
            )
        };
        let local = |l: &Local<'_>| {
            let indices: SmallVec<[&Tensor; 4]> = l.inputs[1..=k].iter().collect();
            Ok(smallvec![leading_axes(
                op,
                &l[0],
                &indices,
                &l[k + 1],
                mode,
                |axis| l.part(nth(axis))
            )?])
        };
        Ok(Call {
            op,
            inputs,
            attrs: &[mode as i64],
        }
        .run(rule, local)?
        .remove(0))
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
            return Err(Error::Shape { op, detail });
        }
        check_types(op, self, src, ScatterOp::Add)?;
        record1(
            op,
            &[self, index, src],
            || self.slices_added(axis, index, src),
            |_| {
                let index = index.clone();
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
        let rank = self.rank();
        let rule = || {
            let (dst, at) = (letters(0, rank), letters(rank, 1));
            let from: String = (0..rank)
                .map(|d| nth(if d == axis { rank } else { d }))
                .collect();
            rule(
                &format!(
                    "{dst}, {at}, {from} -> {dst} ; {}",
                    how(ScatterOp::Add, &at, 2)
                ),
                &[self.into(), index.into(), src.into()],
            )
        };
        let local = |l: &Local<'_>| {
            Ok(smallvec![add_slices(
                op,
                &l[0],
                axis,
                &l[1],
                &l[2],
                l.part(nth(axis))
            )?])
        };
        Ok(Call {
            op,
            inputs: &[self, index, src],
            attrs: &[axis as i64],
        }
        .run(rule, local)?
        .remove(0))
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
                let index = index.clone();
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
        let (batch, rest) = (
            letters(shape.rank(), index.rank() - 1),
            letters(k, shape.rank() - k),
        );
        let rule = || {
            let text = format!(
                "{batch}1, {batch}{rest} -> {}{rest} ; reduce{} sum ; linear 1",
                letters(0, k),
                listed(&batch)
            );
            Rule::new(&text, &[index.into(), updates.into()], &[])
        };
        let call = Call {
            op,
            inputs: &[index, updates],
            attrs: &[k as i64],
        };
        Ok(call
            .run(rule, |l| Ok(smallvec![local(&l[0], &l[1])?]))?
            .remove(0))
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
                let index = index.clone();
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
        let rule = || {
            let (dst, batch) = (
                letters(0, self.rank()),
                letters(self.rank(), index.rank() - 1),
            );
            let text = format!(
                "{dst}, {batch}1, {batch}{} -> {dst} ; {}",
                &dst[k..],
                how(ScatterOp::Add, &batch, 2)
            );
            rule(&text, &[self.into(), index.into(), updates.into()])
        };
        let local = |l: &Local<'_>| {
            Ok(smallvec![
                add_at(op, &l[0], &l[1], &l[2], |axis| l.part(nth(axis)))?
            ])
        };
        Ok(Call {
            op,
            inputs: &[self, index, updates],
            attrs: &[k as i64],
        }
        .run(rule, local)?
        .remove(0))
    }
}
