//! Sorting and what is built on it.
//!
//! The order is the same everywhere: NaN is larger than any number, -0 equals 0, and equal values
//! keep their order (also when sorting downwards). Positions are `i32`; values are picked by them,
//! so both always agree.
//!
//! ```
//! # use anymesh_core::{Tensor, ops::Order};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[3f32, f32::NAN, 1., 3.], [4], &device)?;
//! let (values, indices) = x.sort(0, Order::Ascending)?;
//! assert_eq!(values.to_vec::<f32>()?[..3], [1., 3., 3.]);
//! assert_eq!(indices.to_vec::<i32>()?, [2, 0, 3, 1]);
//! assert_eq!(x.topk(2, 0, Order::Ascending)?.1.to_vec::<i32>()?, [2, 0]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```
//!
//! On a mesh a dimension that is sorted must be whole. The first `k` values of one that is cut are
//! found among the first `k` of each part: only those candidates cross. The place of a query is the
//! sum of its places in the parts.
//!
//! A value hands its gradient to the element that it is; positions have none.

use super::{OpInfo, POSITIONS, RuleForm, index::picked, op, reduce::check_positions, same_device};
use crate::{
    DType, Error, Result, Tensor,
    backend::{SearchCall, SortCall},
    launch::{launch, launch_as},
    observe, split,
    spmd::{Call, Local, Rule, join_parts, parts_of, plain, rule::Operands},
};
use smallvec::smallvec;

/// The ops of this file. `s` is the sorted dimension.
pub const OPS: &[OpInfo] = &[
    SORT,
    ARGSORT,
    FIRST.runs(&["best"]),
    FIRST.named("kthvalue").runs(&["best", "narrow", "squeeze"]),
    SEARCH,
];

/// The steps of this file: the best of the candidates that all parts named.
pub(super) const STEPS: &[OpInfo] = &[BEST];

const SORT: OpInfo = op("sort", "...s -> ...s, ...s ; replicate s");
const ARGSORT: OpInfo = op("argsort", "...s -> ...s ; replicate s").without_gradient(POSITIONS);
const FIRST: OpInfo = OpInfo::new("topk", RuleForm::built("candidates", candidates));
const BEST: OpInfo = op("best", "...s, ...s -> ...k, ...k ; replicate s");
/// The sorted dimension is that of a vector, or the last one.
const SEARCH: OpInfo = OpInfo::new(
    "searchsorted",
    RuleForm::Variants(&[
        "s, ... -> ... ; reduce s sum",
        "...s, ...q -> ...q ; reduce s sum",
    ]),
)
.without_gradient(POSITIONS);

/// The rule for the first values along a dimension that may be cut: the dimension and how many
/// statistics the candidates of the parts are.
fn candidates(operands: &Operands<'_>, data: &[i64]) -> Result<Rule> {
    let axis = [data[0] as usize];
    operands.read(
        &format!("...s -> ...k, ...k ; stats s {}", data[1]),
        &[('s', &axis), ('k', &axis)],
    )
}

/// The first `k` values in order and their positions, on one device.
fn first(
    op: &'static str,
    x: &Tensor,
    k: usize,
    axis: usize,
    descending: bool,
) -> Result<(Tensor, Tensor)> {
    let indices = x
        .argsorted(op, axis, descending)?
        .narrow(axis as i64, 0, k)?;
    Ok((x.gather(axis as i64, &indices)?, indices))
}

/// The first `k` values in order and their positions. Where the axis is cut, every part names its
/// first `k`.
#[track_caller]
fn first_of_all(
    op: &'static str,
    x: &Tensor,
    k: usize,
    axis: usize,
    descending: bool,
) -> Result<(Tensor, Tensor)> {
    check_positions(op, x.dims()[axis])?;
    if x.is_plain() {
        return first(op, x, k, axis, descending);
    }
    // Each rank receives `k` values and positions from every other.
    let parts = match parts_of(x, axis) {
        1 => x.mesh().ranks(),
        parts => parts,
    };
    let (size, value) = (x.dtype().size() + 4, x.dtype().size().max(4));
    let statistics =
        (k.saturating_mul(parts).saturating_mul(size) / (2 * value)).clamp(1, u32::MAX as usize);
    let mut out = Call::of(&FIRST, &[x])
        .on_behalf_of(op)
        .data(&[axis as i64, statistics as i64])
        .run_or(
            |l| {
                let (values, indices) = first(op, &l[0], k, axis, descending)?;
                Ok(smallvec![values, indices])
            },
            |inputs| {
                let (values, indices) = among_candidates(op, &inputs[0], k, axis, descending)?;
                Ok(smallvec![values, indices])
            },
        )?;
    let indices = out.remove(1);
    Ok((out.remove(0), indices))
}

