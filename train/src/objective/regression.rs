//! Regression.

use super::{Result, check_dims, check_floats};
use anymesh_core::{Tensor, ops::LossReduction};

/// The *sum* of squared differences of predictions and targets of one shape. Divide it by the
/// number of targets of the whole global batch with [`normalised`](super::normalised).
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::{normalised, regression};
/// # let device = anymesh_backend_cpu::device();
/// let found = Tensor::new(&[1.0, 2.0], &device)?;
/// let sum = regression(&found, &Tensor::new(&[2.0, 5.0], &device)?)?;
/// assert_eq!(normalised(&sum, 2.0)?.item()?.to_f64(), 5.0);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn regression(predictions: &Tensor, targets: &Tensor) -> Result<Tensor> {
    check_floats(&[("predictions", predictions), ("targets", targets)])?;
    let because = "a target for each prediction";
    check_dims("targets", targets, predictions.dims(), because)?;
    Ok(predictions.mse_loss(targets, LossReduction::Sum)?)
}
