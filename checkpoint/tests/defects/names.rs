//! What lies under which name, from whichever layout to whichever.

use super::{saved, start};
use crate::common::named;
use anymesh_checkpoint::{
    Error, Result, Source,
    hugging_face::{Export, Folder, INDEX, export},
    list,
    map::{Mapped, Mapping, Options},
    safetensors,
};
use anymesh_core::{DType, Mesh, Region, Sharding, Tensor};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs};

/// Paddle's merge splits tensors by count, needs as many tensors as ranks, builds its index from
/// the names before renaming, and has no sizes of integers.
#[test]
fn fewer_tensors_than_ranks_renamed_integers_are_merged_with_the_right_index() -> Result<()> {
    let (device, root) = start();
    let mesh = Mesh::new("x=8", &device)?;
    let ids = Tensor::arange(0, 33, 1, DType::I32, &device)?.reshape([11, 3])?;
    let mask = Tensor::ones([5], DType::Bool, &device)?;
    let checkpoint = saved(
        &root,
        "one",
        1,
        named([
            ("ids", ids.to_mesh(&mesh, "[@x, _]")?),
            ("mask", mask.to_mesh(&mesh, "[@x]")?),
        ]),
    )?;
    let mapping = Mapping::from_lines([
        "ids -> model.ids, permute = \"[1, 0]\"",
        "mask -> model.mask",
    ])?;
    let mapped = Mapped::new(checkpoint, &mapping, &Options::default())?;
    let names = export(
        &mapped,
        root.join("merged"),
        &Export {
            max_file_bytes: 100,
            ..Export::default()
        },
    )?;
    assert_eq!(names.len(), 2, "by bytes: one file for each");
    let index: Value =
        serde_json::from_slice(&fs::read(root.join("merged").join(INDEX)).expect("an index"))
            .expect("JSON");
    assert_eq!(index["metadata"]["total_size"], json!(33 * 4 + 5));
    assert_eq!(
        index["weight_map"]
            .as_object()
            .expect("names")
            .keys()
            .collect::<Vec<_>>(),
        ["model.ids", "model.mask"]
    );
    let folder = Folder::open(root.join("merged"))?;
    assert_eq!(
        folder.read_all("model.ids")?,
        ids.transpose(0, 1)?.to_bytes()?
    );
    Ok(())
}

