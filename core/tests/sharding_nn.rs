//! Neural-network ops on meshes: every placement of their samples against the plain result, and how little they communicate.

use anymesh_core::{
    DType, Device, Error, Mesh, Placement, Reduction, Sharding, Tensor, TensorType,
    ops::{Conv, LossReduction},
    registry::{self, Attrs},
    spmd::{Ledger, Policy, with_policy},
};

fn cpu() -> Device {
    anymesh_backend_cpu::device()
}

/// A deterministic stream of numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

fn numbers(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect();
    Tensor::from_slice(&values, shape, &cpu()).unwrap()
}

/// A tensor on a mesh; where it is partial, every rank holds something that matters.
fn spread(x: &Tensor, mesh: &Mesh, sharding: &Sharding) -> Tensor {
    let partial: Vec<(usize, Reduction)> = sharding.partial().collect();
    let piece = |rank: usize| {
        let at = partial.iter().fold(0, |at, (axis, _)| at * mesh.size(*axis) + mesh.coordinate(rank, *axis));
        let parts: usize = partial.iter().map(|(axis, _)| mesh.size(*axis)).product();
        let value = match partial.first() {
            Some((_, Reduction::Sum)) if at == 0 => x.sub((parts * (parts - 1) / 2) as f64),
            Some((_, Reduction::Sum)) => x.zeros_like().and_then(|zero| zero.add(at as f64)),
            Some(_) if at != parts - 1 => x.sub(1.0 + at as f64),
            _ => Ok(x.clone()),
        };
        let region = sharding.region(mesh, rank, x.shape());
        (0..x.rank()).try_fold(value.unwrap(), |t, d| t.narrow(d as i64, region.start[d], region.shape[d])).unwrap()
    };
    let ty = TensorType { dtype: x.dtype(), shape: x.shape().clone(), sharding: sharding.clone() };
    let parts: Vec<Tensor> = (0..mesh.ranks()).map(piece).collect();
    Tensor::from_shards(&ty, mesh, &parts).unwrap()
}

/// Every way for a tensor to lie on a mesh, axes that cut the same dimension in both orders.
fn placements(x: &Tensor, mesh: &Mesh) -> Vec<Sharding> {
    let mut one: Vec<Placement> = vec![Placement::Replicate];
    one.extend((0..x.rank()).map(Placement::Shard));
    if x.dtype().is_float() {
        one.extend([Placement::Partial(Reduction::Sum), Placement::Partial(Reduction::Max)]);
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
        let backward = chosen.iter().enumerate().rev().fold(Sharding::replicated(), |s, (axis, p)| match *p {
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

fn assert_same(name: &str, sharded: &Tensor, whole: &Tensor, exact: bool) {
    assert_eq!((sharded.shape(), sharded.dtype()), (whole.shape(), whole.dtype()), "{name}");
    for (rank, part) in sharded.shards() {
        assert_eq!(part.dims(), &sharded.sharding().region(sharded.mesh(), rank, sharded.shape()).shape[..], "{name}: rank {rank} of {sharded:?}");
    }
    let values = |t: &Tensor| t.cast(DType::F32).unwrap().to_vec::<f32>().unwrap();
    let (got, expected) = (values(sharded), values(whole));
    let scale = expected.iter().filter(|v| v.is_finite()).fold(1f32, |m, v| m.max(v.abs()));
    let close = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan()) || (!exact && (a - b).abs() <= 1e-6 * scale);
    assert!(got.iter().zip(&expected).all(|(a, b)| close(*a, *b)), "{name}: {}\n{got:?}\n{expected:?}", sharded.type_string());
}

/// Runs an op's samples under placements of all operands: all of them, or as many as `limit` drawn by lot.
fn sweep(op: &str, limit: usize) {
    let (device, mut dice) = (cpu(), Dice(7));
    let entry = registry::find(op).unwrap();
    for axes in ["a=2", "a=3", "a=2, b=2", "a=2, b=3"] {
        let mesh = Mesh::new(axes, &device).unwrap();
        for sample in entry.samples() {
            let inputs = sample.make(11, &device).unwrap();
            let attrs = Attrs::new(entry, &sample.attrs).unwrap();
            let whole = entry.call(&inputs, &attrs, &device).unwrap();
            let choices: Vec<Vec<Sharding>> = inputs.iter().flatten().map(|x| placements(x, &mesh)).collect();
            let all = choices.iter().fold(1usize, |n, c| n.saturating_mul(c.len()));
            for n in 0..all.min(limit) {
                let mut at = if all <= limit { n } else { 0 };
                let mut each = choices.iter();
                let on_mesh: Vec<Option<Tensor>> = inputs
                    .iter()
                    .map(|x| {
                        let (x, choices) = (x.as_ref()?, each.next()?);
                        let i = if all <= limit { at % choices.len() } else { dice.roll(choices.len()) };
                        at /= choices.len();
                        Some(spread(x, &mesh, &choices[i]))
                    })
                    .collect();
                let types: Vec<String> = on_mesh.iter().flatten().map(Tensor::type_string).collect();
                let name = format!("{op} {} of {} on {axes}", sample.attrs, types.join(", "));
                let out = entry.call(&on_mesh, &attrs, &device).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(out.len(), whole.len(), "{name}");
                for (sharded, whole) in out.iter().zip(&whole) {
                    assert_same(&name, sharded, whole, sample.exact);
                }
            }
        }
    }
}

fn sweep_all(ops: &[&str]) {
    ops.iter().for_each(|op| sweep(op, 200));
}

#[test]
fn products_are_the_same_wherever_their_operands_lie() {
    sweep_all(&["matmul", "matmul_as", "bmm", "dot", "outer", "linear", "baddbmm"]);
}

#[test]
fn softmax_is_the_same_wherever_its_operand_lies() {
    sweep_all(&["softmax", "log_softmax"]);
}

#[test]
fn norms_are_the_same_wherever_their_operands_lie() {
    sweep_all(&["layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "batch_norm_train"]);
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
    sweep_all(&["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]);
}

#[test]
fn pools_are_the_same_wherever_their_operand_lies() {
    for n in 1..=3 {
        for op in ["max_pool#d", "max_pool#d_with_indices", "avg_pool#d", "adaptive_max_pool#d", "adaptive_avg_pool#d"] {
            sweep(&op.replace('#', &n.to_string()), 100);
        }
    }
    sweep("interpolate", 200);
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
