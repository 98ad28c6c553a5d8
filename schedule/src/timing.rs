//! When everything happens, under costs.

use crate::{Action, Costs, Error, Kind, Limits, Result, Schedule};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A number as it is written by hand: not more digits than it has.
///
/// ```
/// assert_eq!([33.0, 0.1 + 0.2].map(anymesh_schedule::digits), ["33", "0.3"]);
/// ```
pub fn digits(x: f64) -> String {
    format!("{}", (x * 1e4).round() / 1e4)
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
    /// What it is the timing of.
    pub schedule: Schedule,
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

impl Timing {
    /// In a line: how long it takes and could take, how much of it is idle, what is alive at most.
    pub fn summary(&self) -> String {
        format!(
            "makespan {}, bound {}, idle {} %, at most {} activations alive",
            digits(self.makespan),
            digits(self.bound),
            (self.fraction * 1000.0).round() / 10.0,
            self.peak.iter().max().unwrap_or(&0)
        )
    }

    /// For each pair of ranks of which one waits for the other: who, for whom, how long together,
    /// and how often.
    pub fn waiting(&self) -> Vec<(usize, usize, f64, usize)> {
        let mut pairs: BTreeMap<(usize, usize), (f64, usize)> = BTreeMap::new();
        for wait in &self.waits {
            let pair = pairs.entry((wait.rank, wait.peer)).or_default();
            pair.0 += wait.span.end - wait.span.start;
            pair.1 += 1;
        }
        let each = pairs.into_iter();
        each.map(|((rank, peer), (long, times))| (rank, peer, long, times))
            .collect()
    }

    /// As JSON, with the actions of the schedule that it is the timing of.
    pub fn to_json(&self, schedule: &Schedule) -> Value {
        let lanes = schedule.ranks.iter().zip(&self.spans).map(|(list, spans)| {
            let each = list.iter().zip(spans).filter(|p| p.0.kind != Kind::Idle);
            let each = each.map(|(a, s)| json!([a.to_string(), s.start, s.end]));
            each.collect::<Vec<_>>()
        });
        let waits = self.waits.iter().map(|w| {
            json!({"rank": w.rank, "action": w.action.to_string(), "from": w.span.start,
                "until": w.span.end, "for_rank": w.peer, "for": w.needs.to_string()})
        });
        json!({
            "makespan": self.makespan, "bound": self.bound, "bubble_fraction": self.fraction,
            "busy": self.busy, "bubble": self.bubble, "peak_live_activations": self.peak,
            "ranks": lanes.collect::<Vec<_>>(), "waits": waits.collect::<Vec<_>>(),
        })
    }
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
            schedule: self.clone(),
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
}

/// Lists that are gone through with a clock.
struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    /// When forward and backward results of a stage and micro-batch are made; not a number: not yet.
    made: Vec<[f64; 2]>,
    /// What the backward results came of: `B` or `I`.
    back: Vec<Kind>,
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
            back: vec![Kind::B; schedule.stages() * schedule.micros],
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
            let (peer, needs) = self.cause(turn[i]);
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
                Kind::B | Kind::I => {
                    self.made[own][1] = end;
                    self.back[own] = action.kind;
                }
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

    /// Whose action makes what this one waits for.
    fn cause(&self, action: Action) -> (usize, Action) {
        let stage = self.schedule.source(action).unwrap_or(action.stage);
        let kind = match action.kind {
            Kind::F => Kind::F,
            _ => self.back[stage * self.schedule.micros + action.micro],
        };
        let needs = Action::new(kind, stage, action.micro);
        (self.schedule.owner[stage], needs)
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
