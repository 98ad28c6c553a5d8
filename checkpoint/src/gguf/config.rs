//! The configuration of a model as Hugging Face writes it, from the metadata of a file.

use super::File;
use super::model::ROPE_FACTORS;
use crate::{Result, Source};
use serde_json::{Map, Value, json};
use std::f64::consts::PI;

/// How many heads queries and keys have.
pub(super) struct Heads {
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl Heads {
    pub(super) fn of(file: &File, architecture: &str) -> Result<Self> {
        let values = Values { file, architecture };
        let queries = values.count("attention.head_count")?;
        let key = "attention.head_count_kv";
        let keys = match values.has(key) {
            true => values.count(key)?,
            false => queries,
        };
        Ok(Self {
            queries: queries as usize,
            keys: keys as usize,
        })
    }
}

/// The metadata of an architecture.
struct Values<'f> {
    file: &'f File,
    architecture: &'f str,
}

impl Values<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn has(&self, name: &str) -> bool {
        let key = self.key(name);
        self.file.metadata().keys().any(|k| k == key)
    }

    /// A number that is at least one and fits into 32 bits; also a list of them, one for each
    /// layer, that are all the same.
    fn count(&self, name: &str) -> Result<u64> {
        let key = self.key(name);
        let found = self.file.metadata().get(&key);
        let number = match &found {
            Some(Value::Array(list)) => list
                .first()
                .filter(|first| list.iter().all(|n| n == *first))
                .and_then(Value::as_u64),
            Some(number) => number.as_u64(),
            None => None,
        };
        number
            .filter(|n| (1..=u64::from(u32::MAX)).contains(n))
            .ok_or_else(|| {
                let why = match found {
                    None => "it is missing",
                    Some(Value::Array(_)) => "the layers differ in it, or it is no number",
                    Some(_) => "it is not a number from 1 to 2^32 - 1",
                };
                self.file.wrong(key, why)
            })
    }

    /// A float; `default` where the file does not say.
    fn float(&self, name: &str, default: Option<f64>) -> Result<f64> {
        let key = self.key(name);
        match self.file.metadata().get(&key) {
            None => default.ok_or_else(|| self.file.wrong(key, "it is missing")),
            Some(value) => value
                .as_f64()
                .filter(|x| *x > 0.0)
                .ok_or_else(|| self.file.wrong(key, "it is not a positive number")),
        }
    }
}

/// What `config.json` says.
pub(super) fn config(file: &File, architecture: &str) -> Result<Map<String, Value>> {
    let values = Values { file, architecture };
    if file
        .metadata()
        .count(&values.key("expert_count"))
        .is_some_and(|n| n > 0)
    {
        return Err(file.wrong(
            values.key("expert_count"),
            "mixtures of experts have other tensors: read the file under its own names",
        ));
    }
    let has =
        |name: &str| file.tensors().contains_key(name) || file.header.foreign.contains_key(name);
    let heads = Heads::of(file, architecture)?;
    let hidden = values.count("embedding_length")?;
    let theta = values.float("rope.freq_base", Some(10_000.0))?;
    let class = match architecture {
        "qwen2" => "Qwen2ForCausalLM",
        _ => "LlamaForCausalLM",
    };
    let mut config = json!({
        "architectures": [class],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": values.count("feed_forward_length")?,
        "num_hidden_layers": values.count("block_count")?,
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "rms_norm_eps": values.float("attention.layer_norm_rms_epsilon", None)?,
        "rope_theta": theta,
        "vocab_size": vocabulary(file)?,
        "max_position_embeddings": values.count("context_length")?,
        "tie_word_embeddings": !has("output.weight"),
        "torch_dtype": "float32",
    });
    if architecture == "llama" {
        config["attention_bias"] = has("blk.0.attn_q.bias").into();
        config["mlp_bias"] = has("blk.0.ffn_up.bias").into();
    }
    let head = match values.has("attention.key_length") {
        true => values.count("attention.key_length")?,
        false => hidden / heads.queries as u64,
    };
    if head * heads.queries as u64 != hidden {
        config["head_dim"] = head.into();
    }
    if values.has("rope.dimension_count") && values.count("rope.dimension_count")? != head {
        return Err(file.wrong(
            values.key("rope.dimension_count"),
            format!("only a part of the {head} elements of a head is rotated, which such models of Hugging Face do not know"),
        ));
    }
    if let Some(scaling) = rope_scaling(&values, theta, head)? {
        config["rope_scaling"] = scaling;
    }
    for (name, id) in token_ids(file) {
        config[name] = id;
    }
    Ok(match config {
        Value::Object(config) => config,
        _ => Map::new(),
    })
}

