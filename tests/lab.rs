//! What the page in the browser must show (`examples/web/samples/expected.json`), computed natively.
//! Where it changes for a reason, `ANYMESH_UPDATE=1 cargo test --test lab` writes it anew.

#[allow(unreachable_pub, dead_code)]
#[path = "../examples/web/src/model.rs"]
mod model;

use anymesh::{
    Mesh, Place, Tensor, TensorType,
    checkpoint::{Checkpoint, Source, gguf, safetensors},
    conformance::registry::{self, Attrs},
    meta,
    reshard::{self, Objective},
    spmd::Ledger,
};
use model::{Model, Options, Text};
use serde_json::{Value, json};
use std::{error::Error, path::Path};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The steps that the browser trains, and the mesh.
const STEPS: usize = 50;
const MESH: &str = "dp=2, tp=2";

/// How far a browser's losses may be from these: its sums and functions round otherwise, and 50
/// steps of Adam carry that on.
const WITHIN: f64 = 2e-3;

/// What the form has when the page is opened.
fn text() -> Result<String> {
    let page = std::fs::read_to_string(here("examples/web/app.js"))?;
    let (_, rest) = page
        .split_once("trainForm.elements.text.value =")
        .ok_or("app.js has no text to learn")?;
    let (parts, _) = rest
        .split_once(";\n")
        .ok_or("app.js: the text has no end")?;
    let part = |p: &str| serde_json::from_str::<String>(p.trim());
    // As `Training::create` takes it.
    let text = parts
        .split(" +\n")
        .map(part)
        .collect::<Result<String, _>>()?;
    Ok(text.trim().to_string())
}

fn here(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn losses(axes: &str) -> Result<Vec<f64>> {
    let mesh = Mesh::new(axes, &anymesh::device("cpu")?)?;
    let options = Options::default();
    let learnt = Text::new(&text()?, options.context)?;
    let mut model = Model::new(options, learnt.vocabulary(), &mesh)?;
    (0..STEPS)
        .map(|_| Ok(model.step(&learnt)?.item()?.to_f64()))
        .collect()
}

fn rule(mesh: &str, op: &str, inputs: &[&str], attrs: Value) -> Result<Value> {
    let on = Mesh::new(mesh, &meta())?;
    let make = |ty: &&str| {
        let ty = TensorType::parse(ty, &on)?;
        Tensor::zeros(&ty.shape, ty.dtype, (&on, &ty.sharding)).map(Some)
    };
    let operands = inputs
        .iter()
        .map(make)
        .collect::<anymesh::Result<Vec<_>>>()?;
    let entry = registry::find(op)?;
    let call = || entry.call(&operands, &Attrs::new(entry, &attrs)?, &Place::from(&on));
    let (outputs, ledger) = Ledger::record(call);
    let outputs: Vec<String> = outputs?.iter().map(Tensor::type_string).collect();
    Ok(
        json!({ "mesh": mesh, "op": op, "inputs": inputs, "attrs": attrs, "bytes": ledger.bytes(), "outputs": outputs }),
    )
}

fn plan(mesh: &str, from: &str, to: &str) -> Result<Value> {
    let on = Mesh::new(mesh, &meta())?;
    let (a, b) = (TensorType::parse(from, &on)?, TensorType::parse(to, &on)?);
    let plan = reshard::plan(
        &on,
        &a.shape,
        a.dtype,
        &a.sharding,
        &b.sharding,
        Objective::Time,
    )?;
    Ok(
        json!({ "mesh": mesh, "from": from, "to": to, "bytes": plan.recv_bytes, "steps": plan.steps.len() }),
    )
}

fn file(files: &[&str], source: &dyn Source, look: &str) -> Result<Value> {
    let shows = source.info(look)?.to_string();
    Ok(json!({ "files": files, "tensors": source.tensors().len(), "look": look, "shows": shows }))
}

fn expected() -> Result<Value> {
    let data = |name: &str| here("checkpoint/tests/data").join(name);
    Ok(json!({
        "rules": [
            rule("dp=2, tp=4", "matmul", &["f32[64@dp, 32]", "f32[32, 64@tp]"], json!({}))?,
            rule("dp=2, tp=4", "matmul", &["f32[64@dp, 32@tp]", "f32[32, 64@tp]"], json!({}))?,
            rule("dp=3, tp=5", "softmax", &["f32[60, 62@tp]"], json!({ "axis": 1 }))?,
            rule("x=2, y=2, z=2", "add", &["f32[8@x, 8@y]", "f32[8@z, 8]{sum:y}"], json!({}))?,
        ],
        "plans": [
            plan("dp=2, tp=4", "f32[64@dp, 64@tp]", "f32[64@tp@dp, 64]")?,
            plan("dp=2, tp=4", "f32[64, 64]{sum:tp}", "f32[64@dp, 64]")?,
            plan("a=3", "bf16[7@a, 5]", "bf16[7, 5@a]")?,
        ],
        "files": [
            file(&["llama.gguf"], &gguf::File::open(data("gguf/llama.gguf"))?, "blk.0.attn_q.weight")?,
            file(&["types.safetensors"], &safetensors::File::open(data("safetensors/types.safetensors"))?, "float32.3")?,
            file(
                &["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"],
                &Checkpoint::open(data("version-1"))?,
                "bfloat16.1",
            )?,
        ],
        "training": { "mesh": MESH, "steps": STEPS, "losses": losses(MESH)?, "within": WITHIN },
    }))
}

#[test]
fn the_page_is_held_against_what_runs_here() -> Result<()> {
    let path = here("examples/web/samples/expected.json");
    let found = expected()?;
    if std::env::var_os("ANYMESH_UPDATE").is_some() {
        std::fs::write(&path, format!("{found:#}\n"))?;
    }
    let written: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    for part in ["rules", "plans", "files"] {
        assert_eq!(written[part], found[part], "{part}");
    }
    let numbers = |v: &Value| -> Vec<f64> {
        let list = v["training"]["losses"].as_array();
        list.into_iter()
            .flatten()
            .filter_map(Value::as_f64)
            .collect()
    };
    let (then, now) = (numbers(&written), numbers(&found));
    assert_eq!(then.len(), STEPS);
    for (n, (a, b)) in then.iter().zip(&now).enumerate() {
        assert!(
            (a - b).abs() < 1e-4,
            "step {n}: {a} was written, {b} is right"
        );
    }
    assert!(now[STEPS - 1] < 0.5 * now[0], "it learns nothing: {now:?}");
    Ok(())
}

#[test]
fn the_model_learns_the_same_on_every_mesh() -> Result<()> {
    let one = losses("dp=1")?;
    for axes in [MESH, "tp=3", "dp=3, tp=2"] {
        let there = losses(axes)?;
        let off = one
            .iter()
            .zip(&there)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max);
        assert!(off < 1e-3, "{axes}: losses differ by {off}");
    }
    Ok(())
}
