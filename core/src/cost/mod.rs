//! What a step costs on a machine: one model for the planner of reshards, for
//! [estimates](estimate()) of whole steps, and for whoever compares layouts.
//!
//! A model is a [file](CostModel::parse) of a few lines. [Presets](CostModel::preset) are such files
//! for common machines; `anymesh doctor --measure` writes the one of the machine at hand.

mod curve;
mod estimate;
mod presets;
mod text;

pub use curve::Curve;
pub use estimate::{Estimate, OpEstimate, estimate};
pub use presets::{LINKS, PRESETS};

use crate::{DType, Error, Mesh, Result};
use std::collections::BTreeMap;

/// The wire between neighbours along a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds before the first byte of a message arrives.
    pub latency: f64,
    /// Bytes per second that a rank receives.
    pub bandwidth: f64,
}

impl Link {
    /// The worse of two in each respect: what a group over both axes gets.
    pub fn slower(self, other: Link) -> Link {
        Link {
            latency: self.latency.max(other.latency),
            bandwidth: self.bandwidth.min(other.bandwidth),
        }
    }

    /// No wire at all.
    pub(crate) const NONE: Link = Link {
        latency: 0.0,
        bandwidth: f64::INFINITY,
    };
}

/// Ranks that are closer to each other than to the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Node {
    /// How many: ranks `0 .. ranks` are the first node, and so on.
    pub ranks: usize,
    /// The wire between them.
    pub link: Link,
}

/// The device of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceModel {
    /// Bytes of its memory; `None` where nobody counts.
    pub memory: Option<u64>,
    /// Bytes per second between the memory and the processor.
    pub bandwidth: f64,
    /// Seconds that a kernel takes before it does anything.
    pub launch: f64,
    /// Floating-point operations per second of products, by the dtype of their factors. A dtype that
    /// is not here computes as the next wider one that is.
    pub rates: BTreeMap<DType, f64>,
    /// The fraction of its rate that a product of so many operations reaches.
    pub products: Curve,
    /// The fraction of the bandwidth that a kernel which touches so many bytes reaches.
    pub touches: Curve,
}

/// A machine, as a planner sees it: the links of mesh axes, the device of a rank, and how much
/// memory a reshard may use.
///
/// A collective over `k` ranks takes `start + (k - 1) * latency + bytes / bandwidth` with the
/// slowest link of its axes; an all-reduce waits `2 * (k - 1)` latencies. An exchange pays
/// `latency + bytes / bandwidth` for each message that the worst rank receives. A kernel takes its
/// launch, and the longer of its operations and its bytes. Small amounts reach a fraction of
/// the rates: see [`Curve`].
///
/// ```
/// # use anymesh_core::{Mesh, cost::{CostModel, Link}};
/// let mut cost = CostModel::default();
/// cost.axes.insert("dp".into(), Link { latency: 20e-6, bandwidth: 10e9 });
/// let mesh = Mesh::new("dp=2, tp=4", &anymesh_backend_cpu::device())?.with_cost(cost);
/// assert_eq!(mesh.cost().link(&mesh, 0).bandwidth, 10e9);
///
/// // A machine by name: within a node NVLink, between nodes InfiniBand.
/// let mesh = mesh.with_cost(CostModel::preset("h100")?);
/// assert_eq!(mesh.cost().link(&mesh, 0).bandwidth, 450e9);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// What it is called in tables.
    pub name: String,
    /// Axes that are not named below and leave the node.
    pub link: Link,
    /// Axes with links of their own, by name.
    pub axes: BTreeMap<String, Link>,
    /// Ranks with faster links among them, if there are such.
    pub node: Option<Node>,
    /// The fraction of a link's bandwidth that a step which receives so many bytes reaches.
    pub transfers: Curve,
    /// Seconds to start a step that communicates, whatever its size.
    pub start: f64,
    /// How much longer computing and communicating take while they run at the same time: 1 where
    /// they do not disturb each other, 2 where nothing is gained.
    pub overlap: f64,
    /// The most bytes that one rank may hold of the tensor during a reshard, source and destination
    /// together.
    pub memory: Option<u64>,
    /// The device of every rank.
    pub device: DeviceModel,
}

impl Default for CostModel {
    /// Round numbers: 5 us for each step, 1 us for each hop and 100 GB/s everywhere; a device of
    /// 100 TFLOP/s (10 in f32, 1 in f64) and 1 TB/s that launches a kernel in 5 us; any amount of
    /// memory, full efficiency at every size, overlap for nothing.
    fn default() -> Self {
        Self {
            name: "default".into(),
            link: Link {
                latency: 1e-6,
                bandwidth: 100e9,
            },
            axes: BTreeMap::new(),
            node: None,
            transfers: Curve::default(),
            start: 5e-6,
            overlap: 1.0,
            memory: None,
            device: DeviceModel {
                memory: None,
                bandwidth: 1e12,
                launch: 5e-6,
                rates: [
                    (DType::BF16, 100e12),
                    (DType::F16, 100e12),
                    (DType::F32, 10e12),
                    (DType::F64, 1e12),
                ]
                .into(),
                products: Curve::default(),
                touches: Curve::default(),
            },
        }
    }
}

