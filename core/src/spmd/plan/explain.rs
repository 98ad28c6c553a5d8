//! Where a plan's bytes go and why, and how two plans differ.

use super::{PlannedStep, StepPlan, Totals};
use serde_json::{Value, json};
use std::fmt::{Display, Formatter, Result};

/// Steps of a plan, with what else could have been chosen.
#[derive(Clone, Debug)]
pub struct Explanation<'p> {
    /// The steps, each with its number.
    pub steps: Vec<(usize, &'p PlannedStep)>,
    total: u64,
}

impl StepPlan {
    /// The `top` steps that receive most, most first.
    pub fn explain(&self, top: usize) -> Explanation<'_> {
        let mut steps: Vec<_> = self.steps.iter().enumerate().collect();
        steps.retain(|(_, step)| step.bytes > 0);
        steps.sort_by_key(|(number, step)| (std::cmp::Reverse(step.bytes), *number));
        steps.truncate(top);
        Explanation {
            steps,
            total: self.totals.bytes,
        }
    }

    /// One step; none where there is no step of this number.
    pub fn explain_step(&self, number: usize) -> Explanation<'_> {
        Explanation {
            steps: self
                .steps
                .get(number)
                .map(|s| (number, s))
                .into_iter()
                .collect(),
            total: self.totals.bytes,
        }
    }

    /// How this plan, the first, differs from another: step by step, each held against the step of
    /// the same op, line and rule.
    pub fn diff<'p>(&'p self, other: &'p StepPlan) -> PlanDiff<'p> {
        PlanDiff {
            changes: changes(&self.steps, &other.steps),
            totals: (self.totals, other.totals),
        }
    }
}

/// A table of steps; below each what was chosen and what else could have been, with the bytes that
/// it takes at this step alone.
impl Display for Explanation<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for (number, step) in &self.steps {
            let share = 100.0 * step.bytes as f64 / self.total.max(1) as f64;
            writeln!(f, "{number:>5}  {share:>5.1}%  {step}")?;
            for choice in &step.alternatives {
                let chosen = choice.description.ends_with(&step.targets.join(", "));
                let mark = if chosen { "chosen" } else { "or" };
                writeln!(
                    f,
                    "{mark:>20} {:>14} B  {}",
                    choice.bytes, choice.description
                )?;
            }
        }
        let told: u64 = self.steps.iter().map(|(_, step)| step.bytes).sum();
        write!(f, "{told} of {} bytes", self.total)
    }
}

impl Explanation<'_> {
    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let step = |(number, step): &(usize, &PlannedStep)| {
            let or: Vec<Value> = step
                .alternatives
                .iter()
                .map(|a| json!({ "choice": a.description, "recv_bytes": a.bytes }))
                .collect();
            json!({
                "number": number, "op": step.op, "caller": step.caller, "recv_bytes": step.bytes,
                "seconds": step.seconds, "operands": step.operands, "targets": step.targets,
                "results": step.results, "choice": step.choice, "alternatives": or,
            })
        };
        json!({ "recv_bytes": self.total, "steps": self.steps.iter().map(step).collect::<Vec<_>>() })
    }
}

/// Where two plans differ.
#[derive(Clone, Debug)]
pub struct PlanDiff<'p> {
    /// In the order of the program.
    pub changes: Vec<StepChange<'p>>,
    /// What each takes in all.
    pub totals: (Totals, Totals),
}

/// A step that is in one plan only, or in both and not the same.
#[derive(Clone, Copy, Debug)]
pub struct StepChange<'p> {
    /// Its number in the first plan.
    pub first: Option<(usize, &'p PlannedStep)>,
    /// Its number in the second.
    pub second: Option<(usize, &'p PlannedStep)>,
}

impl StepChange<'_> {
    fn bytes(&self) -> (u64, u64) {
        let bytes = |step: Option<(usize, &PlannedStep)>| step.map_or(0, |(_, s)| s.bytes);
        (bytes(self.first), bytes(self.second))
    }
}

/// Beyond this many pairs steps are held against each other by their place.
const PAIRS: usize = 1 << 22;

