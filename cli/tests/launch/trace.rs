//! Flight records that `launch` points to and `trace` reads.

use super::*;
use serde_json::{Value, json};

fn record(process: usize) -> String {
    json!({
        "format": "anymesh-flight-1", "process": process, "size": 3, "host": "h", "pid": 1, "version": "0", "error": "lost",
        "unix_time": 1.0, "decisions": [], "calls": [{
            "n": 4, "group": [0, 1, 2], "in_group": 4, "op": "all_gather", "detail": "f32[4]", "digest": "a",
            "caller": "src/x.rs:3:4", "on_behalf_of": "matmul", "state": "waiting", "waits_for": [1], "seconds": 1.5,
        }],
    })
    .to_string()
}

fn trace(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anymesh"));
    command.arg("trace").args(args).output().unwrap()
}

#[test]
fn a_failure_says_where_its_records_are_and_trace_reads_them() {
    let folder = Folder::new();
    let flight = folder.path("flight");
    std::fs::create_dir(&flight).unwrap();
    // Of an earlier run with more processes.
    std::fs::write(flight.join("rank-7.json"), "{}").unwrap();
    std::fs::write(flight.join("notes.txt"), "mine").unwrap();
    for process in [0, 2] {
        std::fs::write(folder.path(&process.to_string()), record(process)).unwrap();
    }
    let script = format!(
        "[ $RANK = 1 ] && kill -s KILL $$; cp {}/$RANK $ANYMESH_FLIGHT/rank-$RANK.json; exit 1",
        folder.0.display()
    );
    let flight = flight.to_str().unwrap();
    let output = shell(&["-n", "3", "--flight", flight], &script);
    let text = err(&output);
    let part = format!("flight records of 2 of 3 processes are here: anymesh trace {flight}\n");
    assert!(text.contains(&part), "{text}");
    assert!(Path::new(flight).join("notes.txt").exists());

    let output = trace(&[flight]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let text = out(&output);
    for part in [
        "3 processes, 2 records",
        "no record of process 1",
        "process 2 waits for process 1 in all_gather f32[4] at src/x.rs:3:4 for matmul",
        "process 1 is waited for and left no record",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let json: Value = serde_json::from_slice(&trace(&[flight, "--json"]).stdout).unwrap();
    assert_eq!(
        (&json["missing"], &json["roots"]),
        (&json!([1]), &json!([1]))
    );

    // A bad record is named and does not hide the good ones.
    std::fs::write(Path::new(flight).join("rank-1.json"), &record(1)[..60]).unwrap();
    let output = trace(&[flight]);
    assert_eq!(output.status.code(), Some(1));
    let text = err(&output);
    assert!(
        text.contains("rank-1.json: ") && text.contains("line 1 column 60"),
        "{text}"
    );
    assert!(out(&output).contains("2 records"));
}

#[test]
fn no_records_are_an_error_that_names_the_folder() {
    let folder = Folder::new();
    for name in ["", "not-there"] {
        let path = folder.path(name);
        let path = path.to_str().unwrap();
        let output = trace(&[path]);
        assert_eq!(output.status.code(), Some(2));
        assert!(err(&output).contains(path));
        let json: Value = serde_json::from_slice(&trace(&[path, "--json"]).stdout).unwrap();
        assert!(json["error"].as_str().unwrap().contains(path));
    }
}

#[test]
fn without_a_folder_for_records_none_is_left() {
    let folder = Folder::new();
    let script = "echo $ANYMESH_FLIGHT; exit 1";
    let args = [
        "-n",
        "1",
        "--restarts",
        "2",
        "--no-prefix",
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = command(&args).env("TMPDIR", &folder.0).output().unwrap();
    assert_eq!(out(&output).lines().count(), 3);
    assert!(
        out(&output)
            .lines()
            .all(|f| Path::new(f).starts_with(&folder.0))
    );
    let args = ["-n", "1", "--", "no-such-program"];
    command(&args).env("TMPDIR", &folder.0).output().unwrap();
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
}
