//! Neural-network ops on meshes: every placement of their samples against the plain result, and how
//! little they communicate.

mod heads;
mod layers;
mod sweep;

use anymesh_core::{DType, Device, Mesh, Reduction, Sharding, Tensor, TensorType, spmd::Ledger};

fn cpu() -> Device {
    anymesh_backend_cpu::device()
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
        let at = partial.iter().fold(0, |at, (axis, _)| {
            at * mesh.size(*axis) + mesh.coordinate(rank, *axis)
        });
        let parts: usize = partial.iter().map(|(axis, _)| mesh.size(*axis)).product();
        let value = match partial.first() {
            // The others hold 1, -1, 1 and so on: small numbers, because results of parts are
            // rounded too.
            Some((_, Reduction::Sum)) if at == 0 => x.sub((1 - parts % 2) as f64),
            Some((_, Reduction::Sum)) => x
                .zeros_like()
                .and_then(|zero| zero.add(if at % 2 == 1 { 1.0 } else { -1.0 })),
            Some(_) if at != parts - 1 => x.sub(1.0 + at as f64),
            _ => Ok(x.clone()),
        };
        let region = sharding.region(mesh, rank, x.shape());
        (0..x.rank())
            .try_fold(value.unwrap(), |t, d| {
                t.narrow(d as i64, region.start[d], region.shape[d])
            })
            .unwrap()
    };
    let ty = TensorType {
        dtype: x.dtype(),
        shape: x.shape().clone(),
        sharding: sharding.clone(),
    };
    let parts: Vec<Tensor> = (0..mesh.ranks()).map(piece).collect();
    Tensor::from_shards(&ty, mesh, &parts).unwrap()
}

fn assert_same(name: &str, sharded: &Tensor, whole: &Tensor, exact: bool) {
    assert_eq!(
        (sharded.shape(), sharded.dtype()),
        (whole.shape(), whole.dtype()),
        "{name}"
    );
    for (rank, part) in sharded.shards() {
        assert_eq!(
            part.dims(),
            &sharded
                .sharding()
                .region(sharded.mesh(), rank, sharded.shape())
                .shape[..],
            "{name}: rank {rank} of {sharded:?}"
        );
    }
    let values = |t: &Tensor| t.cast(DType::F32).unwrap().to_vec::<f32>().unwrap();
    let (got, expected) = (values(sharded), values(whole));
    let scale = expected
        .iter()
        .filter(|v| v.is_finite())
        .fold(1f32, |m, v| m.max(v.abs()));
    let close = |a: f32, b: f32| {
        a == b || (a.is_nan() && b.is_nan()) || (!exact && (a - b).abs() <= 1e-6 * scale)
    };
    assert!(
        got.iter().zip(&expected).all(|(a, b)| close(*a, *b)),
        "{name}: {}\n{got:?}\n{expected:?}",
        sharded.type_string()
    );
}

/// What an op communicated: its kinds of steps and bytes. Every step is on behalf of a line of this
/// file.
fn traffic<T>(f: impl FnOnce() -> T) -> (T, Vec<(&'static str, u64)>) {
    let (result, ledger) = Ledger::record(f);
    for entry in &ledger.entries {
        assert!(entry.caller.contains("tests/sharding_nn/"), "{ledger}");
    }
    (
        result,
        ledger.entries.iter().map(|e| (e.op, e.bytes)).collect(),
    )
}

fn mesh(axes: &str) -> Mesh {
    Mesh::new(axes, &cpu()).unwrap()
}
