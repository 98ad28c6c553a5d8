//! What the records of several processes say together.

use super::record::{Call, Decision, Record, Records, State};
use std::collections::{BTreeMap, BTreeSet};

/// A call that some process had not finished.
pub(super) struct Wait<'a> {
    pub(super) process: usize,
    pub(super) call: &'a Call,
}

/// A call that not all of its group had come to.
pub(super) struct Behind<'a> {
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

pub(super) struct Comparison<'a> {
    pub(super) size: usize,
    /// Processes without a record.
    pub(super) missing: Vec<usize>,
    pub(super) waits: Vec<Wait<'a>>,
    /// Who is waited for and waits for nobody: where the trouble began, as far as is known.
    pub(super) roots: Vec<usize>,
    pub(super) behind: Vec<Behind<'a>>,
    pub(super) call: Option<Difference<&'a Call>>,
    pub(super) decision: Option<Difference<&'a Decision>>,
}

/// The calls of a group, by their number in it, with their process.
type Group<'a> = BTreeMap<u64, Vec<(usize, &'a Call)>>;

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
    let waiting: BTreeSet<usize> = waits.iter().map(|wait| wait.process).collect();
    let awaited: BTreeSet<usize> = waits
        .iter()
        .chain(&failed(records))
        .flat_map(|wait| wait.call.waits_for.iter().copied())
        .collect();
    let mut groups: BTreeMap<&[usize], Group<'_>> = BTreeMap::new();
    for record in records.values() {
        for call in &record.calls {
            let group = groups.entry(&call.group).or_default();
            let calls = group.entry(call.in_group).or_default();
            calls.push((record.process, call));
        }
    }
    Comparison {
        size,
        missing,
        roots: awaited.difference(&waiting).copied().collect(),
        behind: groups
            .iter()
            .filter_map(|(group, calls)| behind(group, calls, records))
            .collect(),
        call: first_call(&groups),
        decision: first_decision(records),
        waits,
    }
}

/// Calls that failed are waits that somebody gave up.
fn failed(records: &Records) -> Vec<Wait<'_>> {
    let of = |record: &'_ Record| record.process;
    records
        .values()
        .flat_map(|record| record.calls.iter().map(move |call| (of(record), call)))
        .filter(|(_, call)| call.state == State::Failed)
        .map(|(process, call)| Wait { process, call })
        .collect()
}

/// Who of a group has not come as far as the furthest.
fn behind<'a>(group: &[usize], calls: &Group<'a>, records: &Records) -> Option<Behind<'a>> {
    let (last, there) = calls.last_key_value()?;
    let &(process, call) = there.first()?;
    let reached = |member: usize| {
        let of = |list: &Vec<(usize, &Call)>| list.iter().any(|(p, _)| *p == member);
        calls
            .iter()
            .rev()
            .find(|(_, list)| of(list))
            .map(|(n, _)| *n)
    };
    let (mut slow, mut missing) = (vec![], vec![]);
    for &member in group {
        match (records.contains_key(&member), reached(member)) {
            (false, _) => missing.push(member),
            (true, Some(n)) if n == *last => {}
            (true, n) => slow.push((member, n)),
        }
    }
    // A call that all others finished is no sign of somebody missing.
    let open = there.iter().any(|(_, call)| call.state != State::Done);
    let telling = !slow.is_empty() || (open && !missing.is_empty());
    telling.then_some(Behind {
        process,
        call,
        behind: slow,
        missing,
    })
}

/// The first call, in the order of the processes' programs, that is not the same in all.
fn first_call<'a>(groups: &BTreeMap<&[usize], Group<'a>>) -> Option<Difference<&'a Call>> {
    let mut found: Option<(u64, Difference<&'a Call>)> = None;
    for calls in groups.values() {
        for (number, list) in calls {
            let Some(&one) = list.first() else { continue };
            let differs = |(_, call): &&(usize, &Call)| {
                (&call.digest, &call.op) != (&one.1.digest, &one.1.op)
            };
            let Some(&other) = list.iter().find(differs) else {
                continue;
            };
            let when = one.1.n.min(other.1.n);
            let or_earlier = !calls.range(..number).any(|(_, list)| {
                let has = |process| list.iter().any(|(p, _)| *p == process);
                has(one.0) && has(other.0)
            });
            if found.as_ref().is_none_or(|(first, _)| when < *first) {
                let difference = Difference {
                    one,
                    other,
                    or_earlier: or_earlier && *number > 0,
                };
                found = Some((when, difference));
            }
            break;
        }
    }
    found.map(|(_, difference)| difference)
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
