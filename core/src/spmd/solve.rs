//! The solver: which factor each mesh axis cuts, over all mesh axes at once.
//!
//! For every mesh axis that some operand uses, a choice is one of: nothing (operands are whole along it), a factor (all that carry it are cut), or a partial
//! value that passes through. The best assignment moves the fewest bytes; one that moves nothing always wins, and among those that move something the
//! bytes that partial results still owe count too. Then come fewer reshards, then a fixed order. Axes that no operand uses stay unused.

use super::rule::{Factors, Kind, Rule};
use crate::{
    DType, Mesh, Placement, Reduction, Result, Shape, Sharding,
    reshard::{Objective, plan, received},
};
use smallvec::SmallVec;

/// What a mesh axis does in an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// The sharding that each result has.
    pub outputs: SmallVec<[Sharding; 2]>,
    /// Bytes that the worst rank receives for it.
    pub bytes: u64,
    /// Bytes that reducing the partial results will take.
    pub owed: u64,
    /// Operands that are resharded.
    pub steps: usize,
    /// Whether no size could change the outcome: nothing moves, whatever the sizes.
    pub free: bool,
    /// Whether the op must run as its decomposition.
    pub decompose: bool,
}

/// The best assignment.
pub fn solve(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Solution> {
    let mut best: Option<(Score, Solution)> = None;
    let mut search = Search::new(mesh, rule, operands);
    let free = search.candidates(true);
    search.visit(&free, &mut |score, solution| keep(&mut best, score, solution))?;
    if let Some((_, solution)) = best.take_if(|(_, s)| s.free) {
        return Ok(solution);
    }
    let all = search.candidates(false);
    search.visit(&all, &mut |score, solution| keep(&mut best, score, solution))?;
    // Everything whole is always among the candidates, so there is a best one.
    best.map(|(_, solution)| solution).ok_or_else(|| crate::Error::Sharding { detail: "no assignment fits the rule".into() })
}

/// Every assignment worth considering, best first; for explanations.
pub fn alternatives(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Vec<Solution>> {
    let mut all: Vec<(Score, Solution)> = vec![];
    let mut search = Search::new(mesh, rule, operands);
    let candidates = search.candidates(false);
    search.visit(&candidates, &mut |score, solution| {
        if !all.iter().any(|(_, s)| s.inputs == solution.inputs) {
            all.push((score, solution));
        }
    })?;
    all.sort_by_key(|(score, _)| *score);
    Ok(all.into_iter().map(|(_, s)| s).collect())
}

/// Bytes, reshards, position in the fixed order.
type Score = (u64, usize, usize);

fn keep(best: &mut Option<(Score, Solution)>, score: Score, solution: Solution) {
    if best.as_ref().is_none_or(|(s, _)| score < *s) {
        *best = Some((score, solution));
    }
}

/// More axes than this are not tried in every order and combination.
const EXHAUSTIVE_AXES: usize = 4;

type Candidates = SmallVec<[SmallVec<[Choice; 6]>; 3]>;

struct Search<'a> {
    mesh: &'a Mesh,
    rule: &'a Rule,
    operands: &'a [Operand<'a>],
    /// The axes that some operand uses.
    used: SmallVec<[usize; 4]>,
    /// What it costs to bring an operand to a sharding, so far.
    costs: Vec<(usize, Sharding, u64)>,
}

