//! The solver: which factor each mesh axis cuts, over all mesh axes at once.
//!
//! For every mesh axis that some operand uses, a choice is one of: nothing (operands are whole
//! along it), a factor (all that carry it are cut), or a partial value that passes through. The
//! best assignment moves the fewest bytes; one that moves nothing always wins, and among those that
//! move something the bytes that partial results still owe count too. Then come fewer reshards,
//! then a fixed order. Axes that no operand uses stay unused.
//!
//! Assignments grow with a power of the axes. Up to a budget all of them are tried; beyond it the
//! best of those that were, and of assignments that leave one operand where it is, is improved axis
//! by axis.

use super::rule::{FactorKind, Factors, Rule};
use crate::{
    DType, Error, MAX_RANK, Mesh, Placement, Reduction, Result, Shape, Sharding,
    reshard::{Held, Objective, known},
    sharding::too_many_dimensions,
};
use smallvec::SmallVec;
use std::collections::HashSet;

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

/// The best assignment.
pub fn solve(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Solution> {
    check(rule)?;
    let mut search = Search::new(mesh, rule, operands);
    for only_free in [true, false] {
        let mut best = Best::default();
        let candidates = search.candidates(only_free);
        if !search.visit(&candidates, &mut |at, score, solution| {
            best.offer(at, score, solution)
        })? {
            search.improve(&candidates, &mut best)?;
        }
        if let Some((_, _, solution)) = best.0.filter(|(_, _, s)| s.free || !only_free) {
            return Ok(solution);
        }
    }
    // Everything whole is always among the candidates.
    Err(Error::Rule {
        op: "rule",
        rule: rule.to_string(),
        detail: "no assignment fits it".into(),
    })
}

/// Assignments worth considering, best first; for explanations. Where there are too many, some of
/// them, with the best that is known.
pub fn alternatives(mesh: &Mesh, rule: &Rule, operands: &[Operand<'_>]) -> Result<Vec<Solution>> {
    check(rule)?;
    let mut all: Vec<(Score, Solution)> = vec![];
    let mut seen = HashSet::new();
    let mut search = Search::new(mesh, rule, operands);
    let candidates = search.candidates(false);
    let complete = search.visit(&candidates, &mut |_, score, solution| {
        if seen.insert((solution.inputs.clone(), solution.outputs.clone())) {
            all.push((score, solution));
        }
        u64::MAX
    })?;
    all.sort_by_key(|(score, _)| *score);
    let mut all: Vec<Solution> = all.into_iter().map(|(_, s)| s).collect();
    if !complete {
        let best = solve(mesh, rule, operands)?;
        all.retain(|s| (&s.inputs, &s.outputs) != (&best.inputs, &best.outputs));
        all.insert(0, best);
    }
    Ok(all)
}

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

/// The most factors of a rule: in [`Search::bring`] the numbers above stand for partial values.
const MAX_FACTORS: usize = 128;

/// What finding a solution may cost, counted in ranks that are looked at: some tenths of a second.
const BUDGET: usize = 1 << 20;

/// What an assignment costs to look at, and what a plan does, in the same measure.
const ASSIGNMENT_COST: usize = 8;
const PLAN_COST: usize = 2_000;

/// Bytes, reshards, position in the fixed order.
type Score = (u64, usize, usize);

/// More axes than this are not tried in every order and combination.
const EXHAUSTIVE_AXES: usize = 4;

type Candidates = SmallVec<[SmallVec<[Choice; 6]>; 3]>;

/// For each used axis the number of its candidate.
type Assignment = SmallVec<[usize; 4]>;

/// The best assignment so far.
#[derive(Default)]
struct Best(Option<(Assignment, Score, Solution)>);

impl Best {
    /// Keeps the better one, and says how many bytes it moves.
    fn offer(&mut self, at: &Assignment, score: Score, solution: Solution) -> u64 {
        if self.0.as_ref().is_none_or(|(_, s, _)| score < *s) {
            self.0 = Some((at.clone(), score, solution));
        }
        self.bytes()
    }

    fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(u64::MAX, |(_, s, _)| s.0)
    }
}

/// An operand brought to a sharding.
struct Arrival {
    /// `None` where parts of factors would not be parts of a dimension.
    sharding: Option<Sharding>,
    least: u64,
    bytes: Option<u64>,
}

struct Search<'a> {
    mesh: &'a Mesh,
    rule: &'a Rule,
    operands: &'a [Operand<'a>],
    /// The axes that some operand uses.
    used: SmallVec<[usize; 4]>,
    /// What each operand holds.
    held: SmallVec<[Held<'a>; 3]>,
    /// What was asked of each operand so far, as [`Asked`], and what came of it.
    asked: SmallVec<[Vec<Asked>; 3]>,
    brought: SmallVec<[Vec<Arrival>; 3]>,
    /// What is left of [`BUDGET`].
    budget: usize,
    /// Ranks that differ along the used axes.
    ranks: usize,
    /// How many assignments were looked at.
    position: usize,
}

