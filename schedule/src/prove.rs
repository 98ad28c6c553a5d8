//! The proof that a schedule runs.

use crate::{Action, Error, Fault, Kind, Result, Schedule, Stuck};
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// What a schedule must stay within.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// How many activations each rank may have alive, from the forward pass to the end of the
    /// backward pass. Nothing: any number. One number: each rank.
    pub live: Vec<usize>,
}

impl Limits {
    /// No limits.
    pub fn none() -> Limits {
        Limits::default()
    }

    /// The same for each rank.
    pub fn live(limit: usize) -> Limits {
        Limits { live: vec![limit] }
    }

    fn of(&self, rank: usize) -> usize {
        let all = self.live.first().filter(|_| self.live.len() == 1);
        *self.live.get(rank).or(all).unwrap_or(&usize::MAX)
    }
}

/// A schedule that runs to its end: what an executor takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    schedule: Schedule,
    peak: Vec<usize>,
    order: Vec<(usize, usize)>,
}

impl Proof {
    /// What was proven.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The most activations that each rank has alive.
    pub fn peak(&self) -> &[usize] {
        &self.peak
    }

    /// An order of all actions, as (rank, position), in which each finds what it needs: a process
    /// that has all ranks runs them in this one. A receive comes right after its send.
    pub fn order(&self) -> &[(usize, usize)] {
        &self.order
    }
}

/// Where each action is: (rank, position).
type Places = HashMap<(Kind, usize, usize), (usize, usize), BuildHasherDefault<Mix>>;

/// Actions are small numbers that nobody picks to collide: one multiplication spreads them.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

fn key(action: Action) -> (Kind, usize, usize) {
    (action.kind, action.stage, action.micro)
}

/// What the check of one list after the other is made of.
struct Check<'a> {
    schedule: &'a Schedule,
    places: Places,
    transfers: bool,
    peak: Vec<usize>,
}

impl Schedule {
    /// Proves that every pass is done once and in order, that no rank has more activations alive
    /// than allowed, that each send has its receive, and that nobody waits for ever even if sends
    /// complete only when their receive is reached.
    ///
    /// Without any send and receive in the lists, results of other ranks count as there when they are
    /// made: [`with_transfers`](Schedule::with_transfers) says how they get there.
    ///
    /// ```
    /// use anymesh_schedule::{Limits, Schedule};
    /// let own = Schedule::from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")?;
    /// let error = own.prove(&Limits::live(1)).unwrap_err();
    /// assert_eq!(error.to_string(), "rank 0, position 1, 0F1: 2 activations are alive after it, at most 1 are allowed");
    /// let crossed = Schedule::from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")?;
    /// assert!(crossed.prove(&Limits::live(2)).is_ok());
    /// let stuck = Schedule::from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")?.prove(&Limits::none()).unwrap_err();
    /// assert_eq!(stuck.to_string(), "deadlock: \
    ///     rank 0 at position 1 (0B0) waits for rank 1 to reach 1B0; \
    ///     rank 1 at position 0 (1F1) waits for rank 0 to reach 0F1");
    /// # Ok::<(), anymesh_schedule::Error>(())
    /// ```
    pub fn prove(&self, limits: &Limits) -> Result<Proof> {
        self.check_shape(limits)?;
        let mut check = Check {
            schedule: self,
            places: Places::default(),
            transfers: self.has_transfers(),
            peak: vec![0; self.ranks.len()],
        };
        for rank in 0..self.ranks.len() {
            check.list(rank, limits.of(rank))?;
        }
        check.complete()?;
        let order = check.order()?;
        Ok(Proof {
            schedule: self.clone(),
            peak: check.peak,
            order,
        })
    }

    fn check_shape(&self, limits: &Limits) -> Result<()> {
        let number = |what, got: usize, valid: String| Error::Number {
            what,
            got: got.to_string(),
            valid,
        };
        let ranks = self.ranks.len();
        if self.owner.is_empty() || self.micros == 0 || ranks == 0 {
            let (what, got) = match (self.owner.len(), self.micros) {
                (0, _) => ("the number of stages", 0),
                (_, 0) => ("the number of micro-batches", 0),
                _ => ("the number of ranks", 0),
            };
            return Err(number(what, got, "at least 1 is needed".into()));
        }
        if let Some(owner) = self.owner.iter().find(|r| **r >= ranks) {
            let valid = format!("there are lists for {ranks} ranks only");
            return Err(number("the rank of a stage", *owner, valid));
        }
        if limits.live.len() > 1 && limits.live.len() != ranks {
            let valid = format!("give one for all, or one for each of {ranks} ranks");
            return Err(number("the number of limits", limits.live.len(), valid));
        }
        Ok(())
    }
}

