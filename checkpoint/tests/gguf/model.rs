//! Models under Hugging Face's names.

use crate::build::{Build, Value};
use crate::common::{Temporary, assert_same, data};
use anymesh_checkpoint::{Error, Memory, Source, gguf};
use anymesh_core::Region;
use serde_json::{Value as Json, json};

/// A model of one layer: 4 heads of 6, 2 of keys, 24 wide.
fn toy(architecture: &str) -> Build {
    let key = |name: &str| format!("{architecture}.{name}");
    let mut build = Build::new()
        .value("general.architecture", Value::text(architecture))
        .value(&key("block_count"), Value::u32(1))
        .value(&key("context_length"), Value::u32(128))
        .value(&key("embedding_length"), Value::u32(24))
        .value(&key("feed_forward_length"), Value::u32(5))
        .value(&key("attention.head_count"), Value::u32(4))
        .value(&key("attention.head_count_kv"), Value::u32(2))
        .value(&key("attention.layer_norm_rms_epsilon"), Value::f32(1e-6));
    let rows = |rows: usize, columns: usize| -> Vec<f32> {
        (0..rows * columns)
            .map(|i| (i / columns * 100 + i % columns) as f32)
            .collect()
    };
    for (name, shape) in [
        ("token_embd.weight", vec![7, 24]),
        ("output_norm.weight", vec![24]),
        ("blk.0.attn_norm.weight", vec![24]),
        ("blk.0.attn_q.weight", vec![24, 24]),
        ("blk.0.attn_q.bias", vec![24]),
        ("blk.0.attn_k.weight", vec![12, 24]),
        ("blk.0.attn_k.bias", vec![12]),
        ("blk.0.attn_v.weight", vec![12, 24]),
        ("blk.0.attn_v.bias", vec![12]),
        ("blk.0.attn_output.weight", vec![24, 24]),
        ("blk.0.ffn_norm.weight", vec![24]),
        ("blk.0.ffn_gate.weight", vec![5, 24]),
        ("blk.0.ffn_up.weight", vec![5, 24]),
        ("blk.0.ffn_down.weight", vec![24, 5]),
    ] {
        let columns = shape.get(1).copied().unwrap_or(1);
        build = build.floats(name, &shape, &rows(shape[0], columns));
    }
    build
}

fn model(build: &Build, folder: &Temporary) -> Result<gguf::Model, Error> {
    gguf::Model::open(build.write(folder))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (all, _) = bytes.as_chunks();
    all.iter().map(|x| f32::from_le_bytes(*x)).collect()
}

/// Written by hand: a head of 6 rows, of which rows 0, 2 and 4 are the first half of pairs.
#[test]
fn rows_of_queries_and_keys_are_turned_back_for_llama_and_not_for_qwen() {
    let folder = Temporary::here();
    let head = [0, 2, 4, 1, 3, 5];
    let turned: Vec<f32> = (0..12)
        .map(|row| (row / 6 * 6 + head[row % 6]) as f32)
        .collect();
    let straight: Vec<f32> = (0..12).map(|row| row as f32).collect();
    for (architecture, expected) in [("llama", &turned), ("qwen2", &straight)] {
        let model = model(&toy(architecture), &folder).expect("a model");
        let rows = |name: &str, columns: usize| -> Vec<f32> {
            let all = floats(&model.read_all(name).expect("reads"));
            assert!(
                all.chunks(columns)
                    .all(|row| row[columns - 1] - row[0] == (columns - 1) as f32)
            );
            all.chunks(columns).map(|row| row[0] / 100.0).collect()
        };
        let name = |module: &str| format!("model.layers.0.self_attn.{module}");
        assert_eq!(
            rows(&name("k_proj.weight"), 24),
            *expected,
            "{architecture}"
        );
        assert_eq!(rows(&name("q_proj.weight"), 24)[..12], expected[..]);
        assert_eq!(rows(&name("v_proj.weight"), 24), straight);
        assert_eq!(rows(&name("k_proj.bias"), 1), *expected, "{architecture}");
        assert_eq!(rows(&name("v_proj.bias"), 1), straight);
        // A region in the middle: rows 2 to 8, columns 3 to 5.
        let region = Region {
            start: vec![2, 3].into(),
            shape: vec![7, 3].into(),
        };
        let mut out = vec![0; 7 * 3 * 4];
        model
            .read(&name("k_proj.weight"), &region, &mut out)
            .expect("inside");
        let part: Vec<f32> = expected[2..9]
            .iter()
            .flat_map(|row| [3.0, 4.0, 5.0].map(|column| row * 100.0 + column))
            .collect();
        assert_eq!(floats(&out), part);
    }
}