/// The used axes that cut an operand or are partial, each in two bytes: which axis, and what it
/// does. With more than 8 of them nothing is remembered.
type Asked = Option<u128>;

impl<'a> Search<'a> {
    fn new(mesh: &'a Mesh, rule: &'a Rule, operands: &'a [Operand<'a>]) -> Self {
        let used: SmallVec<[usize; 4]> = (0..mesh.axes().len())
            .filter(|a| {
                operands
                    .iter()
                    .any(|o| o.sharding.placement(*a) != Placement::Replicate)
            })
            .collect();
        let ranks = used.iter().map(|a| mesh.size(*a)).product();
        let held = operands
            .iter()
            .map(|o| Held::new(mesh, o.shape, o.sharding))
            .collect();
        let (asked, brought) = operands
            .iter()
            .map(|_| (Vec::with_capacity(64), Vec::with_capacity(64)))
            .unzip();
        Self {
            mesh,
            rule,
            operands,
            used,
            held,
            asked,
            brought,
            budget: BUDGET,
            ranks,
            position: 0,
        }
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
                // An axis stays with the operands that it cuts now (or is partial for): moving it
                // to others would gather these all the same.
                for (f, factor) in self.rule.factors.iter().enumerate() {
                    let carries = |i: usize| self.rule.inputs[i].iter().any(|d| d.contains(&(f as u8)));
                    let asked =
                        |i: usize| matches!(self.operands[i].sharding.placement(axis), Placement::Shard(d) if self.rule.inputs[i][d].contains(&(f as u8)));
                    let uses = |i: usize| self.operands[i].sharding.placement(axis) != Placement::Replicate;
                    let fits = few && factor.size >= self.mesh.size(axis);
                    if factor.kind != FactorKind::Whole && (0..self.operands.len()).any(|i| asked(i) || (fits && uses(i) && carries(i))) {
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
            Choice::Through(mask, reduction) if mask >> operand & 1 == 1 => {
                Placement::Partial(reduction)
            }
            Choice::Through(..) => Placement::Replicate,
            Choice::Cut(f) => match self.rule.inputs[operand]
                .iter()
                .position(|d| d.contains(&(f as u8)))
            {
                Some(dim) => Placement::Shard(dim),
                None if self.rule.factors[f].kind == FactorKind::Reduce(Reduction::Sum)
                    && self.rule.addends >> operand & 1 == 1 =>
                {
                    Placement::Partial(Reduction::Sum)
                }
                None => Placement::Replicate,
            },
        }
    }

    /// Goes through all combinations of the candidates, and all orders of axes that cut the same
    /// factor. What costs more than `found` last said is passed over. False where the budget ended
    /// it.
    fn visit(
        &mut self,
        candidates: &Candidates,
        found: &mut dyn FnMut(&Assignment, Score, Solution) -> u64,
    ) -> Result<bool> {
        if candidates.iter().any(|c| c.is_empty()) {
            return Ok(true);
        }
        (self.budget, self.position) = (BUDGET, 0);
        let mut bound = u64::MAX;
        let mut at: Assignment = smallvec::smallvec![0; candidates.len()];
        loop {
            bound = self.look(candidates, &at, bound, found)?;
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
                return Ok(true);
            }
            if self.budget == 0 {
                return Ok(false);
            }
        }
    }

    /// Looks at one combination in all orders.
    fn look(
        &mut self,
        candidates: &Candidates,
        at: &Assignment,
        mut bound: u64,
        found: &mut dyn FnMut(&Assignment, Score, Solution) -> u64,
    ) -> Result<u64> {
        let choices: SmallVec<[Choice; 4]> =
            at.iter().zip(candidates).map(|(i, c)| c[*i]).collect();
        for order in self.orders(&choices) {
            self.budget = self.budget.saturating_sub(ASSIGNMENT_COST);
            if self.within(&choices, &order, bound)
                && let Some((score, solution)) = self.evaluate(&choices, &order, self.position)?
            {
                bound = found(at, score, solution);
            }
            self.position += 1;
        }
        Ok(bound)
    }

    /// Improves the best assignment so far, and those that leave one operand where it is or bring
    /// everything together, by changing one axis at a time as long as that helps.
    fn improve(&mut self, candidates: &Candidates, best: &mut Best) -> Result<()> {
        let keep = |operand: usize| -> Assignment {
            let choice = |(p, list): (usize, &SmallVec<[Choice; 6]>)| {
                let now = self.operands[operand].sharding.placement(self.used[p]);
                list.iter()
                    .position(|c| is_free(now, self.target(operand, *c)))
                    .unwrap_or(list.len() - 1)
            };
            candidates.iter().enumerate().map(choice).collect()
        };
        let whole: Assignment = candidates.iter().map(|list| list.len() - 1).collect();
        let mut starts: Vec<Assignment> = best.0.iter().map(|(at, ..)| at.clone()).collect();
        starts.extend((0..self.operands.len()).map(keep).chain([whole]));
        let share = BUDGET / starts.len();
        for start in starts {
            self.budget = share;
            let mut here = Best::default();
            self.look(candidates, &start, u64::MAX, &mut |at, score, solution| {
                here.offer(at, score, solution)
            })?;
            let mut at = start;
            let mut stuck = 0;
            for p in (0..at.len()).cycle() {
                let before = here.0.as_ref().map(|(_, s, _)| (s.0, s.1));
                for i in 0..candidates[p].len() {
                    let mut next = at.clone();
                    next[p] = i;
                    if next != at {
                        self.look(candidates, &next, here.bytes(), &mut |at, score, s| {
                            here.offer(at, score, s)
                        })?;
                    }
                }
                if let Some((better, ..)) = &here.0 {
                    at = better.clone();
                }
                let after = here.0.as_ref().map(|(_, s, _)| (s.0, s.1));
                stuck = if after == before { stuck + 1 } else { 0 };
                if stuck >= at.len() || self.budget == 0 {
                    break;
                }
            }
            if let Some((at, score, solution)) = here.0 {
                best.offer(&at, score, solution);
            }
        }
        Ok(())
    }

    /// Orders of the used axes (as positions) that can differ in outcome.
    fn orders(&self, choices: &[Choice]) -> SmallVec<[SmallVec<[u8; 4]>; 1]> {
        let first: SmallVec<[u8; 4]> = (0..choices.len() as u8).collect();
        let cut_together = |i: usize, j: usize| matches!((choices[i], choices[j]), (Choice::Cut(a), Choice::Cut(b)) if a == b);
        if !(1..choices.len()).any(|i| (0..i).any(|j| cut_together(i, j))) {
            return smallvec::smallvec![first];
        }
        let mut orders: SmallVec<[SmallVec<[u8; 4]>; 1]> = smallvec::smallvec![first.clone()];
        if choices.len() > EXHAUSTIVE_AXES {
            // The orders that the operands have.
            for operand in self.operands {
                let mut order: SmallVec<[u8; 4]> = operand
                    .sharding
                    .cuts()
                    .filter_map(|(_, axis)| self.used.iter().position(|u| *u == axis))
                    .map(|p| p as u8)
                    .collect();
                order.extend(first.iter().copied().filter(|p| {
                    !operand
                        .sharding
                        .cuts()
                        .any(|(_, a)| a == self.used[*p as usize])
                }));
                orders.push(order);
            }
            return orders;
        }
        // Swapping neighbours that cut the same factor, again and again, reaches every order that
        // matters.
        let mut next = 0;
        while next < orders.len() {
            for i in 1..choices.len() {
                for j in 0..i {
                    if cut_together(orders[next][i] as usize, orders[next][j] as usize) {
                        let mut order = orders[next].clone();
                        order.swap(i, j);
                        if !orders.contains(&order) {
                            orders.push(order);
                        }
                    }
                }
            }
            next += 1;
        }
        orders
    }

    /// Whether an assignment fits every operand and might cost no more than `bound`.
    fn within(&mut self, choices: &[Choice], order: &[u8], bound: u64) -> bool {
        let mut least = 0;
        (0..self.operands.len()).all(|operand| {
            let found = self.bring(operand, choices, order);
            let brought = &self.brought[operand][found];
            least += brought.bytes.unwrap_or(brought.least);
            brought.sharding.is_some() && least <= bound
        })
    }

    /// Where an assignment wants an operand, by number in `brought` of that operand.
    fn bring(&mut self, operand: usize, choices: &[Choice], order: &[u8]) -> usize {
        let mut key = SmallVec::<[(u8, u8); 4]>::new();
        for &p in order {
            let code = match (
                self.target(operand, choices[p as usize]),
                choices[p as usize],
            ) {
                (Placement::Replicate, _) => continue,
                (Placement::Partial(reduction), _) => 128 + reduction as u8,
                (Placement::Shard(_), Choice::Cut(f)) => f as u8,
                (Placement::Shard(_), _) => continue,
            };
            key.push((p, code));
        }
        // Only the order among axes that cut the same factor matters.
        key.sort_by_key(|(_, code)| *code);
        let asked: Asked = (key.len() <= 8).then(|| {
            key.iter().fold(1, |all, (p, code)| {
                all << 16 | u128::from(*p) << 8 | u128::from(*code)
            })
        });
        if asked.is_some()
            && let Some(found) = self.asked[operand].iter().position(|a| *a == asked)
        {
            return found;
        }
        let cuts: SmallVec<[(u8, u8); 4]> = key
            .iter()
            .filter(|(_, code)| *code < 128)
            .map(|(p, f)| (*f, self.used[*p as usize] as u8))
            .collect();
        let sharding = self.cut(&self.rule.inputs[operand], &cuts).map(|cut| {
            let partial = key.iter().filter(|(_, code)| *code >= 128);
            partial.fold(cut, |s, (p, code)| {
                s.partial_over(self.used[*p as usize], Reduction::ALL[*code as usize - 128])
            })
        });
        let sharding = sharding.filter(|s| !mixes(s));
        let Operand {
            shape,
            dtype,
            sharding: from,
            ..
        } = self.operands[operand];
        self.budget = self.budget.saturating_sub(self.ranks);
        let (mut least, mut bytes) = (0, Some(0));
        if let Some(to) = sharding.as_ref().filter(|to| *to != from) {
            let size = dtype.size() as u64;
            let resolves = from
                .partial()
                .any(|(axis, r)| to.placement(axis) != Placement::Partial(r));
            // Where no other cut moves, the bound for the largest parts is what the planner
            // reaches; the plan that runs says it exactly.
            let settles = keeps_cuts(from, to);
            least = if resolves {
                least_to_reduce(self.mesh, shape, from, to, settles)
            } else {
                self.held[operand].lacks(to)
            } * size;
            bytes = (!resolves || settles).then_some(least);
        }
        self.asked[operand].push(asked);
        self.brought[operand].push(Arrival {
            sharding,
            least,
            bytes,
        });
        self.brought[operand].len() - 1
    }

    fn evaluate(
        &mut self,
        choices: &[Choice],
        order: &[u8],
        position: usize,
    ) -> Result<Option<(Score, Solution)>> {
        let cuts: SmallVec<[(u8, u8); 4]> = order
            .iter()
            .filter_map(|p| match choices[*p as usize] {
                Choice::Cut(f) => Some((f as u8, self.used[*p as usize] as u8)),
                _ => None,
            })
            .collect();
        let (mut bytes, mut steps, mut free) = (0u64, 0, true);
        let mut inputs = SmallVec::<[Sharding; 3]>::new();
        for i in 0..self.operands.len() {
            let found = self.bring(i, choices, order);
            let brought = &mut self.brought[i][found];
            let Some(to) = brought.sharding.clone() else {
                return Ok(None);
            };
            let Operand {
                shape,
                dtype,
                sharding: from,
                ..
            } = self.operands[i];
            if to != *from {
                steps += 1;
                free &= is_slice(from, &to);
                let needed = match brought.bytes {
                    Some(bytes) => bytes,
                    None => {
                        self.budget = self.budget.saturating_sub(PLAN_COST);
                        known(self.mesh, shape, dtype, from, &to, Objective::Bytes)?.recv_bytes
                    }
                };
                brought.bytes = Some(needed);
                bytes += needed;
            }
            inputs.push(to);
        }
        let mut outputs = SmallVec::<[Sharding; 2]>::new();
        let mut owed = 0;
        for dims in &self.rule.outputs {
            let Some(mut sharding) = self.cut(dims, &cuts) else {
                return Ok(None);
            };
            let mut ranks = 1;
            for (p, choice) in choices.iter().enumerate() {
                let reduction = match *choice {
                    Choice::Through(_, reduction) => reduction,
                    Choice::Cut(f) => match self.rule.factors[f].kind {
                        // Results that have the factor are cut instead.
                        FactorKind::Reduce(reduction)
                            if !dims.iter().any(|d| d.contains(&(f as u8))) =>
                        {
                            reduction
                        }
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
            let elements: u64 = dims
                .iter()
                .flatten()
                .map(|f| self.rule.result_size(*f) as u64)
                .product();
            let parts: u64 = sharding
                .cuts()
                .map(|(_, a)| self.mesh.size(a) as u64)
                .product();
            owed +=
                (ranks - 1) * elements * self.operands.first().map_or(4, |o| o.dtype.size()) as u64
                    / ranks
                    / parts;
            outputs.push(sharding);
        }
        let (mut decompose, mut statistics) = (false, 0);
        for (p, choice) in choices.iter().enumerate() {
            let Choice::Cut(f) = choice else { continue };
            match self.rule.factors[*f].kind {
                FactorKind::Stats(count) => {
                    let ranks = self.mesh.size(self.used[p]) as u64;
                    statistics += self.statistics(count, &cuts, ranks);
                    decompose = true;
                }
                FactorKind::Borders => decompose = true,
                FactorKind::Pass | FactorKind::Reduce(_) | FactorKind::Whole => {}
            }
        }
        if decompose && !self.rule.recipes.is_empty() {
            let Operand { shape, dtype, .. } = self.operands[0];
            statistics += self.rule.border_bytes(self.mesh, shape, dtype, &inputs[0]);
        }
        free &= !decompose;
        bytes += statistics;
        let mut all: SmallVec<[Choice; 3]> =
            smallvec::smallvec![Choice::Whole; self.mesh.axes().len()];
        for (p, choice) in choices.iter().enumerate() {
            all[self.used[p]] = *choice;
        }
        let score = (if bytes == 0 { 0 } else { bytes + owed }, steps, position);
        Ok(Some((
            score,
            Solution {
                choices: all,
                cuts,
                inputs,
                outputs,
                bytes,
                statistics,
                owed,
                steps,
                free,
                decompose,
            },
        )))
    }

    /// Bytes to combine statistics of the first operand over `ranks` ranks.
    fn statistics(&self, count: u32, cuts: &[(u8, u8)], ranks: u64) -> u64 {
        let keeps = |f: u8| {
            !matches!(self.rule.factors[f as usize].kind, FactorKind::Stats(_))
                && self.rule.inputs[0].iter().flatten().any(|g| *g == f)
        };
        let kept: u64 = (0..self.rule.factors.len())
            .filter(|f| keeps(*f as u8))
            .map(|f| self.rule.factors[f].size as u64)
            .product();
        let parts: u64 = cuts
            .iter()
            .filter(|(f, _)| keeps(*f))
            .map(|(_, axis)| self.mesh.size(*axis as usize) as u64)
            .product();
        2 * u64::from(count)
            * (ranks - 1)
            * kept.div_ceil(parts)
            * self.operands[0].dtype.size().max(4) as u64
            / ranks
    }

    /// The sharding of dimensions with these factors; `None` where parts of factors would not be
    /// parts of the dimension.
    fn cut(&self, dims: &[Factors], cuts: &[(u8, u8)]) -> Option<Sharding> {
        let mut sharding = Sharding::replicated();
        for (d, factors) in dims.iter().enumerate() {
            // Whether all factors so far are cut down to single elements, so that the next one may
            // be cut too.
            let mut single_elements = true;
            for (n, f) in factors.iter().enumerate() {
                let size = self.rule.factors[*f as usize].size;
                let mut parts = 1;
                for (_, axis) in cuts.iter().filter(|(g, _)| g == f) {
                    sharding = sharding.cut(d, *axis as usize);
                    parts *= self.mesh.size(*axis as usize);
                }
                // Uneven parts of the last factor are parts of the dimension, because the split
                // refines; those of an earlier one are not.
                let last = factors[n + 1..]
                    .iter()
                    .all(|f| self.rule.factors[*f as usize].size == 1);
                if parts > 1 && !(single_elements && (last || size.is_multiple_of(parts))) {
                    return None;
                }
                single_elements &= parts == size;
            }
        }
        Some(sharding)
    }
}

/// Elements that some rank must receive to reduce partial values. Of `k` ranks whose results cover
/// `all` elements together, one combines at least `all / k` of them with `k - 1` others', and what
/// it has not combined itself it must be given. Counted for the smallest or the largest parts.
fn least_to_reduce(
    mesh: &Mesh,
    shape: &Shape,
    from: &Sharding,
    to: &Sharding,
    largest: bool,
) -> u64 {
    let size = |n: usize, parts: usize| {
        if largest {
            n.div_ceil(parts)
        } else {
            n / parts
        }
    };
    let part: u64 = (0..shape.rank())
        .map(|d| size(shape[d], to.axes_of(d).map(|a| mesh.size(a)).product()) as u64)
        .product();
    let resolved = || {
        from.partial()
            .filter(|(axis, r)| to.placement(*axis) != Placement::Partial(*r))
            .map(|(axis, _)| axis)
    };
    let k: u64 = resolved().map(|axis| mesh.size(axis) as u64).product();
    let all = part
        * resolved()
            .filter(|axis| to.cuts().any(|(_, a)| a == *axis))
            .map(|axis| mesh.size(axis) as u64)
            .product::<u64>();
    (k - 1) * all / k + part.saturating_sub(all.div_ceil(k))
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
    let keeps_partial = from
        .partial()
        .all(|(a, r)| to.placement(a) == Placement::Partial(r));
    let new_partial_is_new = to.partial().all(|(a, _)| {
        from.placement(a) == to.placement(a) || from.placement(a) == Placement::Replicate
    });
    keeps_cuts(from, to) && keeps_partial && new_partial_is_new
}

/// Whether `to` cuts every dimension as `from` does, and perhaps further.
fn keeps_cuts(from: &Sharding, to: &Sharding) -> bool {
    from.cuts().all(|(d, _)| {
        let mut to = to.axes_of(d);
        from.axes_of(d).all(|a| to.next() == Some(a))
    })
}
