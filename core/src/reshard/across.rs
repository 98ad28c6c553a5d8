//! From one mesh to another.

use super::{
    Plan,
    boxes::{Inbox, boxes_in, holders, lost, window},
    edge::Space,
    execute::filled,
    fewest::{Fewest, Path, Rest},
    grid::Traffic,
    moves::slicings,
    plan::assemble,
    run,
};
use crate::{
    DType, Error, Mesh, Region, Result, Shape, Sharding, Tensor,
    fingerprint::{self, Digest},
    ledger,
    overlap::Moving,
    transport::{Pending, told},
    watch::watcher,
};
use smallvec::SmallVec;
use std::collections::HashMap;

/// How to get a tensor from one mesh to another: what is partial is combined on the source mesh,
/// then every rank of the destination gets the boxes it lacks.
///
/// Ranks are the same if they have the same [id](Mesh::ids), and the same device where that is
/// known; such a rank keeps what it has.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// What is done on the source mesh.
    pub source: Plan,
    /// The destination mesh.
    pub mesh: Mesh,
    /// The sharding there.
    pub to: Sharding,
    /// Bytes that the worst rank receives from the other mesh.
    pub moved_bytes: u64,
    /// Bytes that the worst rank holds while it receives them.
    pub moved_peak_bytes: u64,
    /// Bytes that ranks receive in all: the worst rank of every step.
    pub recv_bytes: u64,
    /// What any plan must send to the worst rank. Not known where partial values are combined.
    pub lower_bound: Option<u64>,
    /// Bytes of the tensor that the worst rank holds in any step, before and after together.
    pub peak_bytes: u64,
    /// Time under the source mesh's cost model, whose default link joins the meshes.
    pub seconds: f64,
}

/// The plan of fewest bytes from a sharding of one mesh to one of another, which may share ranks
/// with it.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Shape, Sharding, reshard::plan_across};
/// # let mesh = Mesh::new("dp=2, tp=4", &anymesh_backend_cpu::device())?;
/// let (shape, rows) = (Shape::from([64, 64]), Sharding::replicated().cut(0, 0));
/// // The ranks of a sub-mesh have the tensor already.
/// let copied = plan_across(&mesh, &Sharding::replicated(), &mesh.at("dp", 1)?, &rows, &shape, DType::F32)?;
/// assert_eq!((copied.recv_bytes, copied.lower_bound), (0, Some(0)));
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn plan_across(
    source: &Mesh,
    from: &Sharding,
    mesh: &Mesh,
    to: &Sharding,
    shape: &Shape,
    dtype: DType,
) -> Result<Transfer> {
    from.check(source, shape.rank())?;
    to.check(mesh, shape.rank())?;
    let space = Space::new(source, shape, dtype)?;
    let pair = Pair::of(source, mesh);
    let start = space.strip(from);
    // Axes of different meshes have nothing to do with each other, so nothing stays partial.
    let resolve = if space.empty { 0 } else { start.partial_mask() };
    let rest = |at: &Sharding| Rest {
        bytes: pair.traffic(shape, at, to).missing * space.size,
        step: true,
        exchange: true,
    };
    let (path, goal) = if resolve == 0 {
        (
            Path::from_iter([start.clone(), start.whole()]),
            from.whole(),
        )
    } else {
        let path = Fewest::path(
            &space,
            &start,
            &Sharding::replicated(),
            resolve,
            Space::new(mesh, shape, dtype)?.local(to),
            &rest,
        );
        let goal = path.last().cloned().unwrap_or_default();
        (path, goal)
    };
    let build = |path: Path, goal: &Sharding| -> Result<Transfer> {
        let source = assemble(&space, dtype, from, goal, path, false)?;
        let traffic = pair.traffic(shape, goal, to);
        let (moved_bytes, cost) = (traffic.missing * space.size, source.mesh.cost());
        let messages = if moved_bytes == 0 {
            0
        } else {
            pair.messages(shape, goal, to)
        };
        let moving = if moved_bytes == 0 {
            0.0
        } else {
            cost.start
                + messages as f64 * cost.link.latency
                + cost.transfer_seconds(cost.link, moved_bytes)
        };
        let (recv_bytes, seconds) = (source.recv_bytes + moved_bytes, source.seconds + moving);
        let moved_peak_bytes = traffic.both * space.size;
        let peak_bytes = source.peak_bytes.max(moved_peak_bytes);
        let lower_bound =
            (resolve == 0).then(|| pair.traffic(shape, from, to).missing * space.size);
        Ok(Transfer {
            source,
            mesh: mesh.clone(),
            to: to.clone(),
            moved_bytes,
            moved_peak_bytes,
            recv_bytes,
            lower_bound,
            peak_bytes,
            seconds,
        })
    };
    let mut best = build(path.clone(), &goal)?;
    let Some(ceiling) = source
        .cost()
        .memory
        .filter(|ceiling| best.peak_bytes > *ceiling)
    else {
        return Ok(best);
    };
    // Ranks that let go of what others have too need less.
    let free = space.axes() & !goal.cut_mask();
    slicings(&space, &goal, free, &mut |sliced| {
        let next = build(path.iter().chain([sliced]).cloned().collect(), sliced);
        if let Ok(next) = next
            && (next.peak_bytes.max(ceiling), next.recv_bytes)
                < (best.peak_bytes.max(ceiling), best.recv_bytes)
        {
            best = next;
        }
        true
    });
    if best.peak_bytes <= ceiling {
        return Ok(best);
    }
    let text =
        |s: &Sharding, mesh: &Mesh| format!("{} on {mesh}", s.type_string(dtype, shape, mesh));
    Err(Error::Memory {
        from: text(from, source),
        to: text(to, mesh),
        needed: best.peak_bytes,
        ceiling,
    })
}

