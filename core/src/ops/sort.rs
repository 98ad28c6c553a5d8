//! Sorting and what is built on it.
//!
//! The order is the same everywhere: NaN is larger than any number, -0 equals 0, and equal values keep their order (also when sorting
//! downwards). Positions are `i32`; values are picked by them, so both always agree.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[3f32, f32::NAN, 1., 3.], [4], &device)?;
//! let (values, indices) = x.sort(0, false)?;
//! assert_eq!(values.to_vec::<f32>()?[..3], [1., 3., 3.]);
//! assert_eq!(indices.to_vec::<i32>()?, [2, 0, 3, 1]);
//! assert_eq!(x.topk(2, 0, false)?.1.to_vec::<i32>()?, [2, 0]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{OpInfo, op, same_device};
use crate::{
    DType, Error, Result, Shape, Tensor,
    backend::{SearchCall, SortCall},
};

/// The ops of this file. `s` is the sorted dimension.
pub const OPS: &[OpInfo] = &[
    op("sort", "...s -> ...s, ...s ; replicate s"),
    op("argsort", "...s -> ...s ; replicate s"),
    op("topk", "...s -> ...k, ...k ; replicate s"),
    op("kthvalue", "...s -> ..., ... ; replicate s"),
    op("searchsorted", "...s, ...q -> ...q ; replicate s"),
];

/// Positions are i32: a longer dimension cannot be numbered.
pub(super) fn check_positions(op: &'static str, shape: &Shape, n: usize) -> Result<()> {
    if n > i32::MAX as usize { Err(Error::SizeOverflow { op, shape: shape.clone() }) } else { Ok(()) }
}

impl Tensor {
    /// The positions (i32) that sort dimension `axis`: ascending, or descending; stable, NaN is the largest.
    pub fn argsort(&self, axis: i64, descending: bool) -> Result<Tensor> {
        self.argsorted("argsort", axis, descending)
    }

    fn argsorted(&self, op: &'static str, axis: i64, descending: bool) -> Result<Tensor> {
        let axis = self.shape().axis(op, axis)? as i64;
        let rows = self.movedim(&[axis], &[-1])?;
        check_positions(op, self.shape(), self.shape()[axis as usize])?;
        self.device().check(DType::I32, self.numel())?;
        let buffer = if self.numel() == 0 { None } else { Some(self.device().backend().sort(&SortCall { input: &rows.view()?, descending })?) };
        self.result(buffer, DType::I32, rows.shape().clone()).movedim(&[-1], &[axis])
    }

    /// The values in order along `axis`, and where each came from (i32). Stable; NaN is the largest.
    pub fn sort(&self, axis: i64, descending: bool) -> Result<(Tensor, Tensor)> {
        let indices = self.argsorted("sort", axis, descending)?;
        Ok((self.gather(axis, &indices)?, indices))
    }

    /// The `k` largest (or smallest) values along `axis` in order, and their positions (i32). Among equal values the first are taken; NaN is the largest.
    pub fn topk(&self, k: usize, axis: i64, largest: bool) -> Result<(Tensor, Tensor)> {
        let op = "topk";
        let n = self.shape()[self.shape().axis(op, axis)?];
        if k > n {
            return Err(Error::Argument { op, detail: format!("{k} values were asked for along axis {axis} of {}, which has {n}", self.type_string()) });
        }
        let indices = self.argsorted(op, axis, largest)?.narrow(axis, 0, k)?;
        Ok((self.gather(axis, &indices)?, indices))
    }

    /// The `k`-th smallest value along `axis` (the first is `k == 1`) and its position (i32), without that dimension or with it kept at size 1.
    pub fn kthvalue(&self, k: usize, axis: i64, keepdim: bool) -> Result<(Tensor, Tensor)> {
        let op = "kthvalue";
        let n = self.shape()[self.shape().axis(op, axis)?];
        if k == 0 || k > n {
            return Err(Error::Argument { op, detail: format!("value {k} was asked for along axis {axis} of {}: give 1 to {n}", self.type_string()) });
        }
        let indices = self.argsorted(op, axis, false)?.narrow(axis, k - 1, 1)?;
        let values = self.gather(axis, &indices)?;
        if keepdim { Ok((values, indices)) } else { Ok((values.squeeze(&[axis])?, indices.squeeze(&[axis])?)) }
    }

    /// Where each query would go in the ascending last dimension of this tensor (i32): before equal values, or after them with `right`. NaN goes
    /// after all numbers. A vector serves queries of any shape; otherwise both have the same leading dimensions.
    pub fn searchsorted(&self, queries: &Tensor, right: bool) -> Result<Tensor> {
        let op = "searchsorted";
        same_device(op, &[self, queries])?;
        let fits = match (self.dims(), queries.dims()) {
            ([], _) => false,
            ([_], _) => true,
            ([lead @ .., _], [query_lead @ .., _]) => lead == query_lead,
            (_, []) => false,
        };
        if !fits {
            let detail = format!("queries of shape {} need {} to be a vector or to have the same leading dimensions", queries.shape(), self.type_string());
            return Err(Error::Shape { op, detail });
        }
        let n = self.shape()[self.rank() - 1];
        check_positions(op, self.shape(), n)?;
        self.device().check(DType::I32, queries.numel())?;
        if queries.numel() == 0 {
            return Ok(queries.result(None, DType::I32, queries.shape().clone()));
        }
        if n == 0 {
            return Tensor::zeros(queries.shape(), DType::I32, self.device());
        }
        let dtype = self.dtype().promote(queries.dtype());
        let rows = self.numel() / n;
        let sorted = self.cast(dtype)?.reshape([rows, n])?;
        let asked = queries.cast(dtype)?.reshape([rows, queries.numel() / rows])?;
        let buffer = self.device().backend().search(&SearchCall { sorted: &sorted.view()?, queries: &asked.view()?, right })?;
        Ok(queries.result(Some(buffer), DType::I32, queries.shape().clone()))
    }
}