fn changes<'p>(a: &'p [PlannedStep], b: &'p [PlannedStep]) -> Vec<StepChange<'p>> {
    let alike = |i: usize, j: usize| {
        (&a[i].op, &a[i].caller, &a[i].rule) == (&b[j].op, &b[j].caller, &b[j].rule)
    };
    let shorter = a.len().min(b.len());
    let start = (0..shorter).take_while(|i| alike(*i, *i)).count();
    let end = (0..shorter - start)
        .take_while(|i| alike(a.len() - 1 - i, b.len() - 1 - i))
        .count();
    let mut pairs: Vec<(Option<usize>, Option<usize>)> =
        (0..start).map(|i| (Some(i), Some(i))).collect();
    let (rows, columns) = (a.len() - end - start, b.len() - end - start);
    if rows * columns > PAIRS {
        let pair = |i: usize| {
            let first = (i < rows).then_some(start + i);
            (first, (i < columns).then_some(start + i))
        };
        pairs.extend((0..rows.max(columns)).map(pair));
    } else {
        // The longest list of steps that are alike in both, from the end.
        let mut longest = vec![0u32; (rows + 1) * (columns + 1)];
        let at = |i: usize, j: usize| i * (columns + 1) + j;
        for i in (0..rows).rev() {
            for j in (0..columns).rev() {
                longest[at(i, j)] = match alike(start + i, start + j) {
                    true => longest[at(i + 1, j + 1)] + 1,
                    false => longest[at(i + 1, j)].max(longest[at(i, j + 1)]),
                };
            }
        }
        let (mut i, mut j) = (0, 0);
        while i < rows || j < columns {
            let both = i < rows && j < columns;
            if both && alike(start + i, start + j) {
                pairs.push((Some(start + i), Some(start + j)));
                (i, j) = (i + 1, j + 1);
            } else if j == columns || both && longest[at(i + 1, j)] >= longest[at(i, j + 1)] {
                pairs.push((Some(start + i), None));
                i += 1;
            } else {
                pairs.push((None, Some(start + j)));
                j += 1;
            }
        }
    }
    pairs.extend(
        (0..end)
            .rev()
            .map(|i| (Some(a.len() - 1 - i), Some(b.len() - 1 - i))),
    );
    let step = |(i, j): (Option<usize>, Option<usize>)| StepChange {
        first: i.map(|i| (i, &a[i])),
        second: j.map(|j| (j, &b[j])),
    };
    let same = |change: &StepChange<'_>| match (change.first, change.second) {
        (Some((_, a)), Some((_, b))) => {
            (&a.choice, &a.targets, a.bytes) == (&b.choice, &b.targets, b.bytes)
        }
        _ => false,
    };
    pairs
        .into_iter()
        .map(step)
        .filter(|change| !same(change))
        .collect()
}

/// A pair of lines for each step that differs, then the totals.
impl Display for PlanDiff<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        for change in &self.changes {
            for (sign, step) in [('-', change.first), ('+', change.second)] {
                if let Some((number, step)) = step {
                    writeln!(f, "{sign}{number:>5}  {step}")?;
                }
            }
        }
        writeln!(f, "- {}", self.totals.0)?;
        write!(f, "+ {}", self.totals.1)
    }
}

impl PlanDiff<'_> {
    /// The same for programs.
    pub fn to_json(&self) -> Value {
        let side = |step: Option<(usize, &PlannedStep)>| {
            step.map(|(number, s)| {
                json!({ "number": number, "op": s.op, "caller": s.caller, "choice": s.choice, "targets": s.targets, "recv_bytes": s.bytes })
            })
        };
        let change = |c: &StepChange<'_>| {
            let (a, b) = c.bytes();
            json!({ "first": side(c.first), "second": side(c.second), "more_bytes": b as i64 - a as i64 })
        };
        json!({
            "changes": self.changes.iter().map(change).collect::<Vec<_>>(),
            "first": { "recv_bytes": self.totals.0.bytes, "seconds": self.totals.0.seconds, "memory": self.totals.0.memory },
            "second": { "recv_bytes": self.totals.1.bytes, "seconds": self.totals.1.seconds, "memory": self.totals.1.memory },
        })
    }
}
