//! What all processes of a run must decide alike.

use crate::Result;
use anymesh_core::{Mesh, Sharding, Tensor};

/// Whether any process of a mesh says yes. A decision that depends on a clock or a signal differs
/// between processes; what follows from it may not.
pub(super) fn any(mesh: &Mesh, here: bool) -> Result<bool> {
    if mesh.is_local() {
        return Ok(here);
    }
    let every = (0..mesh.axes().len()).fold(Sharding::replicated(), |s, axis| s.cut(0, axis));
    let said = Tensor::from_fn([mesh.ranks()], (mesh, every), |_| i32::from(here))?;
    Ok(said.max_all()?.item()?.to_f64() != 0.0)
}

/// Waits until all processes of a mesh are here.
pub(crate) fn wait_for_all(mesh: &Mesh) -> Result<()> {
    any(mesh, true).map(|_| ())
}