/// The first `k` values of an axis that is cut: each part's first `k` are gathered, in the order of
/// the parts, so that of equal values the first one still comes first.
#[track_caller]
fn among_candidates(
    op: &'static str,
    x: &Tensor,
    k: usize,
    axis: usize,
    descending: bool,
) -> Result<(Tensor, Tensor)> {
    let (mesh, n, parts) = (x.mesh(), x.dims()[axis], parts_of(x, axis));
    let each = k.min(n.div_ceil(parts));
    let (mut values, mut positions) = (vec![], vec![]);
    for (i, rank) in mesh.held() {
        let part = x.held(i);
        let (value, position) = first(op, &part, each.min(part.dims()[axis]), axis, descending)?;
        let start = x.sharding().range(mesh, rank, axis, n).start;
        // Smaller parts give fewer: what fills them up is dropped below.
        let filled = |t: &Tensor| match each - t.dims()[axis] {
            0 => Ok(t.clone()),
            missing => Tensor::concat(
                &[
                    t,
                    &Tensor::zeros(t.shape().with(axis, missing), t.dtype(), t.device())?,
                ],
                axis as i64,
            ),
        };
        values.push(filled(&value)?);
        positions.push(filled(&position.add(start as i64)?)?);
    }
    let (values, positions) = (
        join_parts(x, axis, each, values)?,
        join_parts(x, axis, each, positions)?,
    );
    let local = |l: &Local<'_>| {
        let candidates = |t: &Tensor| {
            if each <= n / parts {
                return Ok(t.clone());
            }
            let real: Vec<Tensor> = (0..parts)
                .map(|p| t.narrow(axis as i64, p * each, each.min(split(n, p, parts).len())))
                .collect::<Result<_>>()?;
            Tensor::concat(&real.iter().collect::<Vec<_>>(), axis as i64)
        };
        let (values, at) = first(op, &candidates(&l[0])?, k, axis, descending)?;
        Ok(smallvec![
            values,
            candidates(&l[1])?.gather(axis as i64, &at)?
        ])
    };
    let mut out = Call::of(&BEST, &[&values, &positions])
        .on_behalf_of(op)
        .bind('s', &[axis])
        .bind('k', &[axis])
        .run(local)?;
    let positions = out.remove(1);
    Ok((out.remove(0), positions))
}

/// Which values come first. NaN counts as the largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The smallest.
    Ascending,
    /// The largest.
    Descending,
}

/// On which side of equal values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Before them.
    Left,
    /// After them.
    Right,
}

impl Tensor {
    /// The positions (i32) that sort dimension `axis`. Stable; NaN is the largest.
    #[track_caller]
    pub fn argsort(&self, axis: i64, order: Order) -> Result<Tensor> {
        let (op, descending) = ("argsort", order == Order::Descending);
        let (x, axis) = (&self.detach(), self.shape().axis(op, axis)?);
        observe::op(op, &[x], || {
            if x.is_plain() {
                return x.argsorted(op, axis, descending);
            }
            Call::of(&ARGSORT, &[x])
                .bind('s', &[axis])
                .run1(|l| l[0].argsorted(op, axis, descending))
        })
    }

    /// [`argsort`](Self::argsort) on one device.
    fn argsorted(&self, op: &'static str, axis: usize, descending: bool) -> Result<Tensor> {
        check_positions(op, self.shape()[axis])?;
        let axis = axis as i64;
        let rows = self.movedim(&[axis], &[-1])?;
        let order = if self.numel() == 0 {
            self.no_elements(DType::I32, rows.shape().clone())?
        } else {
            let call = SortCall {
                op,
                input: rows.view()?,
                descending,
            };
            launch(self.mesh(), call)?.remove(0)
        };
        order.movedim(&[-1], &[axis])
    }

