//! Adapters: what they add, where they lie, what is trained, and their files.

use anymesh_checkpoint::{
    Memory, Source, TensorInfo,
    lora::{self, Merged},
};
use anymesh_core::{DType, Mesh, Tensor, grad::Gradients, ops::Rng, spmd::Ledger};
use anymesh_train::{
    Build, Error, Init, Lora, Module, Pass, Policy, Result, add_lora,
    data::Batch,
    load_lora, lora_pass, lora_values, merge_lora,
    models::Model,
    models::{Llama, LlamaConfig, Tokens},
    nn::{Embedding, Linear},
    objective::{Language, language},
    save_lora,
    trainer::{LanguageModel, Task},
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::PathBuf};

fn mesh(axes: &str) -> Mesh {
    let device = anymesh_backend_cpu::device();
    match axes {
        "" => Mesh::single(&device),
        _ => Mesh::new(axes, &device).expect("a mesh"),
    }
}

const MESHES: [&str; 6] = ["", "dp=2", "dp=3", "tp=2", "dp=2, tp=2", "tp=3"];

fn build(mesh: &Mesh, dtype: DType) -> Build {
    Build::new(mesh, Policy::all(dtype), 7)
}

fn model(mesh: &Mesh, dtype: DType) -> Result<Llama> {
    let config = LlamaConfig {
        vocab_size: 24,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: Some(3),
        tie_word_embeddings: true,
        initializer_range: 0.3,
        ..LlamaConfig::default()
    };
    Llama::new(&build(mesh, dtype), &config)
}

/// Everything that a model of this kind can have adapters on.
const LINEARS: &str = "*_proj.weight";

fn settings() -> Lora {
    Lora {
        rank: 3,
        alpha: 5.0,
        dropout: 0.0,
        seed: 11,
    }
}

/// Gives the second factors of all adapters other values than zeros.
fn move_away(model: &mut Llama) -> Result<()> {
    let mut seed = 0;
    model.try_each(&mut |name, p| {
        if name.contains("lora_B") {
            seed += 1;
            let value = p.value();
            let place = (value.mesh(), value.sharding().clone());
            let values = Tensor::normal(
                value.shape().clone(),
                0.0,
                0.2,
                value.dtype(),
                place,
                Rng::new(seed),
            );
            p.set(&values?)?;
        }
        Ok(())
    })
}

fn logits(model: &Llama) -> Result<Tensor> {
    let rows = [vec![1, 5, 2, 9], vec![3, 3, 7, 20], vec![8, 1, 0, 23]];
    let tokens = Tokens::of_rows(model.embed_tokens.weight.value().mesh(), &rows)?;
    model.logits(&tokens, &Pass::eval(), None)
}

fn loss(model: &Llama) -> Result<Tensor> {
    let logits = logits(model)?;
    let labels = Tensor::from_fn([3, 4], (logits.mesh(), "[@dp?, _]"), |at| {
        ((at[0] * 4 + at[1]) * 5 % 24) as i32
    })?;
    let options = Language {
        output: logits.dtype(),
        ..Language::default()
    };
    language(&logits, &labels, &options)
}

/// The gradients of all that has one, by name, and where each lies.
fn gradients(model: &Llama, found: &Gradients) -> Result<BTreeMap<String, Tensor>> {
    let mut all = BTreeMap::new();
    let mut outcome = Ok(());
    model.visit("", &mut |name, p| {
        let mut one = || -> Result<()> {
            if let Some(gradient) = p.partial_gradient(found)? {
                all.insert(name.to_string(), p.place_gradient(&gradient)?);
            }
            Ok(())
        };
        if outcome.is_ok() {
            outcome = one();
        }
    });
    outcome.map(|()| all)
}

fn bits(x: &Tensor) -> Vec<u32> {
    let values = x.to_vec::<f32>().expect("f32");
    values.into_iter().map(f32::to_bits).collect()
}

#[track_caller]
fn near(what: &str, found: &Tensor, expected: &Tensor, within: f64) {
    let wide = |x: &Tensor| {
        let wide = x.cast(DType::F64).and_then(|x| x.to_vec::<f64>());
        wide.expect("numbers")
    };
    let (found, expected) = (wide(found), wide(expected));
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let apart = apart.fold(0.0, f64::max);
    assert!(apart <= within * most, "{what}: {apart:e} apart");
}