/// Two meshes, of which ranks may be the same.
struct Pair<'a> {
    source: &'a Mesh,
    mesh: &'a Mesh,
    /// For each rank of `mesh` the one of `source` that is the same.
    same: Vec<Option<usize>>,
}

impl<'a> Pair<'a> {
    fn of(source: &'a Mesh, mesh: &'a Mesh) -> Self {
        let known: HashMap<usize, usize> = source
            .ids()
            .iter()
            .enumerate()
            .map(|(rank, id)| (*id, rank))
            .collect();
        // Over several processes an id is one rank, and not all of them know its device. Meshes of
        // one process are also told apart by their devices, because each counts its ids anew.
        let private = source.is_local() && mesh.is_local();
        let device = |mesh: &'a Mesh, rank: usize| mesh.position_of(rank).map(|i| mesh.device(i));
        let same = |(rank, id): (usize, &usize)| {
            let alike = |other: &usize| !private || device(source, *other) == device(mesh, rank);
            known.get(id).copied().filter(alike)
        };
        Self {
            source,
            mesh,
            same: mesh.ids().iter().enumerate().map(same).collect(),
        }
    }

    /// What the worst rank lacks and holds, with nothing partial at the source.
    fn traffic(&self, shape: &Shape, from: &Sharding, to: &Sharding) -> Traffic {
        let mut worst = Traffic {
            missing: 0,
            both: (0..self.source.ranks())
                .map(|r| from.region(self.source, r, shape).numel() as u64)
                .max()
                .unwrap_or(0),
        };
        for rank in 0..self.mesh.ranks() {
            let want = to.region(self.mesh, rank, shape);
            let held = self.same[rank].map(|r| from.region(self.source, r, shape));
            worst.both = worst
                .both
                .max((want.numel() + held.as_ref().map_or(0, Region::numel)) as u64);
            if first_of_partials(self.mesh, rank, to) {
                let common = held
                    .and_then(|h| h.intersect(&want))
                    .map_or(0, |common| common.numel());
                worst.missing = worst.missing.max((want.numel() - common) as u64);
            }
        }
        worst
    }

    /// Messages that the worst rank receives.
    fn messages(&self, shape: &Shape, from: &Sharding, to: &Sharding) -> usize {
        let received = |rank: usize| {
            let want = to.region(self.mesh, rank, shape);
            let held = self.same[rank].map(|r| from.region(self.source, r, shape));
            let own = held.is_some_and(|held| held.intersect(&want).is_some());
            boxes_in(self.source, from, &want, shape) - usize::from(own)
        };
        (0..self.mesh.ranks())
            .filter(|rank| first_of_partials(self.mesh, *rank, to))
            .map(received)
            .max()
            .unwrap_or(0)
    }
}

