//! What the solver decided: for explanations, not for programs.

use super::{Choice, Rule, Solution, solve};
use crate::{Result, Sharding, Tensor, scoped::Scoped};
use std::{
    cell::RefCell,
    sync::{Arc, Mutex, PoisonError},
};

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
    /// The other shardings in which each of them was at hand.
    pub held: Vec<Vec<Sharding>>,
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

    /// What each mesh axis does in a solution, and how the operands lie for it, as text.
    pub fn describe(&self, solution: &Solution) -> (String, String) {
        let (mesh, letters) = (self.inputs[0].mesh(), self.rule.letters());
        let axis = |((name, _), choice): (&(String, usize), &Choice)| match choice {
            Choice::Whole => format!("{name}: whole"),
            Choice::Cut(factor) => format!("{name}: cuts {}", letters[*factor]),
            Choice::Through(_, reduction) => format!("{name}: partial {reduction}"),
        };
        let axes: Vec<String> = mesh
            .axes()
            .iter()
            .zip(&solution.choices)
            .map(axis)
            .collect();
        let inputs: Vec<String> = self
            .inputs
            .iter()
            .zip(&solution.inputs)
            .map(|(x, s)| s.type_string(x.dtype(), x.shape(), mesh))
            .collect();
        (axes.join(", "), inputs.join(", "))
    }

    fn operands(&self) -> Vec<solve::Operand<'_>> {
        self.inputs
            .iter()
            .zip(&self.held)
            .map(|(t, held)| solve::Operand::of(t, held))
            .collect()
    }
}

/// Who is told of decisions.
pub(crate) type Listener = Option<Arc<Mutex<Vec<Decision>>>>;

thread_local! {
    static OPEN: RefCell<Listener> = const { RefCell::new(None) };
}

/// Runs `f` and returns the decisions made in it, in order. Ops inside decomposed ops are decisions
/// of their own. An outer trace does not see them.
///
/// It follows this thread, and others where they run work under a [`Context`](crate::Context) that
/// was captured inside of `f`.
pub fn trace<T>(f: impl FnOnce() -> T) -> (T, Vec<Decision>) {
    let decisions = Arc::<Mutex<Vec<Decision>>>::default();
    let scope = enter(Some(decisions.clone()));
    let result = f();
    drop(scope);
    let made = std::mem::take(&mut *decisions.lock().unwrap_or_else(PoisonError::into_inner));
    (result, made)
}

/// The listener of this thread.
pub(crate) fn capture() -> Listener {
    OPEN.with_borrow(Clone::clone)
}

/// Until it is dropped, another listener.
pub(crate) fn enter(listener: Listener) -> Scoped<Listener> {
    Scoped::set(&OPEN, listener)
}

/// Tells the listener of a decision.
pub(crate) fn note(decision: impl FnOnce() -> Decision) {
    OPEN.with_borrow(|open| {
        if let Some(open) = open {
            let mut decisions = open.lock().unwrap_or_else(PoisonError::into_inner);
            decisions.push(decision());
        }
    });
}