#[test]
fn an_adapted_model_begins_as_its_base_to_the_bit() -> Result<()> {
    for axes in MESHES {
        let mut model = model(&mesh(axes), DType::F32)?;
        let before = logits(&model)?;
        assert_eq!(add_lora(&mut model, LINEARS, &settings())?, 14);
        let after = logits(&model)?;
        assert_eq!(bits(&before), bits(&after), "{axes}");
        assert_eq!(before.type_string(), after.type_string());
        move_away(&mut model)?;
        assert_ne!(bits(&before), bits(&logits(&model)?), "{axes}");
    }
    Ok(())
}

#[test]
fn adapters_are_cut_as_their_weights_are() -> Result<()> {
    for (axes, tp) in [("tp=2", "@tp"), ("dp=2, tp=2", "@tp"), ("dp=2", "")] {
        let mut model = model(&mesh(axes), DType::F32)?;
        add_lora(&mut model, LINEARS, &settings())?;
        let values = model.values();
        let found = |name: &str| values[&format!("model.layers.1.{name}.weight")].type_string();
        for (layer, [wide, flat]) in [
            ("self_attn.q_proj", [12, 12]),
            ("self_attn.k_proj", [6, 12]),
            ("mlp.up_proj", [20, 12]),
        ] {
            assert_eq!(found(&format!("{layer}.lora_A")), format!("f32[3, {flat}]"));
            let expected = format!("f32[{wide}{tp}, 3]");
            assert_eq!(found(&format!("{layer}.lora_B")), expected);
        }
        for (layer, [wide, flat]) in [("self_attn.o_proj", [12, 12]), ("mlp.down_proj", [12, 20])] {
            let expected = format!("f32[3, {flat}{tp}]");
            assert_eq!(found(&format!("{layer}.lora_A")), expected);
            assert_eq!(found(&format!("{layer}.lora_B")), format!("f32[{wide}, 3]"));
        }
    }
    Ok(())
}

#[test]
fn the_output_of_an_adapted_layer_lies_as_the_bases_and_nothing_more_is_sent() -> Result<()> {
    let mesh = mesh("tp=2");
    for (sharding, cut, expected) in [
        ("[@tp?, _]", "[_, _]", "f32[4, 8@tp]"),
        ("[_, @tp?]", "[_, @tp]", "f32[4, 8] sum(tp)"),
    ] {
        let b = build(&mesh, DType::F32);
        let mut linear = Linear::new(&b, [6, 8], sharding, Init::Normal(1.0))?;
        let x = Tensor::normal([4, 6], 0.0, 1.0, DType::F32, (&mesh, cut), Rng::new(3))?;
        let base = linear.forward(&x)?;
        add_lora(&mut linear, "weight", &settings())?;
        assert_eq!(linear.names(), ["weight", "lora_A.weight", "lora_B.weight"]);
        let (adapted, ledger) = Ledger::record(|| linear.forward(&x));
        let adapted = adapted?;
        assert_eq!(adapted.type_string(), base.type_string());
        assert_eq!(adapted.sharding(), base.sharding(), "{expected}");
        assert_eq!(ledger.bytes(), 0, "{ledger}");
    }
    Ok(())
}

#[test]
fn only_adapters_have_gradients_the_same_on_every_mesh_and_recomputed() -> Result<()> {
    let mut first: Option<BTreeMap<String, Tensor>> = None;
    for axes in MESHES {
        let mut model = model(&mesh(axes), DType::F64)?;
        let lora = Lora {
            dropout: 0.25,
            ..settings()
        };
        add_lora(
            &mut model,
            "*.q_proj.weight, *.v_proj.weight, *.down_proj.weight",
            &lora,
        )?;
        move_away(&mut model)?;
        lora_pass(&mut model, &Pass::train(Rng::new(5)));
        let found = gradients(&model, &loss(&model)?.backward()?)?;
        assert_eq!(found.len(), 2 * 2 * 3);
        for (name, gradient) in &found {
            assert!(name.contains(".lora_"), "{name}");
            let most = gradient.abs()?.max_all()?.item()?.to_f64();
            assert!(most > 1e-3, "{name} of {axes}: {most}");
        }
        // Frozen, recomputed and adapted.
        model.set_recompute(true);
        let loss = loss(&model)?;
        // What was said of dropout when it ran holds when it runs again.
        lora_pass(&mut model, &Pass::eval());
        let again = gradients(&model, &loss.backward()?)?;
        assert!(found.keys().eq(again.keys()));
        for (name, gradient) in &again {
            let both = [gradient, &found[name]].map(|g| g.to_vec::<f64>().expect("f64"));
            match axes {
                "" => assert_eq!(both[0], both[1], "{name}"),
                // A layer that is recomputed gets its gradient added up over ranks.
                _ => near(&format!("{name} on {axes}"), gradient, &found[name], 1e-14),
            }
        }
        let first = first.get_or_insert_with(|| found.clone());
        for (name, gradient) in &found {
            near(&format!("{name} on {axes}"), gradient, &first[name], 1e-12);
        }
        // Dropout does something.
        let plain = gradients(&model, &self::loss(&model)?.backward()?)?;
        let moved = plain.iter().any(|(name, gradient)| {
            let both = [gradient, &found[name]].map(|g| g.to_vec::<f64>().expect("f64"));
            both[0] != both[1]
        });
        assert!(moved);
    }
    Ok(())
}

