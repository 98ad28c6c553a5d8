//! `anymesh simulate` as users call it.

use serde_json::Value;
use std::fs;

mod support;

const COMMAND: support::Called = support::Called("simulate");

fn text(args: &[&str]) -> String {
    COMMAND.text(args)
}

fn refused(args: &[&str], why: &str) {
    COMMAND.refused(args, why);
}

#[test]
fn a_layout_on_16384_gpus() {
    let args = [
        "llama-3-405b",
        "--ranks",
        "16384",
        "--set",
        "tp=8",
        "--set",
        "pp=16",
    ];
    let out = text(&args);
    for line in [
        "llama-3-405b on 16384 h100: dp=128 tp=8 pp=16 zero=1 micro=1 1f1b",
        "2048 sequences of 8192 tokens, 16 micro-batches, 16 stages of 7 to 8 layers",
        "MFU ",
        "bytes that a rank receives",
        "it does not fit",
    ] {
        assert!(out.contains(line), "{line}\n{out}");
    }
    let json = text(&[&args[..], &["--json"]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["ranks"], &json["layout"]["dp"]),
        (&16_384.into(), &128.into())
    );
    assert_eq!(json["memory"].as_array().unwrap().len(), 16);
}

#[test]
fn a_search_says_why_and_keeps_what_is_set() {
    let out = text(&["llama-3-70b", "--ranks", "512", "--machine", "h100"]);
    assert!(
        out.contains("1. llama-3-70b on 512 h100") && out.contains("3. llama-3-70b"),
        "{out}"
    );
    assert!(out.contains("what holds it back most"), "{out}");
    let args = [
        "llama-3-70b",
        "--ranks",
        "512",
        "--search",
        "--set",
        "tp=8",
        "--best",
        "1",
        "--json",
    ];
    let json: Value = serde_json::from_str(&text(&args)).unwrap();
    assert_eq!(json["layouts"].as_array().unwrap().len(), 1);
    assert_eq!(json["layouts"][0]["estimate"]["layout"]["tp"], 8);
    assert!(json["candidates"].as_u64().unwrap() > 1000, "{json}");
}

