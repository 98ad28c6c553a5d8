//! Which experts a token goes to, and with what weight.

use crate::{Build, Error, Init, Module, Param, Result};
use anymesh_core::{DType, Tensor, ops::Order};
use serde::{Deserialize, Serialize};

/// What scores of experts are made of the router's logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// A softmax over all experts, of which the largest are taken.
    #[default]
    SoftmaxFirst,
    /// The largest logits, and a softmax over those.
    SoftmaxLast,
    /// A sigmoid of each logit, as DeepSeek-V3 has it.
    Sigmoid,
}

/// How tokens are routed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Routing {
    /// Experts.
    pub experts: usize,
    /// How many of them a token goes to.
    pub top_k: usize,
    /// What scores are.
    pub scoring: Scoring,
    /// Whether the weights of a token are made to add up to 1.
    pub renormalise: bool,
    /// What weights are multiplied with at last.
    pub scale: f64,
    /// Groups of experts that lie together (on one node), and how many of them a token may go to:
    /// those whose two best experts are best.
    pub groups: Option<(usize, usize)>,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            experts: 8,
            top_k: 2,
            scoring: Scoring::default(),
            renormalise: true,
            scale: 1.0,
            groups: None,
        }
    }
}

impl Routing {
    /// That the numbers can be.
    pub fn check(&self) -> Result<()> {
        let Self { experts, top_k, .. } = *self;
        if top_k == 0 || top_k > experts {
            let detail =
                format!("a token goes to {top_k} of {experts} experts: 1 to {experts} can be");
            return Err(Error::config("experts.top_k", detail));
        }
        if let Some((groups, kept)) = self.groups {
            let even = groups > 0 && experts.is_multiple_of(groups);
            if !even || kept == 0 || kept > groups || kept * (experts / groups.max(1)) < top_k {
                let detail = format!(
                    "{kept} of {groups} groups of {experts} experts do not have {top_k}: groups must be of one size, and those that are kept have experts enough"
                );
                return Err(Error::config("experts.groups", detail));
            }
        }
        match self.scale.is_finite() {
            true => Ok(()),
            false => Err(Error::config("experts.scale", "it must be a number")),
        }
    }

    /// Routes tokens by their logits, `[tokens, experts]`, which are taken in f32 at least. A bias,
    /// `[experts]`, has a say in which experts are chosen and none in the weights. Of equal scores
    /// the lower expert is taken.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # use anymesh_train::nn::experts::Routing;
    /// # let device = anymesh_backend_cpu::device();
    /// let logits = Tensor::new(&[[2f32, 1.0, 0.0, -1.0], [0.0, 0.0, 1.0, 3.0]], &device)?;
    /// let routing = Routing { experts: 4, top_k: 2, ..Routing::default() };
    /// let routed = routing.route(&logits, None)?;
    /// assert_eq!(routed.experts.to_vec::<i32>()?, [0, 1, 3, 2]);
    /// assert_eq!(routed.counts()?.to_vec::<i32>()?, [1, 1, 1, 1]);
    /// # Ok::<(), anymesh_train::Error>(())
    /// ```
    #[track_caller]
    pub fn route(&self, logits: &Tensor, bias: Option<&Tensor>) -> Result<Routed> {
        self.check()?;
        let [tokens, experts] = *logits.dims() else {
            let detail = format!("logits are [tokens, experts], got {}", logits.type_string());
            return Err(Error::config("experts", detail));
        };
        if experts != self.experts {
            let detail = format!(
                "logits of {experts} experts, and there are {}",
                self.experts
            );
            return Err(Error::config("experts.experts", detail));
        }
        let logits = match logits.dtype() {
            DType::F64 => logits.clone(),
            _ => logits.cast(DType::F32)?,
        };
        let scores = match self.scoring {
            Scoring::SoftmaxFirst => logits.softmax(-1)?,
            Scoring::SoftmaxLast => logits.clone(),
            Scoring::Sigmoid => logits.sigmoid()?,
        };
        // What is chosen has no gradient.
        let mut chosen = scores.detach();
        if let Some(bias) = bias {
            chosen = chosen.add(&bias.detach().cast(logits.dtype())?)?;
        }
        if let Some((groups, kept)) = self.groups {
            chosen = within_groups(&chosen, tokens, groups, experts / groups, kept)?;
        }
        let (_, index) = chosen.topk(self.top_k, -1, Order::Descending)?;
        let mut weights = scores.gather(-1, &index)?;
        if self.scoring == Scoring::SoftmaxLast {
            weights = weights.softmax(-1)?;
        } else if self.renormalise {
            weights = weights.div(&weights.sum(&[-1], true)?.add(1e-20)?)?;
        }
        if self.scale != 1.0 {
            weights = weights.mul(self.scale)?;
        }
        Ok(Routed {
            experts: index,
            weights,
            logits,
            kept: None,
        })
    }
}

