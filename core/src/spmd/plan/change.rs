//! What could be decided otherwise.

use super::{
    PlanOptions,
    follow::{Graph, Memo},
    record::{Did, Record},
    run::Run,
    session::Guide,
};
use crate::{
    Result, Sharding,
    fingerprint::Digest,
    reshard::{Objective, known},
    spmd::solve::Assigned,
};
use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

/// A decision for all calls of one class.
pub(super) enum Change {
    Choose(u64, Rc<Assigned>),
    /// To hold the form that operands are brought to, a bit for each.
    Hold(u64, u32),
    /// To have gradients keep operands as they lie: by class, a bit for each.
    Again(Vec<(u64, u32)>),
}

impl Change {
    /// The same number for the same change.
    pub(super) fn digest(&self) -> u64 {
        let digest = Digest::default();
        match self {
            Change::Choose(class, assigned) => {
                let digest = digest.word(1).word(*class);
                let choices = assigned.choices.iter().map(choice_number);
                let cuts = assigned.cuts.iter();
                let cuts = cuts.map(|(f, a)| u64::from(*f) << 8 | u64::from(*a));
                digest.words(choices).words(cuts).0
            }
            Change::Hold(class, operands) => digest.words([2, *class, u64::from(*operands)]).0,
            Change::Again(of) => {
                let words = of
                    .iter()
                    .flat_map(|(class, bits)| [*class, u64::from(*bits)]);
                digest.word(3).words(words).0
            }
        }
    }

    pub(super) fn apply(&self, guide: &mut Guide) {
        match self {
            Change::Choose(class, assigned) => {
                guide.choices.insert(*class, assigned.clone());
            }
            Change::Hold(class, operands) => *guide.holds.entry(*class).or_default() |= operands,
            Change::Again(of) => {
                for (class, operands) in of {
                    *guide.again.entry(*class).or_default() |= operands;
                }
            }
        }
    }
}

fn choice_number(choice: &crate::spmd::Choice) -> u64 {
    use crate::spmd::Choice;
    match *choice {
        Choice::Whole => 0,
        Choice::Cut(f) => 1 | (f as u64) << 2,
        Choice::Through(operands, reduction) => {
            2 | (reduction as u64) << 2 | u64::from(operands) << 8
        }
    }
}

/// How far up from an operand that had to be brought its makers are looked at.
const MAKERS: usize = 3;

/// The changes that seem to save something, those first that seem to save most.
pub(super) fn candidates(run: &Run, options: &PlanOptions, memo: &Memo) -> Result<Vec<Change>> {
    let records = &run.records;
    let graph = Graph::new(records, memo);
    let mut members: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (number, record) in records.iter().enumerate() {
        members.entry(record.class).or_default().push(number);
    }
    let mut found: Vec<(i64, usize, Change)> = vec![];
    for number in at_stake(&graph, records) {
        let alike = &members[&records[number].class];
        // One stands for all: not the first or the last, whose neighbours may be others.
        if alike[alike.len() / 2] != number {
            continue;
        }
        for (saved, assigned) in graph.savings(number)? {
            let all = saved.saturating_mul(alike.len() as i64);
            let change = Change::Choose(records[number].class, Rc::new(assigned));
            found.push((all, number, change));
        }
    }
    found.extend(holds(records, options));
    found.sort_by_key(|(saved, number, _)| (std::cmp::Reverse(*saved), *number));
    Ok(found.into_iter().map(|(.., change)| change).collect())
}

/// The calls that send something, and those that made what had to be brought.
fn at_stake(graph: &Graph<'_>, records: &[Record]) -> Vec<usize> {
    let mut stake = vec![false; records.len()];
    let mut open: Vec<(usize, usize)> = vec![];
    for (number, record) in records.iter().enumerate() {
        if record.bytes > 0 {
            open.push((number, 0));
        }
    }
    while let Some((number, up)) = open.pop() {
        let first = !std::mem::replace(&mut stake[number], true);
        if up < MAKERS && (first || up == 0) {
            let operands = records[number].operands.iter();
            let makers = operands.filter_map(|o| graph.maker(o.value));
            open.extend(makers.filter(|m| *m < number).map(|m| (m, up + 1)));
        }
    }
    (0..records.len()).filter(|n| stake[*n]).collect()
}

