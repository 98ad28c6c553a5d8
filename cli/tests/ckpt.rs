//! `anymesh ckpt` as users call it.

use anymesh::{
    DType, Mesh, Tensor,
    checkpoint::{Contents, save},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A folder of its own, with a checkpoint saved from a 2x4 mesh.
struct Case(PathBuf);

impl Case {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("anymesh-ckpt-{}-{name}", std::process::id()));
        let device = anymesh::device("cpu").unwrap();
        let mesh = Mesh::new("dp=2, tp=4", &device).unwrap();
        let w = Tensor::arange(0, 4096, 1, DType::F32, &device).unwrap().reshape([64, 64]).unwrap();
        let tensors = BTreeMap::from([
            ("layers.0.w".to_string(), w.to_mesh(&mesh, "[@dp, @tp]").unwrap()),
            ("layers.1.w".to_string(), w.add(1.0).unwrap().to_mesh(&mesh, "[_, @tp]").unwrap()),
            ("step".to_string(), Tensor::full((), 7, DType::I64, &device).unwrap()),
        ]);
        let state = json!({"consumed_samples": 123});
        save(&root, "one", &Contents { step: 7, tensors, state: state.as_object().unwrap().clone(), ..Contents::default() }).unwrap();
        Self(root)
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn ckpt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anymesh")).arg("ckpt").args(args).output().unwrap()
}

fn text(args: &[&str]) -> String {
    let out = ckpt(args);
    assert!(out.status.success(), "{args:?}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn inspect_lists_tensors_layouts_and_state() {
    let case = Case::new("inspect");
    let out = text(&["inspect", &case.at("one")]);
    for part in ["layers.0.w", "f32[64@dp, 64@tp]", "16.0 KiB", "8 boxes", "step 7", "dp=2, tp=4", "consumed_samples: 123"] {
        assert!(out.contains(part), "{part} in {out}");
    }
    let json: Value = serde_json::from_str(&text(&["inspect", &case.at("one"), "--json", "--filter", "layers.*"])).unwrap();
    assert_eq!((json["tensors"].as_array().unwrap().len(), &json["state"]["consumed_samples"]), (2, &json!(123)));
}

#[test]
fn verify_says_what_is_damaged_with_its_exit_code() {
    let case = Case::new("verify");
    assert!(text(&["verify", &case.at("one")]).contains("0 damaged"));
    let file = Path::new(&case.at("one")).join("rank-00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let out = ckpt(&["verify", &case.at("one")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stdout).contains("rank-00002"), "{out:?}");
    assert_eq!(ckpt(&["verify", &case.at("two")]).status.code(), Some(2));
}

#[test]
fn a_checkpoint_is_resharded_merged_and_still_equal() {
    let case = Case::new("reshard");
    let (one, two, file) = (case.at("one"), case.at("two"), case.at("all.safetensors"));
    text(&["reshard", &one, &two, "--mesh", "x=3", "--layout", "layers.*=[@x, _]", "--memory-limit", "20M"]);
    let out = text(&["inspect", &two]);
    assert!(out.contains("f32[64@x, 64]") && out.contains("step 7") && out.contains("consumed_samples"), "{out}");
    assert!(text(&["diff", &one, &two, "--values"]).contains("0 of 3"));
    text(&["merge", &two, &file]);
    assert!(text(&["diff", &one, &file, "--values"]).contains("0 of 3"));
    let out = ckpt(&["reshard", &one, &two, "--mesh", "x=3"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("exists already"), "{out:?}");
    let out = ckpt(&["reshard", &one, &case.at("three"), "--mesh", "x=3", "--layout", "layers.*=[@q, _]"]);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
}

#[test]
fn diff_tells_names_types_and_values() {
    let case = Case::new("diff");
    let (one, cast) = (case.at("one"), case.at("cast"));
    text(&["cast", &one, &cast, "--dtype", "bf16", "--filter", "layers.1.*"]);
    let out = ckpt(&["diff", &one, &cast]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stdout).contains("layers.1.w: f32[64, 64] and bf16[64, 64]"), "{out:?}");
    let back = case.at("back");
    text(&["cast", &cast, &back, "--dtype", "f32"]);
    let out = ckpt(&["diff", &one, &back, "--values"]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.code() == Some(1) && said.contains("layers.1.w") && said.contains("largest difference"), "{said}");
}

#[test]
fn a_mapping_and_its_inverse_give_the_checkpoint_back() {
    let case = Case::new("map");
    let (one, there, back) = (case.at("one"), case.at("there"), case.at("back"));
    let statements = case.at("map.txt");
    std::fs::write(&statements, "layers.$LAYER_ID.w^T -> model.h.$LAYER_ID.weight # every layer\nstep -> steps\n").unwrap();
    text(&["map", &one, &there, "--statements", &statements]);
    assert!(text(&["inspect", &there]).contains("model.h.1.weight"));
    text(&["map", &there, &back, "--statements", &statements, "--reverse"]);
    assert!(text(&["diff", &one, &back, "--values"]).contains("0 of 3"));
    std::fs::write(&statements, "nothing -> something\n").unwrap();
    let out = ckpt(&["map", &one, &case.at("x"), "--statements", &statements]);
    assert!(out.status.code() == Some(2) && String::from_utf8_lossy(&out.stderr).contains("line 1"), "{out:?}");
}

#[test]
fn prune_keeps_what_it_is_told() {
    let case = Case::new("prune");
    for name in ["a", "b"] {
        text(&["reshard", &case.at("one"), &case.at(name), "--mesh", "x=1"]);
    }
    let out = text(&["prune", &case.at(""), "--keep-last", "1", "--protect", "one"]);
    assert!(out.contains("1 removed"), "{out}");
    assert!(Path::new(&case.at("one")).exists());
}

#[test]
fn hugging_face_folders_go_out_and_come_back() {
    let case = Case::new("export");
    let (one, folder, back) = (case.at("one"), case.at("hf"), case.at("back"));
    assert!(text(&["export", &one, &folder, "--max-file-size", "20K", "--remove", "step"]).contains("2 tensors in 2 files"));
    assert!(Path::new(&folder).join("model.safetensors.index.json").exists());
    text(&["import", &folder, &back]);
    let out = ckpt(&["diff", &one, &back, "--values"]);
    assert!(String::from_utf8_lossy(&out.stdout).contains("step: only in the first\n1 of 3"), "{out:?}");
}
