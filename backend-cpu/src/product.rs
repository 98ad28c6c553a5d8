//! Large matrix products: operands are packed into panels, tiles of the result are computed in
//! registers, and blocks are sized so that what is read again is still in a cache.
//!
//! An element of the result is the sum of the same blocks of the inner dimension, each added up in
//! order, whatever the number of threads, rows and columns. So a row of a product has the same bits
//! alone and among others.

mod pack;
mod packed;
mod tile;
mod turned;
mod wide;

pub(crate) use packed::{Packed, whole};
pub(crate) use tile::HasTiles;

use crate::{matmul::Matrix, memory::Memory, parallel, scalar::Float};
use anymesh_kernel::Result;
use pack::{Panel, pack_all};
use std::{cell::Cell, ops::Range};
use tile::{Tile, Tiles};

/// Steps of the inner dimension in a block: a panel of the left operand is a third of a first-level
/// cache, which may be shared with a stranger.
const DEPTH: usize = 256;
/// Panels of the left operand in a block: with a block's depth, a part of a second-level cache.
const PANELS: usize = 32;
/// Panels of the right operand that go by for each of the left one: with a block's depth, a part of
/// a second-level cache.
const ACROSS: usize = 16;
/// With at most so many panels of the right operand the left one is not read often.
const FEW: usize = 4;
/// Panels of the right operand that one task packs.
const AT_ONCE: usize = 4;
/// Elements of the right operand that are packed at a time.
const ROUND: usize = 4 << 20;
/// Steps of the inner dimension that are packed at a time: longer operands take no more memory.
const DEEPEST: usize = 32 * DEPTH;
/// Scratch memory up to this size is kept by each thread.
const KEPT: usize = 1 << 20;
/// With fewer columns or steps than this, or fewer rows, a tile would be mostly empty.
const LEAST: [usize; 3] = [2, 8, 4];
/// The largest tile there is.
const LARGEST: usize = 14 * 32;

thread_local! {
    static LEFT: Cell<Option<Memory>> = const { Cell::new(None) };
    static RIGHT: Cell<Option<Memory>> = const { Cell::new(None) };
}

/// Runs `f` with `len` elements of scratch memory. Nested use gets fresh memory.
fn with_scratch<T: Float, R>(
    slot: &'static std::thread::LocalKey<Cell<Option<Memory>>>,
    len: usize,
    f: impl FnOnce(&mut [T]) -> R,
) -> Result<R> {
    let bytes = len.saturating_mul(size_of::<T>());
    if bytes > KEPT {
        return Ok(f(&mut Memory::new(bytes)?.typed_mut()[..len]));
    }
    let mut memory = match slot.take() {
        Some(memory) if memory.bytes().len() >= bytes => memory,
        _ => Memory::new(bytes.next_power_of_two().max(4096))?,
    };
    let result = f(&mut memory.typed_mut()[..len]);
    slot.set(Some(memory));
    Ok(result)
}

/// Part `i` of `count` equal parts of `0..len`.
fn part(i: usize, count: usize, len: usize) -> Range<usize> {
    i * len / count..(i + 1) * len / count
}

/// A result that several threads write, each its own tiles.
#[derive(Clone, Copy)]
struct Out<T> {
    first: *mut T,
    step: usize,
}

// SAFETY: tasks write elements that no other task does, see `Product::task`.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for Out<T> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for Out<T> {}

/// Some columns of a product, with the right operand ready for tiles.
struct Product<'a, T: 'static> {
    tiles: &'static Tiles<T>,
    rows: usize,
    columns: usize,
    depth: usize,
    left: Matrix<'a, T>,
    right: Right<'a, T>,
    out: Out<T>,
    add: bool,
    /// What is added to every row when it is summed up.
    bias: Option<&'a [T]>,
}

