//! The steps of a plan.

use super::{
    record::{Did, Record, Seen, in_words},
    session::Hold,
};
use crate::{
    Alternative, Result, Sharding, ShardingSpec,
    spmd::{
        Choice,
        call::AtHand,
        solve::{self, Assigned, Operand},
    },
};
use smallvec::SmallVec;
use std::{collections::HashMap, rc::Rc};

/// One step of a plan: a call of an op, or a reshard of the program that sends something.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStep {
    /// The op.
    pub op: String,
    /// The text of its rule, or the name of the function that makes it; of a reshard, its target.
    pub rule: String,
    /// The line that called it.
    pub caller: String,
    /// The mesh, such as `mesh(dp=2, tp=4)`.
    pub mesh: String,
    /// The types of its operands.
    pub operands: Vec<String>,
    /// The types that its operands are brought to.
    pub targets: Vec<String>,
    /// The types of its results; none where it runs as other ops, which are the next steps.
    pub results: Vec<String>,
    /// What each mesh axis does.
    pub choice: String,
    /// What could have been chosen too, with what it would take here; for steps that send something.
    pub alternatives: Vec<Alternative>,
    /// Bytes that the worst rank receives.
    pub bytes: u64,
    /// Seconds under the cost model.
    pub seconds: f64,
    /// Bytes that a rank holds after it of what the step computed.
    pub memory: u64,
    pub(super) key: u64,
    pub(super) take: Take,
}

/// What a step does, for programs.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Take {
    Call {
        choices: SmallVec<[Choice; 3]>,
        cuts: SmallVec<[(u8, u8); 4]>,
        /// The form that each operand is taken from, where it is not its own.
        sources: SmallVec<[Option<Sharding>; 3]>,
        /// The operands, a bit for each, that gradients keep as they lie.
        again: u32,
        holds: SmallVec<[Hold; 1]>,
    },
    Reshard {
        source: Option<Sharding>,
    },
}

impl PlannedStep {
    /// The op and the line that called it.
    pub(super) fn name(&self) -> String {
        format!("{} at {}", self.op, self.caller)
    }

    /// The forms that are held for later steps: the number of the operand, the form and the last
    /// step that needs it.
    pub fn holds(&self) -> impl Iterator<Item = (usize, &Sharding, usize)> {
        let holds = match &self.take {
            Take::Call { holds, .. } => &holds[..],
            Take::Reshard { .. } => &[],
        };
        let parts = |h: &'_ Hold| (usize::from(h.operand), h.until);
        holds.iter().map(move |h| (parts(h).0, &h.form, parts(h).1))
    }

    /// The assignment, with the forms that it takes operands from by their numbers; an error with
    /// one that is not at hand.
    pub(super) fn assigned(&self, held: &AtHand) -> std::result::Result<Rc<Assigned>, String> {
        let Take::Call {
            choices,
            cuts,
            sources,
            ..
        } = &self.take
        else {
            return Err("a reshard".into());
        };
        let number = |(i, source): (usize, &Option<Sharding>)| match source {
            None => Ok(0),
            Some(form) => held
                .get(i)
                .and_then(|held| held.iter().position(|h| h == form))
                .map(|at| at as u8 + 1)
                .ok_or_else(|| self.form_text(i, form)),
        };
        Ok(Rc::new(Assigned {
            choices: choices.clone(),
            cuts: cuts.clone(),
            sources: Some(
                sources
                    .iter()
                    .enumerate()
                    .map(number)
                    .collect::<std::result::Result<_, _>>()?,
            ),
        }))
    }

    fn form_text(&self, operand: usize, form: &Sharding) -> String {
        let of = self.operands.get(operand).map_or("", String::as_str);
        format!("{form:?} (operand {operand}, {of})")
    }
}

/// The most alternatives that a step tells of.
const TOLD: usize = 5;

