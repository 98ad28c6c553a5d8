//! Commands that write and remove checkpoints.

use super::*;
use std::path::Path;

#[test]
fn a_checkpoint_is_resharded_merged_and_still_equal() {
    let case = Case::new("reshard");
    let (one, two, file) = (case.at("one"), case.at("two"), case.at("all.safetensors"));
    text(&[
        "reshard",
        &one,
        &two,
        "--mesh",
        "x=3",
        "--layout",
        "layers.*=[@x, _]",
        "--memory-limit",
        "64M",
    ]);
    let out = text(&["inspect", &two]);
    assert!(
        out.contains("f32[64@x, 64]") && out.contains("step 7") && out.contains("consumed_samples"),
        "{out}"
    );
    assert!(text(&["diff", &one, &two, "--values"]).contains("0 of 3"));
    text(&["merge", &two, &file]);
    assert!(text(&["diff", &one, &file, "--values"]).contains("0 of 3"));
}

/// `--layout "*.weight=[@tp, @dp]"` failed on the first norm of a model.
#[test]
fn one_layout_serves_a_model_of_matrices_norms_and_biases() {
    let case = Case::new("model");
    let device = anymesh::device("cpu").unwrap();
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &device).unwrap();
    let model = [
        ("embed.weight", ones(&[32, 16])),
        ("layers.0.norm.weight", ones(&[16])),
        ("layers.0.up.weight", ones(&[64, 16])),
        ("layers.0.up.bias", ones(&[64])),
        ("layers.0.experts.weight", ones(&[4, 16, 16])),
        ("scale", ones(&[])),
    ];
    case.save("model", &model);
    let (from, to) = (case.at("model"), case.at("laid"));
    reshard(&from, &to, "dp=2,tp=4", "*.weight=[@tp, @dp]");
    let layout = |path: &str, name: &str| {
        let (_, json) = object(&["inspect", path, "--filter", name]);
        json["tensors"][0]["layout"].as_str().unwrap().to_string()
    };
    for (name, expected) in [
        ("embed.weight", "f32[32@tp, 16@dp]"),
        ("layers.0.up.weight", "f32[64@tp, 16@dp]"),
        ("layers.0.norm.weight", "f32[16]"),
        ("layers.0.experts.weight", "f32[4, 16, 16]"),
        ("scale", "f32[]"),
    ] {
        assert_eq!(layout(&to, name), expected, "{name}");
    }
    let dots = case.at("dots");
    reshard(&from, &dots, "dp=2,tp=4", "*=[..., @tp]");
    for (name, expected) in [
        ("layers.0.up.bias", "f32[64@tp]"),
        ("layers.0.experts.weight", "f32[4, 16, 16@tp]"),
        ("scale", "f32[]"),
    ] {
        assert_eq!(layout(&dots, name), expected, "{name}");
    }
    assert!(text(&["diff", &to, &dots, "--values"]).contains("0 of 6"));
}

/// Paddle's language casts integers; `ckpt map` refused to.
#[test]
fn a_mapping_casts_integers_to_floats_and_back() {
    let case = Case::new("casts");
    let (one, there, back) = (case.at("one"), case.at("there"), case.at("back"));
    let statements = case.at("map.txt");
    let cast = "step -> count, src_dtype=\"int64\", dst_dtype=\"float32\"\n";
    std::fs::write(&statements, cast).unwrap();
    text(&["map", &one, &there, "--statements", &statements]);
    assert!(text(&["inspect", &there, "--flat"]).contains("count       f32[]"));
    let reverse = [
        "map",
        &there,
        &back,
        "--statements",
        &statements,
        "--reverse",
    ];
    text(&reverse);
    assert!(text(&["diff", &one, &back, "--values"]).contains("0 of 3"));
}

#[test]
fn a_mapping_and_its_inverse_give_the_checkpoint_back() {
    let case = Case::new("map");
    let (one, there, back) = (case.at("one"), case.at("there"), case.at("back"));
    let statements = case.at("map.txt");
    std::fs::write(
        &statements,
        "layers.$LAYER_ID.w^T -> model.h.$LAYER_ID.weight # every layer\nstep -> steps\n",
    )
    .unwrap();
    text(&["map", &one, &there, "--statements", &statements]);
    assert_eq!(
        names(&there),
        ["model.h.0.weight", "model.h.1.weight", "steps"]
    );
    text(&[
        "map",
        &there,
        &back,
        "--statements",
        &statements,
        "--reverse",
    ]);
    assert!(text(&["diff", &one, &back, "--values"]).contains("0 of 3"));
    // Filters are about the names that are written.
    text(&[
        "map",
        &one,
        &case.at("part"),
        "--statements",
        &statements,
        "--filter",
        "model.*",
        "--remove",
        "*.1.weight",
    ]);
    assert_eq!(names(&case.at("part")), ["model.h.0.weight"]);
}

