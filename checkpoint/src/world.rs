//! The processes that save together: they agree at every step whether to go on.

use crate::{Error, Result, plan::Tile};
use anymesh_core::{DType, Mesh, Tensor, transport::Part};
use std::collections::BTreeMap;

/// The processes that save together: those of a mesh, or this one alone.
#[derive(Clone, Debug)]
pub(crate) struct World(Option<Mesh>);

impl World {
    /// The processes of the largest of these meshes that has ranks in other processes.
    pub(crate) fn of<'m>(meshes: impl Iterator<Item = &'m Mesh>) -> Self {
        Self(
            meshes
                .filter(|m| !m.is_local())
                .max_by_key(|m| m.ranks())
                .cloned(),
        )
    }

    /// Whether there are other processes.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this is the process that does what only one may do: lock, write the manifest,
    /// rename.
    pub(crate) fn leads(&self) -> bool {
        self.0
            .as_ref()
            .is_none_or(|mesh| mesh.addressable().next() == Some(0))
    }

    /// What this process writes of a plan. Tensors on ranks outside of the mesh are the same in
    /// every process, and the first process writes them.
    pub(crate) fn share(&self, plan: BTreeMap<usize, Vec<Tile>>) -> Vec<(usize, Vec<Tile>)> {
        let Some(mesh) = &self.0 else {
            return plan.into_iter().collect();
        };
        let mut own: BTreeMap<usize, Vec<Tile>> = BTreeMap::new();
        for (id, tiles) in plan {
            let rank = mesh.ids().iter().position(|i| *i == id).unwrap_or(0);
            if mesh.addressable().any(|r| r == rank) {
                own.entry(mesh.ids()[rank]).or_default().extend(tiles);
            }
        }
        own.into_iter().collect()
    }

    /// Succeeds where every process has succeeded so far. One that has not gets its own error back,
    /// the others get one that names it. Every process calls this, whatever happened to it.
    pub(crate) fn agree<T>(&self, mine: Result<T>) -> Result<T> {
        let told = self.gather(&[u8::from(mine.is_err())]);
        let mine = mine?;
        let ranks: Vec<usize> = told?
            .into_iter()
            .filter(|(_, bytes)| bytes.as_slice() != [0])
            .map(|(rank, _)| rank)
            .collect();
        if ranks.is_empty() {
            Ok(mine)
        } else {
            Err(Error::Elsewhere { ranks })
        }
    }

    /// What every process has to say, with its first rank; the empty list where there is only this
    /// one.
    pub(crate) fn gather(&self, mine: &[u8]) -> Result<Vec<(usize, Vec<u8>)>> {
        let Some(mesh) = &self.0 else {
            return Ok(vec![]);
        };
        let Some(transport) = mesh.transport() else {
            return Ok(vec![]);
        };
        // The first rank of a process speaks for it.
        let first = mesh.addressable().next();
        let here = |rank: usize| mesh.addressable().position(|r| r == rank);
        let part = |rank: usize, length: usize, dtype: DType, bytes: &[u8]| match here(rank) {
            Some(at) => Ok(Part::new(
                rank,
                &Tensor::from_bytes(bytes, dtype, [length], mesh.device(at))?,
            )),
            None => Ok::<Part, Error>(Part::elsewhere(rank, dtype, [length])),
        };
        let own = |rank: usize| if Some(rank) == first { mine } else { &[][..] };
        let lengths = (0..mesh.ranks())
            .map(|rank| part(rank, 1, DType::I64, &(own(rank).len() as i64).to_le_bytes()))
            .collect::<Result<Vec<_>>>()?;
        let lengths = transport
            .all_gather(mesh, &lengths, 0)?
            .into_iter()
            .flatten()
            .next();
        let lengths: Vec<i64> = lengths
            .map(|t| t.to_vec::<i64>())
            .transpose()?
            .unwrap_or_default();
        let parts = lengths
            .iter()
            .enumerate()
            .map(|(rank, n)| part(rank, *n as usize, DType::U8, own(rank)))
            .collect::<Result<Vec<_>>>()?;
        let all = transport
            .all_gather(mesh, &parts, 0)?
            .into_iter()
            .flatten()
            .next();
        let all: Vec<u8> = all.map(|t| t.to_bytes()).transpose()?.unwrap_or_default();
        let mut rest = all.as_slice();
        let mut out = vec![];
        for (rank, n) in lengths.into_iter().enumerate().filter(|(_, n)| *n > 0) {
            let wrong = || {
                Error::Argument(format!(
                    "the ranks sent {} bytes in all, fewer than they said",
                    all.len()
                ))
            };
            let (bytes, after) = rest.split_at_checked(n as usize).ok_or_else(wrong)?;
            out.push((rank, bytes.to_vec()));
            rest = after;
        }
        Ok(out)
    }
}
