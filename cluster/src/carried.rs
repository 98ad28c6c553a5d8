//! A transport out of a wire: what ranks of other processes need is sent as bytes, and everything
//! else (collectives, the order of sums) is the provided one, so that results have the bits of a
//! simulation.

use crate::{
    control::{Control, Verdict},
    gather,
    posted::Done,
    recorder::{Begun, Digest, State},
    wire::{Broken, Receive, Send, Wait, Wire},
};
use anymesh_core::{
    DType, Error, Mesh, Reduction, Result, Tensor,
    transport::{Call, Incoming, Message, Outgoing, Part, Pending, Transport, check_group},
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long something may still arrive from a process that has left.
const AFTER_LEAVING: Duration = Duration::from_secs(2);

/// One process's end of a cluster: what carries bytes, and what knows of the others.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) wire: Box<dyn Wire>,
    pub(crate) control: Arc<Control>,
    pub(crate) deadline: Duration,
    /// One call at a time.
    pub(crate) turn: Mutex<()>,
}

impl Engine {
    pub(crate) fn new(wire: Box<dyn Wire>, control: Arc<Control>, deadline: Duration) -> Self {
        Self {
            wire,
            control,
            deadline,
            turn: Mutex::new(()),
        }
    }

    /// The number of the process that has a rank of a mesh.
    pub(crate) fn process(&self, mesh: &Mesh, rank: usize) -> usize {
        mesh.ids()[rank] % self.control.cards.len()
    }

    /// A verdict as the error of a call on a mesh.
    pub(crate) fn error(&self, verdict: &Verdict, op: &'static str, mesh: &Mesh) -> Error {
        verdict.error(op, |process| {
            let ranks: Vec<usize> = (0..mesh.ranks())
                .filter(|rank| self.process(mesh, *rank) == process)
                .collect();
            match ranks.is_empty() {
                true => vec![process],
                false => ranks,
            }
        })
    }

    /// Fails where the cluster has failed.
    pub(crate) fn check(&self, op: &'static str, mesh: &Mesh) -> Result<()> {
        match self.control.alarm.has_rung() {
            false => Ok(()),
            true => match self.control.alarm.verdict() {
                Some(verdict) => Err(self.error(&verdict, op, mesh)),
                None => Ok(()),
            },
        }
    }

