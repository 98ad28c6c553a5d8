//! When everything happens, under costs.

use crate::{Action, Error, Kind, Limits, Result, Schedule};
use std::str::FromStr;

/// How long the passes of a stage take, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// A forward pass.
    pub f: f64,
    /// Gradients of inputs.
    pub i: f64,
    /// Gradients of weights.
    pub w: f64,
    /// A whole backward pass.
    pub b: f64,
}

/// How long everything takes.
///
/// Written as `f=1,i=1,w=1,b=2,transfer=0`; what is left out is 1 for passes, `i + w` for `b`, 0 for
/// the rest. A pass that differs by stage has a number for each, `f=1/1/1/2`.
///
/// ```
/// use anymesh_schedule::Costs;
/// let costs: Costs = "f=1/1/2, i=1, w=0.5, transfer=0.1".parse()?;
/// assert_eq!((costs.stage(2).f, costs.stage(2).b, costs.transfer), (2.0, 1.5, 0.1));
/// assert!("g=1".parse::<Costs>().unwrap_err().to_string().contains("transfer"));
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// For each stage, or one for all.
    pub stages: Vec<Cost>,
    /// From the end of a pass until another rank has its result. Ranks compute meanwhile.
    pub transfer: f64,
    /// How much of the shorter one of two joined passes vanishes behind the longer one: 0 is one after
    /// the other, 1 all of it. Joined passes begin together and both results are there at the end.
    pub overlap: f64,
}

impl Default for Costs {
    /// F = I = W = 1, B = 2, nothing for transfers.
    fn default() -> Costs {
        Costs::uniform(1.0, 1.0, 1.0, 0.0)
    }
}

impl Costs {
    /// The same for all stages, with `B = I + W`.
    pub fn uniform(f: f64, i: f64, w: f64, transfer: f64) -> Costs {
        let b = i + w;
        Costs {
            stages: vec![Cost { f, i, w, b }],
            transfer,
            overlap: 0.0,
        }
    }

    /// The costs of a stage.
    pub fn stage(&self, stage: usize) -> Cost {
        let unit = Cost {
            f: 1.0,
            i: 1.0,
            w: 1.0,
            b: 2.0,
        };
        *self
            .stages
            .get(stage)
            .or(self.stages.first())
            .unwrap_or(&unit)
    }

    /// How long an action keeps its rank.
    pub fn of(&self, action: Action) -> f64 {
        let cost = self.stage(action.stage);
        match action.kind {
            Kind::F => cost.f,
            Kind::B => cost.b,
            Kind::I => cost.i,
            Kind::W => cost.w,
            _ => 0.0,
        }
    }

    pub(crate) fn check(&self, stages: usize) -> Result<()> {
        if self.stages.len() > 1 && self.stages.len() != stages {
            return Err(Error::Number {
                what: "the number of stages with a cost",
                got: self.stages.len().to_string(),
                valid: format!("give one cost for all, or one for each of {stages} stages"),
            });
        }
        let passes = self.stages.iter().flat_map(|c| [c.f, c.i, c.w, c.b]);
        let bad = |x: &f64| !(x.is_finite() && *x >= 0.0);
        if let Some(bad) = passes.chain([self.transfer]).find(bad) {
            return Err(Error::Number {
                what: "a cost",
                got: bad.to_string(),
                valid: "costs are finite and not negative".into(),
            });
        }
        match (0.0..=1.0).contains(&self.overlap) {
            true => Ok(()),
            false => Err(Error::Number {
                what: "the overlap of joined passes",
                got: self.overlap.to_string(),
                valid: "it is between 0 and 1".into(),
            }),
        }
    }
}

impl FromStr for Costs {
    type Err = Error;

