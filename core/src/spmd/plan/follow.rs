//! What another choice would come to, estimated on the calls that were written down: the calls that
//! read what it changes decide anew, and so on.

use super::record::{Did, Record, Seen};
use crate::{
    Result, Sharding,
    reshard::{Objective, known},
    spmd::solve::{self, Assigned, Operand, Solution},
};
use smallvec::SmallVec;
use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap},
    rc::Rc,
};

/// How many calls decide anew for one estimate.
const FOLLOWED: usize = 32;

/// What was solved for estimates, by class and how the operands lie: most of it is the same after
/// another change.
#[derive(Default)]
pub(super) struct Memo {
    decided: RefCell<HashMap<(u64, Vec<Forms>), Option<Decided>>>,
    choices: RefCell<HashMap<(u64, Vec<Forms>), Rc<Vec<Solution>>>>,
}

/// The calls of a run, and who reads what.
pub(super) struct Graph<'r> {
    records: &'r [Record],
    makers: HashMap<u32, usize>,
    readers: HashMap<u32, Vec<usize>>,
    memo: &'r Memo,
}

/// What matters of a solution.
#[derive(Clone)]
struct Decided {
    bytes: u64,
    inputs: SmallVec<[Sharding; 3]>,
    outputs: SmallVec<[Sharding; 2]>,
}

/// The shardings in which an operand is at hand, its own first.
type Forms = SmallVec<[Sharding; 3]>;

/// In which sharding forms of a value would be instead.
type Renamed = SmallVec<[(Sharding, Sharding); 2]>;

impl<'r> Graph<'r> {
    pub(super) fn new(records: &'r [Record], memo: &'r Memo) -> Self {
        let (mut makers, mut readers) = (HashMap::new(), HashMap::<u32, Vec<usize>>::new());
        for (number, record) in records.iter().enumerate() {
            for operand in &record.operands {
                let of = readers.entry(operand.value).or_default();
                if of.last() != Some(&number) {
                    of.push(number);
                }
            }
            for (value, _) in &record.results {
                makers.entry(*value).or_insert(number);
            }
        }
        Self {
            records,
            makers,
            readers,
            memo,
        }
    }

    /// The call that made a value.
    pub(super) fn maker(&self, value: u32) -> Option<usize> {
        self.makers.get(&value).copied()
    }

    /// The other choices of a call that seem to save bytes, with how many.
    pub(super) fn savings(&self, number: usize) -> Result<Vec<(i64, Assigned)>> {
        let Did::Call { solved, .. } = &self.records[number].did else {
            return Ok(vec![]);
        };
        let now = &solved.solution;
        let mut found = vec![];
        for other in self.choices(number)?.iter() {
            if (&other.inputs, &other.outputs) == (&now.inputs, &now.outputs) {
                continue;
            }
            let saved = self.follow(number, other)?;
            if saved > 0 {
                let assigned = Assigned {
                    choices: other.choices.clone(),
                    cuts: other.cuts.clone(),
                    sources: None,
                };
                found.push((saved, assigned));
            }
        }
        Ok(found)
    }