#[test]
fn a_file_and_a_page() {
    let folder = std::env::temp_dir().join(format!("anymesh-simulate-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("run.toml");
    let run = "ranks = 64\nmachine = \"h200\"\n[model]\npreset = \"llama-3-8b\"\nlayers = 16\n[layout]\ntp = 2\npp = 2\nschedule = \"zbh1\"\n";
    fs::write(&file, run).unwrap();
    let file = file.display().to_string();
    let out = text(&[&file]);
    assert!(
        out.contains("llama-3-8b on 64 h200: dp=16 tp=2 pp=2 zero=1 micro=1 zbh1"),
        "{out}"
    );
    assert!(out.contains("2 stages of 8 layers"), "{out}");
    let page = text(&[&file, "--ranks", "32", "--html", "-"]);
    assert!(
        page.contains("pipeline rank 1") && page.contains("on 32 h200"),
        "{page}"
    );
    fs::write(folder.join("bad.toml"), "ranks = ").unwrap();
    refused(
        &[&folder.join("bad.toml").display().to_string()],
        "bad.toml",
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn lists_and_refusals() {
    let out = text(&["--list"]);
    assert!(
        out.contains("deepseek-v3") && out.contains("671.03B") && out.contains("a100-80"),
        "{out}"
    );
    refused(&["llama-3-405b"], "--ranks is missing");
    refused(&["llama-9", "--ranks", "8"], "there is no model");
    refused(&["none.toml", "--ranks", "8"], "cannot read");
    refused(
        &["llama-3-8b", "--ranks", "8", "--set", "tpp=2"],
        "unknown field `tpp`",
    );
    refused(
        &[
            "llama-3-405b",
            "--ranks",
            "16384",
            "--set",
            "dp=4",
            "--set",
            "tp=8",
            "--set",
            "cp=16",
            "--set",
            "pp=16",
        ],
        "is 8192 ranks, not 16384: dp 8 would do",
    );
    refused(&["llama-3-405b", "--ranks", "8"], "nothing fits");
}

/// A training run as `anymesh train` reads it, without data.
const RUN: &str = r#"
[model]
model_type = "llama"
vocab_size = 32000
hidden_size = 1024
intermediate_size = 4096
num_hidden_layers = 8
num_attention_heads = 16
num_key_value_heads = 8

[mesh]
axes = "pp=2, dp=2, tp=4"
zero = 1
sequence_parallel = true
dtype = "bf16"

[batch]
global = 64
micro = 1
length = 1024

[clip]
max_norm = 1.0
"#;

fn written(name: &str, text: &str) -> (std::path::PathBuf, String) {
    let folder =
        std::env::temp_dir().join(format!("anymesh-simulate-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("run.toml");
    fs::write(&file, text).unwrap();
    let path = file.display().to_string();
    (folder, path)
}

#[test]
fn a_training_run_takes_its_real_step() {
    let (folder, file) = written("train", RUN);
    let out = text(&[&file, "--ranks", "64", "--machine", "h200"]);
    for line in [
        "llama on 64 h200: dp=8 tp=4 pp=2 zero=1 micro=1",
        "64 sequences of 1024 tokens, 8 micro-batches, 2 stages of 3 to 5 layers",
        "by the real step",
        "that nothing hides",
        "reduce_scatter tp",
        "attention_backward",
        "note: dp is 8, not 2: pp 2 * dp 2 * tp 4 is 16 ranks, not 64",
    ] {
        assert!(out.contains(line), "{line}\n{out}");
    }
    let json: Value = serde_json::from_str(&text(&[&file, "--json"])).unwrap();
    assert_eq!(json["source"], "the real step");
    assert_eq!((&json["ranks"], &json["micros"]), (&16.into(), &32.into()));
    let axes = |name: &str| json["bytes"][name].as_f64().unwrap() > 0.0;
    assert!(
        axes("tp") && axes("dp") && axes("pp") && !axes("ep"),
        "{json}"
    );
    // What ranks hold, when most, and doing what.
    assert!(
        json["memory"][1]["during"]
            .as_str()
            .unwrap()
            .contains(" in ")
    );
    assert!(json["memory"][0]["curve"].as_array().unwrap().len() > 64);
    let work = json["work"].as_array().unwrap();
    let found =
        |part: &str, kind: &str| work.iter().any(|w| w["part"] == part && w["kind"] == kind);
    assert!(
        found("forward", "all_gather") && found("update", "kernel"),
        "{json}"
    );
    assert!(json["comparison"].as_array().unwrap().len() > 10);
    // Settings of the run, and of the machine.
    let sets = [
        "--set",
        "mesh.zero=3",
        "--set",
        "machine.memory=3e8",
        "--real",
    ];
    let out = text(&[&[file.as_str()][..], &sets[..]].concat());
    assert!(
        out.contains("zero=3") && out.contains("it does not fit"),
        "{out}"
    );
    assert!(out.contains("beside closed forms"), "{out}");
    let page = text(&[&file, "--html", "-"]);
    assert!(page.contains("pipeline rank 1") && page.contains("what a rank of the pipeline holds"));
    // The same as JSON, and with the data that a run has.
    let run: Value =
        toml::from_str(&format!("data = [{{ path = \"corpus.txt\" }}]\n{RUN}")).unwrap();
    let path = folder.join("run.json");
    fs::write(&path, run.to_string()).unwrap();
    assert!(text(&[&path.display().to_string()]).contains("by the real step"));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_run_that_cannot_be_is_refused() {
    let (folder, file) = written("refused", RUN);
    refused(
        &[&file, "--ranks", "60"],
        "60 ranks do not divide by pp 2 * tp 4: 56 or 64 ranks would do",
    );
    refused(&[&file, "--ranks", "0"], "there must be a rank");
    refused(
        &[&file, "--set", "tp=8"],
        "tp=8 is of a layout: a training run says it as mesh.axes",
    );
    refused(&[&file, "--set", "mesh.axes=xx=4"], "not xx");
    refused(
        &[&file, "--set", "mesh.axes=tp"],
        "'tp' is no axis such as tp=8",
    );
    refused(&[&file, "--set", "mesh.zero=4"], "there is no stage 4");
    refused(
        &[&file, "--set", "model.layers=4"],
        "there is no such setting",
    );
    refused(&[&file, "--set", "batch.length=4096"], "2048");
    refused(&[&file, "--set", "pipeline.schedule=best"], "best");
    refused(
        &[&file, "--set", "pipeline.layers=[1, 2]"],
        "the model has 8",
    );
    refused(
        &[&file, "--ranks", "128", "--set", "batch.global=10"],
        "batch",
    );
    refused(&[&file, "--machine", "tpu"], "there is no machine");
    let (mixed, both) = written("mixed", &format!("ranks = 8\n{RUN}"));
    refused(
        &[&both],
        "`mesh` is of a training run, `ranks` of a file of the simulator",
    );
    fs::remove_dir_all(&folder).unwrap();
    fs::remove_dir_all(&mixed).unwrap();
}

#[test]
fn a_search_runs_what_it_found() {
    let pinned = ["--search", "--set", "zero=1", "--set", "cp=1"];
    let args = [
        &["llama-3-8b", "--ranks", "16", "--best", "2", "--json"][..],
        &pinned[..],
    ]
    .concat();
    let json: Value = serde_json::from_str(&text(&args)).unwrap();
    for found in json["layouts"].as_array().unwrap() {
        assert_eq!(found["estimate"]["source"], "closed forms");
        assert_eq!(found["real"]["source"], "the real step");
        assert_eq!(found["real"]["ranks"], 16);
        let rows = found["comparison"].as_array().unwrap();
        let row = |what: &str| rows.iter().find(|r| r["what"] == what).unwrap();
        assert_eq!(row("rank 0 parameters")["percent"], 0.0, "{found}");
        assert!(
            row("step")["percent"].as_f64().unwrap().abs() < 50.0,
            "{found}"
        );
    }
    // What cannot be built says why.
    let out = text(&[
        "deepseek-v3",
        "--ranks",
        "2048",
        "--machine",
        "h800",
        "--best",
        "1",
        "--set",
        "pp=16",
        "--set",
        "ep=64",
        "--set",
        "dp=128",
        "--search",
    ]);
    assert!(
        out.contains("by running it\n") && out.contains("latent vectors"),
        "{out}"
    );
    // A training run's search keeps to what is pinned, and to what the run is besides.
    let (folder, file) = written("search", RUN);
    let args = [
        &file, "--ranks", "32", "--search", "--best", "1", "--set", "tp=4",
    ];
    let out = text(&args);
    assert!(
        out.contains("tp=4") && out.contains("by running it"),
        "{out}"
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_model_of_405b_runs_on_16384_ranks() {
    let args = [
        "llama-3-405b",
        "--ranks",
        "16384",
        "--set",
        "tp=8",
        "--set",
        "pp=16",
        "--real",
    ];
    let out = text(&args);
    for line in [
        "llama-3-405b on 16384 h100: dp=128 tp=8 pp=16 zero=1 micro=1",
        "by the real step",
        "note: 3 of 16 stages ran: the others are like one of these",
        "beside closed forms",
    ] {
        assert!(out.contains(line), "{line}\n{out}");
    }
}
