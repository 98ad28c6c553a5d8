//! Vectors of tokens.

use crate::{Build, Init, Module, Param, Result};
use anymesh_core::Tensor;

/// A row for each token.
#[derive(Clone, Debug, Module)]
pub struct Embedding {
    /// `[tokens, width]`.
    pub weight: Param,
}

impl Embedding {
    /// For ids below `sizes[0]`, with rows of `sizes[1]` values. `[@tp?, _]` cuts the vocabulary:
    /// each rank looks up the ids it has, and the rows are a partial sum.
    pub fn new(b: &Build, sizes: [usize; 2], sharding: &str, init: Init) -> Result<Self> {
        Ok(Self {
            weight: b.param("weight", sizes, sharding, init)?,
        })
    }

    /// The rows of these ids, in the dtype of computations.
    #[track_caller]
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        Ok(self.weight.get()?.embedding(ids)?)
    }

    /// How well each token's row fits: the head of a model that ties the two.
    #[track_caller]
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.linear(&self.weight.get()?, None)?)
    }
}
