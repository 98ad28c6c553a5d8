//! Products that are taller than wide, of a left operand that lies column by column, as in the
//! gradient of a weight. To pack that one for each task takes long: it is read in short pieces that are
//! far apart. The turned product reads it in long ones, and its result is turned back, in the same bits.

use super::{DEPTH, by_tiles, tile::Tiles, wide};
use crate::{matmul::Matrix, memory::Memory, parallel, scalar::Float};
use anymesh_kernel::Result;

/// Rows of the result that one task turns.
const ROWS: usize = 64;

/// Elements of a side of a square that is turned at once.
const SQUARE: usize = 8;

/// Whether a product is of this kind, and long enough to make up for turning its result.
pub(super) fn pays<T>(tiles: &Tiles<T>, [m, n, k]: [usize; 3], a: &Matrix<'_, T>) -> bool {
    m > n && k >= DEPTH && a.rows == 1 && a.cols > 1 && wide::pays(tiles, [n, m, k])
}

/// `out = a b`, and the bias on every row.
pub(super) fn product<T: Float>(
    tiles: &'static Tiles<T>,
    (out, step): (&mut [T], usize),
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    bias: Option<&[T]>,
    threads: usize,
) -> Result<()> {
    let mut memory = Memory::elements::<T>(m * n)?;
    let turned = (memory.typed_mut(), m);
    by_tiles(
        tiles,
        turned,
        [n, m, k],
        b.t(),
        a.t(),
        (false, None),
        threads,
    )?;
    let turned: &[T] = memory.typed_mut();
    let work = if threads > 1 { m * n } else { 0 };
    let chunks = out[..(m - 1) * step + n].chunks_mut(ROWS * step);
    parallel::each(work, chunks, |i, out| {
        let (first, rows) = (i * ROWS, ROWS.min(m - i * ROWS));
        for top in (0..rows).step_by(SQUARE) {
            for left in (0..n).step_by(SQUARE) {
                let (from, to) = (
                    &turned[left * m + first + top..],
                    &mut out[top * step + left..],
                );
                let (height, width) = (SQUARE.min(rows - top), SQUARE.min(n - left));
                if height == SQUARE && width == SQUARE && T::turn(from, m, to, step) {
                    continue;
                }
                for row in 0..height {
                    for column in 0..width {
                        to[row * step + column] = from[column * m + row];
                    }
                }
            }
        }
        for row in out.chunks_mut(step) {
            for (x, bias) in row.iter_mut().zip(bias.into_iter().flatten()) {
                *x = *x + *bias;
            }
        }
    });
    Ok(())
}
