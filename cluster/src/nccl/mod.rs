//! The transport of CUDA meshes: tensors go from GPU to GPU, and the host waits for nothing.
//!
//! A call queues kernels and NCCL's work and returns; what uses a result waits for it on the device.
//! So every call is beside the program, and errors of the cluster are found by its
//! [watch](anymesh_backend_cuda::nccl::Watch) and by the control connection, whichever is first.
//!
//! # Bits
//! What only moves has the bits of a simulation, and so have reductions of integers and bools. NCCL
//! adds floats in an order of its own, and rounds those of 16 bits at every step. With
//! [`Sums::Fixed`] nothing is left to it: parts are exchanged and combined by our kernel in the order
//! of the ranks, as in a simulation; that moves more bytes, and the reduction is not beside the
//! program. What NCCL lacks (logical reductions of numbers, 8-bit floats, maxima of floats, where it
//! may lose a NaN) goes that way in both modes, and a note in the ledger says so.
//!
//! Groups of which several ranks share a device, and parts that cannot be cut evenly, go by messages
//! between devices too.

mod agree;
mod collectives;
mod groups;
mod told;

use crate::{
    carried::Engine,
    control::Control,
    meet::World,
    recorder::{Begun, Digest, State},
    start::{Start, Sums},
};
use anymesh_backend_cuda::nccl::{self, Combine, Communicator, Native, Op, Terms, Watch, Work};
use anymesh_core::{
    DType, Device, Error, Mesh, Reduction, Result, Shape, Tensor,
    transport::{DeviceMemory, Message, Part, note},
};
use groups::{Places, Spread, Store, key, meet};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use told::Told;

type Answers = Result<Vec<Option<Tensor>>>;

impl Store for Control {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.set(key, value)
    }

    fn get(&self, key: &str, within: Duration) -> Result<Vec<u8>> {
        self.get(key, within)
    }
}

/// The ranks of this process in a group, each with its place in it.
type Here = Arc<Vec<(usize, Arc<Communicator>)>>;

/// One process's end of a cluster of GPUs.
#[derive(Debug)]
pub(crate) struct Nccl {
    /// Carries nothing here, but knows of the others and holds barriers.
    engine: Arc<Engine>,
    watch: Arc<Watch>,
    places: Places,
    devices: Vec<Device>,
    epoch: u32,
    sums: Sums,
    /// By the devices of the members, in order.
    groups: Mutex<HashMap<Vec<usize>, Here>>,
    /// In the order in which they were made, to be closed in that order.
    made: Mutex<Vec<Here>>,
    noted: Mutex<HashSet<(DType, Reduction)>>,
}

impl Nccl {
    /// Meets all processes; a reason why NCCL is not to be used, which is the same for all.
    pub(crate) fn connect(
        world: &World,
        engine: &Arc<Engine>,
        start: &Start,
        devices: &[Device],
    ) -> Result<std::result::Result<Arc<Self>, String>> {
        let control = &world.control;
        let who = (control.process, control.cards.len(), world.epoch);
        let counts = match agree::agree(&**control, devices, who, start.start_timeout)? {
            Ok(counts) => counts,
            Err(why) => return Ok(Err(why)),
        };
        let watch = Watch::new(Arc::new(Told::new(control.clone(), start.timeout)))?;
        // A cluster that is made anew goes on without what failed before.
        devices.iter().for_each(nccl::heal);
        let this = Arc::new(Self {
            engine: engine.clone(),
            watch: watch.clone(),
            places: Places::new(counts),
            devices: devices.to_vec(),
            epoch: world.epoch,
            sums: start.sums,
            groups: Mutex::default(),
            made: Mutex::default(),
            noted: Mutex::default(),
        });
        // Whoever fails or dies, all end their calls at once.
        let listener = Arc::downgrade(&watch);
        control.alarm.on_ring(move |verdict| {
            if let Some(watch) = listener.upgrade() {
                watch.abort(verdict.error("communication", |p| vec![p]));
            }
        });
        this.join(this.everyone(), start.start_timeout)?;
        Ok(Ok(this))
    }

    fn everyone(&self) -> Vec<usize> {
        (0..self.places.devices()).collect()
    }

