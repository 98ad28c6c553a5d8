//! `ckpt merge` and `ckpt split`.

use super::*;
use anymesh::checkpoint::{Memory, Source, TensorInfo, hugging_face, safetensors};
use std::path::Path;

/// The folder of an adapter of rank 1 for `layers.0.w`: row i, column j gets `0.5 * i * j`.
fn adapter(case: &Case, r: usize) -> String {
    let folder = case.at("adapter");
    std::fs::create_dir_all(&folder).unwrap();
    let mut tensors = Memory::default();
    let floats = || {
        (0..64)
            .flat_map(|i| (i as f32).to_le_bytes())
            .collect::<Vec<u8>>()
    };
    // The base has no `.weight` at the end of its names: `layers.0.w` is a module here.
    for (name, shape) in [("lora_A", vec![1, 64]), ("lora_B", vec![64, 1])] {
        tensors
            .insert(
                format!("base_model.model.layers.0.w.{name}.weight"),
                TensorInfo {
                    dtype: DType::F32,
                    shape,
                },
                floats(),
            )
            .unwrap();
    }
    safetensors::write_source(
        Path::new(&folder).join("adapter_model.safetensors"),
        &tensors,
        &BTreeMap::new(),
        safetensors::CHUNK,
    )
    .unwrap();
    let config = json!({"peft_type": "LORA", "r": r, "lora_alpha": 0.5});
    std::fs::write(
        Path::new(&folder).join("adapter_config.json"),
        config.to_string(),
    )
    .unwrap();
    folder
}

