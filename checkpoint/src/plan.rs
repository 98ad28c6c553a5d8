//! Who writes what: a pure function of how the tensors lie, so that every process finds the same
//! plan by itself.

use crate::{
    TensorInfo,
    regions::{cut_into_tiles, flat_regions},
};
use anymesh_core::{Mesh, Region, Sharding, Tensor};
use std::collections::{BTreeMap, HashMap};

/// Regions are cut into tiles of at most this many bytes. A load of another layout reads only tiles
/// that it meets: along each dimension less than one tile too much at either end.
pub const TILE: usize = 4 << 20;

/// How a tensor lies.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Its type.
    pub info: TensorInfo,
    /// The mesh it lies on.
    pub mesh: Mesh,
    /// How it lies there, with nothing partial. Of a tensor in a fused buffer: how the buffer lies.
    pub sharding: Sharding,
    /// Where it is in a fused buffer, if it is in one.
    pub fused: Option<Slot>,
}

/// A place in a fused buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The first element.
    pub offset: usize,
    /// The number of elements of the buffer.
    pub length: usize,
}

impl Placed {
    /// A tensor of this type on a mesh.
    pub fn new(info: TensorInfo, mesh: &Mesh, sharding: Sharding) -> Self {
        Self {
            info,
            mesh: mesh.clone(),
            sharding,
            fused: None,
        }
    }

    /// How a tensor lies.
    pub fn of(x: &Tensor) -> Self {
        Self::new(
            TensorInfo {
                dtype: x.dtype(),
                shape: x.dims().to_vec(),
            },
            x.mesh(),
            x.sharding().clone(),
        )
    }

    /// The regions of the tensor that a rank holds. Of one in a fused buffer each comes with where
    /// it begins in the rank's part of the buffer; else the part is the region.
    pub fn regions(&self, rank: usize) -> Vec<(Region, Option<usize>)> {
        let Some(Slot { offset, length }) = self.fused else {
            let region = self
                .sharding
                .region(&self.mesh, rank, &self.info.shape.as_slice().into());
            return if region.numel() == 0 {
                vec![]
            } else {
                vec![(region, None)]
            };
        };
        let part = self.sharding.region(&self.mesh, rank, &[length].into());
        let (begin, end) = (part.start[0], part.start[0] + part.shape[0]);
        let numel = self.info.numel();
        let range = begin.clamp(offset, offset + numel) - offset
            ..end.clamp(offset, offset + numel) - offset;
        flat_regions(&self.info.shape, range)
            .into_iter()
            .map(|(region, at)| (region, Some(offset + at - begin)))
            .collect()
    }

    /// Type and layout as text: `f32[1024@dp, 4096]`, and for a fused buffer how that lies.
    pub fn layout(&self) -> String {
        match self.fused {
            None => self.sharding.type_string(
                self.info.dtype,
                &self.info.shape.as_slice().into(),
                &self.mesh,
            ),
            Some(Slot { offset, length }) => {
                let buffer =
                    self.sharding
                        .type_string(self.info.dtype, &[length].into(), &self.mesh);
                format!(
                    "{}{:?} at {offset} of {buffer}",
                    self.info.dtype, self.info.shape
                )
            }
        }
    }
}

/// A region of a tensor that one rank writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// The tensor.
    pub tensor: String,
    /// The part of it.
    pub region: Region,
}

/// The tiles that each rank writes, in order, none larger than `largest` bytes. Ranks are named
/// by their ids, which stay the same in sub-meshes. Replicas are written once, by the rank of their
/// holders that has the least to write so far.
pub fn owners(tensors: &BTreeMap<String, Placed>, largest: usize) -> BTreeMap<usize, Vec<Tile>> {
    let mut tiles: BTreeMap<usize, Vec<Tile>> = BTreeMap::new();
    let mut load: BTreeMap<usize, usize> = BTreeMap::new();
    for (name, placed) in tensors {
        let size = placed.info.dtype.size();
        for (region, holders) in holders(placed) {
            let least = holders
                .iter()
                .copied()
                .min_by_key(|id| (load.get(id).copied().unwrap_or(0), *id))
                .unwrap_or(0);
            *load.entry(least).or_default() += region.numel() * size;
            let tile = |region| Tile {
                tensor: name.clone(),
                region,
            };
            tiles
                .entry(least)
                .or_default()
                .extend(cut_into_tiles(&region, size, largest).into_iter().map(tile));
        }
    }
    tiles
}

