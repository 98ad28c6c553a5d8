//! Runs plans.

use super::{
    Collective, Step, ValidPlan,
    boxes::{Inbox, holders, join, lost, place_of, rank_at, window},
    edge::Route,
    grid::{At, bits},
};
use crate::{
    Device, Mesh, Reduction, Region, Result, Shape, Sharding, Tensor, ledger, split,
    transport::{Part, Transport, reduce},
};
use smallvec::SmallVec;
use std::collections::{HashMap, hash_map::Entry};

/// The tensor after every step of a plan. Every process that has ranks of the mesh must run the
/// same plan.
///
/// ```
/// # use anymesh_core::{DType, Mesh, Sharding, Tensor, reshard::{Objective, plan, run}};
/// # let device = anymesh_backend_cpu::device();
/// # let mesh = Mesh::new("tp=4", &device)?;
/// let x = Tensor::arange(0, 6, 1, DType::F32, &device)?.to_mesh(&mesh, "[@tp]")?;
/// let whole = Sharding::replicated();
/// let plan = plan(&mesh, x.shape(), x.dtype(), x.sharding(), &whole, Objective::Bytes)?;
/// let y = run(&x, &plan.valid_for(&x)?)?;
/// assert_eq!(y.shards()[3].1.to_vec::<f32>()?, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[track_caller]
pub fn run(x: &Tensor, plan: &ValidPlan) -> Result<Tensor> {
    let _unseen = crate::observe::unseen();
    plan.check(x)?;
    run_steps(x, &plan.steps)
}

/// The tensor after some steps that follow on each other.
pub(super) fn run_steps(x: &Tensor, steps: &[Step]) -> Result<Tensor> {
    let mut x = x.clone();
    for step in steps {
        let ty = |s: &Sharding| s.type_string(x.dtype(), x.shape(), x.mesh());
        let types = || (ty(&step.from), ty(&step.to));
        let sent = ledger::Sent {
            kind: step.kind.name(),
            mesh: x.mesh(),
            axes: &step.axes,
            bytes: step.recv_bytes,
            seconds: step.seconds,
        };
        x = ledger::write(sent, types, || {
            let parts = match x.mesh().transport().cloned() {
                Some(_) if !x.mesh().has_values() => without_values(&x, step)?,
                Some(transport) => Ranks::of(&x).step(&x, step, &*transport)?,
                None => vec![x.part(0)],
            };
            Ok(Tensor::from_parts(
                x.mesh(),
                step.to.clone(),
                x.dtype(),
                x.shape().clone(),
                parts,
            ))
        })?;
    }
    Ok(x)
}

/// A sharding that every rank gets to by dropping a part of what it has, or by filling in an
/// identity.
pub(crate) fn slice(x: &Tensor, to: &Sharding) -> Result<Tensor> {
    let _unseen = crate::observe::unseen();
    let Some(transport) = x.mesh().transport() else {
        return Ok(x.clone());
    };
    let step = Step {
        kind: Collective::Slice,
        axes: SmallVec::new(),
        from: x.sharding().clone(),
        to: to.clone(),
        recv_bytes: 0,
        peak_bytes: 0,
        seconds: 0.0,
    };
    let parts = match x.mesh().has_values() {
        true => Ranks::of(x).exchange(x, &step, &**transport)?,
        false => without_values(x, &step)?,
    };
    Ok(Tensor::from_parts(
        x.mesh(),
        step.to,
        x.dtype(),
        x.shape().clone(),
        parts,
    ))
}

/// What the held ranks have after a step, where there are no values to send.
fn without_values(x: &Tensor, step: &Step) -> Result<Vec<Tensor>> {
    let (mesh, from, to) = (x.mesh(), &step.from, &step.to);
    let reduces = matches!(step.kind, Collective::AllReduce | Collective::ReduceScatter);
    let part = |(i, rank): (usize, usize)| {
        let want = to.region(mesh, rank, x.shape());
        let held = from.region(mesh, rank, x.shape());
        // A rank that stands for all is the worst one, which received something.
        let covered = match mesh.stands_for_all() {
            true => step.kind == Collective::Slice,
            false => !reduces && held.intersect(&want).as_ref() == Some(&want),
        };
        if covered && want.numel() > 0 && filled(mesh, rank, from, to).is_none() {
            return window(&x.held(i), &held, &want);
        }
        Tensor::placeholder(x.dtype(), &Shape::from(want.shape), mesh.local_mesh(i))
    };
    mesh.held().map(part).collect()
}

