//! Meshes and how tensors lie on them.
//!
//! Every tensor carries a mesh and a sharding. So far a mesh has one rank; the types are the ones that larger meshes use.

use crate::{DType, Device, Shape};
use smallvec::SmallVec;
use std::sync::Arc;

/// Named axes over ranks, and the devices of the ranks this process can address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh(Arc<MeshData>);

#[derive(Debug, PartialEq, Eq)]
struct MeshData {
    axes: Vec<(String, usize)>,
    devices: Vec<Device>,
}

impl Mesh {
    /// The mesh of one rank: a single device.
    pub fn single(device: &Device) -> Self {
        Self(Arc::new(MeshData { axes: vec![], devices: vec![device.clone()] }))
    }

    /// Axis names and sizes, major first.
    pub fn axes(&self) -> &[(String, usize)] {
        &self.0.axes
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.axes.iter().map(|(_, n)| n).product()
    }

    /// The devices of the addressable ranks.
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }
}

/// How partial values on the ranks of an axis combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Reduction {
    Sum,
    Max,
    Min,
    Prod,
    And,
    Or,
}

impl Reduction {
    fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Prod => "prod",
            Reduction::And => "and",
            Reduction::Or => "or",
        }
    }
}

/// For each tensor dimension the mesh axes that cut it (major first), and the axes over which values are partial.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Sharding {
    cuts: SmallVec<[(u8, u8); 4]>,
    partial: SmallVec<[(u8, Reduction); 2]>,
}

impl Sharding {
    /// The whole tensor on every rank.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// The mesh axes that cut tensor dimension `dim`, major first.
    pub fn axes_of(&self, dim: usize) -> impl Iterator<Item = usize> + '_ {
        self.cuts.iter().filter(move |(d, _)| *d as usize == dim).map(|(_, a)| *a as usize)
    }

    /// Mesh axes whose ranks hold parts of a reduction.
    pub fn partial(&self) -> impl Iterator<Item = (usize, Reduction)> + '_ {
        self.partial.iter().map(|(a, r)| (*a as usize, *r))
    }

    /// The type of a tensor as text: `f32[1024@dp, 4096@tp]{sum:sp}`.
    pub fn type_string(&self, dtype: DType, shape: &Shape, mesh: &Mesh) -> String {
        let name = |axis: usize| mesh.axes().get(axis).map_or("?", |(n, _)| n.as_str());
        let dims: Vec<String> = (0..shape.rank()).map(|d| self.axes_of(d).fold(shape[d].to_string(), |text, axis| format!("{text}@{}", name(axis)))).collect();
        let partial: Vec<String> = self.partial().map(|(axis, r)| format!("{}:{}", r.name(), name(axis))).collect();
        let suffix = if partial.is_empty() { String::new() } else { format!("{{{}}}", partial.join(", ")) };
        format!("{dtype}[{}]{suffix}", dims.join(", "))
    }
}