/// Axes along which ranks hold the same.
fn copy_axes(mesh: &Mesh, sharding: &Sharding) -> SmallVec<[usize; 3]> {
    let cut = sharding.cut_mask();
    (0..mesh.axes().len())
        .filter(|a| cut & 1 << a == 0)
        .collect()
}

/// Whether a rank holds values, and not the identity of a reduction.
fn first_of_partials(mesh: &Mesh, rank: usize, to: &Sharding) -> bool {
    to.partial().all(|(a, _)| mesh.coordinate(rank, a) == 0)
}

/// The tensor on another mesh. Every process that has ranks of either calls this.
#[track_caller]
pub(super) fn transfer(x: &Tensor, mesh: &Mesh, to: &Sharding) -> Result<Tensor> {
    if let Some(there) = on_own_device(x, mesh)? {
        return Ok(there);
    }
    let (x, plan) = combined(x, mesh, to)?;
    let types = || (x.type_string(), to.type_string(x.dtype(), x.shape(), mesh));
    ledger::write(plan.sent(), types, || {
        if mesh.carries_values() {
            HandOver::of(&x, mesh, to)?.run()
        } else {
            without_values(&x, mesh, to, plan.moved_bytes)
        }
    })
}

/// The same, of which the part between the meshes goes on beside the program where the transport
/// does that.
#[track_caller]
pub(super) fn start(x: &Tensor, mesh: &Mesh, to: &Sharding) -> Result<Moving> {
    let beside = mesh.carries_values() && mesh.transport().is_some_and(|t| t.overlaps());
    if !beside || mesh.is_single() {
        return Ok(Moving::there(transfer(x, mesh, to)?));
    }
    let (x, plan) = combined(x, mesh, to)?;
    let types = || (x.type_string(), to.type_string(x.dtype(), x.shape(), mesh));
    let begun = ledger::begin(plan.sent(), types);
    let started = HandOver::of(&x, mesh, to).and_then(|hand_over| {
        // What is sent is held by the transport alone.
        drop(x);
        Moving::start(hand_over, begun)
    });
    told(mesh, None, started)
}

/// A tensor over processes on a device of this process, which only its own ranks reach.
fn on_own_device(x: &Tensor, mesh: &Mesh) -> Result<Option<Tensor>> {
    reachable(x.mesh(), mesh)?;
    match mesh.is_single() && !x.mesh().is_local() {
        true => x.full_tensor()?.copied_to(mesh.device(0)).map(Some),
        false => Ok(None),
    }
}

/// What is done on the source mesh, and how the rest goes.
#[track_caller]
fn combined(x: &Tensor, mesh: &Mesh, to: &Sharding) -> Result<(Tensor, Transfer)> {
    reachable(x.mesh(), mesh)?;
    let plan = plan_across(x.mesh(), x.sharding(), mesh, to, x.shape(), x.dtype())?;
    if plan.recv_bytes > 0 {
        let decision = Digest::default().sharding(x.sharding()).sharding(to);
        fingerprint::fold("reshard", ledger::caller(), decision.0);
        if let Some(watcher) = watcher() {
            watcher.reshard(x, x.sharding(), to, mesh)?;
        }
    }
    Ok((run(x, &plan.source.valid_for(x)?)?, plan))
}

impl Transfer {
    /// What goes between the meshes.
    fn sent(&self) -> ledger::Sent<'_> {
        ledger::Sent {
            kind: "transfer",
            mesh: &self.mesh,
            axes: &[],
            bytes: self.moved_bytes,
            seconds: self.seconds - self.source.seconds,
        }
    }
}

