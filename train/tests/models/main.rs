//! Models: the same on every mesh, cached and uncached, kept and recomputed; and what they send.

mod bytes;
mod files;
mod parity;

use anymesh_core::{Mesh, Tensor};
use anymesh_train::{
    Build, Policy, Result,
    models::{BertConfig, Gpt2Config, LlamaConfig, Model, ModelConfig, MoeConfig, Tokens},
};

/// Small models of all families: heads, widths and vocabularies that do not divide evenly.
pub(crate) fn configs() -> Vec<(&'static str, ModelConfig)> {
    let llama = LlamaConfig {
        vocab_size: 67,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: Some(3),
        tie_word_embeddings: true,
        max_position_embeddings: 32,
        ..LlamaConfig::default()
    };
    let qwen = LlamaConfig {
        model_type: "qwen2".into(),
        tie_word_embeddings: false,
        head_dim: Some(6),
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..llama.clone()
    };
    let mixtral = MoeConfig {
        llama: LlamaConfig {
            model_type: "mixtral".into(),
            tie_word_embeddings: false,
            ..llama.clone()
        },
        num_experts: 4,
        num_experts_per_tok: 2,
        moe_intermediate_size: 40,
        norm_topk_prob: true,
        ..MoeConfig::default()
    };
    // As DeepSeek has them, with a layer without experts before.
    let qwen3 = MoeConfig {
        llama: LlamaConfig {
            model_type: "qwen3_moe".into(),
            ..qwen.clone()
        },
        num_experts: 6,
        num_experts_per_tok: 3,
        moe_intermediate_size: 20,
        first_k_dense_replace: 1,
        shared_expert_intermediate_size: Some(8),
        scoring_func: "sigmoid".into(),
        routed_scaling_factor: 1.5,
        n_group: 3,
        topk_group: 2,
        router_bias_update_rate: 0.01,
        ..mixtral.clone()
    };
    let gpt = Gpt2Config {
        vocab_size: 67,
        n_positions: 32,
        n_embd: 24,
        n_layer: 2,
        n_head: 3,
        ..Gpt2Config::default()
    };
    let bert = BertConfig {
        vocab_size: 67,
        hidden_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        intermediate_size: 40,
        max_position_embeddings: 32,
        ..BertConfig::default()
    };
    vec![
        ("llama", ModelConfig::Llama(llama)),
        ("qwen2", ModelConfig::Llama(qwen)),
        ("mixtral", ModelConfig::Moe(mixtral)),
        ("qwen3_moe", ModelConfig::Moe(qwen3)),
        ("gpt2", ModelConfig::Gpt2(gpt)),
        ("bert", ModelConfig::Bert(bert)),
    ]
}

/// A model in f64 on a mesh.
pub(crate) fn build(config: &ModelConfig, mesh: &Mesh, cut: bool) -> Result<Model> {
    let policy = Policy::named("f64")?;
    config.build(&Build::new(mesh, policy, 7).sequence_parallel(cut))
}

pub(crate) fn mesh(axes: &str) -> Result<Mesh> {
    let device = anymesh_backend_cpu::device();
    Ok(match axes {
        "" => Mesh::single(&device),
        axes => Mesh::new(axes, &device)?,
    })
}

/// Two texts of seven tokens.
pub(crate) fn texts() -> Vec<Vec<u32>> {
    let text = |seed: u32| (0..7).map(|i| (i * i * 5 + seed) % 67).collect();
    vec![text(3), text(11)]
}

pub(crate) fn tokens(mesh: &Mesh) -> Result<Tokens> {
    Tokens::of_rows(mesh, &texts())
}

pub(crate) fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    Ok(x.full_tensor()?.to_vec::<f64>()?)
}

#[track_caller]
pub(crate) fn assert_close(what: &str, a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = b.iter().fold(0f64, |m, x| m.max(x.abs()));
    let worst = a
        .iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    assert!(worst <= tolerance * scale, "{what}: {worst} of {scale}");
}
