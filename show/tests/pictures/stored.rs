//! Checkpoints, from their manifests.

use crate::{hostile::names, inspect::check, svg};
use anymesh_checkpoint::manifest::{FORMAT, Manifest, Stored, StoredRegion, VERSION};
use anymesh_show::Show;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

fn stored(dtype: &str, shape: &[usize], layout: &str) -> Stored {
    let region = StoredRegion {
        start: vec![0; shape.len()],
        shape: shape.into(),
        file: "data.safetensors".into(),
        offset: 0,
        sums: vec![],
    };
    Stored {
        dtype: dtype.into(),
        shape: shape.into(),
        layout: layout.into(),
        regions: vec![region],
    }
}

fn manifest(tensors: impl IntoIterator<Item = (String, Stored)>) -> Manifest {
    Manifest {
        format: FORMAT.into(),
        version: VERSION,
        step: 7,
        mesh: vec![],
        tensors: tensors.into_iter().collect(),
        files: BTreeMap::new(),
        state: Map::new(),
    }
}

#[test]
fn a_checkpoint_shows_tensors_files_and_state() {
    let tensor = |i: usize| {
        let tensor = stored("bf16", &[64, 8], "bf16[64@tp, 8]");
        (format!("h.{i}.weight"), tensor)
    };
    let mut held = manifest((0..3).map(tensor));
    held.mesh = vec![("dp".into(), 2), ("tp".into(), 4)];
    held.files.insert("data.safetensors".into(), 4096);
    held.state.insert("tokens".into(), 123.into());
    let picture = svg(&held);
    assert!(picture.contains(">h.2</text>") && picture.contains("1 KiB"));
    assert!(picture.contains("step 7, saved from mesh(dp=2, tp=4): 3 tensors, 3 KiB"));
    let html = held.html();
    for text in ["bf16[64@tp, 8]", "data.safetensors", "tokens", "123"] {
        assert!(html.contains(text), "{text}");
    }
}

#[test]
fn checkpoints_of_any_size_and_with_every_name() {
    check(&manifest([]));
    svg(&manifest(
        (0..5000).map(|i| (format!("layer.{i}.w"), stored("f32", &[i], ""))),
    ));
    for name in names() {
        let shapes: [&[usize]; 4] = [&[], &[0, usize::MAX], &[usize::MAX, 2], &[3, 5]];
        let tensors = shapes.iter().enumerate().map(|(i, shape)| {
            // Names are different in their beginnings, or at all.
            (format!("{name}{i}.{name}"), stored(&name, shape, &name))
        });
        let mut held = manifest(tensors);
        held.mesh = vec![(name.clone(), usize::MAX), (name.clone(), 0)];
        held.files.insert(name.clone(), u64::MAX);
        let nested = Value::from(vec![Value::from(name.clone()), Value::Null]);
        held.state.insert(name.clone(), nested);
        svg(&held);
    }
}
