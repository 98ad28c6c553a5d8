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
use anymesh_kernel::{DType, Result, View, bf16, f16};

/// With more rows than this a packed kernel pays.
pub(crate) const MOST_ROWS: usize = 4;
/// Weights that one task reads.
const TASK: usize = 1 << 16;
/// Products that are summed side by side: several registers of any width.
const LANES: usize = 32;
/// Places in memory that a task reads from by turns: of one alone less is fetched ahead than memory
/// can give.
const STREAMS: usize = 4;
/// Lanes of one that are read before it is the next one's turn.
const TURN: usize = 4;

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
        match self.dtype {
            dtype if is_held_as_stored(dtype) => self.dots::<T, T>(first, x, out),
            DType::BF16 => self.dots::<bf16, T>(first, x, out),
            DType::F16 => self.dots::<f16, T>(first, x, out),
            _ => self.loaded(first, x, out),
        }
    }

    /// Each element is made a `T` where it is used.
    fn dots<S: Stored, T: Float>(&self, first: usize, x: &[T], out: &mut [T])
    where
        S::Held: Float,
    {
        if S::Held::KIND == T::KIND {
            Dots {
                x: bytemuck::cast_slice(x),
                columns: &typed::<S>(self.bytes)[self.start + first * self.step..],
                step: self.step,
                k: self.k,
                out: bytemuck::cast_slice_mut(out),
            }
            .run();
        }
    }

    /// Elements that a table knows are loaded some columns at a time.
    fn loaded<T: Float>(&self, first: usize, x: &[T], out: &mut [T]) {
        let (k, start) = (self.k, self.start + first * self.step);
        with_stored!(self.dtype, S => {
            if <S as Stored>::Held::KIND != T::KIND {
                return;
            }
            let (stored, m) = (typed::<S>(self.bytes), x.len() / k);
            let mut columns = vec![<S as Stored>::Held::default(); STREAMS * k];
            for (first, out) in (0..).step_by(STREAMS).zip(out.chunks_mut(STREAMS * m)) {
                let columns = &mut columns[..out.len() / m * k];
                for (j, column) in columns.chunks_exact_mut(k).enumerate() {
                    let from = start + (first + j) * self.step;
                    S::load_all(&stored[from..from + k], column);
                }
                let columns = bytemuck::cast_slice::<_, T>(columns);
                Dots { x, columns, step: k, k, out }.run();
            }
        });
    }
}

/// The products of rows with columns that begin `step` elements after each other.
struct Dots<'a, S: Stored> {
    x: &'a [S::Held],
    columns: &'a [S],
    step: usize,
    k: usize,
    out: &'a mut [S::Held],
}

impl<S: Stored<Held: Float>> Dots<'_, S> {
    fn run(self) {
        let Self { x, k, out, .. } = self;
        let m = x.len() / k;
        let count = out.len() / m;
        let apart = count.div_ceil(STREAMS);
        for j in 0..apart {
            // Those that are missing at the end are computed again.
            let numbers: [usize; STREAMS] = std::array::from_fn(|s| (s * apart + j).min(count - 1));
            let columns = numbers.map(|j| &self.columns[j * self.step..][..k]);
            for (i, x) in x.chunks_exact(k).enumerate() {
                for (j, dot) in numbers.into_iter().zip(dots(x, columns)) {
                    out[j * m + i] = dot;
                }
            }
        }
    }
}

/// The products of a row with columns that are as long.
fn dots<S: Stored<Held: Float>>(x: &[S::Held], columns: [&[S]; STREAMS]) -> [S::Held; STREAMS] {
    let ((x, x_rest), chunks) = (x.as_chunks(), columns.map(<[S]>::as_chunks));
    let columns = chunks.map(|(columns, _)| columns);
    let mut sums = dispatch(Sums { x, columns });
    for (sums, (_, rest)) in sums.iter_mut().zip(chunks) {
        for ((sum, x), y) in sums.iter_mut().zip(x_rest).zip(rest) {
            *sum = *sum + *x * y.load();
        }
    }
    sums.map(total)
}

/// The sums of the products of a row with columns, in lanes. Nothing but that: beside other code the
/// compiler makes scalars of the lanes.
struct Sums<'a, S: Stored> {
    x: &'a [[S::Held; LANES]],
    columns: [&'a [[S; LANES]]; STREAMS],
}

impl<S: Stored<Held: Float>> Kernel for Sums<'_, S> {
    type Out = [[S::Held; LANES]; STREAMS];

    #[inline(always)]
    fn run(self) -> Self::Out {
        let mut sums = [[S::Held::default(); LANES]; STREAMS];
        for (turn, x) in self.x.chunks(TURN).enumerate() {
            for (sums, column) in sums.iter_mut().zip(self.columns) {
                let mut own = *sums;
                for (x, y) in x.iter().zip(&column[turn * TURN..]) {
                    for lane in 0..LANES {
                        own[lane] = own[lane] + x[lane] * y[lane].load();
                    }
                }
                *sums = own;
            }
        }
        sums
    }
}

/// The sum of all lanes, by halves.
fn total<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane] + lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{dense_view, random, values};

    #[test]
    fn a_column_has_the_same_bits_alone_and_among_others() {
        for (k, n) in [(1, 1), (31, 3), (32, 4), (100, 5), (576, 9), (300, 1000)] {
            let (w, x) = (random(n * k, 3, false), random(4 * k, 4, false));
            for (dtype, m) in [
                (DType::F32, 1),
                (DType::F32, 3),
                (DType::BF16, 4),
                (DType::F16, 2),
                (DType::F8E4M3, 1),
            ] {
                let mut view = dense_view(&w, dtype, [n, k]);
                view.layout = view.layout.permute(&[1, 0]);
                let stored = values(&view);
                let columns = Columns::of(&view).expect("of this backend");
                let columns = columns.expect("columns lie one after the other");
                let x: Vec<f32> = x[..m * k].iter().map(|v| *v as f32).collect();
                let mut all = vec![0.0; m * n];
                product(&x, &columns, &mut all);
                for j in [0, n / 2, n - 1] {
                    let start = columns.start + j * columns.step;
                    let one = Columns {
                        start,
                        n: 1,
                        ..columns
                    };
                    let mut alone = vec![0.0; m];
                    product(&x, &one, &mut alone);
                    for (i, alone) in alone.iter().enumerate() {
                        assert_eq!(*alone, all[i * n + j], "{dtype} {m}x{k}x{n}");
                        let terms = (0..k).map(|p| f64::from(x[i * k + p]) * stored[p * n + j]);
                        let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                        assert!(
                            (f64::from(*alone) - sum).abs() <= 1e-6 * size,
                            "{dtype} {m}x{k}x{n}: {alone}, expected {sum}"
                        );
                    }
                }
            }
        }
    }
}