    /// Bytes to and from other processes, on behalf of a call.
    pub(crate) fn transfer(
        &self,
        op: &'static str,
        mesh: &Mesh,
        sends: Vec<Send>,
        memories: Vec<Incoming>,
        receives: Vec<Receive>,
        detail: impl FnOnce() -> String,
    ) -> Result<Vec<Incoming>> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(memories);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.check(op, mesh)?;
        let call = self.begin(op, &sends, &receives, detail);
        let wait = self.waiting(&receives);
        match self.wire.transfer(sends, memories, receives, &wait) {
            Ok(filled) => {
                self.control.recorder.end(call, State::Done, None);
                Ok(filled)
            }
            Err(broken) => Err(self.broken(op, mesh, call, broken, &wait)),
        }
    }

    /// Waits for those that something is to be received from.
    pub(crate) fn waiting(&self, receives: &[Receive]) -> Waiting {
        let mut awaited: Vec<usize> = receives.iter().map(|r| r.from).collect();
        awaited.sort_unstable();
        awaited.dedup();
        Waiting {
            until: Instant::now() + self.deadline,
            control: self.control.clone(),
            awaited,
        }
    }

    /// What a call that did not come to its end means.
    pub(crate) fn broken(
        &self,
        op: &'static str,
        mesh: &Mesh,
        call: u64,
        broken: Broken,
        wait: &Waiting,
    ) -> Error {
        let recorder = &self.control.recorder;
        let broken = match (broken, wait.left()) {
            (Broken::Stopped, Some(left)) if !self.control.alarm.has_rung() => {
                Broken::Gone(left, "it has left".into())
            }
            (broken, _) => broken,
        };
        if let Broken::Late(from) = &broken {
            recorder.waits_for(call, from);
        }
        let verdict = self.control.conclude(broken, self.deadline.as_secs_f64());
        recorder.end(call, State::Failed, None);
        self.error(&verdict, op, mesh)
    }

    pub(crate) fn begin(
        &self,
        op: &'static str,
        sends: &[Send],
        receives: &[Receive],
        detail: impl FnOnce() -> String,
    ) -> u64 {
        let own = self.control.process;
        let ends = sends
            .iter()
            .map(|s| (s.to, s.digest))
            .chain(receives.iter().map(|r| (r.from, r.digest)));
        let mut pairs: Vec<(usize, u64)> = vec![];
        for (peer, digest) in ends {
            // A pair's digest does not depend on which of the two looks at it.
            match pairs.iter_mut().find(|(p, _)| *p == peer) {
                Some((_, sum)) => *sum = sum.wrapping_add(digest),
                None => pairs.push((peer, digest)),
            }
        }
        pairs.sort_unstable();
        let mut group: Vec<usize> = pairs.iter().map(|(p, _)| *p).chain([own]).collect();
        group.sort_unstable();
        let mut waits_for: Vec<usize> = receives.iter().map(|r| r.from).collect();
        waits_for.sort_unstable();
        waits_for.dedup();
        self.control.recorder.begin(Begun {
            op,
            group: group.into(),
            together: false,
            detail: detail(),
            digest: pairs
                .iter()
                .fold(Digest::default(), |d, (_, x)| d.word(*x))
                .0,
            waits_for,
            pairs,
        })
    }

    /// `how` is what else both ends must mean alike, such as the reduction.
    fn exchange(
        &self,
        (op, how): (&'static str, u64),
        mesh: &Mesh,
        messages: Vec<Message>,
    ) -> Result<Vec<Option<Tensor>>> {
        let bytes = self.bytes((op, how), mesh, &messages)?;
        let detail = || describe(&messages);
        let filled = self.transfer(
            op,
            mesh,
            bytes.sends,
            bytes.memories,
            bytes.receives,
            detail,
        )?;
        bytes.out.filled(filled)
    }

    /// What messages are to other processes.
    pub(crate) fn bytes(
        &self,
        (op, how): (&'static str, u64),
        mesh: &Mesh,
        messages: &[Message],
    ) -> Result<Bytes> {
        messages.iter().try_for_each(|m| m.check(mesh))?;
        let own = self.control.process;
        let mut out: Vec<Option<Tensor>> = vec![None; messages.len()];
        let (mut sends, mut memories, mut receives) = (vec![], vec![], vec![]);
        let mut slots = vec![];
        // Both ends know the messages between two ranks in the same order, and no other order.
        let mut order: Vec<usize> = (0..messages.len()).collect();
        order.sort_by_key(|i| (messages[*i].part.rank, messages[*i].to));
        for i in order {
            let Message { part, to } = &messages[i];
            let (from, to_process) = (self.process(mesh, part.rank), self.process(mesh, *to));
            let receiver = mesh.position_of(*to).map(|at| mesh.device(at));
            match (&part.data, receiver) {
                (Some(data), Some(device)) => out[i] = Some(data.to_device(device)?),
                (None, Some(device)) => {
                    let mut memory = Incoming::new(part.dtype, part.shape.clone(), device)?;
                    if part.shape.numel() == 0 {
                        out[i] = Some(memory.finish()?);
                        continue;
                    }
                    receives.push(Receive {
                        from,
                        memory: memories.len(),
                        bytes: 0..memory.bytes().len(),
                        digest: digest(op, how, mesh, part, *to),
                    });
                    memories.push(memory);
                    slots.push(i);
                }
                (Some(data), None) if part.shape.numel() > 0 && to_process != own => {
                    sends.push(Send {
                        to: to_process,
                        bytes: Outgoing::new(data)?,
                        digest: digest(op, how, mesh, part, *to),
                    });
                }
                _ => {}
            }
        }
        Ok(Bytes {
            sends,
            memories,
            receives,
            out: Out { out, slots },
        })
    }

    pub(crate) fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        let op = "barrier";
        check_group(op, mesh, group.iter().copied())?;
        let own = self.control.process;
        let mut processes: Vec<usize> = group.iter().map(|r| self.process(mesh, *r)).collect();
        processes.sort_unstable();
        processes.dedup();
        if !processes.contains(&own) {
            return Ok(());
        }
        let digest = processes
            .iter()
            .fold(Digest::default().text(op), |d, p| d.word(*p as u64))
            .0;
        let Some(device) = group
            .iter()
            .find_map(|r| mesh.position_of(*r).map(|at| mesh.device(at)))
        else {
            return Ok(());
        };
        let (mut sends, mut receives) = (vec![], vec![]);
        for peer in processes.iter().copied().filter(|p| *p != own) {
            sends.push(Send {
                to: peer,
                bytes: vec![].into(),
                digest,
            });
            receives.push(Receive {
                from: peer,
                memory: 0,
                bytes: 0..0,
                digest,
            });
        }
        let memories = vec![Incoming::new(DType::U8, [0].into(), device)?];
        self.transfer(op, mesh, sends, memories, receives, String::new)
            .map(|_| ())
    }
}

/// The messages of an exchange as bytes.
pub(crate) struct Bytes {
    pub(crate) sends: Vec<Send>,
    pub(crate) memories: Vec<Incoming>,
    pub(crate) receives: Vec<Receive>,
    pub(crate) out: Out,
}

/// The answer to an exchange, in which what is received is missing.
#[derive(Debug)]
pub(crate) struct Out {
    out: Vec<Option<Tensor>>,
    /// For each memory the message that it is for.
    slots: Vec<usize>,
}

