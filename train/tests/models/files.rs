//! Models of files: they give what transformers gives, come back under the same names, and files
//! that are something else are refused with what is wrong.

use crate::{assert_close, build, configs, mesh, numbers, texts, tokens};
use anymesh_checkpoint::{
    Contents, Memory, TensorInfo, Training,
    hugging_face::{Export, export},
    save,
};
use anymesh_core::{DType, grad::no_grad};
use anymesh_train::{
    Build, Lora, Module, Pass, Policy, Result, add_lora, grow_vocabulary, merge_lora,
    models::{self, Model, ModelConfig, ModelFiles, Tokens},
};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

/// A folder that is removed when the test is over.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        // Tests run beside each other.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("anymesh-models-{name}-{process}-{count}"));
        drop(std::fs::remove_dir_all(&path));
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

fn facts() -> Value {
    let read = |text: &str| serde_json::from_str::<Value>(text).expect("JSON");
    let mut facts = read(include_str!("../facts/tiny_models.json"));
    let experts = read(include_str!("../facts/tiny_experts.json"));
    assert_eq!(facts["ids"], experts["ids"]);
    for (family, fact) in experts["models"].as_object().expect("models") {
        facts["models"][family] = fact.clone();
    }
    facts
}

/// The weights of the facts.
fn value(name: &str, i: usize) -> f64 {
    let c = name.bytes().map(u64::from).sum::<u64>() % 97;
    let value = 0.2 * (0.7 * i as f64 + c as f64).sin();
    let lower = name.to_lowercase();
    let is_norm = name.ends_with("weight") && (lower.contains("norm") || lower.contains("ln_"));
    value + f64::from(u8::from(is_norm))
}

/// A folder with the weights of a model of the facts, their names changed.
fn folder(fact: &Value, scratch: &Scratch, renamed: impl Fn(&str) -> String) -> Result<()> {
    let mut source = Memory::default();
    for (name, shape) in fact["shapes"].as_object().expect("shapes") {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).expect("a shape");
        let count: usize = shape.iter().product();
        let bytes = (0..count)
            .flat_map(|i| value(name, i).to_le_bytes())
            .collect();
        let dtype = DType::F64;
        source.insert(renamed(name), TensorInfo { dtype, shape }, bytes)?;
    }
    let config = fact["config"].to_string().into_bytes();
    let options = Export {
        files: [("config.json".to_string(), config)].into(),
        ..Export::default()
    };
    export(&source, &scratch.0, &options)?;
    Ok(())
}

/// What a model gives at the last places of the texts of the facts.
fn last(model: &Model) -> Result<Vec<f64>> {
    let ids: Vec<Vec<u32>> = serde_json::from_value(facts()["ids"].clone()).expect("ids");
    let tokens = Tokens::of_rows(model.mesh(), &ids)?;
    let hidden = no_grad(|| model.hidden(&tokens, &Pass::eval(), None))?;
    let out = match model {
        Model::Bert(_) => hidden,
        _ => no_grad(|| model.head(&hidden))?,
    };
    numbers(&out.narrow(1, ids[0].len() - 1, 1)?)
}

fn expected(fact: &Value) -> Vec<f64> {
    let rows: Vec<Vec<f64>> = serde_json::from_value(fact["last"].clone()).expect("numbers");
    rows.concat()
}

fn f64_on(axes: &str) -> Result<Build> {
    Ok(Build::new(&mesh(axes)?, Policy::named("f64")?, 0))
}

#[test]
fn folders_of_all_families_give_what_transformers_gives() -> Result<()> {
    let facts = facts();
    let families = facts["models"].as_object().expect("models");
    assert_eq!(families.len(), 8);
    for (family, fact) in families {
        let scratch = Scratch::new(family);
        folder(fact, &scratch, str::to_string)?;
        for axes in ["", "tp=2", "tp=3", "dp=2, tp=4", "ep=2", "dp=2, ep=2"] {
            let model = models::open(&scratch.0, &f64_on(axes)?)?;
            // Theirs rotate and normalise in f32.
            let what = format!("{family} on {axes}");
            assert_close(&what, &last(&model)?, &expected(fact), 2e-6);
        }
    }
    Ok(())
}

