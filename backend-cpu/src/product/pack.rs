//! Operands of products in the order in which tiles read them.

use crate::{matmul::Matrix, scalar::Float};
use std::ops::Range;

/// Steps of the inner dimension that are copied at a time where lines lie along it: what they are
/// written to stays in the first-level cache.
const STEPS: usize = 16;

/// Copies the rows `lines` of a matrix, columns `depth`, to `out`: for each column `width` elements,
/// one for each line and zeros for those that are missing.
pub(crate) fn pack<T: Float>(
    matrix: Matrix<'_, T>,
    lines: Range<usize>,
    depth: Range<usize>,
    width: usize,
    out: &mut [T],
) {
    let Matrix {
        data, rows, cols, ..
    } = matrix;
    let at = |line: usize, step: usize| {
        (matrix.start as isize + line as isize * rows + step as isize * cols) as usize
    };
    let count = lines.len();
    let out = &mut out[..depth.len() * width];
    if rows == 1 {
        for (step, out) in depth.zip(out.chunks_exact_mut(width)) {
            let at = at(lines.start, step);
            copy(&data[at..at + count], &mut out[..count]);
            out[count..].fill(T::default());
        }
        return;
    }
    if count < width {
        out.fill(T::default());
    }
    for (first, out) in (depth.clone().step_by(STEPS)).zip(out.chunks_mut(STEPS * width)) {
        let steps = out.len() / width;
        // Whole squares of rows that lie along the inner dimension are turned at once.
        let squares = if cols == 1 && rows > 0 && steps == STEPS {
            turn_squares(
                data,
                at(lines.start, first),
                rows as usize,
                count,
                width,
                out,
            )
        } else {
            0
        };
        for (i, line) in lines.clone().enumerate().skip(squares) {
            if cols == 1 {
                let at = at(line, first);
                let from = &data[at..at + steps];
                for (out, x) in out.chunks_exact_mut(width).zip(from) {
                    out[i] = *x;
                }
            } else {
                for (out, step) in out.chunks_exact_mut(width).zip(first..) {
                    out[i] = data[at(line, step)];
                }
            }
        }
    }
}

/// Turns [`STEPS`] elements of each line, eight lines at a time; how many lines that were.
fn turn_squares<T: Float>(
    data: &[T],
    start: usize,
    line: usize,
    lines: usize,
    width: usize,
    out: &mut [T],
) -> usize {
    for i in (0..lines / 8 * 8).step_by(8) {
        for step in (0..STEPS).step_by(8) {
            let (from, to) = (
                &data[start + i * line + step..],
                &mut out[step * width + i..],
            );
            if !T::turn(from, line, to, width) {
                return 0;
            }
        }
    }
    lines / 8 * 8
}

/// A copy that is no call for the widths that tiles have.
#[inline(always)]
fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    fn fixed<T: Copy, const N: usize>(from: &[T], to: &mut [T]) -> bool {
        match (<&[T; N]>::try_from(from), <&mut [T; N]>::try_from(to)) {
            (Ok(from), Ok(to)) => {
                *to = *from;
                true
            }
            _ => false,
        }
    }
    let done = fixed::<T, 32>(from, to) || fixed::<T, 16>(from, to) || fixed::<T, 14>(from, to);
    if !done {
        to.copy_from_slice(from);
    }
}
