//! Real models: GPT-2, the Llama family (SmolLM2, Mistral, Qwen2), mixtures of experts (Mixtral,
//! Qwen3-MoE) and BERT encoders, under the names that Hugging Face has for their parameters.

mod bert;
mod export;
mod gpt2;
mod llama;
mod model;
mod moe;
mod moe_config;
mod open;
mod rope;
mod settings;
mod staged;
mod tokens;

pub use bert::{Bert, BertConfig, BertLayer};
pub use gpt2::{Gpt2, Gpt2Config, Gpt2Layer};
pub use llama::{FeedForward, Llama, LlamaConfig, LlamaLayer};
pub use model::{Model, ModelConfig};
pub use moe::{Mixture, Moe, Sparse};
pub use moe_config::MoeConfig;
pub use open::{ModelFiles, open};
pub use rope::RopeScaling;
pub use settings::Settings;
pub use tokens::Tokens;

pub(crate) use staged::{Aside, Asides, added_up};

use crate::{
    Error, Result,
    nn::{Activation, Cache},
};

/// An activation by the name that a setting has for it.
fn activation(key: &str, name: &str) -> Result<Activation> {
    Activation::named(name).ok_or_else(|| {
        let detail = format!(
            "'{name}' is not supported: gelu, gelu_new, gelu_pytorch_tanh, silu, relu and tanh are"
        );
        Error::config(key, detail)
    })
}

/// How many positions caches hold, one cache for each layer.
fn cached(caches: Option<&[Cache]>, layers: usize) -> Result<usize> {
    match caches {
        None => Ok(0),
        Some(caches) if caches.len() == layers => Ok(caches.first().map_or(0, Cache::len)),
        Some(caches) => Err(Error::config(
            "caches",
            format!("there are {} for {layers} layers", caches.len()),
        )),
    }
}

/// That a text is not longer than a model can tell apart.
fn check_length(length: usize, longest: usize) -> Result<()> {
    match length <= longest {
        true => Ok(()),
        false => Err(Error::config(
            "tokens",
            format!("{length} of them, and the model takes texts of at most {longest}"),
        )),
    }
}
