//! Language modelling: the next token.

use super::{
    Error, Result, check_dims, check_share,
    chunks::sum_over_chunks,
    entropy::{check, entropy, valid},
    loss_type,
};
use anymesh_core::{DType, Tensor, ops::LossReduction};

/// How [`language`] weighs what a model says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Language {
    /// The share of each label that is spread evenly over all tokens.
    pub smoothing: f64,
    /// The weight of the squared log-sum-exp of each position's logits, which keeps them from
    /// drifting; 1e-4 is usual.
    pub z_loss: f64,
    /// What the loss is computed in: [`Policy::output`](crate::Policy::output). Never in less than
    /// f32, nor in less than the logits have.
    pub output: DType,
}

impl Default for Language {
    fn default() -> Self {
        Self {
            smoothing: 0.0,
            z_loss: 0.0,
            output: DType::F32,
        }
    }
}

impl Language {
    fn check(&self) -> Result<()> {
        check_share("smoothing", self.smoothing)?;
        match self.z_loss.is_finite() && self.z_loss >= 0.0 {
            true => Ok(()),
            false => Err(Error::config(
                "z_loss",
                format!("a weight is 0 or more, not {}", self.z_loss),
            )),
        }
    }

    #[track_caller]
    fn sum(&self, logits: &Tensor, labels: &Tensor) -> anymesh_core::Result<Tensor> {
        let widened;
        let logits = match (self.output, loss_type(&[logits])) {
            (DType::F64, DType::F32) => {
                widened = logits.cast(DType::F64)?;
                &widened
            }
            // Cross-entropy widens small floats as it reads them.
            _ => logits,
        };
        let sum = entropy(logits, labels, None, self.smoothing, LossReduction::Sum)?;
        if self.z_loss == 0.0 {
            return Ok(sum);
        }
        let wide = logits.cast(loss_type(&[logits]))?;
        let squares = wide.logsumexp(&[-1], false)?.square()?;
        let counted = valid(labels)?.where_(&squares, 0.0)?;
        sum.add(&counted.sum_all()?.mul(self.z_loss)?)
    }
}

/// The *sum* of the cross-entropy of all labels that count: logits `[.., tokens]`, labels of the
/// shape before that (i32, -100 where there is none). Labels are the next tokens already: position
/// `i` has the token at `i + 1`. Divide it with [`normalised`](super::normalised).
///
/// ```
/// # use anymesh_core::{Mesh, Tensor};
/// # use anymesh_train::objective::{Language, language, normalised, valid_labels};
/// # let device = anymesh_backend_cpu::device();
/// let mesh = Mesh::new("dp=2, tp=2", &device)?;
/// let logits = Tensor::from_fn([2, 3, 4], (&mesh, "[@dp, _, @tp]"), |_| 0f32)?;
/// let labels = Tensor::from_fn([2, 3], (&mesh, "[@dp, _]"), |at| if at[1] == 0 { -100 } else { 3 })?;
/// let count = valid_labels(&labels)? as f64;
/// let loss = normalised(&language(&logits, &labels, &Language::default())?, count)?;
/// assert!((loss.item()?.to_f64() - f64::ln(4.0)).abs() < 1e-6);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn language(logits: &Tensor, labels: &Tensor, options: &Language) -> Result<Tensor> {
    options.check()?;
    check(logits, labels)?;
    Ok(options.sum(logits, labels)?)
}

/// [`language`] from what the last layer gives, `[.., sequence, width]`, with the logits of at most
/// `chunk` positions of each sequence in memory at a time; the backward pass makes them again. The
/// head takes `[.., width]` to `[.., tokens]`.
///
/// ```
/// # use anymesh_core::{DType, Tensor, ops::Rng};
/// # use anymesh_train::objective::{Language, language, language_in_chunks};
/// # let device = anymesh_backend_cpu::device();
/// # let hidden = Tensor::normal([2, 6, 8], 0.0, 1.0, DType::F64, &device, Rng::new(1))?;
/// # let weight = Tensor::normal([50, 8], 0.0, 1.0, DType::F64, &device, Rng::new(2))?;
/// # let labels = Tensor::from_fn([2, 6], &device, |at| at[1] as i32)?;
/// let options = Language::default();
/// let whole = language(&hidden.linear(&weight, None)?, &labels, &options)?;
/// let head = move |hidden: &Tensor| Ok(hidden.linear(&weight, None)?);
/// let sum = language_in_chunks(&hidden, &labels, head, 2, &options)?;
/// assert!((sum.item()?.to_f64() - whole.item()?.to_f64()).abs() < 1e-10);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn language_in_chunks(
    hidden: &Tensor,
    labels: &Tensor,
    head: impl Fn(&Tensor) -> Result<Tensor> + Clone + Send + Sync + 'static,
    chunk: usize,
    options: &Language,
) -> Result<Tensor> {
    options.check()?;
    if chunk == 0 {
        return Err(Error::config("chunk", "a chunk has one position or more"));
    }
    let positions = hidden
        .dims()
        .split_last()
        .map_or(&[][..], |(_, front)| front);
    if positions.is_empty() {
        let found = hidden.type_string();
        return Err(Error::config(
            "hidden",
            format!("vectors of positions are needed, this is {found}"),
        ));
    }
    check_dims("labels", labels, positions, "a label for each position")?;
    let options = *options;
    let sum = sum_over_chunks(&[(hidden, -2), (labels, -1)], chunk, move |parts| {
        Ok(options.sum(&head(&parts[0])?, &parts[1])?)
    })?;
    sum.ok_or_else(|| Error::config("hidden", "there are no positions"))
}