/// The ranks of a group along a step's axes, and those of which they are copies, if they are.
pub(super) type Group = (SmallVec<[usize; 8]>, Option<SmallVec<[usize; 8]>>);

/// The ranks of a mesh, some of which are here.
pub(super) struct Ranks<'a> {
    mesh: &'a Mesh,
}

impl<'a> Ranks<'a> {
    pub(super) fn of(x: &'a Tensor) -> Self {
        Self { mesh: x.mesh() }
    }

    /// The number of a rank among the addressable ones.
    fn here(&self, rank: usize) -> Option<usize> {
        self.mesh.position_of(rank)
    }

    /// The first ranks of the groups along `axes` of which a member is here, ascending.
    fn leaders(&self, axes: &[usize]) -> Vec<usize> {
        let leads = |rank: &usize| axes.iter().all(|a| self.mesh.coordinate(*rank, *a) == 0);
        if self.mesh.is_local() {
            return (0..self.mesh.ranks()).filter(leads).collect();
        }
        let first = |rank| axes.iter().fold(rank, |r, a| self.mesh.moved(r, *a, 0));
        let mut leaders: Vec<usize> = self.mesh.addressable().map(first).collect();
        leaders.sort_unstable();
        leaders.dedup();
        leaders
    }

    fn at(&self, rank: usize) -> At {
        place_of(self.mesh, rank)
    }

    fn rank(&self, at: &At) -> usize {
        rank_at(self.mesh, at)
    }

    /// The first rank that differs from `rank` only along axes outside of `mask`, if it is another
    /// one of the same device. Only where all ranks are here: elsewhere every process must say what
    /// is sent, whether or not it needs it.
    fn twin(&self, rank: usize, mask: u32) -> Option<usize> {
        if !self.mesh.is_local() {
            return None;
        }
        let mut at = self.at(rank);
        for (axis, at) in at.iter_mut().enumerate() {
            *at *= usize::from(mask & 1 << axis != 0);
        }
        let twin = self.rank(&at);
        (twin != rank && self.mesh.device(twin) == self.mesh.device(rank)).then_some(twin)
    }

    fn step(&self, x: &Tensor, step: &Step, transport: &dyn Transport) -> Result<Vec<Tensor>> {
        match step.kind {
            Collective::AllReduce | Collective::ReduceScatter => self.reduce(x, step, transport),
            Collective::AllGather => match only_dim(&step.from, &step.axes) {
                Some(dim) => self.by_group(x, step, |parts, _| {
                    transport.all_gather(self.mesh, parts, dim)
                }),
                None => self.exchange(x, step, transport),
            },
            _ => self.exchange(x, step, transport),
        }
    }

    /// Runs a collective in every group along the step's axes.
    fn by_group(
        &self,
        x: &Tensor,
        step: &Step,
        call: impl Fn(&[Part], &[usize]) -> Result<Vec<Option<Tensor>>>,
    ) -> Result<Vec<Tensor>> {
        let mut out: Vec<Option<Tensor>> = vec![None; self.mesh.addressable().len()];
        for (group, twins) in self.groups(x, step) {
            if let Some(twins) = twins {
                for (rank, twin) in group.iter().zip(twins) {
                    out[*rank] = out[twin].clone();
                }
                continue;
            }
            let parts: SmallVec<[Part; 8]> = group.iter().map(|rank| self.part(x, *rank)).collect();
            for (rank, result) in group.iter().zip(call(&parts, &group)?) {
                if let Some(i) = self.here(*rank) {
                    out[i] = result;
                }
            }
        }
        out.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
    }