/// Forms that are brought more than once, to be held from the first time on. Parameters only where
/// there is a bound on memory, because they are cut so that they need not be held.
fn holds(records: &[Record], options: &PlanOptions) -> Vec<(i64, usize, Change)> {
    let mut brought: HashMap<(u32, &Sharding), Vec<(usize, usize)>> = HashMap::new();
    for (number, record) in records.iter().enumerate() {
        if let Did::Call { .. } = record.did {
            for (i, operand) in record.operands.iter().enumerate() {
                if operand.bytes > 0 && (operand.computed || options.memory.is_some()) {
                    let of = brought
                        .entry((operand.value, record.target(i)))
                        .or_default();
                    of.push((number, i));
                }
            }
        }
    }
    let mut by_class: BTreeMap<(u64, usize), (i64, usize)> = BTreeMap::new();
    for places in brought.values().filter(|places| places.len() > 1) {
        let (number, i) = places[0];
        let later = places[1..].iter();
        let saved: u64 = later.map(|(n, i)| records[*n].operands[*i].bytes).sum();
        let entry = by_class.entry((records[number].class, i));
        let (all, first) = entry.or_insert((0, number));
        *all += saved as i64;
        *first = number.min(*first);
    }
    let change = |((class, i), (saved, number))| (saved, number, Change::Hold(class, 1u32 << i));
    by_class.into_iter().map(change).collect()
}

/// Forms that gradients keep and could have brought again, those first that free most for the bytes
/// that it takes.
pub(super) fn to_save_memory(run: &Run) -> Result<Vec<Change>> {
    let records = &run.records;
    // Of each form of a value, the calls that had it brought or took it in place of their operand.
    let mut users: BTreeMap<(u32, usize), Vec<(usize, usize)>> = BTreeMap::new();
    let mut first: HashMap<(u32, &Sharding), usize> = HashMap::new();
    for (number, record) in records.iter().enumerate() {
        let Did::Call { again, .. } = record.did else {
            continue;
        };
        for (i, operand) in record.operands.iter().enumerate() {
            let form = record.target(i);
            if operand.sharding != *form && again >> i & 1 == 0 {
                let at = *first.entry((operand.value, form)).or_insert(number);
                users
                    .entry((operand.value, at))
                    .or_default()
                    .push((number, i));
            }
        }
    }
    let mut groups: BTreeMap<Vec<(u64, u32)>, (u64, u64)> = BTreeMap::new();
    for places in users.values() {
        let (number, i) = places[0];
        let (record, operand) = (&records[number], &records[number].operands[i]);
        let form = record.target(i);
        let size = operand.dtype.size() as u64;
        let holds = form.largest_part(&record.mesh, &operand.shape) * size;
        let lies = operand.sharding.largest_part(&record.mesh, &operand.shape) * size;
        let plan = known(
            &record.mesh,
            &operand.shape,
            operand.dtype,
            &operand.sharding,
            form,
            Objective::Bytes,
        )?;
        // What is as large as it lies frees nothing.
        if holds <= lies || plan.recv_bytes == 0 {
            continue;
        }
        let mut bits: BTreeMap<u64, u32> = BTreeMap::new();
        for (n, i) in places {
            *bits.entry(records[*n].class).or_default() |= 1 << i;
        }
        let (freed, costs) = groups.entry(bits.into_iter().collect()).or_default();
        *freed += holds;
        *costs += plan.recv_bytes;
    }
    let mut found: Vec<_> = groups.into_iter().collect();
    // More freed for each byte first, then more freed.
    found.sort_by(|(_, (a, costs_a)), (_, (b, costs_b))| {
        let (left, right) = (
            u128::from(*a) * u128::from(*costs_b),
            u128::from(*b) * u128::from(*costs_a),
        );
        right.cmp(&left).then(b.cmp(a))
    });
    Ok(found.into_iter().map(|(of, _)| Change::Again(of)).collect())
}