/// `make_gguf.py` keeps what the model was before a converter's own expression turned it.
#[test]
fn a_converted_model_comes_back_as_it_was() {
    let model = gguf::Model::open(data("gguf/llama.gguf")).expect("a model");
    let sums = std::fs::read_to_string(data("gguf/llama.sums")).expect("recorded");
    let mut whole = Memory::default();
    let mut names = vec![];
    for line in sums.lines() {
        let parts: Vec<&str> = line.split(' ').collect();
        let info = model.info(parts[0]).expect("it is there").clone();
        let shape: Vec<String> = info.shape.iter().map(usize::to_string).collect();
        assert_eq!(shape.join(","), parts[1], "{}", parts[0]);
        let bytes = model.read_all(parts[0]).expect("reads");
        assert_eq!(
            crc32fast::hash(&bytes).to_string(),
            parts[2],
            "{}",
            parts[0]
        );
        whole.insert(parts[0], info, bytes).expect("fits");
        names.push(parts[0].to_string());
    }
    assert_eq!(model.tensors().keys().cloned().collect::<Vec<_>>(), names);
    // Regions are parts of the whole, also those that begin inside of a head and of a block.
    assert_same(&model, &whole);
}

#[test]
fn the_configuration_is_that_of_hugging_face() {
    let folder = Temporary::here();
    let build = toy("llama")
        .value("llama.rope.freq_base", Value::f32(100_000.0))
        .value("llama.rope.dimension_count", Value::u32(6))
        .value("tokenizer.ggml.bos_token_id", Value::u32(1))
        .value("tokenizer.ggml.eos_token_id", Value::u32(2))
        .value("tokenizer.ggml.eot_token_id", Value::u32(5))
        .value("tokenizer.ggml.padding_token_id", Value::u32(3));
    let llama = model(&build, &folder).expect("a model");
    let mut expected = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 24, "intermediate_size": 5, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0, "vocab_size": 7, "max_position_embeddings": 128,
        "tie_word_embeddings": true, "torch_dtype": "float32",
        "attention_bias": true, "mlp_bias": false,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    });
    assert_eq!(Json::Object(llama.config().clone()), expected);
    assert_eq!(
        Json::Object(llama.generation_config()),
        json!({"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 3})
    );

    // A head for the tokens of its own, heads that are not a part of the width, no ids.
    let build = toy("qwen2")
        .floats("output.weight", &[7, 24], &[0.0; 168])
        .value("qwen2.attention.key_length", Value::u32(8));
    let qwen = model(&build, &folder).expect("a model");
    for name in [
        "attention_bias",
        "mlp_bias",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ] {
        expected.as_object_mut().expect("an object").remove(name);
    }
    expected["architectures"] = json!(["Qwen2ForCausalLM"]);
    expected["model_type"] = "qwen2".into();
    expected["tie_word_embeddings"] = false.into();
    expected["rope_theta"] = 10000.0.into();
    expected["head_dim"] = 8.into();
    assert_eq!(Json::Object(qwen.config().clone()), expected);
    assert!(qwen.tensors().contains_key("lm_head.weight"));
}

#[test]
fn keys_have_as_many_heads_as_queries_where_the_file_says_nothing_of_them() {
    let folder = Temporary::here();
    let mut build = toy("llama");
    build
        .values
        .retain(|(key, _)| key != "llama.attention.head_count_kv");
    // Twelve rows are 4 heads of 3, which are no pairs.
    let error = model(&build, &folder).expect_err("three is odd");
    assert!(
        matches!(&error, Error::GgufModel { item, .. } if item == "blk.0.attn_k.bias"),
        "{error}"
    );
    build.tensors.retain(|t| !t.name.contains("attn_k"));
    build = build.floats(
        "blk.0.attn_k.weight",
        &[24, 1],
        &(0..24).map(|i| i as f32).collect::<Vec<_>>(),
    );
    let model = model(&build, &folder).expect("a model");
    assert_eq!(model.config()["num_key_value_heads"], 4);
    let rows = floats(
        &model
            .read_all("model.layers.0.self_attn.k_proj.weight")
            .expect("reads"),
    );
    assert_eq!(rows[..8], [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 6.0, 8.0]);
}

/// A file of Llama 3.1 has the factors that come out of the rule, not the rule.
#[test]
fn the_rule_for_long_texts_is_found_from_its_factors() {
    let folder = Temporary::here();
    // Of Llama 3.2 1B (heads of 64, theta 500000, factor 32), by the rule as it is published.
    let factors: Vec<f32> = (0..32)
        .map(|i| {
            let frequency = 500_000f64.powf(-2.0 * f64::from(i) / 64.0);
            let turns = 8192.0 * frequency / (2.0 * std::f64::consts::PI);
            let smooth = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
            (frequency / ((1.0 - smooth) * frequency / 32.0 + smooth * frequency)) as f32
        })
        .collect();
    let build = |factors: &[f32]| {
        let mut build = toy("llama").value("llama.rope.freq_base", Value::f32(500_000.0));
        for (key, value) in [
            ("llama.attention.key_length", 64),
            ("llama.rope.dimension_count", 64),
        ] {
            build = build.value(key, Value::u32(value));
        }
        build.floats("rope_freqs.weight", &[factors.len()], factors)
    };
    let llama = model(&build(&factors), &folder).expect("a model");
    let expected = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    assert_eq!(llama.config()["rope_scaling"], expected);
    assert!(!llama.tensors().keys().any(|name| name.contains("rope")));
    let mut others = factors.clone();
    others[20] *= 1.01;
    for factors in [&others[..], &factors[1..]] {
        let error = model(&build(factors), &folder).expect_err("another rule");
        assert!(
            matches!(&error, Error::GgufModel { item, .. } if item == "rope_freqs.weight"),
            "{error}"
        );
    }
    let linear = toy("llama")
        .value("llama.rope.scaling.type", Value::text("linear"))
        .value("llama.rope.scaling.factor", Value::f32(4.0));
    let linear = model(&linear, &folder).expect("a model");
    assert_eq!(
        linear.config()["rope_scaling"],
        json!({"rope_type": "linear", "factor": 4.0})
    );
}

#[test]
fn what_has_no_counterpart_is_named() {
    let folder = Temporary::here();
    let wrong = |build: Build| match model(&build, &folder) {
        Err(Error::GgufModel { item, .. }) => item,
        other => panic!("{other:?}"),
    };
    let without = |key: &str| {
        let mut build = toy("llama");
        build.values.retain(|(k, _)| k != key);
        build
    };
    assert_eq!(wrong(toy("mamba")), "general.architecture");
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        assert_eq!(wrong(without(key)), key);
        let other = without(key).value(key, Value::bool(true));
        assert_eq!(wrong(other), key);
    }
    let zero =
        without("llama.attention.head_count").value("llama.attention.head_count", Value::u32(0));
    assert_eq!(wrong(zero), "llama.attention.head_count");
    let layers = [Value::u32(4), Value::u32(2)];
    let differ = without("llama.attention.head_count")
        .value("llama.attention.head_count", Value::array(&layers));
    assert_eq!(wrong(differ), "llama.attention.head_count");
    let odd = toy("llama").floats("blk.0.attn_q_norm.weight", &[6], &[0.0; 6]);
    assert_eq!(wrong(odd), "blk.0.attn_q_norm.weight");
    let experts = toy("llama").value("llama.expert_count", Value::u32(8));
    assert_eq!(wrong(experts), "llama.expert_count");
    let part = toy("llama").value("split.count", Value::u32(3));
    assert_eq!(wrong(part), "split.count");
    let partial = toy("llama").value("llama.rope.dimension_count", Value::u32(4));
    assert_eq!(wrong(partial), "llama.rope.dimension_count");
    let scaled = toy("llama").value("llama.rope.scaling.type", Value::text("longrope"));
    assert_eq!(wrong(scaled), "llama.rope.scaling.type");
    let mut no_embedding = toy("llama");
    no_embedding.tensors.remove(0);
    assert!(matches!(
        model(&no_embedding, &folder),
        Err(Error::Missing { .. })
    ));
}

