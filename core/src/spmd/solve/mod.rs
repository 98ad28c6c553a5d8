//! The solver: which factor each mesh axis cuts, over all mesh axes at once.
//!
//! For every mesh axis a choice is one of: nothing (operands are whole along it), a factor (all that
//! carry it are cut), or a partial value that passes through. The best assignment moves the fewest
//! bytes; one that moves nothing always wins, and among those that move something the bytes that
//! partial results still owe count too. Then an axis stays with the operands that it is at work on,
//! and one that no operand uses stays unused: both change only where that saves bytes. Then come
//! fewer reshards, then a fixed order.
//!
//! [`assign`] knows the choices and goes through them, [`arrive`] where a choice wants an operand
//! and what bringing it there takes, [`weigh`] what an assignment comes to.

mod arrive;
mod assign;
#[cfg(test)]
mod tests;
mod weigh;

use super::rule::{FactorKind, Rule};
use crate::{
    DType, Error, MAX_RANK, Mesh, Placement, Reduction, Result, Shape, Sharding, Tensor,
    fingerprint::Digest, sharding::too_many_dimensions,
};
use assign::{Reach, Search};
use smallvec::SmallVec;
use std::collections::HashSet;

/// What a mesh axis does in an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Operands are whole along it.
    Whole,
    /// It cuts this factor.
    Cut(usize),
    /// Partial values of this reduction pass through these operands.
    Through(u32, Reduction),
}

/// An operand as the solver sees it.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// The global shape.
    pub shape: &'a Shape,
    /// The elements.
    pub dtype: DType,
    /// How it lies on the mesh.
    pub sharding: &'a Sharding,
    /// Other shardings in which the same value lies on the mesh too.
    pub held: &'a [Sharding],
}

impl<'a> Operand<'a> {
    /// A tensor, and the other shardings in which it is at hand.
    pub(crate) fn of(x: &'a Tensor, held: &'a [Sharding]) -> Self {
        Self {
            shape: x.shape(),
            dtype: x.dtype(),
            sharding: x.sharding(),
            held,
        }
    }

    /// Every sharding in which it can be had: its own, then those that are held besides.
    fn forms(&self) -> impl Iterator<Item = &'a Sharding> + Clone + use<'a> {
        std::iter::once(self.sharding).chain(self.held)
    }

    /// Whether an axis does something in one of its forms.
    fn uses(&self, axis: usize) -> bool {
        self.forms()
            .any(|s| s.placement(axis) != Placement::Replicate)
    }
}

/// What to do with an op's operands, and where its results lie.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// What each mesh axis does.
    pub choices: SmallVec<[Choice; 3]>,
    /// The mesh axes that cut factors, in the order in which they cut: (factor, axis).
    pub cuts: SmallVec<[(u8, u8); 4]>,
    /// The sharding that each operand must have.
    pub inputs: SmallVec<[Sharding; 3]>,
    /// From which of its forms each operand is brought there: 0 is its own sharding, `i + 1` is
    /// number `i` of those that are [held](Operand::held) besides.
    pub sources: SmallVec<[u8; 3]>,
    /// The sharding that each result has.
    pub outputs: SmallVec<[Sharding; 2]>,
    /// Bytes that the worst rank receives for it.
    pub bytes: u64,
    /// How many of them are statistics or borders that cross inside the op.
    pub statistics: u64,
    /// Bytes that reducing the partial results will take.
    pub owed: u64,
    /// Operands that are resharded.
    pub steps: usize,
    /// Whether no size could change the outcome: nothing moves, whatever the sizes.
    pub free: bool,
    /// Whether the op must run as its decomposition.
    pub decompose: bool,
}

impl Solution {
    /// The sharding from which operand `i` is brought, which lies as `own` and is at hand as `held`.
    pub(crate) fn source<'s>(
        &self,
        i: usize,
        own: &'s Sharding,
        held: &'s [Sharding],
    ) -> &'s Sharding {
        match usize::from(self.sources[i]) {
            0 => own,
            form => &held[form - 1],
        }
    }

    /// A number for what it says of the mesh axes and the operands, the same everywhere.
    pub(crate) fn digest(&self) -> Digest {
        let choice = |choice: &Choice| match *choice {
            Choice::Whole => 0,
            Choice::Cut(factor) => 1 | (factor as u64) << 2,
            Choice::Through(operands, reduction) => {
                2 | (reduction as u64) << 2 | u64::from(operands) << 8
            }
        };
        let cut = |(factor, axis): &(u8, u8)| u64::from(*factor) << 8 | u64::from(*axis);
        let digest = Digest::default()
            .words(self.choices.iter().map(choice))
            .words(self.cuts.iter().map(cut));
        self.inputs.iter().fold(digest, Digest::sharding)
    }
}

