//! `docs/manifest.schema.json` says of manifests what the library does.

mod common;

use anymesh_checkpoint::{
    Background, Checkpoint, Contents, Result, Saver, manifest, manifest::Manifest,
};
use anymesh_core::{DType, Mesh, Tensor};
use common::Temporary;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::Path};

fn schema() -> Value {
    serde_json::from_str(include_str!("../../docs/manifest.schema.json")).expect("JSON")
}

/// Holds manifests against the schema.
struct Validator(boon::Schemas, boon::SchemaIndex);

impl Validator {
    fn new() -> Self {
        let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
        compiler
            .add_resource("manifest.schema.json", schema())
            .expect("a resource");
        let index = compiler
            .compile("manifest.schema.json", &mut schemas)
            .expect("a schema");
        Self(schemas, index)
    }

    fn check(&self, manifest: &Value) -> Result<(), String> {
        self.0
            .validate(manifest, self.1)
            .map_err(|error| error.to_string())
    }
}

fn stored(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join(manifest::NAME)).expect("a manifest"))
        .expect("JSON")
}

/// A checkpoint with everything a manifest can have: several types, layouts and regions, tensors
/// without elements and without dimensions, and state.
fn saved(root: &Path) -> Result<Value> {
    let device = anymesh_backend_cpu::device();
    let mesh = Mesh::new("dp=2, tp=2", &device)?;
    let mut tensors = BTreeMap::new();
    for dtype in DType::ALL {
        let x = Tensor::zeros([5, 6], dtype, &device)?;
        tensors.insert(format!("cut.{dtype}"), x.to_mesh(&mesh, "[@dp, @tp]")?);
        tensors.insert(format!("whole/{dtype} \"ü\""), x);
    }
    tensors.insert("empty".into(), Tensor::zeros([0, 3], DType::F32, &device)?);
    tensors.insert("scalar".into(), Tensor::zeros((), DType::F32, &device)?);
    let state = json!({"samples": u64::MAX, "rng": {"seed": -1, "counters": [1, 2]}, "lr": 1e-300, "nothing": null}).as_object().cloned().expect("an object");
    let path = Saver::default().save(
        root,
        "one",
        &Contents {
            step: u64::MAX,
            tensors,
            state,
            ..Contents::default()
        },
    )?;
    Ok(stored(&path))
}

#[test]
fn manifests_that_the_library_writes_and_wrote_follow_the_schema() -> Result<()> {
    let (root, schema) = (Temporary::here(), Validator::new());
    assert_eq!(schema.check(&saved(&root)?), Ok(()));
    assert_eq!(schema.check(&stored(&common::data("version-1"))), Ok(()));
    let nothing = Saver::default().save(&root, "nothing", &Contents::default())?;
    assert_eq!(schema.check(&stored(&nothing)), Ok(()));

    let x = Tensor::zeros([3_000_000], DType::BF16, &anymesh_backend_cpu::device())?;
    let mut background = Background::new(&*root).with_average(0.5, None)?;
    background.begin(
        "background",
        &Contents::new(1, BTreeMap::from([("x".to_string(), x)])),
    )?;
    let path = background.finish()?.expect("written");
    assert!(
        Checkpoint::open(&path)?
            .manifest()
            .tensors
            .contains_key("ema.x")
    );
    assert_eq!(schema.check(&stored(&path)), Ok(()));
    Ok(())
}

#[test]
fn the_schema_names_every_dtype_and_the_version() {
    let schema = schema();
    let names = DType::ALL.map(|dtype| json!(dtype.name())).to_vec();
    assert_eq!(
        schema["$defs"]["tensor"]["properties"]["dtype"]["enum"],
        Value::Array(names)
    );
    assert_eq!(
        schema["properties"]["version"]["const"],
        json!(manifest::VERSION)
    );
    assert_eq!(
        schema["properties"]["format"]["const"],
        saved(&Temporary::here()).expect("saved")["format"]
    );
}