    /// The values in order along `axis`, and where each came from (i32). Stable; NaN is the
    /// largest.
    #[track_caller]
    pub fn sort(&self, axis: i64, order: Order) -> Result<(Tensor, Tensor)> {
        let (op, descending) = ("sort", order == Order::Descending);
        let axis = self.shape().axis(op, axis)?;
        picked(op, self, axis, true, || {
            if self.is_plain() {
                return first(op, self, self.dims()[axis], axis, descending);
            }
            let mut out = Call::of(&SORT, &[self]).bind('s', &[axis]).run(|l| {
                let (values, indices) = first(op, &l[0], l[0].dims()[axis], axis, descending)?;
                Ok(smallvec![values, indices])
            })?;
            let indices = out.remove(1);
            Ok((out.remove(0), indices))
        })
    }

    /// The first `k` values along `axis` in an order ([`Order::Descending`]: the largest), and their
    /// positions (i32). Among equal values the first are taken; NaN is the largest.
    #[track_caller]
    pub fn topk(&self, k: usize, axis: i64, order: Order) -> Result<(Tensor, Tensor)> {
        let (op, largest) = ("topk", order == Order::Descending);
        let at = self.shape().axis(op, axis)?;
        let n = self.dims()[at];
        if k > n {
            return Err(Error::argument(
                op,
                "k",
                format!(
                    "{k} values were asked for along axis {axis} of {}, which has {n}",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        picked(op, self, at, true, || {
            first_of_all(op, self, k, at, largest)
        })
    }

    /// The `k`-th smallest value along `axis` (the first is `k == 1`) and its position (i32),
    /// without that dimension or with it kept at size 1.
    #[track_caller]
    pub fn kthvalue(&self, k: usize, axis: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let op = "kthvalue";
        let at = self.shape().axis(op, axis)?;
        let n = self.dims()[at];
        if k == 0 || k > n {
            return Err(Error::argument(
                op,
                "k",
                format!(
                    "value {k} was asked for along axis {axis} of {}: give 1 to {n}",
                    self.type_string()
                ),
            )
            .of([self]));
        }
        picked(op, self, at, keepdim, || {
            let (values, indices) = first_of_all(op, self, k, at, false)?;
            let last = |t: Tensor| {
                let t = t.narrow(axis, k - 1, 1)?;
                if keepdim { Ok(t) } else { t.squeeze(&[axis]) }
            };
            Ok((last(values)?, last(indices)?))
        })
    }

    /// Where each query would go in the ascending last dimension of this tensor (i32), on one side of
    /// equal values. NaN goes after all numbers. A vector serves queries of any shape; otherwise
    /// both have the same leading dimensions.
    #[track_caller]
    pub fn searchsorted(&self, queries: &Tensor, side: Side) -> Result<Tensor> {
        let op = "searchsorted";
        let fits = match (self.dims(), queries.dims()) {
            ([], _) => false,
            ([_], _) => true,
            ([lead @ .., _], [query_lead @ .., _]) => lead == query_lead,
            (_, []) => false,
        };
        if !fits {
            let detail = format!(
                "queries of shape {} need {} to be a vector or to have the same leading dimensions",
                queries.shape(),
                self.type_string()
            );
            return Err(Error::shape(op, [self, queries], detail));
        }
        check_positions(op, self.shape()[self.rank() - 1])?;
        observe::op(op, &[self, queries], || {
            self.detach()
                .places_of(&queries.detach(), side == Side::Right)
        })
    }

    /// [`searchsorted`](Self::searchsorted) of operands that fit.
    #[track_caller]
    fn places_of(&self, queries: &Tensor, right: bool) -> Result<Tensor> {
        let (op, n) = ("searchsorted", self.shape()[self.rank() - 1]);
        if !plain(op, &[self, queries])? {
            return Call::of(&SEARCH, &[self, queries])
                .variant(usize::from(self.rank() > 1))
                .run1(|l| l[0].places_of(&l[1], right));
        }
        same_device(op, &[self, queries])?;
        if queries.numel() == 0 {
            return queries.no_elements(DType::I32, queries.shape().clone());
        }
        if n == 0 {
            return Tensor::zeros(queries.shape(), DType::I32, self.device());
        }
        let dtype = self.dtype().promote(queries.dtype());
        let rows = self.numel() / n;
        let sorted = self.cast(dtype)?.reshape([rows, n])?;
        let asked = queries
            .cast(dtype)?
            .reshape([rows, queries.numel() / rows])?;
        let call = SearchCall {
            op,
            sorted: sorted.view()?,
            queries: asked.view()?,
            right,
        };
        launch_as(queries.mesh(), queries.shape(), call)
    }
}
