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
    /// Where the forward and the backward pass of a stage and micro-batch stand in their list.
    place: Vec<[usize; 2]>,
    /// For each rank and position, whether the action waits for another stage rather than for the
    /// action before it.
    waits: Vec<Vec<bool>>,
    /// Positions on the longest path that wait for nothing but the action before them.
    critical: Vec<(usize, usize)>,
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
            place: vec![],
            waits: vec![],
            critical: vec![],
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
        self.place.resize(self.made.len(), [0; 2]);
        self.waits.resize(ranks, vec![]);
        for (waits, list) in self.waits.iter_mut().zip(lists) {
            waits.resize(list.len(), false);
        }
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
            for (rank, list) in lists.iter().enumerate() {
                while let Some(action) = list.get(self.at[rank]) {
                    let ready = self.ready(*action);
                    if ready.is_nan() {
                        break;
                    }
                    let at = self.at[rank];
                    self.waits[rank][at] = ready > self.free[rank];
                    let end = self.free[rank].max(ready) + self.costs.of(*action);
                    self.free[rank] = end;
                    let own = action.stage * self.schedule.micros + action.micro;
                    let column = match action.kind {
                        Kind::F => Some(0),
                        Kind::B | Kind::I => Some(1),
                        _ => None,
                    };
                    if let Some(column) = column {
                        self.made[own][column] = end;
                        self.place[own][column] = at;
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

    /// Follows the longest path of the lists that were scored last, from its end.
    fn trace(&mut self, lists: &[Vec<Action>]) {
        self.critical.clear();
        let last = (0..lists.len()).max_by(|a, b| self.free[*a].total_cmp(&self.free[*b]));
        let Some(mut rank) = last else { return };
        let mut next = lists[rank].len().checked_sub(1);
        while let Some(at) = next {
            let action = lists[rank][at];
            let source = self
                .schedule
                .source(action)
                .filter(|_| self.waits[rank][at]);
            next = match source {
                Some(stage) => {
                    rank = self.schedule.owner[stage];
                    let own = stage * self.schedule.micros + action.micro;
                    Some(self.place[own][usize::from(action.kind != Kind::F)])
                }
                None => {
                    self.critical.push((rank, at));
                    at.checked_sub(1)
                }
            };
        }
    }

    /// A place to take an action from and one to put it to: mostly on the longest path, where alone
    /// a change can make it shorter; sometimes anywhere, which makes room.
    fn change(&self, lists: &[Vec<Action>], random: &mut Random) -> (usize, usize, usize) {
        let most = [24, 8, 3, 2][random.below(4)];
        let far = 1 + random.below(most);
        if self.critical.is_empty() || random.below(4) == 0 {
            let rank = random.below(lists.len());
            let from = random.below(lists[rank].len());
            let to = match random.below(2) {
                0 => from.saturating_sub(far),
                _ => (from + far).min(lists[rank].len() - 1),
            };
            return (rank, from, to);
        }
        let (rank, at) = self.critical[random.below(self.critical.len())];
        match random.below(2) {
            // The action earlier, or the one before it later.
            0 => (rank, at, at.saturating_sub(far)),
            _ => {
                let before = at.saturating_sub(1);
                (rank, before, (before + far).min(lists[rank].len() - 1))
            }
        }
    }

    /// Moves single actions, keeps what is not worse and, less and less, what is a little worse.
    pub(super) fn improve(
        &mut self,
        lists: &mut Vec<Vec<Action>>,
        score: &mut Score,
        tries: usize,
        bound: f64,
        random: &mut Random,
    ) {
        let value = |s: &Score| s.makespan + 0.01 * s.ends / self.schedule.stages() as f64;
        let cost = self.costs.stage(0);
        let warm = 0.3 * (cost.f + cost.i + cost.w) / 3.0;
        let mut now = lists.clone();
        if self.score(&now).is_none() {
            return;
        }
        self.trace(&now);
        let mut current = value(score);
        for left in (0..tries).rev() {
            if score.makespan <= bound * (1.0 + 1e-9) {
                return;
            }
            let (rank, from, to) = self.change(&now, random);
            if from == to {
                continue;
            }
            let action = now[rank].remove(from);
            now[rank].insert(to, action);
            let slack = warm * left as f64 / tries as f64 * -(random.unit().ln());
            match self.score(&now) {
                Some(new) if value(&new) <= current + slack => {
                    current = value(&new);
                    self.trace(&now);
                    if new < *score {
                        *score = new;
                        lists.clone_from(&now);
                    }
                }
                _ => {
                    let action = now[rank].remove(to);
                    now[rank].insert(from, action);
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
