//! Who is to blame when something did not arrive: a function of what all processes were doing.

use super::message::{Step, Trouble, Verdict};
use crate::recorder::{Call, Record, State};

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
    if let Some(calls) = first_difference(witnesses) {
        return Verdict::Diverged { calls };
    }
    // Whoever waits leads to whom it waits for, until one is found that does not wait.
    let (mut at, mut path) = (blamed.first().copied().unwrap_or(reporter), vec![reporter]);
    loop {
        if let Some(start) = path.iter().position(|p| *p == at) {
            // They wait for each other: their programs differ without having met.
            let (a, b) = match path.get(start + 1) {
                Some(next) => (at, *next),
                None => (at, blamed.first().copied().unwrap_or(at)),
            };
            return differ(witnesses, a, b);
        }
        path.push(at);
        match waiting(witnesses, at).and_then(|call| call.waits_for.first().copied()) {
            Some(next) => at = next,
            None => break,
        }
    }
    let detail = match witnesses.get(at) {
        Some(Witness::Told(record)) => format!("\n  {} {}", who(at), doing(record)),
        _ => format!("\n  {} has ended already", who(at)),
    };
    Verdict::Missing {
        processes: vec![at],
        seconds,
        detail,
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

/// The call in which a process waits.
fn waiting(witnesses: &[Witness], process: usize) -> Option<&Call> {
    let last = told(witnesses, process)?.calls.last()?;
    (last.state != State::Done).then_some(last)
}

/// What a process that waits for nobody is doing.
fn doing(record: &Record) -> String {
    match record.calls.last() {
        Some(call) => format!(
            "is in no call: the last one it finished is {} at {}",
            named(call),
            line(call)
        ),
        None => "has not called anything yet".into(),
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
    if let Some(calls) = first_difference(witnesses) {
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
fn first_difference(witnesses: &[Witness]) -> Option<Box<[Step; 2]>> {
    let mut first: Option<(u64, Box<[Step; 2]>)> = None;
    for a in 0..witnesses.len() {
        for b in a + 1..witnesses.len() {
            let (Some(left), Some(right)) = (told(witnesses, a), told(witnesses, b)) else {
                continue;
            };
            let differs = left.calls.iter().find_map(|x| {
                let y = right.calls.iter().find(|y| together(x, y, a, b))?;
                (!alike(x, y, a, b)).then_some((x, y))
            });
            if let Some((x, y)) = differs
                && first.as_ref().is_none_or(|(n, _)| x.n < *n)
            {
                let calls = first_decision(left, right)
                    .unwrap_or_else(|| Box::new([step(a, x), step(b, y)]));
                first = Some((x.n, calls));
            }
        }
    }
    first.map(|(_, calls)| calls)
}

fn pair(call: &Call, peer: usize) -> Option<&crate::recorder::Pair> {
    call.pairs.iter().find(|p| p.peer == peer)
}

fn together(x: &Call, y: &Call, a: usize, b: usize) -> bool {
    if let (Some(p), Some(q)) = (pair(x, b), pair(y, a)) {
        return p.n == q.n;
    }
    x.in_group > 0 && x.group == y.group && x.in_group == y.in_group
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
