//! Tokens to their experts and back.

use super::{
    Routed,
    local::{Share, Stacks, through},
};
use crate::{Error, Result};
use anymesh_core::{
    DType, Reduction, Shape, Sharding, Tensor, TensorType, grad::no_grad, ops::RowExchange, split,
    spmd,
};
use serde::{Deserialize, Serialize};

/// How tokens lie: every rank along `dp` and `ep` has some.
const TOKENS: &str = "[@dp?@ep?, _]";

/// How many tokens an expert takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Capacity {
    /// So many times its even share, `ceil(tokens * top_k / experts * factor)`, of all tokens of the
    /// batch, whatever ranks they are on; those that come later are dropped, and pass by the layer.
    /// Who is dropped does not depend on the mesh, and shapes do not depend on values: a rank has
    /// room for what its experts may take, or for all tokens of its `dp` group where those are fewer.
    Factor(f64),
    /// All that come. How many that are is read on the host: a few numbers for each layer.
    #[default]
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

    /// How many tokens an expert takes at most.
    fn room(self, tokens: usize, top_k: usize, experts: usize) -> usize {
        match self {
            Self::Factor(factor) => {
                let share = ((tokens * top_k) as f64 / experts as f64 * factor).ceil();
                (share as usize).clamp(1, tokens.max(1))
            }
            Self::All => tokens,
        }
    }
}

