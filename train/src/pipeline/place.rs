//! The same value on another mesh.

use crate::Result;
use anymesh_core::{Mesh, Moving, Sharding, Tensor};

/// A tensor on another mesh, cut over the axes of the same names that it is cut over here; what is
/// partial is added up first. Ranks that are in both meshes keep what they have.
#[track_caller]
pub(crate) fn on_mesh(x: &Tensor, mesh: &Mesh) -> Result<Tensor> {
    if x.mesh() == mesh {
        return Ok(x.clone());
    }
    Ok(x.to_mesh(mesh, there(x, mesh))?)
}

/// The same without its past, which goes on beside the program where the transport does that.
#[track_caller]
pub(crate) fn start_on_mesh(x: &Tensor, mesh: &Mesh) -> Result<Moving> {
    let sharding = match x.mesh() == mesh {
        true => x.sharding().clone(),
        false => there(x, mesh),
    };
    Ok(x.start_to_mesh(mesh, sharding)?)
}

/// How a tensor is cut on another mesh.
fn there(x: &Tensor, mesh: &Mesh) -> Sharding {
    let mut there = Sharding::replicated();
    for (dim, axis) in x.sharding().cuts() {
        if let Ok(axis) = mesh.axis(&x.mesh().axes()[axis].0) {
            there = there.cut(dim, axis);
        }
    }
    there
}