    fn from_str(text: &str) -> Result<Costs> {
        let bad = |text: &str| {
            Error::Parse {
            what: "list of costs",
            text: text.into(),
            expected: "f, i, w, b (a number, or one for each stage as in 1/1/2), transfer and overlap, such as f=1,i=1,w=1,transfer=0.1".into(),
        }
        };
        let mut passes: [Option<Vec<f64>>; 4] = [const { None }; 4];
        let (mut transfer, mut overlap) = (0.0, 0.0);
        for part in text.split(',').filter(|p| !p.trim().is_empty()) {
            let (name, values) = part.split_once('=').ok_or_else(|| bad(part))?;
            let values: Option<Vec<f64>> = values
                .split('/')
                .map(|v| v.trim().parse().ok().filter(|v: &f64| v.is_finite()))
                .collect();
            let values = values.ok_or_else(|| bad(part))?;
            match (name.trim(), values.as_slice()) {
                ("transfer", [one]) => transfer = *one,
                ("overlap", [one]) => overlap = *one,
                (name, _) => {
                    let at = ["f", "i", "w", "b"].iter().position(|n| *n == name);
                    passes[at.ok_or_else(|| bad(part))?] = Some(values);
                }
            }
        }
        let stages = passes.iter().flatten().map(Vec::len).max().unwrap_or(1);
        if let Some(odd) = passes
            .iter()
            .flatten()
            .find(|v| v.len() > 1 && v.len() != stages)
        {
            return Err(Error::Number {
                what: "the number of stages with a cost",
                got: odd.len().to_string(),
                valid: format!("another pass has {stages}: give one for all or as many"),
            });
        }
        let get = |pass: usize, stage: usize| {
            let values = passes[pass].as_ref()?;
            values.get(stage).or(values.first()).copied()
        };
        let stages = (0..stages).map(|s| {
            let (i, w) = (get(1, s).unwrap_or(1.0), get(2, s).unwrap_or(1.0));
            Cost {
                f: get(0, s).unwrap_or(1.0),
                i,
                w,
                b: get(3, s).unwrap_or(i + w),
            }
        });
        let costs = Costs {
            stages: stages.collect(),
            transfer,
            overlap,
        };
        costs.check(costs.stages.len())?;
        Ok(costs)
    }
}

/// When something begins and ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// A rank that has nothing to do until another one is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wait {
    /// Who waits.
    pub rank: usize,
    /// With what to do next, as a position in its list.
    pub position: usize,
    /// Which is this.
    pub action: Action,
    /// From when until when.
    pub span: Span,
    /// For whom.
    pub peer: usize,
    /// And for what.
    pub needs: Action,
}

impl std::fmt::Display for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let long = self.span.end - self.span.start;
        write!(
            f,
            "rank {} waits {} with {} for rank {}'s {}",
            self.rank,
            (long * 1e6).round() / 1e6,
            self.action,
            self.peer,
            self.needs
        )
    }
}

/// When everything happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// From the first action to the end of the last.
    pub makespan: f64,
    /// For each rank and position. Transfers take place beside the rank's work.
    pub spans: Vec<Vec<Span>>,
    /// How long each rank works.
    pub busy: Vec<f64>,
    /// How long each rank does not.
    pub bubble: Vec<f64>,
    /// The idle share of all ranks' time.
    pub fraction: f64,
    /// No schedule of these passes on these ranks is shorter.
    pub bound: f64,
    /// Who waits for whom, by rank and time. What is idle besides is the time after a rank's last
    /// action.
    pub waits: Vec<Wait>,
    /// For each rank how many activations are alive from which time on.
    pub live: Vec<Vec<(f64, usize)>>,
    /// The most of them.
    pub peak: Vec<usize>,
}