/// What `generation_config.json` says.
pub(super) fn generation_config(file: &File) -> Map<String, Value> {
    let mut config: Map<String, Value> = token_ids(file).collect();
    // Models that chat end their turns with a token of its own.
    let turn = file.metadata().count("tokenizer.ggml.eot_token_id");
    if let (Some(turn), Some(end)) = (turn, config.get("eos_token_id").and_then(Value::as_u64))
        && turn != end
    {
        config.insert("eos_token_id".into(), json!([end, turn]));
    }
    config
}

/// The tokens that have a meaning, by Hugging Face's names.
fn token_ids(file: &File) -> impl Iterator<Item = (String, Value)> {
    [
        ("bos_token_id", "tokenizer.ggml.bos_token_id"),
        ("eos_token_id", "tokenizer.ggml.eos_token_id"),
        ("pad_token_id", "tokenizer.ggml.padding_token_id"),
    ]
    .into_iter()
    .filter_map(|(name, key)| Some((name.to_string(), file.metadata().count(key)?.into())))
}

/// The rows of the embedding, which may be more than the tokenizer has tokens.
fn vocabulary(file: &File) -> Result<usize> {
    let name = "token_embd.weight";
    match file.info(name)?.shape.as_slice() {
        [rows, _] => Ok(*rows),
        shape => Err(file.wrong(
            name,
            format!("its shape is {shape:?}, not that of a matrix"),
        )),
    }
}

/// How rotary frequencies are changed for long texts, where they are.
fn rope_scaling(values: &Values<'_>, theta: f64, head: u64) -> Result<Option<Value>> {
    let file = values.file;
    if let Some(info) = file.tensors().get(ROPE_FACTORS) {
        let bytes = file.read_all(ROPE_FACTORS)?;
        let factors: Vec<f64> = bytes
            .chunks_exact(info.dtype.size())
            .map(|x| crate::number(x, info.dtype))
            .collect();
        return llama3_scaling(theta, head, &factors).map(Some).ok_or_else(|| {
            file.wrong(ROPE_FACTORS, "the factors are not those of Llama 3, and no other rule for them is known here")
        });
    }
    let key = values.key("rope.scaling.type");
    let factor = || values.float("rope.scaling.factor", None);
    match file.metadata().text(&key) {
        None | Some("none") => Ok(None),
        Some("linear") => Ok(Some(json!({"rope_type": "linear", "factor": factor()?}))),
        Some("yarn") => Ok(Some(json!({
            "rope_type": "yarn",
            "factor": factor()?,
            "original_max_position_embeddings": values.count("rope.scaling.original_context_length")?,
        }))),
        Some(other) => Err(file.wrong(key, format!("'{other}' has no counterpart known here"))),
    }
}

/// The rule of Llama 3 that gives these factors, if it does: a file has only what came out of it.
fn llama3_scaling(theta: f64, head: u64, factors: &[f64]) -> Option<Value> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const CONTEXT: f64 = 8192.0;
    // The slowest frequencies are divided by the whole factor.
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let expected = |i: usize| {
        let wave = 2.0 * PI * theta.powf(2.0 * i as f64 / head as f64);
        if wave < CONTEXT / HIGH {
            return 1.0;
        }
        if wave > CONTEXT / LOW {
            return factor;
        }
        let smooth = (CONTEXT / wave - LOW) / (HIGH - LOW);
        1.0 / ((1.0 - smooth) / factor + smooth)
    };
    let fits = factors.len() as u64 == head / 2
        && factors
            .iter()
            .enumerate()
            .all(|(i, x)| (x / expected(i) - 1.0).abs() < 1e-4);
    fits.then(|| {
        json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW,
            "high_freq_factor": HIGH, "original_max_position_embeddings": CONTEXT as u64,
        })
    })
}