#[test]
fn a_training_run_tells_adapters_what_a_pass_is_for() -> Result<()> {
    let (mesh, lora) = (mesh("tp=2"), settings());
    let mut model = model(&mesh, DType::F32)?;
    add_lora(
        &mut model,
        LINEARS,
        &Lora {
            dropout: 0.5,
            ..lora
        },
    )?;
    move_away(&mut model)?;
    let mut task = LanguageModel::new(Model::Llama(model), Language::default(), 4);
    let counting = |by: usize| Tensor::from_fn([2, 4], &mesh, |at| (at[0] + by * at[1]) as i32);
    let batch = Batch::new(counting(3)?, counting(5)?);
    let mut loss = |pass: Pass| task.loss(&batch, &pass)?.item().map_err(Error::from);
    let [first, second] = [1, 2].map(|seed| Pass::train(Rng::new(seed)));
    let found = loss(first)?;
    assert_ne!(found, loss(second)?);
    assert_ne!(found, loss(Pass::eval())?);
    assert_eq!(loss(Pass::eval())?, loss(Pass::eval())?);
    assert_eq!(found, loss(first)?);
    Ok(())
}

#[test]
fn at_first_only_the_second_factor_has_something_to_learn() -> Result<()> {
    let mut model = model(&mesh("tp=2"), DType::F32)?;
    add_lora(&mut model, "*.q_proj.weight", &settings())?;
    let found = gradients(&model, &loss(&model)?.backward()?)?;
    for (name, gradient) in found {
        let most = gradient.abs()?.max_all()?.item()?.to_f64();
        assert_eq!(most > 0.0, name.contains("lora_B"), "{name}: {most}");
    }
    Ok(())
}

#[test]
fn merging_gives_what_the_adapters_gave() -> Result<()> {
    for axes in MESHES {
        for (dtype, within) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let mut model = model(&mesh(axes), dtype)?;
            let names = model.names();
            let types = |model: &Llama| -> Vec<String> {
                model.values().values().map(Tensor::type_string).collect()
            };
            let lies = types(&model);
            add_lora(&mut model, LINEARS, &settings())?;
            move_away(&mut model)?;
            let adapted = logits(&model)?;
            assert_eq!(merge_lora(&mut model)?, 14);
            near(axes, &logits(&model)?, &adapted, within);
            assert_eq!((model.names(), types(&model)), (names, lies));
            assert_eq!(merge_lora(&mut model)?, 0);
        }
    }
    Ok(())
}

#[test]
fn a_merged_bf16_weight_is_rounded_once() -> Result<()> {
    let mesh = mesh("");
    let policy = Policy::all(DType::BF16);
    let mut linear = Linear::new(&Build::new(&mesh, policy, 1), [1, 1], "[_, _]", Init::Ones)?;
    let lora = Lora {
        rank: 1,
        alpha: 1.0,
        ..Lora::default()
    };
    add_lora(&mut linear, "weight", &lora)?;
    let full = |x: f64| Tensor::full([1, 1], x, DType::F32, &mesh);
    // 1 + 5/128 * 5/8 = 1.0244140625: rounded twice it would be 1.015625 or 1.03125's neighbour.
    linear.set_values(&BTreeMap::from([
        ("lora_A.weight".to_string(), full(5.0 / 128.0)?),
        ("lora_B.weight".to_string(), full(5.0 / 8.0)?),
    ]))?;
    merge_lora(&mut linear)?;
    let merged = linear.weight.value().item()?.to_f64();
    assert_eq!(merged, 1.0234375, "the nearest of steps of 1/128");
    Ok(())
}