impl Schedule {
    /// When everything happens if each rank goes through its list and starts each action as soon as it
    /// can: sends do not keep a rank, and what is received is waited for where it is used.
    ///
    /// ```
    /// use anymesh_schedule::{Costs, build};
    /// let timing = build("1f1b", 4, 1, 8)?.timing(&Costs::default())?;
    /// assert_eq!((timing.makespan, timing.bound), (33.0, 27.0));
    /// assert_eq!(timing.waits[0].to_string(), "rank 0 waits 6 with 0B0 for rank 1's 1B0");
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn timing(&self, costs: &Costs) -> Result<Timing> {
        costs.check(self.stages())?;
        let proof = self.prove(&Limits::none())?;
        // Passes that cannot run together, because one waits for the other, run in turn.
        let plain;
        let mut run = match Run::of(self, costs) {
            Some(run) => run,
            None => {
                plain = self.unjoined();
                Run::of(&plain, costs).ok_or(Error::Deadlock { cycle: vec![] })?
            }
        };
        run.transfers();
        let ranks = self.ranks.len();
        let makespan = run.free.iter().copied().fold(0.0, f64::max);
        let worked: f64 = run.busy.iter().sum();
        let fraction = match makespan > 0.0 {
            true => 1.0 - worked / (makespan * ranks as f64),
            false => 0.0,
        };
        run.waits.sort_by_key(|w| (w.rank, w.position));
        Ok(Timing {
            makespan,
            spans: run.spans,
            bubble: run.busy.iter().map(|b| makespan - b).collect(),
            busy: run.busy,
            fraction,
            bound: self.bound(costs),
            waits: run.waits,
            live: run.live,
            peak: proof.peak().to_vec(),
        })
    }

    /// Whose action makes what this one waits for.
    fn cause(&self, action: Action) -> (usize, Action) {
        let stage = self.source(action).unwrap_or(action.stage);
        let rank = self.owner[stage];
        let makes = |a: &&Action| {
            let same = a.stage == stage && a.micro == action.micro;
            same && match action.kind {
                Kind::F => a.kind == Kind::F,
                _ => matches!(a.kind, Kind::B | Kind::I),
            }
        };
        let found = self.ranks[rank].iter().find(makes);
        (rank, found.copied().unwrap_or(action))
    }

    /// No schedule with this placement is shorter: a rank cannot begin before the first of its
    /// stages has an input, and then has all its work to do; and a micro-batch must get through.
    pub fn bound(&self, costs: &Costs) -> f64 {
        let stages = self.stages();
        let hop = |a: usize, b: usize| match self.owner[a] == self.owner[b] {
            true => 0.0,
            false => costs.transfer,
        };
        let all = |s: usize| {
            let cost = costs.stage(s);
            cost.f + cost.b.min(cost.i + cost.w)
        };
        // Joined passes may hide some of the work, at most the shorter one of each pair.
        let hides = |s: usize| {
            let cost = costs.stage(s);
            cost.f.min(cost.b) * costs.overlap
        };
        let mut arrives = vec![0.0; stages];
        for s in 1..stages {
            arrives[s] = arrives[s - 1] + costs.stage(s - 1).f + hop(s - 1, s);
        }
        let mut through = arrives.last().copied().unwrap_or(0.0);
        through += costs.stage(stages.saturating_sub(1)).f;
        for s in (0..stages).rev() {
            let cost = costs.stage(s);
            through += match s {
                0 => cost.b.min(cost.i + cost.w),
                _ => cost.b.min(cost.i) + hop(s, s - 1),
            };
        }
        let rank = |rank: usize| {
            let own = self.stages_of(rank);
            let work: f64 = own.iter().map(|s| (all(*s) - hides(*s)).max(0.0)).sum();
            own.first().map_or(0.0, |s| arrives[*s]) + work * self.micros as f64
        };
        (0..self.ranks.len()).map(rank).fold(through, f64::max)
    }
}

