//! Requests that went wrong once, and thousands that nobody would send.

use crate::{
    plan,
    rule::{self, Request},
    server::{Answer, Server},
};
use anymesh::conformance::registry;
use serde_json::{Value, json};
use std::time::Duration;

/// Sends requests to a server, which answers each with an object.
fn serve(answer: Answer, lines: &[String]) -> Vec<Value> {
    let mut out = vec![];
    Server::new(answer, Duration::from_secs(120))
        .run(lines.join("\n").as_bytes(), &mut out)
        .expect("memory can be read and written");
    let text = String::from_utf8(out).expect("answers are text");
    let answers: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("answers are JSON"))
        .collect();
    assert_eq!(answers.len(), lines.len(), "one answer for each line");
    for (line, answer) in lines.iter().zip(&answers) {
        let error = answer["error"].as_str();
        assert_eq!(answer["ok"] == true, error.is_none(), "{line}: {answer}");
        let failed = error.is_some_and(|e| e.contains("the program failed"));
        assert!(!failed, "{line}: {answer}");
    }
    answers
}

fn ask(request: Value) -> Value {
    serve(rule::answer, &[request.to_string()]).remove(0)
}

#[track_caller]
fn refused(request: Value, why: &str) {
    let answer = ask(request);
    let error = answer["error"].as_str().unwrap_or("");
    assert!(error.contains(why), "{why}: {answer}");
}

#[track_caller]
fn runs_right(request: Value) -> Value {
    let answer = ask(request.clone());
    assert_eq!(answer["max_difference"], 0.0, "{request}: {answer}");
    answer
}

#[test]
fn many_dimensions_are_refused_with_the_bound() {
    for rank in [33, 128, 129, 135, 257, 5000] {
        let input = json!({ "shape": vec![1; rank] });
        refused(
            json!({ "op": "neg", "mesh": [2], "inputs": [input] }),
            "at most 32",
        );
    }
    let mut input = json!({ "shape": vec![2; 32], "dims": vec![Vec::<usize>::new(); 32] });
    input["dims"][31] = json!([0]);
    let add = json!({ "op": "add", "mesh": [2], "inputs": [input, { "shape": [2] }] });
    assert_eq!(ask(add)["outputs"][0]["dims"][31], json!([0]));
    let shape = vec![1; 100];
    refused(
        json!({ "op": "reshape", "mesh": [2], "inputs": [{ "shape": [1], "dims": [[0]] }], "attrs": { "dims": shape } }),
        "at most 32",
    );
}

#[test]
fn memory_that_is_not_there_is_not_asked_for() {
    let huge = json!({ "shape": [1u64 << 40] });
    let request =
        |run: bool| json!({ "op": "neg", "mesh": [2], "inputs": [huge.clone()], "run": run });
    refused(request(true), "at most 67108864");
    assert_eq!(
        ask(request(false))["outputs"][0]["shape"],
        json!([1u64 << 40])
    );
    let counted = json!({ "shape": [4], "dtype": "i32" });
    refused(
        json!({ "op": "bincount", "mesh": [2], "inputs": [counted], "attrs": { "minlength": 1u64 << 40 }, "run": true }),
        "at most 67108864",
    );
    for (op, attrs, why) in [
        ("interpolate", json!({ "size": [1u64 << 40] }), "at most"),
        ("chunk", json!({ "n": 1 << 20 }), "fewer than 1048576"),
    ] {
        refused(
            json!({ "op": op, "mesh": [2], "inputs": [{ "shape": [1, 1, 8] }], "attrs": attrs }),
            why,
        );
    }
    refused(
        json!({ "op": "rope_tables", "mesh": [2], "inputs": [], "attrs": { "length": 1u64 << 40, "d": 8 } }),
        "at most 67108864",
    );
}

/// A tensor whose dimensions are cut by all axes, in another order for each operand.
fn cut_by(axes: usize, rank: usize, turn: usize) -> Value {
    let mut dims = vec![vec![]; rank];
    for axis in 0..axes {
        let axis = (axis * 7 + turn) % axes;
        dims[(axis + turn) % rank].push(axis);
    }
    json!({ "shape": vec![4096; rank], "dims": dims })
}

#[test]
fn many_axes_are_solved_and_many_ranks_refused() {
    let twelve = vec![2; 12];
    let add =
        json!({ "op": "add", "mesh": twelve, "inputs": [cut_by(12, 2, 0), cut_by(12, 2, 1)] });
    assert_eq!(ask(add)["ok"], true);
    let ten = vec![2; 10];
    let inputs = [cut_by(10, 2, 0), cut_by(10, 2, 1), cut_by(10, 2, 2)];
    let einsum = json!({ "op": "einsum", "mesh": ten, "inputs": inputs, "attrs": { "equation": "ab,bc,cd->ad" } });
    assert_eq!(ask(einsum)["ok"], true);
    let inputs = [
        json!({ "shape": [1 << 20], "dims": [[0]] }),
        json!({ "shape": [1 << 20] }),
    ];
    refused(
        json!({ "op": "add", "mesh": [1 << 20], "inputs": inputs }),
        "at most 4096",
    );
}

