//! Models and layouts as the simulator's numbers, and the other way.

use super::{axes, simulated};
use crate::{
    Error, Result,
    config::{BatchConfig, MeshConfig, PipelineConfig, RunConfig, parse},
    models::{Gpt2Config, LlamaConfig, ModelConfig},
    nn::{self, ContextAttention},
};
use anymesh_simulate::{Attention, Context, Layout, Model, Precision, Recompute};

/// A model's shape as the simulator's closed forms take it.
///
/// ```
/// use anymesh_train::{measure::{numbers, settings_of}, models::ModelConfig};
/// let llama = anymesh_simulate::preset("llama-3-70b").unwrap().model;
/// let settings = settings_of(&llama, 8192)?;
/// assert_eq!(numbers(&settings)?.parameters(), llama.parameters());
/// # Ok::<(), anymesh_train::Error>(())
/// ```
pub fn numbers(config: &ModelConfig) -> Result<Model> {
    match config {
        ModelConfig::Llama(c) => {
            let heads = c.heads()?;
            Ok(Model {
                name: c.model_type.clone(),
                layers: c.num_hidden_layers,
                hidden: c.hidden_size,
                heads: heads.queries,
                kv_heads: heads.keys,
                head_size: heads.size,
                ffn: c.intermediate_size,
                gated: true,
                vocabulary: c.vocab_size,
                tied: c.tie_word_embeddings,
                positions: 0,
                biases: false,
                dropout: c.attention_dropout > 0.0,
                experts: None,
                latent: None,
            })
        }
        ModelConfig::Gpt2(c) => {
            let heads = c.heads()?;
            Ok(Model {
                name: "gpt2".into(),
                layers: c.n_layer,
                hidden: c.n_embd,
                heads: heads.queries,
                kv_heads: heads.keys,
                head_size: heads.size,
                ffn: c.n_inner.unwrap_or(4 * c.n_embd),
                gated: false,
                vocabulary: c.vocab_size,
                tied: c.tie_word_embeddings,
                positions: c.n_positions,
                biases: true,
                dropout: c.resid_pdrop > 0.0,
                experts: None,
                latent: None,
            })
        }
        ModelConfig::Moe(_) => {
            let detail = "the real step of a mixture of experts is not counted, because its sizes are data: closed forms are there for it, in a file with the simulator's own keys";
            Err(Error::config("model.model_type", detail))
        }
        ModelConfig::Bert(_) => {
            let detail = "an encoder predicts no next token: gpt2, llama, mistral and qwen2 do";
            Err(Error::config("model.model_type", detail))
        }
    }
}

/// The settings of a model of this shape for sequences of so many tokens: a Llama or a GPT-2, if it
/// is one.
pub fn settings_of(model: &Model, sequence: usize) -> Result<ModelConfig> {
    let missing = match model {
        m if m.latent.is_some() => "attention through latent vectors",
        m if m.experts.is_some() => "experts in this form",
        m if m.gated == m.biases || m.gated != (m.positions == 0) => {
            "this mixture of gates, biases and positions"
        }
        m if !m.gated && (m.kv_heads != m.heads || m.head_size * m.heads != m.hidden) => {
            "shared keys without gates"
        }
        _ => "",
    };
    if !missing.is_empty() {
        let detail = format!("no model that can be trained here has {missing}");
        return Err(Error::config(model.name.clone(), detail));
    }
    Ok(match model.gated {
        true => ModelConfig::Llama(LlamaConfig {
            vocab_size: model.vocabulary,
            hidden_size: model.hidden,
            intermediate_size: model.ffn,
            num_hidden_layers: model.layers,
            num_attention_heads: model.heads,
            num_key_value_heads: Some(model.kv_heads),
            head_dim: Some(model.head_size),
            max_position_embeddings: sequence.max(2048),
            tie_word_embeddings: model.tied,
            rope_theta: 500_000.0,
            ..LlamaConfig::default()
        }),
        false => {
            let dropout = if model.dropout { 0.1 } else { 0.0 };
            ModelConfig::Gpt2(Gpt2Config {
                vocab_size: model.vocabulary,
                n_positions: model.positions.max(sequence),
                n_embd: model.hidden,
                n_layer: model.layers,
                n_head: model.heads,
                n_inner: Some(model.ffn),
                resid_pdrop: dropout,
                embd_pdrop: dropout,
                // Dropout inside of attention is not what a flash kernel does.
                attn_pdrop: 0.0,
                tie_word_embeddings: model.tied,
                ..Gpt2Config::default()
            })
        }
    })
}

