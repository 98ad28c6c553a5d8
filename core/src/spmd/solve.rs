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

use super::{
    fingerprint::Digest,
    rule::{FactorKind, Factors, Rule},
};
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
    /// Other shardings in which the same value lies on the mesh too.
    pub held: &'a [Sharding],
}

impl<'a> Operand<'a> {
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

/// Bytes, what values that are at hand in several forms add (axes over which results are partial
/// where nothing moves, operands that are not taken as given), reshards, position in the fixed
/// order.
type Score = (u64, usize, usize, usize);

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
    /// From each form of the operand, those first that cost least.
    ways: SmallVec<[Way; 1]>,
}

/// How an operand gets from one of its forms to a sharding.
#[derive(Clone, Copy)]
struct Way {
    /// The number of the form.
    source: u8,
    /// Bytes: what it takes, or at least takes.
    bytes: u64,
    /// Whether it takes just that.
    exact: bool,
    kind: WayKind,
}

/// What an operand needs besides bytes, the least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WayKind {
    Nothing,
    /// Ranks drop parts of what they have, whatever the sizes.
    Slice,
    Step,
}

impl Way {
    fn key(&self) -> (u64, WayKind, u8) {
        (self.bytes, self.kind, self.source)
    }
}

struct Search<'a> {
    mesh: &'a Mesh,
    rule: &'a Rule,
    operands: &'a [Operand<'a>],
    /// The axes that some operand uses.
    used: SmallVec<[usize; 4]>,
    /// What each operand holds, for each of its forms.
    held: SmallVec<[SmallVec<[Held<'a>; 1]>; 3]>,
    /// Whether some operand has several forms.
    several: bool,
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
            .filter(|a| operands.iter().any(|o| o.uses(*a)))
            .collect();
        let ranks = used.iter().map(|a| mesh.size(*a)).product();
        let held = operands
            .iter()
            .map(|o| o.forms().map(|s| Held::new(mesh, o.shape, s)).collect())
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
            several: operands.iter().any(|o| !o.held.is_empty()),
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
                    let moves = || (0..self.operands.len()).any(|i| {
                        let to = self.target(i, choice);
                        !self.operands[i].forms().any(|s| is_free(s.placement(axis), to))
                    });
                    if !(free && moves()) {
                        out.push(choice);
                    }
                };
                for through in &self.rule.through {
                    for &reduction in through.reductions {
                        let given = |i: usize| through.operands >> i & 1 == 1 && self.operands[i].forms().any(|s| s.placement(axis) == Placement::Partial(reduction));
                        if (0..self.operands.len()).any(given) {
                            consider(Choice::Through(through.operands, reduction));
                        }
                    }
                }
                // An axis stays with the operands that it cuts now (or is partial for): moving it
                // to others would gather these all the same.
                for (f, factor) in self.rule.factors.iter().enumerate() {
                    let carries = |i: usize| self.rule.inputs[i].iter().any(|d| d.contains(&(f as u8)));
                    let asked = |i: usize| {
                        let cuts = |s: &Sharding| matches!(s.placement(axis), Placement::Shard(d) if self.rule.inputs[i][d].contains(&(f as u8)));
                        self.operands[i].forms().any(cuts)
                    };
                    let uses = |i: usize| self.operands[i].uses(axis);
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
        let keep = |(operand, form): (usize, &Sharding)| -> Assignment {
            let choice = |(p, list): (usize, &SmallVec<[Choice; 6]>)| {
                let now = form.placement(self.used[p]);
                list.iter()
                    .position(|c| is_free(now, self.target(operand, *c)))
                    .unwrap_or(list.len() - 1)
            };
            candidates.iter().enumerate().map(choice).collect()
        };
        let whole: Assignment = candidates.iter().map(|list| list.len() - 1).collect();
        let mut starts: Vec<Assignment> = best.0.iter().map(|(at, ..)| at.clone()).collect();
        let forms =
            (self.operands.iter().enumerate()).flat_map(|(i, o)| o.forms().map(move |s| (i, s)));
        starts.extend(forms.map(keep).chain([whole]));
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
                let before = here.0.as_ref().map(|(_, s, _)| (s.0, s.1, s.2));
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
                let after = here.0.as_ref().map(|(_, s, _)| (s.0, s.1, s.2));
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
            for form in self.operands.iter().flat_map(|o| o.forms()) {
                let mut order: SmallVec<[u8; 4]> = form
                    .cuts()
                    .filter_map(|(_, axis)| self.used.iter().position(|u| *u == axis))
                    .map(|p| p as u8)
                    .collect();
                order.extend(
                    first
                        .iter()
                        .copied()
                        .filter(|p| !form.cuts().any(|(_, a)| a == self.used[*p as usize])),
                );
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
            least += brought.ways.first().map_or(0, |way| way.bytes);
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
        let mut ways: SmallVec<[Way; 1]> = SmallVec::new();
        if let Some(to) = &sharding {
            for (source, from) in self.operands[operand].forms().enumerate() {
                self.budget = self.budget.saturating_sub(self.ranks);
                ways.push(self.way(operand, source, from, to));
            }
            ways.sort_by_key(Way::key);
        }
        self.asked[operand].push(asked);
        self.brought[operand].push(Arrival { sharding, ways });
        self.brought[operand].len() - 1
    }

    /// What it takes to get an operand from one of its forms to a sharding.
    fn way(&self, operand: usize, source: usize, from: &Sharding, to: &Sharding) -> Way {
        let Operand { shape, dtype, .. } = self.operands[operand];
        let (mut bytes, mut exact, mut kind) = (0, true, WayKind::Nothing);
        if to != from {
            kind = if is_slice(from, to) {
                WayKind::Slice
            } else {
                WayKind::Step
            };
            let resolves = from
                .partial()
                .any(|(axis, r)| to.placement(axis) != Placement::Partial(r));
            // Where no other cut moves, the bound for the largest parts is what the planner
            // reaches; the plan that runs says it exactly.
            let settles = keeps_cuts(from, to);
            let elements = if resolves {
                least_to_reduce(self.mesh, shape, from, to, settles)
            } else {
                self.held[operand][source].lacks(to)
            };
            bytes = elements * dtype.size() as u64;
            exact = !resolves || settles;
        }
        Way {
            source: source as u8,
            bytes,
            exact,
            kind,
        }
    }

    /// The cheapest way to where an assignment wants an operand, priced exactly.
    fn cheapest(&mut self, operand: usize, found: usize) -> Result<Option<Way>> {
        let Operand { shape, dtype, .. } = self.operands[operand];
        let Arrival { sharding, ways } = &mut self.brought[operand][found];
        let Some(to) = sharding else {
            return Ok(None);
        };
        // The first one's bound is the least of all, so once that one is exact it is the best.
        while let Some(first) = ways.first_mut().filter(|way| !way.exact) {
            self.budget = self.budget.saturating_sub(PLAN_COST);
            let from = self.operands[operand].forms().nth(first.source.into());
            let from = from.unwrap_or(self.operands[operand].sharding);
            first.bytes = known(self.mesh, shape, dtype, from, to, Objective::Bytes)?.recv_bytes;
            first.exact = true;
            ways.sort_by_key(Way::key);
        }
        Ok(ways.first().copied())
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
        let (mut bytes, mut steps, mut others, mut free) = (0u64, 0, 0, true);
        let mut inputs = SmallVec::<[Sharding; 3]>::new();
        let mut sources = SmallVec::<[u8; 3]>::new();
        for i in 0..self.operands.len() {
            let found = self.bring(i, choices, order);
            let (Some(way), Some(to)) = (
                self.cheapest(i, found)?,
                self.brought[i][found].sharding.clone(),
            ) else {
                return Ok(None);
            };
            steps += usize::from(way.kind != WayKind::Nothing);
            others += usize::from(way.source != 0);
            free &= way.kind != WayKind::Step;
            bytes += way.bytes;
            inputs.push(to);
            sources.push(way.source);
        }
        let mut outputs = SmallVec::<[Sharding; 2]>::new();
        let (mut owed, mut debts) = (0, 0);
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
            debts += sharding.partial().len();
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
        // What moves nothing is best, even if its results are partial: a sum of partial values is
        // reduced once, later. But where a settled form is at hand there is no need to owe that.
        // Counted in axes, so that the choice holds for all sizes. Then an operand as it was given
        // comes before its other forms: a program that resharded it meant it.
        let score = match (bytes, self.several) {
            (0, false) => (0, 0, steps, position),
            (0, true) => (0, debts << 8 | others, steps, position),
            _ => (bytes + owed, others, steps, position),
        };
        Ok(Some((
            score,
            Solution {
                choices: all,
                cuts,
                inputs,
                sources,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorType, meta, spmd::rule::Given};

    /// The solution of a rule for operands whose first form is their own and whose others are held.
    fn solved(mesh: &str, text: &str, operands: &[&[&str]]) -> (Solution, Vec<Vec<Sharding>>) {
        let mesh = Mesh::new(mesh, &meta()).expect("a mesh");
        let types: Vec<Vec<TensorType>> = operands
            .iter()
            .map(|forms| {
                let parse = |t: &&str| TensorType::parse(t, &mesh).expect("a type");
                forms.iter().map(parse).collect()
            })
            .collect();
        let forms: Vec<Vec<Sharding>> = types
            .iter()
            .map(|forms| forms.iter().map(|t| t.sharding.clone()).collect())
            .collect();
        let operands: Vec<Operand<'_>> = types
            .iter()
            .zip(&forms)
            .map(|(t, forms)| Operand {
                shape: &t[0].shape,
                dtype: t[0].dtype,
                sharding: &forms[0],
                held: &forms[1..],
            })
            .collect();
        let given: Vec<Given<'_>> = types.iter().map(|t| Given::Shape(&t[0].shape)).collect();
        let rule = Rule::new(text, &given, &[]).expect("a rule");
        let solution = solve(&mesh, &rule, &operands).expect("a solution");
        (solution, forms)
    }

    const MATMUL: &str = "mk, kn -> mn ; reduce k sum ; linear 0 ; linear 1";
    const ADD: &str = "mk, mk -> mk ; linear 0 1";

    #[test]
    fn a_gathered_form_that_is_held_is_used_and_costs_nothing() {
        let w = "f32[8,16@a]";
        let (alone, _) = solved("a=4", MATMUL, &[&["f32[64@a,8]"], &[w]]);
        assert!(alone.bytes > 0);
        let (s, _) = solved("a=4", MATMUL, &[&["f32[64@a,8]", "f32[64,8]"], &[w]]);
        assert_eq!((s.bytes, &s.sources[..], s.free), (0, &[1, 0][..], true));
        assert_eq!(s.inputs[0], Sharding::replicated());
        assert_eq!(s.outputs[0], Sharding::replicated().cut(1, 0));
    }

    #[test]
    fn a_settled_form_is_used_instead_of_owing_its_reduction_again() {
        let (partial, whole) = ("f32[8,4]{sum:a}", "f32[8,4]");
        let (s, _) = solved("a=4", ADD, &[&[partial], &[whole]]);
        assert_eq!(
            s.outputs[0].partial().len(),
            1,
            "it stays partial, for nothing"
        );
        for held in [whole, "f32[8@a,4]", "f32[8,4@a]"] {
            let (s, forms) = solved("a=4", ADD, &[&[partial, held], &[whole]]);
            assert_eq!((s.bytes, s.owed, s.free), (0, 0, true), "{held}");
            assert_eq!(&s.sources[..], [1, 0]);
            assert_eq!(s.inputs[0], forms[0][1]);
        }
    }

    #[test]
    fn an_operand_comes_from_the_form_that_takes_the_fewest_bytes() {
        // The transposed cut lacks three quarters, the one by the major axis a half.
        let forms = ["f32[8,8@b]", "f32[8@a,8]", "f32[8@b,8]"];
        let (s, _) = solved("a=2,b=4", "1k -> k", &[&forms]);
        assert_eq!((s.bytes, s.sources[0]), (0, 0), "its own will do");
        let (s, _) = solved("a=2,b=4", "11 -> ", &[&forms]);
        assert_eq!((s.bytes, s.sources[0], s.free), (128, 1, false));
        // Where two take the same, the first is taken.
        let (s, _) = solved("a=4,b=4", "11 -> ", &[&["f32[8@a,8]", "f32[8@b,8]"]]);
        assert_eq!((s.bytes, s.sources[0]), (192, 0));
    }
}
