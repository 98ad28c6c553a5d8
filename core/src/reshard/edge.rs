//! One step: what kind of communication takes one sharding to another, and what it costs.

use super::{
    Link,
    grid::{At, Geometry, Grid, Traffic, bits, off_origin},
    moves::to_resolve,
};
use crate::{DType, Mesh, Result, Shape, Sharding};
use smallvec::SmallVec;
use std::ops::Deref;

/// Mesh axes in the order in which a step's groups count their members.
pub(super) type Axes = SmallVec<[usize; 3]>;

/// What a step does. The cheaper to run come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Ranks keep a part of what they have, or fill in the identity of a reduction: nothing is
    /// sent.
    Slice,
    /// Ranks along some axes join what they have.
    AllGather,
    /// Axes leave dimensions and cut others.
    AllToAll,
    /// Partial values are combined and cut.
    ReduceScatter,
    /// Partial values are combined.
    AllReduce,
    /// Ranks swap whole parts.
    Permute,
    /// Every rank gets exactly the boxes it lacks.
    Exchange,
}

impl Collective {
    /// The name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Collective::Slice => "slice",
            Collective::AllGather => "all_gather",
            Collective::AllToAll => "all_to_all",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllReduce => "all_reduce",
            Collective::Permute => "permute",
            Collective::Exchange => "exchange",
        }
    }
}

impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// Messages of an exchange that are timed one by one at most.
const MAX_MESSAGES: u64 = 1 << 14;

/// A step without its ends.
pub(super) struct Edge {
    pub(super) kind: Collective,
    pub(super) axes: Axes,
    pub(super) recv_bytes: u64,
    pub(super) peak_bytes: u64,
    pub(super) seconds: f64,
}

/// A tensor on a mesh with its cost model: where plans are made. Shardings given to it have been
/// [stripped](Space::strip).
pub(super) struct Space<'a> {
    geometry: Geometry<'a>,
    /// Bytes of an element.
    pub(super) size: u64,
    /// The wires along each axis.
    pub(super) links: SmallVec<[Link; 4]>,
    /// What a ring along each axis gets.
    rings: SmallVec<[Link; 4]>,
}

impl<'a> Deref for Space<'a> {
    type Target = Geometry<'a>;

    fn deref(&self) -> &Geometry<'a> {
        &self.geometry
    }
}

impl<'a> Space<'a> {
    pub(super) fn new(mesh: &'a Mesh, shape: &'a Shape, dtype: DType) -> Result<Self> {
        shape.checked_numel("plan")?;
        let cost = mesh.cost();
        cost.check()?;
        let axes = 0..mesh.axes().len();
        Ok(Self {
            geometry: Geometry::new(mesh, shape),
            size: dtype.size() as u64,
            links: axes.clone().map(|a| cost.link(mesh, a)).collect(),
            rings: axes.map(|a| cost.ring(mesh, a)).collect(),
        })
    }

    /// The most bytes per second that any step gets.
    pub(super) fn fastest(&self) -> f64 {
        let links = self.links.iter().chain(&self.rings);
        links.fold(0.0, |b: f64, l| b.max(l.bandwidth))
    }

    /// The sharding without axes of a single rank, which change nothing.
    pub(super) fn strip(&self, sharding: &Sharding) -> Sharding {
        sharding.without_mask(!self.axes())
    }

    /// Bytes of the largest part.
    pub(super) fn local(&self, sharding: &Sharding) -> u64 {
        self.largest(sharding) * self.size
    }

    /// Bytes that an all-reduce of parts of `local` bytes receives over `k` ranks, by the ring
    /// algorithm.
    pub(super) fn all_reduce_bytes(&self, local: u64, k: u64) -> u64 {
        (2 * u128::from(k - 1) * u128::from(local)).div_ceil(u128::from(k)) as u64
    }

    /// Bytes that a reduce-scatter into parts of at most `part` bytes receives over `k` ranks.
    pub(super) fn reduce_scatter_bytes(&self, part: u64, k: u64) -> u64 {
        part.saturating_mul(k - 1)
    }

