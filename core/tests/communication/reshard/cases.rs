//! Tensors whose every element is known, in any sharding, and the check that they are still
//! themselves.

pub(crate) use crate::support::device;
use anymesh_core::{DType, Mesh, Reduction, Region, Shape, Sharding, Tensor, TensorType};

pub(crate) fn mesh(sizes: &[usize]) -> Mesh {
    let axes: Vec<String> = sizes
        .iter()
        .zip(["a", "b", "c"])
        .map(|(n, name)| format!("{name}={n}"))
        .collect();
    Mesh::new(&axes.join(", "), &device()).expect("a mesh")
}

/// All flat positions of a box in a tensor.
pub(crate) fn positions(region: &Region, dims: &[usize]) -> Vec<usize> {
    (0..dims.len()).fold(vec![0], |all, d| {
        all.iter()
            .flat_map(|p| {
                (region.start[d]..region.start[d] + region.shape[d]).map(move |i| p * dims[d] + i)
            })
            .collect()
    })
}

/// What the tensor holds at a flat position: neither sorted nor without sign.
pub(crate) fn value(position: usize) -> i32 {
    (position as i32 * 37 + 11) % 101 - 50
}

/// The share of `value` that the rank at `at` along an axis of `n` ranks has: other ranks have
/// other shares, and all of them together combine to `value`.
fn share(value: i32, reduction: Reduction, at: usize, n: usize, position: usize) -> i32 {
    let holder = (position * 5 + 3) % n;
    let others: i32 = (0..n).filter(|i| *i != holder).map(|i| i as i32 + 1).sum();
    match reduction {
        Reduction::Sum if at == holder => value - others,
        Reduction::Sum => at as i32 + 1,
        _ if at == holder => value,
        Reduction::Max => value - 1 - at as i32,
        Reduction::Min => value + 1 + at as i32,
        Reduction::Prod | Reduction::And => 1,
        Reduction::Or => 0,
    }
}

/// What a rank holds of the tensor under a sharding, element by element.
fn held(
    mesh: &Mesh,
    sharding: &Sharding,
    rank: usize,
    position: usize,
    value: impl Fn(usize) -> i32,
) -> i32 {
    sharding
        .partial()
        .fold(value(position), |v, (axis, reduction)| {
            share(
                v,
                reduction,
                mesh.coordinate(rank, axis),
                mesh.size(axis),
                position,
            )
        })
}

/// The tensor in a sharding, made part by part on the host.
pub(crate) fn tensor(mesh: &Mesh, dims: &[usize], sharding: &Sharding) -> Tensor {
    let shape = Shape::from(dims);
    let part = |rank: usize| {
        let region = sharding.region(mesh, rank, &shape);
        let values: Vec<i32> = positions(&region, dims)
            .into_iter()
            .map(|p| held(mesh, sharding, rank, p, value))
            .collect();
        Tensor::from_slice(&values, Shape::from(region.shape), &device()).expect("a part")
    };
    let parts: Vec<Tensor> = (0..mesh.ranks()).map(part).collect();
    Tensor::from_shards(
        &TensorType {
            dtype: DType::I32,
            shape,
            sharding: sharding.clone(),
        },
        mesh,
        &parts,
    )
    .expect("a tensor")
}

/// Checks every part of a tensor on the host: partial ones combine to the values, all others are
/// the values.
#[track_caller]
pub(crate) fn expect_values(x: &Tensor, case: &dyn Fn() -> String) {
    let (mesh, sharding) = (x.mesh(), x.sharding());
    let parts: Vec<Vec<i32>> = x
        .shards()
        .iter()
        .map(|(_, part)| part.to_vec().expect("values"))
        .collect();
    for (rank, part) in x.shards() {
        assert_eq!(
            part.dims(),
            &sharding.region(mesh, rank, x.shape()).shape[..],
            "the size of rank {rank}: {}",
            case()
        );
    }
    let partial: Vec<(usize, Reduction)> = sharding.partial().collect();
    for rank in (0..mesh.ranks())
        .filter(|rank| partial.iter().all(|(a, _)| mesh.coordinate(*rank, *a) == 0))
    {
        let expected: Vec<i32> = positions(&sharding.region(mesh, rank, x.shape()), x.dims())
            .into_iter()
            .map(value)
            .collect();
        assert_eq!(
            combined(mesh, &parts, &partial, rank),
            expected,
            "rank {rank}: {}",
            case()
        );
    }
}

/// What ranks along partial axes combine to.
fn combined(
    mesh: &Mesh,
    parts: &[Vec<i32>],
    partial: &[(usize, Reduction)],
    rank: usize,
) -> Vec<i32> {
    let Some(((axis, reduction), inner)) = partial.split_first() else {
        return parts[rank].clone();
    };
    let combine = |a: i32, b: i32| match reduction {
        Reduction::Sum => a.wrapping_add(b),
        Reduction::Max => a.max(b),
        Reduction::Min => a.min(b),
        Reduction::Prod => a.wrapping_mul(b),
        Reduction::And => i32::from(a != 0 && b != 0),
        Reduction::Or => i32::from(a != 0 || b != 0),
    };
    (0..mesh.size(*axis))
        .map(|at| combined(mesh, parts, inner, mesh.moved(rank, *axis, at)))
        .reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| combine(a, b)).collect())
        .expect("an axis has ranks")
}