/// Scores with those of other groups than the best out of the question.
fn within_groups(
    scores: &Tensor,
    tokens: usize,
    groups: usize,
    size: usize,
    kept: usize,
) -> Result<Tensor> {
    let parts = scores.reshape([tokens, groups, size])?;
    let best = parts.topk(size.min(2), -1, Order::Descending)?.0;
    let of_group = best.sum(&[-1], false)?;
    let (_, taken) = of_group.topk(kept, -1, Order::Descending)?;
    let open = taken.one_hot(groups)?.sum(&[1], false)?.ne(0)?;
    let open = open.unsqueeze(-1)?.expand([tokens, groups, size])?;
    let out = open.where_(&parts, f64::NEG_INFINITY)?;
    Ok(out.reshape([tokens, groups * size])?)
}

/// Where tokens go.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The experts of each token, `[tokens, top_k]`, the best first.
    pub experts: Tensor,
    /// With what weight, `[tokens, top_k]`.
    pub weights: Tensor,
    /// What it was decided by, `[tokens, experts]`.
    pub logits: Tensor,
    /// Which of them found room, `[tokens, top_k]`, bools; all, where this is none.
    pub kept: Option<Tensor>,
}

impl Routed {
    /// How many tokens go to each expert, over all ranks: `[experts]`, integers.
    #[track_caller]
    pub fn counts(&self) -> Result<Tensor> {
        let experts = self.logits.dims()[1];
        let all = self.experts.dims().iter().product::<usize>();
        Ok(self.experts.reshape([all])?.bincount_bins(None, experts)?)
    }

    /// How many choices found no room, over all ranks: an integer.
    #[track_caller]
    pub fn dropped(&self) -> Result<Tensor> {
        Ok(match &self.kept {
            Some(kept) => kept.logical_not()?.cast(DType::I32)?.sum_all()?,
            None => Tensor::zeros([], DType::I32, self.experts.mesh())?,
        })
    }

    /// The loss that balances experts, of weight 1: `E / (K T^2) * sum_e count_e * sum_t p_te`, with
    /// the probabilities of a softmax. Over the whole batch, however it lies.
    #[track_caller]
    pub fn balance_loss(&self) -> Result<Tensor> {
        let ([tokens, experts], top_k) = (
            [self.logits.dims()[0], self.logits.dims()[1]],
            self.experts.dims()[1],
        );
        let shares = self.logits.softmax(-1)?.sum(&[0], false)?;
        let counts = self.counts()?.cast(shares.dtype())?;
        let factor = experts as f64 / (top_k as f64 * (tokens as f64).powi(2));
        Ok(shares.mul(&counts)?.sum_all()?.mul(factor)?)
    }

    /// The loss that keeps logits small, of weight 1: the mean of `logsumexp^2`.
    #[track_caller]
    pub fn z_loss(&self) -> Result<Tensor> {
        Ok(self.logits.logsumexp(&[-1], false)?.square()?.mean_all()?)
    }
}

/// A bias after a step: up for experts that got fewer tokens than the mean, down for those that got
/// more. `counts` are those of the whole step, of all micro-batches.
#[track_caller]
pub fn balanced_bias(bias: &Tensor, counts: &Tensor, rate: f64) -> Result<Tensor> {
    let counts = counts.cast(bias.dtype())?;
    let less = counts.mean_all()?.sub(&counts)?.sign()?;
    Ok(bias.add(&less.mul(rate)?)?)
}

/// A linear layer that gives the logits of experts, in f32.
#[derive(Clone, Debug, Module)]
pub struct Router {
    /// `[experts, width]`, whole on every rank.
    pub weight: Param,
    /// What is added to scores where experts are chosen, `[experts]`: state, which no gradient
    /// changes and [`balance`](Self::balance) does.
    #[name = "e_score_correction_bias"]
    pub bias: Option<Param>,
}

impl Router {
    /// For vectors of `width`.
    pub fn new(b: &Build, experts: usize, width: usize, init: Init) -> Result<Self> {
        Ok(Self {
            weight: b.param("weight", [experts, width], "[_, _]", init)?,
            bias: None,
        })
    }

    /// With a bias, which begins at zero.
    pub fn with_bias(mut self, b: &Build) -> Result<Self> {
        let experts = self.weight.value().dims()[0];
        let name = "e_score_correction_bias";
        let mut bias = b.param_stored(name, [experts], "[_]", "[_]", Init::Zeros)?;
        bias.train(false)?;
        self.bias = Some(bias);
        Ok(self)
    }

    /// Moves the bias by [`balanced_bias`], where there is one.
    pub fn balance(&mut self, counts: &Tensor, rate: f64) -> Result<()> {
        match &mut self.bias {
            None => Ok(()),
            Some(bias) => {
                let new = balanced_bias(bias.value(), counts, rate)?;
                bias.set(&new)
            }
        }
    }

    /// The logits of `[tokens, width]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = |t: &Tensor| match t.dtype() {
            DType::F64 => Ok(t.clone()),
            _ => t.cast(DType::F32),
        };
        Ok(wide(x)?.linear(&wide(&self.weight.get()?)?, None)?)
    }
}