/// What the held ranks of a destination without values get.
fn without_values(x: &Tensor, mesh: &Mesh, to: &Sharding, moved_bytes: u64) -> Result<Tensor> {
    let pair = Pair::of(x.mesh(), mesh);
    let part = |(i, rank): (usize, usize)| {
        let want = to.region(mesh, rank, x.shape());
        // A rank that stands for all is the worst one, which received something if any did.
        let covered = match mesh.stands_for_all() {
            true => moved_bytes == 0,
            false => true,
        };
        let own = pair.same[rank].filter(|_| covered && first_of_partials(mesh, rank, to));
        let own = own.and_then(|r| {
            let held = x.sharding().region(x.mesh(), r, x.shape());
            let whole = held.intersect(&want).as_ref() == Some(&want);
            Some((x.mesh().position_of(r).filter(|_| whole)?, held))
        });
        match own {
            Some((at, held)) => window(&x.part(at), &held, &want),
            _ => Tensor::placeholder(x.dtype(), &Shape::from(want.shape), mesh.local_mesh(i)),
        }
    };
    let parts = mesh.held().map(part).collect::<Result<Vec<_>>>()?;
    Ok(Tensor::from_parts(
        mesh,
        to.clone(),
        x.dtype(),
        x.shape().clone(),
        parts,
    ))
}

/// What every rank of the destination has, and what it lacks. Nothing is partial at the source.
pub(crate) struct HandOver {
    /// Between whom messages go.
    union: Mesh,
    inbox: Inbox,
    /// Where each part that is held here comes from.
    out: Vec<Option<Slot>>,
    mesh: Mesh,
    to: Sharding,
    dtype: DType,
    shape: Shape,
    /// The result in a process that has no part of it.
    elsewhere: Option<Tensor>,
}

impl HandOver {
    /// All processes go through all ranks of the destination, so that they agree on who sends what;
    /// each makes the parts of its own.
    fn of(x: &Tensor, mesh: &Mesh, to: &Sharding) -> Result<Self> {
        let pair = Pair::of(x.mesh(), mesh);
        let (union, numbers) = x.mesh().union(mesh, &pair.same);
        let part_of = |rank: usize| x.mesh().position_of(rank).map(|i| x.part(i));
        let copies = copy_axes(x.mesh(), x.sharding());
        let mut sent = vec![0; x.mesh().ranks()];
        let mut inbox = Inbox::new(x.dtype());
        let mut made: HashMap<Region, Vec<usize>> = HashMap::new();
        let mut out: Vec<Option<Slot>> = mesh.addressable().map(|_| None).collect();
        for (rank, number) in numbers.iter().enumerate() {
            let want = to.region(mesh, rank, x.shape());
            let here = mesh.position_of(rank);
            let shape = || Shape::from(want.shape.clone());
            if let Some(reduction) = filled(mesh, rank, &Sharding::replicated(), to) {
                if let Some(i) = here {
                    let identity = reduction.identity(x.dtype());
                    let part = Tensor::full(shape(), identity, x.dtype(), mesh.device(i))?;
                    out[i] = Some(Slot::Made(part));
                }
                continue;
            }
            if want.numel() == 0 {
                if let Some(i) = here {
                    let part = Tensor::nothing(x.dtype(), shape(), mesh.device(i));
                    out[i] = Some(Slot::Made(part));
                }
                continue;
            }
            let own = pair.same[rank].map(|r| (r, x.sharding().region(x.mesh(), r, x.shape())));
            if let Some((r, held)) = own
                .as_ref()
                .filter(|(_, held)| held.intersect(&want).as_ref() == Some(&want))
            {
                if let Some(i) = here {
                    let part = part_of(*r).ok_or_else(lost)?;
                    let part = window(&part, held, &want)?.copied_to(mesh.device(i))?;
                    out[i] = Some(Slot::Made(part));
                }
                continue;
            }
            // Ranks of one device that want the same share it, where no other process must know.
            if let Some(i) = here.filter(|_| union.is_local()) {
                let equal = made.entry(want.clone()).or_default();
                let same = |other: &&usize| mesh.device(**other) == mesh.device(i);
                if let Some(other) = equal.iter().find(same) {
                    out[i] = Some(Slot::Same(*other));
                    continue;
                }
                equal.push(i);
            }
            let part = here.map(|i| {
                let number = inbox.open();
                out[i] = Some(Slot::Number(number));
                number
            });
            let cut = x.sharding().cut_mask();
            for first in holders(x.mesh(), x.sharding(), cut, [0; 16], &want, x.shape()) {
                let region = &x.sharding().region(x.mesh(), first, x.shape());
                let Some(common) = region.intersect(&want) else {
                    continue;
                };
                if let Some((r, _)) = own.as_ref().filter(|(_, held)| held == region) {
                    if let (Some(i), Some(part)) = (here, part) {
                        let held = part_of(*r).ok_or_else(lost)?;
                        let piece = window(&held, region, &common)?.copied_to(mesh.device(i))?;
                        inbox.have(part, common.clone(), piece);
                    }
                    continue;
                }
                let copies = x.mesh().group(first, &copies);
                let source = copies
                    .into_iter()
                    .min_by_key(|r| (sent[*r], *r))
                    .unwrap_or(first);
                sent[source] += common.numel();
                let data = part_of(source)
                    .map(|held| window(&held, region, &common))
                    .transpose()?;
                if data.is_some() || part.is_some() {
                    inbox.ask(part, common, source, *number, data);
                }
            }
        }
        let elsewhere = match mesh.has_values() {
            true => None,
            false => Some(without_values(x, mesh, to, u64::MAX)?),
        };
        Ok(Self {
            union,
            inbox,
            out,
            mesh: mesh.clone(),
            to: to.clone(),
            dtype: x.dtype(),
            shape: x.shape().clone(),
            elsewhere,
        })
    }