    /// The groups along a step's axes of which a member is here. Those of copies get copies of the
    /// result, and come after what they are copies of.
    pub(super) fn groups(&self, x: &Tensor, step: &Step) -> impl Iterator<Item = Group> {
        let telling = x.sharding().cut_mask() | x.sharding().partial_mask();
        self.leaders(&step.axes).into_iter().map(move |leader| {
            let group = self.mesh.group(leader, &step.axes);
            let twins = group.iter().map(|rank| self.twin(*rank, telling));
            let twins = twins.collect::<Option<SmallVec<[usize; 8]>>>();
            (group, twins)
        })
    }

    /// What a rank holds, as an operand of a collective.
    pub(super) fn part(&self, x: &Tensor, rank: usize) -> Part {
        let shape = Shape::from(x.sharding().region(self.mesh, rank, x.shape()).shape);
        Part {
            rank,
            dtype: x.dtype(),
            shape,
            data: self.here(rank).map(|i| x.part(i)),
        }
    }

    /// Combines partial values group by group, cutting the result where the step says so.
    fn reduce(&self, x: &Tensor, step: &Step, transport: &dyn Transport) -> Result<Vec<Tensor>> {
        let reduction = reduction_of(step);
        let Some(dim) = only_dim(&step.to, &step.axes) else {
            return self.by_group(x, step, |parts, _| {
                transport.all_reduce(self.mesh, parts, reduction)
            });
        };
        self.by_group(x, step, |parts, group| {
            let held = x.sharding().range(self.mesh, group[0], dim, x.shape()[dim]);
            if self.splits(x, step, group, dim) {
                return transport.reduce_scatter(self.mesh, parts, reduction, dim);
            }
            let pieces: SmallVec<[_; 8]> = group
                .iter()
                .map(|rank| step.to.range(self.mesh, *rank, dim, x.shape()[dim]))
                .map(|cut| cut.start - held.start..cut.end - held.start)
                .collect();
            self.scatter(parts, &pieces, reduction, dim, transport)
        })
    }

    /// Whether a step cuts what a group holds as it would be cut by itself. What is left of a
    /// dimension that was cut before need not be.
    pub(super) fn splits(&self, x: &Tensor, step: &Step, group: &[usize], dim: usize) -> bool {
        let range = |s: &Sharding, rank| s.range(self.mesh, rank, dim, x.shape()[dim]);
        let held = range(x.sharding(), group[0]);
        group.iter().enumerate().all(|(i, rank)| {
            let (own, cut) = (split(held.len(), i, group.len()), range(&step.to, *rank));
            (own.start + held.start, own.len()) == (cut.start, cut.len())
        })
    }

    /// A reduce-scatter into pieces of any sizes: everyone sends to each member its piece, and each
    /// combines in the order of the group.
    fn scatter(
        &self,
        parts: &[Part],
        pieces: &[std::ops::Range<usize>],
        reduction: Reduction,
        dim: usize,
        transport: &dyn Transport,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut messages = vec![];
        for (receiver, piece) in parts.iter().zip(pieces) {
            for sender in parts {
                let data = sender
                    .data
                    .as_ref()
                    .map(|t| t.narrow(dim as i64, piece.start, piece.len()))
                    .transpose()?;
                messages.push((
                    receiver.rank,
                    Part {
                        rank: sender.rank,
                        dtype: sender.dtype,
                        shape: sender.shape.with(dim, piece.len()),
                        data,
                    },
                ));
            }
        }
        let sent = messages.iter().filter(|(to, part)| *to != part.rank);
        let sent = sent
            .map(|(to, part)| crate::transport::Message {
                part: part.clone(),
                to: *to,
            })
            .collect();
        let mut delivered = transport.exchange(self.mesh, sent)?.into_iter();
        let mut out = vec![];
        let mut messages = messages.into_iter();
        for receiver in parts {
            let mut received = vec![];
            for (to, part) in messages.by_ref().take(parts.len()) {
                let piece = if to == part.rank {
                    part.data
                } else {
                    delivered.next().flatten()
                };
                if receiver.data.is_some() {
                    received.push(piece.ok_or_else(lost)?);
                }
            }
            out.push(if received.is_empty() {
                None
            } else {
                Some(reduce(&received, reduction)?)
            });
        }
        Ok(out)
    }