impl Check<'_> {
    /// The actions of a rank one by one.
    fn list(&mut self, rank: usize, limit: usize) -> Result<()> {
        let s = self.schedule;
        let mut live = 0usize;
        for (position, action) in s.ranks[rank].iter().copied().enumerate() {
            let wrong = |fault| Error::Invalid {
                rank,
                position,
                action,
                fault,
            };
            if action.joined {
                let next = s.ranks[rank].get(position + 1);
                if !action.kind.computes() || !next.is_some_and(|n| n.kind.computes()) {
                    return Err(wrong(Fault::Joined));
                }
            }
            if action.kind == Kind::Idle {
                continue;
            }
            if action.stage >= s.stages() {
                return Err(wrong(Fault::Stage { stages: s.stages() }));
            }
            if action.micro >= s.micros {
                return Err(wrong(Fault::Micro { micros: s.micros }));
            }
            if s.owner[action.stage] != rank {
                let owner = s.owner[action.stage];
                return Err(wrong(Fault::Owner { owner }));
            }
            for kind in excluded(action.kind) {
                let same = Action::new(*kind, action.stage, action.micro);
                if let Some((_, first)) = self.places.get(&key(same)) {
                    return Err(wrong(Fault::Twice {
                        first: *first,
                        as_: same,
                    }));
                }
            }
            if let Some(needs) = self.lacks(action) {
                return Err(wrong(Fault::Before { needs }));
            }
            if action.kind.transfers() && self.other(action).is_none() {
                return Err(wrong(Fault::Needless));
            }
            self.places.insert(key(action), (rank, position));
            match action.kind {
                Kind::F => live += 1,
                Kind::B | Kind::W => live -= 1,
                _ => {}
            }
            if live > limit {
                return Err(wrong(Fault::Live { live, limit }));
            }
            self.peak[rank] = self.peak[rank].max(live);
        }
        Ok(())
    }

    /// What an action needs of its own rank's list and that is not before it.
    fn lacks(&self, action: Action) -> Option<Action> {
        let s = self.schedule;
        let (stage, micro) = (action.stage, action.micro);
        let at = |kind, stage| Action::new(kind, stage, micro);
        let has = |action: Action| self.places.contains_key(&key(action));
        // The backward pass of a stage, whole or its first half.
        let back = |stage| match has(at(Kind::I, stage)) {
            true => at(Kind::I, stage),
            false => at(Kind::B, stage),
        };
        let own = match action.kind {
            Kind::B | Kind::I | Kind::SendF => Some(at(Kind::F, stage)),
            Kind::W => Some(at(Kind::I, stage)),
            Kind::SendB => Some(back(stage)),
            _ => None,
        };
        let other = s.source(action).and_then(|source| {
            let here = s.owner[source] == s.owner[stage];
            match (action.kind == Kind::F, here) {
                (true, true) => Some(at(Kind::F, source)),
                (false, true) => Some(back(source)),
                (true, false) => self.transfers.then(|| at(Kind::RecvF, stage)),
                (false, false) => self.transfers.then(|| at(Kind::RecvB, stage)),
            }
        });
        own.into_iter().chain(other).find(|needs| !has(*needs))
    }

    /// The other half of a send or a receive, and whose list it is in.
    fn other(&self, action: Action) -> Option<(Action, usize)> {
        let (kind, stage) = match action.kind {
            Kind::SendF => (Kind::RecvF, action.stage + 1),
            Kind::RecvB => (Kind::SendB, action.stage + 1),
            Kind::RecvF => (Kind::SendF, action.stage.checked_sub(1)?),
            Kind::SendB => (Kind::RecvB, action.stage.checked_sub(1)?),
            _ => return None,
        };
        let peer = *self.schedule.owner.get(stage)?;
        let apart = peer != self.schedule.owner[action.stage];
        apart.then(|| (Action::new(kind, stage, action.micro), peer))
    }

    /// Everything that must be done is, and each transfer has both halves.
    fn complete(&self) -> Result<()> {
        let s = self.schedule;
        let has = |kind, stage, micro| self.places.contains_key(&(kind, stage, micro));
        for stage in 0..s.stages() {
            for micro in 0..s.micros {
                let missing = match has(Kind::I, stage, micro) {
                    _ if !has(Kind::F, stage, micro) => Some(Kind::F),
                    true => (!has(Kind::W, stage, micro)).then_some(Kind::W),
                    false => (!has(Kind::B, stage, micro)).then_some(Kind::B),
                };
                if let Some(kind) = missing {
                    let rank = s.owner[stage];
                    return Err(Error::Invalid {
                        rank,
                        position: s.ranks[rank].len(),
                        action: Action::new(kind, stage, micro),
                        fault: Fault::Missing,
                    });
                }
            }
        }
        for (rank, list) in s.ranks.iter().enumerate() {
            for (position, action) in list.iter().enumerate() {
                let Some((needs, peer)) = self.other(*action) else {
                    continue;
                };
                if !self.places.contains_key(&key(needs)) {
                    return Err(Error::Invalid {
                        rank,
                        position,
                        action: *action,
                        fault: Fault::Unmatched { needs, peer },
                    });
                }
            }
        }
        Ok(())
    }

    /// What an action waits for in another rank's list: the rank and the position there.
    fn awaited(&self, action: Action) -> Option<(usize, usize)> {
        if let Some((other, _)) = self.other(action) {
            return self.places.get(&key(other)).copied();
        }
        let source = self.schedule.source(action)?;
        let kinds: &[Kind] = match action.kind {
            Kind::F => &[Kind::F],
            _ => &[Kind::B, Kind::I],
        };
        kinds
            .iter()
            .find_map(|kind| self.places.get(&(*kind, source, action.micro)).copied())
    }

    /// Runs the lists: each rank goes on as long as what it waits for is there.
    fn order(&self) -> Result<Vec<(usize, usize)>> {
        let s = self.schedule;
        let mut at = vec![0; s.ranks.len()];
        let mut order = Vec::with_capacity(s.ranks.iter().map(Vec::len).sum());
        // Ranks that may be able to go on.
        let mut awake: Vec<usize> = (0..at.len()).rev().collect();
        // Who waits for each rank to get on.
        let mut waiting: Vec<Vec<usize>> = vec![vec![]; at.len()];
        while let Some(rank) = awake.pop() {
            while let Some(action) = s.ranks[rank].get(at[rank]).copied() {
                let now = (rank, at[rank]);
                match self.awaited(action) {
                    Some((peer, position)) if action.kind.transfers() => {
                        if at[peer] != position {
                            waiting[peer].push(rank);
                            break;
                        }
                        let send = matches!(action.kind, Kind::SendF | Kind::SendB);
                        let both = [now, (peer, position)];
                        order.extend(if send { both } else { [both[1], both[0]] });
                        at[peer] += 1;
                        awake.push(peer);
                        awake.append(&mut waiting[peer]);
                    }
                    Some((peer, position)) if at[peer] <= position => {
                        waiting[peer].push(rank);
                        break;
                    }
                    _ => order.push(now),
                }
                at[rank] += 1;
                awake.append(&mut waiting[rank]);
            }
        }
        match (0..at.len()).find(|r| at[*r] < s.ranks[*r].len()) {
            None => Ok(order),
            Some(rank) => Err(Error::Deadlock {
                cycle: self.cycle(rank, &at),
            }),
        }
    }

    /// The ranks that wait for each other, found from one that waits.
    fn cycle(&self, from: usize, at: &[usize]) -> Vec<Stuck> {
        let mut path: Vec<Stuck> = vec![];
        let mut rank = from;
        loop {
            if let Some(start) = path.iter().position(|stuck| stuck.rank == rank) {
                return path.split_off(start);
            }
            let action = self.schedule.ranks[rank][at[rank]];
            let Some((peer, position)) = self.awaited(action) else {
                return path;
            };
            path.push(Stuck {
                rank,
                position: at[rank],
                action,
                peer,
                needs: self.schedule.ranks[peer][position],
            });
            rank = peer;
        }
    }
}

/// Of what at most one may be done for a stage and a micro-batch.
fn excluded(kind: Kind) -> &'static [Kind] {
    match kind {
        Kind::F => &[Kind::F],
        Kind::B => &[Kind::B, Kind::I, Kind::W],
        Kind::I => &[Kind::I, Kind::B],
        Kind::W => &[Kind::W, Kind::B],
        Kind::SendF => &[Kind::SendF],
        Kind::RecvF => &[Kind::RecvF],
        Kind::SendB => &[Kind::SendB],
        Kind::RecvB => &[Kind::RecvB],
        Kind::Idle => &[],
    }
}