    /// What a call could choose.
    fn choices(&self, number: usize) -> Result<Rc<Vec<Solution>>> {
        let record = &self.records[number];
        let forms = |o: &Seen| {
            std::iter::once(&o.sharding)
                .chain(&o.held)
                .cloned()
                .collect()
        };
        let key = (record.class, record.operands.iter().map(forms).collect());
        if let Some(known) = self.memo.choices.borrow().get(&key) {
            return Ok(known.clone());
        }
        let Some(rule) = record.rule() else {
            return Ok(Rc::default());
        };
        let operands: SmallVec<[Operand<'_>; 3]> =
            record.operands.iter().map(Seen::operand).collect();
        let found = Rc::new(solve::alternatives(&record.mesh, &rule, &operands)?);
        self.memo.choices.borrow_mut().insert(key, found.clone());
        Ok(found)
    }

    /// The bytes that another solution of a call would save, there and in calls after it.
    fn follow(&self, number: usize, other: &Solution) -> Result<i64> {
        let mut renamed: HashMap<u32, Renamed> = HashMap::new();
        let mut open: BTreeSet<usize> = BTreeSet::new();
        let first = Decided {
            bytes: other.bytes,
            inputs: other.inputs.clone(),
            outputs: other.outputs.clone(),
        };
        let mut saved = self.apply(number, &first, &mut renamed, &mut open);
        for _ in 0..FOLLOWED {
            let Some(next) = open.pop_first() else {
                break;
            };
            let record = &self.records[next];
            if let Did::Reshard {
                source, to, across, ..
            } = &record.did
            {
                if *across {
                    continue;
                }
                saved += self.resharded(record, source.as_ref(), to, &renamed)?;
                continue;
            }
            let Some(decided) = self.again(next, &renamed)? else {
                continue;
            };
            saved += self.apply(next, &decided, &mut renamed, &mut open);
        }
        Ok(saved)
    }

    /// Takes another solution of a call: what it saves, and what of it others read.
    fn apply(
        &self,
        number: usize,
        other: &Decided,
        renamed: &mut HashMap<u32, Renamed>,
        open: &mut BTreeSet<usize>,
    ) -> i64 {
        let record = &self.records[number];
        let Did::Call { solved, .. } = &record.did else {
            return 0;
        };
        let mut rename = |value: u32, from: &Sharding, to: &Sharding| {
            if from != to {
                renamed
                    .entry(value)
                    .or_default()
                    .push((from.clone(), to.clone()));
                let readers = self.readers.get(&value).into_iter().flatten();
                open.extend(readers.filter(|reader| **reader > number));
            }
        };
        for (i, operand) in record.operands.iter().enumerate() {
            if operand.bytes > 0 {
                rename(operand.value, record.target(i), &other.inputs[i]);
            }
        }
        for ((value, ty), to) in record.results.iter().zip(&other.outputs) {
            rename(*value, &ty.sharding, to);
        }
        solved.solution.bytes as i64 - other.bytes as i64
    }

    /// What a call would decide, given how its operands would lie; `None` where that is as before.
    fn again(&self, number: usize, renamed: &HashMap<u32, Renamed>) -> Result<Option<Decided>> {
        let record = &self.records[number];
        let mut forms: Vec<Forms> = vec![];
        let mut changed = false;
        for operand in &record.operands {
            let names = renamed.get(&operand.value);
            let new = |form: &Sharding| {
                let name = names.and_then(|names| names.iter().find(|(from, _)| from == form));
                name.map_or_else(|| form.clone(), |(_, to)| to.clone())
            };
            let own = new(&operand.sharding);
            let mut list: Forms = smallvec::smallvec![own];
            for form in operand.held.iter().map(new) {
                if !list.contains(&form) {
                    list.push(form);
                }
            }
            changed |= list[0] != operand.sharding || list[1..] != operand.held[..];
            forms.push(list);
        }
        if !changed {
            return Ok(None);
        }
        let key = (record.class, forms.clone());
        if let Some(known) = self.memo.decided.borrow().get(&key) {
            return Ok(known.clone());
        }
        let Some(rule) = record.rule() else {
            return Ok(None);
        };
        let operands: SmallVec<[Operand<'_>; 3]> = (record.operands.iter().zip(&forms))
            .map(|(o, forms)| Operand {
                shape: &o.shape,
                dtype: o.dtype,
                sharding: &forms[0],
                held: &forms[1..],
            })
            .collect();
        let solution = solve::solve(&record.mesh, &rule, &operands)?;
        let decided = Some(Decided {
            bytes: solution.bytes,
            inputs: solution.inputs,
            outputs: solution.outputs,
        });
        self.memo.decided.borrow_mut().insert(key, decided.clone());
        Ok(decided)
    }

    /// What a reshard of the program would save.
    fn resharded(
        &self,
        record: &Record,
        source: Option<&Sharding>,
        to: &Sharding,
        renamed: &HashMap<u32, Renamed>,
    ) -> Result<i64> {
        let operand = &record.operands[0];
        let from = source.unwrap_or(&operand.sharding);
        let names = renamed.get(&operand.value);
        let name = names.and_then(|names| names.iter().find(|(old, _)| old == from));
        let Some((_, new)) = name else {
            return Ok(0);
        };
        let plan = known(
            &record.mesh,
            &operand.shape,
            operand.dtype,
            new,
            to,
            Objective::Bytes,
        )?;
        Ok(record.bytes as i64 - plan.recv_bytes as i64)
    }
}
