//! What the solver decided: for explanations, not for programs.

use super::{Rule, Solution, solve};
use crate::{Result, Tensor};
use std::cell::RefCell;

/// What a rule was made from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A text.
    Text(String),
    /// The function of this name.
    Built(&'static str),
}

/// One op that ran on a mesh.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The op.
    pub op: &'static str,
    /// The entry of the table whose rule ran: the op itself, or a step that it has in common with
    /// others.
    pub step: &'static str,
    /// What the rule was made from.
    pub source: Source,
    /// Its operands, as they were.
    pub inputs: Vec<Tensor>,
    /// Its rule.
    pub rule: Rule,
    /// What was chosen.
    pub solution: Solution,
}

impl Decision {
    /// Everything that could have been chosen, best first.
    pub fn alternatives(&self) -> Result<Vec<Solution>> {
        solve::alternatives(self.inputs[0].mesh(), &self.rule, &self.operands())
    }

    /// The decision made anew.
    pub fn solve(&self) -> Result<Solution> {
        solve::solve(self.inputs[0].mesh(), &self.rule, &self.operands())
    }

    fn operands(&self) -> Vec<solve::Operand<'_>> {
        self.inputs
            .iter()
            .map(|t| solve::Operand {
                shape: t.shape(),
                dtype: t.dtype(),
                sharding: t.sharding(),
            })
            .collect()
    }
}

thread_local! {
    static OPEN: RefCell<Option<Vec<Decision>>> = const { RefCell::new(None) };
}

/// Runs `f` and returns the decisions made on this thread, in order. Ops inside decomposed ops are
/// decisions of their own.
pub fn trace<T>(f: impl FnOnce() -> T) -> (T, Vec<Decision>) {
    let outer = OPEN.replace(Some(Vec::new()));
    let result = f();
    let decisions = OPEN.replace(outer).unwrap_or_default();
    (result, decisions)
}

/// Writes a decision down, inside of a [`trace`].
pub(crate) fn note(decision: impl FnOnce() -> Decision) {
    OPEN.with_borrow_mut(|open| {
        if let Some(open) = open {
            open.push(decision());
        }
    });
}