/// Who goes where. A token goes once to each rank that has experts for it, which gives back one sum
/// for all of these; so each way takes at most
/// `tokens of a rank * min(top_k, ep) * width * (1 - 1 / ep)` where experts are evenly loaded, and
/// as much again in the backward pass. Beside that go the numbers and weights of its experts.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// The experts of each token, `[tokens, top_k]`; -1 where it was dropped.
    chosen: Tensor,
    kept: Option<Tensor>,
    room: usize,
    /// Between the ranks of `ep`, where there are several.
    exchange: Option<RowExchange>,
    /// For each part of the tokens how many pairs of a token and an expert it has room for.
    pairs: Vec<usize>,
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
        let room = capacity.room(tokens, top_k, experts);
        let mut chosen = routed.experts.cast(DType::I32)?.reshard(TOKENS)?;
        let kept = match capacity {
            Capacity::Factor(_) => Some(first_to_come(&chosen, experts, room)?),
            Capacity::All => None,
        };
        if let Some(kept) = &kept {
            chosen = kept.where_(&chosen, -1)?;
        }
        let (mesh, sharding) = (chosen.mesh(), chosen.sharding());
        let parts: usize = sharding.axes_of(0).map(|axis| mesh.size(axis)).product();
        let each = tokens.div_ceil(parts);
        let ep = mesh.axis("ep").map_or(1, |axis| mesh.size(axis));
        // What may come to the experts of one rank.
        let group = (each * ep).min(tokens);
        let here = experts.div_ceil(ep) * room.min(group);
        let (exchange, pairs) = match ep {
            1 => (None, vec![here.min(each * top_k); parts]),
            _ => {
                let to = owners(&chosen, experts, ep)?;
                match capacity {
                    Capacity::Factor(_) => {
                        let exchange = RowExchange::within(&to, "ep", group.min(here))?;
                        (Some(exchange), vec![here; parts])
                    }
                    Capacity::All => {
                        let even = (each * top_k.min(ep)).div_ceil(ep) * ep;
                        let exchange = RowExchange::expecting(&to, "ep", even)?;
                        let pairs = exchange.named();
                        (Some(exchange), pairs)
                    }
                }
            }
        };
        Ok(Self {
            chosen,
            kept,
            room,
            exchange,
            pairs,
        })
    }

    /// How many tokens an expert has room for.
    pub fn capacity(&self) -> usize {
        self.room
    }

    /// Which choices of which tokens were kept, `[tokens, top_k]`, bools; all, where this is none.
    pub fn kept(&self) -> Option<&Tensor> {
        self.kept.as_ref()
    }

    /// What the experts of stacks `[experts, inner, width]` (gate and up) and `[experts, width,
    /// inner]` (down) make of tokens `[tokens, width]`: weighed, added up, and where the tokens
    /// were. It is a partial sum where the inner width is cut.
    #[track_caller]
    pub fn through(
        &self,
        x: &Tensor,
        weights: &Tensor,
        [gate, up, down]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let (x, weights) = (x.reshard(TOKENS)?, weights.reshard(TOKENS)?);
        let (rows, chosen, weights) = match &self.exchange {
            None => (x, self.chosen.clone(), weights),
            Some(exchange) => (
                exchange.send(&x)?,
                // Rows that are none come as zeros, and are nobody's.
                exchange.send(&self.chosen.add(1)?)?.sub(1)?,
                exchange.send(&weights)?,
            ),
        };
        let y = self.locally([&rows, &chosen, &weights, gate, up, down])?;
        match &self.exchange {
            None => Ok(y),
            Some(exchange) => Ok(exchange.back(&y)?),
        }
    }

    /// Every rank's experts on the tokens that are there.
    #[track_caller]
    fn locally(&self, operands: [&Tensor; 6]) -> Result<Tensor> {
        let [rows, .., gate, _, down] = operands;
        let mesh = rows.mesh().clone();
        let inner = gate.sharding().axes_of(1);
        let sums = inner.clone().fold(rows.sharding().whole(), |s, axis| {
            s.partial_over(axis, Reduction::Sum)
        });
        if !inner.eq(down.sharding().axes_of(2)) {
            let detail = format!(
                "the inner width of {} and {} is not cut alike",
                gate.type_string(),
                down.type_string()
            );
            return Err(Error::config("experts", detail));
        }
        let result = TensorType {
            dtype: rows.dtype(),
            shape: Shape::from(rows.dims()),
            sharding: sums,
        };
        let (by_token, by_expert) = (rows.sharding().clone(), gate.sharding().clone());
        let (parts, experts) = (self.pairs.len(), gate.dims()[0]);
        let first = |s: &Sharding, rank: usize, n: usize| s.range(&mesh, rank, 0, n).start;
        let mut out = spmd::on_parts("experts", &operands, &[result], |rank, parts_here| {
            let [rows, chosen, weights, gate, up, down] = parts_here else {
                return Ok(vec![]);
            };
            let share = Share {
                first: first(&by_expert, rank, experts),
                pairs: self.pairs[first(&by_token, rank, parts)],
            };
            let stacks = Stacks { gate, up, down };
            Ok(vec![through(&share, rows, chosen, weights, &stacks)?])
        })?;
        Ok(out.remove(0))
    }
}

/// The rank along `ep` that has each expert; below 0 stays below 0.
fn owners(chosen: &Tensor, experts: usize, ep: usize) -> Result<Tensor> {
    debug_assert!(
        (0..ep)
            .all(|rank| { split(experts, rank, ep).all(|e| ((e + 1) * ep - 1) / experts == rank) })
    );
    let above = chosen.add(1)?.mul(ep as i64)?.sub(1)?;
    Ok(above.floor_div(experts as i64)?)
}

/// Which choices find room: those of earlier tokens do first, whatever ranks they are on. Only
/// counts cross.
#[track_caller]
fn first_to_come(chosen: &Tensor, experts: usize, room: usize) -> Result<Tensor> {
    let (tokens, top_k) = (chosen.dims()[0], chosen.dims()[1]);
    let each = chosen.reshape([tokens * top_k])?;
    // How many of the same expert came before each.
    let hot = each.one_hot(experts)?.cast(DType::I32)?;
    let before = hot.cumsum(0)?.cast(DType::I32)?;
    let place = before.gather(-1, &each.unsqueeze(-1)?)?.squeeze(&[-1])?;
    let kept = place.le(room as i64)?.reshape([tokens, top_k])?;
    Ok(kept.reshard(TOKENS)?)
}
