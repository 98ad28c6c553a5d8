//! `anymesh diff-run` and `anymesh replay` as a user runs them.

use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

fn anymesh(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .args(args)
        .output()
        .expect("starts")
}

fn out(args: &[&str], code: i32) -> String {
    let out = anymesh(args);
    let (text, error) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert_eq!(out.status.code(), Some(code), "{args:?}\n{text}\n{error}");
    text.into_owned()
}

/// A file that is removed.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("anymesh-diff-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("text")
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
        fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn runs_that_agree_end_with_zero() {
    let text = out(&["diff-run", "--b", "cpu:dp=2, tp=2"], 0);
    assert!(text.contains("agree in all"), "{text}");
    let json = out(&["diff-run", "--b", "cpu:tp=3", "--json"], 0);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((&json["ok"], &json["same"]), (&true.into(), &true.into()));
}

#[test]
fn an_injected_fault_is_named_dumped_and_replayed() {
    let (mut found, mut replayed) = (0, 0);
    for at in (50..350).step_by(30) {
        let (file, fault) = (Temporary::new("op"), format!("element:{at}"));
        let args = [
            "diff-run",
            "--inject",
            &fault,
            "--dump",
            file.path(),
            "--json",
        ];
        let out = anymesh(&args);
        let json: Value = serde_json::from_slice(&out.stdout).expect("JSON");
        if out.status.code() == Some(0) {
            // An element that a mask takes out again changes nothing.
            assert_eq!(json["same"], true);
            continue;
        }
        assert_eq!(out.status.code(), Some(1), "{json}");
        found += 1;
        let first = &json["findings"][0];
        let injected = json["injected"].as_str().expect("where");
        // What was injected is what was found.
        let named = |name: &str| first[name].as_str().is_some_and(|x| injected.contains(x));
        // Gradients are added up beside the op that gave the last of them.
        let between = first["given"] == "sum" || first["given"] == "total";
        assert!(
            between || (named("op") || named("within")) && named("caller"),
            "{json}"
        );
        if json["dumped"] == true {
            let text = anymesh(&["replay", file.path()]);
            // The fault was in the run and not in the op, so it does not show again.
            match text.status.code() {
                Some(0) => replayed += 1,
                // An expression of the program's own has no name.
                code => assert_eq!(code, Some(2), "{}", String::from_utf8_lossy(&text.stderr)),
            }
        }
    }
    assert!(
        found >= 7 && replayed >= 4,
        "{found} found, {replayed} called alone"
    );
}

#[test]
fn a_lost_reduction_is_named() {
    let text = out(
        &["diff-run", "--b", "cpu:tp=2", "--inject", "reduction:3"],
        1,
    );
    assert!(text.contains("injected: a lost reduction in"), "{text}");
    assert!(text.contains("largest difference"), "{text}");
}

#[test]
fn hashes_of_one_process_are_compared_in_another() {
    let file = Temporary::new("hashes");
    let text = out(&["diff-run", "--record", file.path()], 0);
    assert!(text.contains("values of cpu"), "{text}");
    out(&["diff-run", "--against", file.path(), "--b", "cpu"], 0);
    let inject = [
        "diff-run",
        "--against",
        file.path(),
        "--b",
        "cpu",
        "--inject",
        "nan:60",
    ];
    let text = out(&inject, 1);
    assert!(text.contains("other bits"), "{text}");
    fs::write(&file.0, "no trace").expect("written");
    out(&["diff-run", "--against", file.path()], 2);
}

#[test]
fn a_training_run_is_compared() {
    let folder = Temporary::new("run");
    fs::create_dir_all(&folder.0).expect("a folder");
    let text: String = (0..200)
        .map(|i| format!("{i} and {} are numbers.\n", i * 7 % 100))
        .collect();
    fs::write(folder.0.join("text.txt"), text).expect("written");
    let config = r#"
tokenizer = "bytes"
[model]
model_type = "gpt2"
vocab_size = 257
n_positions = 32
n_embd = 32
n_layer = 1
n_head = 2
[[data]]
path = "TEXT"
[batch]
global = 4
length = 32
[run.save]
folder = "FOLDER"
"#;
    let path = |name: &str| folder.0.join(name).to_str().expect("text").to_string();
    let config = config
        .replace("TEXT", &path("text.txt"))
        .replace("FOLDER", &path("run"));
    fs::write(folder.0.join("run.toml"), config).expect("written");
    let file = path("run.toml");
    for b in ["cpu:dp=2", "cpu:tp=2", "cpu:dp=2, tp=2"] {
        out(&["diff-run", &file, "--b", b, "--steps", "2"], 0);
    }
    let zero = ["diff-run", &file, "--b", "cpu:dp=2", "--set", "mesh.zero=3"];
    out(&zero, 0);
    let again = [
        "diff-run",
        &file,
        "--b",
        "cpu:dp=2",
        "--set",
        "mesh.recompute=true",
    ];
    out(&again, 0);
    let text = out(
        &[
            "diff-run",
            &file,
            "--b",
            "cpu:tp=2",
            "--inject",
            "element:120",
        ],
        1,
    );
    assert!(text.contains("train/src/"), "{text}");
    assert!(
        !folder.0.join("run").exists(),
        "a comparison leaves nothing behind"
    );
}

#[test]
fn what_cannot_be_is_refused() {
    for args in [
        &["diff-run", "--b", "abacus"][..],
        &["diff-run", "--b", "cpu:tp=0"],
        &["diff-run", "--b", "cpu:tp="],
        &["diff-run", "no-such-file.toml"],
        &["diff-run", "--inject", "gremlin:3"],
        &["diff-run", "--inject", "nan:x"],
        &["diff-run", "--b", "cpu", "--inject", "reduction:0"],
        &["diff-run", "--relative", "-1"],
        &["diff-run", "--bits", "--relative", "1e-3"],
        &["diff-run", "--set", "a=b"],
        &["replay", "no-such-file"],
        &["replay"],
    ] {
        out(args, 2);
    }
    let file = Temporary::new("hostile");
    let head = |metadata: &str| {
        let header = format!("{{\"__metadata__\":{{\"anymesh.reproduction\":{metadata}}}}}");
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
    };
    for bytes in [
        vec![],
        b"not a safetensors file".to_vec(),
        head("\"no json\""),
        head("\"{}\""),
        head("\"{\\\"version\\\": 1}\""),
        head(
            "\"{\\\"version\\\": 1, \\\"op\\\": \\\"exp\\\", \\\"given\\\": \\\"result\\\", \\\"number\\\": 0, \\\"caller\\\": \\\"\\\", \\\"operands\\\": 18446744073709551615, \\\"gradients\\\": 0}\"",
        ),
    ] {
        fs::write(&file.0, bytes).expect("written");
        out(&["replay", file.path()], 2);
    }
}
