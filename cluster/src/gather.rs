//! All-gathers that receive every piece where it belongs in the whole: joining them afterwards would
//! copy everything once more, which costs as much as a part of the way between processes.

use crate::{
    carried::{Engine, describe, digest},
    wire::{Receive, Send},
};
use anymesh_core::{
    Mesh, Result, Shape, Tensor,
    transport::{Incoming, Message, Outgoing, Part},
};

/// The shape of the whole, where its pieces lie one behind the other in memory and every process
/// has one of them: what all processes know alike. Anything else, and what makes no sense, goes the
/// ordinary way.
pub(crate) fn whole(engine: &Engine, mesh: &Mesh, parts: &[Part], dim: usize) -> Option<Shape> {
    let first = parts.first().filter(|_| parts.len() > 1)?;
    let mut processes: Vec<usize> = vec![];
    let mut along = 0usize;
    for part in parts {
        if part.rank >= mesh.ranks() || part.dtype != first.dtype || dim >= part.shape.rank() {
            return None;
        }
        let process = engine.process(mesh, part.rank);
        let fits = part.shape.with(dim, 1) == first.shape.with(dim, 1);
        let in_a_row = part.shape.dims()[..dim].iter().all(|n| *n == 1);
        if !fits || !in_a_row || part.shape.numel() == 0 || processes.contains(&process) {
            return None;
        }
        processes.push(process);
        along = along.checked_add(part.shape[dim])?;
    }
    Some(first.shape.with(dim, along))
}

/// The parts joined, for the member of this process.
pub(crate) fn gather(
    engine: &Engine,
    op: &'static str,
    mesh: &Mesh,
    parts: &[Part],
    whole: Shape,
) -> Result<Vec<Option<Tensor>>> {
    let mut out: Vec<Option<Tensor>> = vec![None; parts.len()];
    let message = |part: &Part, to: &Part| Message {
        part: part.clone(),
        to: to.rank,
    };
    let here = |part: &Part| mesh.position_of(part.rank).is_some();
    let Some(own) = parts.iter().position(here) else {
        return Ok(out);
    };
    let mine = &parts[own];
    let others = parts.iter().filter(|part| part.rank != mine.rank);
    let messages: Vec<Message> = others
        .flat_map(|other| [message(mine, other), message(other, mine)])
        .collect();
    messages.iter().try_for_each(|m| m.check(mesh))?;
    let (Some(data), Some(at)) = (&mine.data, mesh.position_of(mine.rank)) else {
        return Ok(out);
    };
    let mut memory = Incoming::new(mine.dtype, whole, mesh.device(at))?;
    let (mut sends, mut receives, mut start) = (vec![], vec![], 0);
    for (i, part) in parts.iter().enumerate() {
        let bytes = start..start + part.shape.numel() * part.dtype.size();
        start = bytes.end;
        if i == own {
            let here = Outgoing::new(data)?;
            memory.bytes()[bytes].copy_from_slice(here.as_ref());
            continue;
        }
        let process = engine.process(mesh, part.rank);
        sends.push(Send {
            to: process,
            bytes: Outgoing::new(data)?,
            digest: digest(op, mesh, mine, part.rank),
        });
        receives.push(Receive {
            from: process,
            memory: 0,
            bytes,
            digest: digest(op, mesh, part, mine.rank),
        });
    }
    let detail = || describe(&messages);
    let filled = engine.transfer(op, mesh, sends, vec![memory], receives, detail)?;
    if let Some(memory) = filled.into_iter().next() {
        out[own] = Some(memory.finish()?);
    }
    Ok(out)
}
