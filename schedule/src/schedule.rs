//! A schedule: what each rank does, in order.

use crate::{Action, Error, Kind, Limits, Result};

/// More passes than any run has; keeps a wrong number from eating all memory.
pub(crate) const MOST: usize = 1 << 22;

/// What each rank of a pipeline does, in order.
///
/// Nothing in it is trusted: [`prove`](Schedule::prove) says whether it can run.
///
/// ```
/// use anymesh_schedule::{Action, Limits, Placement, Schedule};
/// // Two stages, one micro-batch, by hand.
/// let own = Schedule {
///     name: "own".into(),
///     micros: 1,
///     owner: Placement::Loop.owners(2, 1),
///     ranks: vec![vec![Action::f(0, 0), Action::b(0, 0)], vec![Action::f(1, 0), Action::b(1, 0)]],
/// };
/// let proof = own.with_transfers()?.prove(&Limits::none())?;
/// assert_eq!(proof.peak(), [1, 1]);
/// assert_eq!(proof.schedule().to_csv(), "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
/// # Ok::<(), anymesh_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What it is called.
    pub name: String,
    /// Micro-batches of a step.
    pub micros: usize,
    /// For each stage the rank that has it.
    pub owner: Vec<usize>,
    /// For each rank what it does.
    pub ranks: Vec<Vec<Action>>,
}

/// Which rank has which stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Stage `s` is on rank `s % ranks`.
    Loop,
    /// Down and up again: with 4 ranks stages 0 to 7 are on ranks 0, 1, 2, 3, 3, 2, 1, 0.
    V,
}

impl Placement {
    /// The rank of each of `ranks * chunks` stages.
    pub fn owners(self, ranks: usize, chunks: usize) -> Vec<usize> {
        let rank = |s: usize| match (self, s / ranks % 2) {
            (Placement::V, 1) => ranks - 1 - s % ranks,
            _ => s % ranks,
        };
        (0..ranks * chunks).map(rank).collect()
    }
}

/// Refuses numbers that no schedule has.
pub(crate) fn check(ranks: usize, chunks: usize, micros: usize) -> Result<()> {
    let least = |what, got: usize| match got {
        0 => Err(Error::Number {
            what,
            got: "0".into(),
            valid: "at least 1 is needed".into(),
        }),
        _ => Ok(()),
    };
    least("the number of ranks", ranks)?;
    least("the number of chunks of a rank", chunks)?;
    least("the number of micro-batches", micros)?;
    match ranks
        .checked_mul(chunks)
        .and_then(|stages| stages.checked_mul(micros))
    {
        Some(all) if all <= MOST => Ok(()),
        _ => Err(Error::Number {
            what: "ranks * chunks * micro-batches",
            got: format!("{ranks} * {chunks} * {micros}"),
            valid: format!("at most {MOST} forward passes can be scheduled"),
        }),
    }
}

impl Schedule {
    /// In a line: its name, stages, ranks and micro-batches.
    pub fn title(&self) -> String {
        format!(
            "{}: {} stages on {} ranks, {} micro-batches",
            self.name,
            self.stages(),
            self.ranks.len(),
            self.micros
        )
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.owner.len()
    }