    /// The ranks of this process in a group of devices, which meets when it is first used.
    fn group(&self, members: &[usize]) -> Result<Here> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(here) = groups.get(members) {
            return Ok(here.clone());
        }
        drop(groups);
        self.join(members.to_vec(), self.engine.deadline)
    }

    fn join(&self, members: Vec<usize>, within: Duration) -> Result<Here> {
        let control = &self.engine.control;
        let first = self.places.first_of(control.process);
        let own: Vec<(&Device, usize)> = members
            .iter()
            .enumerate()
            .filter_map(|(rank, device)| {
                Some((self.devices.get(device.checked_sub(first)?)?, rank))
            })
            .collect();
        let is_first = self.places.process_of(members[0]) == control.process;
        let key = key(self.epoch, &members);
        let made = || nccl::new_id().map_err(Error::from);
        let mut processes: Vec<usize> =
            members.iter().map(|d| self.places.process_of(*d)).collect();
        processes.sort_unstable();
        processes.dedup();
        let ticket = control.recorder.begin(Begun {
            op: "connect",
            waits_for: processes
                .iter()
                .copied()
                .filter(|p| *p != control.process)
                .collect(),
            group: processes.into(),
            together: true,
            detail: format!("devices {members:?}"),
            digest: Digest::default().text(&key).0,
            pairs: vec![],
        });
        let met = meet(&**control, &key, is_first, made, within)
            .map_err(nccl::Error::from)
            .and_then(|id| nccl::connect(&own, &id, members.len(), &self.watch, within));
        let communicators = match met {
            Ok(communicators) => communicators,
            Err(e) => {
                let error = self.watch.end(e);
                control.recorder.end(ticket, State::Failed, None);
                return Err(error);
            }
        };
        control.recorder.end(ticket, State::Done, None);
        let here: Here = Arc::new(communicators.into_iter().map(|c| (c.rank(), c)).collect());
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.insert(members, here.clone());
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.push(here.clone());
        Ok(here)
    }

    /// The devices of ranks of a mesh.
    fn devices_of(&self, mesh: &Mesh, ranks: impl Iterator<Item = usize>) -> Vec<usize> {
        ranks
            .map(|rank| self.places.of_id(mesh.ids()[rank]))
            .collect()
    }

    /// An error of NCCL as the error of a call.
    fn error(&self, op: &'static str, mesh: &Mesh, error: nccl::Error) -> Error {
        match self.engine.control.alarm.verdict() {
            Some(verdict) => self.engine.error(&verdict, op, mesh),
            None => error.into(),
        }
    }

    /// Queues what the ranks of this process do in a call.
    fn submit(
        &self,
        op: &'static str,
        mesh: &Mesh,
        begun: Begun,
        work: impl FnOnce() -> std::result::Result<Vec<Work>, nccl::Error>,
    ) -> Result<()> {
        self.engine.check(op, mesh)?;
        let recorder = &self.engine.control.recorder;
        let ticket = recorder.begin(begun);
        let terms = Terms {
            what: op,
            ticket,
            deadline: self.engine.deadline,
        };
        work()
            .and_then(|work| nccl::submit(&self.watch, terms, &work))
            .map(|_| ())
            .map_err(|e| {
                recorder.end(ticket, State::Failed, None);
                self.error(op, mesh, e)
            })
    }

    /// A collective of NCCL's own between members that have a device each: `make` says what one does
    /// with its part and into which memory, and `shape` is what each gets.
    fn collective(
        &self,
        (op, mesh): (&'static str, &Mesh),
        members: &[usize],
        parts: &[Part],
        shape: &Shape,
        make: impl Fn(&Communicator, &DeviceMemory, &anymesh_core::Buffer) -> Made,
    ) -> Answers {
        let mut out: Vec<Option<Tensor>> = vec![None; parts.len()];
        if parts.iter().all(|part| part.data.is_none()) {
            return Ok(out);
        }
        self.engine.check(op, mesh)?;
        let group = self.group(members)?;
        let begun = self.begun(op, mesh, members, parts);
        let dtype = parts[0].dtype;
        let bytes = shape.checked_numel(op)? * dtype.size();
        let mut dense = vec![];
        for (at, _) in group.iter() {
            let Some(data) = &parts[*at].data else {
                return Err(unplaced(op, parts[*at].rank));
            };
            data.device().check(dtype, shape.numel())?;
            dense.push(DeviceMemory::of(data)?.ok_or_else(|| unplaced(op, parts[*at].rank))?);
        }
        self.submit(op, mesh, begun, || {
            let mut work = vec![];
            for ((at, communicator), given) in group.iter().zip(&dense) {
                let device = parts[*at].data.as_ref().map(Tensor::device);
                let Some(device) = device else { continue };
                let buffer = device.adopt(communicator.empty(bytes)?);
                work.push(Work {
                    op: make(communicator, given, &buffer)?,
                    communicator: communicator.clone(),
                });
                let got = DeviceMemory::filled(buffer, dtype, shape.clone(), device)?;
                out[*at] = Some(got);
            }
            Ok(work)
        })?;
        Ok(out)
    }

    /// For the flight recorder: what a collective is, the same for all its members.
    fn begun(&self, op: &'static str, mesh: &Mesh, members: &[usize], parts: &[Part]) -> Begun {
        let mut group: Vec<usize> = members.iter().map(|d| self.places.process_of(*d)).collect();
        group.sort_unstable();
        group.dedup();
        let own = self.engine.control.process;
        let start = Digest::default().text(op).text(parts[0].dtype.name());
        let digest = parts.iter().fold(start, |d, part| {
            let dims = part.shape.dims().iter();
            dims.fold(d.word(mesh.ids()[part.rank] as u64), |d, n| {
                d.word(*n as u64)
            })
        });
        Begun {
            op,
            waits_for: group.iter().copied().filter(|p| *p != own).collect(),
            group: group.into(),
            together: true,
            detail: format!("{}{}", parts[0].dtype, parts[0].shape),
            digest: digest.0,
            pairs: vec![],
        }
    }

    /// Messages: those between ranks of one device stay there.
    fn exchange(&self, op: &'static str, mesh: &Mesh, messages: Vec<Message>) -> Answers {
        messages.iter().try_for_each(|m| m.check(mesh))?;
        let mut out: Vec<Option<Tensor>> = vec![None; messages.len()];
        // Both ends know the messages between two ranks in the same order, and no other order.
        let ids = mesh.ids();
        let mut order: Vec<usize> = (0..messages.len()).collect();
        order.sort_by_key(|i| (ids[messages[*i].part.rank], ids[messages[*i].to]));
        let (mut sends, mut receives, mut peers) = (vec![], vec![], vec![]);
        for i in order {
            let Message { part, to } = &messages[i];
            let device_of = |rank: usize| self.places.of_id(ids[rank]);
            let (from, to_device) = (device_of(part.rank), device_of(*to));
            let receiver = mesh.position_of(*to).map(|at| mesh.device(at));
            if from == to_device || part.shape.numel() == 0 {
                out[i] = match (&part.data, receiver) {
                    (Some(data), Some(device)) if data.device() == device => Some(data.clone()),
                    (_, Some(device)) => {
                        let (dtype, shape) = (part.dtype, part.shape.clone());
                        Some(DeviceMemory::nothing(dtype, shape, device))
                    }
                    _ => None,
                };
                continue;
            }
            let digest = crate::carried::digest(op, 0, mesh, part, *to);
            if let Some(data) = &part.data {
                let memory = DeviceMemory::of(data)?.ok_or_else(|| unplaced(op, part.rank))?;
                sends.push((from, to_device, memory));
                peers.push((self.places.process_of(to_device), digest, false));
            }
            if let Some(device) = receiver {
                device.check(part.dtype, part.shape.numel())?;
                receives.push((i, from, to_device, device));
                peers.push((self.places.process_of(from), digest, true));
            }
        }
        if peers.is_empty() {
            return Ok(out);
        }
        let everyone = self.group(&self.everyone())?;
        let begun = self.begun_between(op, &messages, &peers);
        let own = |device: usize| {
            let found = everyone.iter().find(|(at, _)| *at == device);
            found.map(|(_, communicator)| communicator.clone())
        };
        let missing = |device: usize| nccl::Error::Device(unplaced(op, device));
        self.submit(op, mesh, begun, || {
            let mut work = vec![];
            for (from, peer, memory) in &sends {
                let communicator = own(*from).ok_or_else(|| missing(*from))?;
                let op = Op::Send {
                    from: communicator.region(&memory.buffer, memory.start)?,
                    bytes: memory.bytes,
                    peer: *peer,
                };
                work.push(Work { communicator, op });
            }
            for (i, peer, to, device) in &receives {
                let communicator = own(*to).ok_or_else(|| missing(*to))?;
                let part = &messages[*i].part;
                let bytes = part.shape.numel() * part.dtype.size();
                let buffer = device.adopt(communicator.empty(bytes)?);
                let op = Op::Recv {
                    to: communicator.region(&buffer, 0)?,
                    bytes,
                    peer: *peer,
                };
                work.push(Work { communicator, op });
                let shape = part.shape.clone();
                out[*i] = Some(DeviceMemory::filled(buffer, part.dtype, shape, device)?);
            }
            Ok(work)
        })?;
        Ok(out)
    }

    /// For the flight recorder: what goes to and from each process.
    fn begun_between(
        &self,
        op: &'static str,
        messages: &[Message],
        peers: &[(usize, u64, bool)],
    ) -> Begun {
        let own = self.engine.control.process;
        let mut pairs: Vec<(usize, u64)> = vec![];
        for (peer, digest, _) in peers.iter().filter(|(peer, _, _)| *peer != own) {
            match pairs.iter_mut().find(|(p, _)| p == peer) {
                Some((_, sum)) => *sum = sum.wrapping_add(*digest),
                None => pairs.push((*peer, *digest)),
            }
        }
        pairs.sort_unstable();
        let mut group: Vec<usize> = pairs.iter().map(|(p, _)| *p).chain([own]).collect();
        group.sort_unstable();
        let waits = |p: &usize| peers.iter().any(|(peer, _, waits)| peer == p && *waits);
        Begun {
            op,
            waits_for: pairs.iter().map(|(p, _)| *p).filter(waits).collect(),
            group: group.into(),
            together: false,
            detail: crate::carried::describe(messages),
            digest: pairs
                .iter()
                .fold(Digest::default(), |d, (_, x)| d.word(*x))
                .0,
            pairs,
        }
    }

    /// NCCL's own way to reduce, where that may be taken.
    fn native(&self, dtype: DType, reduction: Reduction) -> Option<nccl::Reduce> {
        let combine = match reduction {
            Reduction::Sum => Combine::Sum,
            Reduction::Prod => Combine::Prod,
            Reduction::Max => Combine::Max,
            Reduction::Min => Combine::Min,
            Reduction::And => Combine::And,
            Reduction::Or => Combine::Or,
        };
        match (nccl::native(dtype, combine), self.sums) {
            (Native::Exact(reduce), _) | (Native::Rounds(reduce), Sums::Native) => Some(reduce),
            (Native::Rounds(_), Sums::Fixed) => None,
            (Native::Lacks(why), _) => {
                let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
                if noted.insert((dtype, reduction)) {
                    note(format!(
                        "{reduction} of {dtype} over NCCL goes by messages and a kernel of ours: {why}"
                    ));
                }
                None
            }
        }
    }

    /// How the members of a group lie on devices.
    fn spread(&self, mesh: &Mesh, ranks: impl Iterator<Item = usize>) -> Spread {
        Spread::of(&self.devices_of(mesh, ranks))
    }
}

type Made = std::result::Result<Op, nccl::Error>;

fn unplaced(op: &'static str, rank: usize) -> Error {
    Error::Transport {
        op,
        detail: "the mesh was not made on this cluster, which knows other places of its ranks"
            .into(),
        ranks: vec![rank],
    }
}

/// Every member's communicators are closed in the order in which they were made.
impl Drop for Nccl {
    fn drop(&mut self) {
        let made = std::mem::take(self.made.get_mut().unwrap_or_else(PoisonError::into_inner));
        // Others may still be on their way to a call that this process has queued.
        let within = self.engine.deadline.min(Duration::from_secs(30));
        for (_, communicator) in made.iter().flat_map(|group| group.iter()) {
            // What is not closed in time is aborted; nobody is left to tell.
            let _ = communicator.close(within);
        }
    }
}
