//! Every op of the family under every placement of its samples.

use super::*;
use anymesh_conformance::registry::{self, Attrs};
use anymesh_core::Placement;

/// A deterministic stream of numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

/// Every way for a tensor to lie on a mesh, axes that cut the same dimension in both orders.
fn placements(x: &Tensor, mesh: &Mesh) -> Vec<Sharding> {
    let mut one: Vec<Placement> = vec![Placement::Replicate];
    one.extend((0..x.rank()).map(Placement::Shard));
    if x.dtype().is_float() {
        one.extend([
            Placement::Partial(Reduction::Sum),
            Placement::Partial(Reduction::Max),
        ]);
    }
    let axes = mesh.axes().len();
    let mut all = vec![];
    for mut n in 0..one.len().pow(axes as u32) {
        let chosen: Vec<Placement> = (0..axes)
            .map(|_| {
                let placement = one[n % one.len()];
                n /= one.len();
                placement
            })
            .collect();
        let forward = Sharding::from_placements(&chosen);
        let backward =
            chosen
                .iter()
                .enumerate()
                .rev()
                .fold(Sharding::replicated(), |s, (axis, p)| match *p {
                    Placement::Replicate => s,
                    Placement::Shard(d) => s.cut(d, axis),
                    Placement::Partial(r) => s.partial_over(axis, r),
                });
        if forward.check(mesh, x.rank()).is_ok() {
            all.push(forward.clone());
            if backward != forward {
                all.push(backward);
            }
        }
    }
    all
}

/// Runs an op's samples under placements of all operands: all of them, or where those are too many
/// some drawn by lot.
fn sweep(op: &str) {
    let (device, mut dice) = (cpu(), Dice(7));
    let entry = registry::find(op).unwrap();
    for (axes, limit) in [
        ("a=2", 150),
        ("a=3", 150),
        ("a=2, b=2", 60),
        ("a=2, b=3", 60),
    ] {
        let mesh = Mesh::new(axes, &device).unwrap();
        for sample in entry.samples() {
            let inputs = sample.make(11, &device).unwrap();
            let attrs = Attrs::new(entry, &sample.attrs).unwrap();
            let whole = entry.call(&inputs, &attrs, &device).unwrap();
            let choices: Vec<Vec<Sharding>> = inputs
                .iter()
                .flatten()
                .map(|x| placements(x, &mesh))
                .collect();
            let all = choices
                .iter()
                .fold(1usize, |n, c| n.saturating_mul(c.len()));
            for n in 0..all.min(limit) {
                let mut at = if all <= limit { n } else { 0 };
                let mut each = choices.iter();
                let on_mesh: Vec<Option<Tensor>> = inputs
                    .iter()
                    .map(|x| {
                        let (x, choices) = (x.as_ref()?, each.next()?);
                        let i = if all <= limit {
                            at % choices.len()
                        } else {
                            dice.roll(choices.len())
                        };
                        at /= choices.len();
                        Some(spread(x, &mesh, &choices[i]))
                    })
                    .collect();
                let types: Vec<String> =
                    on_mesh.iter().flatten().map(Tensor::type_string).collect();
                let name = format!("{op} {} of {} on {axes}", sample.attrs, types.join(", "));
                let out = entry
                    .call(&on_mesh, &attrs, &device)
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(out.len(), whole.len(), "{name}");
                for (sharded, whole) in out.iter().zip(&whole) {
                    assert_same(&name, sharded, whole, sample.exact);
                }
            }
        }
    }
}

fn sweep_all(ops: &[&str]) {
    ops.iter().for_each(|op| sweep(op));
}

#[test]
fn products_are_the_same_wherever_their_operands_lie() {
    sweep_all(&[
        "matmul",
        "matmul_as",
        "bmm",
        "dot",
        "outer",
        "linear",
        "baddbmm",
    ]);
}

#[test]
fn softmax_is_the_same_wherever_its_operand_lies() {
    sweep_all(&["softmax", "log_softmax"]);
}

#[test]
fn norms_are_the_same_wherever_their_operands_lie() {
    sweep_all(&[
        "layer_norm",
        "rms_norm",
        "group_norm",
        "instance_norm",
        "batch_norm",
        "batch_norm_train",
    ]);
}

#[test]
fn similarities_are_the_same_wherever_their_operands_lie() {
    sweep_all(&["normalize", "cosine_similarity"]);
}

#[test]
fn attention_is_the_same_wherever_its_operands_lie() {
    sweep_all(&["attention", "attention_backward"]);
}

#[test]
fn convolutions_are_the_same_wherever_their_operands_lie() {
    sweep_all(&[
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    ]);
}

#[test]
fn pools_are_the_same_wherever_their_operand_lies() {
    for n in 1..=3 {
        for op in [
            "max_pool#d",
            "max_pool#d_with_indices",
            "avg_pool#d",
            "adaptive_max_pool#d",
            "adaptive_avg_pool#d",
        ] {
            sweep(&op.replace('#', &n.to_string()));
        }
    }
    sweep("interpolate");
}

#[test]
fn losses_are_the_same_wherever_their_operands_lie() {
    sweep_all(&[
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "bce_loss",
        "bce_with_logits_loss",
        "kl_div_loss",
        "hinge_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
        "cosine_embedding_loss",
        "triplet_margin_loss",
        "gaussian_nll_loss",
        "poisson_nll_loss",
    ]);
}
