//! The best of many ways: a best-first search over shardings.
//!
//! A way slices and combines until nothing partial is left that has to go, then gathers, moves and
//! swaps axes; from everywhere a single step may end it. Every state has a bound on what is left,
//! and a plan that is known before the search begins discards what cannot beat it.

use super::{
    edge::{Collective, Space},
    fewest::{Path, at_least},
    grid::{Grid, bits},
    moves,
};
use crate::Sharding;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

/// What to make small.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Measure {
    Bytes,
    Seconds,
    /// The largest peak of all steps.
    Peak,
}

/// Ranks looked at at most, which keeps planning below a millisecond. Beyond, the best way so far
/// is taken.
const BUDGET: usize = 50_000;

/// What a state costs at least, in the same measure.
const STATE_COST: usize = 8;

/// The measure, then bytes, then steps.
#[derive(Clone, Copy, PartialEq)]
struct Score(f64, u64, usize);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0
            .total_cmp(&other.0)
            .then(self.1.cmp(&other.1))
            .then(self.2.cmp(&other.2))
    }
}

struct Node {
    at: Sharding,
    grid: Grid,
    parent: usize,
    score: Score,
    /// Whether the step to here sent nothing: one that sends nothing after it is the same step.
    sliced: bool,
}

pub(super) struct Search<'a> {
    pub(super) space: &'a Space<'a>,
    pub(super) to: &'a Sharding,
    /// Partial axes to combine.
    pub(super) resolve: u32,
    pub(super) measure: Measure,
    /// Steps with a higher peak are not taken.
    pub(super) ceiling: u64,
}

