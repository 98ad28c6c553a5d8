//! `anymesh ckpt` as users call it.

mod check;
mod convert;
mod files;
mod gguf;
mod inspect;
mod messages;

use anymesh::{
    DType, Mesh, Tensor,
    checkpoint::{Contents, save},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Command, Output},
};

/// A folder of its own, with a checkpoint saved from a 2x4 mesh.
struct Case(PathBuf);

impl Case {
    fn new(name: &str) -> Self {
        let case =
            Self(std::env::temp_dir().join(format!("anymesh-ckpt-{}-{name}", std::process::id())));
        let device = anymesh::device("cpu").unwrap();
        let mesh = Mesh::new("dp=2, tp=4", &device).unwrap();
        let w = Tensor::arange(0, 4096, 1, DType::F32, &device)
            .unwrap()
            .reshape([64, 64])
            .unwrap();
        let tensors = [
            ("layers.0.w", w.to_mesh(&mesh, "[@dp, @tp]").unwrap()),
            (
                "layers.1.w",
                w.add(1.0).unwrap().to_mesh(&mesh, "[_, @tp]").unwrap(),
            ),
            ("step", Tensor::full((), 7, DType::I64, &device).unwrap()),
        ];
        case.save("one", &tensors);
        case
    }

    /// Saves a checkpoint of step 7.
    fn save(&self, name: &str, tensors: &[(&str, Tensor)]) {
        let tensors = tensors
            .iter()
            .map(|(name, x)| (name.to_string(), x.clone()))
            .collect();
        let state = json!({"consumed_samples": 123})
            .as_object()
            .unwrap()
            .clone();
        save(
            &self.0,
            name,
            &Contents {
                step: 7,
                tensors,
                state,
                ..Contents::default()
            },
        )
        .unwrap();
    }

    fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }

    /// Flips a bit of the last byte of a file.
    fn damage(&self, file: &str) {
        let mut bytes = std::fs::read(self.at(file)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(self.at(file), bytes).unwrap();
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

fn ckpt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .arg("ckpt")
        .args(args)
        .output()
        .unwrap()
}

/// What a command prints that succeeds. Nothing of it goes to where errors go: bars are for
/// terminals.
fn text(args: &[&str]) -> String {
    let (code, out, error) = said(args);
    assert!(
        code == 0 && error.is_empty(),
        "{args:?}: {code} {out}{error}"
    );
    out
}

/// The exit code, the output and the errors.
fn said(args: &[&str]) -> (i32, String, String) {
    let out = ckpt(args);
    (
        out.status.code().unwrap(),
        String::from_utf8(out.stdout).unwrap(),
        String::from_utf8(out.stderr).unwrap(),
    )
}

/// The exit code and the object that a command prints with --json, and nothing else.
fn object(args: &[&str]) -> (i32, Value) {
    let (code, out, error) = said(&[args, &["--json"]].concat());
    assert!(error.is_empty(), "{args:?}: {error}");
    (
        code,
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}")),
    )
}

/// Writes a checkpoint anew for a mesh, with one layout.
fn reshard(from: &str, to: &str, mesh: &str, layout: &str) {
    text(&["reshard", from, to, "--mesh", mesh, "--layout", layout]);
}

/// The names of the tensors at a path.
fn names(path: &str) -> Vec<String> {
    object(&["inspect", path]).1["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["name"].as_str().unwrap().to_string())
        .collect()
}
