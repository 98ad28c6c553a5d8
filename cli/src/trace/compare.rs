//! What the records of several processes say together.

use super::record::{Call, Decision, Record, Records, State};
use std::collections::{BTreeMap, BTreeSet};

/// A call that some process had not finished.
pub(super) struct Wait<'a> {
    pub(super) process: usize,
    pub(super) call: &'a Call,
}

/// Who makes numbered calls together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Together<'a> {
    Group(&'a [usize]),
    Pair([usize; 2]),
}

impl Together<'_> {
    pub(super) fn members(&self) -> &[usize] {
        match self {
            Self::Group(members) => members,
            Self::Pair(members) => members,
        }
    }

    /// The number of the first call.
    fn first(&self) -> u64 {
        match self {
            Self::Group(_) => 1,
            Self::Pair(_) => 0,
        }
    }
}

/// A call that not all who make it together had come to.
pub(super) struct Behind<'a> {
    pub(super) together: Together<'a>,
    /// Its number among their calls.
    pub(super) number: u64,
    /// Who is furthest, and there.
    pub(super) process: usize,
    pub(super) call: &'a Call,
    /// Processes whose records end before it, with the number of their last call in the group.
    pub(super) behind: Vec<(usize, Option<u64>)>,
    /// Processes of the group that left no record.
    pub(super) missing: Vec<usize>,
}

/// The first call or decision that is not the same in two processes.
pub(super) struct Difference<T> {
    pub(super) one: (usize, T),
    pub(super) other: (usize, T),
    /// Whether it may have begun earlier: nothing before it is known of both.
    pub(super) or_earlier: bool,
}

/// The first call that differs, and whose.
pub(super) struct Diverged<'a> {
    pub(super) together: Together<'a>,
    pub(super) number: u64,
    pub(super) calls: Difference<&'a Call>,
}

pub(super) struct Comparison<'a> {
    pub(super) size: usize,
    /// Processes without a record.
    pub(super) missing: Vec<usize>,
    pub(super) waits: Vec<Wait<'a>>,
    /// Who is waited for and waits for nobody: where the trouble began, as far as is known.
    pub(super) roots: Vec<usize>,
    pub(super) behind: Vec<Behind<'a>>,
    pub(super) call: Option<Diverged<'a>>,
    pub(super) decision: Option<Difference<&'a Decision>>,
}

/// A call of a process, and what must be the same in the others that make it.
#[derive(Clone, Copy)]
struct Made<'a> {
    process: usize,
    call: &'a Call,
    digest: &'a str,
}

/// Calls that are made together, by their number.
type Calls<'a> = BTreeMap<u64, Vec<Made<'a>>>;

/// All calls, by who makes them together.
fn together<'a>(records: &'a Records) -> BTreeMap<Together<'a>, Calls<'a>> {
    let mut all: BTreeMap<Together<'a>, Calls<'a>> = BTreeMap::new();
    for record in records.values() {
        let process = record.process;
        let mut add = |together, number, made: Made<'a>| {
            let calls: &mut Calls<'a> = all.entry(together).or_default();
            calls.entry(number).or_default().push(made);
        };
        for call in &record.calls {
            for pair in &call.pairs {
                let both = [process.min(pair.peer), process.max(pair.peer)];
                let digest = pair.digest.as_str();
                add(
                    Together::Pair(both),
                    pair.n,
                    Made {
                        process,
                        call,
                        digest,
                    },
                );
            }
            if call.pairs.is_empty() && call.in_group > 0 {
                let digest = call.digest.as_str();
                let made = Made {
                    process,
                    call,
                    digest,
                };
                add(Together::Group(&call.group), call.in_group, made);
            }
        }
    }
    all
}

