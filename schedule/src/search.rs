//! A schedule that is looked for: greedy lists under costs and a limit of memory, then small changes.

mod greedy;
mod lists;

use crate::{
    Action, Costs, Error, Kind, Limits, Placement, Result, Schedule, build, schedule::check,
};
use greedy::Greedy;
use lists::{Lists, Score};

/// Looks for a short schedule in which no rank has more than `live` activations alive.
///
/// Backward passes are in two halves. The result is never longer than a built-in schedule of the same
/// placement that stays within the limit, and the same search always finds the same.
///
/// ```
/// use anymesh_schedule::{Costs, Limits, Search};
/// let search = Search { live: 6, ..Search::new(4, 1, 8) };
/// let schedule = search.run()?;
/// assert_eq!(schedule.timing(&search.costs)?.makespan, 27.0);
/// assert!(schedule.prove(&Limits::live(6)).is_ok());
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Search {
    /// How many ranks.
    pub ranks: usize,
    /// How many stages each has.
    pub chunks: usize,
    /// How many micro-batches.
    pub micros: usize,
    /// Which rank has which stage.
    pub placement: Placement,
    /// How long passes and transfers take.
    pub costs: Costs,
    /// How many activations a rank may have alive; at least one for each of its stages.
    pub live: usize,
    /// How many actions may be looked at, over all tries.
    pub effort: usize,
}

impl Search {
    /// With equal costs and as many activations as there are stages.
    pub fn new(ranks: usize, chunks: usize, micros: usize) -> Search {
        Search {
            ranks,
            chunks,
            micros,
            placement: Placement::Loop,
            costs: Costs::default(),
            live: ranks.saturating_mul(chunks),
            effort: 20_000_000,
        }
    }

    /// The best schedule found.
    pub fn run(&self) -> Result<Schedule> {
        check(self.ranks, self.chunks, self.micros)?;
        self.costs.check(self.ranks * self.chunks)?;
        if self.live < self.chunks {
            return Err(Error::Number {
                what: "the limit of activations",
                got: self.live.to_string(),
                valid: format!(
                    "a micro-batch that is in all stages of a rank needs {}",
                    self.chunks
                ),
            });
        }
        let empty = Schedule {
            name: "searched".into(),
            micros: self.micros,
            owner: self.placement.owners(self.ranks, self.chunks),
            ranks: vec![],
        };
        let bound = Schedule {
            ranks: vec![vec![]; self.ranks],
            ..empty.clone()
        }
        .bound_within(&self.costs, self.live);
        let mut lists = Lists::new(&empty, &self.costs, self.live);
        let actions = 3 * self.ranks * self.chunks * self.micros;
        let mut tries = (self.effort / actions).max(1);
        let mut random = Random(0x9E37_79B9_7F4A_7C15);

        let mut best: Option<(Score, Vec<Vec<Action>>)> = None;
        let mut offer = |score: Option<Score>, list: Vec<Vec<Action>>| {
            let better = |score: &Score| best.as_ref().is_none_or(|b| *score < b.0);
            if let Some(score) = score.filter(better) {
                best = Some((score, list));
            }
            best.as_ref()
                .is_some_and(|b| b.0.makespan <= bound + 1e-9 * bound)
        };
        // Known ones, as they are and with their backward passes in two halves.
        for name in build::NAMES.iter().filter(|n| **n != "searched") {
            let Ok(known) = build(name, self.ranks, self.chunks, self.micros) else {
                continue;
            };
            let fits = || known.prove(&Limits::live(self.live)).is_ok();
            if known.owner == empty.owner && fits() {
                let plain = known.unjoined().ranks;
                offer(lists.score(&plain), plain.clone());
                let halves = split(&plain);
                offer(lists.score(&halves), halves);
            }
        }
        // Greedy ones: orders of preference first, then chance.
        let plain = Greedy::variants(self.ranks);
        let chances = (tries / 4).min(400);
        let mut done = false;
        for i in 0..plain.len() + chances {
            if tries == 0 || done {
                break;
            }
            // Choosing looks at all ranks, which running a list does not.
            tries = tries.saturating_sub(1 + self.ranks / 8);
            let greedy = Greedy {
                chance: if i < plain.len() {
                    0
                } else {
                    1 + i as u64 % 12
                },
                ..plain[i % plain.len()]
            };
            let list = greedy.run(&empty, &self.costs, self.live, &mut random);
            done = offer(lists.score(&list), list);
        }
        let Some((mut score, mut list)) = best else {
            // Cannot happen: the greedy one always gets to the end.
            return build::f_then_b(self.ranks, self.chunks, self.micros);
        };
        if !done {
            lists.improve(&mut list, &mut score, tries, bound, &mut random);
        }
        lists.merge(&mut list, &mut score);
        Ok(Schedule {
            ranks: list,
            ..empty
        })
    }
}

/// Backward passes in two halves, right after each other.
fn split(lists: &[Vec<Action>]) -> Vec<Vec<Action>> {
    let halves = |a: &Action| match a.kind {
        Kind::B => vec![Action::i(a.stage, a.micro), Action::w(a.stage, a.micro)],
        _ => vec![*a],
    };
    let each = |list: &Vec<Action>| list.iter().flat_map(halves).collect();
    lists.iter().map(each).collect()
}

/// xorshift: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n.max(1)
    }

    /// Above 0, at most 1.
    fn unit(&mut self) -> f64 {
        (self.below(1 << 20) + 1) as f64 / (1 << 20) as f64
    }
}
