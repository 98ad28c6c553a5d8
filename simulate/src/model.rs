//! A transformer as numbers: what it has, and what a token costs.

use crate::{Error, Result, layout::Attention};
use serde::{Deserialize, Serialize};

/// The shape of a decoder. [`presets`](crate::presets) has known ones.
///
/// ```
/// let model = anymesh_simulate::preset("llama-3-8b")?.model;
/// assert_eq!(model.parameters(), 8_030_261_248.0);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// What it is called.
    pub name: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Heads of keys and values; as many as `heads`, or fewer that are shared.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_size: usize,
    /// Width between the products of a dense feed-forward block.
    pub ffn: usize,
    /// Whether that block has a gate (SwiGLU): three matrices, not two.
    #[serde(default)]
    pub gated: bool,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Whether the output product has the embedding's weights.
    #[serde(default)]
    pub tied: bool,
    /// Learned positions; 0 where positions are rotations.
    #[serde(default)]
    pub positions: usize,
    /// Whether products and norms have biases.
    #[serde(default)]
    pub biases: bool,
    /// Whether it is trained with dropout, whose masks are kept.
    #[serde(default)]
    pub dropout: bool,
    /// Mixture of experts.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// Attention through small latent vectors (MLA).
    #[serde(default)]
    pub latent: Option<Latent>,
}

/// The experts of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Experts that tokens choose from.
    pub routed: usize,
    /// Experts that every token goes through.
    #[serde(default)]
    pub shared: usize,
    /// How many a token chooses.
    pub top_k: usize,
    /// Width between the products of an expert.
    pub width: usize,
    /// Layers at the beginning that have a dense block.
    #[serde(default)]
    pub dense_layers: usize,
    /// The most nodes that a token is sent to; 0: no limit.
    #[serde(default)]
    pub nodes: usize,
}

/// Widths of latent attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Width of the queries' latent vector.
    pub queries: usize,
    /// Width of the keys' and values' latent vector.
    pub keys: usize,
    /// The part of a head's keys that is rotated, and shared by all heads.
    pub rotated: usize,
    /// The part that is not.
    pub plain: usize,
    /// Width of a head's values.
    pub values: usize,
}

/// Parameters of a layer, by how they can be cut.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weights {
    /// Matrices (and their biases) that tensor parallel ranks share.
    pub cut: f64,
    /// What every tensor parallel rank has whole: norms, routers, projections to latent vectors.
    pub whole: f64,
    /// Of routed experts.
    pub experts: f64,
}

impl Weights {
    /// All of them.
    pub fn all(&self) -> f64 {
        self.cut + self.whole + self.experts
    }
}

impl Model {
    /// Width of a head's queries and keys.
    pub(crate) fn key_size(&self) -> usize {
        (self.latent.as_ref()).map_or(self.head_size, |l| l.plain + l.rotated)
    }

    /// Width of a head's values.
    pub(crate) fn value_size(&self) -> usize {
        (self.latent.as_ref()).map_or(self.head_size, |l| l.values)
    }

    /// Matrices of a feed-forward block: two, or three with a gate.
    pub(crate) fn matrices(&self) -> usize {
        2 + usize::from(self.gated)
    }

    /// Whether a layer has experts.
    pub fn has_experts(&self, layer: usize) -> bool {
        (self.experts.as_ref()).is_some_and(|e| layer >= e.dense_layers)
    }

    /// The parameters of a layer.
    pub fn weights(&self, layer: usize) -> Weights {
        let n = |x: usize| x as f64;
        let h = n(self.hidden);
        let bias = if self.biases { 1.0 } else { 0.0 };
        let mut weights = Weights {
            whole: 2.0 * h * (1.0 + bias),
            ..Weights::default()
        };
        let [cut, whole] = self.attention_matrices();
        weights.cut += cut;
        weights.whole += whole;
        match &self.latent {
            Some(l) => weights.whole += n(l.queries + l.keys),
            None => {
                weights.cut += bias * n((self.heads + 2 * self.kv_heads) * self.head_size);
                weights.whole += bias * h;
            }
        }
        let block = n(self.matrices()) * h;
        match self.experts.as_ref().filter(|_| self.has_experts(layer)) {
            Some(e) => {
                weights.whole += h * n(e.routed) + n(e.routed);
                weights.cut += block * n(e.shared * e.width);
                weights.experts += block * n(e.routed * e.width);
            }
            None => {
                weights.cut += block * n(self.ffn);
                weights.cut += bias * n(self.ffn * (self.matrices() - 1));
                weights.whole += bias * h;
            }
        }
        weights
    }

    /// Parameters of the embedding of tokens; the output product has as many.
    pub fn embedding(&self) -> f64 {
        self.vocabulary as f64 * self.hidden as f64
    }