    /// Every rank's part after the step, from the boxes it lacks and those it has. Partial axes
    /// stay apart; new ones are filled in.
    fn exchange(&self, x: &Tensor, step: &Step, transport: &dyn Transport) -> Result<Vec<Tensor>> {
        let (mesh, from, to) = (self.mesh, &step.from, &step.to);
        let links: SmallVec<[_; 4]> = (0..mesh.axes().len())
            .map(|a| mesh.cost().link(mesh, a))
            .collect();
        let route = Route::new(mesh, &links, from, to);
        let telling = to.cut_mask() | to.partial_mask() | from.partial_mask();
        let mut out: Vec<Option<Tensor>> = vec![None; mesh.addressable().len()];
        let mut inbox = Inbox::new(x.dtype());
        // (part here, number in the inbox), (part here, rank it shares with).
        let (mut opened, mut shared) = (vec![], vec![]);
        let mut fills = Fills::default();
        let mut joined = Joined::of(self, step, transport, route.vary);
        // A rank elsewhere matters only for what is sent to it from here.
        let receivers: Vec<usize> = match step.kind {
            Collective::Slice => mesh.addressable().collect(),
            _ => (0..mesh.ranks()).collect(),
        };
        let senders_here: Vec<At> = match mesh.is_local() {
            true => vec![],
            false => mesh.addressable().map(|rank| self.at(rank)).collect(),
        };
        for rank in receivers {
            let here = self.here(rank);
            let want = to.region(mesh, rank, x.shape());
            if let Some(reduction) = filled(mesh, rank, from, to) {
                if let Some(i) = here {
                    out[i] = Some(fills.get(&want, reduction, x, mesh.device(i))?);
                }
                continue;
            }
            let held = from.region(mesh, rank, x.shape());
            let covered = held.intersect(&want).as_ref() == Some(&want);
            if covered || want.numel() == 0 {
                if let Some(i) = here {
                    out[i] = Some(if covered {
                        window(&x.part(i), &held, &want)?
                    } else {
                        Tensor::nothing(x.dtype(), Shape::from(want.shape), mesh.device(i))
                    });
                }
                continue;
            }
            if let (Some(i), Some(twin)) = (here, self.twin(rank, telling)) {
                shared.push((i, twin));
                continue;
            }
            if let (Some(i), Some(joined)) = (here, &mut joined) {
                out[i] = Some(joined.window(x, &self.at(rank), &want)?);
                continue;
            }
            let base = route.base(mesh, &self.at(rank));
            let reaches = |sender: &At| bits(!route.vary & 0xffff).all(|a| sender[a] == base[a]);
            if here.is_none() && !senders_here.iter().any(reaches) {
                continue;
            }
            let part = here.map(|i| {
                let number = inbox.open();
                opened.push((i, number));
                number
            });
            for source in holders(mesh, from, route.vary, base, &want, x.shape()) {
                let region = from.region(mesh, source, x.shape());
                let Some(common) = region.intersect(&want) else {
                    continue;
                };
                if region == held {
                    if let (Some(i), Some(part)) = (here, part) {
                        inbox.have(part, common.clone(), window(&x.part(i), &held, &common)?);
                    }
                    continue;
                }
                let data = self
                    .here(source)
                    .map(|j| window(&x.part(j), &region, &common))
                    .transpose()?;
                if data.is_some() || part.is_some() {
                    inbox.ask(part, common, source, rank, data);
                }
            }
        }
        if step.kind != Collective::Slice {
            let mut parts = inbox
                .deliver(mesh, transport)?
                .into_iter()
                .map(Some)
                .collect::<Vec<_>>();
            for (i, number) in opened {
                out[i] = parts[number].take();
            }
            for (i, twin) in shared {
                out[i] = out[twin].clone();
            }
        }
        out.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
    }
}

