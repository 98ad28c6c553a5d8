//! What was measured, as text and as JSON.

use super::{
    meter::{Amount, Item},
    price::Class,
    simulated,
};
use crate::Result;
use anymesh_simulate::{Estimate, bytes_text, seconds_text};
use serde_json::{Value, json};
use std::fmt;

/// Rows of the table by op that text shows.
const ROWS: usize = 16;

/// A step that was run and counted.
#[derive(Clone, Debug)]
pub struct Measured {
    /// What it costs.
    pub estimate: Estimate,
    /// What was changed of the run, and what stands for what.
    pub notes: Vec<String>,
    /// Who did what, for stages that are alike once.
    pub parts: Vec<Part>,
}

/// What an op did in a part of a step on a rank: with one micro-batch, or once in the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The stages that do so.
    pub stages: Vec<usize>,
    /// `forward`, `backward` (of inputs, where the schedule has halves), `weights`; once in a step
    /// `borrow`, `reduce`, `update`, `return`.
    pub part: &'static str,
    /// Who did what.
    pub item: Item,
    /// How much.
    pub amount: Amount,
}

impl Measured {
    pub(crate) fn new(estimate: Estimate, notes: Vec<String>, classes: &[Class]) -> Measured {
        let each = classes.iter().flat_map(|class| {
            class.ran.items.iter().map(|((part, item), amount)| Part {
                stages: class.stages.clone(),
                part,
                item: item.clone(),
                amount: *amount,
            })
        });
        Measured {
            estimate,
            notes,
            parts: each.collect(),
        }
    }

    /// The estimate's JSON, with `notes` and, by stage and part of the step, `work`.
    pub fn to_json(&self) -> Result<Value> {
        let mut json = self.estimate.to_json().map_err(simulated)?;
        let work = self.parts.iter().map(|p| {
            json!({"stages": p.stages, "part": p.part, "op": p.item.op, "kind": p.item.kind,
                "axes": p.item.axes, "count": p.amount.count, "operations": p.amount.operations,
                "bytes": p.amount.bytes, "seconds": p.amount.seconds})
        });
        json["work"] = work.collect();
        json["notes"] = json!(self.notes);
        Ok(json)
    }

    /// Who takes most of a step, the longest first: seconds of the rank that has most of them.
    pub fn longest(&self) -> Vec<(&Item, Amount)> {
        let micros = self.estimate.micros as f64;
        let mut found: Vec<(&Item, Amount)> = vec![];
        let busiest = (self.estimate.memory.iter()).max_by(|a, b| {
            let busy = |r: usize| self.estimate.timing.busy[r];
            busy(a.rank).total_cmp(&busy(b.rank))
        });
        let own = busiest.map(|m| m.stages.clone()).unwrap_or_default();
        for part in &self.parts {
            let mine = part.stages.iter().filter(|s| own.contains(s)).count() as f64;
            let once = ["borrow", "reduce", "update", "return"].contains(&part.part);
            let times = mine * if once { 1.0 } else { micros };
            match found.iter_mut().find(|(item, _)| **item == part.item) {
                Some((_, all)) => *all = all.plus(part.amount, times),
                None => found.push((&part.item, Amount::default().plus(part.amount, times))),
            }
        }
        found.retain(|(_, a)| a.count > 0.0);
        found.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
        found
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.estimate)?;
        writeln!(f, "\nwhat the busiest rank does, before anything is hidden")?;
        writeln!(
            f,
            "  {:<22} {:<14} {:<8} {:>9} {:>10} {:>10} {:>10}",
            "op", "", "axes", "times", "TFLOP", "bytes", "seconds"
        )?;
        let all = self.longest();
        for (item, amount) in all.iter().take(ROWS) {
            writeln!(
                f,
                "  {:<22} {:<14} {:<8} {:>9.0} {:>10.1} {:>10} {:>10}",
                item.op,
                item.kind,
                item.axes,
                amount.count,
                amount.operations / 1e12,
                bytes_text(amount.bytes),
                seconds_text(amount.seconds)
            )?;
        }
        if all.len() > ROWS {
            let rest = all[ROWS..].iter();
            let rest: f64 = rest.map(|(_, a)| a.seconds).sum();
            let (more, rest) = (all.len() - ROWS, seconds_text(rest));
            writeln!(f, "  and {more} more, which take {rest}")?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}
