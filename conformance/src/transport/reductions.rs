//! What combines data.

use super::{
    Suite, Sums,
    host::{Array, Sample},
};
use anymesh_core::{Reduction, bf16, split};

/// Sizes of parts: even over every group, uneven, fewer than ranks, empty, 1-d and 3-d.
const SHAPES: [&[usize]; 7] = [
    &[12, 4],
    &[5, 3],
    &[2, 7],
    &[0, 3],
    &[4, 0],
    &[7],
    &[2, 3, 2],
];

pub(super) async fn check<T: Sample>(suite: &mut Suite<'_>) {
    for reduction in Reduction::ALL {
        for dims in SHAPES.iter().copied().chain([&[][..]]) {
            all_reduce::<T>(suite, dims, reduction).await;
            for dim in 0..dims.len() {
                let arrays = arrays::<T>(suite, dims);
                let whole = reduced(suite, &arrays, reduction);
                let k = arrays.len();
                let expected: Vec<Array<T>> = (0..k)
                    .map(|i| whole.cut(dim, split(dims[dim], i, k)))
                    .collect();
                let what = format!("reduce_scatter of {dims:?} along {dim} by {reduction}");
                suite
                    .expect(&what, &expected, |s| {
                        s.transport
                            .reduce_scatter(&s.mesh, &s.parts(&arrays)?, reduction, dim)
                    })
                    .await;
            }
        }
    }
}

/// Sizes at which a transport may well take another algorithm.
pub(super) async fn large(suite: &mut Suite<'_>) {
    for dims in [[3, 9001], [20_011, 1]] {
        all_reduce::<f32>(suite, &dims, Reduction::Sum).await;
        all_reduce::<bf16>(suite, &dims, Reduction::Sum).await;
        all_reduce::<i32>(suite, &dims, Reduction::Max).await;
    }
}

async fn all_reduce<T: Sample>(suite: &mut Suite<'_>, dims: &[usize], reduction: Reduction) {
    let arrays = arrays::<T>(suite, dims);
    let expected = vec![reduced(suite, &arrays, reduction); arrays.len()];
    let what = format!("all_reduce of {dims:?} by {reduction}");
    suite
        .expect(&what, &expected, |s| {
            s.transport
                .all_reduce(&s.mesh, &s.parts(&arrays)?, reduction)
        })
        .await;
}

/// What the reduction should be.
fn reduced<T: Sample>(suite: &Suite<'_>, arrays: &[Array<T>], reduction: Reduction) -> Array<T> {
    match suite.sums {
        Sums::InOrder => Array::reduce(arrays, reduction),
        Sums::InAnyOrder => Array::reduce_loosely(arrays, reduction),
    }
}

fn arrays<T: Sample>(suite: &Suite<'_>, dims: &[usize]) -> Vec<Array<T>> {
    suite
        .group
        .iter()
        .map(|rank| Array::of_rank(*rank, dims))
        .collect()
}
