//! Classification of sequences and of tokens.

use super::{
    Result, check_dims, check_floats, check_share,
    entropy::{check, entropy, valid},
};
use anymesh_core::{Tensor, grad::no_grad, ops::LossReduction};

/// How [`classification`] weighs classes.
#[derive(Clone, Debug, Default)]
pub struct Classification {
    /// A factor for each class, `[classes]`.
    pub weight: Option<Tensor>,
    /// The share of each label that is spread evenly over all classes.
    pub smoothing: f64,
}

impl Classification {
    fn check(&self, classes: usize) -> Result<()> {
        check_share("smoothing", self.smoothing)?;
        match &self.weight {
            None => Ok(()),
            Some(weight) => {
                check_floats(&[("weight", weight)])?;
                check_dims("weight", weight, &[classes], "a weight for each class")
            }
        }
    }
}

/// The *sum* of the weighted cross-entropy of all labels that count: logits `[batch, classes]` with
/// labels `[batch]`, or of tokens `[batch, sequence, classes]` with labels `[batch, sequence]` and
/// -100 where there is none. Divide it by [`label_weight`] of the whole global batch.
#[track_caller]
pub fn classification(
    logits: &Tensor,
    labels: &Tensor,
    options: &Classification,
) -> Result<Tensor> {
    check(logits, labels)?;
    options.check(logits.dims().last().copied().unwrap_or(0))?;
    let (weight, smoothing) = (options.weight.as_ref(), options.smoothing);
    Ok(entropy(
        logits,
        labels,
        weight,
        smoothing,
        LossReduction::Sum,
    )?)
}

/// What labels weigh together: the sum of their classes' weights, or how many there are of them
/// without weights; those that are ignored weigh nothing. What a mean divides by.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::{Classification, classification, label_weight, normalised};
/// # let device = anymesh_backend_cpu::device();
/// let logits = Tensor::new(&[[0.0, 0.0], [0.0, 0.0], [2.0, 1.0]], &device)?;
/// let labels = Tensor::new(&[0, 1, -100], &device)?;
/// let weight = Some(Tensor::new(&[0.25, 1.0], &device)?);
/// let options = Classification { weight, ..Default::default() };
/// let total = label_weight(&labels, &options)?;
/// assert_eq!(total, 1.25);
/// let loss = normalised(&classification(&logits, &labels, &options)?, total)?;
/// assert!((loss.item()?.to_f64() - f64::ln(2.0)).abs() < 1e-12);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn label_weight(labels: &Tensor, options: &Classification) -> Result<f64> {
    let Some(weight) = &options.weight else {
        return Ok(super::valid_labels(labels)? as f64);
    };
    let sum = no_grad(|| {
        let counts = valid(labels)?;
        let of = weight.index_get(&[&counts.where_(labels, 0)?])?;
        counts.where_(&of, 0.0)?.sum_all()
    })?;
    Ok(sum.item()?.to_f64())
}
