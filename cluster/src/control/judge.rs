//! Who is to blame when something did not arrive: a function of what all processes were doing.

use super::message::{Step, Trouble, Verdict};
use crate::recorder::{Call, Record, State};
use std::collections::{HashMap, HashSet};

#[cfg(test)]
mod tests;

/// What the hub knows of a process when it judges.
#[derive(Clone, Debug)]
pub(crate) enum Witness {
    /// What it said it was doing.
    Told(Box<Record>),
    /// It is there and said nothing.
    Silent,
    /// It had ended as it should.
    Left,
}

/// The verdict for everybody. `who` names a process in words.
pub(crate) fn judge(
    reporter: usize,
    trouble: &Trouble,
    witnesses: &[Witness],
    who: &dyn Fn(usize) -> String,
) -> Verdict {
    let (blamed, seconds) = match trouble {
        Trouble::Gone { who, detail } => {
            return Verdict::Died {
                process: *who,
                detail: detail.clone(),
            };
        }
        Trouble::Differs { from } => {
            return differ(witnesses, reporter, *from);
        }
        Trouble::Late { from, seconds } => (from.clone(), *seconds),
    };
    let silent: Vec<usize> = of(witnesses, |w| matches!(w, Witness::Silent));
    if !silent.is_empty() {
        let detail = silent
            .iter()
            .map(|p| {
                format!(
                    "\n  {} does not answer: it is stopped, or its machine cannot be reached{}",
                    who(*p),
                    last_with(witnesses, *p)
                )
            })
            .collect();
        return Verdict::Missing {
            processes: silent,
            seconds,
            detail,
        };
    }
    let made = Made::of(witnesses);
    if let Some(calls) = first_difference(witnesses, &made) {
        return Verdict::Diverged { calls };
    }
    // Whoever waits leads to those it waits for, until some are found that do not wait.
    let awaited = |p: usize| waiting(witnesses, p).map_or(vec![], |call| made.missing(p, call));
    let mut known = HashSet::new();
    let mut seen: Vec<usize> = blamed
        .iter()
        .copied()
        .filter(|p| known.insert(*p))
        .collect();
    let mut ends = vec![];
    let mut at = 0;
    while let Some(process) = seen.get(at).copied() {
        let next = awaited(process);
        if next.is_empty() {
            ends.push(process);
        }
        seen.extend(next.into_iter().filter(|p| known.insert(*p)));
        at += 1;
    }
    if ends.is_empty() {
        // They wait for each other: their programs differ without having met.
        let mut path = vec![blamed.first().copied().unwrap_or(reporter)];
        while let Some(next) = path.last().and_then(|p| awaited(*p).first().copied()) {
            if let Some(start) = path.iter().position(|p| *p == next) {
                return differ(
                    witnesses,
                    path[start],
                    *path.get(start + 1).unwrap_or(&next),
                );
            }
            path.push(next);
        }
        ends = path;
    }
    ends.sort_unstable();
    let detail = ends.iter().map(|p| {
        let doing = match witnesses.get(*p) {
            Some(Witness::Told(record)) => doing(record),
            _ => "has ended already".into(),
        };
        format!("\n  {} {doing}{}", who(*p), apart(witnesses, reporter, *p))
    });
    Verdict::Missing {
        detail: detail.collect(),
        processes: ends,
        seconds,
    }
}

/// Where the decisions of a process that waits and one that is waited for went apart, if they did:
/// it may be the cause.
fn apart(witnesses: &[Witness], a: usize, b: usize) -> String {
    let steps = told(witnesses, a)
        .zip(told(witnesses, b))
        .and_then(|(a, b)| first_decision(a, b));
    steps.map_or(String::new(), |steps| {
        let [a, b] = steps.map(|s| format!("process {} did {} at {}", s.process, s.op, s.caller));
        format!("; before that {a}, and {b}")
    })
}

/// The calls that each process is known to have made, by what they have in common with the calls of
/// others.
struct Made<'a>(Vec<HashMap<Common<'a>, &'a Call>>);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Common<'a> {
    Pair(usize, u64),
    Group(&'a [usize], u64),
}

impl<'a> Made<'a> {
    fn of(witnesses: &'a [Witness]) -> Self {
        let calls = |process: usize| {
            let calls = told(witnesses, process).map_or(&[][..], |record| &record.calls);
            calls.iter().flat_map(|call| {
                let pairs = call.pairs.iter().map(|p| Common::Pair(p.peer, p.n));
                let group = Common::Group(&call.group, call.in_group);
                pairs.chain([group]).map(move |common| (common, call))
            })
        };
        Self((0..witnesses.len()).map(|p| calls(p).collect()).collect())
    }

    /// The call of process `b` that belongs to a call of process `a`.
    fn partner(&self, a: usize, call: &Call, b: usize) -> Option<&'a Call> {
        let common = match pair(call, b) {
            Some(pair) => Common::Pair(a, pair.n),
            None if call.in_group > 0 => Common::Group(&call.group, call.in_group),
            None => return None,
        };
        self.0.get(b)?.get(&common).copied()
    }

    /// Of those that a call of process `a` waits for, those that have not made theirs.
    fn missing(&self, a: usize, call: &Call) -> Vec<usize> {
        let missing = |b: &usize| self.partner(a, call, *b).is_none();
        call.waits_for.iter().copied().filter(missing).collect()
    }
}

