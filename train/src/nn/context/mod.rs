//! Long sequences: attention where the sequence is cut over the mesh axis `cp`.
//!
//! Everything else in a model works on each position by itself and needs to know nothing of it. What
//! attention does is one of three ways ([`ContextAttention`]), and the order of the sequence
//! ([`SequenceOrder`]) is such that all ranks have as much to look at. The order is that of the data:
//! a loader puts tokens, labels, documents and positions in it, a [`Batch`](crate::data::Batch) says
//! which one it has, and rotary tables and masks follow.

mod attend;

pub(crate) use attend::across;

use super::Heads;
use crate::{Error, Result};
use anymesh_core::{Mesh, Tensor, ops::SequenceOrder};
use serde::{Deserialize, Serialize};

/// The mesh axis that cuts the sequence.
pub(crate) const AXIS: &str = "cp";

/// How attention looks along a sequence that is cut over `cp`.
///
/// With `p` a rank's part of keys or of values, `q` of queries, and `R` ranks, a rank receives
///
/// | | forward | backward | holds |
/// |---|---|---|---|
/// | `Heads` | `(2q + 2p) (R-1)/R` | the same | its part, of fewer heads |
/// | `Gather` | `2p (R-1)` | `2p (R-1)` | all keys and values |
/// | `Ring` | `2p (R-1)` | `4p (R-1)` | two parts of keys and values |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContextAttention {
    /// `Heads` where the heads of keys and of queries divide by the ranks, else `Gather`.
    #[default]
    Auto,
    /// Ranks exchange queries, keys and values so that each has whole sequences of some heads
    /// (Ulysses). The heads of keys must divide by `tp * cp`.
    Heads,
    /// Keys and values are gathered (Llama 3).
    Gather,
    /// Keys and values go from rank to rank, and no rank ever has all of them.
    Ring,
}

impl ContextAttention {
    /// Its name in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Heads => "heads",
            Self::Gather => "gather",
            Self::Ring => "ring",
        }
    }

    /// The way for these heads on a mesh: never [`Auto`](Self::Auto), and an error where heads
    /// cannot be exchanged.
    pub fn on(self, mesh: &Mesh, heads: Heads) -> Result<Self> {
        let size = |name: &str| mesh.axis(name).map_or(1, |axis| mesh.size(axis));
        let (tp, cp) = (size("tp"), size(AXIS));
        let divide = heads.keys.is_multiple_of(tp * cp) && heads.queries.is_multiple_of(tp * cp);
        match self {
            Self::Auto if divide => Ok(Self::Heads),
            Self::Auto => Ok(Self::Gather),
            Self::Heads if !divide => Err(Error::config(
                "context.attention",
                format!(
                    "heads: {} heads of queries and {} of keys do not divide over tp * cp = {} ranks: take gather or ring, or auto, which takes gather here",
                    heads.queries,
                    heads.keys,
                    tp * cp
                ),
            )),
            other => Ok(other),
        }
    }
}

/// How long sequences are computed, where the mesh has an axis `cp`.
///
/// ```
/// # use anymesh_core::{Mesh, ops::SequenceOrder};
/// # use anymesh_train::nn::{Context, ContextAttention, Heads};
/// # let device = anymesh_backend_cpu::device();
/// let (mesh, heads) = (Mesh::new("cp=4", &device)?, Heads { queries: 8, keys: 2, size: 16 });
/// let context = Context::default();
/// // Two heads of keys cannot be exchanged over four ranks.
/// assert_eq!(context.attention.on(&mesh, heads)?, ContextAttention::Gather);
/// assert_eq!(context.order(&mesh, heads, 1024)?, SequenceOrder::Paired { ranks: 4 });
/// // A length that does not divide into pairs of chunks stays as it is, unless pairs are asked for.
/// assert_eq!(context.order(&mesh, heads, 1020)?, SequenceOrder::Straight);
/// assert!(Context { balance: Some(true), ..context }.order(&mesh, heads, 1020).is_err());
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Context {
    /// How attention looks along the sequence.
    pub attention: ContextAttention,
    /// Whether the sequence comes in pairs of chunks, so that all ranks have as much to do where each
    /// position sees those before it. Where it is not said: yes where it helps (not with exchanged
    /// heads, whose ranks have as much to do anyway) and the length divides by `2 * cp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<bool>,
}

impl Context {
    /// The order of causal sequences of this length, for a model with these heads on a mesh.
    pub fn order(&self, mesh: &Mesh, heads: Heads, length: usize) -> Result<SequenceOrder> {
        let ranks = mesh.axis(AXIS).map_or(1, |axis| mesh.size(axis));
        if ranks == 1 {
            return Ok(SequenceOrder::Straight);
        }
        let way = self.attention.on(mesh, heads)?;
        let (paired, even) = (
            SequenceOrder::paired(ranks),
            length.is_multiple_of(2 * ranks),
        );
        match self.balance {
            Some(false) => Ok(SequenceOrder::Straight),
            None if way == ContextAttention::Heads || !even => Ok(SequenceOrder::Straight),
            Some(true) if !even => {
                let below = length / (2 * ranks) * 2 * ranks;
                let detail = format!(
                    "{length} positions do not divide into {} chunks, two for each rank of cp: {below} or {} do, and any length without balance",
                    2 * ranks,
                    below + 2 * ranks
                );
                Err(Error::config("context.balance", detail))
            }
            Some(true) | None => Ok(paired),
        }
    }
}

/// Whether a dimension of a tensor is cut over `cp`.
pub(crate) fn is_cut(x: &Tensor, dim: usize) -> bool {
    let axis = x.mesh().axis(AXIS);
    axis.is_ok_and(|axis| x.sharding().axes_of(dim).any(|a| a == axis))
}
