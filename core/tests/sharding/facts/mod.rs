//! Every recorded call of other systems that our ops cover: right values, and never more bytes than
//! the other system needs for the same inputs.

mod case;
mod paddle;
mod paddle_ops;
mod torch;

use case::{Case, Verdict};
use std::collections::BTreeMap;

/// Calls that need more bytes here, and why they must.
const KNOWN: &[(&str, &str)] = &[
    // PyTorch answers with a strided shard: parts of the flat result that are not neighbours. A
    // sharding here cuts a dimension in runs, as every op expects.
    ("reshape_flat [\"S1\"]", "a strided cut"),
    // PyTorch rounds the parts of a sum to bf16 and adds them later, in bf16. That is not the sum
    // rounded once, so the sum comes first here.
    (
        "bf16_cast [\"P:sum\"]",
        "the rounded sum, not the sum of rounded parts",
    ),
];

/// What became of the calls of one system.
#[derive(Default)]
struct Tally {
    rows: usize,
    covered: usize,
    right: usize,
    less: usize,
    equal: usize,
    not_compared: usize,
    reduced: usize,
    known: usize,
    wrong: Vec<String>,
    more: Vec<String>,
    without: BTreeMap<String, usize>,
}

impl Tally {
    fn of(cases: Vec<Result<Case, String>>) -> Self {
        let cpu = anymesh_backend_cpu::device();
        let mut tally = Self {
            rows: cases.len(),
            ..Self::default()
        };
        for case in cases {
            let case = match case {
                Ok(case) => case,
                Err(name) => {
                    *tally.without.entry(name).or_default() += 1;
                    continue;
                }
            };
            tally.covered += 1;
            tally.reduced += usize::from(case.reduced.is_some());
            match case.check_values(&cpu) {
                Ok(()) => tally.right += 1,
                Err(why) => tally.wrong.push(why),
            }
            match case.compare_bytes() {
                Verdict::NotCompared => tally.not_compared += 1,
                Verdict::Less => tally.less += 1,
                Verdict::Equal => tally.equal += 1,
                Verdict::More(_) if KNOWN.iter().any(|(name, _)| *name == case.name) => {
                    tally.known += 1
                }
                Verdict::More(what) => tally.more.push(what),
            }
        }
        tally
    }

    fn print(&self, system: &str) {
        println!(
            "{system}: {} rows, {} covered, values right {}, wrong {}",
            self.rows,
            self.covered,
            self.right,
            self.wrong.len()
        );
        println!(
            "  bytes: less {}, equal {}, more {}, more for a known reason {}, not compared {}",
            self.less,
            self.equal,
            self.more.len(),
            self.known,
            self.not_compared
        );
        println!("  values at smaller sizes: {}", self.reduced);
        let without: Vec<String> = self
            .without
            .iter()
            .map(|(name, n)| format!("{name} ({n})"))
            .collect();
        println!(
            "  not covered: {}",
            if without.is_empty() {
                "none".into()
            } else {
                without.join(", ")
            }
        );
        self.wrong.iter().for_each(|w| println!("  wrong: {w}"));
        self.more.iter().for_each(|m| println!("  more: {m}"));
    }

    fn check(&self, system: &str) {
        self.print(system);
        assert!(
            self.wrong.is_empty(),
            "{} of {} calls of {system} have wrong values",
            self.wrong.len(),
            self.covered
        );
        assert!(
            self.more.is_empty(),
            "{} of {} calls of {system} need more bytes here",
            self.more.len(),
            self.covered
        );
    }
}

#[test]
fn no_recorded_call_of_torch_needs_more_bytes_here() {
    let tally = Tally::of(torch::cases().expect("the recorded calls"));
    tally.check("torch");
    assert_eq!((tally.rows, tally.covered, tally.known), (992, 992, 4));
}

#[test]
fn no_recorded_call_of_paddle_needs_more_bytes_here() {
    let tally = Tally::of(paddle::cases());
    tally.check("paddle");
    assert_eq!((tally.rows, tally.covered, tally.known), (241, 174, 0));
}