#[derive(Module)]
struct Words {
    embed: Embedding,
    head: Linear,
}

#[test]
fn what_cannot_have_an_adapter_is_refused_and_nothing_is_changed() -> Result<()> {
    let b = build(&mesh("tp=2"), DType::F32);
    let mut words = Words {
        embed: Embedding::new(&b.at("embed"), [8, 4], "[@tp?, _]", Init::Normal(1.0))?,
        head: Linear::new(&b.at("head"), [4, 8], "[@tp?, _]", Init::Normal(1.0))?,
    };
    let error = add_lora(&mut words, "*.weight", &settings()).unwrap_err();
    assert!(
        matches!(&error, Error::Parameter { name, .. } if name == "embed.weight"),
        "{error}"
    );
    assert_eq!(words.names(), ["embed.weight", "head.weight"]);
    assert!(words.embed.weight.is_trainable() && words.head.weight.is_trainable());

    let error = add_lora(&mut words, "*.q_proj.weight", &settings()).unwrap_err();
    assert!(matches!(error, Error::Pattern { .. }), "{error}");
    let bad = |lora: Lora, key: &str| {
        let mut head = words.head.clone();
        match add_lora(&mut head, "weight", &lora) {
            Err(Error::Config { key: found, .. }) => assert_eq!(found, key),
            other => panic!("{other:?}"),
        }
    };
    let good = settings();
    bad(Lora { rank: 0, ..good }, "lora.rank");
    let alpha = f64::NAN;
    bad(Lora { alpha, ..good }, "lora.alpha");
    for dropout in [-0.1, 1.0, f64::NAN] {
        bad(Lora { dropout, ..good }, "lora.dropout");
    }
    assert_eq!(add_lora(&mut words, "head.weight", &settings())?, 1);
    let error = add_lora(&mut words, "head.weight", &settings()).unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
    Ok(())
}

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anymesh-{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&path).ok();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A model as a source of its tensors.
fn memory(model: &Llama) -> Result<Memory> {
    let mut memory = Memory::default();
    for (name, value) in model.values() {
        let info = TensorInfo {
            dtype: value.dtype(),
            shape: value.dims().to_vec(),
        };
        memory.insert(name, info, value.to_bytes()?)?;
    }
    Ok(memory)
}

#[test]
fn a_saved_adapter_is_peft_s_and_is_read_on_another_mesh() -> Result<()> {
    let folder = Folder::new("lora-saved");
    let mut trained = model(&mesh("dp=2, tp=2"), DType::F32)?;
    add_lora(
        &mut trained,
        "*.q_proj.weight, *.o_proj.weight",
        &settings(),
    )?;
    let other = Lora {
        rank: 2,
        alpha: 3.0,
        ..settings()
    };
    add_lora(&mut trained, "model.layers.1.mlp.up_proj.weight", &other)?;
    move_away(&mut trained)?;
    trained.unfreeze("model.norm.weight")?;
    let norm = Tensor::full([12], 1.5, DType::F32, &mesh("dp=2, tp=2"))?;
    trained.set_values(&BTreeMap::from([("model.norm.weight".to_string(), norm)]))?;
    let about = Map::from_iter([("base_model_name_or_path".to_string(), json!("tiny"))]);
    save_lora(&folder.0, &trained, &about)?;

    // The files are what PEFT reads.
    let text = std::fs::read_to_string(folder.0.join("adapter_config.json")).expect("written");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    let up = "model.layers.1.mlp.up_proj";
    assert_eq!(config["peft_type"], "LORA");
    // The first in the order of names has it without a pattern.
    assert_eq!(
        (&config["r"], &config["lora_alpha"]),
        (&json!(3), &json!(5))
    );
    assert_eq!(config["rank_pattern"], json!({up: 2}));
    assert_eq!(config["alpha_pattern"], json!({up: 3}));
    assert_eq!(config["modules_to_save"], json!(["model.norm"]));
    assert_eq!(config["base_model_name_or_path"], "tiny");
    assert_eq!(config["target_modules"].as_array().map(Vec::len), Some(5));
    let (file, read) = lora::open(&folder.0)?;
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    assert_eq!(file.info(name)?.shape, [3, 12]);
    assert_eq!(file.tensors().len(), 11);

    // Another model takes it over.
    let mut again = model(&mesh("tp=3"), DType::F32)?;
    assert_eq!(load_lora(&mut again, &folder.0)?, 5);
    let (values, expected) = (again.values(), trained.values());
    assert!(values.keys().eq(expected.keys()));
    for (name, value) in &values {
        assert_eq!(bits(value), bits(&expected[name]), "{name}");
    }
    near("logits", &logits(&again)?, &logits(&trained)?, 1e-5);
    let trainable: Vec<String> = lora_values(&again).into_keys().collect();
    assert!(trainable.iter().eq(lora_values(&trained).keys()));
    assert_eq!(trainable.len(), 11);

    // Merged by reading and merged in memory, the weights are the same.
    let base = memory(&model(&mesh(""), DType::F32)?)?;
    let merged = Merged::new(&base, &file, &read)?;
    assert_eq!(merged.changed().count(), 6);
    merge_lora(&mut trained)?;
    for (name, value) in trained.values() {
        let stored = anymesh_checkpoint::load(&merged, &name, value.mesh())?;
        near(&name, &value, &stored, 1e-6);
        if name.contains("norm") || name.contains("k_proj") {
            assert_eq!(bits(&value), bits(&stored), "{name}");
        }
    }
    Ok(())
}

