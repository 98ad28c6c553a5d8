//! What communication costs.

use crate::{Mesh, Shape, Sharding};
use std::collections::BTreeMap;

/// The wire between neighbours along a mesh axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds before the first byte of a message arrives.
    pub latency: f64,
    /// Bytes per second.
    pub bandwidth: f64,
}

/// What a planner assumes: a link for each mesh axis, and how much memory a reshard may use on a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Axes that are not named below.
    pub link: Link,
    /// Axes with links of their own, by name.
    pub axes: BTreeMap<String, Link>,
    /// The most bytes that one rank may hold of the tensor during a reshard, source and destination together.
    pub memory: Option<u64>,
}

impl Default for CostModel {
    /// 5 us and 100 GB/s everywhere, any amount of memory.
    fn default() -> Self {
        Self { link: Link { latency: 5e-6, bandwidth: 100e9 }, axes: BTreeMap::new(), memory: None }
    }
}

impl CostModel {
    /// The link of a mesh axis.
    pub fn link(&self, mesh: &Mesh, axis: usize) -> Link {
        mesh.axes().get(axis).and_then(|(name, _)| self.axes.get(name)).copied().unwrap_or(self.link)
    }
}

/// Elements that the worst rank lacks of its part of `to` when it holds its part of `from`: the least it must receive. Partial axes do not count.
pub(crate) fn received(mesh: &Mesh, shape: &Shape, from: &Sharding, to: &Sharding) -> u64 {
    if to.cuts().len() == 0 && from.cuts().len() == 0 {
        return 0;
    }
    (0..mesh.ranks())
        .map(|rank| {
            let (mut needed, mut held) = (1u64, 1u64);
            for d in 0..shape.rank() {
                let want = to.range(mesh, rank, d, shape[d]);
                let have = from.range(mesh, rank, d, shape[d]);
                needed *= want.len() as u64;
                held *= want.end.min(have.end).saturating_sub(want.start.max(have.start)) as u64;
            }
            needed - held
        })
        .max()
        .unwrap_or(0)
}
