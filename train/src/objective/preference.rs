//! Preferences: of two answers, the one that people like better.

use super::{Error, Result, check_dims, check_floats, check_share, loss_type};
use anymesh_core::{Tensor, grad::no_grad, ops::Expr};

/// How [`dpo`] judges the margin between two answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DpoLoss {
    /// `-log sigmoid(beta * margin)`.
    #[default]
    Sigmoid,
    /// `(margin - 1 / (2 beta))^2`: IPO, for log-probabilities that are means over the tokens of an
    /// answer.
    Ipo,
}

/// The settings of [`dpo`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dpo {
    /// How strongly the policy is held to the reference.
    pub beta: f64,
    /// The share of pairs that are believed to be the wrong way round; for the sigmoid.
    pub smoothing: f64,
    /// How the margin is judged.
    pub loss: DpoLoss,
}

impl Default for Dpo {
    fn default() -> Self {
        Self {
            beta: 0.1,
            smoothing: 0.0,
            loss: DpoLoss::Sigmoid,
        }
    }
}

/// The log-probabilities `[pairs]` that a model gives the answers of each pair.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// Of those that were preferred.
    pub chosen: &'a Tensor,
    /// Of the others.
    pub rejected: &'a Tensor,
}

/// What [`dpo`] gives, each `[pairs]`.
#[derive(Clone, Debug)]
pub struct Preferred {
    /// The losses: take their sum, and divide it by the pairs of the whole global batch.
    pub losses: Tensor,
    /// `beta` times how much likelier the chosen answers are than under the reference. No gradient.
    pub chosen_rewards: Tensor,
    /// The same of the rejected answers: training goes well where it is smaller.
    pub rejected_rewards: Tensor,
}

/// Direct preference optimization: the margin is how much more the policy prefers the chosen answer
/// than the reference does, `(policy.chosen - reference.chosen) - (policy.rejected -
/// reference.rejected)`. Log-probabilities come from
/// [`sequence_log_probs`](super::sequence_log_probs); nothing goes back into the reference.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::{Dpo, Pair, dpo};
/// # let device = anymesh_backend_cpu::device();
/// let new = |x: f64| Tensor::new(&[x], &device);
/// let policy = Pair { chosen: &new(-10.0)?, rejected: &new(-12.0)? };
/// let reference = Pair { chosen: &new(-11.0)?, rejected: &new(-11.5)? };
/// let found = dpo(policy, reference, &Dpo { beta: 0.1, ..Default::default() })?;
/// assert!((found.losses.item()?.to_f64() - 0.6209570477895321).abs() < 1e-12);
/// assert!((found.chosen_rewards.item()?.to_f64() - 0.1).abs() < 1e-12);
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn dpo(policy: Pair<'_>, reference: Pair<'_>, options: &Dpo) -> Result<Preferred> {
    let Dpo {
        beta,
        smoothing,
        loss,
    } = *options;
    if !(beta.is_finite() && beta > 0.0) {
        let detail = format!("{beta} is not above 0");
        return Err(Error::config("beta", detail));
    }
    check_share("smoothing", smoothing)?;
    if smoothing > 0.0 && loss == DpoLoss::Ipo {
        let detail = "IPO has none: set it to 0, or take the sigmoid";
        return Err(Error::config("smoothing", detail));
    }
    let named = [
        ("policy.chosen", policy.chosen),
        ("policy.rejected", policy.rejected),
        ("reference.chosen", reference.chosen),
        ("reference.rejected", reference.rejected),
    ];
    check_floats(&named)?;
    let &[count] = policy.chosen.dims() else {
        let found = policy.chosen.type_string();
        let detail = format!("a log-probability for each pair is needed, these are {found}");
        return Err(Error::config("policy.chosen", detail));
    };
    for (name, tensor) in &named[1..] {
        check_dims(name, tensor, &[count], "the number of chosen answers")?;
    }
    let (rc, rr) = (reference.chosen.detach(), reference.rejected.detach());
    let inputs = [policy.chosen, policy.rejected, &rc, &rr];
    let dtype = loss_type(&inputs);
    let margin = Expr::new("dpo", &inputs).map(dtype, |a| (a.x[0] - a.x[2]) - (a.x[1] - a.x[3]))?;
    let losses = match loss {
        DpoLoss::Ipo => margin.sub(0.5 / beta)?.square()?,
        DpoLoss::Sigmoid => {
            let scaled = margin.mul(beta)?;
            let right = scaled.logsigmoid()?.mul(smoothing - 1.0)?;
            match smoothing > 0.0 {
                false => right,
                true => right.sub(&scaled.neg()?.logsigmoid()?.mul(smoothing)?)?,
            }
        }
    };
    let [chosen_rewards, rejected_rewards] = no_grad(|| {
        Expr::new("dpo", &inputs)
            .params(&[beta])
            .maps([dtype; 2], |a| {
                [(a.x[0] - a.x[2]) * a.p[0], (a.x[1] - a.x[3]) * a.p[0]]
            })
    })?;
    Ok(Preferred {
        losses,
        chosen_rewards,
        rejected_rewards,
    })
}
