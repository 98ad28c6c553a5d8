//! List scheduling: whoever can begin first does what it likes best of what is there.

use super::Random;
use crate::{Action, Costs, Kind, Schedule};

/// What a rank likes best.
#[derive(Clone, Copy, Debug)]
pub(super) struct Greedy {
    /// Of what is ready, which kind first.
    pub(super) kinds: [Kind; 3],
    /// Whether later stages come first in the forward pass.
    pub(super) deep: bool,
    /// How many gradients of weights a rank keeps for later while there is something else.
    pub(super) kept: usize,
    /// Of 64 choices, how many are by chance.
    pub(super) chance: u64,
}

/// How far everything is.
struct State<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    limit: usize,
    stages: Vec<Vec<usize>>,
    /// For each stage how many micro-batches have had F, I, W.
    done: Vec<[usize; 3]>,
    /// When F and I of each stage and micro-batch end.
    ends: Vec<[f64; 2]>,
    free: Vec<f64>,
    live: Vec<usize>,
}

impl Greedy {
    /// Preferences without chance.
    pub(super) fn variants(ranks: usize) -> Vec<Greedy> {
        let (f, i, w) = (Kind::F, Kind::I, Kind::W);
        let mut all = vec![];
        for kept in (0..=ranks.min(8)).rev() {
            for kinds in [[i, f, w], [f, i, w], [i, w, f]] {
                for deep in [true, false] {
                    let chance = 0;
                    all.push(Greedy {
                        kinds,
                        deep,
                        kept,
                        chance,
                    });
                }
            }
        }
        // The classical preference is first.
        all.sort_by_key(|g| (g.kinds != [i, f, w], g.kept, !g.deep));
        all
    }

    /// The lists that come of it.
    pub(super) fn run(
        &self,
        schedule: &Schedule,
        costs: &Costs,
        limit: usize,
        random: &mut Random,
    ) -> Vec<Vec<Action>> {
        let stages = schedule.stages();
        let ranks = schedule.owner.iter().max().map_or(0, |r| r + 1);
        let mut state = State {
            schedule,
            costs,
            limit,
            stages: (0..ranks).map(|r| schedule.stages_of(r)).collect(),
            done: vec![[0; 3]; stages],
            ends: vec![[0.0; 2]; stages * schedule.micros],
            free: vec![0.0; ranks],
            live: vec![0; ranks],
        };
        let mut lists = vec![vec![]; ranks];
        let mut next: Vec<Option<(f64, Action)>> = vec![None; ranks];
        let mut stale = vec![true; ranks];
        // The oldest micro-batch that is not through all forward passes: room is kept for it.
        let mut oldest = 0;
        loop {
            for rank in 0..ranks {
                if stale[rank] {
                    next[rank] = self.choose(&state, rank, oldest, random);
                    stale[rank] = false;
                }
            }
            let first = (0..ranks)
                .filter_map(|r| next[r].map(|n| (n.0, r)))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((start, rank)) = first else {
                return lists;
            };
            let Some((_, action)) = next[rank].take() else {
                return lists;
            };
            lists[rank].push(action);
            state.apply(action, rank, start);
            stale[rank] = true;
            if let Some(source) = match action.kind {
                Kind::F => Some(action.stage + 1).filter(|s| *s < stages),
                Kind::I => action.stage.checked_sub(1),
                _ => None,
            } {
                stale[schedule.owner[source]] = true;
            }
            let through = state.done[stages - 1][0];
            if through != oldest {
                oldest = through;
                stale.fill(true);
            }
        }
    }

    /// What a rank would do next, and when.
    fn choose(
        &self,
        state: &State<'_>,
        rank: usize,
        oldest: usize,
        random: &mut Random,
    ) -> Option<(f64, Action)> {
        let by_chance = (random.below(64) as u64) < self.chance;
        let kept: usize = state.stages[rank]
            .iter()
            .map(|s| state.done[*s][1] - state.done[*s][2])
            .sum();
        let mut best: Option<(f64, usize, usize, Action)> = None;
        for (chunk, stage) in state.stages[rank].iter().enumerate() {
            for (column, kind) in [Kind::F, Kind::I, Kind::W].into_iter().enumerate() {
                let action = Action::new(kind, *stage, state.done[*stage][column]);
                let Some(ready) = state.ready(action, rank, oldest) else {
                    continue;
                };
                let start = ready.max(state.free[rank]);
                let mut rank_of = self.kinds.iter().position(|k| *k == kind).unwrap_or(0) * 4;
                if kind == Kind::W && kept <= self.kept {
                    rank_of += 16;
                }
                if by_chance {
                    rank_of = random.below(16);
                }
                let chunks = state.stages[rank].len();
                let order = match (kind == Kind::F) == self.deep {
                    true => chunks - chunk,
                    false => chunk,
                };
                let key = (start, rank_of, order);
                let better = |b: &(f64, usize, usize, Action)| {
                    (key.0.total_cmp(&b.0))
                        .then(key.1.cmp(&b.1))
                        .then(key.2.cmp(&b.2))
                        .is_lt()
                };
                if best.as_ref().is_none_or(better) {
                    best = Some((key.0, key.1, key.2, action));
                }
            }
        }
        best.map(|b| (b.0, b.3))
    }
}

impl State<'_> {
    fn end(&self, stage: usize, micro: usize, column: usize, rank: usize) -> f64 {
        let apart = self.schedule.owner[stage] != rank;
        let end = self.ends[stage * self.schedule.micros + micro][column];
        end + if apart { self.costs.transfer } else { 0.0 }
    }

    /// When an action could begin, if what it needs is there and memory has room.
    fn ready(&self, action: Action, rank: usize, oldest: usize) -> Option<f64> {
        let Action { stage, micro, .. } = action;
        let done = self.done[stage];
        match action.kind {
            Kind::F => {
                if micro >= self.schedule.micros || !self.room(rank, stage, micro, oldest) {
                    return None;
                }
                match stage.checked_sub(1) {
                    None => Some(0.0),
                    Some(s) if self.done[s][0] > micro => Some(self.end(s, micro, 0, rank)),
                    Some(_) => None,
                }
            }
            Kind::I => {
                if micro >= done[0] {
                    return None;
                }
                match stage + 1 < self.schedule.stages() {
                    false => Some(0.0),
                    true if self.done[stage + 1][1] > micro => {
                        Some(self.end(stage + 1, micro, 1, rank))
                    }
                    true => None,
                }
            }
            _ => (micro < done[1]).then_some(0.0),
        }
    }

    /// Whether a rank may take another activation: the oldest micro-batch must find room in all its
    /// stages, else younger ones could fill a rank and nothing would go on.
    fn room(&self, rank: usize, stage: usize, micro: usize, oldest: usize) -> bool {
        let lacks = |s: &&usize| self.done[**s][0] <= oldest;
        let mut kept = self.stages[rank].iter().filter(lacks).count();
        if micro == oldest && self.done[stage][0] <= oldest {
            kept -= 1;
        }
        self.live[rank] + 1 + kept <= self.limit
    }

    fn apply(&mut self, action: Action, rank: usize, start: f64) {
        let end = start + self.costs.of(action);
        self.free[rank] = end;
        let at = action.stage * self.schedule.micros + action.micro;
        let column = match action.kind {
            Kind::F => 0,
            Kind::I => 1,
            _ => 2,
        };
        self.done[action.stage][column] += 1;
        match column {
            0 => self.live[rank] += 1,
            2 => self.live[rank] -= 1,
            _ => {}
        }
        if column < 2 {
            self.ends[at][column] = end;
        }
    }
}
