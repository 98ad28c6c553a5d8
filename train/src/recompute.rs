//! Layers that forget what is inside of them.

use crate::{Error, Result};
use anymesh_core::{Tensor, grad::checkpoint};

/// Runs a layer that gives several tensors: nothing inside of it is kept, and it runs again in the
/// backward pass. Parameters are handles: the second run uses the same ones, and those that are
/// frozen stay so.
#[track_caller]
pub(crate) fn recompute(
    x: &Tensor,
    layer: impl Fn(&Tensor) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    again(&[x], move |x| layer(&x[0]))
}

/// A function of several tensors that runs again in the backward pass.
#[track_caller]
pub(crate) fn recompute_each(
    x: &[&Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    Ok(again(x, move |x| Ok(vec![f(x)?]))?.remove(0))
}

#[track_caller]
fn again(
    x: &[&Tensor],
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let run = move |x: &[Tensor]| match f(x) {
        Ok(y) => Ok(y),
        Err(Error::Tensor(error)) => Err(error),
        Err(other) => Err(anymesh_core::Error::argument(
            "recompute",
            "layer",
            other.to_string(),
        )),
    };
    Ok(checkpoint(run, x)?)
}
