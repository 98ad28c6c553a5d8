//! A sum of which only a chunk is in memory at a time.

use crate::{Result, recompute::recompute_each};
use anymesh_core::Tensor;

/// The sum of `f` over chunks of a dimension that all tensors have, each of at most `chunk`
/// elements. Each is computed again in the backward pass, so that what `f` makes of a chunk never
/// lives beside that of another.
///
/// A chunk is every n-th element and not n neighbours: where the dimension is cut over ranks, each
/// has its share of every chunk.
#[track_caller]
pub(super) fn sum_over_chunks(
    tensors: &[(&Tensor, i64)],
    chunk: usize,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Clone + Send + Sync + 'static,
) -> Result<Option<Tensor>> {
    let size = tensors.first().map_or(0, |(t, axis)| {
        t.dims()[axis.rem_euclid(t.rank() as i64) as usize]
    });
    let step = size.div_ceil(chunk.max(1));
    let mut sum: Option<Tensor> = None;
    for start in 0..step {
        let part = |(t, axis): &(&Tensor, i64)| -> Result<Tensor> {
            Ok(t.slice(*axis, Some(start as i64), None, step as i64)?)
        };
        let parts = tensors.iter().map(part).collect::<Result<Vec<_>>>()?;
        let refs: Vec<&Tensor> = parts.iter().collect();
        let term = recompute_each(&refs, f.clone())?;
        sum = Some(match sum {
            None => term,
            Some(sum) => sum.add(&term)?,
        });
    }
    Ok(sum)
}
