//! Mixtures of experts with the layers of Llama: Mixtral, Qwen3-MoE.

use super::{
    llama::{FeedForward, Llama},
    moe_config::MoeConfig,
    staged::{Aside, Stack},
};
use crate::{
    Build, Module, Param, Result,
    nn::{GatedMlp, experts::Experts, is_cut},
    pipeline::Split,
};
use anymesh_core::Tensor;

/// What is in the place of a layer's MLP.
#[derive(Clone, Debug)]
pub enum Mixture {
    /// One MLP for all tokens.
    Dense(GatedMlp),
    /// Experts.
    Sparse(Sparse),
}

/// Experts, and how much what balances them weighs.
#[derive(Clone, Debug, Module)]
pub struct Sparse {
    /// The experts.
    #[name = ""]
    pub experts: Experts,
    /// The weights of the loss that balances experts and of that of the router's logits.
    #[skip]
    weights: [f64; 2],
}

impl Sparse {
    fn new(b: &Build, c: &MoeConfig) -> Result<Self> {
        let sizes = [c.llama.hidden_size, c.moe_intermediate_size];
        let shared = c.shared_expert_intermediate_size;
        let inits = c.llama.inits();
        let mut experts = Experts::new(b, sizes, c.routing()?, c.capacity(), shared, inits)?;
        if c.router_bias_update_rate > 0.0 {
            experts = experts.with_bias(b)?;
        }
        Ok(Self {
            experts,
            weights: [c.router_aux_loss_coef, c.router_z_loss_coef],
        })
    }

    /// Values that a token passes by: those of the experts that it does not go to.
    fn idle(&self) -> usize {
        let routing = self.experts.routing();
        let stacks = [
            &self.experts.gate_proj,
            &self.experts.up_proj,
            &self.experts.down_proj,
        ];
        let all: usize = stacks.iter().map(|p| p.value().numel()).sum();
        all / routing.experts * (routing.experts - routing.top_k)
    }
}

impl Module for Mixture {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        match self {
            Self::Dense(mlp) => mlp.visit(path, f),
            Self::Sparse(sparse) => sparse.visit(path, f),
        }
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        match self {
            Self::Dense(mlp) => mlp.visit_mut(path, f),
            Self::Sparse(sparse) => sparse.visit_mut(path, f),
        }
    }
}

impl FeedForward for Mixture {
    fn feed(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let sparse = match self {
            Self::Dense(mlp) => return mlp.feed(x),
            Self::Sparse(sparse) => sparse,
        };
        let [b, s, width] = *x.dims() else {
            let detail = format!("the stream is [b, s, width], got {}", x.type_string());
            return Err(crate::Error::config("experts", detail));
        };
        let (y, routed) = sparse.experts.forward(&x.reshape([b * s, width])?, None)?;
        let mut y = y.reshape([b, s, width])?;
        // Ranks along `cp` have all tokens of their rows here, and go on with their own.
        if is_cut(x, 1) {
            y = y.reshard(x.sharding())?;
        }
        let mut gave = vec![y, routed.counts()?, routed.dropped()?];
        let [balance, z] = sparse.weights;
        let mut loss: Option<Tensor> = None;
        if b * s > 0 && balance > 0.0 {
            loss = Some(routed.balance_loss()?.mul(balance)?);
        }
        if b * s > 0 && z > 0.0 {
            let z = routed.z_loss()?.mul(z)?;
            loss = Some(match loss {
                Some(balance) => balance.add(&z)?,
                None => z,
            });
        }
        gave.extend(loss);
        Ok(gave)
    }
}

/// A mixture of experts. Inside, the experts of a layer are stacks `[experts, .., ..]` cut over the
/// axis `ep`; files of Hugging Face have each by itself, and are read and written as such.
///
/// ```
/// # use anymesh_core::Mesh;
/// # use anymesh_train::{Build, Module, Pass, Policy, models::{LlamaConfig, Moe, MoeConfig, Tokens}};
/// # let device = anymesh_backend_cpu::device();
/// let config = MoeConfig {
///     llama: LlamaConfig {
///         model_type: "mixtral".into(), vocab_size: 64, hidden_size: 16, intermediate_size: 32,
///         num_hidden_layers: 2, num_attention_heads: 4, ..LlamaConfig::default()
///     },
///     num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32,
///     ..MoeConfig::default()
/// };
/// let mesh = Mesh::new("dp=2, ep=2", &device)?;
/// let model = Moe::new(&Build::new(&mesh, Policy::f32(), 1), &config)?;
/// let tokens = Tokens::of_rows(&mesh, &vec![vec![1, 2, 3]; 4])?;
/// let logits = model.llama.logits(&tokens, &Pass::eval(), None)?;
/// assert_eq!(logits.type_string(), "f32[4@dp@ep, 3, 64]");
/// assert!(model.names().contains(&"model.layers.1.mlp.experts.gate_proj".to_string()));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug, Module)]
#[tied = "aliases"]
pub struct Moe {
    /// All of it.
    #[name = ""]
    pub llama: Llama<Mixture>,
    #[skip]
    config: MoeConfig,
}

