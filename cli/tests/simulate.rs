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