/// Changes of a good manifest: where, and to what (`null` takes it away).
fn broken() -> Vec<(&'static str, Value)> {
    let mut list = vec![
        ("/format", json!("other")),
        ("/version", json!(0)),
        ("/version", json!("1")),
        ("/version", json!(manifest::VERSION + 1)),
        ("/step", json!(-1)),
        ("/step", json!(1.5)),
        ("/mesh", json!({"x": 2})),
        ("/mesh/0", json!(["x"])),
        ("/mesh/0", json!(["x", 2, 3])),
        ("/mesh/0", json!([2, "x"])),
        ("/tensors", json!([])),
        ("/files", json!(["rank-00000.safetensors"])),
        ("/files/rank-00000.safetensors", json!("many")),
        ("/files/rank-00000.safetensors", json!(-8)),
        ("/files/..", json!(0)),
        ("/files/a~1b", json!(0)),
        ("/files/a\\b", json!(0)),
        ("/files/a\u{0}b", json!(0)),
        ("/files/.hidden", json!(0)),
        ("/files/manifest.json", json!(0)),
        ("/files/", json!(0)),
        ("/state", json!([1])),
        ("/tensors/empty", json!([])),
        ("/tensors/scalar/dtype", json!("f33")),
        ("/tensors/scalar/dtype", json!(32)),
        ("/tensors/scalar/shape", json!(1)),
        ("/tensors/scalar/shape", json!([-1])),
        ("/tensors/scalar/layout", json!({})),
        ("/tensors/scalar/boxes", json!({})),
        ("/tensors/scalar/boxes/0/start", json!(["0"])),
        ("/tensors/scalar/boxes/0/shape", json!([0.5])),
        (
            "/tensors/scalar/boxes/0/file",
            json!("../rank-00000.safetensors"),
        ),
        ("/tensors/scalar/boxes/0/offset", json!(-1)),
        ("/tensors/scalar/boxes/0/sums", json!("0000000000000000")),
        ("/tensors/scalar/boxes/0/sums/0", json!(0)),
    ];
    let fields = [
        "/format", "/version", "/step", "/mesh", "/tensors", "/files", "/state",
    ];
    let tensor = [
        "/tensors/scalar/dtype",
        "/tensors/scalar/shape",
        "/tensors/scalar/layout",
        "/tensors/scalar/boxes",
    ];
    let stored_region = ["start", "shape", "file", "offset", "sums"].map(|field| match field {
        "start" => "/tensors/scalar/boxes/0/start",
        "shape" => "/tensors/scalar/boxes/0/shape",
        "file" => "/tensors/scalar/boxes/0/file",
        "offset" => "/tensors/scalar/boxes/0/offset",
        _ => "/tensors/scalar/boxes/0/sums",
    });
    list.extend(
        fields
            .into_iter()
            .chain(tensor)
            .chain(stored_region)
            .map(|field| (field, Value::Null)),
    );
    list
}

/// A manifest with one thing changed, added or taken away.
fn changed(good: &Value, pointer: &str, to: &Value) -> Value {
    let mut bad = good.clone();
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    let key = key.replace("~1", "/");
    match bad.pointer_mut(parent).expect("it is there") {
        Value::Object(fields) if to.is_null() => drop(fields.remove(&key).expect("it is there")),
        Value::Object(fields) => drop(fields.insert(key, to.clone())),
        Value::Array(items) => items[key.parse::<usize>().expect("an index")] = to.clone(),
        other => panic!("{pointer} leads into {other}"),
    }
    assert_ne!(&bad, good, "{pointer}");
    bad
}

#[test]
fn what_does_not_follow_the_schema_is_refused_by_both() -> Result<()> {
    let (root, schema) = (Temporary::here(), Validator::new());
    let good = saved(&root)?;
    let parse = |manifest: &Value| {
        Manifest::parse(manifest.to_string().as_bytes(), Path::new("manifest.json"))
    };
    assert!(parse(&good).is_ok());
    for (pointer, to) in broken() {
        let bad = changed(&good, pointer, &to);
        assert!(
            schema.check(&bad).is_err(),
            "the schema takes {to} at {pointer}"
        );
        assert!(parse(&bad).is_err(), "the library takes {to} at {pointer}");
    }
    // The schema describes what is written. A reader passes over fields that it does not know, and
    // finds a sum that is none when it reads the region.
    for (pointer, to) in [
        ("/author", json!("somebody")),
        ("/tensors/scalar/note", json!("")),
        ("/tensors/scalar/boxes/0/note", json!(1)),
        ("/tensors/scalar/boxes/0/sums/0", json!("000000000000000G")),
        ("/mesh/0", json!(["", 2])),
    ] {
        let other = changed(&good, pointer, &to);
        assert!(
            schema.check(&other).is_err() && parse(&other).is_ok(),
            "{to} at {pointer}"
        );
    }
    Ok(())
}