impl Out {
    pub(crate) fn filled(mut self, memories: Vec<Incoming>) -> Result<Vec<Option<Tensor>>> {
        for (slot, memory) in self.slots.into_iter().zip(memories) {
            self.out[slot] = Some(memory.finish()?);
        }
        Ok(self.out)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let wait = Waiting {
            until: Instant::now() + self.deadline.min(Duration::from_secs(10)),
            control: self.control.clone(),
            awaited: vec![],
        };
        self.wire.flush(&wait);
        self.control.leave(self.deadline);
    }
}

/// What a message is, so that both ends notice when they mean different ones.
pub(crate) fn digest(op: &'static str, how: u64, mesh: &Mesh, part: &Part, to: usize) -> u64 {
    let ids = mesh.ids();
    let start = Digest::default()
        .text(op)
        .word(how)
        .text(part.dtype.name())
        .word(ids[part.rank] as u64)
        .word(ids[to] as u64);
    let dims = part.shape.dims().iter();
    dims.fold(start, |d, n| d.word(*n as u64)).0
}

/// Messages in a few words.
pub(crate) fn describe(messages: &[Message]) -> String {
    match messages {
        [] => String::new(),
        [only] => format!("{}{}", only.part.dtype, only.part.shape),
        [first, rest @ ..] => {
            format!(
                "{}{} and {} more",
                first.part.dtype,
                first.part.shape,
                rest.len()
            )
        }
    }
}

/// See [`Wait`].
pub(crate) struct Waiting {
    pub(crate) until: Instant,
    pub(crate) control: Arc<Control>,
    pub(crate) awaited: Vec<usize>,
}

impl Waiting {
    /// One that is waited for and left some time ago.
    fn left(&self) -> Option<usize> {
        let gone = |p: &usize| {
            self.control
                .alarm
                .left_since(*p)
                .is_some_and(|since| since > AFTER_LEAVING)
        };
        self.awaited.iter().copied().find(gone)
    }
}

impl Wait for Waiting {
    fn until(&self) -> Instant {
        self.until
    }

    fn stopped(&self) -> bool {
        self.failed() || self.left().is_some()
    }

    fn failed(&self) -> bool {
        self.control.alarm.has_rung()
    }
}

/// The transport of meshes over processes.
#[derive(Clone, Debug)]
pub(crate) struct Carried(pub(crate) Arc<Engine>);

/// The provided collectives over [`Engine::exchange`], under the name of the one that was called.
#[derive(Debug)]
struct Named<'a>(&'a Engine, (&'static str, u64));

impl Carried {
    /// Under the name of an op, with what tells it from others of that name.
    fn named(&self, op: &'static str, how: &[u64]) -> Named<'_> {
        let how = how.iter().fold(Digest::default(), |d, word| d.word(*word));
        Named(&self.0, (op, how.0))
    }
}

impl Transport for Named<'_> {
    fn name(&self) -> &str {
        self.0.wire.name()
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.0.exchange(self.1, mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }
}

/// The same with gathers into place.
#[derive(Debug)]
struct InPlace<'a>(Named<'a>);

impl Transport for InPlace<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.0.exchange(mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        let Named(engine, op) = &self.0;
        match gather::whole(engine, mesh, parts, dim) {
            Some(whole) => gather::gather(engine, *op, mesh, parts, whole),
            None => self.0.all_gather(mesh, parts, dim),
        }
    }
}

impl Transport for Carried {
    fn name(&self) -> &str {
        self.0.wire.name()
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.0.deadline)
    }

    fn report(&self, _id: usize, error: &Error) {
        self.0.control.failed(&error.to_string());
    }

    fn posts(&self) -> bool {
        self.0.wire.posts()
    }

    fn start(&self, mesh: &Mesh, call: Call) -> Result<Box<dyn Pending>> {
        match call {
            Call::Exchange { messages } if self.posts() => self.0.post(mesh, messages),
            call => Ok(Box::new(Done::of(call.run(self, mesh)?))),
        }
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        self.0.exchange(("exchange", 0), mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.barrier(mesh, group)
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        InPlace(self.named("all_reduce", &[reduction as u64])).all_reduce(mesh, parts, reduction)
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        InPlace(self.named("all_gather", &[dim as u64])).all_gather(mesh, parts, dim)
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let how = [reduction as u64, dim as u64];
        self.named("reduce_scatter", &how)
            .reduce_scatter(mesh, parts, reduction, dim)
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Result<Vec<Option<Tensor>>> {
        self.named("broadcast", &[]).broadcast(mesh, root, group)
    }

    fn all_to_all(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        cut: usize,
        join: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let how = [cut as u64, join as u64];
        self.named("all_to_all", &how)
            .all_to_all(mesh, parts, cut, join)
    }
}
