//! What an assignment comes to: where operands go, where results lie, what it takes.

use super::{
    Choice, Operand, Solution,
    arrive::{WayKind, cut, mixes},
    assign::{Order, Search},
};
use crate::{
    Result, Shape, Sharding,
    reshard::Held,
    spmd::rule::{FactorKind, Factors},
};
use smallvec::SmallVec;

/// How good an assignment is: less is better, the first field first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Score {
    /// Bytes, with those that results owe; none where nothing moves.
    pub(super) bytes: u64,
    /// Axes that are taken from the operands that they are at work on, or begin to work.
    pub(super) fresh: usize,
    /// Axes over which results are partial, where nothing moves and values are held in several
    /// forms.
    debts: usize,
    /// Operands that are not taken as given, of those that are at hand in several forms: a program
    /// that resharded one meant it.
    others: usize,
    /// Operands that are resharded.
    steps: usize,
    /// The place in the fixed order.
    position: usize,
}

impl Score {
    /// The same, whenever it was looked at.
    pub(super) fn unplaced(self) -> Self {
        Self {
            position: 0,
            ..self
        }
    }
}

/// What an exact price costs, in the measure of the budget.
const PRICE_COST: usize = 2_000;

impl Search<'_> {
    /// An assignment with axes in an order, unless it costs more than `bound` or is impossible.
    pub(super) fn weigh(
        &mut self,
        at: &[u8],
        order: &Order,
        bound: u64,
        position: usize,
    ) -> Result<Option<(Score, Solution)>> {
        let mut found = SmallVec::<[usize; 3]>::new();
        let mut least = 0;
        for arrivals in &mut self.arrivals {
            let (number, looked) = arrivals.find(at, order, &self.axes);
            self.budget = self.budget.saturating_sub(looked);
            found.push(number);
            match arrivals.get(number).at_least() {
                Some(bytes) => least += bytes,
                None => return Ok(None),
            }
            if least > bound {
                return Ok(None);
            }
        }
        let (mut bytes, mut steps, mut free) = (0u64, 0, true);
        let mut sources = SmallVec::<[u8; 3]>::new();
        for (arrivals, number) in self.arrivals.iter_mut().zip(&found) {
            let Some((way, priced)) = arrivals.cheapest(*number)? else {
                return Ok(None);
            };
            self.budget = self.budget.saturating_sub(PRICE_COST * priced);
            steps += usize::from(way.kind != WayKind::Nothing);
            free &= way.kind != WayKind::Step;
            bytes += way.bytes;
            sources.push(way.source);
            if bytes > bound {
                return Ok(None);
            }
        }
        let cuts: SmallVec<[(u8, u8); 4]> = order
            .iter()
            .filter_map(|p| match self.choice(at, *p as usize) {
                Choice::Cut(f) => Some((f as u8, self.axes[*p as usize] as u8)),
                _ => None,
            })
            .collect();
        let first = self.arrivals.first().zip(found.first());
        let first = first.and_then(|(arrivals, number)| arrivals.get(*number).sharding.as_ref());
        let (decompose, statistics) = self.statistics(&cuts, first);
        bytes += statistics;
        let Some((outputs, owed)) = self.results(at, &cuts)? else {
            return Ok(None);
        };
        let debts = || outputs.iter().map(|s| s.partial().len()).sum();
        let fresh = (at.iter().zip(&self.candidates))
            .filter(|(at, c)| usize::from(**at) >= c.near)
            .count();
        // What moves nothing is best, even if its results are partial: a sum of partial values is
        // reduced once, later. But where a settled form is at hand there is no need to owe that.
        // Counted in axes, so that the choice holds for all sizes.
        let score = Score {
            bytes: if bytes == 0 { 0 } else { bytes + owed },
            fresh,
            debts: if bytes == 0 && self.several {
                debts()
            } else {
                0
            },
            others: sources.iter().filter(|source| **source != 0).count(),
            steps,
            position,
        };
        if score.bytes > bound {
            return Ok(None);
        }
        let mut choices: SmallVec<[Choice; 3]> =
            smallvec::smallvec![Choice::Whole; self.mesh.axes().len()];
        for (p, axis) in self.axes.iter().enumerate() {
            choices[*axis] = self.choice(at, p);
        }
        let inputs = self.arrivals.iter().zip(&found);
        let solution = Solution {
            choices,
            cuts,
            inputs: inputs
                .filter_map(|(arrivals, number)| arrivals.get(*number).sharding.clone())
                .collect(),
            sources,
            outputs,
            bytes,
            statistics,
            owed,
            steps,
            free: free && !decompose,
            decompose,
        };
        Ok(Some((score, solution)))
    }

    /// Where results lie, and the bytes that it will take to reduce them or to get them where they
    /// are wanted; `None` where they cannot lie so.
    fn results(
        &self,
        at: &[u8],
        cuts: &[(u8, u8)],
    ) -> Result<Option<(SmallVec<[Sharding; 2]>, u64)>> {
        let mut outputs = SmallVec::new();
        let mut owed = 0;
        for (number, dims) in self.rule.outputs.iter().enumerate() {
            let Some(mut sharding) = cut(self.mesh, self.rule, dims, cuts) else {
                return Ok(None);
            };
            for (p, axis) in self.axes.iter().enumerate() {
                let reduction = match self.choice(at, p) {
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
                sharding = sharding.partial_over(*axis, reduction);
            }
            if mixes(&sharding) {
                return Ok(None);
            }
            let wanted = self.rule.wanted.get(number).and_then(Option::as_ref);
            let there = wanted.map_or(!sharding.is_partial(), |w| w.sharding == sharding);
            if let (false, Some(first)) = (there, self.operands.first()) {
                let shape = self.shape_of(dims);
                let held = Held::new(self.mesh, &shape, first.dtype, &sharding);
                owed += match wanted {
                    Some(wanted) => {
                        held.exact(&wanted.sharding)? / u64::from(wanted.shared_by.max(1))
                    }
                    None => held.settled()?,
                };
            }
            outputs.push(sharding);
        }
        Ok(Some((outputs, owed)))
    }

    /// Bytes that it takes to get the results of one solution to where those of another are.
    pub(super) fn results_moved(&self, from: &Solution, to: &Solution) -> Result<u64> {
        let Some(first) = self.operands.first() else {
            return Ok(0);
        };
        let mut bytes = 0;
        for (dims, (from, to)) in
            (self.rule.outputs.iter()).zip(from.outputs.iter().zip(&to.outputs))
        {
            let shape = self.shape_of(dims);
            bytes += Held::new(self.mesh, &shape, first.dtype, from).exact(to)?;
        }
        Ok(bytes)
    }

    /// The shape of a result, as far as its factors tell.
    fn shape_of(&self, dims: &[Factors]) -> Shape {
        let size = |f: &u8| self.rule.result_size(*f);
        dims.iter().map(|d| d.iter().map(size).product()).collect()
    }

    /// Whether the op runs as its decomposition, and the bytes of the statistics and borders that
    /// cross in it, with its first operand in this sharding.
    fn statistics(&self, cuts: &[(u8, u8)], first: Option<&Sharding>) -> (bool, u64) {
        let (mut decompose, mut bytes) = (false, 0);
        for (f, axis) in cuts {
            match self.rule.factors[*f as usize].kind {
                FactorKind::Stats(count) => {
                    decompose = true;
                    bytes += self.combining(count, cuts, self.mesh.size(*axis as usize) as u64);
                }
                FactorKind::Borders => decompose = true,
                FactorKind::Pass | FactorKind::Reduce(_) | FactorKind::Whole => {}
            }
        }
        if let (true, false, Some(first)) = (decompose, self.rule.recipes.is_empty(), first) {
            let Operand { shape, dtype, .. } = self.operands[0];
            bytes += self.rule.border_bytes(self.mesh, shape, dtype, first);
        }
        (decompose, bytes)
    }

    /// Bytes to combine statistics of the first operand over `ranks` ranks.
    fn combining(&self, count: u32, cuts: &[(u8, u8)], ranks: u64) -> u64 {
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
}