/// In Paddle all of a state dict is sharded or nothing. Scalars of experts had no identity of their
/// own in another layout (Model-Optimizer #2209).
#[test]
fn sharded_and_plain_tensors_and_scalars_by_name_lie_in_one_checkpoint() -> Result<()> {
    let (device, root) = start();
    let (four, two) = (Mesh::new("ep=4", &device)?, Mesh::new("ep=2", &device)?);
    let mut tensors = named([("plain", Tensor::full([3], 5.0, DType::F32, &device)?)]);
    for expert in 0..16 {
        let scale = Tensor::full((), expert as f64, DType::F32, &device)?;
        tensors.insert(
            format!("experts.{expert}.scale"),
            if expert % 3 == 0 {
                scale
            } else {
                scale.to_mesh(&four, "[]")?
            },
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    for expert in 0..16 {
        let scale = checkpoint.load(
            &format!("experts.{expert}.scale"),
            (&two, &Sharding::replicated()),
        )?;
        assert_eq!(scale.to_vec::<f32>()?, [expert as f32]);
    }
    assert_eq!(checkpoint.values::<f32>("plain")?, [5.0; 3]);
    Ok(())
}

/// A checkpoint of four pipeline stages did not load with four expert ranks (Megatron #1517).
#[test]
fn what_pipeline_stages_saved_is_loaded_by_expert_ranks() -> Result<()> {
    let (device, root) = start();
    let pipeline = Mesh::new("stage=4, tp=2", &device)?;
    let mut tensors = BTreeMap::new();
    for layer in 0..8 {
        let stage = pipeline.at("stage", layer / 2)?;
        let w = Tensor::full([4, 6, 5], layer as f64, DType::BF16, &device)?;
        tensors.insert(
            format!("layers.{layer}.experts"),
            w.to_mesh(&stage, "[_, @tp, _]")?,
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    let experts = Mesh::new("ep=4", &device)?;
    for layer in 0..8 {
        let w = checkpoint.load(
            &format!("layers.{layer}.experts"),
            (&experts, &Sharding::replicated().cut(0, 0)),
        )?;
        assert_eq!(w.shards()[3].1.dims(), [1, 6, 5]);
        assert!(
            w.cast(DType::F32)?
                .to_vec::<f32>()?
                .iter()
                .all(|v| *v == layer as f32)
        );
    }
    Ok(())
}

/// Flattened names are ambiguous (Paddle's `a.b.c`), and ours add a range to the name of a region.
/// A name is only a name, and files stay files that any reader opens.
#[test]
fn names_are_only_names_whatever_is_in_them() -> Result<()> {
    let (device, root) = start();
    let mesh = Mesh::new("x=2", &device)?;
    let names = [
        "a.b",
        "a",
        "a.b.c",
        "",
        " ",
        "a/b",
        "../a",
        "a\\b",
        "\"quoted\"",
        "line\nline",
        "\u{0}",
        "ü\u{1f600}",
        "w",
        "w@0:2",
        "w@2:4",
        "w@0:2'",
        "manifest.json",
        "*",
    ];
    let mut tensors = BTreeMap::new();
    for (i, name) in names.iter().enumerate() {
        let x = Tensor::full([4], i as f64, DType::F32, &device)?;
        tensors.insert(
            name.to_string(),
            if i % 2 == 0 {
                x.to_mesh(&mesh, "[@x]")?
            } else {
                x
            },
        );
    }
    let checkpoint = saved(&root, "one", 1, tensors)?;
    assert_eq!(checkpoint.verify(), []);
    for (i, name) in names.iter().enumerate() {
        assert_eq!(checkpoint.values::<f32>(name)?, [i as f32; 4], "{name:?}");
    }
    let mut entries = 0;
    for file in checkpoint.manifest().files.keys() {
        entries += safetensors::File::open(checkpoint.path().join(file))?
            .tensors()
            .len();
    }
    assert_eq!(
        entries,
        checkpoint
            .manifest()
            .tensors
            .values()
            .map(|t| t.regions.len())
            .sum::<usize>(),
        "an entry for each region"
    );
    // The one name that files have another use for.
    let error = saved(
        &root,
        "two",
        2,
        named([("__metadata__", Tensor::ones([2], DType::F32, &device)?)]),
    )
    .expect_err("reserved");
    assert!(
        matches!(&error, Error::BadName { name, .. } if name == "__metadata__"),
        "{error}"
    );
    assert_eq!(
        (
            list(&root)?.len(),
            fs::read_dir(&*root).expect("a folder").count()
        ),
        (1, 2),
        "nothing is left but the lock"
    );
    Ok(())
}

/// Scalars made every rank read the files of all others (torch #125740). A region is read from the
/// files it is in, and no other is opened.
#[test]
fn a_read_needs_only_the_files_that_hold_its_regions() -> Result<()> {
    let (device, root) = start();
    let mesh = Mesh::new("x=4", &device)?;
    let w = Tensor::arange(0, 32, 1, DType::I64, &device)?.reshape([8, 4])?;
    let checkpoint = saved(
        &root,
        "one",
        1,
        named([
            ("w", w.to_mesh(&mesh, "[@x, _]")?),
            ("step", Tensor::full((), 9.0, DType::F32, &device)?),
        ]),
    )?;
    let of = |tensor: &str, row: usize| {
        let regions = &checkpoint.manifest().tensors[tensor].regions;
        regions
            .iter()
            .find(|b| {
                b.start
                    .first()
                    .is_none_or(|s| (*s..s + b.shape[0]).contains(&row))
            })
            .expect("a region")
            .file
            .clone()
    };
    let (scalar, rows) = (of("step", 0), of("w", 5));
    for file in checkpoint
        .manifest()
        .files
        .keys()
        .filter(|f| **f != scalar && **f != rows)
    {
        fs::remove_file(checkpoint.path().join(file)).expect("ours");
    }
    assert_eq!(checkpoint.values::<f32>("step")?, [9.0]);
    let (region, mut bytes) = (
        Region {
            start: [4, 0].into_iter().collect(),
            shape: [2, 4].into_iter().collect(),
        },
        vec![0; 64],
    );
    checkpoint.read("w", &region, &mut bytes)?;
    assert_eq!(
        bytes,
        (16..24i64).flat_map(i64::to_le_bytes).collect::<Vec<_>>()
    );
    assert!(
        matches!(checkpoint.values::<i64>("w"), Err(Error::Io { .. })),
        "the rest is gone"
    );
    Ok(())
}
