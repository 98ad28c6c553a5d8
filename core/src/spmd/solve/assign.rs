//! What each mesh axis could do, and the way through all combinations.
//!
//! Assignments grow with a power of the axes. Up to a budget all of them are tried; beyond it the
//! best of those that were, and of assignments that leave one operand where it is, is improved axis
//! by axis.

use super::{
    Assigned, Choice, Operand, Solution,
    arrive::{Arrivals, is_free, target},
    weigh::Score,
};
use crate::{
    Mesh, Placement, Result, Sharding,
    spmd::rule::{FactorKind, Rule},
};
use smallvec::SmallVec;

/// What finding a solution may cost, counted in ranks that are looked at: some tenths of a second.
const BUDGET: usize = 1 << 20;

/// What an assignment costs to look at, in the same measure.
const ASSIGNMENT_COST: usize = 8;

/// More axes than this are not tried in every order and combination.
const EXHAUSTIVE_AXES: usize = 4;

/// More assignments than this are not all tried, if some of them take axes away from the operands
/// that they are at work on.
const MANY: usize = 1 << 12;

/// Axes begin to work, or go to work elsewhere, only if a byte saved is not paid for with more than
/// this in getting the results back to where they would have been. A reader may want them there, and
/// a few bytes of a small operand are no reason to cut a large result.
const WORTH: u64 = 4;

/// For each axis the number of its candidate.
pub(super) type Assignment = SmallVec<[u8; 4]>;

/// Axes, as numbers in [`Search::axes`], in the order in which they cut.
pub(super) type Order = SmallVec<[u8; 4]>;

/// Which choices are candidates.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Those that move nothing along their axis.
    Free,
    /// Those in which axes stay with operands that they are at work on.
    Near,
    /// All there are.
    All,
}

/// What one axis could do.
pub(super) struct Candidates {
    pub(super) list: SmallVec<[Choice; 6]>,
    /// The first so many leave the axis with operands that it is at work on.
    pub(super) near: usize,
    /// Where nothing is cut.
    whole: u8,
}

/// The best assignment so far.
#[derive(Default)]
struct Best(Option<(Assignment, Score, Solution)>);

impl Best {
    fn offer(&mut self, at: &Assignment, score: Score, solution: Solution) {
        if self.0.as_ref().is_none_or(|(_, s, _)| score < *s) {
            self.0 = Some((at.clone(), score, solution));
        }
    }

    fn score(&self) -> Option<Score> {
        self.0.as_ref().map(|(_, score, _)| *score)
    }

    fn bytes(&self) -> u64 {
        self.score().map_or(u64::MAX, |score| score.bytes)
    }
}

/// Keeps the better one of those in which every axis stays where it is at work.
fn keep_near(near: &mut Option<(Score, Solution)>, score: Score, solution: Solution) {
    if score.fresh == 0 && near.as_ref().is_none_or(|(best, _)| score < *best) {
        *near = Some((score, solution));
    }
}