/// The different regions of a tensor, each with the ids of the ranks that hold it.
pub(crate) fn holders(placed: &Placed) -> Vec<(Region, Vec<usize>)> {
    let mut found: Vec<(Region, Vec<usize>)> = vec![];
    let mut known: HashMap<Region, usize> = HashMap::new();
    for (rank, id) in placed.mesh.ids().iter().enumerate() {
        for (region, _) in placed.regions(rank) {
            let at = *known.entry(region.clone()).or_insert_with(|| {
                found.push((region, vec![]));
                found.len() - 1
            });
            found[at].1.push(*id);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use anymesh_core::{DType, meta};

    fn placed(mesh: &Mesh, shape: &[usize], sharding: Sharding) -> Placed {
        Placed::new(
            TensorInfo {
                dtype: DType::F32,
                shape: shape.to_vec(),
            },
            mesh,
            sharding,
        )
    }

    #[test]
    fn replicas_are_written_once_and_by_ranks_that_share_the_work() {
        let mesh = Mesh::new("a=2, b=2", &meta()).expect("a mesh");
        let names = |i: usize| format!("w{i}");
        let tensors: BTreeMap<String, Placed> = (0..8)
            .map(|i| (names(i), placed(&mesh, &[16, 16], Sharding::replicated())))
            .collect();
        let plan = owners(&tensors, TILE);
        assert_eq!(
            plan.values().map(Vec::len).collect::<Vec<_>>(),
            [2, 2, 2, 2]
        );
        let cut = BTreeMap::from([(
            "w".to_string(),
            placed(&mesh, &[5, 4], Sharding::replicated().cut(0, 0)),
        )]);
        let plan = owners(&cut, TILE);
        assert_eq!(
            plan.values()
                .flatten()
                .map(|p| p.region.shape[0])
                .sum::<usize>(),
            5
        );
        assert_eq!(plan.values().flatten().count(), 2);
    }

    #[test]
    fn ranks_of_a_sub_mesh_write_under_their_own_names() {
        let mesh = Mesh::new("stage=2, x=2", &meta())
            .expect("a mesh")
            .at("stage", 1)
            .expect("the second stage");
        let plan = owners(
            &BTreeMap::from([(
                "w".to_string(),
                placed(&mesh, &[4], Sharding::replicated().cut(0, 0)),
            )]),
            TILE,
        );
        assert_eq!(plan.keys().collect::<Vec<_>>(), [&2, &3]);
    }

    #[test]
    fn parts_of_a_fused_buffer_are_regions_wherever_it_is_cut() {
        let mesh = Mesh::new("x=3", &meta()).expect("a mesh");
        let slot = Some(Slot {
            offset: 5,
            length: 40,
        });
        let w = Placed {
            fused: slot,
            ..placed(&mesh, &[4, 6], Sharding::replicated().cut(0, 0))
        };
        // Ranks hold 13, 13 and 14 elements; the tensor is elements 5 to 29.
        let regions: Vec<Vec<(Vec<usize>, Vec<usize>, Option<usize>)>> = (0..3)
            .map(|r| {
                w.regions(r)
                    .into_iter()
                    .map(|(b, at)| (b.start.to_vec(), b.shape.to_vec(), at))
                    .collect()
            })
            .collect();
        assert_eq!(
            regions[0],
            [
                (vec![0, 0], vec![1, 6], Some(5)),
                (vec![1, 0], vec![1, 2], Some(11))
            ]
        );
        assert_eq!(
            regions[1],
            [
                (vec![1, 2], vec![1, 4], Some(0)),
                (vec![2, 0], vec![1, 6], Some(4)),
                (vec![3, 0], vec![1, 3], Some(10))
            ]
        );
        assert_eq!(regions[2], [(vec![3, 3], vec![1, 3], Some(0))]);
        assert_eq!(w.layout(), "f32[4, 6] at 5 of f32[40@x]");
    }
}
