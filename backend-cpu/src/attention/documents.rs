//! Which keys a query sees of its own document.

use crate::{grid::dense, memory::Dense};
use anymesh_kernel::{Result, backend::AttentionCall};
use std::ops::Range;

/// The documents of queries `[batch, s]` and of keys `[batch, t]`.
pub(super) struct Documents<'a> {
    queries: Dense<'a, i32>,
    keys: Dense<'a, i32>,
    s: usize,
    t: usize,
}

impl<'a> Documents<'a> {
    pub(super) fn new(call: &'a AttentionCall) -> Result<Option<Self>> {
        let Some([queries, keys]) = &call.documents else {
            return Ok(None);
        };
        Ok(Some(Self {
            queries: dense(queries)?,
            keys: dense(keys)?,
            s: queries.layout.shape[1],
            t: keys.layout.shape[1],
        }))
    }

    /// The keys before `end` between the first and the last that may be of a document of these
    /// queries.
    pub(super) fn keys_of(&self, batch: usize, queries: Range<usize>, end: usize) -> Range<usize> {
        let own = &self.queries[batch * self.s..][queries];
        let lowest = own.iter().min().copied().unwrap_or(i32::MAX);
        let highest = own.iter().max().copied().unwrap_or(i32::MIN);
        let keys = &self.keys[batch * self.t..][..end];
        let meets = |key: &i32| (lowest..=highest).contains(key);
        match keys.iter().position(meets) {
            Some(first) => first..keys.iter().rposition(meets).map_or(end, |last| last + 1),
            None => 0..0,
        }
    }

    /// Which of some keys a query sees.
    pub(super) fn seen(&self, batch: usize, query: usize, keys: Range<usize>) -> Seen {
        let own = self.queries[batch * self.s + query];
        let keys = &self.keys[batch * self.t..][keys];
        let is_own = |key: &i32| *key == own;
        let first = keys.iter().position(is_own).unwrap_or(0);
        let end = keys.iter().rposition(is_own).map_or(0, |last| last + 1);
        if keys[first..end].iter().all(is_own) {
            return Seen::Run(first..end);
        }
        Seen::Some((first..end).filter(|&j| is_own(&keys[j])).collect())
    }
}

/// Which elements of a row are seen.
pub(super) enum Seen {
    /// Those of a range.
    Run(Range<usize>),
    /// These.
    Some(Vec<usize>),
}

impl Seen {
    /// Changes what is seen of some rows, unless that is nothing; the rest becomes zero.
    pub(super) fn of<T: Copy + Default, const N: usize>(
        &self,
        mut rows: [&mut [T]; N],
        change: impl FnOnce([&mut [T]; N]),
    ) {
        match self {
            Seen::Run(seen) => {
                for row in &mut rows {
                    row[..seen.start].fill(T::default());
                    row[seen.end..].fill(T::default());
                }
                if !seen.is_empty() {
                    change(rows.map(|row| &mut row[seen.clone()]));
                }
            }
            Seen::Some(places) => {
                let mut parts = rows
                    .each_ref()
                    .map(|row| places.iter().map(|&at| row[at]).collect::<Vec<T>>());
                change(parts.each_mut().map(Vec::as_mut_slice));
                for (row, part) in rows.iter_mut().zip(&parts) {
                    row.fill(T::default());
                    for (&at, x) in places.iter().zip(part) {
                        row[at] = *x;
                    }
                }
            }
        }
    }
}