#[test]
fn every_command_that_writes_takes_filters_and_tells_what_it_wrote() {
    let case = Case::new("filters");
    let one = case.at("one");
    let commands: [(&str, &[&str]); 6] = [
        ("reshard", &["--mesh", "x=2"]),
        ("cast", &["--dtype", "f16"]),
        ("import", &[]),
        ("export", &[]),
        ("merge", &[]),
        ("split", &["--mesh", "x=1"]),
    ];
    for (command, more) in commands {
        let to = case.at(&format!("from-{command}"));
        let options = [
            "--filter",
            "layers.*",
            "--filter",
            "step",
            "--remove",
            "*.1.w",
            "--memory-limit",
            "64M",
        ];
        let (code, json) = object(&[&[command, &one, &to], more, &options].concat());
        assert_eq!(
            (code, &json["written"], &json["tensors"]),
            (0, &json!(to), &json!(2)),
            "{command}"
        );
        assert_eq!(names(&to), ["layers.0.w", "step"], "{command}");
        let (code, json) = object(
            &[
                &[command, &one, &case.at("x")],
                more,
                &["--filter", "layer.*"],
            ]
            .concat(),
        );
        assert!(
            code == 2
                && json["error"]
                    .as_str()
                    .unwrap()
                    .contains("'layer.*' matches no tensor"),
            "{command}: {json}"
        );
        assert!(!Path::new(&case.at("x")).exists(), "{command}");
    }
}

#[test]
fn casts_round_and_leave_other_types_alone() {
    let case = Case::new("cast");
    let (one, half) = (case.at("one"), case.at("half"));
    text(&["cast", &one, &half, "--dtype", "float16"]);
    let (_, json) = object(&["inspect", &half]);
    let types: Vec<&str> = json["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["dtype"].as_str().unwrap())
        .collect();
    assert_eq!(types, ["f16", "f16", "i64"]);
    let (code, json) = object(&["diff", &half, &one, "--filter", "layers.0.w"]);
    assert_eq!(
        (code, &json["differences"][0]["right"]),
        (1, &json!("f32[64, 64]"))
    );
}

#[test]
fn hugging_face_folders_go_out_and_come_back_with_their_configurations() {
    let case = Case::new("export");
    let (one, folder, back, again) = (
        case.at("one"),
        case.at("deep/er/hf"),
        case.at("back"),
        case.at("again"),
    );
    assert!(
        text(&[
            "export",
            &one,
            &folder,
            "--max-file-size",
            "20K",
            "--remove",
            "step"
        ])
        .contains("2 tensors in 2 files")
    );
    assert!(
        Path::new(&folder)
            .join("model.safetensors.index.json")
            .exists()
    );
    std::fs::write(
        Path::new(&folder).join("config.json"),
        r#"{"hidden_size": 64, "architectures": ["Some"]}"#,
    )
    .unwrap();
    text(&["import", &folder, &back, "--step", "9"]);
    let (_, json) = object(&["inspect", &back]);
    assert_eq!(
        (
            &json["state"]["config"]["hidden_size"],
            &json["state"]["architecture"],
            &json["step"]
        ),
        (&json!(64), &json!("Some"), &json!(9))
    );
    assert_eq!(
        object(&["diff", &one, &back, "--values", "--remove", "step"]).0,
        0
    );
    text(&["export", &back, &again]);
    let config: Value = serde_json::from_str(
        &std::fs::read_to_string(Path::new(&again).join("config.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(
        config,
        json!({"hidden_size": 64, "architectures": ["Some"]})
    );
}

#[test]
fn prune_keeps_what_it_is_told() {
    let case = Case::new("prune");
    for name in ["a", "b"] {
        text(&["reshard", &case.at("one"), &case.at(name), "--mesh", "x=1"]);
    }
    let command = [
        "prune",
        &case.at(""),
        "--keep-last",
        "1",
        "--protect",
        "one",
    ];
    let (_, json) = object(&[&command[..], &["--dry-run"]].concat());
    assert!(
        json["removed"].as_array().unwrap().len() == 1
            && json["kept"].as_array().unwrap().len() == 2,
        "{json}"
    );
    assert!(Path::new(&case.at("a")).exists() && Path::new(&case.at("b")).exists());
    let out = text(&command);
    assert!(out.contains("1 removed, 2 kept"), "{out}");
    assert!(
        Path::new(&case.at("one")).exists()
            && !(Path::new(&case.at("a")).exists() && Path::new(&case.at("b")).exists())
    );
}