#[test]
fn ops_whose_results_depend_on_values_are_run() {
    let float = json!({ "shape": [6, 4], "dims": [[0], []] });
    let whole = json!({ "shape": [24], "dtype": "i32", "dims": [[0]] });
    let mask = json!({ "shape": [6, 4], "dtype": "bool", "dims": [[], [0]] });
    for (op, inputs) in [
        ("nonzero", json!([float])),
        ("unique", json!([float])),
        ("bincount", json!([whole])),
        ("masked_select", json!([float, mask])),
    ] {
        let request = |run: bool| json!({ "op": op, "mesh": [2], "inputs": inputs, "run": run });
        refused(request(false), "depend on the values");
        let answer = runs_right(request(true));
        assert_eq!(answer["seeded"], true);
        assert!(answer["recv_bytes"].as_u64().is_some_and(|n| n > 0), "{op}");
    }
}

#[test]
fn what_a_request_has_too_much_is_refused_with_what_it_may_have() {
    let input = json!({ "shape": [4] });
    refused(
        json!({ "op": "neg", "mesh": [2], "inputs": [input], "runs": true }),
        "op, attrs, mesh, inputs, run",
    );
    for (key, value, accepted) in [
        ("partial", json!({ "0": "sum" }), "[[1, \"sum\"]]"),
        ("partial", json!([[0]]), "[[1, \"sum\"]]"),
        ("partial", json!([[0, "sum", 1]]), "[[1, \"sum\"]]"),
        (
            "partial",
            json!([[0, "mean"]]),
            "sum, max, min, prod, and, or",
        ),
        ("dim", json!([[0]]), "shape, dtype, dims, partial"),
        ("dims", json!({ "0": [0] }), "a list with an entry for each"),
        ("dtype", json!(32), "a text such as f32"),
        ("shape", json!([4.5]), "a list of numbers"),
    ] {
        let mut input = input.clone();
        input[key] = value;
        refused(
            json!({ "op": "neg", "mesh": [2], "inputs": [input] }),
            accepted,
        );
    }
    refused(
        json!({ "op": "neg", "mesh": [2], "inputs": [input], "run": 1 }),
        "true or false",
    );
    refused(json!([1, 2]), "a request must be an object");
    let sharding = json!({ "dims": [[0]], "partials": [] });
    let request = json!({ "mesh": [2], "shape": [4], "from": sharding, "to": {} });
    let answer = serve(plan::answer, &[request.to_string()]).remove(0);
    let error = answer["error"].as_str().unwrap_or("");
    assert!(error.contains("dims, partial"), "{answer}");
}

#[test]
fn an_infinite_difference_is_a_word() {
    let request = json!({ "op": "neg", "mesh": [2], "inputs": [{ "shape": [4] }] });
    let mut answer = Request::parse(&request).and_then(|r| r.answer()).unwrap();
    answer.difference = Some(f64::INFINITY);
    assert_eq!(answer.to_json()["max_difference"], "inf");
}

#[test]
fn positions_are_anywhere_in_the_dimension_that_they_index() {
    let inputs = [
        json!({ "shape": [512, 4], "dims": [[0], []] }),
        json!({ "shape": [1000], "dtype": "i32" }),
    ];
    let request = json!({ "op": "embedding", "mesh": [2], "inputs": inputs, "run": true });
    let parsed = Request::parse(&request).unwrap();
    let ids = parsed.values(1, parsed.inputs[1].as_ref().unwrap());
    assert!(ids.iter().all(|id| (0.0..512.0).contains(id)));
    let rows: std::collections::BTreeSet<i64> = ids.iter().map(|id| *id as i64).collect();
    assert!(rows.len() > 300, "only {} rows are read", rows.len());
    runs_right(request);
}

