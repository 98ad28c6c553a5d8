//! Several meshes together: what they have in common, and what carries data between them.

use super::{Ids, Local, Mesh, MeshData};
use crate::{Error, Result};
use std::sync::Arc;

impl Mesh {
    /// One mesh over the ranks of two: those of `self` first, then those of `other` that are none of
    /// them. `same` says for each rank of `other` which one of `self` it is. The numbers are where
    /// the ranks of `other` are in the union.
    pub(crate) fn union(&self, other: &Mesh, same: &[Option<usize>]) -> (Self, Vec<usize>) {
        let (mut ids, mut data) = (self.ids().to_vec(), self.data());
        if data.elsewhere {
            data.local.clear();
        }
        let number = |(rank, same): (usize, &Option<usize>)| {
            same.unwrap_or_else(|| {
                ids.push(other.id(rank));
                if let Some(at) = other.position_of(rank) {
                    let local = Local::Mesh(other.local_mesh(at).clone());
                    data.local.push((ids.len() - 1, local));
                }
                ids.len() - 1
            })
        };
        let numbers = same.iter().enumerate().map(number).collect();
        let union = MeshData {
            axes: smallvec::smallvec![("rank".to_string(), ids.len())],
            ranks: ids.len(),
            ids: Ids::Named(ids),
            stands_for_all: false,
            elsewhere: false,
            ..data
        };
        (Self::assemble(union), numbers)
    }

    /// One mesh over all ranks of some: for what their processes do together. It has one axis,
    /// `rank`, on which the ranks are in the order of their ids.
    ///
    /// ```
    /// # use anymesh_core::Mesh;
    /// # let mesh = Mesh::new("pp=2, tp=2", &anymesh_backend_cpu::device())?;
    /// let all = Mesh::spanning(&[&mesh.at("pp", 1)?, &mesh.at("tp", 0)?])?;
    /// assert_eq!((all.to_string(), all.ids()), ("mesh(rank=3)".into(), &[0, 2, 3][..]));
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn spanning(meshes: &[&Mesh]) -> Result<Self> {
        let Some(first) = meshes.iter().find(|mesh| !mesh.is_single()) else {
            return Err(Error::mesh(&[], "there is no mesh with axes to span"));
        };
        let mut found: Vec<(usize, Option<Local>)> = vec![];
        for mesh in meshes.iter().filter(|mesh| !mesh.is_single()) {
            mesh.same_transport("spanning", first)?;
            for (rank, id) in mesh.ids().iter().enumerate() {
                let local = |at| Local::Mesh(mesh.local_mesh(at).clone());
                found.push((*id, mesh.position_of(rank).map(local)));
            }
        }
        found.sort_by_key(|(id, local)| (*id, local.is_none()));
        found.dedup_by_key(|(id, _)| *id);
        let ranks = found.len();
        let ids = Ids::Named(found.iter().map(|(id, _)| *id).collect());
        let here = |(rank, (_, local)): (usize, (usize, Option<Local>))| Some((rank, local?));
        let local = found.into_iter().enumerate().filter_map(here).collect();
        let axes = smallvec::smallvec![("rank".to_string(), ranks)];
        Ok(Self::assemble(MeshData {
            ids,
            local,
            transport: first.0.transport.clone(),
            cost: first.0.cost.clone(),
            has_values: first.0.has_values,
            ..MeshData::counted(axes, ranks)
        }))
    }

    /// Refuses two meshes that do not communicate over the same transport.
    pub(crate) fn same_transport(&self, op: &'static str, other: &Mesh) -> Result<()> {
        let (Some(a), Some(b)) = (self.transport(), other.transport()) else {
            return Ok(());
        };
        let alike = self.is_local() && other.is_local() && a.name() == b.name();
        if alike || Arc::ptr_eq(a, b) {
            return Ok(());
        }
        let detail = format!(
            "{self} communicates over {} and {other} over another {}: make both on the same machine, or give them the same transport with `with_transport`",
            a.name(),
            b.name()
        );
        Err(Error::argument(op, "mesh", detail))
    }

    /// Refuses to read values where this process has no rank.
    pub(crate) fn check_here(&self, op: &'static str) -> Result<()> {
        if !self.0.elsewhere {
            return Ok(());
        }
        let detail = format!(
            "{op}: all ranks of {self} are in other processes, so that there are no values to read in this one: bring the tensor to a mesh with a rank here first, with `to_mesh` in all processes"
        );
        Err(Error::Mesh {
            axes: self.axes().into(),
            ranks: [].into(),
            detail,
        })
    }
}