impl<'a> Search<'a> {
    fn new(mesh: &'a Mesh, rule: &'a Rule, operands: &'a [Operand<'a>]) -> Self {
        let used = (0..mesh.axes().len()).filter(|a| operands.iter().any(|o| o.sharding.placement(*a) != Placement::Replicate)).collect();
        Self { mesh, rule, operands, used, costs: Vec::new() }
    }

    /// What each used axis could do; with `free`, only what moves nothing along that axis.
    fn candidates(&self, free: bool) -> Candidates {
        let few = self.used.len() <= EXHAUSTIVE_AXES;
        self.used
            .iter()
            .map(|&axis| {
                let mut out = SmallVec::new();
                let mut consider = |choice: Choice| {
                    let moves = || (0..self.operands.len()).any(|i| !is_free(self.operands[i].sharding.placement(axis), self.target(i, choice)));
                    if !(free && moves()) {
                        out.push(choice);
                    }
                };
                for through in &self.rule.through {
                    for &reduction in through.reductions {
                        let given = |i: usize| through.operands >> i & 1 == 1 && self.operands[i].sharding.placement(axis) == Placement::Partial(reduction);
                        if (0..self.operands.len()).any(given) {
                            consider(Choice::Through(through.operands, reduction));
                        }
                    }
                }
                for (f, factor) in self.rule.factors.iter().enumerate() {
                    let asked = (0..self.operands.len())
                        .any(|i| matches!(self.operands[i].sharding.placement(axis), Placement::Shard(d) if self.rule.inputs[i][d].contains(&(f as u8))));
                    let carried = self.rule.inputs.iter().any(|dims| dims.iter().any(|d| d.contains(&(f as u8))));
                    if factor.kind != Kind::Whole && carried && (asked || (few && factor.size >= self.mesh.size(axis))) {
                        consider(Choice::Cut(f));
                    }
                }
                consider(Choice::Whole);
                out
            })
            .collect()
    }

    /// What a choice asks of an operand along its axis.
    fn target(&self, operand: usize, choice: Choice) -> Placement {
        match choice {
            Choice::Whole => Placement::Replicate,
            Choice::Through(mask, reduction) if mask >> operand & 1 == 1 => Placement::Partial(reduction),
            Choice::Through(..) => Placement::Replicate,
            Choice::Cut(f) => match self.rule.inputs[operand].iter().position(|d| d.contains(&(f as u8))) {
                Some(dim) => Placement::Shard(dim),
                None if self.rule.factors[f].kind == Kind::Reduce(Reduction::Sum) && self.rule.addends >> operand & 1 == 1 => {
                    Placement::Partial(Reduction::Sum)
                }
                None => Placement::Replicate,
            },
        }
    }

    /// Goes through all combinations of the candidates, and all orders of axes that cut the same factor.
    fn visit(&mut self, candidates: &Candidates, found: &mut dyn FnMut(Score, Solution)) -> Result<()> {
        if candidates.iter().any(|c| c.is_empty()) {
            return Ok(());
        }
        let mut at: SmallVec<[usize; 4]> = smallvec::smallvec![0; candidates.len()];
        let mut position = 0;
        loop {
            let choices: SmallVec<[Choice; 4]> = at.iter().zip(candidates).map(|(i, c)| c[*i]).collect();
            for order in self.orders(&choices) {
                if let Some((score, solution)) = self.evaluate(&choices, &order, position)? {
                    found(score, solution);
                }
                position += 1;
            }
            let mut i = 0;
            while i < at.len() {
                at[i] += 1;
                if at[i] < candidates[i].len() {
                    break;
                }
                at[i] = 0;
                i += 1;
            }
            if i == at.len() {
                return Ok(());
            }
        }
    }

    /// Orders of the used axes (as positions) that can differ in outcome.
    fn orders(&self, choices: &[Choice]) -> SmallVec<[SmallVec<[usize; 4]>; 1]> {
        let first: SmallVec<[usize; 4]> = (0..choices.len()).collect();
        let shares = |i: usize| choices[..i].iter().any(|c| matches!((c, choices[i]), (Choice::Cut(a), Choice::Cut(b)) if *a == b));
        if !(1..choices.len()).any(shares) {
            return smallvec::smallvec![first];
        }
        if choices.len() > EXHAUSTIVE_AXES {
            // The orders that the operands have.
            let mut orders: SmallVec<[SmallVec<[usize; 4]>; 1]> = smallvec::smallvec![first.clone()];
            for operand in self.operands {
                let mut order: SmallVec<[usize; 4]> = operand.sharding.cuts().filter_map(|(_, axis)| self.used.iter().position(|u| *u == axis)).collect();
                order.extend(first.iter().copied().filter(|p| !operand.sharding.cuts().any(|(_, a)| a == self.used[*p])));
                orders.push(order);
            }
            return orders;
        }
        let mut orders: SmallVec<[SmallVec<[usize; 4]>; 1]> = smallvec::smallvec![SmallVec::new()];
        for p in 0..choices.len() {
            orders = (0..=p)
                .flat_map(|at| {
                    orders.iter().map(move |order| {
                        let mut order = order.clone();
                        order.insert(order.len() - at, p);
                        order
                    })
                })
                .collect();
        }
        orders
    }

    fn evaluate(&mut self, choices: &[Choice], order: &[usize], position: usize) -> Result<Option<(Score, Solution)>> {
        let cuts: SmallVec<[(u8, u8); 4]> = order
            .iter()
            .filter_map(|p| match choices[*p] {
                Choice::Cut(f) => Some((f as u8, self.used[*p] as u8)),
                _ => None,
            })
            .collect();
        let mut inputs = SmallVec::<[Sharding; 3]>::new();
        for i in 0..self.operands.len() {
            let Some(mut sharding) = self.cut(&self.rule.inputs[i], &cuts) else { return Ok(None) };
            for (p, choice) in choices.iter().enumerate() {
                if let Placement::Partial(reduction) = self.target(i, *choice) {
                    sharding = sharding.partial_over(self.used[p], reduction);
                }
            }
            inputs.push(sharding);
        }
        // Partial values of one reduction never become partial values of another.
        let turns = |i: usize| self.operands[i].sharding.partial().any(|(a, r)| matches!(inputs[i].placement(a), Placement::Partial(to) if to != r));
        if inputs.iter().any(mixes) || (0..inputs.len()).any(turns) {
            return Ok(None);
        }
        let (mut bytes, mut steps, mut free) = (0u64, 0, true);
        for i in 0..inputs.len() {
            if inputs[i] != *self.operands[i].sharding {
                bytes += self.cost(i, &inputs[i])?;
                steps += 1;
                free &= is_slice(self.operands[i].sharding, &inputs[i]);
            }
        }
        let mut outputs = SmallVec::<[Sharding; 2]>::new();
        let mut owed = 0;
        for dims in &self.rule.outputs {
            let Some(mut sharding) = self.cut(dims, &cuts) else { return Ok(None) };
            let mut ranks = 1;
            for (p, choice) in choices.iter().enumerate() {
                let reduction = match *choice {
                    Choice::Through(_, reduction) => reduction,
                    Choice::Cut(f) => match self.rule.factors[f].kind {
                        // Results that have the factor are cut instead.
                        Kind::Reduce(reduction) if !dims.iter().any(|d| d.contains(&(f as u8))) => reduction,
                        _ => continue,
                    },
                    Choice::Whole => continue,
                };
                sharding = sharding.partial_over(self.used[p], reduction);
                ranks *= self.mesh.size(self.used[p]) as u64;
            }
            if mixes(&sharding) {
                return Ok(None);
            }
            let elements: u64 = dims.iter().flatten().map(|f| self.rule.factors[*f as usize].size as u64).product();
            let parts: u64 = sharding.cuts().map(|(_, a)| self.mesh.size(a) as u64).product();
            owed += (ranks - 1) * elements * self.operands.first().map_or(4, |o| o.dtype.size()) as u64 / ranks / parts;
            outputs.push(sharding);
        }
        let mut decompose = false;
        for (p, choice) in choices.iter().enumerate() {
            if let Choice::Cut(f) = choice
                && let Kind::Stats(count) = self.rule.factors[*f].kind
            {
                decompose = true;
                bytes += self.statistics(count, &cuts, self.mesh.size(self.used[p]) as u64);
            }
        }
        free &= !decompose;
        let mut all: SmallVec<[Choice; 3]> = smallvec::smallvec![Choice::Whole; self.mesh.axes().len()];
        for (p, choice) in choices.iter().enumerate() {
            all[self.used[p]] = *choice;
        }
        let score = (if bytes == 0 { 0 } else { bytes + owed }, steps, position);
        Ok(Some((score, Solution { choices: all, cuts, inputs, outputs, bytes, owed, steps, free, decompose })))
    }

    /// Bytes to combine statistics of the first operand over `ranks` ranks.
    fn statistics(&self, count: u32, cuts: &[(u8, u8)], ranks: u64) -> u64 {
        let keeps = |f: u8| !matches!(self.rule.factors[f as usize].kind, Kind::Stats(_)) && self.rule.inputs[0].iter().flatten().any(|g| *g == f);
        let kept: u64 = (0..self.rule.factors.len()).filter(|f| keeps(*f as u8)).map(|f| self.rule.factors[f].size as u64).product();
        let parts: u64 = cuts.iter().filter(|(f, _)| keeps(*f)).map(|(_, axis)| self.mesh.size(*axis as usize) as u64).product();
        2 * u64::from(count) * (ranks - 1) * kept.div_ceil(parts) * self.operands[0].dtype.size().max(4) as u64 / ranks
    }

    /// The sharding of dimensions with these factors; `None` where parts of factors would not be parts of the dimension.
    fn cut(&self, dims: &[Factors], cuts: &[(u8, u8)]) -> Option<Sharding> {
        let mut sharding = Sharding::replicated();
        for (d, factors) in dims.iter().enumerate() {
            // Whether all factors so far are cut down to single elements, so that the next one may be cut too.
            let mut single_elements = true;
            for (n, f) in factors.iter().enumerate() {
                let size = self.rule.factors[*f as usize].size;
                let mut parts = 1;
                for (_, axis) in cuts.iter().filter(|(g, _)| g == f) {
                    sharding = sharding.cut(d, *axis as usize);
                    parts *= self.mesh.size(*axis as usize);
                }
                // Uneven parts of the last factor are parts of the dimension, because the split refines; those of an earlier one are not.
                let last = factors[n + 1..].iter().all(|f| self.rule.factors[*f as usize].size == 1);
                if parts > 1 && !(single_elements && (last || size % parts == 0)) {
                    return None;
                }
                single_elements &= parts == size;
            }
        }
        Some(sharding)
    }

    fn cost(&mut self, operand: usize, to: &Sharding) -> Result<u64> {
        if let Some((_, _, bytes)) = self.costs.iter().find(|(i, s, _)| *i == operand && s == to) {
            return Ok(*bytes);
        }
        let Operand { shape, dtype, sharding, .. } = self.operands[operand];
        let resolves = sharding.partial().any(|(axis, r)| to.placement(axis) != Placement::Partial(r));
        let bytes = match resolves {
            true => plan(self.mesh, shape, dtype, sharding, to, Objective::Bytes)?.recv_bytes,
            false => received(self.mesh, shape, sharding, to) * dtype.size() as u64,
        };
        self.costs.push((operand, to.clone(), bytes));
        Ok(bytes)
    }
}

/// Whether values would be partial with different reductions, whose order would matter.
fn mixes(sharding: &Sharding) -> bool {
    let mut reductions = sharding.partial().map(|(_, r)| r);
    let first = reductions.next();
    reductions.any(|r| Some(r) != first)
}

/// Whether one axis gets from a placement to another without sending anything.
fn is_free(from: Placement, to: Placement) -> bool {
    from == to || from == Placement::Replicate
}

/// Whether ranks only drop a part of what they have or fill in an identity, whatever the sizes.
fn is_slice(from: &Sharding, to: &Sharding) -> bool {
    let keeps_cuts = from.cuts().all(|(d, _)| {
        let mut to = to.axes_of(d);
        from.axes_of(d).all(|a| to.next() == Some(a))
    });
    let keeps_partial = from.partial().all(|(a, r)| to.placement(a) == Placement::Partial(r));
    let new_partial_is_new = to.partial().all(|(a, _)| from.placement(a) == to.placement(a) || from.placement(a) == Placement::Replicate);
    keeps_cuts && keeps_partial && new_partial_is_new
}