/// A training run of a model in a layout, as `anymesh train` would have it; an error says what of the
/// layout no run can have.
pub fn run_of(model: &Model, layout: &Layout) -> Result<RunConfig> {
    let mut run: RunConfig = parse("data = []\n[model]", &[] as &[&str])?;
    let mut config = settings_of(model, layout.sequence)?;
    if let (ModelConfig::Gpt2(c), Attention::Plain) = (&mut config, layout.attention) {
        c.attn_pdrop = c.resid_pdrop;
    }
    run.model = config.to_settings()?;
    run.mesh.dtype = "bf16".into();
    let micros = layout.batch / (layout.dp * layout.micro).max(1);
    run.batch = BatchConfig {
        global: Some(layout.batch as u64),
        micro: Some(layout.micro as u64),
        accumulation: Some(micros as u64),
        length: layout.sequence,
        mix_documents: true,
    };
    run.clip.max_norm = Some(1.0);
    laid_out(&run, model, layout)
}

/// A training run in another layout: its axes, ZeRO, recomputing, stages, micro-batches.
pub fn laid_out(run: &RunConfig, model: &Model, layout: &Layout) -> Result<RunConfig> {
    let plan = layout
        .check(model, layout.ranks().unwrap_or(0))
        .map_err(simulated)?;
    let squares = model.dropout && !model.gated;
    // Of the ranks that have other sequences each, `ep` are those of experts.
    let sizes = [
        ("pp", layout.pp),
        ("dp", layout.dp / layout.ep),
        ("ep", layout.ep),
        ("cp", layout.cp),
        ("tp", layout.tp),
    ];
    let lacks = sizes
        .iter()
        .find(|(name, n)| *n > 1 && !axes::AXES.contains(name));
    let missing = [
        (layout.precision == Precision::Fp8, "fp8"),
        (
            layout.recompute == Recompute::Selective,
            "selective recompute",
        ),
        (layout.gradient_bytes != 4, "gradients of 2 bytes"),
        (
            layout.attention == Attention::Plain && !squares,
            "plain attention",
        ),
    ];
    let missing = missing.iter().find(|m| m.0).map(|m| m.1);
    if let Some(what) = lacks.map(|(name, _)| *name).or(missing) {
        let detail = format!("a training run has no {what}");
        return Err(Error::config("simulate", detail));
    }
    let axes: Vec<(String, usize)> = (sizes.into_iter())
        .filter(|(name, n)| *n > 1 || *name == "dp")
        .map(|(name, n)| (name.into(), n))
        .collect();
    Ok(RunConfig {
        mesh: MeshConfig {
            axes: axes::text(&axes),
            zero: layout.zero,
            sequence_parallel: layout.sequence_parallel && layout.tp > 1,
            recompute: layout.recompute == Recompute::Full,
            ..run.mesh.clone()
        },
        pipeline: PipelineConfig {
            schedule: layout.schedule.clone(),
            chunks: Some(layout.chunks),
            memory: None,
            layers: Some(plan.split),
            ..PipelineConfig::default()
        },
        batch: BatchConfig {
            global: Some(layout.batch as u64),
            micro: Some(layout.micro as u64),
            accumulation: Some(plan.micros as u64),
            length: layout.sequence,
            ..run.batch.clone()
        },
        context: nn::Context {
            attention: match layout.context {
                Context::Gather => ContextAttention::Gather,
                Context::Ring => ContextAttention::Ring,
                Context::Heads => ContextAttention::Heads,
            },
            ..run.context
        },
        ..run.clone()
    })
}

/// How ranks of `cp` see all keys, as the simulator names it.
pub(crate) fn context_of(way: ContextAttention) -> Context {
    match way {
        ContextAttention::Heads => Context::Heads,
        ContextAttention::Ring => Context::Ring,
        ContextAttention::Gather | ContextAttention::Auto => Context::Gather,
    }
}

/// The layout of a run on axes, as the simulator writes it down.
pub fn layout_of(run: &RunConfig, axes: &[(String, usize)], schedule: &str) -> Result<Layout> {
    axes::check(axes)?;
    let size = |name: &str| axes::size(axes, name);
    let dp = axes::data_ranks(axes);
    let batch = run.batch.spec(dp as u64).solve()?;
    let pp = size("pp");
    Ok(Layout {
        dp,
        tp: size("tp"),
        pp,
        cp: size("cp"),
        ep: size("ep"),
        context: context_of(run.context.attention),
        chunks: run.pipeline.choose(pp)?.0.chunks,
        zero: run.mesh.zero,
        micro: batch.micro as usize,
        sequence: run.batch.length,
        batch: batch.global as usize,
        recompute: match run.mesh.recompute {
            true => Recompute::Full,
            false => Recompute::None,
        },
        sequence_parallel: run.mesh.sequence_parallel,
        // What models gather for a forward pass they keep for the backward pass.
        regather: false,
        schedule: schedule.into(),
        gradient_bytes: run.mesh.policy()?.reduce.size(),
        ..Layout::default()
    })
}
