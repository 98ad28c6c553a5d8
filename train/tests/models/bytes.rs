//! What a layer sends: the bytes of Megatron's tensor parallelism, with a whole and with a cut
//! stream.
//!
//! With `u = tokens * width * 2 * 7/8`, what a rank receives for one gather or one reduce-scatter of
//! the residual stream in bf16 over tp=8: four all-reduces are 8u, and so are four gathers and four
//! reduce-scatters.

use anymesh_core::{DType, Mesh, Tensor, meta, spmd::Ledger};
use anymesh_train::{
    Build, Module, Pass, Policy, Result,
    models::{BertConfig, Gpt2Config, LlamaConfig, Model, ModelConfig, Tokens},
};

const TOKENS: usize = 4096;
const WIDTH: usize = 8192;
const U: u64 = (TOKENS * WIDTH * 2 / 8 * 7) as u64;

fn llama(layers: usize) -> ModelConfig {
    ModelConfig::Llama(LlamaConfig {
        hidden_size: WIDTH,
        intermediate_size: 3 * WIDTH,
        num_hidden_layers: layers,
        num_attention_heads: 64,
        num_key_value_heads: Some(8),
        max_position_embeddings: TOKENS,
        ..LlamaConfig::default()
    })
}

fn gpt2(layers: usize) -> ModelConfig {
    ModelConfig::Gpt2(Gpt2Config {
        n_embd: WIDTH,
        n_layer: layers,
        n_head: 64,
        n_positions: TOKENS,
        attn_pdrop: 0.0,
        ..Gpt2Config::default()
    })
}

fn bert(layers: usize) -> ModelConfig {
    ModelConfig::Bert(BertConfig {
        hidden_size: WIDTH,
        intermediate_size: 4 * WIDTH,
        num_hidden_layers: layers,
        num_attention_heads: 64,
        max_position_embeddings: TOKENS,
        attention_probs_dropout_prob: 0.0,
        ..BertConfig::default()
    })
}

/// Bytes along tp of a forward and backward pass of the whole model without its head; gradients of
/// parameters are left as they are.
fn bytes(config: &ModelConfig, cut: bool, recompute: bool) -> Result<(u64, String)> {
    let mesh = Mesh::new("dp=8, tp=8", &meta())?;
    let policy = Policy::all(DType::BF16);
    let mut model = config.build(&Build::new(&mesh, policy, 0).sequence_parallel(cut))?;
    model.set_recompute(recompute);
    let ids = Tensor::zeros([8, TOKENS], DType::I32, (&mesh, "[@dp, _]"))?;
    let tokens = Tokens::new(ids);
    let (out, ledger) = Ledger::record(|| -> Result<()> {
        let y = model.hidden(&tokens, &Pass::train(anymesh_core::ops::Rng::new(1)), None)?;
        let gradients = y.backward_with(&y.detach())?;
        let mut result = Ok(());
        model.visit("", &mut |_, p| {
            if let Err(e) = p.partial_gradient(&gradients) {
                result = Err(e);
            }
        });
        result
    });
    out?;
    let along = ledger.entries.iter();
    let along = along.filter(|e| e.axes.iter().any(|a| a == "tp"));
    Ok((along.map(|e| e.bytes).sum(), ledger.to_string()))
}

/// What one more layer costs.
#[track_caller]
fn one_more(
    config: fn(usize) -> ModelConfig,
    cut: bool,
    recompute: bool,
    expected: u64,
) -> Result<()> {
    let (two, _) = bytes(&config(2), cut, recompute)?;
    let (three, ledger) = bytes(&config(3), cut, recompute)?;
    let found = three - two;
    let units = found as f64 / U as f64;
    assert_eq!(found, expected, "{units} u\n{ledger}");
    Ok(())
}

#[test]
fn a_llama_layer_with_a_whole_stream_sends_four_all_reduces() -> Result<()> {
    assert_eq!(8 * U, 469_762_048);
    one_more(llama, false, false, 8 * U)
}

#[test]
fn a_llama_layer_with_a_cut_stream_sends_four_gathers_and_four_scatters() -> Result<()> {
    one_more(llama, true, false, 8 * U)
}

#[test]
fn a_layer_that_runs_again_sends_its_forward_pass_again() -> Result<()> {
    one_more(llama, false, true, 12 * U)?;
    one_more(llama, true, true, 12 * U)
}

#[test]
fn a_gpt_2_layer_sends_the_same() -> Result<()> {
    one_more(gpt2, false, false, 8 * U)?;
    one_more(gpt2, true, false, 8 * U)
}

#[test]
fn a_bert_layer_sends_the_same() -> Result<()> {
    one_more(bert, false, false, 8 * U)?;
    one_more(bert, true, false, 8 * U)
}

#[test]
fn a_model_on_a_device_without_memory_costs_nothing() -> Result<()> {
    let mesh = Mesh::new("tp=8", &meta())?;
    let config = LlamaConfig {
        vocab_size: 128_256,
        hidden_size: 16_384,
        intermediate_size: 53_248,
        num_hidden_layers: 126,
        num_attention_heads: 128,
        num_key_value_heads: Some(8),
        ..LlamaConfig::default()
    };
    let model = ModelConfig::Llama(config).build(&Build::new(&mesh, Policy::bf16(), 0))?;
    assert!(matches!(model, Model::Llama(_)));
    assert_eq!(model.count(), 405_853_388_800);
    Ok(())
}
