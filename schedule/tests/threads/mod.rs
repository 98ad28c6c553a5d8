//! Ranks as threads that know nothing of the proof: each goes through its list, computes with what it has,
//! and meets its partner for every send.
//!
//! A thread that must wait says so under the one lock; when all that are not done wait, nobody can ever go
//! on, so that a deadlock is known without a clock.

use anymesh_schedule::{Action, Kind, Schedule};
use std::{
    collections::HashSet,
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};

/// How a run ended.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    /// Everything was done, with so many activations alive at most.
    Done { peak: Vec<usize> },
    /// An action found something missing, or something was left out.
    Failed,
    /// All that were left waited.
    Deadlock,
}

/// What threads share.
struct Shared {
    /// Which send or receive each rank stands at.
    at: Vec<Option<Action>>,
    /// Who was met and may go on.
    met: Vec<bool>,
    waiting: usize,
    running: usize,
    failed: bool,
    deadlock: bool,
}

struct Meeting {
    shared: Mutex<Shared>,
    /// One for each rank, so that only who is met wakes up.
    woken: Vec<Condvar>,
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no thread panics")
    }

    fn stop(&self, shared: &mut Shared) {
        if shared.waiting == shared.running && shared.running > 0 {
            shared.deadlock = true;
        }
        if shared.deadlock {
            self.woken.iter().for_each(Condvar::notify_all);
        }
    }

    /// Meets the rank that stands, or will stand, at the other half. Whether both met.
    fn meet(&self, rank: usize, own: Action, peer: usize, other: Action) -> bool {
        let mut shared = self.lock();
        if shared.at[peer] == Some(other) {
            shared.at[peer] = None;
            shared.met[peer] = true;
            // The partner goes on from now, whether it is awake yet or not.
            shared.waiting -= 1;
            self.woken[peer].notify_all();
            return true;
        }
        shared.at[rank] = Some(own);
        shared.waiting += 1;
        self.stop(&mut shared);
        while !shared.met[rank] && !shared.deadlock {
            shared = self.woken[rank].wait(shared).expect("no thread panics");
        }
        std::mem::take(&mut shared.met[rank])
    }

    /// A thread ends: whoever waits for it waits for ever.
    fn leave(&self, failed: bool) {
        let mut shared = self.lock();
        shared.running -= 1;
        shared.failed |= failed;
        self.stop(&mut shared);
    }
}

/// What a rank has.
#[derive(Default)]
struct Memory {
    /// Inputs and outputs of stages, gradients of outputs and of inputs.
    x: HashSet<(usize, usize)>,
    y: HashSet<(usize, usize)>,
    dy: HashSet<(usize, usize)>,
    dx: HashSet<(usize, usize)>,
    /// Activations that are alive, and those of which only the weights' gradients are missing.
    alive: HashSet<(usize, usize)>,
    half: HashSet<(usize, usize)>,
    weights: usize,
    peak: usize,
}

/// Runs lists with a thread for each rank.
pub(crate) fn run(schedule: &Schedule, limit: usize) -> Outcome {
    let ranks = schedule.ranks.len();
    let meeting = Meeting {
        shared: Mutex::new(Shared {
            at: vec![None; ranks],
            met: vec![false; ranks],
            waiting: 0,
            running: ranks,
            failed: false,
            deadlock: false,
        }),
        woken: (0..ranks).map(|_| Condvar::new()).collect(),
    };
    let explicit = schedule.ranks.iter().flatten().any(|a| a.kind.transfers());
    let alone = schedule.owner.iter().all(|r| *r == schedule.owner[0]);
    assert!(explicit || alone, "threads need transfers");
    let peak: Vec<usize> = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let meeting = &meeting;
                scope.spawn(move || {
                    let mut memory = Memory::default();
                    let through = schedule.ranks[rank]
                        .iter()
                        .try_for_each(|a| step(schedule, rank, *a, limit, &mut memory, meeting));
                    let own = schedule.owner.iter().filter(|r| **r == rank).count();
                    let all = memory.weights == own * schedule.micros && memory.alive.is_empty();
                    meeting.leave(through.is_none() || !all);
                    memory.peak
                })
            })
            .collect();
        let join = |t: thread::ScopedJoinHandle<'_, usize>| t.join().expect("no thread panics");
        threads.into_iter().map(join).collect()
    });
    let shared = meeting.lock();
    match (shared.deadlock, shared.failed) {
        (true, _) => Outcome::Deadlock,
        (_, true) => Outcome::Failed,
        _ => Outcome::Done { peak },
    }
}

/// One action; nothing if it cannot be done.
fn step(
    schedule: &Schedule,
    rank: usize,
    action: Action,
    limit: usize,
    memory: &mut Memory,
    meeting: &Meeting,
) -> Option<()> {
    let Action { stage, micro, .. } = action;
    let at = (stage, micro);
    let last = schedule.owner.len() - 1;
    let ok = |good: bool| good.then_some(());
    ok(stage <= last && micro < schedule.micros && schedule.owner[stage] == rank)?;
    // Results of a neighbour on the same rank need no transfer.
    let here = |other: usize| schedule.owner[other] == rank;
    match action.kind {
        Kind::F => {
            ok(stage == 0
                || memory.x.remove(&at)
                || (here(stage - 1) && memory.y.contains(&(stage - 1, micro))))?;
            ok(memory.y.insert(at) && memory.alive.insert(at))?;
            memory.peak = memory.peak.max(memory.alive.len());
            ok(memory.alive.len() <= limit)
        }
        Kind::B | Kind::I => {
            ok(stage == last
                || memory.dy.remove(&at)
                || (here(stage + 1) && memory.dx.contains(&(stage + 1, micro))))?;
            ok(memory.alive.contains(&at) && memory.dx.insert(at))?;
            if action.kind == Kind::I {
                return ok(memory.half.insert(at));
            }
            memory.weights += 1;
            ok(memory.alive.remove(&at))
        }
        Kind::W => {
            ok(memory.half.remove(&at) && memory.alive.remove(&at))?;
            memory.weights += 1;
            Some(())
        }
        Kind::SendF => {
            ok(stage < last && !here(stage + 1) && memory.y.remove(&at))?;
            let other = Action::new(Kind::RecvF, stage + 1, micro);
            ok(meeting.meet(rank, action, schedule.owner[stage + 1], other))
        }
        Kind::RecvF => {
            ok(stage > 0 && !here(stage - 1))?;
            let other = Action::new(Kind::SendF, stage - 1, micro);
            ok(meeting.meet(rank, action, schedule.owner[stage - 1], other))?;
            ok(memory.x.insert(at))
        }
        Kind::SendB => {
            ok(stage > 0 && !here(stage - 1) && memory.dx.remove(&at))?;
            let other = Action::new(Kind::RecvB, stage - 1, micro);
            ok(meeting.meet(rank, action, schedule.owner[stage - 1], other))
        }
        Kind::RecvB => {
            ok(stage < last && !here(stage + 1))?;
            let other = Action::new(Kind::SendB, stage + 1, micro);
            ok(meeting.meet(rank, action, schedule.owner[stage + 1], other))?;
            ok(memory.dy.insert(at))
        }
        Kind::Idle => Some(()),
    }
}
