//! Who writes what: a pure function of how the tensors lie, so that every process finds the same plan by itself.

use crate::TensorInfo;
use anymesh_core::{Mesh, Region, Sharding, Tensor};
use std::collections::BTreeMap;

/// Larger boxes are cut along their first dimension: a read of a part of a tensor then touches few of them, and threads share the work.
pub const LARGEST_BOX: usize = 64 << 20;

/// How a tensor lies.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Its type.
    pub info: TensorInfo,
    /// The mesh it lies on.
    pub mesh: Mesh,
    /// How it lies there, with nothing partial.
    pub sharding: Sharding,
}

impl Placed {
    /// How a tensor lies.
    pub fn of(x: &Tensor) -> Self {
        Self { info: TensorInfo { dtype: x.dtype(), shape: x.dims().to_vec() }, mesh: x.mesh().clone(), sharding: x.sharding().clone() }
    }
}

/// A box to write.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The tensor.
    pub tensor: String,
    /// The part of it.
    pub region: Region,
}

/// The boxes that each rank writes, in order, none larger than `largest` bytes where rows are not. Replicas are written once, by the rank of their holders that has the least to write so far.
pub fn owners(tensors: &BTreeMap<String, Placed>, largest: usize) -> BTreeMap<usize, Vec<Piece>> {
    let mut pieces: BTreeMap<usize, Vec<Piece>> = BTreeMap::new();
    let mut load: BTreeMap<usize, usize> = BTreeMap::new();
    for (name, placed) in tensors {
        for (region, holders) in holders(placed) {
            let least = holders.iter().copied().min_by_key(|rank| (load.get(rank).copied().unwrap_or(0), *rank)).unwrap_or(0);
            let size = placed.info.dtype.size();
            *load.entry(least).or_default() += region.numel() * size;
            let own = pieces.entry(least).or_default();
            own.extend(cut(&region, size, largest).into_iter().map(|region| Piece { tensor: name.clone(), region }));
        }
    }
    pieces
}

/// The different boxes of a tensor, each with the ranks that hold it. Empty ones are left out, but for a tensor that has no elements at all.
fn holders(placed: &Placed) -> Vec<(Region, Vec<usize>)> {
    let shape = placed.info.shape.as_slice().into();
    let mut found: Vec<(Region, Vec<usize>)> = vec![];
    for rank in 0..placed.mesh.ranks() {
        let region = placed.sharding.region(&placed.mesh, rank, &shape);
        if region.numel() == 0 {
            continue;
        }
        match found.iter_mut().find(|(r, _)| *r == region) {
            Some((_, ranks)) => ranks.push(rank),
            None => found.push((region, vec![rank])),
        }
    }
    found
}

/// A box in parts that are not too large.
fn cut(region: &Region, size: usize, largest: usize) -> Vec<Region> {
    let bytes = region.numel() * size;
    let Some((&first, _)) = region.shape.split_first().filter(|(first, _)| bytes > largest && **first > 1) else { return vec![region.clone()] };
    let rows = (largest / (bytes / first).max(1)).max(1);
    let part = |start: usize| {
        let mut part = region.clone();
        part.start[0] += start;
        part.shape[0] = rows.min(first - start);
        part
    };
    (0..first).step_by(rows).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_core::{DType, meta};

    fn placed(mesh: &Mesh, shape: &[usize], sharding: Sharding) -> Placed {
        Placed { info: TensorInfo { dtype: DType::F32, shape: shape.to_vec() }, mesh: mesh.clone(), sharding }
    }

    #[test]
    fn replicas_are_written_once_and_by_ranks_that_share_the_work() {
        let mesh = Mesh::new("a=2, b=2", &meta()).expect("a mesh");
        let names = |i: usize| format!("w{i}");
        let tensors: BTreeMap<String, Placed> = (0..8).map(|i| (names(i), placed(&mesh, &[16, 16], Sharding::replicated()))).collect();
        let plan = owners(&tensors, LARGEST_BOX);
        assert_eq!(plan.values().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2, 2]);
        let cut = BTreeMap::from([("w".to_string(), placed(&mesh, &[5, 4], Sharding::replicated().cut(0, 0)))]);
        let plan = owners(&cut, LARGEST_BOX);
        assert_eq!(plan.values().flatten().map(|p| p.region.shape[0]).sum::<usize>(), 5);
        assert_eq!(plan.values().flatten().count(), 2);
    }

    #[test]
    fn large_boxes_are_cut_and_fill_the_tensor() {
        let region = Region { start: [7usize, 0].into_iter().collect(), shape: [1000usize, 1 << 20].into_iter().collect() };
        let parts = cut(&region, 4, LARGEST_BOX);
        assert!(parts.iter().all(|p| p.numel() * 4 <= LARGEST_BOX));
        assert_eq!(parts.iter().map(|p| p.shape[0]).sum::<usize>(), 1000);
        assert_eq!(parts[1].start[0], 7 + parts[0].shape[0]);
    }
}
