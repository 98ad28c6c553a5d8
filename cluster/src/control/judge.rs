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
    let first = match waiting(witnesses, reporter) {
        Some(call) => awaited(witnesses, call, &blamed),
        None => blamed.first().copied(),
    };
    let (mut at, mut path) = (first.unwrap_or(reporter), vec![reporter]);
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
        let next =
            waiting(witnesses, at).and_then(|call| awaited(witnesses, call, &call.waits_for));
        match next {
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

/// The call in which a process waits: the first, where calls are queued behind each other.
fn waiting(witnesses: &[Witness], process: usize) -> Option<&Call> {
    let calls = &told(witnesses, process)?.calls;
    let first = calls.iter().find(|call| call.state == State::Waiting);
    first.or_else(|| calls.last().filter(|last| last.state != State::Done))
}

/// Whom a call really waits for: of a call that all members make, the first who has not made it.
fn awaited(witnesses: &[Witness], call: &Call, processes: &[usize]) -> Option<usize> {
    let came = |process: &usize| {
        call.in_group > 0
            && told(witnesses, *process).is_some_and(|record| {
                let same = |c: &Call| c.group == call.group && c.in_group == call.in_group;
                record.calls.iter().any(same)
            })
    };
    processes.iter().copied().find(|process| !came(process))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::FORMAT;

    fn call(n: u64, in_group: u64, own: usize, state: State) -> Call {
        Call {
            n,
            group: vec![0, 1, 2],
            in_group,
            op: "all_reduce".into(),
            detail: "f32[8]".into(),
            digest: format!("{in_group}"),
            caller: "main.rs:7".into(),
            on_behalf_of: String::new(),
            state,
            waits_for: (0..3).filter(|p| *p != own).collect(),
            pairs: vec![],
            seconds: 0.0,
        }
    }

    fn witness(process: usize, calls: Vec<Call>) -> Witness {
        Witness::Told(Box::new(Record {
            format: FORMAT.into(),
            process,
            size: 3,
            host: "here".into(),
            pid: 1,
            version: "1".into(),
            error: None,
            unix_time: 0.0,
            calls,
            decisions: vec![],
        }))
    }

    #[test]
    fn of_a_call_that_all_make_the_one_who_has_not_is_missing_though_others_wait_for_each_other() {
        // Two have queued the third call and one more behind it; the last is at its second.
        let ahead = |own: usize| {
            let calls = [
                (1, State::Done),
                (2, State::Done),
                (3, State::Waiting),
                (4, State::Waiting),
            ];
            calls
                .map(|(n, state)| call(n, n, own, state))
                .into_iter()
                .collect()
        };
        let late = vec![call(1, 1, 2, State::Done), call(2, 2, 2, State::Done)];
        let witnesses = [witness(0, ahead(0)), witness(1, ahead(1)), witness(2, late)];
        for reporter in [0, 1] {
            let trouble = Trouble::Late {
                from: (0..3).filter(|p| *p != reporter).collect(),
                seconds: 6.0,
            };
            let verdict = judge(reporter, &trouble, &witnesses, &|p| format!("process {p}"));
            assert!(
                matches!(&verdict, Verdict::Missing { processes, .. } if *processes == [2]),
                "{verdict:?}"
            );
        }
    }
}