/// What groups of ranks hold together, where everyone wants some of all that: put together once for
/// all of them, so that the work grows with the ranks and not with the pairs of them. Only on one
/// device, whose ranks may read what others have.
struct Joined<'a> {
    ranks: &'a Ranks<'a>,
    from: &'a Sharding,
    /// Axes along which a group's parts lie.
    vary: u32,
    /// Axes whose ranks hold different things otherwise.
    apart: u32,
    groups: HashMap<usize, (Region, Tensor)>,
}

impl<'a> Joined<'a> {
    fn of(
        ranks: &'a Ranks<'a>,
        step: &'a Step,
        transport: &dyn Transport,
        vary: u32,
    ) -> Option<Self> {
        let mesh = ranks.mesh;
        let everything = matches!(step.kind, Collective::AllToAll | Collective::AllGather);
        let device = || (1..mesh.ranks()).all(|i| mesh.device(i) == mesh.device(0));
        (everything && transport.hands_over() && mesh.is_local() && device()).then(|| Self {
            ranks,
            from: &step.from,
            vary,
            apart: step.from.cut_mask() & !vary | step.from.partial_mask(),
            groups: HashMap::new(),
        })
    }

    /// The box `want` of what the group of a rank holds.
    fn window(&mut self, x: &Tensor, at: &At, want: &Region) -> Result<Tensor> {
        let (mesh, mut first) = (self.ranks.mesh, *at);
        for (axis, at) in first.iter_mut().enumerate() {
            *at *= usize::from(self.apart & 1 << axis != 0);
        }
        let first = self.ranks.rank(&first);
        let (held, whole) = match self.groups.entry(first) {
            Entry::Occupied(group) => group.into_mut(),
            Entry::Vacant(group) => {
                let axes: SmallVec<[usize; 4]> = bits(self.vary).collect();
                let piece = |rank: &usize| {
                    let region = self.from.region(mesh, *rank, x.shape());
                    (region.numel() > 0).then(|| (region, x.part(*rank)))
                };
                let members = mesh.group(first, &axes);
                let whole = join(members.iter().filter_map(piece).collect())?;
                let rest = self.from.without_mask(self.vary);
                group.insert((rest.region(mesh, first, x.shape()), whole))
            }
        };
        window(whole, held, want)
    }
}

/// How a step combines what is partial along its axes.
pub(super) fn reduction_of(step: &Step) -> Reduction {
    let mut along = step.from.partial().filter(|(a, _)| step.axes.contains(a));
    along.next().map_or(Reduction::Sum, |(_, r)| r)
}

/// The dimension that all of `axes` cut.
pub(super) fn only_dim(sharding: &Sharding, axes: &[usize]) -> Option<usize> {
    let mut dims = sharding
        .cuts()
        .filter(|(_, a)| axes.contains(a))
        .map(|(d, _)| d);
    let first = dims.next()?;
    dims.all(|d| d == first).then_some(first)
}

/// The reduction whose identity a rank holds after values have become partial; `None` for the ranks
/// that hold the values.
pub(crate) fn filled(
    mesh: &Mesh,
    rank: usize,
    from: &Sharding,
    to: &Sharding,
) -> Option<Reduction> {
    let old = from.partial_mask();
    to.partial()
        .find(|(a, _)| old & 1 << a == 0 && mesh.coordinate(rank, *a) != 0)
        .map(|(_, reduction)| reduction)
}

/// Identities, one for each size, reduction and device.
#[derive(Default)]
struct Fills(SmallVec<[(Reduction, Tensor); 2]>);

impl Fills {
    fn get(
        &mut self,
        region: &Region,
        reduction: Reduction,
        x: &Tensor,
        device: &Device,
    ) -> Result<Tensor> {
        if let Some((_, t)) = self
            .0
            .iter()
            .find(|(r, t)| *r == reduction && t.dims() == &region.shape[..] && t.device() == device)
        {
            return Ok(t.clone());
        }
        let t = Tensor::full(
            Shape::from(region.shape.clone()),
            reduction.identity(x.dtype()),
            x.dtype(),
            device,
        )?;
        self.0.push((reduction, t.clone()));
        Ok(t)
    }
}
