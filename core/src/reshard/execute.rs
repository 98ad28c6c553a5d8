//! Runs plans.

use super::{Kind, Objective, Plan, Step, plan};
use crate::{
    Error, Mesh, Reduction, Region, Result, Shape, Sharding, Tensor,
    spmd::ledger,
    transport::{Message, Part, Transport},
};
use smallvec::SmallVec;
use std::sync::Arc;

/// A tensor on another mesh, or in another sharding of its own.
#[track_caller]
pub(crate) fn to_mesh(x: &Tensor, mesh: &Mesh, sharding: &Sharding) -> Result<Tensor> {
    let _scope = ledger::enter("reshard", std::panic::Location::caller());
    if x.mesh() == mesh {
        let plan = plan(mesh, x.shape(), x.dtype(), x.sharding(), sharding, Objective::Time)?;
        return run(x, &plan);
    }
    Err(Error::MeshMismatch { op: "to_mesh", left: x.mesh().to_string(), right: mesh.to_string() })
}

/// The tensor after every step of a plan.
#[track_caller]
pub(crate) fn run(x: &Tensor, plan: &Plan) -> Result<Tensor> {
    let Some(transport) = x.mesh().transport() else { return Ok(x.clone()) };
    let mut x = x.clone();
    for step in &plan.steps {
        x = ledger::step(&x, step, || run_step(&x, step, transport))?;
    }
    Ok(x)
}

fn run_step(x: &Tensor, step: &Step, transport: &Arc<dyn Transport>) -> Result<Tensor> {
    let parts = match step.kind {
        Kind::AllReduce | Kind::ReduceScatter => reduce(x, step, transport)?,
        _ => exchange(x, &step.to, transport)?,
    };
    let parts = fill_new_partials(x, &step.to, parts)?;
    Ok(Tensor::from_parts(x.mesh(), step.to.clone(), x.dtype(), x.shape().clone(), parts))
}

/// Combines partial values group by group, cutting the result where the step says so.
fn reduce(x: &Tensor, step: &Step, transport: &Arc<dyn Transport>) -> Result<Vec<Tensor>> {
    let mesh = x.mesh();
    let reduction = step.from.partial().find(|(a, _)| step.axes.contains(a)).map_or(Reduction::Sum, |(_, r)| r);
    let cut = step.to.cuts().find(|(_, a)| step.axes.contains(a)).map(|(d, _)| d);
    let mut out: Vec<Option<Tensor>> = vec![None; x.mesh().addressable().len()];
    for rank in mesh.addressable() {
        if step.axes.iter().any(|a| mesh.coordinate(rank, *a) != 0) {
            continue;
        }
        let group = mesh.group(rank, &step.axes);
        let parts: Vec<Part> = group.iter().map(|r| part(x, *r)).collect();
        let results = match cut {
            Some(dim) => transport.reduce_scatter(mesh, &parts, reduction, dim)?,
            None => transport.all_reduce(mesh, &parts, reduction)?,
        };
        for (r, result) in group.iter().zip(results) {
            if let Some(i) = mesh.addressable().position(|a| a == *r) {
                out[i] = result;
            }
        }
    }
    collect(out)
}

/// What a rank holds, as an operand of a collective.
fn part(x: &Tensor, rank: usize) -> Part {
    let shape = Shape::from(x.sharding().region(x.mesh(), rank, x.shape()).shape);
    let data = x.mesh().addressable().position(|r| r == rank).map(|i| x.part(i));
    Part { rank, dtype: x.dtype(), shape, data }
}