#[test]
fn a_tensor_of_another_type_keeps_its_place_in_the_model() {
    let folder = Temporary::here();
    let build = toy("llama").tensor("output.weight", &[256, 7], 13, vec![0; 176 * 7]);
    let model = model(&build, &folder).expect("a model");
    assert_eq!(
        model.foreign(),
        [("lm_head.weight".to_string(), "Q5_K".to_string())]
    );
    assert_eq!(model.config()["tie_word_embeddings"], false);
    let error = model.read_all("lm_head.weight").expect_err("not read here");
    assert!(
        matches!(&error, Error::ForeignType { tensor, dtype, .. } if tensor == "lm_head.weight" && dtype == "Q5_K"),
        "{error}"
    );
}

#[test]
fn names_that_hugging_face_does_not_have_are_none() {
    let name = |name: &str| gguf::hugging_face_name("llama", name);
    for other in [
        "",
        "weight",
        "output",
        "output.scale",
        "blk.weight",
        "blk..attn_q.weight",
        "blk.x.attn_q.weight",
        "blk.1.attn_q",
        "blk.1.output.weight",
        "blk.+1.attn_q.weight",
    ] {
        assert_eq!(name(other), None, "{other}");
    }
    assert_eq!(
        name("blk.12.ffn_down.bias").as_deref(),
        Some("model.layers.12.mlp.down_proj.bias")
    );
    assert_eq!(gguf::hugging_face_name("gpt2", "output.weight"), None);
}
