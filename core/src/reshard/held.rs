//! What it takes to get from one sharding to others, without the plans: what the solver compares
//! many shardings by. It is what the [plan](super::plan) of fewest bytes then takes, to the byte.

use super::{
    Objective,
    edge::Space,
    fewest::{Fewest, Rest, at_least},
    grid::Geometry,
    known,
    moves::{self, to_resolve},
};
use crate::{DType, Mesh, Result, Shape, Sharding};

/// A tensor as it lies on a mesh.
pub(crate) struct Held<'a> {
    geometry: Geometry<'a>,
    dtype: DType,
    sharding: &'a Sharding,
}

/// Bytes that the worst rank receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Price {
    Exact(u64),
    AtLeast(u64),
}

impl<'a> Held<'a> {
    pub(crate) fn new(
        mesh: &'a Mesh,
        shape: &'a Shape,
        dtype: DType,
        sharding: &'a Sharding,
    ) -> Self {
        Self {
            geometry: Geometry::new(mesh, shape),
            dtype,
            sharding,
        }
    }

    /// What it takes to get to another sharding, as far as that is known at once.
    pub(crate) fn price(&self, to: &Sharding) -> Price {
        let (geometry, from) = (&self.geometry, self.sharding);
        let size = self.dtype.size() as u64;
        let resolve = to_resolve(from, to) & geometry.axes();
        if resolve == 0 || geometry.empty {
            return Price::Exact(self.lacks(to) * size);
        }
        let need = geometry.largest(to) * size;
        Price::AtLeast(at_least(geometry, size, from, resolve, need))
    }

    /// Elements that the worst rank lacks of its part of `to`. What is partial does not count;
    /// where values become partial, the first rank holds them and the others need nothing.
    pub(crate) fn lacks(&self, to: &Sharding) -> u64 {
        let (geometry, from) = (&self.geometry, self.sharding);
        let new = to.partial_mask() & !from.partial_mask();
        let compare = || geometry.compare(&geometry.grid(from), &geometry.grid(to), new);
        geometry.even(from, to).unwrap_or_else(compare).missing
    }

    /// What it takes exactly.
    pub(crate) fn exact(&self, to: &Sharding) -> Result<u64> {
        let Geometry { mesh, shape, .. } = self.geometry;
        let plan = || {
            known(mesh, shape, self.dtype, self.sharding, to, Objective::Bytes)
                .map(|plan| plan.recv_bytes)
        };
        if mesh.cost().memory.is_some() {
            // A bound on memory may make ways impossible.
            return plan();
        }
        if let Price::Exact(bytes) = self.price(to) {
            return Ok(bytes);
        }
        let space = Space::new(mesh, shape, self.dtype)?;
        let (from, to) = (space.strip(self.sharding), space.strip(to));
        let grid = space.grid(&to);
        let rest = |at: &Sharding| Rest::new(&space, at, &to, &grid);
        let resolve = to_resolve(&from, &to);
        match Fewest::bytes(&space, &from, &to, resolve, space.local(&to), &rest) {
            Some(bytes) => Ok(bytes),
            None => plan(),
        }
    }

    /// Ranks that were looked at so far.
    pub(crate) fn walked(&self) -> usize {
        self.geometry.walked()
    }

    /// The least it takes to combine all partial values, by axes that go on to cut something or do
    /// nothing any more.
    pub(crate) fn settled(&self) -> Result<u64> {
        let geometry = &self.geometry;
        let size = self.dtype.size() as u64;
        let partial = self.sharding.partial_mask() & geometry.axes();
        if geometry.empty || partial == 0 {
            return Ok(0);
        }
        let (local, k) = (
            geometry.largest(self.sharding) * size,
            geometry.group(partial),
        );
        let scatters = |d: usize| {
            let cuts = self.sharding.cuts_of(d).iter();
            let parts: usize = cuts.map(|(_, a)| geometry.mesh.size(*a as usize)).product();
            geometry.shape[d].is_multiple_of(parts * k as usize)
        };
        if (0..geometry.rank()).any(scatters) {
            return Ok(local / k * (k - 1));
        }
        let space = Space::new(geometry.mesh, geometry.shape, self.dtype)?;
        let mut best = u64::MAX;
        combine(
            &space,
            &space.strip(self.sharding),
            0,
            &mut best,
            &mut SETTLE_BUDGET.clone(),
        );
        Ok(best)
    }
}

/// Ways that are tried at most.
const SETTLE_BUDGET: usize = 500;

/// Tries all ways to combine what is partial.
fn combine(space: &Space, at: &Sharding, bytes: u64, best: &mut u64, budget: &mut usize) {
    if !at.is_partial() {
        *best = bytes;
        return;
    }
    moves::reductions(space, at, u32::MAX, &mut |next, received| {
        *budget = budget.saturating_sub(1);
        if bytes + received < *best {
            combine(space, next, bytes + received, best, budget);
        }
        *budget > 0
    });
}
