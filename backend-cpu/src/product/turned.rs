//! Products that are taller than wide, of a left operand that lies column by column, as in the
//! gradient of a weight. To pack that one for each task takes long: it is read in short pieces that are
//! far apart. The turned product reads it in long ones, and its result is turned back, in the same bits.

use super::{
    DEPTH, by_tiles,
    pack::{Panel, pack_all},
    tile::Tiles,
    wide,
};
use crate::{matmul::Matrix, memory::Memory, parallel, scalar::Float};
use anymesh_kernel::Result;

/// Rows of the result that one task turns.
const ROWS: usize = 64;

/// Whether a product is of this kind, and long enough to make up for turning its result.
pub(super) fn pays<T>(tiles: &Tiles<T>, [m, n, k]: [usize; 3], a: &Matrix<'_, T>) -> bool {
    m > n && k >= DEPTH && a.rows == 1 && a.cols > 1 && wide::pays(tiles, [n, m, k])
}

/// `out = a b`, dense, and the bias on every row.
pub(super) fn product<T: Float>(
    tiles: &'static Tiles<T>,
    out: &mut [T],
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    bias: Option<&[T]>,
    threads: usize,
) -> Result<()> {
    let mut memory = Memory::elements::<T>(m * n)?;
    let turned = (memory.typed_mut(), m);
    let (sizes, onto) = ([n, m, k], (false, None));
    by_tiles(tiles, turned, sizes, b.t(), a.t(), onto, threads)?;
    let turned = Matrix::dense(memory.typed_mut(), m);
    let work = if threads > 1 { m * n } else { 0 };
    parallel::each(work, out[..m * n].chunks_mut(ROWS * n), |i, out| {
        // A panel of all its rows is what it is when turned.
        let (rows, all) = (i * ROWS..i * ROWS + out.len() / n, 0..n);
        let panel = Panel {
            lines: all,
            width: n,
            at: 0,
        };
        pack_all(turned, std::iter::once(panel), rows, out);
        for row in out.chunks_mut(n) {
            for (x, bias) in row.iter_mut().zip(bias.into_iter().flatten()) {
                *x = *x + *bias;
            }
        }
    });
    Ok(())
}
