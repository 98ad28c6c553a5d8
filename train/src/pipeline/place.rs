//! The same value on another mesh.

use crate::Result;
use anymesh_core::{Mesh, Sharding, Tensor};

/// A tensor on another mesh, cut over the axes of the same names that it is cut over here; what is
/// partial is added up first. Ranks that are in both meshes keep what they have.
#[track_caller]
pub(crate) fn on_mesh(x: &Tensor, mesh: &Mesh) -> Result<Tensor> {
    if x.mesh() == mesh {
        return Ok(x.clone());
    }
    let mut there = Sharding::replicated();
    for (dim, axis) in x.sharding().cuts() {
        if let Ok(axis) = mesh.axis(&x.mesh().axes()[axis].0) {
            there = there.cut(dim, axis);
        }
    }
    Ok(x.to_mesh(mesh, there)?)
}