    /// The stages of a rank, in order.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        let stages = self.owner.iter().enumerate();
        stages.filter(|(_, r)| **r == rank).map(|p| p.0).collect()
    }

    /// Whether sends and receives are in the lists.
    pub fn has_transfers(&self) -> bool {
        self.ranks.iter().flatten().any(|a| a.kind.transfers())
    }

    /// The same without sends and receives.
    pub fn without_transfers(&self) -> Schedule {
        self.keeping(|kind| !kind.transfers())
    }

    /// The same without free slots.
    pub fn without_idle(&self) -> Schedule {
        self.keeping(|kind| kind != Kind::Idle)
    }

    fn keeping(&self, keep: impl Fn(Kind) -> bool) -> Schedule {
        let mut kept = self.clone();
        for list in &mut kept.ranks {
            list.retain(|a| keep(a.kind));
        }
        kept
    }

    /// Every backward pass in two halves, with all gradients of weights after everything else, in
    /// the order of the backward passes.
    pub fn with_weights_last(&self) -> Schedule {
        let mut split = self.clone();
        for list in &mut split.ranks {
            let mut weights = vec![];
            for action in list.iter_mut().filter(|a| a.kind == Kind::B) {
                action.kind = Kind::I;
                action.joined = false;
                weights.push(Action::w(action.stage, action.micro));
            }
            for action in list.iter_mut() {
                action.joined = false;
            }
            list.extend(weights);
        }
        split
    }

    /// What an action of computing makes for a neighbour on another rank: the send and the receive.
    pub(crate) fn transfer(&self, action: Action) -> Option<(Action, Action)> {
        let (send, recv, to) = match action.kind {
            Kind::F => (Kind::SendF, Kind::RecvF, action.stage + 1),
            Kind::B | Kind::I => (Kind::SendB, Kind::RecvB, action.stage.checked_sub(1)?),
            _ => return None,
        };
        let apart = *self.owner.get(to)? != self.owner[action.stage];
        apart.then(|| {
            (
                Action::new(send, action.stage, action.micro),
                Action::new(recv, to, action.micro),
            )
        })
    }

    /// The stage whose result an action of computing takes, if it is not its own stage's: of the
    /// stage before for `F`, of the stage after for `B` and `I`.
    pub(crate) fn source(&self, action: Action) -> Option<usize> {
        match action.kind {
            Kind::F => action.stage.checked_sub(1),
            Kind::B | Kind::I => Some(action.stage + 1).filter(|s| *s < self.stages()),
            _ => None,
        }
    }

    /// The same with a send after each result that another rank needs and a receive before it is
    /// used; transfers that are there already are put in anew.
    ///
    /// Ranks take turns, one action each, and a send and its receive are put at the ends of both
    /// lists in the same moment. So there is an order of all events in which nobody ever waits
    /// for a partner, and the lists run with sends that complete only when they are received.
    ///
    /// Receives stand where they can be posted, which may be before passes that do not need them: an
    /// executor that has to be fast posts them there and waits where the result is used.
    pub fn with_transfers(&self) -> Result<Schedule> {
        let plain = self.without_transfers();
        plain.prove(&Limits::none())?;
        let mut out = vec![vec![]; self.ranks.len()];
        // Which forward and backward results of a stage and micro-batch are made, and so received.
        let mut made = vec![[false; 2]; self.stages() * self.micros];
        let mut at = vec![0; self.ranks.len()];
        while (0..at.len()).any(|r| at[r] < plain.ranks[r].len()) {
            let mut moved = false;
            for rank in 0..at.len() {
                let list = &plain.ranks[rank];
                // Actions that are joined are one turn.
                let mut end = at[rank];
                while list.get(end).is_some_and(|a| a.joined) {
                    end += 1;
                }
                let turn = &list[at[rank]..list.len().min(end + 1)];
                let ready = turn.iter().all(|a| match plain.source(*a) {
                    Some(stage) => {
                        made[stage * self.micros + a.micro][usize::from(a.kind == Kind::F)]
                    }
                    None => true,
                });
                if turn.is_empty() || !ready {
                    continue;
                }
                out[rank].extend(turn.iter().copied().filter(|a| a.kind != Kind::Idle));
                for action in turn.iter().filter(|a| a.kind.computes()) {
                    if action.kind != Kind::W {
                        let result = &mut made[action.stage * self.micros + action.micro];
                        result[usize::from(action.kind == Kind::F)] = true;
                    }
                    if let Some((send, recv)) = plain.transfer(*action) {
                        out[rank].push(send);
                        out[plain.owner[recv.stage]].push(recv);
                    }
                }
                at[rank] += turn.len();
                moved = true;
            }
            if !moved {
                // Only what runs one after the other and not together comes here.
                return plain.unjoined().with_transfers();
            }
        }
        Ok(Schedule {
            ranks: out,
            ..plain
        })
    }

    /// The same with nothing joined.
    pub fn unjoined(&self) -> Schedule {
        let mut plain = self.clone();
        for action in plain.ranks.iter_mut().flatten() {
            action.joined = false;
        }
        plain
    }
}