fn of(witnesses: &[Witness], is: impl Fn(&Witness) -> bool) -> Vec<usize> {
    (0..witnesses.len())
        .filter(|p| is(&witnesses[*p]))
        .collect()
}

fn told(witnesses: &[Witness], process: usize) -> Option<&Record> {
    match witnesses.get(process) {
        Some(Witness::Told(record)) => Some(record),
        _ => None,
    }
}

/// The call in which a process waits: the first, where calls are queued behind each other.
fn waiting(witnesses: &[Witness], process: usize) -> Option<&Call> {
    let calls = &told(witnesses, process)?.calls;
    let first = calls.iter().find(|call| call.state == State::Waiting);
    first.or_else(|| calls.last().filter(|last| last.state == State::Failed))
}

/// What a process is doing that waits for nobody.
fn doing(record: &Record) -> String {
    // What goes on by itself keeps nobody.
    let last = record.calls.iter().rev().find(|c| c.state != State::Queued);
    match last {
        None => "has not called anything yet".into(),
        Some(call) if call.state == State::Done => format!(
            "is in no call: the last one it finished is {} at {}",
            named(call),
            line(call)
        ),
        Some(call) => format!(
            "is in {} at {}, and what it sent has not arrived",
            named(call),
            line(call)
        ),
    }
}

fn named(call: &Call) -> String {
    match call.on_behalf_of.is_empty() {
        true => format!("{} {}", call.op, call.detail),
        false => format!("{} {} of {}", call.op, call.detail, call.on_behalf_of),
    }
}

fn line(call: &Call) -> &str {
    match call.caller.is_empty() {
        true => "an unknown line",
        false => &call.caller,
    }
}

/// The last call that others finished with a process that says nothing.
fn last_with(witnesses: &[Witness], process: usize) -> String {
    let shared = |call: &&Call| {
        call.state == State::Done
            && (call.group.contains(&process) || call.pairs.iter().any(|p| p.peer == process))
    };
    let last = (0..witnesses.len())
        .filter_map(|p| told(witnesses, p)?.calls.iter().rev().find(shared))
        .max_by_key(|call| call.n);
    last.map_or(String::new(), |call| {
        format!(
            "; the last call that others finished with it is {} at {}",
            named(call),
            line(call)
        )
    })
}

fn step(process: usize, call: &Call) -> Step {
    Step {
        process,
        op: named(call),
        caller: line(call).into(),
    }
}

/// Two processes are known to have gone different ways: where.
fn differ(witnesses: &[Witness], a: usize, b: usize) -> Verdict {
    if let Some(calls) = first_difference(witnesses, &Made::of(witnesses)) {
        return Verdict::Diverged { calls };
    }
    let now = |process: usize| {
        let last = told(witnesses, process).and_then(|record| record.calls.last());
        last.map_or_else(
            || Step {
                process,
                op: "nothing".into(),
                caller: "an unknown line".into(),
            },
            |call| step(process, call),
        )
    };
    Verdict::Diverged {
        calls: Box::new([now(a), now(b)]),
    }
}

/// The first call that two processes made together and differently. Where their decisions differ
/// before that, the first of those: it is the cause.
fn first_difference(witnesses: &[Witness], made: &Made<'_>) -> Option<Box<[Step; 2]>> {
    let mut first: Option<(&Call, usize, &Call, usize)> = None;
    for a in 0..witnesses.len() {
        let calls = told(witnesses, a).map_or(&[][..], |record| &record.calls);
        for x in calls {
            // In a group all are asked, so that one suffices.
            let peers = x
                .pairs
                .iter()
                .map(|p| p.peer)
                .chain(x.group.iter().copied());
            let differs = peers.filter(|b| *b > a).find_map(|b| {
                let y = made.partner(a, x, b)?;
                (!alike(x, y, a, b)).then_some((x, a, y, b))
            });
            let Some(differs) = differs else { continue };
            if first.is_none_or(|(before, ..)| x.n < before.n) {
                first = Some(differs);
            }
            break;
        }
    }
    let (x, a, y, b) = first?;
    let decided = told(witnesses, a)
        .zip(told(witnesses, b))
        .and_then(|(left, right)| first_decision(left, right));
    Some(decided.unwrap_or_else(|| Box::new([step(a, x), step(b, y)])))
}

fn pair(call: &Call, peer: usize) -> Option<&crate::recorder::Pair> {
    call.pairs.iter().find(|p| p.peer == peer)
}

fn alike(x: &Call, y: &Call, a: usize, b: usize) -> bool {
    match (pair(x, b), pair(y, a)) {
        (Some(p), Some(q)) => p.digest == q.digest,
        _ => x.digest == y.digest,
    }
}

/// The first decision in which two processes differ, if they agreed before it.
fn first_decision(left: &Record, right: &Record) -> Option<Box<[Step; 2]>> {
    let mut agreed = false;
    for x in &left.decisions {
        let Some(y) = right.decisions.iter().find(|y| y.n == x.n) else {
            continue;
        };
        if x.hash == y.hash {
            agreed = true;
            continue;
        }
        if !agreed {
            return None;
        }
        let step = |process, decided: &crate::recorder::Decided| Step {
            process,
            op: decided.op.clone(),
            caller: decided.caller.clone(),
        };
        return Some(Box::new([step(left.process, x), step(right.process, y)]));
    }
    None
}
