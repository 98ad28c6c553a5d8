//! Lists that are changed a little and run again.

use super::Random;
use crate::{Action, Costs, Kind, Schedule};

/// How good lists are: shorter first, then ranks that are done earlier.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(super) struct Score {
    pub(super) makespan: f64,
    ends: f64,
}

/// Runs lists without proving anything but what a change can break.
pub(super) struct Lists<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    limit: usize,
    /// When forward and backward results are made; not a number: not yet.
    made: Vec<[f64; 2]>,
    at: Vec<usize>,
    free: Vec<f64>,
}

impl<'a> Lists<'a> {
    pub(super) fn new(schedule: &'a Schedule, costs: &'a Costs, limit: usize) -> Lists<'a> {
        Lists {
            schedule,
            costs,
            limit,
            made: vec![],
            at: vec![],
            free: vec![],
        }
    }

    /// When what an action takes is made and has arrived; not a number: not yet.
    fn ready(&self, action: Action) -> f64 {
        let own = self.made[action.stage * self.schedule.micros + action.micro];
        let mut ready = match action.kind {
            Kind::F => 0.0,
            Kind::W => own[1],
            _ => own[0],
        };
        if let Some(source) = self.schedule.source(action) {
            let column = usize::from(action.kind != Kind::F);
            let other = self.made[source * self.schedule.micros + action.micro][column];
            let apart = self.schedule.owner[source] != self.schedule.owner[action.stage];
            // Not a number stays so.
            ready = ready * 0.0 + other + if apart { self.costs.transfer } else { 0.0 };
        }
        ready
    }

    /// How good lists are; nothing if they do not run or need too much memory.
    pub(super) fn score(&mut self, lists: &[Vec<Action>]) -> Option<Score> {
        let ranks = lists.len();
        self.made.clear();
        self.made
            .resize(self.schedule.stages() * self.schedule.micros, [f64::NAN; 2]);
        self.at.clear();
        self.at.resize(ranks, 0);
        self.free.clear();
        self.free.resize(ranks, 0.0);
        for list in lists {
            let mut live = 0isize;
            for action in list {
                match action.kind {
                    Kind::F => live += 1,
                    Kind::B | Kind::W => live -= 1,
                    _ => {}
                }
                if live > self.limit as isize {
                    return None;
                }
            }
        }
        let mut moved = true;
        while moved {
            moved = false;
            for rank in 0..ranks {
                while let Some(action) = lists[rank].get(self.at[rank]) {
                    let ready = self.ready(*action);
                    if ready.is_nan() {
                        break;
                    }
                    let end = self.free[rank].max(ready) + self.costs.of(*action);
                    self.free[rank] = end;
                    let own = action.stage * self.schedule.micros + action.micro;
                    match action.kind {
                        Kind::F => self.made[own][0] = end,
                        Kind::B | Kind::I => self.made[own][1] = end,
                        _ => {}
                    }
                    self.at[rank] += 1;
                    moved = true;
                }
            }
        }
        let through = (0..ranks).all(|r| self.at[r] == lists[r].len());
        through.then(|| Score {
            makespan: self.free.iter().copied().fold(0.0, f64::max),
            ends: self.free.iter().sum(),
        })
    }

    /// Moves single actions back and forth and keeps what is not worse.
    pub(super) fn improve(
        &mut self,
        lists: &mut [Vec<Action>],
        score: &mut Score,
        tries: usize,
        bound: f64,
        random: &mut Random,
    ) {
        for _ in 0..tries {
            if score.makespan <= bound * (1.0 + 1e-9) {
                return;
            }
            let rank = random.below(lists.len());
            let length = lists[rank].len();
            let from = random.below(length);
            let most = [24, 4, 4, 4][random.below(4)];
            let far = 1 + random.below(most);
            let to = match random.below(2) {
                0 => from.saturating_sub(far),
                _ => (from + far).min(length - 1),
            };
            if from == to {
                continue;
            }
            let action = lists[rank].remove(from);
            lists[rank].insert(to, action);
            match self.score(lists) {
                Some(new) if new <= *score => *score = new,
                _ => {
                    let action = lists[rank].remove(to);
                    lists[rank].insert(from, action);
                }
            }
        }
    }

    /// Makes two halves that follow each other one backward pass, where that costs nothing: whole ones
    /// need no graph that is kept.
    pub(super) fn merge(&mut self, lists: &mut [Vec<Action>], score: &mut Score) {
        let all: usize = lists.iter().map(Vec::len).sum();
        // For long lists only where nobody waits for the first half.
        let everywhere = all <= 4096;
        for rank in 0..lists.len() {
            let mut at = 0;
            while at + 1 < lists[rank].len() {
                let (a, b) = (lists[rank][at], lists[rank][at + 1]);
                let halves = (a.kind, b.kind) == (Kind::I, Kind::W);
                let cost = self.costs.stage(a.stage);
                let same = (a.stage, a.micro) == (b.stage, b.micro);
                let likely = everywhere || a.stage == 0;
                if halves && same && likely && cost.b <= cost.i + cost.w {
                    lists[rank].splice(at..at + 2, [Action::b(a.stage, a.micro)]);
                    match self.score(lists) {
                        Some(new) if new.makespan <= score.makespan => *score = new,
                        _ => {
                            lists[rank].splice(at..at + 1, [a, b]);
                        }
                    }
                }
                at += 1;
            }
        }
    }
}
