//! A transport that goes wrong on purpose.

use super::{Message, Part, Transport, check::fail};
use crate::{DType, Error, Mesh, Reduction, Result, Shape, Tensor, split};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// One thing that goes wrong. Calls of the transport are counted from 0; ranks are named by their
/// [ids](Mesh::ids), which sub-meshes keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails, whoever takes part.
    Fail {
        /// Which call.
        call: u64,
    },
    /// The rank comes late to the call, if it takes part. Later than the deadline is
    /// [`Error::Timeout`].
    Delay {
        /// Which call.
        call: u64,
        /// Who is late.
        rank: usize,
        /// How much.
        by: Duration,
    },
    /// From this call on the rank is dead: every call that it takes part in fails.
    Death {
        /// The first call it misses.
        call: u64,
        /// Who dies.
        rank: usize,
    },
}

impl Fault {
    /// A script for `calls` calls between ranks `0..ranks`, the same for the same seed: about one
    /// call in four fails or waits `by` for one rank. Nobody dies.
    pub fn script(seed: u64, calls: u64, ranks: usize, by: Duration) -> Vec<Fault> {
        let fault = |call: u64| match random(seed, call) {
            n if n % 8 == 0 => Some(Fault::Fail { call }),
            n if n % 8 == 1 => Some(Fault::Delay {
                call,
                rank: (n >> 32) as usize % ranks.max(1),
                by,
            }),
            _ => None,
        };
        (0..calls).filter_map(fault).collect()
    }
}

