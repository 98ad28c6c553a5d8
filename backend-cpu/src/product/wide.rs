//! Products that are no taller than wide. The left operand, the smaller one, is packed for all, and
//! tasks are columns: each packs some panels of the right operand when it needs them, and uses them
//! for all rows while they are in the second-level cache.

use super::{
    DEPTH, LEFT, PANELS, Product, RIGHT, Right,
    pack::{Panel, pack_all},
    part,
    tile::Tiles,
    with_scratch,
};
use crate::{matmul::Matrix, parallel, scalar::Float};
use anymesh_kernel::Result;
use std::ops::Range;

/// Panels of the left operand that one task packs.
const AT_ONCE: usize = 8;

/// Panels of the right operand that are packed together: what is read is in longer rows.
const TOGETHER: usize = 4;

/// Whether a product is of this kind: a block of all its rows is a part of a second-level cache.
pub(super) fn pays<T>(tiles: &Tiles<T>, [m, n, k]: [usize; 3]) -> bool {
    let rows = tiles.rows;
    m <= n && (4 * rows..=PANELS * rows).contains(&m) && k > rows
}

/// All of a product whose right operand is not packed.
pub(super) fn by_columns<T: Float>(product: Product<'_, T>, threads: usize) -> Result<()> {
    let Right::Later(right) = product.right else {
        return Ok(());
    };
    let (rows, depth, width) = (product.rows, product.depth, product.tiles.columns);
    let (blocks, count) = (depth.div_ceil(DEPTH), rows.div_ceil(product.tiles.rows));
    let panels = product.columns.div_ceil(width);
    with_scratch(&LEFT, rows * depth, |packed: &mut [T]| {
        // Some panels of one block each: where they go, which, and which block.
        let mut parts: Vec<(&mut [T], Range<usize>, Range<usize>)> = vec![];
        let mut rest = &mut *packed;
        for block in 0..blocks {
            let depth = part(block, blocks, depth);
            for first in (0..count).step_by(AT_ONCE) {
                let some = first..count.min(first + AT_ONCE);
                let lines = some.start * rows / count..some.end * rows / count;
                let (own, later) = rest.split_at_mut(lines.len() * depth.len());
                rest = later;
                parts.push((own, some, depth.clone()));
            }
        }
        let work = if threads > 1 { rows * depth } else { 0 };
        parallel::each(work, parts.into_iter(), |_, (own, some, depth)| {
            let first = part(some.start, count, rows).start;
            let panels = some.map(|i| {
                let lines = part(i, count, rows);
                Panel {
                    width: lines.len(),
                    at: (lines.start - first) * depth.len(),
                    lines,
                }
            });
            pack_all(product.left, panels, depth.clone(), own);
        });
        let packed = &*packed;
        // Each reads all of the left operand: not more of them than pack several panels together.
        let tasks = match threads {
            1 => 1,
            _ => (panels.div_ceil(TOGETHER))
                .clamp(2 * threads, 4 * threads)
                .min(panels),
        };
        let work = if threads > 1 { usize::MAX } else { 0 };
        parallel::try_each(work, 0..tasks, |_, i| {
            columns(&product, packed, right, part(i, tasks, panels))
        })
    })?
}

/// Some panels of columns, with the left operand packed.
fn columns<T: Float>(
    product: &Product<'_, T>,
    packed: &[T],
    right: Matrix<'_, T>,
    panels: Range<usize>,
) -> Result<()> {
    let (rows, width) = (product.rows, product.tiles.columns);
    let blocks = product.depth.div_ceil(DEPTH);
    let count = rows.div_ceil(product.tiles.rows);
    with_scratch(&RIGHT, TOGETHER * DEPTH * width, |memory: &mut [T]| {
        for block in 0..blocks {
            let depth = part(block, blocks, product.depth);
            let size = depth.len() * width;
            for first in panels.clone().step_by(TOGETHER) {
                let some = first..panels.end.min(first + TOGETHER);
                let lines = some.clone().map(|j| Panel {
                    lines: j * width..product.columns.min((j + 1) * width),
                    width,
                    at: (j - first) * size,
                });
                pack_all(right.t(), lines, depth.clone(), memory);
                let columns = some.start * width..product.columns.min(some.end * width);
                let tiles = some.len() * count;
                for i in 0..count {
                    let own = part(i, count, rows);
                    let at = rows * depth.start + own.start * depth.len();
                    let left = (&packed[at..], 1, own.len());
                    for (n, (j, panel)) in some.clone().zip(memory.chunks(size)).enumerate() {
                        // A part of what is packed next, which is near then.
                        let next = part(i * some.len() + n, tiles, depth.len());
                        let next = depth.end + next.start..depth.end + next.end;
                        fetch(product, right, next, &columns);
                        product.tile(own.start, own.len(), left, (panel, width), j, &depth);
                    }
                }
            }
        }
    })
}

/// Brings a part of the right operand nearer.
fn fetch<T: Float>(
    product: &Product<'_, T>,
    right: Matrix<'_, T>,
    rows: Range<usize>,
    columns: &Range<usize>,
) {
    let end = product.depth.min(rows.end);
    if right.cols != 1 || right.rows <= 0 || rows.start >= end {
        return;
    }
    let step = right.rows as usize;
    let at = right.start + rows.start * step + columns.start;
    if let Some(data) = right.data.get(at..) {
        let sizes = [end - rows.start, columns.len()];
        product.tiles.fetch(data, step, sizes);
    }
}
