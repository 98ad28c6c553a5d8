//! What ranks receive, against the formulas.

use super::support::{Way, llama, model};
use anymesh_core::{
    DType, Mesh, Tensor, meta,
    ops::SequenceOrder,
    spmd::{Entry, Ledger},
};
use anymesh_train::{
    Build, Init, Pass, Policy, Result,
    models::{LlamaConfig, ModelConfig, Tokens},
    nn::{Attend, Attention, AttentionBias, Context, ContextAttention, Heads},
};

const RANKS: u64 = 4;
const LENGTH: usize = 1024;
const HEADS: Heads = Heads {
    queries: 16,
    keys: 8,
    size: 32,
};

/// Bytes along cp of the forward and of the backward pass of an attention layer.
fn received(context: ContextAttention, order: SequenceOrder) -> Result<(u64, u64)> {
    let mesh = Mesh::new("dp=2, cp=4, tp=2", &meta())?;
    let b = Build::new(&mesh, Policy::all(DType::F32), 0);
    let (width, init) = (HEADS.queries * HEADS.size, Init::Normal(0.02));
    let layer = Attention::new(&b, width, HEADS, AttentionBias::None, init, init)?;
    let x = Tensor::zeros([2, LENGTH, width], DType::F32, (&mesh, "[@dp, @cp, _]"))?;
    let attend = Attend {
        causal: true,
        order,
        context,
        ..Attend::default()
    };
    let along = |ledger: &Ledger| -> u64 {
        let over = |e: &&Entry| e.axes.iter().any(|axis| axis == "cp");
        ledger.entries.iter().filter(over).map(|e| e.bytes).sum()
    };
    let x = x.require_grad()?;
    let (y, forward) = Ledger::record(|| layer.forward(&x, &attend, None));
    let y = y?;
    let (done, backward) = Ledger::record(|| y.backward_with(&y.detach()).map(|_| ()));
    done?;
    Ok((along(&forward), along(&backward)))
}

#[test]
fn each_way_sends_what_its_formula_says() -> Result<()> {
    // A rank's part of keys, and of queries: half of the heads, a quarter of the sequence, one of
    // two texts.
    let part = |heads: usize| (heads / 2 * LENGTH / 4 * HEADS.size * 4) as u64;
    let (p, q) = (part(HEADS.keys), part(HEADS.queries));
    for order in [SequenceOrder::Straight, SequenceOrder::Paired { ranks: 4 }] {
        let exchanged = (2 * q + 2 * p) * (RANKS - 1) / RANKS;
        let heads = received(ContextAttention::Heads, order)?;
        assert_eq!(heads, (exchanged, exchanged), "{order:?}");
        let gathered = 2 * p * (RANKS - 1);
        let gather = received(ContextAttention::Gather, order)?;
        assert_eq!(gather, (gathered, gathered), "{order:?}");
        let ring = received(ContextAttention::Ring, order)?;
        assert_eq!(ring, (gathered, 2 * gathered), "{order:?}");
        // Eight heads of keys divide over four ranks of cp and two of tp.
        assert_eq!(received(ContextAttention::Auto, order)?, heads);
    }
    Ok(())
}

#[test]
fn types_of_a_model_on_a_device_without_memory() -> Result<()> {
    let config = ModelConfig::Llama(LlamaConfig {
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        num_hidden_layers: 2,
        num_attention_heads: 32,
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        ..LlamaConfig::default()
    });
    for (attention, cp) in [
        (ContextAttention::Heads, 2),
        (ContextAttention::Gather, 16),
        (ContextAttention::Ring, 16),
    ] {
        let mesh = Mesh::new(&format!("dp=4, cp={cp}, tp=4"), &meta())?;
        let way = Way {
            context: Context {
                attention,
                balance: Some(true),
            },
            dtype: DType::BF16,
            sequence_parallel: true,
            ..Way::default()
        };
        let model = model(&mesh, &config, &way)?;
        let place = (&mesh, "[@dp, @cp]");
        let zeros = || Tensor::zeros([4, 131_072], DType::I32, place);
        let tokens = Tokens::packed(zeros()?, &zeros()?, zeros()?)?;
        let tokens = tokens.in_order(model.order(131_072)?);
        let logits = model.logits(&tokens, &Pass::eval(), None)?;
        assert_eq!(
            logits.type_string(),
            "bf16[4@dp, 131072@cp, 128256@tp]",
            "{attention:?}"
        );
        let hidden = model.hidden(&tokens, &Pass::eval(), None)?;
        assert_eq!(hidden.type_string(), "bf16[4@dp, 131072@cp@tp, 4096]");
        let gradients = hidden.backward_with(&hidden.detach())?;
        let rows = gradients.of(model.embedding().value())?;
        assert_eq!(rows.type_string(), "bf16[128256@tp, 4096]");
    }
    Ok(())
}

