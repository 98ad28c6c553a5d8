//! The residual stream, and how it lies.

use super::is_cut;
use crate::{Build, Result};
use anymesh_core::Tensor;

/// How the residual stream `[b, s, width]` lies between the branches of a model, and the two
/// reshards of a branch: one on its way in, one on its way out. Between them nothing is left to be
/// decided, so that a layer cut over `tp` sends what it must and no more.
///
/// A sequence that is cut over `cp` stays so: only attention looks along it.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Whether it is also cut over `tp` between branches.
    cut: bool,
}

impl Stream {
    /// As [`Build::sequence_parallel`] says.
    pub fn of(b: &Build) -> Self {
        Self {
            cut: b.is_sequence_parallel(),
        }
    }

    /// What a branch reads, whole along the sequence but for `cp`: gathered once for all of its
    /// products.
    #[track_caller]
    pub fn enter(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.reshard(lies(is_cut(x, 1), false))?)
    }

    /// What a branch gives, a partial sum where its layers are cut: added up once, where the stream
    /// lies.
    #[track_caller]
    pub fn settle(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.reshard(lies(is_cut(y, 1), self.cut))?)
    }
}

/// Over `cp`, and within that over `tp`.
fn lies(cp: bool, tp: bool) -> &'static str {
    match (cp, tp) {
        (false, false) => "[@dp?@ep?, _, _]",
        (false, true) => "[@dp?@ep?, @tp?, _]",
        (true, false) => "[@dp?@ep?, @cp?, _]",
        (true, true) => "[@dp?@ep?, @cp?@tp?, _]",
    }
}
