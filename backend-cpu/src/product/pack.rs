//! Operands of products in the order in which tiles read them.

use crate::{
    matmul::Matrix,
    scalar::Float,
    simd::{Kernel, dispatch},
};
use std::ops::Range;

/// Steps of the inner dimension that are copied at a time where lines lie along it: what they are
/// written to stays in the first-level cache.
const STEPS: usize = 16;

/// A panel of an operand: some of its rows, with room for `width` of them, from `at` on.
#[derive(Clone)]
pub(crate) struct Panel {
    pub(crate) lines: Range<usize>,
    pub(crate) width: usize,
    pub(crate) at: usize,
}

/// Packs several panels, each as [`pack`] does. Where lines are neighbours in memory, all panels take
/// some steps before any takes more: what is read then lies in rows that are longer than a panel is
/// wide.
pub(crate) fn pack_all<T: Float>(
    matrix: Matrix<'_, T>,
    panels: impl Iterator<Item = Panel> + Clone,
    depth: Range<usize>,
    out: &mut [T],
) {
    let steps = if matrix.rows == 1 { STEPS } else { depth.len() };
    for first in depth.clone().step_by(steps) {
        let block = first..depth.end.min(first + steps);
        for Panel { lines, width, at } in panels.clone() {
            let from = at + (first - depth.start) * width;
            pack(matrix, lines, block.clone(), width, &mut out[from..]);
        }
    }
}

/// Copies the rows `lines` of a matrix, columns `depth`, to `out`: for each column `width` elements,
/// one for each line and zeros for those that are missing.
fn pack<T: Float>(
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
        let (start, step) = (at(lines.start, depth.start), cols);
        return dispatch(Copies {
            data,
            start,
            step,
            count,
            width,
            out,
        });
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

/// Copies `count` neighbours for every `width` elements of `out`, from `start` on and every `step`.
struct Copies<'a, T> {
    data: &'a [T],
    start: usize,
    step: isize,
    count: usize,
    width: usize,
    out: &'a mut [T],
}

impl<T: Float> Kernel for Copies<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let mut at = self.start;
        for out in self.out.chunks_exact_mut(self.width) {
            copy(&self.data[at..at + self.count], &mut out[..self.count]);
            out[self.count..].fill(T::default());
            at = at.wrapping_add_signed(self.step);
        }
    }
}

/// Turns [`STEPS`] elements of each line, eight lines at a time; how many lines that were. The last
/// eight may be turned together with some of those before, once more.
fn turn_squares<T: Float>(
    data: &[T],
    start: usize,
    line: usize,
    lines: usize,
    width: usize,
    out: &mut [T],
) -> usize {
    if lines < 8 {
        return 0;
    }
    for i in (0..lines).step_by(8) {
        let i = i.min(lines - 8);
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
    lines
}

/// A copy that is no call for the widths that tiles have.
#[inline(always)]
fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    #[inline(always)]
    fn fixed<T: Copy, const N: usize>(from: &[T], to: &mut [T]) -> bool {
        match (<&[T; N]>::try_from(from), <&mut [T; N]>::try_from(to)) {
            (Ok(from), Ok(to)) => {
                *to = *from;
                true
            }
            _ => false,
        }
    }
    let done = match from.len() {
        32 => fixed::<T, 32>(from, to),
        16 => fixed::<T, 16>(from, to),
        14 => fixed::<T, 14>(from, to),
        13 => fixed::<T, 13>(from, to),
        12 => fixed::<T, 12>(from, to),
        11 => fixed::<T, 11>(from, to),
        10 => fixed::<T, 10>(from, to),
        _ => false,
    };
    if !done {
        to.copy_from_slice(from);
    }
}