/// A well-mixed number for each seed and call (the finaliser of splitmix64).
fn random(seed: u64, call: u64) -> u64 {
    let z = seed.wrapping_add((call + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What went through a [`Faulty`] transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls, also those that failed.
    pub calls: u64,
    /// Calls that gave an error.
    pub failed: u64,
    /// Bytes that the ranks received in the calls that succeeded, all ranks together, with
    /// collectives counted as rings.
    pub bytes: u64,
}

/// A transport around another that follows a script of faults, and counts.
///
/// A fault strikes before anything is sent, so the inner transport and all tensors are as they
/// were, and the call can be repeated.
///
/// ```
/// # use anymesh_core::{DType, Error, Mesh, Tensor, transport::{Fault, Faulty, InProcess}};
/// # use std::sync::Arc;
/// # let device = anymesh_backend_cpu::device();
/// let transport = Arc::new(Faulty::new(Arc::new(InProcess), [Fault::Fail { call: 0 }]));
/// let mesh = Mesh::new("x=2", &device)?.with_transport(transport.clone());
/// let x = Tensor::arange(0, 4, 1, DType::I32, &device)?.to_mesh(&mesh, "[@x]")?;
/// assert!(matches!(x.full_tensor(), Err(Error::Transport { .. })));
/// assert_eq!(x.full_tensor()?.to_vec::<i32>()?, [0, 1, 2, 3]);
/// assert_eq!((transport.counts().calls, transport.counts().failed), (2, 1));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Transport>,
    name: String,
    deadline: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    faults: Vec<Fault>,
    counts: Counts,
}

impl Faulty {
    /// The inner transport with these faults, and its deadline.
    pub fn new(inner: Arc<dyn Transport>, faults: impl IntoIterator<Item = Fault>) -> Self {
        let (name, deadline) = (format!("faulty {}", inner.name()), inner.deadline());
        Self {
            inner,
            name,
            deadline,
            state: Mutex::new(State {
                faults: faults.into_iter().collect(),
                counts: Counts::default(),
            }),
        }
    }

    /// With another deadline for delays.
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Adds a fault to the script.
    pub fn inject(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Forgets the script: nothing goes wrong any more, and the dead live.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// What went through so far.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole after every statement, so a panic of another thread has not spoilt it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One call between `ranks` that moves `bytes`.
    fn call<R>(
        &self,
        op: &'static str,
        mesh: &Mesh,
        ranks: impl IntoIterator<Item = usize>,
        bytes: u64,
        run: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let mut ranks: Vec<usize> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let result = self.strike(op, mesh, &ranks).and_then(|()| run());
        let mut state = self.state();
        match result {
            Ok(_) => state.counts.bytes = state.counts.bytes.saturating_add(bytes),
            Err(_) => state.counts.failed += 1,
        }
        result
    }

    /// Counts the call, and does what the script says about it.
    fn strike(&self, op: &'static str, mesh: &Mesh, ranks: &[usize]) -> Result<()> {
        let who = |id: usize| {
            ranks
                .iter()
                .copied()
                .find(|r| mesh.ids().get(*r) == Some(&id))
        };
        let (mut dead, mut late, mut delay, mut fails) = (vec![], vec![], Duration::ZERO, false);
        let mut state = self.state();
        let now = state.counts.calls;
        state.counts.calls += 1;
        for fault in &state.faults {
            match *fault {
                Fault::Fail { call } => fails |= call == now,
                Fault::Death { call, rank } if call <= now => dead.extend(who(rank)),
                Fault::Delay { call, rank, by } if call == now => {
                    let Some(rank) = who(rank) else { continue };
                    delay = delay.max(by);
                    if self.deadline.is_some_and(|deadline| by > deadline) {
                        late.push(rank);
                    }
                }
                Fault::Death { .. } | Fault::Delay { .. } => {}
            }
        }
        drop(state);
        if !dead.is_empty() {
            return Err(fail(op, &dead, "the ranks are dead"));
        }
        if fails {
            return Err(fail(op, ranks, format!("call {now} was told to fail")));
        }
        sleep(self.deadline.map_or(delay, |deadline| delay.min(deadline)));
        match self.deadline {
            Some(deadline) if !late.is_empty() => Err(Error::Timeout {
                op,
                seconds: deadline.as_secs_f64(),
                missing: late.into(),
                detail: String::new(),
            }),
            _ => Ok(()),
        }
    }
}

fn sleep(time: Duration) {
    // A browser cannot sleep: there a delay within the deadline is none.
    #[cfg(not(target_family = "wasm"))]
    if !time.is_zero() {
        std::thread::sleep(time);
    }
    #[cfg(target_family = "wasm")]
    let _ = time;
}

fn ranks(parts: &[Part]) -> impl Iterator<Item = usize> + '_ {
    parts.iter().map(|p| p.rank)
}

/// A sum that stops at the largest number: what a mistaken call announces may be of any size.
fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// What all members together receive if every part goes to every other member.
fn to_all_others(parts: &[Part]) -> u64 {
    total(parts.iter().map(Part::bytes)).saturating_mul((parts.len() as u64).saturating_sub(1))
}

/// The same for parts of one size of which every member needs a piece.
fn pieces_to_others(parts: &[Part]) -> u64 {
    total(parts.iter().skip(1).map(Part::bytes))
}

/// What members receive if each keeps piece `i` of its part along `dim` and gives away the rest.
fn all_but_own(parts: &[Part], dim: usize) -> u64 {
    let given = |(i, part): (usize, &Part)| match part.shape.dims().get(dim) {
        Some(0) | None => 0,
        Some(n) => part.bytes() / *n as u64 * (n - split(*n, i, parts.len()).len()) as u64,
    };
    total(parts.iter().enumerate().map(given))
}

impl Transport for Faulty {
    fn name(&self) -> &str {
        &self.name
    }

    fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let ranks: Vec<usize> = messages.iter().flat_map(|m| [m.part.rank, m.to]).collect();
        let bytes = total(
            messages
                .iter()
                .filter(|m| m.to != m.part.rank)
                .map(|m| m.part.bytes()),
        );
        self.call("exchange", mesh, ranks, bytes, || {
            self.inner.exchange(mesh, messages)
        })
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.call("barrier", mesh, group.iter().copied(), 0, || {
            self.inner.barrier(mesh, group)
        })
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        self.call(
            "all_reduce",
            mesh,
            ranks(parts),
            pieces_to_others(parts).saturating_mul(2),
            || self.inner.all_reduce(mesh, parts, reduction),
        )
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        self.call(
            "all_gather",
            mesh,
            ranks(parts),
            to_all_others(parts),
            || self.inner.all_gather(mesh, parts, dim),
        )
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        self.call(
            "reduce_scatter",
            mesh,
            ranks(parts),
            pieces_to_others(parts),
            || self.inner.reduce_scatter(mesh, parts, reduction, dim),
        )
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Result<Vec<Option<Tensor>>> {
        let bytes = root
            .bytes()
            .saturating_mul((group.len() as u64).saturating_sub(1));
        self.call(
            "broadcast",
            mesh,
            group.iter().copied().chain([root.rank]),
            bytes,
            || self.inner.broadcast(mesh, root, group),
        )
    }

    fn all_to_all(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        cut: usize,
        join: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        self.call(
            "all_to_all",
            mesh,
            ranks(parts),
            all_but_own(parts, cut),
            || self.inner.all_to_all(mesh, parts, cut, join),
        )
    }

    fn send(&self, mesh: &Mesh, part: Part, to: usize) -> Result<Option<Tensor>> {
        let bytes = if part.rank == to { 0 } else { part.bytes() };
        self.call("send", mesh, [part.rank, to], bytes, || {
            self.inner.send(mesh, part, to)
        })
    }

    fn recv(
        &self,
        mesh: &Mesh,
        from: usize,
        dtype: DType,
        shape: Shape,
        to: usize,
    ) -> Result<Tensor> {
        let bytes = Part::elsewhere(from, dtype, shape.clone()).bytes();
        self.call("recv", mesh, [from, to], bytes, || {
            self.inner.recv(mesh, from, dtype, shape, to)
        })
    }
}