    /// What a single step from one sharding to another is and costs; `None` where no step does it.
    pub(super) fn edge(
        &self,
        from: &Sharding,
        from_grid: &Grid,
        to: &Sharding,
        to_grid: &Grid,
    ) -> Option<Edge> {
        let traffic = self.traffic(from, from_grid, to, to_grid);
        let (kind, axes) = self.classify(from, to, traffic)?;
        let k: u64 = axes.iter().map(|a| self.mesh.size(*a) as u64).product();
        let cost = self.mesh.cost();
        let slowest = |links: &[Link]| {
            axes.iter()
                .fold(Link::NONE, |link, a| link.slower(links[*a]))
        };
        let (wire, around) = (slowest(&self.links), slowest(&self.rings));
        let recv_bytes = match kind {
            Collective::AllReduce => self.all_reduce_bytes(self.local(from), k),
            Collective::ReduceScatter => self.reduce_scatter_bytes(self.local(to), k),
            _ => traffic.missing * self.size,
        };
        let ring = |rounds: u64, bytes| cost.ring_seconds(around, rounds * (k - 1), bytes);
        let seconds = match kind {
            Collective::Slice => 0.0,
            Collective::AllReduce => ring(2, recv_bytes),
            Collective::AllGather => ring(1, recv_bytes),
            // An all-reduce does it too, whatever parts of odd sizes weigh.
            Collective::ReduceScatter => {
                ring(1, recv_bytes).min(ring(2, self.all_reduce_bytes(self.local(from), k)))
            }
            Collective::AllToAll => cost.ring_seconds(wire, k - 1, recv_bytes),
            Collective::Permute | Collective::Exchange => {
                cost.start + self.exchange_seconds(from, from_grid, to, to_grid, traffic.missing)
            }
        };
        Some(Edge {
            kind,
            axes,
            recv_bytes,
            peak_bytes: traffic.both * self.size,
            seconds,
        })
    }

    /// What the worst rank lacks. Where values become partial, the first rank holds them and the
    /// others need nothing.
    pub(super) fn traffic(
        &self,
        from: &Sharding,
        from_grid: &Grid,
        to: &Sharding,
        to_grid: &Grid,
    ) -> Traffic {
        self.even(from, to).unwrap_or_else(|| {
            self.compare(from_grid, to_grid, to.partial_mask() & !from.partial_mask())
        })
    }

    /// What a single step does; `None` where no step does it.
    pub(super) fn classify(
        &self,
        from: &Sharding,
        to: &Sharding,
        traffic: Traffic,
    ) -> Option<(Collective, Axes)> {
        if self.empty {
            return Some((Collective::Slice, Axes::new()));
        }
        let resolved = to_resolve(from, to);
        if resolved != 0 {
            return self.classify_reduction(from, to, resolved);
        }
        let new = to.partial_mask() & !from.partial_mask();
        // (axes that leave a dimension, axes that enter one), and what that looks like dimension by
        // dimension.
        let (mut left, mut entered) = (Axes::new(), 0u32);
        let (mut apart, mut same_parts) = (true, true);
        for d in 0..self.rank() {
            let (leaving, entering) = after_prefix(from.cuts_of(d), to.cuts_of(d));
            left.extend(leaving.iter().map(|(_, a)| *a as usize));
            entered = entering.iter().fold(entered, |mask, (_, a)| mask | 1 << a);
            apart &= leaving.is_empty() || entering.is_empty();
            let parts = |cuts: &Cuts| {
                cuts.iter()
                    .map(|(_, a)| self.mesh.size(*a as usize))
                    .product::<usize>()
            };
            same_parts &= parts(leaving) == parts(entering);
        }
        // Odd sizes can leave nothing to send, whatever the cuts look like.
        if left.is_empty() || traffic.missing == 0 {
            return Some((Collective::Slice, Axes::new()));
        }
        let mask = left.iter().fold(0, |mask, a| mask | 1 << a);
        let kind = match (apart, new) {
            (true, 0) if entered == 0 => Collective::AllGather,
            (true, 0) if entered == mask => Collective::AllToAll,
            (_, 0) if same_parts => Collective::Permute,
            _ => Collective::Exchange,
        };
        if kind >= Collective::Permute {
            left.extend(bits(
                Route::new(self.mesh, &self.links, from, to).turn_mask() & !mask,
            ));
        }
        Some((kind, left))
    }

    /// Removing partial axes: their cuts stay, or all of them cut one dimension more finely.
    fn classify_reduction(
        &self,
        from: &Sharding,
        to: &Sharding,
        resolved: u32,
    ) -> Option<(Collective, Axes)> {
        if to.partial_mask() & !(from.partial_mask() & !resolved) != 0 {
            return None;
        }
        let mut scattered: Option<Axes> = None;
        for d in 0..self.rank() {
            let (leaving, entering) = after_prefix(from.cuts_of(d), to.cuts_of(d));
            if !leaving.is_empty() || !entering.is_empty() && scattered.is_some() {
                return None;
            }
            if !entering.is_empty() {
                scattered = Some(entering.iter().map(|(_, a)| *a as usize).collect());
            }
        }
        match scattered {
            None => Some((Collective::AllReduce, bits(resolved).collect())),
            Some(axes) if axes.iter().fold(0, |mask, a| mask | 1 << a) == resolved => {
                Some((Collective::ReduceScatter, axes))
            }
            Some(_) => None,
        }
    }

