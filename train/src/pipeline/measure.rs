//! What stages cost on the devices that they are on.

use super::{Given, Staged, run::Lent, start_on_mesh};
use crate::{Error, Pass, Result};
use anymesh_core::{
    Mesh, Tensor,
    grad::{Root, backward_from},
    transport::gather_bytes,
};
use std::time::Instant;

/// The seconds that the forward and backward pass of each stage takes where it lies: the shortest of
/// `rounds`, after one that does not count, in which kernels are compiled. `mesh` is where all stages
/// lie. Its processes, all of which call this, get the same numbers, of the slowest for each stage.
///
/// With each layer as a stage ([`Split::one_by_one`](super::Split::one_by_one)) these are costs to
/// [balance](super::Split::balanced) real stages by.
pub fn measure<S: Staged + ?Sized>(
    model: &S,
    batch: &S::Batch,
    mesh: &Mesh,
    rounds: usize,
) -> Result<Vec<f64>> {
    let mut seconds = vec![f64::INFINITY; model.stages()];
    for round in 0..=rounds.max(1) {
        let mut inputs: Vec<Tensor> = vec![];
        for (stage, best) in seconds.iter_mut().enumerate() {
            let lent = Lent::of(model, stage)?;
            let (took, gave) = pass(model, stage, &inputs, &lent, batch)?;
            if round > 0 {
                *best = best.min(took);
            }
            let Some(next) = (stage + 1 < model.stages()).then(|| model.mesh_of(stage + 1)) else {
                continue;
            };
            let moved = gave.iter().map(|x| {
                let there = start_on_mesh(&x.detach(), next)?.wait()?;
                match x.requires_grad() {
                    true => Ok(there.require_grad()?),
                    false => Ok(there),
                }
            });
            inputs = moved.collect::<Result<_>>()?;
        }
    }
    // A process knows the times of the stages that it has.
    for (stage, best) in seconds.iter_mut().enumerate() {
        if model.mesh_of(stage).addressable().len() == 0 {
            *best = 0.0;
        }
    }
    let bytes: Vec<u8> = seconds.iter().flat_map(|s| s.to_le_bytes()).collect();
    for (_, told) in gather_bytes(mesh, &bytes)? {
        for (best, word) in seconds.iter_mut().zip(told.chunks_exact(8)) {
            let word = <[u8; 8]>::try_from(word).unwrap_or_default();
            *best = best.max(f64::from_le_bytes(word));
        }
    }
    match seconds.iter().all(|s| s.is_finite()) {
        true => Ok(seconds),
        false => Err(Error::config(
            "pipeline.split",
            "a stage took no time that a clock can tell",
        )),
    }
}

/// Both passes of a stage: how long they took, and what the forward pass gave.
fn pass<S: Staged + ?Sized>(
    model: &S,
    stage: usize,
    inputs: &[Tensor],
    lent: &Lent,
    batch: &S::Batch,
) -> Result<(f64, Vec<Tensor>)> {
    let mesh = model.mesh_of(stage);
    let wait = || -> Result<()> {
        for at in 0..mesh.addressable().len() {
            mesh.device(at).sync()?;
        }
        Ok(())
    };
    wait()?;
    let start = Instant::now();
    let given = Given {
        inputs,
        borrowed: lent.copies(),
    };
    let gave = model.forward(stage, &given, batch, &Pass::eval())?;
    let (mut roots, mut seeds) = (vec![], vec![]);
    for x in gave.iter().filter(|x| x.requires_grad()) {
        roots.push(Root::of(x)?);
        seeds.push(x.detach().ones_like()?);
    }
    let found = backward_from(&roots, Some(&seeds))?;
    wait()?;
    let took = start.elapsed().as_secs_f64();
    drop(found);
    Ok((took, gave))
}