#[test]
fn names_without_a_prefix_and_with_one_are_found() -> Result<()> {
    let facts = facts();
    let cases: [(&str, fn(&str) -> String); 2] = [
        ("gpt2", |name| {
            name.trim_start_matches("transformer.").into()
        }),
        ("bert", |name| format!("bert.{name}")),
    ];
    for (family, renamed) in cases {
        let (scratch, fact) = (
            Scratch::new(&format!("{family}-named")),
            &facts["models"][family],
        );
        folder(fact, &scratch, renamed)?;
        let model = models::open(&scratch.0, &f64_on("tp=2")?)?;
        assert_close(family, &last(&model)?, &expected(fact), 2e-6);
    }
    Ok(())
}

#[test]
fn what_was_loaded_is_exported_to_the_bit_under_the_names_of_the_files() -> Result<()> {
    let facts = facts();
    for (family, fact) in facts["models"].as_object().expect("models") {
        let (from, to) = (
            Scratch::new(&format!("{family}-a")),
            Scratch::new(&format!("{family}-b")),
        );
        folder(fact, &from, str::to_string)?;
        let model = models::open(&from.0, &f64_on("dp=2, tp=3")?)?;
        model.export(&to.0, BTreeMap::new())?;
        let (before, after) = (ModelFiles::open(&from.0)?, ModelFiles::open(&to.0)?);
        assert_eq!(
            before.source().tensors(),
            after.source().tensors(),
            "{family}"
        );
        for name in before.source().tensors().keys() {
            let bytes = |files: &ModelFiles| files.source().read_all(name);
            assert_eq!(bytes(&before)?, bytes(&after)?, "{family}: {name}");
        }
        assert_eq!(before.config()?, after.config()?, "{family}");
    }
    Ok(())
}

#[test]
fn a_checkpoint_of_a_training_run_is_a_model() -> Result<()> {
    for (family, config) in configs() {
        let scratch = Scratch::new(&format!("{family}-checkpoint"));
        let model = build(&config, &mesh("tp=2")?, false)?;
        let mut tensors = model.values();
        // What an optimizer keeps beside the parameters.
        let moment = tensors.values().next().expect("a parameter").clone();
        tensors.insert("adam.m.something".into(), moment);
        let training = Training {
            config: Some(config.to_settings()?),
            ..Training::default()
        };
        let contents = Contents {
            tensors,
            state: training.to_state(),
            ..Contents::default()
        };
        let path = save(&scratch.0, "step-1", &contents)?;
        let again = models::open(path, &f64_on("tp=3")?)?;
        assert_eq!(again.config(), config, "{family}");
        for (name, value) in model.values() {
            assert_eq!(numbers(&value)?, numbers(&again.values()[&name])?, "{name}");
        }
    }
    Ok(())
}

/// The error of a folder of a family whose settings or names were changed.
fn error_of(
    family: &str,
    change: impl Fn(&mut Map<String, Value>),
    renamed: impl Fn(&str) -> String,
) -> Result<String> {
    let (scratch, mut fact) = (Scratch::new("bad"), facts()["models"][family].clone());
    change(fact["config"].as_object_mut().expect("settings"));
    folder(&fact, &scratch, renamed)?;
    let opened = models::open(&scratch.0, &f64_on("")?);
    Ok(opened
        .expect_err("a model that is not supported")
        .to_string())
}

