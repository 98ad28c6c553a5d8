//! All ranks in this process: nothing is sent, tensors are handed over.

use super::{Message, Part, Transport, check, collectives, reduce};
use crate::{Device, Mesh, Reduction, Result, Tensor, split};

/// The transport of meshes whose ranks are all in this process.
///
/// Ranks of one device share what is equal: tensors are values, so a replicated result is computed
/// once and exists once for each device, and a reduction that is cut is made once where all members
/// are on one device. The other collectives are the provided ones, whose
/// messages between ranks of one device are free. Nobody is waited for, so there is no deadline.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess;

impl Transport for InProcess {
    fn name(&self) -> &str {
        "in-process"
    }

    fn hands_over(&self) -> bool {
        true
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        for message in &messages {
            message.check(mesh)?;
        }
        messages
            .iter()
            .map(|m| {
                Ok(Some(
                    data("exchange", &m.part)?.copied_to(device_of("exchange", mesh, m.to)?)?,
                ))
            })
            .collect()
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        check::check_group("barrier", mesh, group.iter().copied())?;
        group
            .iter()
            .try_for_each(|rank| device_of("barrier", mesh, *rank).map(|_| ()))
    }

    fn all_reduce(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
    ) -> Result<Vec<Option<Tensor>>> {
        check::check_parts("all_reduce", mesh, parts, &[], &[])?;
        shared("all_reduce", mesh, parts.iter().map(|p| p.rank), |device| {
            reduce(&on("all_reduce", parts, device)?, reduction)
        })
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        check::check_parts("all_gather", mesh, parts, &[dim], &[dim])?;
        shared("all_gather", mesh, parts.iter().map(|p| p.rank), |device| {
            collectives::concat(&on("all_gather", parts, device)?, dim)
        })
    }

    /// On one device the reduction is made once, and everyone has a window of it: the work grows with
    /// the members, not with the pairs of them.
    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Result<Vec<Option<Tensor>>> {
        let op = "reduce_scatter";
        check::check_parts(op, mesh, parts, &[dim], &[])?;
        let device = device_of(op, mesh, parts[0].rank)?;
        for part in parts {
            if device_of(op, mesh, part.rank)? != device {
                return collectives::reduce_scatter(self, mesh, parts, reduction, dim);
            }
        }
        let whole = reduce(&on(op, parts, device)?, reduction)?;
        (0..parts.len())
            .map(|i| {
                let piece = split(whole.dims()[dim], i, parts.len());
                whole.narrow(dim as i64, piece.start, piece.len()).map(Some)
            })
            .collect()
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Result<Vec<Option<Tensor>>> {
        collectives::check_broadcast(mesh, root, group)?;
        shared("broadcast", mesh, group.iter().copied(), |device| {
            data("broadcast", root)?.copied_to(device)
        })
    }
}

/// The same result for every rank, made once for each device.
fn shared(
    op: &'static str,
    mesh: &Mesh,
    ranks: impl Iterator<Item = usize>,
    make: impl Fn(&Device) -> Result<Tensor>,
) -> Result<Vec<Option<Tensor>>> {
    let mut made: Vec<Tensor> = vec![];
    ranks
        .map(|rank| {
            let device = device_of(op, mesh, rank)?;
            if let Some(t) = made.iter().find(|t| t.device() == device) {
                return Ok(Some(t.clone()));
            }
            made.push(make(device)?);
            Ok(made.last().cloned())
        })
        .collect()
}

fn on(op: &'static str, parts: &[Part], device: &Device) -> Result<Vec<Tensor>> {
    parts
        .iter()
        .map(|part| data(op, part)?.copied_to(device))
        .collect()
}

fn device_of<'a>(op: &'static str, mesh: &'a Mesh, rank: usize) -> Result<&'a Device> {
    mesh.position_of(rank)
        .map(|at| mesh.device(at))
        .ok_or_else(|| unreachable(op, rank))
}

fn data<'a>(op: &'static str, part: &'a Part) -> Result<&'a Tensor> {
    part.data.as_ref().ok_or_else(|| unreachable(op, part.rank))
}

fn unreachable(op: &'static str, rank: usize) -> crate::Error {
    check::fail(
        op,
        &[rank],
        "the rank is not in this process, and the in-process transport reaches no other: give the mesh another with `with_transport`",
    )
}