fn floats(source: &dyn Source, name: &str) -> Vec<f32> {
    source
        .read_all(name)
        .unwrap()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn adapters_are_merged_on_the_way_to_a_file_or_a_folder() {
    let case = Case::new("lora");
    let (renamed, file, folder) = (
        case.at("renamed"),
        case.at("all.safetensors"),
        case.at("hf"),
    );
    let statements = case.at("map.txt");
    std::fs::write(
        &statements,
        "layers.$LAYER_ID.w -> layers.$LAYER_ID.w.weight\n",
    )
    .unwrap();
    text(&[
        "map",
        &case.at("one"),
        &renamed,
        "--statements",
        &statements,
    ]);
    let adapter = adapter(&case, 1);
    text(&["merge", &renamed, &file, "--lora", &adapter]);
    let expected: Vec<f32> = (0..4096)
        .map(|at| at as f32 + 0.5 * ((at / 64) * (at % 64)) as f32)
        .collect();
    assert_eq!(
        floats(
            &safetensors::File::open(&file).unwrap(),
            "layers.0.w.weight"
        ),
        expected
    );
    assert_eq!(
        object(&[
            "diff",
            &file,
            &renamed,
            "--values",
            "--remove",
            "layers.0.*"
        ])
        .0,
        0
    );

    let (_, json) = object(&[
        "merge",
        &renamed,
        &folder,
        "--lora",
        &adapter,
        "--lora",
        &adapter,
        "--max-file-size",
        "20K",
    ]);
    assert_eq!(json["files"].as_array().unwrap().len(), 2, "{json}");
    let twice = hugging_face::Folder::open(&folder).unwrap();
    assert_eq!(floats(&twice, "layers.0.w.weight")[65], 65.0 + 1.0);

    // An adapter for another model, and none at all.
    let (code, json) = object(&[
        "merge",
        &case.at("one"),
        &case.at("x.safetensors"),
        "--lora",
        &adapter,
    ]);
    assert!(
        code == 2
            && json["error"]
                .as_str()
                .unwrap()
                .contains("layers.0.w.weight"),
        "{json}"
    );
    let (code, json) = object(&[
        "merge",
        &renamed,
        &case.at("x.safetensors"),
        "--lora",
        &case.at("none"),
    ]);
    assert!(
        code == 2
            && json["error"]
                .as_str()
                .unwrap()
                .contains("adapter_model.safetensors"),
        "{json}"
    );
}

#[test]
fn a_split_checkpoint_has_plain_files_for_each_rank_and_is_merged_again() {
    let case = Case::new("split");
    let (one, split, back) = (
        case.at("one"),
        case.at("split"),
        case.at("back.safetensors"),
    );
    let options = [
        "--mesh",
        "dp=2,tp=3",
        "--layout",
        "layers.0.*=[@tp, _]",
        "--layout",
        "layers.*=[_, @tp]",
    ];
    let (_, json) = object(&[&["split", &one, &split], &options[..]].concat());
    assert_eq!(
        (&json["ranks"], json["files"].as_array().unwrap().len()),
        (&json!(6), 6)
    );
    // Rank 4 is the second of tp: rows 21..42 of the first, columns 21..42 of the second.
    let rank =
        safetensors::File::open(Path::new(&split).join("model-rank-4-part-0.safetensors")).unwrap();
    let rows: Vec<f32> = (21 * 64..42 * 64).map(|i| i as f32).collect();
    assert_eq!(floats(&rank, "layers.0.w"), rows);
    let columns: Vec<f32> = (0..64)
        .flat_map(|i| (21..42).map(move |j| (i * 64 + j + 1) as f32))
        .collect();
    assert_eq!(floats(&rank, "layers.1.w"), columns);
    assert_eq!(rank.read_all("step").unwrap(), 7i64.to_le_bytes());
    assert_eq!(rank.metadata()["format"], "pt");
    // Put together again, by what the files say.
    text(&["merge", &split, &back]);
    assert_eq!(object(&["diff", &one, &back, "--values"]).0, 0);
    assert_eq!(object(&["diff", &one, &split, "--values"]).0, 0);
    // Several files for a rank.
    let parts = case.at("parts");
    text(&[
        "split",
        &one,
        &parts,
        "--mesh",
        "tp=2",
        "--layout",
        "layers.*=[@tp, _]",
        "--max-file-size",
        "10K",
    ]);
    assert!(
        Path::new(&parts)
            .join("model-rank-1-part-1.safetensors")
            .exists()
    );
    assert_eq!(object(&["diff", &one, &parts, "--values"]).0, 0);
}

#[test]
fn split_files_of_others_are_merged_by_the_layouts_that_are_given() {
    let case = Case::new("split-foreign");
    let folder = case.at("others");
    std::fs::create_dir_all(&folder).unwrap();
    for rank in 0..2u8 {
        let mut shard = Memory::default();
        let info = |shape: &[usize]| TensorInfo {
            dtype: DType::U8,
            shape: shape.to_vec(),
        };
        shard
            .insert(
                "w",
                info(&[2, 2]),
                vec![rank, rank + 10, rank + 20, rank + 30],
            )
            .unwrap();
        shard.insert("norm", info(&[2]), vec![5, 6]).unwrap();
        let path = Path::new(&folder).join(format!("model-rank-{rank}-part-0.safetensors"));
        safetensors::write_source(path, &shard, &BTreeMap::new(), safetensors::CHUNK).unwrap();
    }
    let to = case.at("all.safetensors");
    let (code, json) = object(&["merge", &folder, &to]);
    assert!(
        code == 2
            && json["error"]
                .as_str()
                .unwrap()
                .contains("do not say how the tensors lie"),
        "{json}"
    );
    // A tensor that is cut must not be taken for a replica.
    let (code, json) = object(&["merge", &folder, &to, "--mesh", "tp=2"]);
    assert!(
        code == 2 && json["error"].as_str().unwrap().contains("is it cut?"),
        "{json}"
    );
    let (code, json) = object(&[
        "merge",
        &folder,
        &to,
        "--mesh",
        "tp=4",
        "--layout",
        "w=[_, @tp]",
    ]);
    assert!(
        code == 2
            && json["error"]
                .as_str()
                .unwrap()
                .contains("model-rank-2-part-0.safetensors is not there"),
        "{json}"
    );
    text(&[
        "merge",
        &folder,
        &to,
        "--mesh",
        "tp=2",
        "--layout",
        "w=[_, @tp]",
    ]);
    let merged = safetensors::File::open(&to).unwrap();
    assert_eq!(
        merged.read_all("w").unwrap(),
        [0, 10, 1, 11, 20, 30, 21, 31]
    );
    assert_eq!(merged.read_all("norm").unwrap(), [5, 6]);
}
