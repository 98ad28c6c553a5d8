//! When to use more than one thread. Work is always cut at the same places, so results do not
//! depend on how many there are.

use anymesh_kernel::Result;
use rayon::prelude::*;

/// Elements of one task.
pub(crate) const CHUNK: usize = 1 << 15;

/// Below this many elements the work is done before another thread has woken up.
pub(crate) const THRESHOLD: usize = 1 << 16;

/// Calls `f(start, chunk)` for all chunks of `data`.
pub(crate) fn chunks<T: Send>(data: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    if data.len() < THRESHOLD {
        data.chunks_mut(size)
            .enumerate()
            .for_each(|(i, chunk)| f(i * size, chunk));
    } else {
        data.par_chunks_mut(size)
            .enumerate()
            .for_each(|(i, chunk)| f(i * size, chunk));
    }
}

/// Runs `f(task, chunk)` for chunk number `task` of `data`; `work` is the cost of everything in
/// elements. The first error in order is returned, however the tasks were scheduled.
pub(crate) fn try_chunks<T: Send>(
    data: &mut [T],
    size: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) -> Result<()> + Sync,
) -> Result<()> {
    if work < THRESHOLD {
        return data
            .chunks_mut(size)
            .enumerate()
            .try_for_each(|(i, chunk)| f(i, chunk));
    }
    let results: Vec<Result<()>> = data
        .par_chunks_mut(size)
        .enumerate()
        .map(|(i, chunk)| f(i, chunk))
        .collect();
    results.into_iter().collect()
}
