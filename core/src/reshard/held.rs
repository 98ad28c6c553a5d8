//! What ranks lack.

use super::grid::{Geometry, Grid};
use crate::{Mesh, Shape, Sharding};

/// What ranks lack of other shardings of a tensor, given the one they hold.
pub(crate) struct Held<'a> {
    geometry: Geometry<'a>,
    grid: Grid,
}

impl<'a> Held<'a> {
    pub(crate) fn new(mesh: &'a Mesh, shape: &'a Shape, sharding: &Sharding) -> Self {
        let geometry = Geometry::new(mesh, shape);
        Self {
            grid: geometry.grid(sharding),
            geometry,
        }
    }

    /// Elements that the worst rank lacks of its part of `to`: the least it must receive. Partial
    /// axes do not count.
    pub(crate) fn lacks(&self, to: &Sharding) -> u64 {
        self.geometry
            .compare(&self.grid, &self.geometry.grid(to), 0)
            .missing
    }
}