impl MoeConfig {
    /// The stages of its layers, by their multiplications for a token.
    pub(crate) fn split(&self, b: &Build) -> Result<Split> {
        let c = self;
        let attention = c.llama.attention_cost()?;
        let shared = c.shared_expert_intermediate_size.unwrap_or(0);
        let active = c.num_experts_per_tok * c.moe_intermediate_size + shared;
        let cost = |layer: usize| match c.has_experts(layer) {
            true => (attention + c.llama.mlp_cost(active)) as f64,
            false => (attention + c.llama.mlp_cost(c.llama.intermediate_size)) as f64,
        };
        let costs: Vec<f64> = (0..c.llama.num_hidden_layers).map(cost).collect();
        c.llama.split_by(b, &costs)
    }
}

impl Moe {
    /// A new one.
    pub fn new(b: &Build, config: &MoeConfig) -> Result<Self> {
        config.check()?;
        let c = config;
        let sizes = [c.llama.hidden_size, c.llama.intermediate_size];
        let [init, out] = c.llama.inits();
        let llama = Llama::with_mlps(b, &c.llama, c.split(b)?, |b, layer| {
            Ok(match c.has_experts(layer) {
                true => Mixture::Sparse(Sparse::new(b, c)?),
                false => Mixture::Dense(GatedMlp::new(b, sizes, false, init, out)?),
            })
        })?;
        let config = config.clone();
        Ok(Self { llama, config })
    }

    /// The settings.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// Says how many tokens there are after embedding and head have grown.
    pub(crate) fn set_vocabulary(&mut self, tokens: usize) {
        self.config.llama.vocab_size = tokens;
    }

    /// Values of parameters that a token passes by.
    pub(crate) fn idle(&self) -> usize {
        let idle = |mlp: &Mixture| match mlp {
            Mixture::Dense(_) => 0,
            Mixture::Sparse(sparse) => sparse.idle(),
        };
        self.llama.layers.iter().map(|layer| idle(&layer.mlp)).sum()
    }

    /// Moves the biases of routers by what a step's tokens did, where they have biases.
    pub(crate) fn balance(&mut self, seen: &[Aside]) -> Result<()> {
        let rate = self.config.router_bias_update_rate;
        for aside in seen {
            let layer = self.llama.layers.get_mut(aside.layer).map(|l| &mut l.mlp);
            if let Some(Mixture::Sparse(sparse)) = layer {
                sparse.experts.gate.balance(&aside.counts, rate)?;
            }
        }
        Ok(())
    }

    pub(crate) fn stack(&self) -> &dyn Stack {
        &self.llama
    }

    fn aliases(&self) -> Vec<(String, String)> {
        self.llama.aliases()
    }

    /// From the names of a Hugging Face folder to ours, in the language of
    /// [mappings](anymesh_checkpoint::map).
    pub fn mapping(config: &MoeConfig) -> String {
        let (width, inner) = (config.llama.hidden_size, config.moe_intermediate_size);
        let mixtral = config.llama.model_type == "mixtral";
        let (theirs, parts) = match mixtral {
            true => ("block_sparse_moe", ["w1", "w3", "w2"]),
            false => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let mut text = String::new();
        for layer in (0..config.llama.num_hidden_layers).filter(|l| config.has_experts(*l)) {
            let at = format!("model.layers.{layer}");
            if mixtral {
                text += &format!("{at}.{theirs}.gate.weight -> {at}.mlp.gate.weight\n");
            }
            let ours = ["gate_proj", "up_proj", "down_proj"];
            for (part, ours) in parts.iter().zip(ours) {
                let [rows, columns] = match ours {
                    "down_proj" => [width, inner],
                    _ => [inner, width],
                };
                let each = |e: usize| format!("{at}.{theirs}.experts.{e}.{part}.weight");
                let all: Vec<String> = (0..config.num_experts).map(each).collect();
                text += &format!(
                    "{} -> {at}.mlp.experts.{ours}, src_shape=\"[{rows}, {columns}]\", dst_shape=\"[1, {rows}, {columns}]\", axis=0\n",
                    all.join(", ")
                );
            }
        }
        text
    }
}
