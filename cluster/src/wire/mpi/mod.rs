//! Bytes between the processes of an MPI job, by its messages between two.
//!
//! To every process that it sends something in a call, a process first sends a head: the number of
//! the call between the two, and a table with digest and size of every message. The receiver
//! compares it with what it expects, and only then gives MPI the memory of tensors: bytes of
//! another call, or of a program that differs, never reach one. Small messages are packed behind
//! the table; the others go from tensor to tensor without a copy of ours.
//!
//! Why not MPI's collectives? They sum in an order of their own, have no deadline, and give no sign
//! of who is missing. What is exchanged here is waited for with tests that come back, so a process
//! that is dead or stopped costs a deadline and no more.
//!
//! Memory is the host's, also where this MPI could use that of CUDA devices: engines for those are
//! others.
//!
//! # The end
//! A call that is given up leaves its memory to MPI for ever, since MPI may still use it, and its
//! wire is dead. `MPI_Finalize` waits for all processes, and comes but once: it is called when a
//! process ends whose last cluster was left in good order. After a failure, or where a program
//! leaves by `exit` with a cluster still there, MPI is not finalised, and launchers say so.

mod flight;
mod library;
mod requests;
#[cfg(test)]
mod tests;

use super::{Broken, Receive, Send, Wait, Wire};
use crate::meet;
use anymesh_core::{Error, transport::Incoming};
use flight::Flight;
use library::Trouble;
pub(crate) use library::World;
use std::{
    ffi::c_int,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// MPI counts bytes in `i32`.
const PIECE: usize = 1 << 30;

/// The wire of one cluster.
#[derive(Debug)]
pub(crate) struct Mpi {
    world: &'static World,
    /// Of every process of the cluster, its rank in the MPI job.
    ranks: Vec<c_int>,
    /// For heads; the next is for what follows them.
    tag: c_int,
    piece: usize,
    state: Mutex<State>,
}

/// The number of the next cluster of this job. Processes that build one together have the same,
/// which the first of them says.
static NEXT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct State {
    /// A call did not come to its end, so nobody knows what the next message would be.
    dead: bool,
    /// How many calls have sent something to each process, and received from it.
    sent: Vec<u64>,
    received: Vec<u64>,
}

fn refused(detail: String) -> Error {
    Error::Transport {
        op: "init",
        detail,
        ranks: vec![0],
    }
}

/// What is wrong with MPI, as an error of the start.
pub(crate) fn failed(trouble: Trouble, within: Duration) -> Error {
    match trouble {
        Trouble::Late(call) => Error::Timeout {
            op: "init",
            seconds: within.as_secs_f64(),
            missing: [].into(),
            detail: format!("; {}", Trouble::Late(call)),
        },
        trouble => Error::Transport {
            op: "init",
            detail: trouble.to_string(),
            ranks: vec![],
        },
    }
}

impl Mpi {
    /// Between the processes that have met.
    pub(crate) fn connect(met: &meet::World, until: Instant) -> Result<Self, Error> {
        let within = until.saturating_duration_since(Instant::now());
        let world = World::join(until).map_err(|e| failed(e, within))?;
        let control = &met.control;
        if met.guest.card.process != world.rank() {
            let (said, is) = (met.guest.card.process, world.rank());
            return Err(refused(format!(
                "process {said} is {is} in the job of MPI: start it with mpirun or srun, or set ANYMESH_TRANSPORT=tcp"
            )));
        }
        let key = format!("mpi {}", met.epoch);
        if control.process == 0 {
            let number = NEXT.load(Ordering::Relaxed);
            control.set(&key, number.to_string().as_bytes())?;
        }
        let number = String::from_utf8(control.get(&key, within)?).unwrap_or_default();
        let unreadable = |_| refused(format!("'{number}' is no number of a cluster"));
        let number: usize = number.parse().map_err(unreadable)?;
        NEXT.store(number + 1, Ordering::Relaxed);
        let ranks: Vec<usize> = control.cards.iter().map(|card| card.process).collect();
        Self::new(world, &ranks, number).map_err(|e| failed(e, within))
    }

    /// Between the processes of a cluster, which have these ranks in the MPI job. Clusters that one
    /// job builds after another have different `number`s, so that what was left of one is not
    /// taken for a message of the next.
    pub(crate) fn new(
        world: &'static World,
        ranks: &[usize],
        number: usize,
    ) -> Result<Self, Trouble> {
        let bad = |text| Err(Trouble::Failed("a cluster over MPI", text));
        if let Some(rank) = ranks.iter().find(|rank| **rank >= world.size()) {
            let size = world.size();
            return bad(format!("rank {rank} is not in the job of {size} processes"));
        }
        // MPI promises tags up to 32767.
        let tag = match c_int::try_from(number) {
            Ok(number) if number < 16_000 => 2 * number,
            _ => return bad(format!("there are no tags for cluster {number} of one job")),
        };
        world.in_use();
        Ok(Self {
            world,
            ranks: ranks.iter().map(|rank| *rank as c_int).collect(),
            tag,
            piece: PIECE,
            state: Mutex::new(State {
                dead: false,
                sent: vec![0; ranks.len()],
                received: vec![0; ranks.len()],
            }),
        })
    }
}

impl Wire for Mpi {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn transfer(
        &self,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
        wait: &dyn Wait,
    ) -> Result<Vec<Incoming>, Broken> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.dead || !self.world.alive() {
            return Err(Broken::Stopped);
        }
        // Unless the call comes to its end, also where it unwinds.
        state.dead = true;
        let mut flight = Flight::new(self, sends, memories, receives);
        let outcome = flight.start(&mut state).and_then(|()| flight.finish(wait));
        match outcome {
            Ok(()) => {
                state.dead = false;
                Ok(flight.land())
            }
            Err(broken) => {
                library::give_up();
                flight.abandon();
                Err(broken)
            }
        }
    }

    fn flush(&self, wait: &dyn Wait) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.dead && !wait.stopped() {
            self.world.unused();
        }
    }
}
