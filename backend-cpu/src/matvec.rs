//! Products of few rows with a matrix whose columns lie in memory one after the other: what a linear
//! layer does for one token. Each weight is used once or a few times, so they take as long as
//! reading the weights does; packing them for a kernel would read and write them once more.

use crate::{
    element::{Held, Stored, is_held_as_stored, with_stored},
    memory::{bytes_of, typed},
    parallel,
    scalar::Float,
    simd::{Kernel, dispatch},
};
use anymesh_kernel::{DType, Result, View};

/// With more rows than this a packed kernel pays.
pub(crate) const MOST_ROWS: usize = 4;
/// Weights that one task reads.
const TASK: usize = 1 << 16;
/// Products that are summed side by side: several registers of any width.
const LANES: usize = 32;

/// The columns of a matrix `[k, n]`: column `j` is the `k` elements from `start + j * step` on.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    bytes: &'a [u8],
    dtype: DType,
    start: usize,
    step: usize,
    k: usize,
    n: usize,
}

impl<'a> Columns<'a> {
    /// Of a view, if its columns are contiguous and it is no batch.
    pub(crate) fn of(view: &'a View) -> Result<Option<Self>> {
        let layout = &view.layout;
        let (&[k, n], &[1, step]) = (layout.shape.dims(), &layout.strides[..]) else {
            return Ok(None);
        };
        let step = match n {
            1 => k as isize,
            _ => step,
        };
        if step < k as isize {
            return Ok(None);
        }
        Ok(Some(Self {
            bytes: bytes_of(&view.buffer)?,
            dtype: view.dtype,
            start: layout.offset,
            step: step as usize,
            k,
            n,
        }))
    }
}

/// The product of dense rows `x`, `[m, k]`, with the columns, `[m, n]`, computed in `T`, which is
/// what the columns are held as.
pub(crate) fn product<T: Float>(x: &[T], columns: &Columns<'_>, out: &mut [T]) {
    let Columns { k, n, .. } = *columns;
    let m = x.len() / k;
    let columns_of_task = (TASK / k).max(1);
    let fill = |task: usize, out: &mut [T]| columns.fill(task * columns_of_task, x, out);
    let each = |out: &mut [T]| parallel::each(n * k / 2, out.chunks_mut(columns_of_task * m), fill);
    if m == 1 {
        return each(out);
    }
    // Of each column the results of all rows, so that tasks write to places of their own.
    let mut turned = vec![T::default(); m * n];
    each(&mut turned);
    for (i, row) in out.chunks_exact_mut(n).enumerate() {
        for (out, results) in row.iter_mut().zip(turned.chunks_exact(m)) {
            *out = results[i];
        }
    }
}

impl Columns<'_> {
    /// The products of all rows with the columns from `first` on, as many as `out` has room for.
    fn fill<T: Float>(&self, first: usize, x: &[T], out: &mut [T]) {
        let (k, start) = (self.k, self.start + first * self.step);
        if is_held_as_stored(self.dtype) {
            let columns = &typed::<T>(self.bytes)[start..];
            let step = self.step;
            return dispatch(Dots {
                x,
                columns,
                step,
                k,
                out,
            });
        }
        with_stored!(self.dtype, S => {
            if <S as Stored>::Held::KIND != T::KIND {
                return;
            }
            let (stored, m) = (typed::<S>(self.bytes), x.len() / k);
            let mut column = vec![<S as Stored>::Held::default(); k];
            for (j, out) in out.chunks_exact_mut(m).enumerate() {
                let from = start + j * self.step;
                S::load_all(&stored[from..from + k], &mut column);
                let columns = bytemuck::cast_slice(&column);
                dispatch(Dots { x, columns, step: k, k, out });
            }
        });
    }
}

/// The products of rows with columns that begin `step` elements after each other.
struct Dots<'a, T> {
    x: &'a [T],
    columns: &'a [T],
    step: usize,
    k: usize,
    out: &'a mut [T],
}

impl<T: Float> Kernel for Dots<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let m = self.x.len() / self.k;
        for (j, out) in self.out.chunks_exact_mut(m).enumerate() {
            let column = &self.columns[j * self.step..][..self.k];
            for (out, x) in out.iter_mut().zip(self.x.chunks_exact(self.k)) {
                *out = dot(x, column);
            }
        }
    }
}

#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut sums = [T::default(); LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] = sums[lane] + a[lane] * b[lane];
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(rest) {
        *sum = *sum + *a * *b;
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] = sums[lane] + sums[lane + width];
        }
    }
    sums[0]
}
