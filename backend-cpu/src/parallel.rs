//! When to use more than one thread. Work is always cut at the same places, so results do not
//! depend on how many there are.

use crate::crew;
use anymesh_kernel::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// Elements of one task.
pub(crate) const CHUNK: usize = 1 << 15;

/// Below this many elements the work is done before another thread has woken up.
pub(crate) const THRESHOLD: usize = 1 << 16;

/// Calls `f(i, item)` for item number `i` of all items; `work` is the cost of everything in
/// elements.
pub(crate) fn each<T: Send>(
    work: usize,
    items: impl Iterator<Item = T>,
    f: impl Fn(usize, T) + Sync,
) {
    if work < THRESHOLD {
        return items.enumerate().for_each(|(i, item)| f(i, item));
    }
    let items: Vec<Mutex<Option<T>>> = items.map(|item| Mutex::new(Some(item))).collect();
    crew::run(items.len(), &|i| {
        let item = items[i]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(item) = item {
            f(i, item);
        }
    });
}

/// [`each`] for what may fail. The first error in order is returned, however the tasks were
/// scheduled.
pub(crate) fn try_each<T: Send>(
    work: usize,
    mut items: impl Iterator<Item = T>,
    f: impl Fn(usize, T) -> Result<()> + Sync,
) -> Result<()> {
    if work < THRESHOLD {
        let mut i = 0;
        return items.try_for_each(|item| {
            i += 1;
            f(i - 1, item)
        });
    }
    let first: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    each(work, items, |i, item| {
        if let Err(error) = f(i, item) {
            let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(at, _)| i < *at) {
                *first = Some((i, error));
            }
        }
    });
    let first = first.into_inner().unwrap_or_else(PoisonError::into_inner);
    first.map_or(Ok(()), |(_, error)| Err(error))
}

/// Calls `f(start, chunk)` for all chunks of `data`.
pub(crate) fn chunks<T: Send>(data: &mut [T], size: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    each(data.len(), data.chunks_mut(size), |i, chunk| {
        f(i * size, chunk)
    });
}

/// Runs `f(task, chunk)` for chunk number `task` of `data`; `work` is the cost of everything in
/// elements. The first error in order is returned.
pub(crate) fn try_chunks<T: Send>(
    data: &mut [T],
    size: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) -> Result<()> + Sync,
) -> Result<()> {
    try_each(work, data.chunks_mut(size), f)
}
