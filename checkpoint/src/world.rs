//! The processes that save together: they agree at every step whether to go on.

use crate::{Error, Result, plan::Tile};
use anymesh_core::{Mesh, transport::gather_bytes};
use std::{collections::BTreeMap, sync::Arc};

/// The processes that save together: those of a mesh, or this one alone.
#[derive(Clone, Debug)]
pub(crate) struct World(Option<Mesh>);

impl World {
    /// The processes that have ranks of these meshes, where one of them has ranks in others. All
    /// meshes over the same transport count: each process sees other ones as its own.
    pub(crate) fn of<'m>(meshes: impl Iterator<Item = &'m Mesh>) -> Result<Self> {
        let mut different: Vec<&Mesh> = vec![];
        for mesh in meshes.filter(|m| !m.is_single()) {
            if !different.contains(&mesh) {
                different.push(mesh);
            }
        }
        let Some(shared) = different.iter().find(|m| !m.is_local()) else {
            return Ok(Self(None));
        };
        if let [only] = different[..] {
            return Ok(Self(Some(only.clone())));
        }
        let same = |mesh: &&Mesh| match (mesh.transport(), shared.transport()) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        different.retain(same);
        Ok(Self(Some(Mesh::spanning(&different)?)))
    }

    /// Whether there are other processes.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this process has a rank, and so something to say.
    pub(crate) fn takes_part(&self) -> bool {
        let has_rank = |mesh: &Mesh| mesh.addressable().len() > 0;
        self.0.as_ref().is_none_or(has_rank)
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
        // Where the others are gone that is the cause, and an error here may be a consequence: who
        // leads removes what was written.
        let told = self.gather(&[u8::from(mine.is_err())])?;
        let mine = mine?;
        let ranks: Vec<usize> = told
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
        match &self.0 {
            // A process without ranks has nothing to save and asks nobody.
            Some(mesh) if mesh.addressable().len() == 0 => Ok(vec![]),
            Some(mesh) => Ok(gather_bytes(mesh, mine)?),
            None => Ok(vec![]),
        }
    }
}
