//! Dropout.

use crate::{Build, Module, Param, Pass, Result};
use anymesh_core::{Tensor, ops::Rng};

/// Sets a share of the elements to zero in training and scales the others up.
#[derive(Clone, Debug)]
pub struct Dropout {
    share: f64,
    /// What its random keys are made of.
    path: String,
}

impl Dropout {
    /// Drops this share of the elements. Its place in the model decides which.
    pub fn new(b: &Build, share: f64) -> Self {
        Self {
            share,
            path: b.path().into(),
        }
    }

    /// The input, with elements dropped in training.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        Ok(match self.key(pass) {
            Some((share, rng)) => x.dropout(share, rng)?,
            None => x.clone(),
        })
    }

    /// What it drops in this pass, and by which key; nothing in evaluation.
    pub fn key(&self, pass: &Pass) -> Option<(f64, Rng)> {
        let rng = pass.rng(&self.path)?;
        (self.share > 0.0).then_some((self.share, rng))
    }

    /// The input with elements dropped, and the residual, in one kernel: the same bits as
    /// [`forward`](Self::forward) and an addition.
    #[track_caller]
    pub fn add(&self, x: &Tensor, residual: &Tensor, pass: &Pass) -> Result<Tensor> {
        Ok(match self.key(pass) {
            Some((share, rng)) => x.dropout_add(residual, share, rng)?,
            None => residual.add(x)?,
        })
    }

    /// A residual and what is still to be added to it, for a norm that does both: the input, or
    /// nothing where elements of it are dropped and it is [added](Self::add) with that.
    #[track_caller]
    pub fn branch(
        &self,
        x: Tensor,
        residual: &Tensor,
        pass: &Pass,
    ) -> Result<(Tensor, Option<Tensor>)> {
        Ok(match self.key(pass) {
            Some((share, rng)) => (x.dropout_add(residual, share, rng)?, None),
            None => (residual.clone(), Some(x)),
        })
    }
}

impl Module for Dropout {
    fn visit(&self, _: &str, _: &mut dyn FnMut(&str, &Param)) {}

    fn visit_mut(&mut self, _: &str, _: &mut dyn FnMut(&str, &mut Param)) {}
}