pub(super) fn compare(records: &Records) -> Comparison<'_> {
    let size = records.values().next().map_or(0, |record| record.size);
    let missing: Vec<usize> = (0..size)
        .filter(|process| !records.contains_key(process))
        .collect();
    let waits: Vec<Wait<'_>> = records
        .values()
        .flat_map(|record| {
            let open = |call: &&Call| matches!(call.state, State::Waiting | State::Queued);
            let process = record.process;
            let calls = record.calls.iter().filter(open);
            calls.map(move |call| Wait { process, call })
        })
        .collect();
    // Calls that failed are waits that somebody gave up.
    let given_up = failed(records);
    let all = || waits.iter().chain(&given_up);
    let waiting: BTreeSet<usize> = all()
        .filter(|wait| !wait.call.waits_for.is_empty())
        .map(|wait| wait.process)
        .collect();
    let awaited: BTreeSet<usize> = all()
        .flat_map(|wait| wait.call.waits_for.iter().copied())
        .collect();
    let groups = together(records);
    Comparison {
        size,
        missing,
        roots: awaited.difference(&waiting).copied().collect(),
        behind: groups
            .iter()
            .filter_map(|(together, calls)| behind(*together, calls, records))
            .collect(),
        call: first_call(&groups),
        decision: first_decision(records),
        waits,
    }
}

fn failed(records: &Records) -> Vec<Wait<'_>> {
    let of = |record: &'_ Record| record.process;
    records
        .values()
        .flat_map(|record| record.calls.iter().map(move |call| (of(record), call)))
        .filter(|(_, call)| call.state == State::Failed)
        .map(|(process, call)| Wait { process, call })
        .collect()
}

/// Who has not come as far as the furthest of those who make calls together.
fn behind<'a>(together: Together<'a>, calls: &Calls<'a>, records: &Records) -> Option<Behind<'a>> {
    let (last, there) = calls.last_key_value()?;
    let furthest = there.first()?;
    let reached = |member: usize| {
        let of = |list: &[Made<'_>]| list.iter().any(|made| made.process == member);
        let found = calls.iter().rev().find(|(_, list)| of(list));
        found.map(|(number, _)| *number)
    };
    let (mut slow, mut missing) = (vec![], vec![]);
    for &member in together.members() {
        match (records.contains_key(&member), reached(member)) {
            (false, _) => missing.push(member),
            (true, Some(n)) if n == *last => {}
            (true, n) => slow.push((member, n)),
        }
    }
    // A call that was finished is no sign of somebody missing.
    let open = there.iter().any(|made| made.call.state != State::Done);
    let telling = open && !(slow.is_empty() && missing.is_empty());
    telling.then_some(Behind {
        together,
        number: *last,
        process: furthest.process,
        call: furthest.call,
        behind: slow,
        missing,
    })
}

/// The first call, in the order of the processes' programs, that is not the same in all.
fn first_call<'a>(groups: &BTreeMap<Together<'a>, Calls<'a>>) -> Option<Diverged<'a>> {
    let mut found: Option<(u64, Diverged<'a>)> = None;
    for (&together, calls) in groups {
        let differing = calls.iter().find_map(|(number, list)| {
            let one = *list.first()?;
            let other = *list.iter().find(|made| made.digest != one.digest)?;
            Some((*number, one, other))
        });
        let Some((number, one, other)) = differing else {
            continue;
        };
        let when = one.call.n.min(other.call.n);
        if found.as_ref().is_some_and(|(first, _)| *first <= when) {
            continue;
        }
        let known = calls.range(..number).any(|(_, list)| {
            let has = |process| list.iter().any(|made| made.process == process);
            has(one.process) && has(other.process)
        });
        let calls = Difference {
            one: (one.process, one.call),
            other: (other.process, other.call),
            or_earlier: !known && number > together.first(),
        };
        let diverged = Diverged {
            together,
            number,
            calls,
        };
        found = Some((when, diverged));
    }
    found.map(|(_, diverged)| diverged)
}

/// The first decision whose hash is not the same in all.
fn first_decision(records: &Records) -> Option<Difference<&Decision>> {
    let mut by_number: BTreeMap<u64, Vec<(usize, &Decision)>> = BTreeMap::new();
    for record in records.values() {
        for decision in &record.decisions {
            let list = by_number.entry(decision.n).or_default();
            list.push((record.process, decision));
        }
    }
    let (number, one, other) = by_number.iter().find_map(|(number, list)| {
        let one = *list.first()?;
        let other = list.iter().find(|(_, d)| d.hash != one.1.hash)?;
        Some((*number, one, *other))
    })?;
    let has = |list: &Vec<(usize, &Decision)>, process| list.iter().any(|(p, _)| *p == process);
    let or_earlier = !by_number
        .range(..number)
        .any(|(_, list)| has(list, one.0) && has(list, other.0));
    Some(Difference {
        one,
        other,
        or_earlier: or_earlier && number > 0,
    })
}