    /// What the worst rank waits for its messages, of `missing` elements in all.
    fn exchange_seconds(
        &self,
        from: &Sharding,
        from_grid: &Grid,
        to: &Sharding,
        to_grid: &Grid,
        missing: u64,
    ) -> f64 {
        let route = Route::new(self.mesh, &self.links, from, to);
        let new = to.partial_mask() & !from.partial_mask();
        let receivers = from.cut_mask() | to.cut_mask() | new;
        let senders = self.group(route.vary);
        if self.group(receivers).saturating_mul(senders) > MAX_MESSAGES {
            // Too many to look at each: as if everyone sent to everyone.
            let link = bits(route.vary | route.turn_mask())
                .fold(Link::NONE, |link, a| link.slower(self.links[a]));
            return (senders - 1).min(missing) as f64 * link.latency
                + self.mesh.cost().transfer_seconds(link, missing * self.size);
        }
        self.charge(self.group(receivers) as usize);
        // Messages share the wire, so that the efficiency is that of all bytes together.
        let cost = self.mesh.cost();
        let all = missing as f64 * self.size as f64;
        let slowed = if all > 0.0 {
            cost.transfers.at_best(all) / all
        } else {
            1.0
        };
        let mut worst = 0.0f64;
        self.walk(receivers, &mut [0; 16], |at| {
            if off_origin(at, new) {
                return;
            }
            let mut seconds = 0.0;
            self.walk(route.vary, &mut route.base(self.mesh, at), |source| {
                let elements = self.overlap(from_grid, source, to_grid, at);
                if elements > 0 && !route.same_box(source, at) {
                    let crossed =
                        bits(route.vary | route.turn_mask()).filter(|a| source[*a] != at[*a]);
                    let link = crossed.fold(Link::NONE, |link, a| link.slower(self.links[a]));
                    seconds +=
                        link.latency + slowed * (elements * self.size) as f64 / link.bandwidth;
                }
            });
            worst = worst.max(seconds);
        });
        worst
    }
}

/// (dimension, axis) pairs of one dimension, major first.
type Cuts = [(u8, u8)];

/// What two lists of cuts have after their common beginning.
fn after_prefix<'s>(from: &'s Cuts, to: &'s Cuts) -> (&'s Cuts, &'s Cuts) {
    let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
    (&from[common..], &to[common..])
}

/// From whom a rank gets the boxes it lacks.
///
/// The senders differ from the receiver along the axes that leave a dimension. Where copies are at
/// hand along axes that only now begin to cut, receivers that want the same box turn to different
/// copies, unless that takes them over a slower link.
pub(super) struct Route {
    /// Axes along which a receiver finds its senders.
    pub(super) vary: u32,
    /// Axes along which the sender is another copy of the same box.
    copies: Axes,
    /// Axes whose ranks will want the same.
    askers: Axes,
}

impl Route {
    pub(super) fn new(mesh: &Mesh, links: &[Link], from: &Sharding, to: &Sharding) -> Self {
        let (used, wanted) = (from.cut_mask(), to.cut_mask());
        let rank = from
            .cuts()
            .chain(to.cuts())
            .map(|(d, _)| d + 1)
            .max()
            .unwrap_or(0);
        let mut vary = 0;
        for d in 0..rank {
            vary = after_prefix(from.cuts_of(d), to.cuts_of(d))
                .0
                .iter()
                .fold(vary, |mask, (_, a)| mask | 1 << a);
        }
        let copies = wanted & !used;
        let askers = used & !wanted & !to.partial_mask();
        let slowest = bits(vary)
            .fold(Link::NONE, |link, a| link.slower(links[a]))
            .bandwidth;
        let near =
            askers == 0 || bits(copies).any(|a| mesh.size(a) > 1 && links[a].bandwidth < slowest);
        if near {
            return Self {
                vary,
                copies: Axes::new(),
                askers: Axes::new(),
            };
        }
        Self {
            vary,
            copies: bits(copies).collect(),
            askers: bits(askers).collect(),
        }
    }

    /// Axes along which it turns to other copies.
    fn turn_mask(&self) -> u32 {
        self.copies.iter().fold(0, |mask, a| mask | 1 << a)
    }

    /// The receiver, turned to the copy that it asks.
    pub(super) fn base(&self, mesh: &Mesh, at: &At) -> At {
        let mut base = *at;
        let index = |axes: &Axes| axes.iter().fold(0, |i, a| i * mesh.size(*a) + at[*a]);
        let mut turn = index(&self.copies) + index(&self.askers);
        for axis in self.copies.iter().rev() {
            base[*axis] = turn % mesh.size(*axis);
            turn /= mesh.size(*axis);
        }
        base
    }

    /// Whether sender and receiver hold the same box already: then the receiver has it.
    fn same_box(&self, source: &At, at: &At) -> bool {
        bits(self.vary).all(|a| source[a] == at[a])
    }
}
