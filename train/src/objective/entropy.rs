//! Cross-entropy over the last dimension, and what is made of it.

use super::{Error, Result, check_floats};
use anymesh_core::{
    DType, Tensor,
    grad::no_grad,
    ops::{CrossEntropyOptions, LossReduction},
};

/// The label of a position that has no loss.
pub const IGNORED: i64 = crate::data::IGNORED as i64;

/// How many labels count, of all ranks: those that are not [`IGNORED`].
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::valid_labels;
/// # let device = anymesh_backend_cpu::device();
/// assert_eq!(valid_labels(&Tensor::new(&[[5, -100], [7, 1]], &device)?)?, 3);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn valid_labels(labels: &Tensor) -> Result<u64> {
    let count = labels.ne(IGNORED)?.count_nonzero(&[], false)?;
    Ok(count.item()?.to_f64() as u64)
}

/// Refuses labels that do not fit logits `[.., classes]`.
pub(super) fn check(logits: &Tensor, labels: &Tensor) -> Result<()> {
    check_floats(&[("logits", logits)])?;
    if !matches!(labels.dtype(), DType::I32 | DType::I64) {
        let found = labels.type_string();
        return Err(Error::config(
            "labels",
            format!("classes are i32 or i64, these are {found}"),
        ));
    }
    match logits.dims().split_last() {
        Some((_, positions)) if positions == labels.dims() => Ok(()),
        _ => Err(Error::config(
            "labels",
            format!(
                "logits {} need a label for each position, these are {}",
                logits.type_string(),
                labels.type_string()
            ),
        )),
    }
}

/// The cross-entropy of each position, or their sum, with the classes in the last dimension.
#[track_caller]
pub(super) fn entropy(
    logits: &Tensor,
    labels: &Tensor,
    weight: Option<&Tensor>,
    smoothing: f64,
    reduction: LossReduction,
) -> anymesh_core::Result<Tensor> {
    let options = CrossEntropyOptions {
        weight: weight.cloned(),
        ignore_index: Some(IGNORED),
        label_smoothing: smoothing,
        reduction,
    };
    if logits.rank() <= 2 {
        return logits.cross_entropy(labels, &options);
    }
    if let Some(rows) = as_rows(logits) {
        let losses = rows.cross_entropy(&labels.reshape([labels.numel()])?, &options)?;
        return match reduction {
            LossReduction::None => losses.reshape(labels.shape().clone()),
            _ => Ok(losses),
        };
    }
    // Also a view: whichever positions are cut, nothing has to move.
    logits.movedim(&[-1], &[1])?.cross_entropy(labels, &options)
}

/// Logits `[.., classes]` as rows `[positions, classes]`, which kernels read fastest, where that
/// moves nothing: where at most the first dimension of positions is cut, and evenly.
fn as_rows(logits: &Tensor) -> Option<Tensor> {
    let (sharding, mesh) = (logits.sharding(), logits.mesh());
    let (classes, positions) = logits.dims().split_last()?;
    let parts: usize = sharding.axes_of(0).map(|axis| mesh.size(axis)).product();
    let even = positions.first()? % parts == 0;
    let whole = (1..positions.len()).all(|d| sharding.axes_of(d).next().is_none());
    let rows = [positions.iter().product(), *classes];
    match even && whole {
        true => logits.reshape(rows).ok(),
        false => None,
    }
}

/// The log-probability that logits `[.., tokens]` give each label; zero where it is ignored.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::token_log_probs;
/// # let device = anymesh_backend_cpu::device();
/// let logits = Tensor::new(&[[0.0, 0.0], [1.0, 9.0]], &device)?;
/// let labels = Tensor::new(&[1, -100], &device)?;
/// assert_eq!(token_log_probs(&logits, &labels)?.to_vec::<f64>()?, [-f64::ln(2.0), 0.0]);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn token_log_probs(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    check(logits, labels)?;
    Ok(entropy(logits, labels, None, 0.0, LossReduction::None)?.neg()?)
}

/// The log-probability of each sequence: `[batch]` for logits `[batch, sequence, tokens]` and
/// labels `[batch, sequence]`, of which those that are ignored (the prompt, say) do not count.
#[track_caller]
pub fn sequence_log_probs(logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
    if labels.rank() != 2 {
        let found = labels.type_string();
        return Err(Error::config(
            "labels",
            format!("sequences are [batch, sequence], these are {found}"),
        ));
    }
    Ok(token_log_probs(logits, labels)?.sum(&[1], false)?)
}

/// Which positions count.
pub(super) fn valid(labels: &Tensor) -> anymesh_core::Result<Tensor> {
    no_grad(|| labels.ne(IGNORED))
}