/// Lists that are gone through with a clock.
struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// When forward and backward results of a stage and micro-batch are made; not a number: not yet.
    made: Vec<[f64; 2]>,
    spans: Vec<Vec<Span>>,
    free: Vec<f64>,
    busy: Vec<f64>,
    live: Vec<Vec<(f64, usize)>>,
    waits: Vec<Wait>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, costs: &'a Costs) -> Run<'a> {
        let none = Span {
            start: 0.0,
            end: 0.0,
        };
        let ranks = schedule.ranks.len();
        let spans = schedule.ranks.iter().map(|l| vec![none; l.len()]);
        Run {
            schedule,
            costs,
            made: vec![[f64::NAN; 2]; schedule.stages() * schedule.micros],
            spans: spans.collect(),
            free: vec![0.0; ranks],
            busy: vec![0.0; ranks],
            live: vec![vec![(0.0, 0)]; ranks],
            waits: vec![],
        }
    }

    /// All passes of all ranks; nothing if joined ones wait for each other.
    fn of(schedule: &'a Schedule, costs: &'a Costs) -> Option<Run<'a>> {
        let mut run = Run::new(schedule, costs);
        let mut at = vec![0; schedule.ranks.len()];
        let mut moved = true;
        while moved {
            moved = false;
            for (rank, at) in at.iter_mut().enumerate() {
                while let Some(length) = run.turn(rank, *at) {
                    *at += length;
                    moved = true;
                }
            }
        }
        let through = at.iter().zip(&schedule.ranks).all(|(at, l)| *at == l.len());
        through.then_some(run)
    }

    /// Does what is at a position, with what is joined to it: how many actions that were, or nothing
    /// if it cannot begin yet.
    fn turn(&mut self, rank: usize, from: usize) -> Option<usize> {
        let list = &self.schedule.ranks[rank];
        let joined = list[from..].iter().take_while(|a| a.joined).count();
        let turn = list.get(from..from + joined + 1)?;
        let mut start = self.free[rank];
        let mut last = None;
        for (i, action) in turn.iter().enumerate() {
            let ready = self.ready(*action)?;
            if ready > start {
                start = ready;
                last = Some(i);
            }
        }
        if let Some(i) = last {
            let (peer, needs) = self.schedule.cause(turn[i]);
            self.waits.push(Wait {
                rank,
                position: from + i,
                action: turn[i],
                span: Span {
                    start: self.free[rank],
                    end: start,
                },
                peer,
                needs,
            });
        }
        let costs = turn.iter().map(|a| self.costs.of(*a));
        let shortest = costs.clone().fold(f64::INFINITY, f64::min);
        let hidden = shortest * self.costs.overlap * joined as f64;
        let end = start + costs.sum::<f64>() - if joined > 0 { hidden } else { 0.0 };
        let mut begin = start;
        for (i, action) in turn.iter().enumerate() {
            let long = self.costs.of(*action);
            // The last one of several ends with them.
            let (from_, to) = match joined > 0 && i == joined {
                true => (end - long, end),
                false => (begin, begin + long),
            };
            begin = to;
            self.spans[rank][from + i] = Span {
                start: from_,
                end: to,
            };
            let own = action.stage * self.schedule.micros + action.micro;
            let alive = self.live[rank].last().map_or(0, |l| l.1);
            match action.kind {
                Kind::F => {
                    self.made[own][0] = end;
                    self.live[rank].push((from_, alive + 1));
                }
                Kind::B | Kind::I => self.made[own][1] = end,
                _ => {}
            }
            if matches!(action.kind, Kind::B | Kind::W) {
                self.live[rank].push((to, alive - 1));
            }
        }
        self.busy[rank] += end - start;
        self.free[rank] = end;
        Some(turn.len())
    }

    /// When what an action takes of another stage is there, if it is made.
    fn ready(&self, action: Action) -> Option<f64> {
        let Some(source) = self.schedule.source(action) else {
            return Some(0.0);
        };
        let column = usize::from(action.kind != Kind::F);
        let at = self.made[source * self.schedule.micros + action.micro][column];
        let apart = self.schedule.owner[source] != self.schedule.owner[action.stage];
        let at = at + if apart { self.costs.transfer } else { 0.0 };
        (!at.is_nan()).then_some(at)
    }

    /// Transfers begin when what they carry is made.
    fn transfers(&mut self) {
        for (rank, list) in self.schedule.ranks.iter().enumerate() {
            for (position, action) in list.iter().enumerate() {
                let (stage, column) = match action.kind {
                    Kind::SendF => (action.stage, 0),
                    Kind::RecvF => (action.stage.saturating_sub(1), 0),
                    Kind::SendB => (action.stage, 1),
                    Kind::RecvB => (action.stage + 1, 1),
                    _ => continue,
                };
                let start = self.made[stage * self.schedule.micros + action.micro][column];
                let end = start + self.costs.transfer;
                self.spans[rank][position] = Span { start, end };
            }
        }
    }
}