/// Every rank's part under `to`, from the boxes it lacks and those it has. Partial axes stay apart.
fn exchange(x: &Tensor, to: &Sharding, transport: &Arc<dyn Transport>) -> Result<Vec<Tensor>> {
    let (mesh, from) = (x.mesh(), x.sharding());
    let cutting: SmallVec<[usize; 4]> = from.cuts().map(|(_, axis)| axis).collect();
    let parts = x.shards();
    let held: Vec<Region> = (0..mesh.ranks()).map(|rank| from.region(mesh, rank, x.shape())).collect();
    let wanted: Vec<Region> = (0..mesh.ranks()).map(|rank| to.region(mesh, rank, x.shape())).collect();
    let mut messages = vec![];
    let mut pieces: Vec<SmallVec<[(Region, Option<Tensor>); 4]>> = vec![SmallVec::new(); parts.len()];
    let mut slots = vec![];
    let mut out: Vec<Option<Tensor>> = vec![None; parts.len()];
    let mut same: Vec<(usize, usize)> = vec![];
    for (i, (rank, mine)) in parts.iter().enumerate() {
        let want = &wanted[*rank];
        if held[*rank].intersect(want).as_ref() == Some(want) || want.numel() == 0 {
            out[i] = Some(mine.window(&relative(want, &held[*rank]))?);
            continue;
        }
        // Ranks of one device that end up with the same share it.
        let twin = (0..i).find(|j| {
            let other = parts[*j].0;
            wanted[other] == *want && mesh.device(*j) == mesh.device(i) && from.partial().all(|(a, _)| mesh.coordinate(other, a) == mesh.coordinate(*rank, a))
        });
        if let Some(j) = twin {
            same.push((i, j));
            continue;
        }
        for source in mesh.group(*rank, &cutting) {
            let Some(common) = held[source].intersect(want) else { continue };
            let local = parts.iter().position(|(r, _)| *r == source);
            let data = match local {
                Some(j) => Some(parts[j].1.window(&relative(&common, &held[source]))?),
                None => None,
            };
            if source == *rank {
                pieces[i].push((common, data));
                continue;
            }
            let part = Part { rank: source, dtype: x.dtype(), shape: Shape::from(common.shape.clone()), data };
            messages.push(Message { part, to: *rank });
            slots.push((i, pieces[i].len()));
            pieces[i].push((common, None));
        }
    }
    if !messages.is_empty() {
        for ((i, slot), data) in slots.into_iter().zip(transport.exchange(mesh, messages)?) {
            pieces[i][slot].1 = data;
        }
    }
    for (i, pieces) in pieces.into_iter().enumerate().filter(|(_, p)| !p.is_empty()) {
        let pieces = pieces.into_iter().map(|(region, data)| data.map(|d| (region, d))).collect::<Option<Vec<_>>>();
        out[i] = Some(join(pieces.ok_or_else(lost)?)?);
    }
    for (i, j) in same {
        out[i] = out[j].clone();
    }
    collect(out)
}

fn collect(parts: Vec<Option<Tensor>>) -> Result<Vec<Tensor>> {
    parts.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)
}

fn lost() -> Error {
    Error::Transport { op: "exchange", detail: "the transport did not deliver what was sent to a rank of this process".into(), ranks: vec![] }
}

/// A box seen from the origin of another.
fn relative(region: &Region, origin: &Region) -> Region {
    let start = region.start.iter().zip(&origin.start).map(|(a, b)| a.saturating_sub(*b)).collect();
    Region { start, shape: region.shape.clone() }
}

/// Joins boxes that tile a larger one: along the last dimension first, then the one before.
fn join(mut pieces: Vec<(Region, Tensor)>) -> Result<Tensor> {
    let rank = pieces[0].0.start.len();
    for d in (0..rank).rev() {
        if pieces.len() == 1 {
            break;
        }
        pieces.sort_by(|(a, _), (b, _)| a.start.cmp(&b.start));
        let key = |r: &Region| -> SmallVec<[usize; 6]> { (0..rank).filter(|i| *i != d).map(|i| r.start[i]).collect() };
        let mut rows: Vec<(SmallVec<[usize; 6]>, Vec<(Region, Tensor)>)> = vec![];
        for piece in pieces {
            let k = key(&piece.0);
            match rows.iter_mut().find(|(other, _)| *other == k) {
                Some((_, row)) => row.push(piece),
                None => rows.push((k, vec![piece])),
            }
        }
        pieces = rows
            .into_iter()
            .map(|(_, row)| {
                let mut region = row[0].0.clone();
                if row.len() == 1 {
                    return Ok((region, row[0].1.clone()));
                }
                region.shape[d] = row.iter().map(|(r, _)| r.shape[d]).sum();
                let tensors: SmallVec<[&Tensor; 8]> = row.iter().map(|(_, t)| t).collect();
                Ok((region, Tensor::concat(&tensors, d as i64)?))
            })
            .collect::<Result<Vec<_>>>()?;
    }
    Ok(pieces.swap_remove(0).1)
}

/// Where values become partial, the first rank keeps them and the others hold the identity.
fn fill_new_partials(x: &Tensor, to: &Sharding, mut parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let mesh = x.mesh();
    for (axis, reduction) in to.partial().filter(|(axis, _)| x.sharding().partial().all(|(a, _)| a != *axis)) {
        for (i, rank) in mesh.addressable().enumerate().filter(|(_, rank)| mesh.coordinate(*rank, axis) != 0) {
            debug_assert!(rank < mesh.ranks());
            parts[i] = Tensor::full(parts[i].shape(), reduction.identity(x.dtype()), x.dtype(), parts[i].device())?;
        }
    }
    Ok(parts)
}
