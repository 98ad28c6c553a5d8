//! `anymesh schedule` as users call it.

use serde_json::Value;
use std::fs;

mod support;

const COMMAND: support::Called = support::Called("schedule");

fn text(args: &[&str]) -> String {
    COMMAND.text(args)
}

fn refused(args: &[&str], why: &str) {
    COMMAND.refused(args, why);
}

#[test]
fn a_chart_the_numbers_and_who_waits() {
    let out = text(&["1f1b", "--stages", "4", "--micro", "8"]);
    for line in [
        "1f1b: 4 stages on 4 ranks, 8 micro-batches",
        "rank 0  FFFF......BBFBBFBBFBBFBB.BB.BB.BB",
        "rank 3  ...FBBFBBFBBFBBFBBFBBFBBFBB......",
        "makespan 33, bound 27, idle 27.3 %, at most 4 activations alive",
        "  rank 0 waits 6 with 0B0 for rank 1's 1B0, from 4",
    ] {
        assert!(out.contains(line), "{line}\n{out}");
    }
    let out = text(&["searched", "--stages", "4", "--micro", "8", "--memory", "4"]);
    assert!(out.contains("makespan 27, bound 27"), "{out}");
}

#[test]
fn an_own_schedule_is_read_printed_and_read_again() {
    let folder = std::env::temp_dir().join(format!("anymesh-schedule-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = |name: &str| folder.join(name).display().to_string();
    let csv = text(&["zbv", "--stages", "8", "--micro", "4", "--print", "csv"]);
    fs::write(file("own.csv"), &csv).unwrap();
    let json = text(&["--csv", &file("own.csv"), "--print", "json"]);
    fs::write(file("own.json"), &json).unwrap();
    assert_eq!(text(&["--json", &file("own.json"), "--print", "csv"]), csv);
    let timing = text(&["--json", &file("own.json"), "--print", "timing"]);
    let timing: Value = serde_json::from_str(&timing).unwrap();
    assert_eq!(timing["makespan"], 30.0);
    let jobs = text(&["vpp", "--ranks", "2", "--micro", "4", "--print", "paddle"]);
    fs::write(file("jobs.json"), &jobs).unwrap();
    let full = text(&[
        "--paddle",
        &file("jobs.json"),
        "--transfers",
        "--print",
        "csv",
    ]);
    assert!(full.starts_with("0F0,0SEND_F0,"), "{full}");
    fs::write(file("bad.csv"), "0F0,0B0,0F1\n").unwrap();
    refused(
        &["--csv", &file("bad.csv")],
        "rank 0, position 3, 0B1: missing",
    );
    refused(
        &["--csv", &file("own.csv"), "--micro", "5"],
        "the file has 4",
    );
    refused(&["--csv", &file("none.csv")], "cannot read");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn pictures_show_every_rank() {
    let svg = text(&["dualpipev", "--ranks", "2", "--micro", "4", "--svg", "-"]);
    assert!(svg.starts_with("<svg") && svg.contains("rank 1"), "{svg}");
    let page = text(&["interleaved", "--ranks", "2", "--micro", "3", "--html", "-"]);
    assert!(page.contains("who waits for whom"), "{page}");
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    refused(
        &["1f1d", "--stages", "4", "--micro", "8"],
        "eager-1f1b, interleaved",
    );
    refused(&["1f1b", "--stages", "4"], "--micro is missing");
    refused(&["1f1b", "--micro", "4"], "--stages or --ranks");
    refused(&["1f1b", "--stages", "0", "--micro", "4"], "at least 1");
    refused(
        &["1f1b", "--ranks", "4", "--stages", "8", "--micro", "8"],
        "exactly 1",
    );
    refused(
        &["zbv", "--stages", "7", "--micro", "8"],
        "7 stages do not divide",
    );
    refused(
        &["dualpipev", "--stages", "8", "--micro", "7"],
        "at least 8 micro-batches",
    );
    refused(
        &["1f1b", "--stages", "4", "--micro", "8", "--memory", "3"],
        "at most 3 are allowed",
    );
    refused(
        &["1f1b", "--stages", "4", "--micro", "8", "--costs", "g=1"],
        "transfer",
    );
    refused(
        &[
            "searched", "--ranks", "2", "--chunks", "3", "--micro", "8", "--memory", "2",
        ],
        "needs 3",
    );
    refused(
        &[
            "fthenb",
            "--stages",
            "4",
            "--micro",
            "8",
            "--placement",
            "v",
        ],
        "in a loop",
    );
}
