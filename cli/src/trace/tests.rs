use super::*;
use record::{Records, parse};

/// A call of group [0, 1, 2] of 3 processes.
fn call(n: u64, op: &str, digest: &str, state: &str, waits_for: &[usize]) -> Value {
    json!({
        "n": n, "group": [0, 1, 2], "in_group": n, "op": op, "detail": "f32[4]", "digest": digest,
        "caller": format!("src/x.rs:{n}:1"), "on_behalf_of": null, "state": state, "waits_for": waits_for, "seconds": 0.5,
    })
}

fn record(process: usize, calls: Vec<Value>, decisions: Value) -> Value {
    json!({
        "format": "anymesh-flight-1", "process": process, "size": 3, "host": "h", "pid": 7, "version": "0.1.0",
        "error": null, "unix_time": 1.0, "calls": calls, "decisions": decisions,
    })
}

fn folder(records: &[Value]) -> Folder {
    let mut all = Records::new();
    for value in records {
        let process = value["process"].as_u64().unwrap() as usize;
        all.insert(
            process,
            parse(value.to_string().as_bytes(), process).unwrap(),
        );
    }
    Folder {
        records: all,
        bad: vec![],
        restarts: vec![],
    }
}

fn told(folder: &Folder) -> (String, Value) {
    let found = compare::compare(&folder.records);
    (text(folder, &found, 5), json_of(folder, &found, 5))
}

#[test]
fn a_killed_process_is_named_with_those_who_wait_for_it() {
    let done = call(1, "all_gather", "aa", "done", &[]);
    let open = call(2, "all_reduce", "bb", "waiting", &[1]);
    let (text, json) = told(&folder(&[
        record(0, vec![done.clone(), open.clone()], json!([])),
        record(2, vec![done, open], json!([])),
    ]));
    for part in [
        "3 processes, 2 records",
        "no record of process 1",
        "process 0 waits for process 1 in all_reduce f32[4] at src/x.rs:2:1",
        "process 1 is waited for and left no record",
        "do not differ",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(json["missing"], json!([1]));
    assert_eq!(json["roots"], json!([1]));
    assert_eq!(json["waits"][1]["process"], 2);
    assert_eq!(json["behind"][0]["missing"], json!([1]));
    assert_eq!(json["first_difference"], Value::Null);
}

#[test]
fn the_first_call_that_differs_is_told_with_both_lines() {
    let calls = |second: &str, third: &str| {
        vec![
            call(1, "all_gather", "aa", "done", &[]),
            call(2, second, second, "failed", &[]),
            call(3, third, third, "queued", &[]),
        ]
    };
    let (text, json) = told(&folder(&[
        record(0, calls("all_reduce", "x"), json!([])),
        record(1, calls("all_reduce", "y"), json!([])),
        record(2, calls("broadcast", "z"), json!([])),
    ]));
    let part = "the programs differ first in call 2 of group [0, 1, 2]:\n  process 0: all_reduce f32[4] at src/x.rs:2:1\n  process 2: broadcast f32[4] at src/x.rs:2:1\n";
    assert!(text.contains(part), "{text}");
    assert_eq!(json["first_difference"]["other"]["process"], 2);
    assert_eq!(json["first_difference"]["or_earlier"], false);
}

#[test]
fn a_difference_at_the_edge_of_what_is_known_may_have_begun_earlier() {
    let one = record(0, vec![call(7, "a", "a", "done", &[])], json!([]));
    let two = record(1, vec![call(7, "b", "b", "done", &[])], json!([]));
    let (text, json) = told(&folder(&[one, two]));
    assert_eq!(json["first_difference"]["or_earlier"], true);
    assert!(text.contains("may have begun earlier"), "{text}");
}

#[test]
fn who_has_not_come_as_far_is_told() {
    let (first, second) = (
        call(1, "all_gather", "aa", "done", &[]),
        call(2, "all_reduce", "bb", "waiting", &[1]),
    );
    let both = vec![first.clone(), second];
    let (text, json) = told(&folder(&[
        record(0, both.clone(), json!([])),
        record(1, vec![first], json!([])),
        record(2, both, json!([])),
    ]));
    assert!(text.contains("process 1 came to call 1 of it"), "{text}");
    assert!(
        text.contains("process 1 is waited for and waits for nobody"),
        "{text}"
    );
    let behind = json!([{ "process": 1, "in_group": 1 }]);
    assert_eq!(json["behind"][0]["behind"], behind);
}

#[test]
fn the_first_decision_that_differs_is_told() {
    let decision = |n: u64, op: &str, hash: &str| json!({ "n": n, "op": op, "caller": "src/y.rs:1:1", "hash": hash });
    let (text, json) = told(&folder(&[
        record(
            0,
            vec![],
            json!([
                decision(1, "add", "1"),
                decision(2, "matmul", "2"),
                decision(3, "add", "3")
            ]),
        ),
        record(
            1,
            vec![],
            json!([
                decision(1, "add", "1"),
                decision(2, "softmax", "8"),
                decision(3, "add", "9")
            ]),
        ),
    ]));
    assert!(text.contains("decisions differ first in number 2:\n  process 0: matmul at src/y.rs:1:1\n  process 1: softmax"), "{text}");
    assert_eq!(json["first_decision"]["one"]["call"]["n"], 2);
}

#[test]
fn what_is_no_record_is_an_error_that_says_where() {
    let good = record(0, vec![call(1, "a", "a", "done", &[])], json!([]));
    assert!(parse(good.to_string().as_bytes(), 0).is_ok());
    let change = |path: &str, value: Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(path).unwrap() = value;
        bad.to_string()
    };
    for (text, part) in [
        (String::new(), "line 1 column 0"),
        ("{".into(), "line 1 column 1"),
        ("[]".into(), "line 1"),
        (good.to_string()[..100].into(), "line 1 column 100"),
        (change("/format", json!("other")), "format"),
        (change("/process", json!(1)), "file says 0"),
        (change("/process", json!(-1)), "line 1 column"),
        (change("/size", json!(0)), "no process 0 of 0"),
        (change("/calls/0/group", json!([0, 9])), "calls[0].group"),
        (change("/calls/0/group", json!([1, 2])), "calls[0].group"),
        (
            change("/calls/0/waits_for", json!([3])),
            "calls[0].waits_for",
        ),
        (change("/calls/0/state", json!("happy")), "line 1 column"),
        (change("/calls/0/n", json!(1.5)), "line 1 column"),
        (change("/calls", json!(null)), "line 1 column"),
        ("[".repeat(100_000), "line 1 column"),
    ] {
        let error = parse(text.as_bytes(), 0).unwrap_err();
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(parse(&[0xff, 0xfe, 0], 0).is_err());
}

#[test]
fn every_cut_and_every_changed_byte_of_a_record_is_read_or_refused() {
    let text = record(0, vec![call(1, "a", "a", "waiting", &[2])], json!([]))
        .to_string()
        .into_bytes();
    for i in 0..text.len() {
        assert!(parse(&text[..i], 0).is_err());
        for byte in [b'0', b'9', b'"', b'}', b',', 0, 0xff] {
            let mut changed = text.clone();
            changed[i] = byte;
            if let Ok(record) = parse(&changed, 0) {
                let folder = Folder {
                    records: [(0, record)].into(),
                    bad: vec![],
                    restarts: vec![],
                };
                told(&folder);
            }
        }
    }
}

#[test]
fn what_a_record_says_cannot_steer_a_terminal() {
    assert_eq!(plain("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
}