#[test]
fn settings_that_are_not_supported_are_named() -> Result<()> {
    let cases = [
        ("llama", "hidden_act", json!("gelu")),
        ("gpt2", "activation_function", json!("mish")),
        ("bert", "hidden_act", json!("gelu_10")),
        (
            "llama",
            "rope_scaling.rope_type",
            json!({"rope_type": "yarn", "factor": 2.0}),
        ),
        (
            "llama",
            "quantization_config",
            json!({"quant_method": "awq"}),
        ),
        ("llama", "num_local_experts", json!(8)),
        ("llama", "num_key_value_heads", json!(4)),
        ("llama", "num_attention_heads", json!(5)),
        ("llama", "head_dim", json!(5)),
        ("llama", "rms_norm_eps", json!("small")),
        ("llama", "hidden_size", json!(-24)),
        ("llama", "vocab_size", json!(0)),
        ("mistral", "model_type", json!("mamba")),
        ("qwen2", "use_sliding_window", json!(true)),
        (
            "qwen2",
            "layer_types",
            json!(["full_attention", "sliding_attention"]),
        ),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gpt2", "n_head", json!(7)),
        ("gpt2", "resid_pdrop", json!(1.5)),
        ("bert", "position_embedding_type", json!("relative_key")),
        ("bert", "is_decoder", json!(true)),
    ];
    for (family, key, value) in cases {
        let error = error_of(
            family,
            |settings| {
                settings.remove("rope_parameters");
                let field = key.split('.').next().unwrap_or(key);
                settings.insert(field.into(), value.clone());
            },
            str::to_string,
        )?;
        let named = error.starts_with(&format!("{key}: "));
        assert!(
            named || key == "num_attention_heads" && error.contains("heads"),
            "{key}: {error}"
        );
    }
    Ok(())
}

#[test]
fn tensors_that_are_missing_left_over_or_of_another_shape_are_named() -> Result<()> {
    let down = "model.layers.1.mlp.down_proj.weight";
    let error = error_of(
        "llama",
        |_| {},
        |name| match name == down {
            true => "model.layers.1.mlp.dawn_proj.weight".into(),
            false => name.into(),
        },
    )?;
    assert!(error.contains(down), "{error}");
    let error = error_of(
        "llama",
        |s| drop(s.insert("num_hidden_layers".into(), json!(1))),
        str::to_string,
    )?;
    assert!(error.contains("model.layers.1."), "{error}");
    let error = error_of(
        "llama",
        |s| drop(s.insert("intermediate_size".into(), json!(41))),
        str::to_string,
    )?;
    assert!(error.contains("mlp.") && error.contains("41"), "{error}");
    Ok(())
}

#[test]
fn a_folder_without_settings_or_with_damaged_ones_is_refused() -> Result<()> {
    let (scratch, facts) = (Scratch::new("settings"), facts());
    folder(&facts["models"]["gpt2"], &scratch, str::to_string)?;
    let path = scratch.0.join("config.json");
    let error = |text: Option<&str>| {
        match text {
            Some(text) => std::fs::write(&path, text).expect("written"),
            None => std::fs::remove_file(&path).expect("removed"),
        }
        ModelFiles::open(&scratch.0)
            .and_then(|f| f.config())
            .expect_err("no settings")
            .to_string()
    };
    let text = error(Some("{\"model_type\": \"gpt2\",\n \"n_layer\" 2}"));
    assert!(text.contains("config.json, byte 34"), "{text}");
    let text = error(Some("[]"));
    assert!(text.starts_with("config.json: "), "{text}");
    let text = error(Some("{}"));
    assert!(text.starts_with("model_type: it is missing"), "{text}");
    let text = error(None);
    assert!(text.starts_with("config.json: "), "{text}");
    Ok(())
}