impl Search<'_> {
    /// The best path, `None` where there is none below the ceiling. `known` is a path already
    /// found.
    pub(super) fn run(&self, known: &[Sharding]) -> Option<Path> {
        let (space, to_grid) = (self.space, self.space.grid(self.to));
        let mut limit = Score(f64::INFINITY, u64::MAX, usize::MAX);
        let mut best: Option<Path> = None;
        if let Some(score) = self.score_of(known) {
            (limit, best) = (score, Some(known.iter().cloned().collect()));
        }
        let from = known.first()?;
        let mut nodes = vec![Node {
            at: from.clone(),
            grid: space.grid(from),
            parent: 0,
            score: Score(0.0, 0, 0),
            sliced: false,
        }];
        let bound = self.bound(nodes[0].score, from, &nodes[0].grid, &to_grid);
        if bound >= limit {
            return best;
        }
        let mut seen: HashMap<Sharding, usize> = HashMap::from([(from.clone(), 0)]);
        let mut queue = BinaryHeap::from([(Reverse((bound, 0)))]);
        let mut budget = BUDGET;
        while let Some(Reverse((bound, i))) = queue.pop() {
            if bound >= limit || budget == 0 {
                break;
            }
            if seen[&nodes[i].at] != i {
                continue;
            }
            let at = nodes[i].at.clone();
            let resolved = at.partial_mask() & self.resolve == 0;
            if resolved
                && let Some((score, _)) = self.step(&nodes[i], self.to, &to_grid)
                && score < limit
            {
                (limit, best) = (score, Some(path_to(&nodes, i, self.to)));
            }
            let mut visit = |next: &Sharding| {
                // Steps are never free of charge, so what was reached as cheaply as this node
                // stays.
                let known = seen
                    .get(next)
                    .is_some_and(|j| nodes[*j].score <= nodes[i].score);
                if known || self.too_late(&nodes[i], next, limit) {
                    budget = budget.saturating_sub(1);
                    return budget > 0;
                }
                let walked = space.walked();
                let grid = space.grid(next);
                let stepped = self.step(&nodes[i], next, &grid).map(|(score, sliced)| {
                    (score, sliced, self.bound(score, next, &grid, &to_grid))
                });
                budget = budget.saturating_sub(STATE_COST.max(space.walked() - walked));
                let Some((score, sliced, bound)) = stepped else {
                    return budget > 0;
                };
                if bound < limit && seen.get(next).is_none_or(|j| score < nodes[*j].score) {
                    seen.insert(next.clone(), nodes.len());
                    queue.push(Reverse((bound, nodes.len())));
                    nodes.push(Node {
                        at: next.clone(),
                        grid,
                        parent: i,
                        score,
                        sliced,
                    });
                }
                budget > 0
            };
            let free = space.axes() & !at.cut_mask() & !at.partial_mask();
            for axis in bits(free) {
                (0..space.rank())
                    .filter(|d| space.shape[*d] > 1)
                    .all(|d| visit(&at.clone().cut(d, axis)));
            }
            if !resolved {
                moves::reductions(space, &at, self.resolve, &mut |next, _| visit(next));
                continue;
            }
            moves::collectives(space, &at, &mut visit);
            if self.ceiling < u64::MAX || self.measure == Measure::Peak {
                // The destination cut further: gathering it is then the last step, and the exchange
                // before it needs little memory.
                let goal = self
                    .to
                    .without_mask(self.to.partial_mask() & !at.partial_mask());
                let free = space.axes() & !goal.cut_mask() & !goal.partial_mask();
                moves::slicings(space, &goal, free, &mut visit);
            }
        }
        best
    }

    /// The score after one more step, and whether it sends nothing.
    fn step(&self, node: &Node, to: &Sharding, grid: &Grid) -> Option<(Score, bool)> {
        if node.at == *to {
            return Some((node.score, node.sliced));
        }
        let edge = self.space.edge(&node.at, &node.grid, to, grid)?;
        if edge.peak_bytes > self.ceiling {
            return None;
        }
        let Score(before, bytes, steps) = node.score;
        let measure = match self.measure {
            Measure::Bytes => before + edge.recv_bytes as f64,
            Measure::Seconds => before + edge.seconds,
            Measure::Peak => before.max(edge.peak_bytes as f64),
        };
        let sliced = edge.kind == Collective::Slice;
        Some((
            Score(
                measure,
                bytes + edge.recv_bytes,
                steps + usize::from(!(sliced && node.sliced)),
            ),
            sliced,
        ))
    }

    fn score_of(&self, path: &[Sharding]) -> Option<Score> {
        let (first, rest) = path.split_first()?;
        let mut node = Node {
            at: first.clone(),
            grid: self.space.grid(first),
            parent: 0,
            score: Score(0.0, 0, 0),
            sliced: false,
        };
        for next in rest {
            let grid = self.space.grid(next);
            let (score, sliced) = self.step(&node, next, &grid)?;
            node = Node {
                at: next.clone(),
                grid,
                parent: 0,
                score,
                sliced,
            };
        }
        Some(node.score)
    }

    /// The least score of any way through `at`.
    fn bound(&self, score: Score, at: &Sharding, grid: &Grid, to_grid: &Grid) -> Score {
        let space = self.space;
        let left = at.partial_mask() & self.resolve;
        let bytes = if left == 0 {
            space.traffic(at, grid, self.to, to_grid).missing * space.size
        } else {
            at_least(space, space.size, at, left, space.local(self.to))
        };
        let Score(before, so_far, steps) = score;
        let measure = match self.measure {
            Measure::Bytes => before + bytes as f64,
            Measure::Seconds if bytes == 0 => before,
            Measure::Seconds => before + self.shortest() + bytes as f64 / space.fastest(),
            Measure::Peak => before,
        };
        Score(
            measure,
            so_far + bytes,
            steps + usize::from(*at != *self.to && !(bytes == 0 && left == 0)),
        )
    }

    /// The least time of a step that sends anything.
    fn shortest(&self) -> f64 {
        self.space.mesh.cost().start
            + self
                .space
                .links
                .iter()
                .fold(f64::INFINITY, |t, l| t.min(l.latency))
    }

    /// Whether a step to `next` cannot be in time because it sends something and so does what must
    /// follow.
    fn too_late(&self, node: &Node, next: &Sharding, limit: Score) -> bool {
        if self.measure != Measure::Seconds || node.score.0 + 2.0 * self.shortest() < limit.0 {
            return false;
        }
        let finer = |a: &Sharding, b: &Sharding| {
            (0..self.space.rank()).all(|d| b.cuts_of(d).starts_with(a.cuts_of(d)))
        };
        let sends = !finer(&node.at, next) || next.partial_mask() != node.at.partial_mask();
        sends && !finer(next, self.to)
    }
}

fn path_to(nodes: &[Node], mut i: usize, to: &Sharding) -> Path {
    let mut path = Path::new();
    if nodes[i].at != *to {
        path.push(to.clone());
    }
    loop {
        path.push(nodes[i].at.clone());
        if i == 0 {
            break;
        }
        i = nodes[i].parent;
    }
    path.reverse();
    path
}