#[test]
fn partial_values_of_every_reduction_are_compared_rightly() {
    for dtype in [
        "f32", "f64", "bf16", "f8e4m3", "i32", "i64", "u8", "u32", "bool",
    ] {
        for reduction in ["sum", "max", "min", "prod", "and", "or"] {
            let input = json!({ "shape": [5], "dtype": dtype, "partial": [[0, reduction]] });
            runs_right(json!({ "op": "contiguous", "mesh": [3], "inputs": [input], "run": true }));
        }
    }
}

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// A value that may stand anywhere.
    fn value(&mut self) -> Value {
        match self.below(16) {
            0 => Value::Null,
            1 => json!(true),
            2 => json!(-1),
            3 => json!(u64::MAX),
            4 => json!(i64::MIN),
            5 => json!(1e300),
            6 => json!(0.5),
            7 => json!(["a", "dp=2, tp=2", "sum", "f32", "inf", "\u{0}", "é"][self.below(7)]),
            8 => json!([]),
            9 => json!({}),
            10 => json!([[0, "sum"]]),
            11 => json!([[], [0], [1, 0]]),
            12 => json!(1u64 << self.below(63)),
            _ => json!(self.below(9)),
        }
    }

    /// How a tensor may lie on a mesh.
    fn sharding(&mut self, axes: usize, rank: usize) -> (Vec<Vec<usize>>, Vec<Value>) {
        let (mut dims, mut partial) = (vec![vec![]; rank], vec![]);
        let reduction = *self.pick(&["sum", "max", "min", "prod", "and", "or"]);
        for axis in 0..axes {
            match self.below(3) {
                0 => partial.push(json!([axis, reduction])),
                1 if rank > 0 => dims[self.below(rank)].push(axis),
                _ => {}
            }
        }
        (dims, partial)
    }

    fn mesh(&mut self) -> Vec<usize> {
        (0..1 + self.below(3)).map(|_| 1 + self.below(4)).collect()
    }

    /// A sample of an op on a mesh, as a user would send it.
    fn rule_request(&mut self) -> Value {
        let entry = self.pick(registry::entries());
        let samples = entry.samples();
        let sample = self.pick(&samples);
        let mesh = self.mesh();
        let inputs: Vec<Value> = sample
            .inputs
            .iter()
            .map(|input| {
                input.as_ref().map_or(Value::Null, |input| {
                    let (dims, partial) = self.sharding(mesh.len(), input.shape.len());
                    json!({ "shape": input.shape, "dtype": input.dtype.name(), "dims": dims, "partial": partial })
                })
            })
            .collect();
        json!({ "op": entry.name, "attrs": sample.attrs, "mesh": mesh, "inputs": inputs, "run": self.below(4) == 0 })
    }

    fn plan_request(&mut self) -> Value {
        let mesh = self.mesh();
        let shape: Vec<usize> = (0..self.below(4)).map(|_| self.below(9)).collect();
        let mut side = || {
            let (dims, partial) = self.sharding(mesh.len(), shape.len());
            json!({ "dims": dims, "partial": partial })
        };
        let (from, to) = (side(), side());
        json!({ "mesh": mesh, "shape": shape, "from": from, "to": to, "objective": self.pick(&["bytes", "time"]) })
    }

    /// Changes something somewhere in a value.
    fn spoil(&mut self, value: &mut Value) {
        let inside = match value {
            Value::Array(list) => list.len(),
            Value::Object(fields) => fields.len(),
            _ => 0,
        };
        if inside == 0 || self.below(6) == 0 {
            *value = self.value();
            return;
        }
        let at = self.below(inside);
        match value {
            Value::Array(list) if self.below(8) == 0 => {
                let again = list[at].clone();
                list.extend(vec![again; 1 + self.below(40)]);
            }
            Value::Array(list) if self.below(8) == 0 => drop(list.remove(at)),
            Value::Array(list) => self.spoil(&mut list[at]),
            Value::Object(fields) => {
                let key = fields.keys().nth(at).cloned().unwrap_or_default();
                match self.below(8) {
                    0 => drop(fields.remove(&key)),
                    1 => drop(fields.insert("surprise".into(), self.value())),
                    _ => self.spoil(&mut fields[&key]),
                }
            }
            _ => {}
        }
    }

    /// A line that may be a request.
    fn line(&mut self, mut request: Value) -> String {
        for _ in 0..self.below(4) {
            self.spoil(&mut request);
        }
        let mut text = request.to_string();
        if self.below(10) == 0 {
            let at = (0..text.len())
                .cycle()
                .skip(self.below(text.len()))
                .find(|at| text.is_char_boundary(*at))
                .unwrap_or(0);
            text.truncate(at);
            let ends = ["", "}", "]", "\"", "nan", "[[[[", "\u{7f}", "\\ud800"];
            text.push_str(ends[self.below(ends.len())]);
        }
        if text.trim().is_empty() {
            text.push('0');
        }
        text
    }
}

/// `ANYMESH_FUZZ_SEED` and `ANYMESH_FUZZ_LINES` for other and for more lines.
#[test]
fn thousands_of_random_lines_are_each_answered() {
    let number = |name: &str, otherwise: u64| {
        std::env::var(name)
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(otherwise)
    };
    let mut random = Random(number("ANYMESH_FUZZ_SEED", 11));
    let count = number("ANYMESH_FUZZ_LINES", 3000);
    let rules: Vec<String> = (0..count)
        .map(|_| {
            let request = random.rule_request();
            random.line(request)
        })
        .collect();
    let answers = serve(rule::answer, &rules);
    let fine = answers.iter().filter(|a| a["ok"] == true).count() as u64;
    assert!(fine > count / 10 && fine < count, "{fine} of {count}");
    for (line, answer) in rules.iter().zip(&answers) {
        assert_ne!(answer["max_difference"], "inf", "{line}");
    }
    let plans: Vec<String> = (0..count)
        .map(|_| {
            let request = random.plan_request();
            random.line(request)
        })
        .collect();
    let fine = serve(plan::answer, &plans)
        .iter()
        .filter(|a| a["ok"] == true)
        .count() as u64;
    assert!(fine > count / 10 && fine < count, "{fine} of {count}");
}
