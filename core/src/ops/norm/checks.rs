//! What norms refuse.

use super::NormOptions;
use crate::{
    Error, Result, Shape, Tensor,
    ops::{
        expr::{check_eps, check_float},
        same_device,
    },
};

/// Checks a norm over the last `dims` dimensions, and counts their elements.
pub(super) fn check_trailing(
    op: &'static str,
    x: &Tensor,
    dims: usize,
    eps: f64,
    parameters: &[Option<&Tensor>],
) -> Result<usize> {
    if dims == 0 || dims > x.rank() {
        return Err(Error::argument(op, "dims", format!(
                "cannot normalise over {dims} dimensions of {}: between 1 and its rank are possible",
                x.shape()
            )).of([x]));
    }
    check_float(op, &[x])?;
    let shape = Shape::from(&x.dims()[x.rank() - dims..]);
    check_parameters(op, x, &shape, parameters)?;
    let channels = shape.checked_numel(op)?;
    if channels == 0 {
        return Err(empty(op, x));
    }
    check_eps(op, eps)?;
    Ok(channels)
}

/// Refuses a bias where nothing is centred.
pub(super) fn no_bias(op: &'static str, options: &NormOptions<'_>) -> Result<()> {
    match options.bias {
        Some(_) => Err(Error::argument(
            op,
            "bias",
            "takes no bias: it centres nothing; add one to the result",
        )),
        None => Ok(()),
    }
}

pub(super) fn empty(op: &'static str, x: &Tensor) -> Error {
    Error::shape(
        op,
        [x],
        format!("{} has no elements to take a mean of", x.shape()),
    )
}

pub(super) fn check_parameters(
    op: &'static str,
    x: &Tensor,
    shape: &Shape,
    parameters: &[Option<&Tensor>],
) -> Result<()> {
    for parameter in parameters.iter().copied().flatten() {
        check_float(op, &[parameter])?;
        same_device(op, &[x, parameter])?;
        if parameter.shape() != shape {
            return Err(Error::shape(
                op,
                [x, parameter],
                format!(
                    "parameters for {} must have shape {shape}, got {}",
                    x.shape(),
                    parameter.shape()
                ),
            ));
        }
    }
    Ok(())
}

/// Checks an input `[n, c, ...]` and parameters `[c]`.
pub(super) fn check_channels(
    op: &'static str,
    x: &Tensor,
    parameters: &[Option<&Tensor>],
) -> Result<()> {
    check_float(op, &[x])?;
    match x.dims() {
        [_, channels, ..] => check_parameters(op, x, &[*channels].into(), parameters),
        _ => Err(Error::shape(
            op,
            [x],
            format!("the input is [n, c, ...], got {}", x.shape()),
        )),
    }
}
