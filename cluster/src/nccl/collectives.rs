//! The collectives: NCCL's own where they have the right bits and sizes, messages and our kernels
//! elsewhere.

use super::{Answers, Nccl, groups::Spread, unplaced};
use anymesh_backend_cuda::nccl::{Op, Work};
use anymesh_core::{
    Error, Mesh, Reduction, Result, Shape, Tensor,
    transport::{DeviceMemory, InProcess, Message, Part, Transport, check_broadcast, check_parts},
};
use std::time::Duration;

/// The provided collectives over [`Nccl::exchange`], under the name of the one that was called.
#[derive(Debug)]
struct Provided<'a>(&'a Nccl, &'static str);

impl Nccl {
    fn provided(&self, op: &'static str) -> Provided<'_> {
        Provided(self, op)
    }
}

impl Transport for Provided<'_> {
    fn name(&self) -> &str {
        "nccl"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Answers {
        self.0.exchange(self.1, mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.engine.barrier(mesh, group)
    }

    // To gather has the same bits either way.
    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Answers {
        match self.1 {
            "all_gather" => Gathered(self.0).all_gather(mesh, parts, dim),
            _ => self.0.all_gather(mesh, parts, dim),
        }
    }
}

/// The provided gather itself.
#[derive(Debug)]
struct Gathered<'a>(&'a Nccl);

impl Transport for Gathered<'_> {
    fn name(&self) -> &str {
        "nccl"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Answers {
        self.0.exchange("all_gather", mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.0.engine.barrier(mesh, group)
    }
}

impl Transport for Nccl {
    fn name(&self) -> &str {
        "nccl"
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.engine.deadline)
    }

    fn report(&self, _id: usize, error: &Error) {
        self.engine.control.failed(&error.to_string());
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Answers {
        Nccl::exchange(self, "exchange", mesh, messages)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.engine.barrier(mesh, group)
    }

    fn all_reduce(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction) -> Answers {
        let op = "all_reduce";
        check_parts(op, mesh, parts, &[], &[])?;
        let (dtype, shape) = (parts[0].dtype, &parts[0].shape);
        let members = match self.spread(mesh, parts.iter().map(|p| p.rank)) {
            Spread::One if parts[0].data.is_some() => {
                return InProcess.all_reduce(mesh, parts, reduction);
            }
            Spread::Apart(members) if shape.numel() > 0 => members,
            _ => return self.provided(op).all_reduce(mesh, parts, reduction),
        };
        let Some(reduce) = self.native(dtype, reduction) else {
            return self.provided(op).all_reduce(mesh, parts, reduction);
        };
        self.collective((op, mesh), &members, parts, shape, |c, given, to| {
            Ok(Op::AllReduce {
                from: c.region(&given.buffer, given.start)?,
                to: c.region(to, 0)?,
                count: shape.numel(),
                reduce,
            })
        })
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Answers {
        let op = "all_gather";
        check_parts(op, mesh, parts, &[dim], &[dim])?;
        let shape = &parts[0].shape;
        let even = parts.iter().all(|part| part.shape == *shape) && shape.numel() > 0;
        let members = match self.spread(mesh, parts.iter().map(|p| p.rank)) {
            Spread::One if parts[0].data.is_some() => {
                return InProcess.all_gather(mesh, parts, dim);
            }
            Spread::Apart(members) if even => members,
            _ => return self.provided(op).all_gather(mesh, parts, dim),
        };
        // The parts one after the other, and then in their places along the dimension.
        let k = parts.len();
        let stacked = Shape::from_iter([k].into_iter().chain(shape.dims().iter().copied()));
        let got = self.collective((op, mesh), &members, parts, &stacked, |c, given, to| {
            Ok(Op::AllGather {
                from: c.region(&given.buffer, given.start)?,
                to: c.region(to, 0)?,
                bytes: given.bytes,
            })
        })?;
        let whole = shape.with(dim, shape[dim] * k);
        each(got, |stack| {
            stack.movedim(&[0], &[dim as i64])?.reshape(whole.clone())
        })
    }

    fn reduce_scatter(
        &self,
        mesh: &Mesh,
        parts: &[Part],
        reduction: Reduction,
        dim: usize,
    ) -> Answers {
        let op = "reduce_scatter";
        check_parts(op, mesh, parts, &[dim], &[])?;
        let (dtype, shape, k) = (parts[0].dtype, &parts[0].shape, parts.len());
        let even = shape.numel() > 0 && shape[dim].is_multiple_of(k);
        let members = match self.spread(mesh, parts.iter().map(|p| p.rank)) {
            Spread::One if parts[0].data.is_some() => {
                return InProcess.reduce_scatter(mesh, parts, reduction, dim);
            }
            Spread::Apart(members) if even => members,
            _ => {
                return self
                    .provided(op)
                    .reduce_scatter(mesh, parts, reduction, dim);
            }
        };
        let Some(reduce) = self.native(dtype, reduction) else {
            return self
                .provided(op)
                .reduce_scatter(mesh, parts, reduction, dim);
        };
        // The pieces one after the other.
        let piece = shape.with(dim, shape[dim] / k);
        let cut = Shape::from_iter(
            (shape.dims()[..dim].iter().copied())
                .chain([k, shape[dim] / k])
                .chain(shape.dims()[dim + 1..].iter().copied()),
        );
        let parts = parts
            .iter()
            .map(|part| {
                let stack = |data: &Tensor| data.reshape(cut.clone())?.movedim(&[dim as i64], &[0]);
                Ok(Part {
                    data: part.data.as_ref().map(stack).transpose()?,
                    ..part.clone()
                })
            })
            .collect::<Result<Vec<_>>>()?;
        self.collective((op, mesh), &members, &parts, &piece, |c, given, to| {
            Ok(Op::ReduceScatter {
                from: c.region(&given.buffer, given.start)?,
                to: c.region(to, 0)?,
                count: piece.numel(),
                reduce,
            })
        })
    }

    fn broadcast(&self, mesh: &Mesh, root: &Part, group: &[usize]) -> Answers {
        let op = "broadcast";
        check_broadcast(mesh, root, group)?;
        match self.spread(mesh, group.iter().copied()) {
            Spread::One if root.data.is_some() => InProcess.broadcast(mesh, root, group),
            Spread::Apart(members) if root.shape.numel() > 0 => {
                self.broadcast_to(mesh, root, group, &members)
            }
            _ => self.provided(op).broadcast(mesh, root, group),
        }
    }

    fn all_to_all(&self, mesh: &Mesh, parts: &[Part], cut: usize, join: usize) -> Answers {
        self.provided("all_to_all")
            .all_to_all(mesh, parts, cut, join)
    }
}

impl Nccl {
    fn broadcast_to(
        &self,
        mesh: &Mesh,
        root: &Part,
        group: &[usize],
        members: &[usize],
    ) -> Answers {
        let op = "broadcast";
        let mut out: Vec<Option<Tensor>> = vec![None; group.len()];
        if group.iter().all(|rank| mesh.position_of(*rank).is_none()) {
            return Ok(out);
        }
        self.engine.check(op, mesh)?;
        let here = self.group(members)?;
        let (dtype, shape) = (root.dtype, &root.shape);
        let given = root.data.as_ref().map(DeviceMemory::of).transpose()?;
        let given = given.flatten();
        let bytes = shape.numel() * dtype.size();
        let begun = self.begun(op, mesh, members, std::slice::from_ref(root));
        let source = group.iter().position(|rank| *rank == root.rank);
        let source = source.ok_or_else(|| unplaced(op, root.rank))?;
        self.submit(op, mesh, begun, || {
            let mut work = vec![];
            for (at, communicator) in here.iter() {
                let device = mesh.position_of(group[*at]).map(|at| mesh.device(at));
                let Some(device) = device else {
                    return Err(unplaced(op, group[*at]).into());
                };
                let (from, to) = match (&given, *at == source) {
                    (Some(given), true) => {
                        out[*at] = root.data.clone();
                        (communicator.region(&given.buffer, given.start)?, None)
                    }
                    _ => {
                        device.check(dtype, shape.numel())?;
                        let buffer = device.adopt(communicator.empty(bytes)?);
                        let to = communicator.region(&buffer, 0)?;
                        out[*at] =
                            Some(DeviceMemory::filled(buffer, dtype, shape.clone(), device)?);
                        (to.clone(), Some(to))
                    }
                };
                work.push(Work {
                    op: Op::Broadcast {
                        from,
                        to,
                        bytes,
                        root: source,
                    },
                    communicator: communicator.clone(),
                });
            }
            Ok(work)
        })?;
        Ok(out)
    }
}

/// A function of what every addressable member has.
fn each(got: Vec<Option<Tensor>>, make: impl Fn(Tensor) -> Result<Tensor>) -> Answers {
    got.into_iter()
        .map(|mine| mine.map(&make).transpose())
        .collect()
}
