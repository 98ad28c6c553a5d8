//! How a reduction is shared out.

use crate::map::CUBE;
use anymesh_kernel::{Dims, backend::ReduceCall};

/// Most parts of a result.
const PARTS: usize = 1024;

/// How a reduction runs: which kernel, and how it is cut.
#[derive(Debug, PartialEq)]
pub(super) struct Cut {
    /// Whether memory runs along what is reduced.
    pub(super) rows: bool,
    /// Results.
    pub(super) kept: usize,
    /// Elements of each.
    pub(super) length: usize,
    /// Threads that share a row, or that lie beside each other on columns.
    pub(super) width: u32,
    /// Parts of each result; none is empty.
    pub(super) splits: usize,
}

/// The largest power of two that is not above a number, or one.
fn power_below(n: usize) -> usize {
    1 << n.max(1).ilog2()
}

impl Cut {
    pub(super) fn new(call: &ReduceCall) -> (Self, Dims) {
        let shape = &call.map.shape;
        let reduced = |d: usize| call.axes.contains(&d);
        let length: usize = call.axes.iter().map(|&d| shape[d]).product();
        let kept = shape.numel() / length;
        // The dimension that memory runs along: the one the first input steps through by ones, else
        // the last.
        let strides = call.map.inputs.first().map(|i| &i.view.layout.strides);
        let runs = (0..shape.rank())
            .rev()
            .find(|&d| shape[d] > 1 && strides.is_some_and(|s| s[d].abs() == 1));
        let runs = runs.or_else(|| (0..shape.rank()).rev().find(|&d| shape[d] > 1));
        let rows = kept == 1 || runs.is_none_or(reduced);
        let (kept_dims, axes): (Dims, Dims) = (
            (0..shape.rank()).filter(|&d| !reduced(d)).collect(),
            call.axes.clone(),
        );
        let order: Dims = if rows {
            kept_dims.into_iter().chain(axes).collect()
        } else {
            axes.into_iter().chain(kept_dims).collect()
        };
        let cut = match rows {
            true => Self::along_rows(kept, length),
            false => Self::down_columns(kept, length),
        };
        (cut, order)
    }

    // Enough threads to fill a large GPU, and no split so short that starting it costs more than its
    // work.

    fn along_rows(kept: usize, length: usize) -> Self {
        let width = (length.div_ceil(4).next_power_of_two() as u32).clamp(1, CUBE);
        let lines = kept.div_ceil((CUBE / width) as usize);
        let splits = (1024 / lines.max(1)).min(length.div_ceil(4 * CUBE as usize * 4));
        Self {
            rows: true,
            kept,
            length,
            width,
            splits: splits.max(1),
        }
        .without_empty()
    }

    fn down_columns(kept: usize, length: usize) -> Self {
        let (cube, groups) = (CUBE as usize, kept.div_ceil(4));
        // How often all columns must be gone down to have threads enough.
        let wanted = (131_072 / groups).max(1);
        // Threads beside each other read memory in runs long enough for its bus.
        let beside = groups.next_power_of_two().min(32);
        let lines = power_below(wanted.min(length.div_ceil(4))).min(cube / beside);
        let splits = (wanted / lines).min(length.div_ceil(16 * lines));
        Self {
            rows: false,
            kept,
            length,
            width: (cube / lines) as u32,
            splits: splits.clamp(1, PARTS),
        }
        .without_empty()
    }

    /// What is cut into splits.
    fn units(&self) -> usize {
        match self.rows {
            true => self.length.div_ceil(4),
            false => self.length,
        }
    }

    /// Chunks of four elements, or rows, of each split.
    pub(super) fn per_split(&self) -> usize {
        self.units().div_ceil(self.splits)
    }

    /// Rounding up the size of a split may leave the last ones empty.
    fn without_empty(mut self) -> Self {
        self.splits = self.units().div_ceil(self.per_split());
        self
    }

    /// Cubes that share a result's columns or make up all rows, for one split.
    pub(super) fn cubes(&self) -> usize {
        match self.rows {
            true => (self.kept * self.width as usize).div_ceil(CUBE as usize),
            false => self.kept.div_ceil(4).div_ceil(self.width as usize),
        }
    }

    /// Loads that a thread makes before it uses them.
    pub(super) fn unroll(&self) -> usize {
        let threads = match self.rows {
            true => self.width,
            false => CUBE / self.width,
        };
        match self.per_split() / threads as usize {
            0..4 => 1,
            4..8 => 4,
            _ if self.rows => 4,
            _ => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_many_rows_are_shared_by_threads_beside_and_below_each_other() {
        let cut = Cut::down_columns(768, 16_384);
        assert_eq!((cut.width, cut.splits, cut.cubes()), (32, 85, 6));
        assert_eq!((cut.per_split(), cut.unroll()), (193, 8));
        // Columns enough for all threads.
        let cut = Cut::down_columns(1 << 20, 64);
        assert_eq!((cut.width, cut.splits, cut.unroll()), (256, 1, 8));
        let few = Cut::down_columns(3, 1000);
        assert_eq!((few.width, few.splits), (2, 1));
    }

    #[test]
    fn no_split_is_empty() {
        for length in 1..3000 {
            for kept in [1, 5, 64, 1000] {
                for cut in [
                    Cut::along_rows(kept, length),
                    Cut::down_columns(kept, length),
                ] {
                    assert!((cut.splits - 1) * cut.per_split() < cut.units(), "{cut:?}");
                    assert!(cut.splits * cut.per_split() >= cut.units(), "{cut:?}");
                    // A row that is split is all that a cube has.
                    assert!(cut.splits == 1 || !cut.rows || cut.width == CUBE, "{cut:?}");
                    assert!(cut.splits == 1 || cut.cubes() <= 1024, "{cut:?}");
                }
            }
        }
    }
}
