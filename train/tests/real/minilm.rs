//! MiniLM's vectors are the recorded ones on every mesh, and come back from an exported folder.

use crate::Suite;
use anymesh_core::Mesh;
use anymesh_train::{
    Build, Encoder, Error, Module, Policy,
    models::{Model, ModelFiles},
};
use serde_json::Value;
use std::path::Path;

pub(crate) const SUITE: Suite = &[
    ("minilm_on_one_device", |path| on(path, "")),
    ("minilm_on_tp_2", |path| on(path, "tp=2")),
    ("minilm_on_tp_3", |path| on(path, "tp=3")),
    ("minilm_on_tp_5", |path| on(path, "tp=5")),
    ("minilm_on_dp_2_tp_2", |path| on(path, "dp=2, tp=2")),
    (
        "minilm_exported_from_a_mesh_gives_the_same_vectors",
        exported,
    ),
];

/// Texts with their tokens and vectors.
fn facts() -> Vec<(String, Vec<u32>, Vec<f64>)> {
    let facts: Value = serde_json::from_str(include_str!("../facts/minilm.json")).expect("JSON");
    let numbers = |v: &Value| -> Vec<f64> {
        let list = v.as_array().expect("a list").iter();
        list.map(|x| x.as_f64().expect("a number")).collect()
    };
    let sentences = facts["sentences"].as_array().expect("sentences").iter();
    sentences
        .map(|s| {
            let ids = numbers(&s["ids"]).into_iter().map(|id| id as u32);
            let text = s["text"].as_str().expect("a text").to_string();
            (text, ids.collect(), numbers(&s["embedding"]))
        })
        .collect()
}

fn mesh(axes: &str) -> Mesh {
    let device = anymesh_backend_cpu::device();
    match axes {
        "" => Mesh::single(&device),
        axes => Mesh::new(axes, &device).expect("a mesh"),
    }
}

fn encoder(path: &Path, axes: &str) -> Result<Encoder, Error> {
    let files = ModelFiles::open(path)?;
    let b = Build::new(&mesh(axes), Policy::f32(), 0);
    Encoder::new(files.load(&b)?, &files)
}

#[track_caller]
fn hold(encoder: &Encoder, what: &str) {
    let facts = facts();
    assert_eq!(facts.len(), 3);
    for (text, ids, _) in &facts {
        assert_eq!(encoder.tokens(text).expect("tokens"), *ids, "{text}");
    }
    // Together, so that the shorter ones are filled up, and one by one.
    let texts: Vec<&str> = facts.iter().map(|(text, ..)| text.as_str()).collect();
    let together = encoder.encode(&texts).expect("vectors");
    let mut worst = 0f64;
    for ((text, _, expected), vector) in facts.iter().zip(&together) {
        let alone = encoder.encode(&[text]).expect("a vector").remove(0);
        for found in [vector, &alone] {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                worst = worst.max((f64::from(*a) - b).abs());
            }
        }
    }
    println!("{what}: largest difference {worst:.2e}");
    assert!(worst < 1e-5, "{what}: {worst}");
}

fn on(path: &Path, axes: &str) {
    hold(&encoder(path, axes).expect("MiniLM"), axes);
}

fn exported(path: &Path) {
    let encoder = encoder(path, "dp=2, tp=3").expect("MiniLM");
    let Model::Bert(bert) = &encoder.model else {
        panic!("MiniLM is a BERT");
    };
    assert!(bert.pooler.is_some() && bert.names().len() == 103);
    let out = std::env::temp_dir().join(format!("anymesh-minilm-{}", std::process::id()));
    let copied = [
        "tokenizer.json",
        "modules.json",
        "sentence_bert_config.json",
    ];
    let files = copied.map(|name| {
        let bytes = std::fs::read(path.join(name)).expect(name);
        (name.to_string(), bytes)
    });
    encoder.model.export(&out, files.into()).expect("exported");
    std::fs::create_dir(out.join("1_Pooling")).expect("a folder");
    let pooling = "1_Pooling/config.json";
    std::fs::copy(path.join(pooling), out.join(pooling)).expect("copied");
    let again = crate::minilm::encoder(&out, "tp=2").expect("the export");
    hold(&again, "exported");
    let (before, after) = (ModelFiles::open(path), ModelFiles::open(&out));
    let (before, after) = (before.expect("files"), after.expect("files"));
    for (name, info) in before.source().tensors() {
        if name == "embeddings.position_ids" {
            continue;
        }
        assert_eq!(after.source().info(name).expect(name), info);
        let bytes = |files: &ModelFiles| files.source().read_all(name).expect(name);
        assert_eq!(bytes(&before), bytes(&after), "{name}");
    }
    std::fs::remove_dir_all(&out).expect("removed");
}