impl CostModel {
    /// The wire between a rank and its neighbours along a mesh axis.
    pub fn link(&self, mesh: &Mesh, axis: usize) -> Link {
        let Some((name, size)) = mesh.axes().get(axis) else {
            return self.link;
        };
        self.link_of(name, *size, apart(mesh, axis))
    }

    /// What a ring along a mesh axis gets.
    pub fn ring(&self, mesh: &Mesh, axis: usize) -> Link {
        let Some((name, size)) = mesh.axes().get(axis) else {
            return self.link;
        };
        self.ring_of(name, *size, apart(mesh, axis))
    }

    /// [`link`](Self::link) without a mesh: of an axis of `size` ranks, neighbours along which are
    /// `apart` ranks apart.
    pub fn link_of(&self, name: &str, size: usize, apart: usize) -> Link {
        match (self.axes.get(name), &self.node) {
            (Some(link), _) => *link,
            (None, Some(node)) if node.ranks.is_multiple_of(size * apart) => node.link,
            _ => self.link,
        }
    }

    /// [`ring`](Self::ring) without a mesh. Where several ranks of a group are in a node, so many
    /// rings leave the node, each through the wire of another rank.
    pub fn ring_of(&self, name: &str, size: usize, apart: usize) -> Link {
        let link = self.link_of(name, size, apart);
        let Some(node) = &self.node else {
            return link;
        };
        let together = (node.ranks / apart.max(1)).min(size);
        if self.axes.contains_key(name) || link == node.link || together < 2 {
            return link;
        }
        let bandwidth = link.bandwidth * together as f64;
        Link {
            latency: link.latency,
            bandwidth: bandwidth.min(node.link.bandwidth).max(link.bandwidth),
        }
    }

    /// Seconds until `bytes` have come over a link.
    pub fn transfer_seconds(&self, link: Link, bytes: u64) -> f64 {
        self.transfers.at_best(bytes as f64) / link.bandwidth
    }

    /// Seconds of a collective that waits for `hops` neighbours in a row and brings `bytes` to a
    /// rank.
    pub fn ring_seconds(&self, link: Link, hops: u64, bytes: u64) -> f64 {
        self.start + hops as f64 * link.latency + self.transfer_seconds(link, bytes)
    }

    /// Operations per second of products whose factors are of this dtype, at best.
    pub fn rate(&self, dtype: DType) -> f64 {
        let rates = &self.device.rates;
        let wider = rates.range(dtype..).next();
        wider
            .or_else(|| rates.iter().next_back())
            .map_or(f64::INFINITY, |(_, rate)| *rate)
    }

    /// Seconds of a kernel that does so many operations of a product and touches so many bytes.
    pub fn kernel_seconds(&self, dtype: DType, product: f64, bytes: f64) -> f64 {
        let device = &self.device;
        let computing = device.products.at_best(product) / self.rate(dtype);
        device.launch + computing.max(device.touches.at_best(bytes) / device.bandwidth)
    }

    /// Seconds of computing and communicating that run at the same time.
    pub fn overlapped(&self, compute: f64, communication: f64) -> f64 {
        compute.max(communication) + (self.overlap - 1.0) * compute.min(communication)
    }

    /// Refuses times that are negative or no numbers, and links that carry nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let time = |t: f64| t >= 0.0 && t.is_finite();
        let rate = |r: f64| r > 0.0;
        let link = |l: &Link| time(l.latency) && rate(l.bandwidth);
        let device = &self.device;
        if time(self.start)
            && time(device.launch)
            && link(&self.link)
            && self.axes.values().all(link)
            && self.node.iter().all(|n| n.ranks > 0 && link(&n.link))
            && rate(device.bandwidth)
            && device.rates.values().all(|r| rate(*r))
            && (1.0..=2.0).contains(&self.overlap)
        {
            return Ok(());
        }
        Err(Error::argument(
            "plan",
            "cost",
            format!(
                "{self:?} is no cost model: times must be finite and not negative, bandwidths and rates above 0, a node has ranks, and overlap is 1 to 2"
            ),
        ))
    }
}

/// How far apart neighbours along an axis are. Names of ranks stay the same in sub-meshes, so that
/// these know their nodes too.
fn apart(mesh: &Mesh, axis: usize) -> usize {
    if mesh.size(axis) < 2 {
        return 1;
    }
    let ids = mesh.ids();
    ids[mesh.moved(0, axis, 1)].abs_diff(ids[0]).max(1)
}