    /// Sends what is to be sent, and makes the tensor.
    fn run(mut self) -> Result<Tensor> {
        let nothing = Inbox::new(self.dtype);
        let inbox = std::mem::replace(&mut self.inbox, nothing);
        let delivered = match self.union.transport() {
            Some(transport) if !inbox.is_empty() => inbox.deliver(&self.union, &**transport)?,
            _ => vec![],
        };
        self.made(&delivered)
    }

    /// Begins to send what is to be sent; nothing where nobody here has to wait for what comes.
    pub(crate) fn start(&mut self) -> Result<Option<Box<dyn Pending>>> {
        let pending = match self.union.transport() {
            Some(transport) if !self.inbox.is_empty() => {
                Some(self.inbox.start(&self.union, &**transport)?)
            }
            _ => None,
        };
        Ok(pending.filter(|_| !self.inbox.is_complete()))
    }

    /// The tensor, with what was delivered.
    pub(crate) fn land(mut self, delivered: Vec<Option<Tensor>>) -> Result<Tensor> {
        let nothing = Inbox::new(self.dtype);
        let inbox = std::mem::replace(&mut self.inbox, nothing);
        let joined = inbox.join(delivered);
        let parts = told(&self.mesh, None, joined)?;
        self.made(&parts)
    }

    fn made(self, delivered: &[Tensor]) -> Result<Tensor> {
        if let Some(elsewhere) = self.elsewhere {
            return Ok(elsewhere);
        }
        let part = |slot: &Slot| match slot {
            Slot::Made(part) => Some(part.clone()),
            Slot::Number(number) => delivered.get(*number).cloned(),
            Slot::Same(_) => None,
        };
        let parts = self.out.iter().map(|slot| match slot {
            Some(Slot::Same(other)) => part(self.out[*other].as_ref()?),
            slot => part(slot.as_ref()?),
        });
        let parts = parts.collect::<Option<Vec<_>>>().ok_or_else(lost)?;
        Ok(Tensor::from_parts(
            &self.mesh, self.to, self.dtype, self.shape, parts,
        ))
    }
}

/// Where a part of the destination comes from.
enum Slot {
    Made(Tensor),
    /// Its number in the inbox.
    Number(usize),
    /// The same as that of another rank here.
    Same(usize),
}

/// Refuses meshes between which nothing carries data.
fn reachable(source: &Mesh, mesh: &Mesh) -> Result<()> {
    match (source.carries_values(), mesh.carries_values()) {
        (false, true) => Err(crate::meta::no_values(source.device(0).name())),
        (_, false) => Ok(()),
        (true, true) => mesh.same_transport("to_mesh", source),
    }
}