/// Panels of the right operand: full ones, and one for the columns that are left.
enum Right<'a, T> {
    /// All are packed, one after the other, of so many rows each.
    Packed(&'a [T], usize),
    /// Full ones lie where they are, in rows that are `step` apart; the last is packed.
    InPlace {
        data: &'a [T],
        step: usize,
        last: &'a [T],
    },
    /// None is packed before the task that needs it does so.
    Later(Matrix<'a, T>),
}

impl<T: Float> Product<'_, T> {
    /// Panel `j` from `depth` on: its elements, and how far apart its rows are.
    fn panel(&self, j: usize, depth: usize) -> (&[T], usize) {
        let width = self.tiles.columns;
        match self.right {
            Right::Packed(all, rows) => (&all[(j * rows + depth) * width..], width),
            Right::InPlace { last, .. } if (j + 1) * width > self.columns => {
                (&last[depth * width..], width)
            }
            Right::InPlace { data, step, .. } => (&data[j * width + depth * step..], step),
            Right::Later(_) => (&[], width),
        }
    }

    /// Whether the left operand is read where it lies. Packing pays where its rows would push each
    /// other out of the cache; where the inner dimension goes across rows, also where it is read often.
    fn left_in_place(&self, panels: usize) -> bool {
        let Matrix { rows, cols, .. } = self.left;
        let apart =
            |step: isize| step > 0 && !(step as usize * size_of::<T>()).is_multiple_of(2048);
        (cols == 1 && apart(rows)) || (panels <= FEW && rows == 1 && apart(cols))
    }

    /// Some rows of some panels of columns.
    fn task(&self, rows: Range<usize>, panels: Range<usize>) -> Result<()> {
        let blocks = self.depth.div_ceil(DEPTH);
        let count = rows.len().div_ceil(self.tiles.rows);
        let deepest = self.depth.div_ceil(blocks);
        let in_place = self.left_in_place(panels.len());
        // A panel of the left operand stays in the first-level cache while those of the right one
        // go by; where there are few of the left one it is the other way around.
        let together = if count > 2 { ACROSS } else { 1 };
        let size = if in_place { 0 } else { rows.len() * deepest };
        with_scratch(&LEFT, size, |packed: &mut [T]| {
            for block in 0..blocks {
                let depth = part(block, blocks, self.depth);
                if !in_place {
                    let panels = (0..count).map(|i| {
                        let own = part(i, count, rows.len());
                        Panel {
                            lines: rows.start + own.start..rows.start + own.end,
                            width: own.len(),
                            at: own.start * depth.len(),
                        }
                    });
                    pack_all(self.left, panels, depth.clone(), packed);
                }
                for first in panels.clone().step_by(together) {
                    for i in 0..count {
                        let own = part(i, count, rows.len());
                        let (row, height) = (rows.start + own.start, own.len());
                        let left = if in_place {
                            let Matrix { data, start, .. } = self.left;
                            let (down, across) = (self.left.rows as usize, self.left.cols as usize);
                            let at = start + row * down + depth.start * across;
                            (&data[at..], down, across)
                        } else {
                            (&packed[own.start * depth.len()..], 1, height)
                        };
                        for j in first..panels.end.min(first + together) {
                            let right = self.panel(j, depth.start);
                            self.tile(row, height, left, right, j, &depth);
                        }
                    }
                }
            }
        })
    }

    /// A tile: `height` rows from `row` on of panel `j`, over one block of the inner dimension.
    /// Operands begin with their first element there; rows and columns of the left one are so far
    /// apart, and rows of the right one.
    #[allow(unsafe_code)]
    fn tile(
        &self,
        row: usize,
        height: usize,
        (left, a_row, a_step): (&[T], usize, usize),
        (right, b_step): (&[T], usize),
        j: usize,
        depth: &Range<usize>,
    ) {
        let width = self.tiles.columns;
        let add = self.add || depth.start > 0;
        let columns = width.min(self.columns - j * width);
        // With the last block of the inner dimension.
        let bias = (self.bias.filter(|_| depth.end == self.depth))
            .map(|bias| &bias[j * width..j * width + columns]);
        assert!(
            left.len() > (height - 1) * a_row + (depth.len() - 1) * a_step
                && right.len() >= (depth.len() - 1) * b_step + width
                && row + height <= self.rows,
            "a tile outside its operands"
        );
        // SAFETY: `out` has `rows` rows of `columns` elements that are `step` apart.
        let out = unsafe { self.out.first.add(row * self.out.step + j * width) };
        let tile = Tile {
            k: depth.len(),
            a: left.as_ptr(),
            a_row,
            a_step,
            b: right.as_ptr(),
            b_step,
            out,
            out_step: self.out.step,
            add,
            bias: bias.map_or(std::ptr::null(), <[T]>::as_ptr),
        };
        if columns == width {
            // SAFETY: both operands are as long as the tile reads (checked above), all its columns
            // are inside of the result and of the bias, no other task has these, and the machine is
            // the one that the tiles were asked for.
            return unsafe { (self.tiles.run)(height, &tile) };
        }
        // What is not a whole tile is computed aside.
        let mut whole = [T::default(); LARGEST];
        assert!(height * width <= LARGEST, "a tile larger than the largest");
        let aside = Tile {
            out: whole.as_mut_ptr(),
            out_step: width,
            add: false,
            bias: std::ptr::null(),
            ..tile
        };
        // SAFETY: as above; `whole` has all rows.
        unsafe { (self.tiles.run)(height, &aside) };
        for (i, from) in whole.chunks(width).take(height).enumerate() {
            // SAFETY: these columns of this row are inside of the result, and this task's alone.
            let to = unsafe { std::slice::from_raw_parts_mut(out.add(i * self.out.step), columns) };
            for (to, from) in to.iter_mut().zip(from) {
                *to = if add { *from + *to } else { *from };
            }
            for (to, bias) in to.iter_mut().zip(bias.into_iter().flatten()) {
                *to = *to + *bias;
            }
        }
    }

    /// All of it, on some threads.
    fn run(&self, threads: usize) -> Result<()> {
        let (tallest, panels) = (self.tiles.rows, self.columns.div_ceil(self.tiles.columns));
        let fit = self.rows.div_ceil(PANELS * tallest);
        if threads == 1 {
            return (0..fit).try_for_each(|i| self.task(part(i, fit, self.rows), 0..panels));
        }
        // Several tasks for each thread, because not all are equally fast, and as many for each; by
        // columns only where there are few rows, which are packed for each of them anew.
        let enough = 16 * threads;
        let tiles = self.rows.div_ceil(tallest);
        let down = tiles.div_ceil(2).min(enough).max(fit);
        let down = match down > threads {
            true => down.next_multiple_of(threads),
            false => down,
        };
        let across = enough.div_ceil(down).min(panels.div_ceil(4));
        parallel::try_each(usize::MAX, 0..down * across, |_, i| {
            // Whole tiles, as tall as can be.
            let own = part(i / across, down, tiles);
            let first = |tile: usize| part(tile, tiles, self.rows).start;
            self.task(
                first(own.start)..first(own.end),
                part(i % across, across, panels),
            )
        })
    }
}

