//! Tokens to their experts and back.

use super::Routed;
use crate::{Error, Result};
use anymesh_core::{DType, Sharding, Tensor, backend::ScatterOp, grad::no_grad};

/// How many tokens an expert takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Capacity {
    /// So many times its even share, `ceil(tokens * top_k / experts * factor)`; those that come later
    /// are dropped, and pass by the layer. Shapes do not depend on values.
    Factor(f64),
    /// All that come. Every expert has room for as many as the fullest gets, which is read on the
    /// host: one number for each layer.
    All,
}

impl Capacity {
    /// That the factor can be.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Factor(factor) if !(factor > 0.0 && factor.is_finite()) => {
                let detail = format!("{factor} is no capacity: it must be above 0");
                Err(Error::config("experts.capacity", detail))
            }
            _ => Ok(()),
        }
    }
}

/// Who is where: a slot for each token and choice, and a token for each slot of an expert. Slots are
/// given in the order of tokens, so that the same batch always lies the same way.
#[derive(Clone, Debug)]
pub struct Dispatch {
    experts: usize,
    capacity: usize,
    /// For each token and choice, in their order: its slot among all. Dropped ones have one that
    /// does not matter.
    slots: Tensor,
    /// Whether it was kept: 1 or 0, `[tokens, top_k]`.
    kept: Tensor,
    /// For each slot its token; any where it is free.
    tokens: Tensor,
}

impl Dispatch {
    /// For tokens that were routed.
    #[track_caller]
    pub fn new(routed: &Routed, capacity: Capacity) -> Result<Self> {
        capacity.check()?;
        no_grad(|| Self::of(routed, capacity))
    }

    #[track_caller]
    fn of(routed: &Routed, capacity: Capacity) -> Result<Self> {
        let (tokens, experts) = (routed.logits.dims()[0], routed.logits.dims()[1]);
        let top_k = routed.experts.dims()[1];
        let all = tokens * top_k;
        let capacity = match capacity {
            Capacity::Factor(factor) => {
                let share = (all as f64 / experts as f64 * factor).ceil();
                (share as usize).clamp(1, tokens.max(1))
            }
            Capacity::All => match all {
                0 => 1,
                _ => (routed.counts()?.max_all()?.item()?.to_f64() as usize).max(1),
            },
        };
        let expert = routed.experts.reshape([all])?.cast(DType::I32)?;
        // How many of the same expert came before each.
        let hot = expert.one_hot(experts)?.cast(DType::I32)?;
        let before = hot.cumsum(0)?.cast(DType::I32)?;
        let place = before.gather(-1, &expert.unsqueeze(-1)?)?.squeeze(&[-1])?;
        let place = place.sub(1)?;
        let kept = place.lt(capacity as i64)?;
        let free = (experts * capacity) as i64;
        let slots = expert.mul(capacity as i64)?.add(&place)?;
        let slots = kept.where_(&slots, free)?;
        // One slot more, for all that are dropped.
        let token = Tensor::arange(0, all as i64, 1, DType::I32, expert.mesh())?;
        let token = token.floor_div(top_k as i64)?;
        let none = Tensor::zeros([free as usize + 1], DType::I32, expert.mesh())?;
        let of_slot = none.scatter(0, &slots, &token, ScatterOp::Set)?;
        Ok(Self {
            experts,
            capacity,
            slots: slots.minimum(free - 1)?,
            kept: kept.reshape([tokens, top_k])?,
            tokens: of_slot.narrow(0, 0, free as usize)?,
        })
    }

    /// How many tokens an expert has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Which choices of which tokens were kept, `[tokens, top_k]`, bools.
    pub fn kept(&self) -> &Tensor {
        &self.kept
    }

    /// The tokens of each expert, `[experts, capacity, width]`, cut over `ep`, from `[tokens, width]`. What free
    /// slots have does not matter: nothing comes back from them.
    #[track_caller]
    pub fn send(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, width) = (x.dims()[0], x.dims()[1]);
        if tokens == 0 {
            let shape = [self.experts, self.capacity, width];
            return Ok(Tensor::zeros(shape, x.dtype(), x.mesh())?);
        }
        // Cut along the width, every rank has a part of every token and picks without asking others.
        let rows = x.reshard("[_, @ep?]")?.embedding(&self.tokens)?;
        let rows = rows.reshape([self.experts, self.capacity, width])?;
        Ok(rows.reshard("[@ep?, _, _]")?)
    }

    /// What experts gave, `[experts, capacity, width]`, where tokens are: weighed and added up. What
    /// is partial (over `tp`) is added up before.
    #[track_caller]
    pub fn combine(&self, y: &Tensor, routed: &Routed) -> Result<Tensor> {
        let (width, [tokens, top_k]) = (y.dims()[2], [self.kept.dims()[0], self.kept.dims()[1]]);
        let y = y.reshard("[_, _, @ep?]")?;
        let y = y.reshape([self.experts * self.capacity, width])?;
        let rows = y.embedding(&self.slots)?.reshape([tokens, top_k, width])?;
        let weights = routed
            .weights
            .mul(&self.kept.cast(routed.weights.dtype())?)?;
        let weights = weights.cast(rows.dtype())?.unsqueeze(-1)?;
        let sums = rows.mul(&weights)?.sum(&[1], false)?;
        // Back to where the tokens are.
        let by_token = routed.weights.sharding().axes_of(0);
        let there = by_token.fold(Sharding::replicated(), |s, axis| s.cut(0, axis));
        Ok(sums.reshard(there)?)
    }
}
