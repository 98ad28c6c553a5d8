//! The residual stream, and how it lies.

use crate::{Build, Result};
use anymesh_core::Tensor;

/// Whole along the sequence, as products take it.
const WHOLE: &str = "[@dp?@ep?, _, _]";

/// How the residual stream `[b, s, width]` lies between the branches of a model, and the two
/// reshards of a branch: one on its way in, one on its way out. Between them nothing is left to be
/// decided, so that a layer cut over `tp` sends what it must and no more.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    between: &'static str,
}

impl Stream {
    /// As [`Build::sequence_parallel`] says.
    pub fn of(b: &Build) -> Self {
        Self {
            between: b.stream(),
        }
    }

    /// What a branch reads, whole along the sequence: gathered once for all of its products.
    #[track_caller]
    pub fn enter(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.reshard(WHOLE)?)
    }

    /// What a branch gives, a partial sum where its layers are cut: added up once, where the stream
    /// lies.
    #[track_caller]
    pub fn settle(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.reshard(self.between)?)
    }
}