/// An assignment that was decided before.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Assigned {
    /// What each mesh axis does.
    pub(crate) choices: SmallVec<[Choice; 3]>,
    /// The mesh axes that cut factors, in the order in which they cut: (factor, axis).
    pub(crate) cuts: SmallVec<[(u8, u8); 4]>,
    /// From which of its forms each operand is brought; from the cheapest where that is not said.
    pub(crate) sources: Option<SmallVec<[u8; 3]>>,
}

/// What an assignment comes to; `None` where it does not fit the rule or the operands.
pub(crate) fn assigned(
    mesh: &Mesh,
    rule: &Rule,
    operands: &[Operand<'_>],
    given: &Assigned,
) -> Result<Option<Solution>> {
    check(rule)?;
    let fits = |choice: &Choice| match choice {
        Choice::Whole => true,
        Choice::Cut(f) => rule
            .factors
            .get(*f)
            .is_some_and(|f| f.kind != FactorKind::Whole),
        Choice::Through(operands, reduction) => {
            let mut through = rule.through.iter();
            through.any(|t| t.operands == *operands && t.reductions.contains(reduction))
        }
    };
    if given.choices.len() != mesh.axes().len() || !given.choices.iter().all(fits) {
        return Ok(None);
    }
    let Some(mut solution) = Search::of(mesh, rule, operands, given).only(&given.cuts)? else {
        return Ok(None);
    };
    let Some(sources) = &given.sources else {
        return Ok(Some(solution));
    };
    let (mut steps, mut free) = (0, true);
    for (i, operand) in operands.iter().enumerate() {
        let from = sources
            .get(i)
            .and_then(|s| operand.forms().nth((*s).into()));
        let (Some(from), Some(to)) = (from, solution.inputs.get(i)) else {
            return Ok(None);
        };
        steps += usize::from(from != to);
        free &= arrive::is_slice(from, to);
    }
    // What sends depends on the sources; the bytes are counted where the plans are made.
    solution.sources = sources.clone();
    solution.steps = steps;
    solution.free = free && !solution.decompose;
    Ok(Some(solution))
}

/// The best assignment.
pub fn solve(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Solution> {
    check(rule)?;
    let free = Search::new(mesh, rule, operands, Reach::Free).best()?;
    if let Some(solution) = free.filter(|solution| solution.free) {
        return Ok(solution);
    }
    let best = Search::new(mesh, rule, operands, Reach::All).best()?;
    // Everything whole is always among the candidates.
    best.ok_or_else(|| Error::Rule {
        op: "rule",
        rule: rule.to_string(),
        detail: "no assignment fits it".into(),
    })
}

/// Assignments worth considering, best first; for explanations. Where there are too many, some of
/// them, with the best that is known.
pub fn alternatives(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Vec<Solution>> {
    let best = solve(mesh, rule, operands)?;
    let mut all = Search::new(mesh, rule, operands, Reach::Near).all()?;
    all.sort_by_key(|(score, _)| *score);
    let mut seen = HashSet::new();
    Ok(std::iter::once(best)
        .chain(all.into_iter().map(|(_, solution)| solution))
        .filter(|s| seen.insert((s.inputs.clone(), s.outputs.clone())))
        .collect())
}

/// The most factors of a rule: the numbers above stand for partial values.
const MAX_FACTORS: usize = 128;

/// Refuses rules with more dimensions and factors than a solution can name.
fn check(rule: &Rule) -> Result<()> {
    let rank = rule.inputs.iter().chain(&rule.outputs).map(|d| d.len());
    match rank.max() {
        Some(rank) if rank > MAX_RANK => Err(too_many_dimensions(rank)),
        _ if rule.factors.len() > MAX_FACTORS => Err(Error::Rule {
            op: "rule",
            rule: rule.to_string(),
            detail: format!(
                "it has {} factors, at most {MAX_FACTORS} are possible",
                rule.factors.len()
            ),
        }),
        _ => Ok(()),
    }
}
