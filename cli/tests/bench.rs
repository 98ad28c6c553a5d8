//! `anymesh bench` as users call it, at tiny sizes: what is in its tables, never how long it took.

mod support;

use serde_json::Value;
use support::Called;

const BENCH: Called = Called("bench");

#[test]
fn every_row_and_a_step_are_measured() {
    let out = BENCH.text(&[
        "--tiny", "--alone", "--device", "cpu", "--steps", "2", "--json",
    ]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["device"], "cpu");
    let rows = report["kernels"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    for name in [
        "host cost of a small add",
        "matmul f32 16",
        "softmax f32 16x16",
        "attention backward bf16 1x4:2x16x32",
        "cross_entropy forward+backward bf16 8x16",
        "adamw f32 1x16x32x8",
        "grouped dw bf16 2x32x16x16",
    ] {
        assert!(names.contains(&name), "{name} is missing: {names:?}");
    }
    assert!(rows.iter().all(|row| row["us"].as_f64() > Some(0.0)));
    let step = &report["steps"][0];
    assert_eq!(step["title"], "step tiny f32 2x16");
    assert_eq!(step["ours"]["ms"].as_array().unwrap().len(), 2);
    let losses = step["ours"]["losses"].as_array().unwrap();
    // 64 tokens at random: the loss begins near the logarithm of 64.
    let first = losses[0].as_f64().unwrap();
    assert!((first - 64f64.ln()).abs() < 0.2, "{first}");
    assert!(step["ours"]["peak"].as_u64() > Some(0));
}

#[test]
fn a_filter_leaves_the_rows_that_have_it() {
    let out = BENCH.text(&["--tiny", "--alone", "--device", "cpu", "--filter", "norm"]);
    for (name, there) in [
        ("layer_norm f32", true),
        ("rms_norm", true),
        ("softmax", false),
    ] {
        assert_eq!(out.contains(name), there, "{out}");
    }
    assert!(out.contains("peers: none"), "{out}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_reason() {
    let tiny = |more: &[&'static str]| [&["--tiny", "--alone"], more].concat();
    let no_row = tiny(&["--device", "cpu", "--filter", "sofmax"]);
    BENCH.refused(&no_row, "no row has 'sofmax' in its name. The rows are:");
    BENCH.refused(&tiny(&["--device", "tpu"]), "tpu");
    let model = tiny(&["--device", "cpu", "--step", "gpt5"]);
    BENCH.refused(&model, "gpt5");
    let long = tiny(&["--device", "cpu", "--step", "tiny f32 2x17"]);
    BENCH.refused(&long, "at most 16 tokens");
    let batch = tiny(&["--device", "cpu", "--step", "tiny 0x17"]);
    BENCH.refused(&batch, "texts x tokens");
}

#[test]
fn a_python_that_is_not_there_is_named_and_nothing_else_fails() {
    let args = [
        "--tiny",
        "--device",
        "cpu",
        "--filter",
        "softmax",
        "--python",
        "no-such-python",
    ];
    let out = BENCH.text(&args);
    assert!(out.contains("'no-such-python' cannot be started"), "{out}");
    assert!(out.contains("softmax f32 16x16"), "{out}");
}
