//! Policy training: answers that earned more than the others to the same prompt become likelier.

use super::{Error, Result, check_dims, check_floats, loss_type};
use anymesh_core::{DType, Tensor, grad::no_grad, ops::Expr};

/// How much better each answer is than the others of its group, in deviations: `(r - mean) / (std +
/// 1e-4)`, with the deviation of a sample (`n - 1`). Rewards are `[prompts * group]`, the answers to
/// a prompt side by side. Equal rewards give zeros; a group of one has no others.
///
/// ```
/// # use anymesh_core::Tensor;
/// # use anymesh_train::objective::advantages;
/// # let device = anymesh_backend_cpu::device();
/// let rewards = Tensor::new(&[1.0, 0.0, 0.5, 1.0], &device)?;
/// let found = advantages(&rewards, 4)?.to_vec::<f64>()?;
/// assert!((found[1] - -1.3053097493539774).abs() < 1e-12);
/// assert!(advantages(&rewards, 1).is_err());
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[track_caller]
pub fn advantages(rewards: &Tensor, group: usize) -> Result<Tensor> {
    check_floats(&[("rewards", rewards)])?;
    if group < 2 {
        let detail = format!("a group of {group} has nothing to compare with: take 2 or more");
        return Err(Error::config("group", detail));
    }
    let count = match *rewards.dims() {
        [count] if count % group == 0 => count,
        _ => {
            let found = rewards.type_string();
            let detail = format!("{found} are no whole groups of {group}");
            return Err(Error::config("rewards", detail));
        }
    };
    Ok(no_grad(|| {
        let rewards = rewards.cast(loss_type(&[rewards]))?;
        let groups = rewards.reshape([count / group, group])?;
        let above = groups.sub(&groups.mean(&[1], true)?)?;
        let squares = above.square()?.sum(&[1], true)?;
        let deviation = squares.mul(1.0 / (group - 1) as f64)?.sqrt()?;
        above.div(&deviation.add(1e-4)?)?.reshape([count])
    })?)
}

/// The settings of [`grpo`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grpo {
    /// How far the probability of a token may fall, and rise, before it is no longer worth more:
    /// ratios are clipped to `1 - clip.0 ..= 1 + clip.1`.
    pub clip: (f64, f64),
    /// The weight of the distance from the reference.
    pub kl: f64,
}

impl Default for Grpo {
    fn default() -> Self {
        Self {
            clip: (0.2, 0.2),
            kl: 0.0,
        }
    }
}

/// What is known of answers when the policy learns from them. Log-probabilities are of tokens,
/// `[batch, sequence]`, from [`token_log_probs`](super::token_log_probs).
#[derive(Clone, Copy, Debug)]
pub struct Rollout<'a> {
    /// Of the policy that wrote the answers; those of the present one where it is the same.
    pub old: Option<&'a Tensor>,
    /// Of the reference; needed where the distance from it has a weight.
    pub reference: Option<&'a Tensor>,
    /// Of each answer, `[batch]`: see [`advantages`].
    pub advantages: &'a Tensor,
    /// Which tokens are the answer's, bools `[batch, sequence]`.
    pub mask: &'a Tensor,
}

/// What [`grpo`] gives, each a sum over the tokens of the mask.
#[derive(Clone, Debug)]
pub struct PolicyLoss {
    /// The loss: divide it by the number of such tokens of the whole global batch.
    pub sum: Tensor,
    /// The estimated distance from the reference. No gradient.
    pub kl: Tensor,
    /// How many tokens were clipped, and so have no gradient of their own.
    pub clipped: Tensor,
}

/// Group-relative policy optimization: for each token of an answer `-min(r A, clip(r) A) + kl (e^d -
/// d - 1)`, where `r` is how much likelier it is than it was under the old policy, `A` the advantage
/// of the answer, and `d` how much likelier than now under the reference (an estimate of the
/// divergence that is never negative). Every token weighs the same, whatever the length of its
/// answer.
#[track_caller]
pub fn grpo(log_probs: &Tensor, rollout: &Rollout<'_>, options: &Grpo) -> Result<PolicyLoss> {
    let Grpo {
        clip: (low, high),
        kl,
    } = *options;
    if !((0.0..=1.0).contains(&low) && high.is_finite() && high >= 0.0) {
        let detail = format!("ratios cannot be held between 1 - {low} and 1 + {high}");
        return Err(Error::config("clip", detail));
    }
    if !(kl.is_finite() && kl >= 0.0) {
        return Err(Error::config(
            "kl",
            format!("a weight is 0 or more, not {kl}"),
        ));
    }
    if kl > 0.0 && rollout.reference.is_none() {
        let detail = "a distance from the reference needs its log-probabilities";
        return Err(Error::config("reference", detail));
    }
    let &[batch, sequence] = log_probs.dims() else {
        let found = log_probs.type_string();
        let detail = format!("log-probabilities are [batch, sequence], these are {found}");
        return Err(Error::config("log_probs", detail));
    };
    let now = log_probs.detach();
    let old = rollout.old.map_or_else(|| now.clone(), Tensor::detach);
    let reference = rollout.reference.map_or(now, Tensor::detach);
    check_floats(&[
        ("log_probs", log_probs),
        ("old", &old),
        ("reference", &reference),
        ("advantages", rollout.advantages),
    ])?;
    let because = "log-probabilities of this batch";
    check_dims("old", &old, &[batch, sequence], because)?;
    check_dims("reference", &reference, &[batch, sequence], because)?;
    check_dims("mask", rollout.mask, &[batch, sequence], because)?;
    check_dims("advantages", rollout.advantages, &[batch], because)?;
    if rollout.mask.dtype() != DType::Bool {
        let found = rollout.mask.type_string();
        return Err(Error::config(
            "mask",
            format!("bools are needed, these are {found}"),
        ));
    }
    let advantages = rollout.advantages.detach().unsqueeze(1)?;
    let inputs = [log_probs, &old, &reference, &advantages, rollout.mask];
    let dtype = loss_type(&inputs[..4]);
    let [losses, kl, clipped] = Expr::new("grpo", &inputs)
        .params(&[1.0 - low, 1.0 + high, kl])
        .maps([dtype; 3], |a| {
            let (mask, zero) = (a.x[4], a.x[0].lit(0.0));
            // What is outside of the mask is never looked at: it may be anything.
            let ratio = mask.select(a.x[0] - a.x[1], zero).exp();
            let away = mask.select(a.x[2] - a.x[0], zero);
            let bounded = ratio.max(a.p[0]).min(a.p[1]);
            let (free, held) = (ratio * a.x[3], bounded * a.x[3]);
            let distance = away.expm1() - away;
            [
                mask.select(distance * a.p[2] - free.min(held), zero),
                distance,
                mask.and(held.lt(free)).select(zero + 1.0, zero),
            ]
        })?;
    Ok(PolicyLoss {
        sum: losses.sum_all()?,
        kl: no_grad(|| kl.detach().sum_all())?,
        clipped: no_grad(|| clipped.detach().sum_all())?,
    })
}