#[test]
fn whole_numbers_merge_to_the_same_bits_read_and_in_memory() -> Result<()> {
    let folder = Folder::new("lora-bits");
    let mut model = model(&mesh("tp=2"), DType::F32)?;
    model.try_each(&mut |_, p| p.set(&p.value().mul(64.0)?.round()?))?;
    let base = memory(&model)?;
    let lora = Lora {
        rank: 4,
        alpha: 8.0,
        ..settings()
    };
    add_lora(&mut model, LINEARS, &lora)?;
    move_away(&mut model)?;
    model.try_each(&mut |name, p| match name.contains(".lora_") {
        true => p.set(&p.value().mul(16.0)?.round()?),
        false => Ok(()),
    })?;
    save_lora(&folder.0, &model, &Map::new())?;
    let (file, config) = lora::open(&folder.0)?;
    let merged = Merged::new(&base, &file, &config)?;
    merge_lora(&mut model)?;
    for (name, value) in model.values() {
        let stored = anymesh_checkpoint::load(&merged, &name, value.mesh())?;
        assert_eq!(bits(&value), bits(&stored), "{name}");
    }
    Ok(())
}

#[test]
fn what_an_adapter_has_no_place_for_is_an_error_and_nothing_is_changed() -> Result<()> {
    let folder = Folder::new("lora-wrong");
    let small = |inside: usize| -> Result<Words> {
        let b = build(&mesh(""), DType::F32);
        Ok(Words {
            embed: Embedding::new(&b.at("embed"), [8, inside], "[_, _]", Init::Normal(1.0))?,
            head: Linear::new(&b.at("head"), [inside, 8], "[_, _]", Init::Normal(1.0))?,
        })
    };
    let mut words = small(4)?;
    let error = save_lora(&folder.0, &words, &Map::new()).unwrap_err();
    assert!(matches!(error, Error::Config { .. }), "{error}");
    add_lora(&mut words, "head.weight", &settings())?;
    save_lora(&folder.0, &words, &Map::new())?;
    let error = save_lora(&folder.0, &words, &Map::new()).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(_)), "{error}");

    let mut llama = model(&mesh(""), DType::F32)?;
    let names = llama.names();
    let error = load_lora(&mut llama, &folder.0).unwrap_err();
    assert!(
        matches!(&error, Error::Parameter { name, .. } if name == "head.weight"),
        "{error}"
    );
    assert_eq!(llama.names(), names);
    assert!(llama.norm.weight.is_trainable());

    let mut wide = small(6)?;
    let error = load_lora(&mut wide, &folder.0).unwrap_err();
    assert!(error.to_string().contains("[3, 4]"), "{error}");
    assert_eq!(wide.names().len(), 2);

    let error = load_lora(&mut words, &folder.0).unwrap_err();
    assert!(error.to_string().contains("already"), "{error}");
    assert!(load_lora(&mut small(4)?, folder.0.join("none")).is_err());
    Ok(())
}
