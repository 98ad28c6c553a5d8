//! What must hold before anything is sent.

use super::{Message, Part};
use crate::{Error, Mesh, OperandType, Result};
use smallvec::SmallVec;

pub(super) fn fail(op: &'static str, ranks: &[usize], detail: impl Into<String>) -> Error {
    Error::Transport {
        op,
        detail: detail.into(),
        ranks: ranks.to_vec(),
    }
}

/// Refuses a rank that the mesh does not have.
fn member(op: &'static str, mesh: &Mesh, rank: usize) -> Result<()> {
    if rank < mesh.ranks() {
        Ok(())
    } else {
        Err(fail(
            op,
            &[rank],
            format!("{mesh} has ranks 0..{}", mesh.ranks()),
        ))
    }
}

impl Part {
    /// Refuses a rank that the mesh does not have, and data that is missing or is not what the part
    /// says.
    pub fn check(&self, op: &'static str, mesh: &Mesh) -> Result<()> {
        member(op, mesh, self.rank)?;
        let (data, at) = match (&self.data, mesh.position_of(self.rank)) {
            (Some(data), Some(at)) => (data, at),
            (None, None) => return self.shape.checked_numel(op).map(|_| ()),
            (None, Some(_)) => {
                return Err(fail(
                    op,
                    &[self.rank],
                    "the rank is in this process, and its data is missing",
                ));
            }
            (Some(_), None) => {
                return Err(fail(
                    op,
                    &[self.rank],
                    "there is data for a rank of another process",
                ));
            }
        };
        if !data.is_plain() {
            return Err(fail(
                op,
                &[self.rank],
                format!(
                    "a part is a plain tensor, got {} on {}: take it from `shards()`",
                    data.type_string(),
                    data.mesh()
                ),
            ));
        }
        if data.shape() != &self.shape {
            let detail = format!(
                "the part of rank {} is announced as {} and is {}",
                self.rank,
                self.shape,
                data.shape()
            );
            return Err(Error::shape(
                op,
                [
                    OperandType::from((self.dtype, &self.shape)).on_rank(self.rank),
                    OperandType::from(data).on_rank(self.rank),
                ],
                detail,
            ));
        }
        if data.dtype() != self.dtype {
            return Err(fail(
                op,
                &[self.rank],
                format!(
                    "the part is announced as {} and is {}",
                    self.dtype,
                    data.dtype()
                ),
            ));
        }
        if data.device() != mesh.device(at) {
            return Err(Error::DeviceMismatch {
                op,
                left: mesh.device(at).to_string(),
                right: data.device().to_string(),
            });
        }
        Ok(())
    }
}

impl Message {
    /// Refuses ranks that the mesh does not have, and data that is missing or is not what the
    /// message says.
    pub fn check(&self, mesh: &Mesh) -> Result<()> {
        self.part.check("exchange", mesh)?;
        member("exchange", mesh, self.to)
    }
}

/// Refuses a group that is empty, names a rank twice, or names one that the mesh does not have. For
/// barriers and collectives of other transports.
pub fn check_group(
    op: &'static str,
    mesh: &Mesh,
    ranks: impl Iterator<Item = usize>,
) -> Result<()> {
    let mut sorted: SmallVec<[usize; 8]> = ranks.collect();
    sorted.sort_unstable();
    match sorted.last() {
        Some(last) => member(op, mesh, *last)?,
        None => return Err(fail(op, &[], "the group has no ranks")),
    }
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(fail(op, &pair[..1], "the rank is in the group twice")),
        None => Ok(()),
    }
}

/// Refuses parts that are no group, have different dtypes, or differ in a dimension that is not in
/// `free`. The dimensions in `dims` must exist.
///
/// For collectives of other transports; the provided ones call it themselves.
pub fn check_parts(
    op: &'static str,
    mesh: &Mesh,
    parts: &[Part],
    dims: &[usize],
    free: &[usize],
) -> Result<()> {
    check_group(op, mesh, parts.iter().map(|p| p.rank))?;
    let first = &parts[0];
    for part in parts {
        part.check(op, mesh)?;
        if part.dtype != first.dtype {
            return Err(fail(
                op,
                &[first.rank, part.rank],
                format!("the parts are {} and {}: cast one", first.dtype, part.dtype),
            ));
        }
        let (a, b) = (&first.shape, &part.shape);
        if a.rank() != b.rank() || (0..a.rank()).any(|d| a[d] != b[d] && !free.contains(&d)) {
            return Err(Error::shape(
                op,
                [first, part].map(|p| OperandType::from((p.dtype, &p.shape)).on_rank(p.rank)),
                format!("ranks {} and {} give {a} and {b}", first.rank, part.rank),
            ));
        }
    }
    match dims.iter().find(|d| **d >= first.shape.rank()) {
        Some(d) => Err(Error::Axis {
            op,
            axis: i64::try_from(*d).unwrap_or(i64::MAX),
            rank: first.shape.rank(),
        }),
        None => Ok(()),
    }
}