/// The steps of a run. Each form that a step takes an operand from is held by the last one before
/// it that had it, so that it is there whatever else lets go of it.
pub(super) fn steps(records: &[Record], ranks: u64) -> Result<Vec<PlannedStep>> {
    let mut holds: Vec<SmallVec<[Hold; 1]>> = vec![SmallVec::new(); records.len()];
    // Of each value, where it was seen last.
    let mut seen: HashMap<u32, Vec<(usize, usize)>> = HashMap::new();
    for (number, record) in records.iter().enumerate() {
        for (i, operand) in record.operands.iter().enumerate() {
            let places = seen.entry(operand.value).or_default();
            if let Some(form) = record.source(i)
                && let Some((at, before)) = places
                    .iter()
                    .rev()
                    .find(|(at, before)| records[*at].shows(*before, form))
            {
                holds[*at].push(Hold {
                    operand: *before as u8,
                    form: form.clone(),
                    until: number,
                });
            }
        }
        for (i, operand) in record.operands.iter().enumerate() {
            seen.entry(operand.value).or_default().push((number, i));
        }
    }
    let mut told: HashMap<u64, Vec<Alternative>> = HashMap::new();
    let step = |(record, holds): (&Record, SmallVec<[Hold; 1]>)| {
        let mesh = &record.mesh;
        let operands = record.operands.iter();
        let alternatives = match told.get(&record.class) {
            _ if record.bytes == 0 => vec![],
            Some(known) => known.clone(),
            None => {
                let found = alternatives(record)?;
                told.insert(record.class, found.clone());
                found
            }
        };
        let (rule, choice, take) = match &record.did {
            Did::Call {
                rule,
                solved,
                again,
            } => {
                let solution = &solved.solution;
                let take = Take::Call {
                    choices: solution.choices.clone(),
                    cuts: solution.cuts.clone(),
                    sources: (0..record.operands.len())
                        .map(|i| record.source(i).cloned())
                        .collect(),
                    again: *again,
                    holds,
                };
                let words = in_words(mesh, &solved.rule, &solution.choices);
                (rule.clone(), words, take)
            }
            Did::Reshard { target, source, .. } => {
                let take = Take::Reshard {
                    source: source.clone(),
                };
                (target.clone(), String::new(), take)
            }
        };
        let target = |(i, o): (usize, &super::record::Seen)| match &record.did {
            Did::Call { .. } => o.type_string(record.target(i), mesh),
            Did::Reshard { target, .. } => target.clone(),
        };
        Ok(PlannedStep {
            op: record.op.to_string(),
            rule,
            caller: record.caller.to_string(),
            mesh: mesh.to_string(),
            operands: operands
                .clone()
                .map(|o| o.type_string(&o.sharding, mesh))
                .collect(),
            targets: operands.enumerate().map(target).collect(),
            results: record
                .results
                .iter()
                .map(|(_, ty)| ty.to_string_on(mesh))
                .collect(),
            choice,
            alternatives,
            bytes: record.bytes,
            seconds: record.seconds,
            memory: record.memory / ranks,
            key: record.key,
            take,
        })
    };
    records.iter().zip(holds).map(step).collect()
}

/// What a call could have chosen, best first.
fn alternatives(record: &Record) -> Result<Vec<Alternative>> {
    let Some(rule) = record.rule() else {
        return Ok(vec![]);
    };
    let operands: Vec<Operand<'_>> = record.operands.iter().map(Seen::operand).collect();
    let found = solve::alternatives(&record.mesh, &rule, &operands)?;
    let tell = |s: &crate::spmd::Solution| {
        let inputs: Vec<String> = record
            .operands
            .iter()
            .zip(&s.inputs)
            .map(|(o, to)| o.type_string(to, &record.mesh))
            .collect();
        let words = in_words(&record.mesh, &rule, &s.choices);
        Alternative {
            description: format!("{words} | {}", inputs.join(", ")),
            bytes: s.bytes,
        }
    };
    Ok(found.iter().take(TOLD).map(tell).collect())
}

/// A sharding by the names of axes.
pub(super) fn sharding_text(sharding: &Sharding, mesh: &crate::Mesh, rank: usize) -> String {
    ShardingSpec::of(sharding, mesh, rank).to_string()
}
