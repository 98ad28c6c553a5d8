//! The settings of mixtures of experts.

use super::{
    llama::LlamaConfig,
    settings::{Settings, above_zero, positive, read_strictly, write},
};
use crate::{
    Error, Result,
    nn::experts::{Capacity, Routing, Scoring},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The settings of a mixture of experts with the layers of Llama: Mixtral, Qwen3-MoE, and what else
/// its numbers can say. Names and defaults are those of Hugging Face, where it has them: those of
/// `mixtral` or `qwen3_moe`, as `model_type` says. Its `shared_expert_intermediate_size`,
/// `scoring_func`, `routed_scaling_factor`, `n_group`, `topk_group` and `first_k_dense_replace` are
/// DeepSeek's; the last four below are our own.
///
/// ```
/// # use anymesh_train::models::ModelConfig;
/// let json = r#"{"model_type": "mixtral", "num_local_experts": 4, "hidden_size": 64}"#;
/// let ModelConfig::Moe(config) = serde_json::from_str(json)? else { panic!() };
/// assert_eq!((config.num_experts, config.num_experts_per_tok), (4, 2));
/// assert_eq!(config.llama.rms_norm_eps, 1e-5);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoeConfig {
    /// Everything that is not about experts. Its `intermediate_size` is that of the layers without.
    #[serde(flatten)]
    pub llama: LlamaConfig,
    /// Experts; `num_local_experts` says the same.
    pub num_experts: usize,
    /// How many of them a token goes to.
    pub num_experts_per_tok: usize,
    /// The width of an expert; `intermediate_size` of Mixtral.
    pub moe_intermediate_size: usize,
    /// Whether the weights of a token are made to add up to 1. Mixtral's always are.
    pub norm_topk_prob: bool,
    /// Every so many layers have experts.
    pub decoder_sparse_step: usize,
    /// Layers that have none.
    pub mlp_only_layers: Vec<usize>,
    /// So many first layers have none.
    pub first_k_dense_replace: usize,
    /// The width of an MLP that all tokens go through beside their experts.
    pub shared_expert_intermediate_size: Option<usize>,
    /// What scores are made of logits: `softmax`, `topk_softmax` (of the chosen ones alone) or
    /// `sigmoid`.
    pub scoring_func: String,
    /// What weights are multiplied with at last.
    pub routed_scaling_factor: f64,
    /// Groups that experts are in.
    pub n_group: usize,
    /// How many of the groups a token may go to.
    pub topk_group: usize,
    /// The weight of the loss that balances experts.
    pub router_aux_loss_coef: f64,
    /// The weight of the loss that keeps the router's logits small.
    pub router_z_loss_coef: f64,
    /// How far a step moves the bias of experts that balances them; without one where it is 0.
    pub router_bias_update_rate: f64,
    /// How many times its even share an expert takes; all that come where it is not given.
    pub expert_capacity_factor: Option<f64>,
}

impl Default for MoeConfig {
    fn default() -> Self {
        Self::of_type("qwen3_moe")
    }
}

impl MoeConfig {
    /// The kinds of models there are.
    pub(crate) const TYPES: [&'static str; 2] = ["mixtral", "qwen3_moe"];

    /// The defaults of a kind of model.
    fn of_type(kind: &str) -> Self {
        let qwen = Self {
            llama: LlamaConfig {
                model_type: "qwen3_moe".into(),
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 6144,
                num_hidden_layers: 24,
                num_key_value_heads: Some(4),
                max_position_embeddings: 32_768,
                ..LlamaConfig::default()
            },
            num_experts: 128,
            num_experts_per_tok: 8,
            moe_intermediate_size: 768,
            norm_topk_prob: false,
            decoder_sparse_step: 1,
            mlp_only_layers: vec![],
            first_k_dense_replace: 0,
            shared_expert_intermediate_size: None,
            scoring_func: "softmax".into(),
            routed_scaling_factor: 1.0,
            n_group: 1,
            topk_group: 1,
            router_aux_loss_coef: 0.001,
            router_z_loss_coef: 0.0,
            router_bias_update_rate: 0.0,
            expert_capacity_factor: None,
        };
        if kind != "mixtral" {
            return qwen;
        }
        Self {
            llama: LlamaConfig {
                model_type: "mixtral".into(),
                intermediate_size: 14_336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                ..LlamaConfig::default()
            },
            num_experts: 8,
            num_experts_per_tok: 2,
            moe_intermediate_size: 14_336,
            norm_topk_prob: true,
            ..qwen
        }
    }

    /// From `config.json`. A setting that changes what a model computes and is not supported is an
    /// error that names it.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let kind = settings.get("model_type").and_then(Value::as_str);
        let jitter = settings.get("router_jitter_noise").and_then(Value::as_f64);
        if jitter.is_some_and(|jitter| jitter != 0.0) {
            let detail = "routers without noise are supported: set it to 0";
            return Err(Error::config("router_jitter_noise", detail));
        }
        let mut given = Self::renamed(settings);
        let defaults = write(&Self::of_type(kind.unwrap_or_default()))?;
        for (key, value) in &defaults {
            if given.get(key).is_none_or(Value::is_null) {
                given.insert(key.clone(), value.clone());
            }
        }
        // Rope has several forms, and windows may be off: what is shared knows them.
        let llama = LlamaConfig::read(&given)?;
        given.retain(|key, _| defaults.contains_key(key));
        for (key, value) in write(&llama)? {
            given.insert(key, value);
        }
        Self::strictly(given)
    }