/// Megatron's sequence parallelism: a branch gathers its input once and scatters its output once.
#[test]
fn a_cut_stream_is_gathered_once_and_scattered_once_by_each_branch() -> Result<()> {
    let (tp, width, batch, length) = (4, 256, 2, 512);
    let config = |layers| {
        ModelConfig::Llama(LlamaConfig {
            vocab_size: 64,
            hidden_size: width,
            intermediate_size: 512,
            num_hidden_layers: layers,
            num_attention_heads: 8,
            ..LlamaConfig::default()
        })
    };
    for (axes, cp) in [("tp=4", 1), ("cp=2, tp=4", 2)] {
        let mesh = Mesh::new(axes, &meta())?;
        let way = Way {
            sequence_parallel: true,
            dtype: DType::F32,
            ..Way::default()
        };
        // What one more layer sends along tp, forward.
        let sent = |layers: usize| -> Result<Vec<Entry>> {
            let model = model(&mesh, &config(layers), &way)?;
            let ids = Tensor::zeros([batch, length], DType::I32, (&mesh, "[@dp?, @cp?]"))?;
            let tokens = Tokens::new(ids);
            let (y, ledger) = Ledger::record(|| model.hidden(&tokens, &Pass::eval(), None));
            y?;
            let over = |e: &Entry| e.axes.iter().any(|axis| axis == "tp");
            Ok(ledger.entries.into_iter().filter(over).collect())
        };
        let (one, two) = (sent(1)?, sent(2)?);
        // All but a rank's own part of `[b, s, width]`.
        let unit = (batch * length / cp * width * 4) as u64 * (tp - 1) / tp;
        for kind in ["all_gather", "reduce_scatter"] {
            let of = |entries: &[Entry]| -> Vec<u64> {
                let same = entries.iter().filter(|e| e.kind == kind);
                same.map(|e| e.bytes).collect()
            };
            let (before, after) = (of(&one), of(&two));
            assert_eq!(after.len(), before.len() + 2, "{kind} on {axes}: {two:#?}");
            assert_eq!(
                after.iter().sum::<u64>() - before.iter().sum::<u64>(),
                2 * unit,
                "{kind} on {axes}"
            );
        }
        let bytes = |entries: &[Entry]| entries.iter().map(|e| e.bytes).sum::<u64>();
        assert_eq!(bytes(&two) - bytes(&one), 4 * unit, "and nothing else");
    }
    Ok(())
}

#[test]
fn nothing_but_attention_sends_along_the_sequence() -> Result<()> {
    let mesh = Mesh::new("cp=4", &meta())?;
    let way = Way {
        context: Context {
            attention: ContextAttention::Ring,
            balance: Some(true),
        },
        ..Way::default()
    };
    let model = model(&mesh, &llama(4), &way)?;
    let ids = Tensor::zeros([2, 16], DType::I32, (&mesh, "[@dp?, @cp?]"))?;
    let tokens = Tokens::new(ids).in_order(model.order(16)?);
    let (out, ledger) = Ledger::record(|| -> Result<()> {
        let logits = model.logits(&tokens, &Pass::eval(), None)?;
        logits.backward_with(&logits.detach())?;
        Ok(())
    });
    out?;
    for entry in &ledger.entries {
        assert_eq!(entry.op, "ring_attention", "{ledger}");
    }
    // Three turns forward; back three of keys and three of their gradients; in each of two layers.
    assert_eq!(ledger.entries.len(), 2 * 9, "{ledger}");
    Ok(())
}
