//! Right operands that are packed once, for several products.

use super::{
    LEAST, Out, Product, Right,
    pack::{Panel, pack_all},
    tile::Tiles,
};
use crate::{
    matmul::{Matrix, gemm},
    memory::Memory,
    scalar::Float,
};
use anymesh_kernel::Result;
use std::ops::Range;

/// With fewer rows than this in all products together, packing takes longer than it saves.
const WORTH: usize = 32;

/// Room for a right operand that several products have, some rows and columns of it each.
pub(crate) struct Packed<T: 'static> {
    /// None where products are better served by [`gemm`], with nothing packed.
    tiles: Option<&'static Tiles<T>>,
    memory: Memory,
    rows: usize,
    columns: usize,
}

impl<T: Float> Packed<T> {
    /// For operands of this size; the results have `height` rows altogether.
    pub(crate) fn new(rows: usize, columns: usize, height: usize) -> Result<Self> {
        let worth = height >= WORTH && columns >= LEAST[1] && rows >= LEAST[2];
        let tiles = T::tiles().filter(|_| worth);
        let room = |tiles: &Tiles<T>| rows * columns.next_multiple_of(tiles.columns);
        Ok(Self {
            tiles,
            memory: Memory::elements::<T>(tiles.map_or(0, room))?,
            rows,
            columns,
        })
    }

    /// Takes this operand in place of the last one.
    pub(crate) fn pack(&mut self, b: Matrix<'_, T>) {
        let Some(tiles) = self.tiles else {
            return;
        };
        let (rows, columns, width) = (self.rows, self.columns, tiles.columns);
        let panels = (0..columns.div_ceil(width)).map(|j| Panel {
            lines: j * width..columns.min((j + 1) * width),
            width,
            at: j * width * rows,
        });
        pack_all(b.t(), panels, 0..rows, self.memory.typed_mut());
    }

    /// `out = a b`, or `out += a b` with `add`, of these rows and columns of `b`, which is the operand
    /// that was packed last; `a` has `height` rows. The first column is a multiple of every tile's width,
    /// as [`whole`] makes it.
    pub(crate) fn product(
        &self,
        (out, step): (&mut [T], usize),
        height: usize,
        a: Matrix<'_, T>,
        b: Matrix<'_, T>,
        (rows, columns): (Range<usize>, Range<usize>),
        add: bool,
    ) -> Result<()> {
        let Some(tiles) = self.tiles else {
            let b = b.from(rows.start, columns.start);
            let sizes = [height, columns.len(), rows.len()];
            return gemm((out, step), sizes, a, b, add, gemm::Parallelism::None);
        };
        let fits = height > 0 && !columns.is_empty() && !rows.is_empty();
        assert!(
            fits && out.len() >= (height - 1) * step + columns.len()
                && a.fits(height, rows.len())
                && rows.end <= self.rows
                && columns.end <= self.columns
                && columns.start.is_multiple_of(tiles.columns),
            "a product outside its operands"
        );
        let first = columns.start * self.rows + rows.start * tiles.columns;
        Product {
            tiles,
            rows: height,
            columns: columns.len(),
            depth: rows.len(),
            left: a,
            right: Right::Packed(&self.memory.typed()[first..], self.rows),
            out: Out {
                first: out.as_mut_ptr(),
                step,
            },
            add,
            bias: None,
        }
        .run(1)
    }
}

/// The last column up to this one with which a product may begin.
pub(crate) fn whole(column: usize) -> usize {
    column / 32 * 32
}
