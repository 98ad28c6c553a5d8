//! All ranks in this process: nothing is sent, tensors are handed over.

use super::{Message, Part, Transport, combine};
use crate::{Device, Error, Mesh, Reduction, Result, Tensor, split};

/// The transport of meshes whose ranks are all in this process. Ranks of one device share what is equal, so a replicated result exists once.
#[derive(Clone, Copy, Debug, Default)]
pub struct InProcess;

impl Transport for InProcess {
    fn name(&self) -> &str {
        "in-process"
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        messages.into_iter().map(|m| Ok(Some(data("exchange", &m.part)?.on(device_of(mesh, m.to)?)?))).collect()
    }

    fn barrier(&self, _: &Mesh, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn all_reduce(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction) -> Result<Vec<Option<Tensor>>> {
        shared(mesh, parts, |device| reduce(parts, reduction, device, |t| Ok(t.clone())))
    }

    fn all_gather(&self, mesh: &Mesh, parts: &[Part], dim: usize) -> Result<Vec<Option<Tensor>>> {
        shared(mesh, parts, |device| {
            let pieces = parts.iter().map(|p| data("all_gather", p)?.on(device)).collect::<Result<Vec<_>>>()?;
            Tensor::concat(&pieces.iter().collect::<Vec<_>>(), dim as i64)
        })
    }

    fn reduce_scatter(&self, mesh: &Mesh, parts: &[Part], reduction: Reduction, dim: usize) -> Result<Vec<Option<Tensor>>> {
        let scatter = |(i, part): (usize, &Part)| {
            let range = split(part.shape[dim], i, parts.len());
            reduce(parts, reduction, device_of(mesh, part.rank)?, |t| t.narrow(dim as i64, range.start, range.len())).map(Some)
        };
        parts.iter().enumerate().map(scatter).collect()
    }
}

/// The parts, each seen through `piece`, combined in order on `device`.
fn reduce(parts: &[Part], reduction: Reduction, device: &Device, piece: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let mut sum = piece(data("reduce", &parts[0])?)?.on(device)?;
    for part in &parts[1..] {
        sum = combine(&sum, &piece(data("reduce", part)?)?.on(device)?, reduction)?;
    }
    Ok(sum)
}

/// The same result for every member, made once for each device.
fn shared(mesh: &Mesh, parts: &[Part], make: impl Fn(&Device) -> Result<Tensor>) -> Result<Vec<Option<Tensor>>> {
    let mut made: Vec<Tensor> = vec![];
    parts
        .iter()
        .map(|part| {
            let device = device_of(mesh, part.rank)?;
            if let Some(t) = made.iter().find(|t| t.device() == device) {
                return Ok(Some(t.clone()));
            }
            made.push(make(device)?);
            Ok(made.last().cloned())
        })
        .collect()
}

fn device_of(mesh: &Mesh, rank: usize) -> Result<&Device> {
    match mesh.addressable().position(|r| r == rank) {
        Some(i) => Ok(mesh.device(i)),
        None => Err(missing("exchange", rank)),
    }
}

fn data<'a>(op: &'static str, part: &'a Part) -> Result<&'a Tensor> {
    part.data.as_ref().ok_or_else(|| missing(op, part.rank))
}

fn missing(op: &'static str, rank: usize) -> Error {
    Error::Transport { op, detail: "a rank is not in this process, which the in-process transport cannot reach".into(), ranks: vec![rank] }
}