    /// Parameters of the last norm.
    pub(crate) fn last_norm(&self) -> f64 {
        self.hidden as f64 * if self.biases { 2.0 } else { 1.0 }
    }

    /// All parameters, those that are tied once.
    pub fn parameters(&self) -> f64 {
        let layers: f64 = (0..self.layers).map(|l| self.weights(l).all()).sum();
        let ends = if self.tied { 1.0 } else { 2.0 } * self.embedding();
        let positions = self.positions as f64 * self.hidden as f64;
        layers + ends + positions + self.last_norm()
    }

    /// Parameters that a token meets: of its experts only those that it chose.
    pub fn active(&self) -> f64 {
        let unused = self.experts.as_ref().map_or(0.0, |e| {
            let share = 1.0 - e.top_k as f64 / e.routed as f64;
            let layers = 0..self.layers;
            share * layers.map(|l| self.weights(l).experts).sum::<f64>()
        });
        self.parameters() - unused
    }

    /// Elements of attention's matrices that tensor parallel ranks share, and of those that they have
    /// whole.
    fn attention_matrices(&self) -> [f64; 2] {
        let n = |x: usize| x as f64;
        let h = n(self.hidden);
        let keys = n(self.heads * self.key_size());
        let values = n(self.heads * self.value_size());
        match &self.latent {
            Some(l) => {
                let up = n(l.queries) * keys + n(l.keys) * n(self.heads * (l.plain + l.values));
                [up + values * h, h * n(l.queries + l.keys + l.rotated)]
            }
            None => {
                let qkv = n((self.heads + 2 * self.kv_heads) * self.head_size);
                [h * qkv + values * h, 0.0]
            }
        }
    }

    /// Operations of the products of a forward pass for a token, without attention's own.
    fn products(&self) -> f64 {
        let h = self.hidden as f64;
        let block = |layer: usize| {
            let width = match self.experts.as_ref().filter(|_| self.has_experts(layer)) {
                Some(e) => {
                    let router = e.routed as f64 * h;
                    return router
                        + self.matrices() as f64 * h * ((e.top_k + e.shared) * e.width) as f64;
                }
                None => self.ffn,
            };
            self.matrices() as f64 * h * width as f64
        };
        let attention: f64 = self.attention_matrices().iter().sum();
        let layers: f64 = (0..self.layers).map(|l| attention + block(l)).sum();
        2.0 * (layers + self.embedding())
    }

    /// Operations of attention in a forward pass for a token of a sequence, in all layers: the whole
    /// square as a plain kernel has it, or its causal half.
    pub fn attention(&self, sequence: usize, kernel: Attention) -> f64 {
        let widths = (self.heads * (self.key_size() + self.value_size())) as f64;
        let whole = 2.0 * sequence as f64 * widths * self.layers as f64;
        whole * kernel.share()
    }

    /// Operations of a training step for a token: three times a forward pass.
    ///
    /// With a plain kernel and the shape of GPT this is 72 L h² (1 + s/6h + v/12hL) (arXiv 2205.05198,
    /// appendix A).
    pub fn flops(&self, sequence: usize, kernel: Attention) -> f64 {
        3.0 * (self.products() + self.attention(sequence, kernel))
    }

    /// Refuses numbers that no model has.
    pub fn check(&self) -> Result<()> {
        let least = [
            ("layers", self.layers),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_size", self.head_size),
            ("ffn", self.ffn),
            ("vocabulary", self.vocabulary),
        ];
        let experts = self.experts.iter().flat_map(|e| {
            [
                ("experts.routed", e.routed),
                ("experts.top_k", e.top_k),
                ("experts.width", e.width),
            ]
        });
        let latent = self.latent.iter().flat_map(|l| {
            [
                ("latent.queries", l.queries),
                ("latent.keys", l.keys),
                ("latent.plain", l.plain),
                ("latent.values", l.values),
            ]
        });
        for (what, got) in least.into_iter().chain(experts).chain(latent) {
            number(&format!("the model's {what}"), got, 1 << 24)?;
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(crate::layout::divide(
                "heads",
                self.heads,
                "kv_heads",
                self.kv_heads,
            ));
        }
        match &self.experts {
            Some(e) if e.top_k > e.routed => Err(Error::Number {
                what: "the model's experts.top_k".into(),
                got: e.top_k.to_string(),
                valid: format!("there are only {} experts", e.routed),
            }),
            _ => Ok(()),
        }
    }
}

/// Refuses 0 and what is beyond anything that is.
pub(crate) fn number(what: &str, got: usize, most: usize) -> Result<()> {
    match (1..=most).contains(&got) {
        true => Ok(()),
        false => Err(Error::Number {
            what: what.into(),
            got: got.to_string(),
            valid: format!("it is between 1 and {most}"),
        }),
    }
}
