//! `anymesh profile` as users call it. Programs are `anymesh bench` at tiny sizes; nothing is timed.

#![cfg(unix)]

use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A folder of its own for a test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("anymesh-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn profile(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anymesh"))
        .current_dir(folder)
        .arg("profile")
        .args(args)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn events(folder: &Path) -> Vec<Value> {
    let trace = fs::read_to_string(folder.join("trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

const SOFTMAX: [&str; 7] = [
    "bench", "--tiny", "--alone", "--device", "cpu", "--filter", "softmax",
];

#[test]
fn a_program_is_told_by_op_kernel_line_and_memory() {
    let folder = folder("profile");
    let out = profile(&folder, &SOFTMAX);
    let (told, error) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.success(), "{told}{error}");
    for part in [
        "time of kernels, by op",
        "softmax (row) f32[16, 16]",
        "bench/src/kernels/rows.rs:",
        "gaps, by the line that launched next",
        "memory of cpu in anymesh: at most",
        "each was waited for",
        "ui.perfetto.dev",
    ] {
        assert!(told.contains(part), "'{part}' is missing in\n{told}");
    }
    let events = events(&folder);
    let of = |category: &str| events.iter().filter(|e| e["cat"] == category).count();
    assert!(of("kernel") > 2 && of("kernel") == of("launch"));
    assert!(
        events
            .iter()
            .any(|e| e["ph"] == "C" && e["args"]["bytes"].as_u64() > Some(0))
    );
    let row = |e: &&Value| e["cat"] == "kernel" && e["args"]["kernel"] == "softmax";
    let softmax = events.iter().find(row).unwrap();
    assert_eq!(softmax["args"]["op"], "softmax");
    assert!(softmax["dur"].as_f64() >= softmax["args"]["host_us"].as_f64());

    // What the trace says again is the same.
    let again = profile(&folder, &["--read", "trace.json", "--json"]);
    let report: Value = serde_json::from_slice(&again.stdout).unwrap();
    let process = &report["processes"][0];
    let number = |key: &str| process[key].as_f64().unwrap();
    assert_eq!(process["launches"].as_u64(), Some(of("kernel") as u64));
    assert!(number("kernels_ms") + number("gaps_ms") <= number("whole_ms") * 1.000_001);
    let rows = report["by_op"].as_array().unwrap();
    let sum: f64 = rows.iter().map(|row| row["ms"].as_f64().unwrap()).sum();
    assert!((sum - number("kernels_ms")).abs() < 1e-6 * sum);
    let peak = &process["peaks"][0];
    let alive = peak["alive"].as_array().unwrap();
    let alive: u64 = alive.iter().map(|row| row["bytes"].as_u64().unwrap()).sum();
    assert_eq!(peak["bytes"].as_u64(), Some(alive));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nothing_is_waited_for_where_only_launches_are_asked_for() {
    let folder = folder("profile-launch");
    let out = profile(&folder, &[&["--timing", "launch"], &SOFTMAX[..]].concat());
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("nothing was waited for"));
    let events = events(&folder);
    assert!(events.iter().all(|event| event["cat"] != "kernel"));
    assert!(events.iter().any(|event| event["cat"] == "launch"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn every_process_and_every_rank_has_tracks_of_its_own() {
    let folder = folder("profile-ranks");
    let own = env!("CARGO_BIN_EXE_anymesh");
    let step = [
        "--tiny", "--alone", "--device", "cpu", "--filter", "step", "--steps", "1",
    ];
    let mesh = ["--step", "tiny f32 dp=2,tp=2"];
    let launch = ["launch", "-n", "2", "--", own, "bench"];
    let out = profile(&folder, &[&launch[..], &step[..], &mesh[..]].concat());
    let told = text(&out.stdout);
    assert!(out.status.success(), "{told}{}", text(&out.stderr));
    let events = events(&folder);
    let names: Vec<&str> = (events.iter())
        .filter(|event| event["name"] == "process_name")
        .filter_map(|event| event["args"]["name"].as_str())
        .collect();
    assert_eq!(names.len(), 2);
    assert!(names.contains(&"rank 0: anymesh") && names.contains(&"rank 1: anymesh"));
    let tracks: Vec<&str> = (events.iter())
        .filter(|event| event["name"] == "thread_name")
        .filter_map(|event| event["args"]["name"].as_str())
        .collect();
    for track in ["cpu, rank 0", "cpu, rank 3", "communication"] {
        assert_eq!(
            tracks.iter().filter(|name| **name == track).count(),
            2,
            "{track}"
        );
    }
    let sent = |event: &&Value| event["cat"] == "communication";
    let sent = events.iter().find(sent).unwrap();
    assert!(sent["args"]["bytes"].as_u64() > Some(0) && sent["args"]["line"].is_string());
    // The backward pass of the step is told apart.
    assert!(told.contains(", backward"), "{told}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn the_exit_code_is_the_programs() {
    let folder = folder("profile-code");
    let own = env!("CARGO_BIN_EXE_anymesh");
    let line = format!("{own} {} > /dev/null; exit 3", SOFTMAX.join(" "));
    let out = profile(&folder, &["--", "sh", "-c", &line]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("softmax"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_cannot_be_profiled_is_refused_with_the_reason() {
    let folder = folder("profile-refused");
    fs::write(folder.join("other.json"), "[1, 2]").unwrap();
    fs::write(folder.join("text.json"), "hello").unwrap();
    for (args, why) in [
        (&["--", "no-such-program-anywhere"][..], "cannot be started"),
        (&["--", "true"], "nothing was recorded"),
        (
            &["--out", "no/such/folder.json", "--", "true"],
            "cannot be written",
        ),
        (&["--read", "missing.json"], "cannot be read"),
        (&["--read", "other.json"], "nothing that anymesh recorded"),
        (&["--read", "text.json"], "is no trace"),
        (&[], "PROGRAM"),
    ] {
        let out = profile(&folder, args);
        let told = text(&out.stderr);
        assert!(
            out.status.code() == Some(2) && told.contains(why),
            "{args:?}: {told}"
        );
    }
    fs::remove_dir_all(folder).unwrap();
}
