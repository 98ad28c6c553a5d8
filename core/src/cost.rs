//! What communication costs.

use crate::{Error, Mesh, Result};
use std::collections::BTreeMap;

/// The wire between neighbours along a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds before the first byte of a message arrives.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

impl Link {
    /// The worse of two in each respect: what a group over both axes gets.
    pub(crate) fn slower(self, other: Link) -> Link {
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

/// What a planner assumes: a link for each mesh axis, and how much memory a reshard may use on a
/// rank.
///
/// A collective over `k` ranks takes `start + (k - 1) * latency + bytes / bandwidth` with the
/// slowest link of its axes; an all-reduce waits `2 * (k - 1)` latencies. An exchange pays
/// `latency + bytes / bandwidth` for each message that the worst rank receives.
///
/// ```
/// # use anymesh_core::{Mesh, reshard::{CostModel, Link}};
/// let mut cost = CostModel::default();
/// cost.axes.insert("dp".into(), Link { latency: 20e-6, bandwidth: 10e9 });
/// let mesh = Mesh::new("dp=2, tp=4", &anymesh_backend_cpu::device())?.with_cost(cost);
/// assert_eq!(mesh.cost().link(&mesh, 0).bandwidth, 10e9);
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Axes that are not named below.
    pub link: Link,
    /// Axes with links of their own, by name.
    pub axes: BTreeMap<String, Link>,
    /// Seconds to start a step that communicates, whatever its size.
    pub start: f64,
    /// The most bytes that one rank may hold of the tensor during a reshard, source and destination
    /// together.
    pub memory: Option<u64>,
}

impl Default for CostModel {
    /// 5 us for each step, 1 us for each hop and 100 GB/s everywhere, any amount of memory.
    fn default() -> Self {
        Self {
            link: Link {
                latency: 1e-6,
                bandwidth: 100e9,
            },
            axes: BTreeMap::new(),
            start: 5e-6,
            memory: None,
        }
    }
}

impl CostModel {
    /// The link of a mesh axis.
    pub fn link(&self, mesh: &Mesh, axis: usize) -> Link {
        if self.axes.is_empty() {
            return self.link;
        }
        mesh.axes()
            .get(axis)
            .and_then(|(name, _)| self.axes.get(name))
            .copied()
            .unwrap_or(self.link)
    }

    /// Refuses times that are negative or no numbers, and links that carry nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let time = |t: f64| t >= 0.0 && t.is_finite();
        let link = |l: &Link| time(l.latency) && l.bandwidth > 0.0;
        if time(self.start) && link(&self.link) && self.axes.values().all(link) {
            return Ok(());
        }
        Err(Error::Argument {
            op: "plan",
            detail: format!(
                "{self:?} is no cost model: times must be finite and not negative, bandwidths above 0"
            ),
        })
    }
}