pub(super) struct Search<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) rule: &'a Rule,
    pub(super) operands: &'a [Operand<'a>],
    /// The mesh axes with more than one candidate or that some operand uses.
    pub(super) axes: SmallVec<[usize; 4]>,
    pub(super) candidates: SmallVec<[Candidates; 4]>,
    pub(super) arrivals: SmallVec<[Arrivals<'a>; 3]>,
    /// Whether some operand has several forms.
    pub(super) several: bool,
    /// What is left of [`BUDGET`].
    pub(super) budget: usize,
    /// How many assignments were looked at.
    position: usize,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        mesh: &'a Mesh,
        rule: &'a Rule,
        operands: &'a [Operand<'a>],
        reach: Reach,
    ) -> Self {
        let mut search = Self {
            mesh,
            rule,
            operands,
            axes: SmallVec::new(),
            candidates: SmallVec::new(),
            arrivals: SmallVec::new(),
            several: operands.iter().any(|o| !o.held.is_empty()),
            budget: BUDGET,
            position: 0,
        };
        let used = |axis: usize| operands.iter().any(|o| o.uses(axis));
        let few = (0..mesh.axes().len()).filter(|a| used(*a)).count() <= EXHAUSTIVE_AXES;
        for axis in 0..mesh.axes().len() {
            if used(axis) || reach == Reach::All && mesh.size(axis) > 1 {
                search.axes.push(axis);
                search.candidates.push(search.of_axis(axis, reach, few));
            }
        }
        search.arrivals = (0..operands.len())
            .map(|i| Arrivals::new(mesh, rule, i, operands[i], search.candidates.iter()))
            .collect();
        search
    }

    /// A search with one candidate for each axis.
    pub(super) fn of(
        mesh: &'a Mesh,
        rule: &'a Rule,
        operands: &'a [Operand<'a>],
        given: &Assigned,
    ) -> Self {
        let works = |axis: &usize| {
            given.choices[*axis] != Choice::Whole || operands.iter().any(|o| o.uses(*axis))
        };
        let axes: SmallVec<[usize; 4]> = (0..mesh.axes().len()).filter(works).collect();
        let only = |axis: &usize| Candidates {
            list: smallvec::smallvec![given.choices[*axis]],
            near: 1,
            whole: 0,
        };
        let candidates: SmallVec<[Candidates; 4]> = axes.iter().map(only).collect();
        let arrivals = (0..operands.len())
            .map(|i| Arrivals::new(mesh, rule, i, operands[i], candidates.iter()));
        Self {
            mesh,
            rule,
            operands,
            arrivals: arrivals.collect(),
            axes,
            candidates,
            several: operands.iter().any(|o| !o.held.is_empty()),
            budget: BUDGET,
            position: 0,
        }
    }

    /// What the only assignment comes to, with axes in the order of `cuts`; `None` where it does
    /// not fit.
    pub(super) fn only(mut self, cuts: &[(u8, u8)]) -> Result<Option<Solution>> {
        let at: Assignment = smallvec::smallvec![0; self.axes.len()];
        let place = |axis: usize| self.axes.iter().position(|a| *a == axis);
        let mut order: Order = SmallVec::new();
        for p in cuts.iter().filter_map(|(_, axis)| place(*axis as usize)) {
            if !order.contains(&(p as u8)) {
                order.push(p as u8);
            }
        }
        let rest = (0..at.len() as u8).filter(|p| !order.contains(p));
        let rest: Order = rest.collect();
        order.extend(rest);
        let weighed = self.weigh(&at, &order, u64::MAX, 0)?;
        Ok(weighed.map(|(_, solution)| solution))
    }

    /// What an axis could do.
    fn of_axis(&self, axis: usize, reach: Reach, few: bool) -> Candidates {
        let (rule, operands) = (self.rule, self.operands);
        let numbers = 0..operands.len();
        let mut list: SmallVec<[Choice; 6]> = SmallVec::new();
        let allowed = |choice: Choice| {
            let stays = |i: usize| {
                let to = target(rule, i, choice);
                let mut forms = operands[i].forms();
                forms.any(|s| is_free(s.placement(axis), to))
            };
            reach != Reach::Free || numbers.clone().all(stays)
        };
        for through in &rule.through {
            for &reduction in through.reductions {
                let given = |i: usize| {
                    let partial = |s: &Sharding| s.placement(axis) == Placement::Partial(reduction);
                    through.operands >> i & 1 == 1 && operands[i].forms().any(partial)
                };
                let choice = Choice::Through(through.operands, reduction);
                if numbers.clone().any(given) && allowed(choice) {
                    list.push(choice);
                }
            }
        }
        // An axis stays with the operands that it cuts now (or is partial for): moving it to
        // others gathers these all the same. That pays only where it divides what others move.
        let mut far: SmallVec<[Choice; 6]> = SmallVec::new();
        for (f, factor) in rule.factors.iter().enumerate() {
            let choice = Choice::Cut(f);
            if factor.kind == FactorKind::Whole {
                continue;
            }
            let carries = |i: usize| rule.inputs[i].iter().any(|d| d.contains(&(f as u8)));
            let asked = |i: usize| {
                let cuts = |s: &Sharding| matches!(s.placement(axis), Placement::Shard(d) if rule.inputs[i][d].contains(&(f as u8)));
                operands[i].forms().any(cuts)
            };
            let can = few && factor.size > 1;
            let near = |i: usize| asked(i) || can && operands[i].uses(axis) && carries(i);
            if numbers.clone().any(near) {
                if allowed(choice) {
                    list.push(choice);
                }
            } else if can && reach == Reach::All {
                far.push(choice);
            }
        }
        let whole = list.len() as u8;
        if allowed(Choice::Whole) {
            list.push(Choice::Whole);
        }
        let near = list.len();
        list.extend(far);
        Candidates { list, near, whole }
    }

    /// The best assignment.
    pub(super) fn best(mut self) -> Result<Option<Solution>> {
        let mut best = Best::default();
        // The best one in which every axis stays where it is at work.
        let mut near: Option<(Score, Solution)> = None;
        if self.candidates.iter().any(|c| c.list.is_empty()) {
            return Ok(None);
        }
        let count = |length: fn(&Candidates) -> usize| {
            let lengths = self.candidates.iter().map(length);
            lengths.fold(1usize, |n, list| n.saturating_mul(list))
        };
        let everything = count(|c| c.list.len()) <= MANY;
        // What leaves one operand where it is, or brings everything together, tends to be good: it
        // bounds what is worth a look.
        let starts = self.starts();
        let mut bound = u64::MAX;
        for start in &starts {
            self.look(start, bound, &mut |_, score, solution| {
                bound = bound.min(score.bytes);
                keep_near(&mut near, score, solution);
                bound
            })?;
        }
        self.position = 0;
        let complete = self.visit(everything, bound, &mut |at, score, solution| {
            best.offer(at, score, solution);
            best.bytes()
        })?;
        if !(complete && everything) {
            self.improve(starts, &mut best)?;
        }
        let Some((_, score, solution)) = best.0 else {
            return Ok(None);
        };
        if score.fresh == 0 {
            return Ok(Some(solution));
        }
        // Other axes save bytes here, but then the results lie by them.
        self.position = 0;
        let bound = near.as_ref().map_or(u64::MAX, |(score, _)| score.bytes);
        self.visit(false, bound, &mut |_, score, solution| {
            keep_near(&mut near, score, solution);
            near.as_ref().map_or(u64::MAX, |(score, _)| score.bytes)
        })?;
        let Some((stays, other)) = near else {
            return Ok(Some(solution));
        };
        let saved = stays.bytes.saturating_sub(score.bytes);
        let way_back = self.results_moved(&solution, &other)?;
        Ok(Some(if way_back <= WORTH * saved {
            solution
        } else {
            other
        }))
    }

    /// All near assignments, within the budget.
    pub(super) fn all(mut self) -> Result<Vec<(Score, Solution)>> {
        let mut all = vec![];
        self.visit(false, u64::MAX, &mut |_, score, solution| {
            all.push((score, solution));
            u64::MAX
        })?;
        Ok(all)
    }

    /// Goes through all combinations of the candidates (or of the near ones), and all orders of
    /// axes that cut the same factor. What costs more than `found` last said is passed over. False
    /// where the budget ended it.
    fn visit(
        &mut self,
        everything: bool,
        mut bound: u64,
        found: &mut dyn FnMut(&Assignment, Score, Solution) -> u64,
    ) -> Result<bool> {
        let lengths: SmallVec<[u8; 4]> = self
            .candidates
            .iter()
            .map(|c| if everything { c.list.len() } else { c.near } as u8)
            .collect();
        let mut at: Assignment = smallvec::smallvec![0; lengths.len()];
        loop {
            bound = self.look(&at, bound, found)?;
            let mut i = 0;
            while i < at.len() {
                at[i] += 1;
                if at[i] < lengths[i] {
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
        at: &Assignment,
        mut bound: u64,
        found: &mut dyn FnMut(&Assignment, Score, Solution) -> u64,
    ) -> Result<u64> {
        for order in self.orders(at) {
            self.budget = self.budget.saturating_sub(ASSIGNMENT_COST);
            if let Some((score, solution)) = self.weigh(at, &order, bound, self.position)? {
                bound = found(at, score, solution);
            }
            self.position += 1;
        }
        Ok(bound)
    }

    /// Assignments that leave one form of an operand where it is, and the one that leaves
    /// everything whole.
    fn starts(&self) -> SmallVec<[Assignment; 4]> {
        let mut starts: SmallVec<[Assignment; 4]> = SmallVec::new();
        for (i, operand) in self.operands.iter().enumerate() {
            for form in operand.forms() {
                let choice = |(axis, c): (&usize, &Candidates)| {
                    let now = form.placement(*axis);
                    let near = &c.list[..c.near];
                    near.iter()
                        .position(|choice| is_free(now, target(self.rule, i, *choice)))
                        .map_or(c.whole, |at| at as u8)
                };
                starts.push(self.axes.iter().zip(&self.candidates).map(choice).collect());
            }
        }
        starts.push(self.candidates.iter().map(|c| c.whole).collect());
        let last = |c: &Candidates| c.list.len() as u8 - 1;
        for start in &mut starts {
            for (at, c) in start.iter_mut().zip(&self.candidates) {
                *at = (*at).min(last(c));
            }
        }
        starts
    }

    /// Improves the best assignment so far, and some others, by changing one axis at a time as long
    /// as that helps.
    fn improve(&mut self, starts: SmallVec<[Assignment; 4]>, best: &mut Best) -> Result<()> {
        let so_far: SmallVec<[Assignment; 1]> = best.0.iter().map(|(at, ..)| at.clone()).collect();
        let share = BUDGET / (so_far.len() + starts.len());
        for start in so_far.into_iter().chain(starts) {
            self.budget = share;
            let mut here = Best::default();
            self.look(&start, u64::MAX, &mut |at, score, solution| {
                here.offer(at, score, solution);
                u64::MAX
            })?;
            let mut at = start;
            let mut stuck = 0;
            for p in (0..at.len()).cycle() {
                let before = here.score().map(Score::unplaced);
                for i in 0..self.candidates[p].list.len() as u8 {
                    let mut next = at.clone();
                    next[p] = i;
                    if next != at {
                        self.look(&next, here.bytes(), &mut |at, score, s| {
                            here.offer(at, score, s);
                            here.bytes()
                        })?;
                    }
                }
                if let Some((better, ..)) = &here.0 {
                    at = better.clone();
                }
                let after = here.score().map(Score::unplaced);
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

    pub(super) fn choice(&self, at: &[u8], p: usize) -> Choice {
        self.candidates[p].list[at[p] as usize]
    }

    /// Orders of the axes that can differ in outcome.
    fn orders(&self, at: &Assignment) -> SmallVec<[Order; 1]> {
        let first: Order = (0..at.len() as u8).collect();
        let cut_together = |i: usize, j: usize| matches!((self.choice(at, i), self.choice(at, j)), (Choice::Cut(a), Choice::Cut(b)) if a == b);
        if !(1..at.len()).any(|i| (0..i).any(|j| cut_together(i, j))) {
            return smallvec::smallvec![first];
        }
        let mut orders: SmallVec<[Order; 1]> = smallvec::smallvec![first.clone()];
        if at.len() > EXHAUSTIVE_AXES {
            // The orders that the operands have.
            for form in self.operands.iter().flat_map(|o| o.forms()) {
                let mut order: Order = form
                    .cuts()
                    .filter_map(|(_, axis)| self.axes.iter().position(|a| *a == axis))
                    .map(|p| p as u8)
                    .collect();
                let rest = first.iter().copied().filter(|p| !order.contains(p));
                let rest: Order = rest.collect();
                order.extend(rest);
                orders.push(order);
            }
            return orders;
        }
        // Swapping neighbours that cut the same factor, again and again, reaches every order that
        // matters.
        let mut next = 0;
        while next < orders.len() {
            for i in 1..at.len() {
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
}
