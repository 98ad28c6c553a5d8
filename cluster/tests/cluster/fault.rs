//! A transport that lets its process meet with an accident before a certain call.

use crate::train::say;
use anymesh_core::{
    Error, Mesh, Reduction, Result, Tensor,
    transport::{Call, Message, Part, Pending, Transport},
};
use signal_hook::{consts, low_level::raise};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// What happens and when: `HOW RANK CALL`, such as `kill 2 17`; the call may be `start`. Several are
/// separated by `;`.
pub(crate) const FAULT: &str = "ANYMESH_TEST_FAULT";

static CALLS: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Debug)]
pub(crate) struct Fault {
    how: String,
    at: Option<u64>,
}

impl Fault {
    /// How and when, for a process.
    fn read(rank: usize) -> Option<(String, String)> {
        let text = std::env::var(FAULT).ok()?;
        let own = |fault: &str| {
            let mut words = fault.split(' ').map(str::to_string);
            let (how, who) = (words.next()?, words.next()?.parse::<usize>().ok()?);
            words.next().filter(|_| who == rank).map(|at| (how, at))
        };
        text.split(';').find_map(own)
    }

    /// The fault of a process; one that never strikes counts calls.
    pub(crate) fn from_env(rank: usize) -> Self {
        let (how, at) = Self::read(rank).unwrap_or_default();
        let at = at.parse().ok();
        Self { how, at }
    }

    /// The fault of this process before it has met anybody.
    pub(crate) fn at_start() -> Option<Self> {
        let (how, at) = Self::read(std::env::var("RANK").ok()?.parse().ok()?)?;
        (at == "start").then_some(Self { how, at: None })
    }

    /// How many calls were made on meshes with a fault.
    pub(crate) fn calls() -> u64 {
        CALLS.load(Ordering::Relaxed)
    }

    pub(crate) fn on(self, mesh: &Mesh) -> Mesh {
        match mesh.transport() {
            Some(inner) => mesh.with_transport(Arc::new(Deadly {
                inner: inner.clone(),
                fault: self,
            })),
            None => mesh.clone(),
        }
    }

    /// Never returns where the process dies of it.
    pub(crate) fn strike(&self) {
        say("fault");
        match self.how.as_str() {
            "kill" => drop(raise(consts::SIGKILL)),
            "stop" => drop(raise(consts::SIGSTOP)),
            "delay" => thread::sleep(Duration::from_secs(7)),
            "exit" => std::process::exit(0),
            "panic" => {
                std::panic::set_hook(Box::new(|_| ()));
                panic!("a panic that the test wants")
            }
            // Somewhere inside of the call.
            "during" => drop(thread::spawn(|| {
                let micros = std::process::id() % 400;
                thread::sleep(Duration::from_micros(micros.into()));
                raise(consts::SIGKILL)
            })),
            _ => {}
        }
    }
}

#[derive(Debug)]
struct Deadly {
    inner: Arc<dyn Transport>,
    fault: Fault,
}

impl Deadly {
    fn count(&self, mesh: &Mesh) -> Result<()> {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        if self.fault.at == Some(call) {
            self.fault.strike();
            if self.fault.how == "error" {
                // As ops do with an error that others cannot have.
                let error = Error::argument("test", "fault", "an error of one process");
                let rank = mesh.addressable().next().unwrap_or(0);
                self.inner.report(mesh.ids()[rank], &error);
                return Err(error);
            }
        }
        Ok(())
    }
}

type Answer = Result<Vec<Option<Tensor>>>;

impl Transport for Deadly {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner.deadline()
    }

    fn report(&self, rank: usize, error: &Error) {
        self.inner.report(rank, error)
    }

    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }

    fn start(&self, mesh: &Mesh, call: Call) -> Result<Box<dyn Pending>> {
        self.count(mesh)?;
        self.inner.start(mesh, call)
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Answer {
        self.count(mesh)?;
        self.inner.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.count(mesh)?;
        self.inner.barrier(mesh, group)
    }

    fn all_reduce(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction) -> Answer {
        self.count(mesh)?;
        self.inner.all_reduce(mesh, parts, reduction)
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Answer {
        self.count(mesh)?;
        self.inner.all_gather(mesh, parts, dim)
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Answer {
        self.count(mesh)?;
        self.inner.reduce_scatter(mesh, parts, reduction, dim)
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Answer {
        self.count(mesh)?;
        self.inner.broadcast(mesh, root, group)
    }

    fn all_to_all(&self, mesh: &Mesh, parts: &[Part], cut: usize, join: usize) -> Answer {
        self.count(mesh)?;
        self.inner.all_to_all(mesh, parts, cut, join)
    }
}