    /// From settings all of which must be known.
    pub(crate) fn from_strict(settings: &Settings) -> Result<Self> {
        let kind = settings.get("model_type").and_then(Value::as_str);
        let mut all = write(&Self::of_type(kind.unwrap_or_default()))?;
        all.extend(Self::renamed(settings));
        Self::strictly(all)
    }

    fn strictly(settings: Settings) -> Result<Self> {
        let config: Self = read_strictly(&settings)?;
        config.check()?;
        Ok(config)
    }

    /// Settings under the names that there are here.
    fn renamed(settings: &Settings) -> Settings {
        let mut given = settings.clone();
        // Transformers 5 writes Mixtral's name for all.
        if let Some(experts) = given.remove("num_local_experts") {
            given.entry("num_experts").or_insert(experts);
        }
        let mixtral = given.get("model_type") == Some(&json!("mixtral"));
        if let (true, Some(inner)) = (mixtral, given.get("intermediate_size").cloned()) {
            given.entry("moe_intermediate_size").or_insert(inner);
        }
        given
    }

    /// As `config.json` has them, with the class that Hugging Face has for the model.
    pub(crate) fn to_settings(&self) -> Result<(Settings, &'static str)> {
        let mut settings = write(self)?;
        // Those who read it have other numbers in mind where it is not said.
        let keys = self.llama.heads()?.keys;
        settings.insert("num_key_value_heads".into(), keys.into());
        if self.llama.model_type != "mixtral" {
            return Ok((settings, "Qwen3MoeForCausalLM"));
        }
        let (always, shared) = (write(&Self::of_type("mixtral"))?, write(&self.llama)?);
        settings.insert("num_local_experts".into(), self.num_experts.into());
        settings.retain(|key, value| match key.as_str() {
            "num_local_experts" | "num_experts_per_tok" | "router_aux_loss_coef" => true,
            "num_experts" => false,
            "moe_intermediate_size" => self.moe_intermediate_size != self.llama.intermediate_size,
            // What Mixtral has no word for is said where it is not as always.
            _ => shared.contains_key(key) || always.get(key) != Some(value),
        });
        Ok((settings, "MixtralForCausalLM"))
    }

    /// That the settings fit together.
    pub fn check(&self) -> Result<()> {
        let kind = self.llama.model_type.as_str();
        if !Self::TYPES.contains(&kind) {
            let detail = format!("'{kind}' is not mixtral or qwen3_moe");
            return Err(Error::config("model_type", detail));
        }
        self.llama.check_sizes()?;
        positive(&[
            ("num_experts", self.num_experts),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("decoder_sparse_step", self.decoder_sparse_step),
        ])?;
        if self.llama.mlp_bias {
            return Err(Error::config("mlp_bias", "experts have none"));
        }
        let weights = [
            ("router_aux_loss_coef", self.router_aux_loss_coef),
            ("router_z_loss_coef", self.router_z_loss_coef),
            ("router_bias_update_rate", self.router_bias_update_rate),
        ];
        for (key, value) in weights {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::config(key, format!("{value} is not 0 or more")));
            }
        }
        if let Some(factor) = self.expert_capacity_factor {
            above_zero("expert_capacity_factor", factor)?;
        }
        if let Some(layer) = self.mlp_only_layers.iter().max()
            && *layer >= self.llama.num_hidden_layers
        {
            let detail = format!(
                "there is no layer {layer}: the model has {}",
                self.llama.num_hidden_layers
            );
            return Err(Error::config("mlp_only_layers", detail));
        }
        self.routing()?.check().map_err(|error| match error {
            Error::Config { key, detail } => {
                let theirs = match key.as_str() {
                    "experts.top_k" => "num_experts_per_tok",
                    "experts.groups" => "n_group",
                    "experts.scale" => "routed_scaling_factor",
                    _ => "num_experts",
                };
                Error::config(theirs, detail)
            }
            other => other,
        })
    }

    /// How tokens are routed.
    pub fn routing(&self) -> Result<Routing> {
        Ok(Routing {
            experts: self.num_experts,
            top_k: self.num_experts_per_tok,
            scoring: match self.scoring_func.as_str() {
                "softmax" => Scoring::SoftmaxFirst,
                "topk_softmax" => Scoring::SoftmaxLast,
                "sigmoid" => Scoring::Sigmoid,
                other => {
                    let detail = format!("'{other}' is not softmax, topk_softmax or sigmoid");
                    return Err(Error::config("scoring_func", detail));
                }
            },
            renormalise: self.norm_topk_prob,
            scale: self.routed_scaling_factor,
            groups: match self.n_group {
                1 => None,
                groups => Some((groups, self.topk_group)),
            },
        })
    }

    /// How many tokens an expert takes.
    pub fn capacity(&self) -> Capacity {
        match self.expert_capacity_factor {
            Some(factor) => Capacity::Factor(factor),
            None => Capacity::All,
        }
    }

    /// Whether a layer has experts.
    pub fn has_experts(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace
            && !self.mlp_only_layers.contains(&layer)
            && (layer + 1).is_multiple_of(self.decoder_sparse_step)
    }
}