/// `out = a b`, or `out += a b` with `add`, and the bias on every row, as [`crate::matmul::gemm`] has
/// it, whose caller has checked that everything is inside of its slice. False, and nothing is done, where this machine or
/// these sizes are better served by the portable way.
pub(crate) fn product<T: Float>(
    (out, step): (&mut [T], usize),
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    (add, bias): (bool, Option<&[T]>),
    threads: usize,
) -> Result<bool> {
    let few = m < LEAST[0] || n < LEAST[1] || k < LEAST[2];
    let Some(tiles) = T::tiles().filter(|_| !few) else {
        return Ok(false);
    };
    let rounds = k.div_ceil(DEEPEST);
    for round in 0..rounds {
        let Range { start, end } = part(round, rounds, k);
        let from = |matrix: Matrix<'_, T>, stride: isize| {
            matrix.start.wrapping_add_signed(start as isize * stride)
        };
        let (a_start, b_start) = (from(a, a.cols), from(b, b.rows));
        let a = Matrix {
            start: a_start,
            ..a
        };
        let b = Matrix {
            start: b_start,
            ..b
        };
        let sizes = [m, n, end - start];
        let onto = (add || round > 0, bias.filter(|_| end == k));
        by_tiles(tiles, (out, step), sizes, a, b, onto, threads)?;
    }
    Ok(true)
}

fn by_tiles<T: Float>(
    tiles: &'static Tiles<T>,
    (out, step): (&mut [T], usize),
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    (add, bias): (bool, Option<&[T]>),
    threads: usize,
) -> Result<()> {
    // Not onto what is there, which is added block by block.
    if !add && step == n && turned::pays(tiles, [m, n, k], &a) {
        return turned::product(tiles, out, [m, n, k], a, b, bias, threads);
    }
    let (width, out) = (tiles.columns, out.as_mut_ptr());
    if wide::pays(tiles, [m, n, k]) {
        return wide::by_columns(
            Product {
                tiles,
                rows: m,
                columns: n,
                depth: k,
                left: a,
                right: Right::Later(b),
                out: Out { first: out, step },
                add,
                bias,
            },
            threads,
        );
    }
    let round = (ROUND / k).max(width) / width * width;
    let in_place = b.cols == 1 && b.rows > 0 && m <= 2 * tiles.rows;
    let mut at = 0;
    while at < n {
        let columns = round.min(n - at);
        let right = Matrix {
            start: b.start.wrapping_add_signed(at as isize * b.cols),
            ..b
        };
        let panels = columns.div_ceil(width);
        // The panels that are packed.
        let packed = if in_place { columns / width } else { 0 }..panels;
        with_scratch(&RIGHT, packed.len() * k * width, |memory: &mut [T]| {
            let some = |i: usize, memory: &mut [T]| {
                let panels = (0..memory.len() / (k * width)).map(|j| {
                    let first = (packed.start + i * AT_ONCE + j) * width;
                    Panel {
                        lines: first..columns.min(first + width),
                        width,
                        at: j * k * width,
                    }
                });
                pack_all(right.t(), panels, 0..k, memory);
            };
            let work = if threads > 1 { memory.len() } else { 0 };
            parallel::each(work, memory.chunks_mut(AT_ONCE * k * width), some);
            let memory = &*memory;
            let product = Product {
                tiles,
                rows: m,
                columns,
                depth: k,
                left: a,
                right: if in_place {
                    Right::InPlace {
                        data: &b.data[right.start..],
                        step: b.rows.unsigned_abs(),
                        last: memory,
                    }
                } else {
                    Right::Packed(memory, k)
                },
                out: Out {
                    first: out.wrapping_add(at),
                    step,
                },
                add,
                bias: bias.map(|bias| &bias[at..at + columns]),
            };
            product.run(threads)
        })??;
        at += columns;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
