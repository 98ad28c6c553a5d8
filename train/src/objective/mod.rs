//! What training makes small: functions of global tensors. None of them knows the mesh, so none has
//! a factor of the number of ranks to get wrong.
//!
//! | | gives |
//! |---|---|
//! | [`language`] and [`language_in_chunks`], [`classification`], [`regression`] | a sum over everything that counts: divide it by the count of the whole global batch with [`normalised`] |
//! | [`contrastive`], [`matryoshka`] | the mean over all queries of the global batch, which [`GradCache`] encodes in chunks |
//! | [`dpo`] | a loss for each pair, from [`sequence_log_probs`] |
//! | [`grpo`] | a sum over tokens, from [`token_log_probs`] and [`advantages`] |

mod chunks;
mod classification;
mod contrastive;
mod entropy;
mod grad_cache;
mod language;
mod policy;
mod preference;
mod regression;

pub use classification::{Classification, classification, label_weight};
pub use contrastive::{Contrastive, Prefix, Temperature, contrastive, matryoshka};
pub use entropy::{IGNORED, sequence_log_probs, token_log_probs, valid_labels};
pub use grad_cache::{Chunk, GradCache};
pub use language::{Language, language, language_in_chunks};
pub use policy::{Grpo, PolicyLoss, Rollout, advantages, grpo};
pub use preference::{Dpo, DpoLoss, Pair, Preferred, dpo};
pub use regression::regression;

use crate::{Error, Result};
use anymesh_core::{DType, Tensor};

/// A sum divided by what the *whole global batch* counts: all micro-batches of all ranks together,
/// known before the first of them is gone back from. Then micro-batches with few labels weigh as
/// much as they should, and the gradients of all of them only need adding.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::normalised;
/// # let device = anymesh_backend_cpu::device();
/// // Four tokens in one micro-batch, one in the other.
/// let sums = [2.0 + 4.0 + 6.0 + 8.0, 1.0];
/// let mut loss = 0.0;
/// for sum in sums {
///     loss += normalised(&Tensor::new(sum, &device)?, 5.0)?.item()?.to_f64();
/// }
/// assert!((loss - 4.2).abs() < 1e-12, "and not 3, the mean of the two means");
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn normalised(sum: &Tensor, count: f64) -> Result<Tensor> {
    if !(count.is_finite() && count > 0.0) {
        return Err(Error::config(
            "count",
            format!("a loss cannot be divided by {count}: the batch has no label that counts"),
        ));
    }
    Ok(sum.mul(1.0 / count)?)
}

/// The dtype that losses of these are computed in: f64 where one of them is, else f32.
fn loss_type(tensors: &[&Tensor]) -> DType {
    match tensors.iter().any(|t| t.dtype() == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    }
}

/// Refuses what are no floats.
fn check_floats(tensors: &[(&str, &Tensor)]) -> Result<()> {
    match tensors.iter().find(|(_, t)| !t.dtype().is_float()) {
        None => Ok(()),
        Some((name, t)) => Err(Error::config(
            *name,
            format!("floats are needed, these are {}", t.type_string()),
        )),
    }
}

/// Refuses a tensor that has not the dimensions it should have.
fn check_dims(name: &str, tensor: &Tensor, dims: &[usize], because: &str) -> Result<()> {
    match tensor.dims() == dims {
        true => Ok(()),
        false => Err(Error::config(
            name,
            format!(
                "{because} asks for {dims:?}, these are {}",
                tensor.type_string()
            ),
        )),
    }
}

/// Refuses a share that is not in `0..=1`.
fn check_share(name: &str, share: f64) -> Result<()> {
    match (0.0..=1.0).contains(&share) {
        true => Ok(()),
        false => Err(Error::config(
            name,
            format!("{share} is not between 0 and 1"),
        )),
    }
}