#[test]
fn new_tokens_get_the_mean_of_the_old_rows_and_layouts_stay() -> Result<()> {
    for (family, config) in configs() {
        for axes in ["", "tp=2", "dp=2, tp=3"] {
            let mesh = mesh(axes)?;
            let mut model = build(&config, &mesh, false)?;
            let before = model.values();
            let names = match &model {
                Model::Bert(_) => vec!["embeddings.word_embeddings.weight"],
                Model::Gpt2(_) => vec!["transformer.wte.weight"],
                Model::Llama(_) if family == "llama" => vec!["model.embed_tokens.weight"],
                Model::Llama(_) | Model::Moe(_) => {
                    vec!["model.embed_tokens.weight", "lm_head.weight"]
                }
            };
            grow_vocabulary(&mut model, 70)?;
            let after = model.values();
            for (name, old) in &before {
                let new = &after[name];
                assert_eq!(old.sharding(), new.sharding(), "{name}");
                let (old, new) = (numbers(old)?, numbers(new)?);
                assert_eq!(new[..old.len()], old, "{family} on {axes}: {name}");
                if !names.contains(&name.as_str()) {
                    assert_eq!(new.len(), old.len(), "{name}");
                    continue;
                }
                assert_eq!(new.len(), 70 * 24, "{name}");
                for column in 0..24 {
                    let mean = (0..67).map(|row| old[row * 24 + column]).sum::<f64>() / 67.0;
                    for row in 67..70 {
                        assert!((new[row * 24 + column] - mean).abs() < 1e-15, "{name}");
                    }
                }
            }
            assert_eq!(model.config().vocabulary(), 70);
            // A new token is one like the others, and training reaches its row.
            let mut rows = texts();
            rows[0][2] = 69;
            let tokens = Tokens::of_rows(&mesh, &rows)?;
            let loss = model
                .hidden(&tokens, &Pass::eval(), None)?
                .sin()?
                .sum_all()?;
            let gradients = loss.backward()?;
            let p = model.embedding();
            let g = p.partial_gradient(&gradients)?.expect("a gradient");
            let g = numbers(&p.place_gradient(&g)?)?;
            assert!(g[69 * 24..].iter().any(|x| *x != 0.0));
            let error = grow_vocabulary(&mut model, 60)
                .expect_err("fewer")
                .to_string();
            assert!(error.contains("70 tokens"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn adapters_of_a_model_are_merged_before_it_is_exported() -> Result<()> {
    let (_, config) = configs().remove(0);
    let mesh = mesh("tp=2")?;
    let mut model = build(&config, &mesh, false)?;
    add_lora(
        &mut model,
        "*.q_proj.weight, *.v_proj.weight",
        &Lora::default(),
    )?;
    model.try_each(&mut |name, p| match name.contains("lora_B") {
        true => p.set(&p.value().detach().add(0.3)?),
        false => Ok(()),
    })?;
    let before = numbers(&model.logits(&tokens(&mesh)?, &Pass::eval(), None)?)?;
    let scratch = Scratch::new("lora");
    let error = model
        .export(&scratch.0, BTreeMap::new())
        .expect_err("adapters")
        .to_string();
    assert!(error.contains("merge"), "{error}");
    assert_eq!(merge_lora(&mut model)?, 4);
    model.export(&scratch.0, BTreeMap::new())?;
    let again = models::open(&scratch.0, &f64_on("tp=3")?)?;
    let tokens = tokens(again.mesh())?;
    let after = numbers(&again.logits(&tokens, &Pass::eval(), None)?)?;
    assert_close("merged", &after, &before, 1e-12);
    Ok(())
}

#[test]
fn settings_of_a_new_model_are_read_strictly() {
    let read = |value: Value| serde_json::from_value::<ModelConfig>(value);
    let config = read(json!({"model_type": "qwen2", "num_hidden_layers": 3})).expect("settings");
    let ModelConfig::Llama(llama) = &config else {
        panic!("qwen2 is of the family of llama");
    };
    assert_eq!(
        (llama.num_hidden_layers, llama.model_type.as_str()),
        (3, "qwen2")
    );
    let again = serde_json::to_value(&config).expect("JSON");
    assert_eq!(read(again).expect("settings"), config);
    let error = read(json!({"model_type": "bert", "layers": 3})).expect_err("unknown");
    assert!(
        error
            .to_string()
            .starts_with("layers: there is no such setting"),
        "{error}"
    );
}
