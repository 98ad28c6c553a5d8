//! Batched matrix products: tiles or the `gemm` crate for floats, plain loops for integers.

use crate::{
    element::{Held, is_held_as_stored},
    grid::{copied, dense},
    matvec::{self, Columns},
    memory::{Dense, bytes_of, stored, try_stored, typed},
    parallel,
    product::product,
    scalar::{Float, Int},
};
use ::gemm::Parallelism;
use anymesh_kernel::{Buffer, Dims, Error, Kind, Layout, Result, Shape, View, backend::MatmulCall};

/// One matrix inside a slice: element `(i, j)` is `data[start + i * rows + j * cols]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) start: usize,
    pub(crate) rows: isize,
    pub(crate) cols: isize,
}

impl<'a, T> Matrix<'a, T> {
    /// A whole slice in row-major order with `cols` columns.
    pub(crate) fn dense(data: &'a [T], cols: usize) -> Self {
        Self {
            data,
            start: 0,
            rows: cols as isize,
            cols: 1,
        }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            ..self
        }
    }

    /// What begins at this row and column.
    pub(crate) fn from(self, row: usize, column: usize) -> Self {
        let by = row as isize * self.rows + column as isize * self.cols;
        Self {
            start: self.start.wrapping_add_signed(by),
            ..self
        }
    }

    /// Whether all of an `m` by `n` matrix lies inside the slice.
    pub(crate) fn fits(&self, m: usize, n: usize) -> bool {
        let (down, across) = ((m as isize - 1) * self.rows, (n as isize - 1) * self.cols);
        let start = self.start as isize;
        start + down.min(0) + across.min(0) >= 0
            && start + down.max(0) + across.max(0) < self.data.len() as isize
    }
}

/// `out = a b`, or `out += a b` with `add`, where `a` is m by k and `b` is k by n. Row `i` of the
/// result starts at `i * stride` of `out`.
pub(crate) fn gemm<T: Float>(
    out: (&mut [T], usize),
    sizes: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    add: bool,
    threads: Parallelism,
) -> Result<()> {
    gemm_biased(out, sizes, a, b, (add, None), threads)
}

/// [`gemm`], and then a bias of `n` elements added to every row.
#[allow(unsafe_code)]
fn gemm_biased<T: Float>(
    (out, stride): (&mut [T], usize),
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    (add, bias): (bool, Option<&[T]>),
    threads: Parallelism,
) -> Result<()> {
    let inside = m > 0 && n > 0 && k > 0 && stride >= n && out.len() >= (m - 1) * stride + n;
    let whole = bias.is_none_or(|bias| bias.len() == n);
    assert!(
        inside && whole && a.fits(m, k) && b.fits(k, n),
        "a matrix product outside its operands"
    );
    let count = match threads {
        Parallelism::Rayon(_) if m * n * k >= SMALL => rayon::current_num_threads(),
        _ => 1,
    };
    if product((out, stride), [m, n, k], a, b, (add, bias), count)? {
        return Ok(());
    }
    // SAFETY: the three operands lie inside their slices for every (i, j) below the given sizes
    // (checked above, for any strides), rows of `out` do not overlap, `out` is borrowed mutably and
    // so shares nothing with `a` or `b`, and `T` is `f32` or `f64`, the only types that implement
    // `Float`.
    unsafe {
        ::gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            add,
            a.data.as_ptr().add(a.start),
            a.cols,
            a.rows,
            b.data.as_ptr().add(b.start),
            b.cols,
            b.rows,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            threads,
        );
    }
    if let Some(bias) = bias {
        out.chunks_mut(stride).for_each(|row| plus(row, bias));
    }
    Ok(())
}

/// Adds a bias to a row, which may be longer.
fn plus<T: Float>(row: &mut [T], bias: &[T]) {
    for (out, bias) in row.iter_mut().zip(bias) {
        *out = *out + *bias;
    }
}

/// An operand in memory: its values, and a layout over them.
pub(crate) struct Operand<'a, T> {
    pub(crate) data: Dense<'a, T>,
    pub(crate) layout: Layout,
}

/// Reads an operand in place where the kernel can, else makes a dense copy (without repeating what
/// is only expanded over the batch).
pub(crate) fn operand<T: Held>(view: &View) -> Result<Operand<'_, T>> {
    let rank = view.layout.shape.rank();
    let (rows, cols) = (view.layout.strides[rank - 2], view.layout.strides[rank - 1]);
    let direct = (rows == 1 && cols > 0) || (cols == 1 && rows > 0);
    if direct && is_held_as_stored(view.dtype) {
        return Ok(Operand {
            data: Dense::Borrowed(typed(bytes_of(&view.buffer)?)),
            layout: view.layout.clone(),
        });
    }
    let mut layout = view.layout.clone();
    for d in 0..rank - 2 {
        if layout.strides[d] == 0 {
            layout.shape = layout.shape.with(d, 1);
        }
    }
    let once = View {
        layout,
        ..view.clone()
    };
    let copy = Layout::contiguous(once.layout.shape.clone()).expand(&view.layout.shape);
    Ok(Operand {
        data: copied(&once)?,
        layout: copy,
    })
}

/// Sizes of a product, and where each matrix of the batch starts.
struct Problem {
    sizes: [usize; 3],
    /// Strides of rows and columns of both operands.
    a: (isize, isize),
    b: (isize, isize),
    starts: Vec<(usize, usize)>,
}

impl Problem {
    fn new(a: &Layout, b: &Layout) -> Self {
        let rank = a.shape.rank();
        let batch = Shape::from(&a.shape.dims()[..rank - 2]);
        let [mut m, n, k] = [a.shape[rank - 2], b.shape[rank - 1], a.shape[rank - 1]];
        let matrix = |l: &Layout| (l.strides[rank - 2], l.strides[rank - 1]);
        let (mut a_strides, b_strides) = (matrix(a), matrix(b));
        // A batch over one shared right operand is one tall product.
        let shared = (0..rank - 2).all(|d| batch[d] == 1 || b.strides[d] == 0);
        let tall = Layout {
            shape: a.shape.dims()[..rank - 1].into(),
            strides: a.strides[..rank - 1].into(),
            offset: a.offset,
        };
        if let (true, Some(tall)) = (
            shared && batch.numel() > 1,
            tall.reshape(&Shape::from([batch.numel() * m])),
        ) {
            m *= batch.numel();
            a_strides.0 = tall.strides[0];
            return Self {
                sizes: [m, n, k],
                a: a_strides,
                b: b_strides,
                starts: vec![(a.offset, b.offset)],
            };
        }
        let starts = |l: &Layout| Layout {
            shape: batch.clone(),
            strides: l.strides[..rank - 2].iter().copied().collect::<Dims<_>>(),
            offset: l.offset,
        };
        let starts = starts(a).positions().zip(starts(b).positions()).collect();
        Self {
            sizes: [m, n, k],
            a: a_strides,
            b: b_strides,
            starts,
        }
    }

    fn operands<'a, T>(
        &self,
        (i, j): (usize, usize),
        a: &'a [T],
        b: &'a [T],
    ) -> (Matrix<'a, T>, Matrix<'a, T>) {
        (
            Matrix {
                data: a,
                start: i,
                rows: self.a.0,
                cols: self.a.1,
            },
            Matrix {
                data: b,
                start: j,
                rows: self.b.0,
                cols: self.b.1,
            },
        )
    }
}

/// Products with fewer multiplications than this are not worth a second thread.
pub(crate) const SMALL: usize = 1 << 17;

/// Whether there are no scales, nothing to add to, and a bias, if there is one, is held as the operands are.
pub(crate) fn fits(call: &MatmulCall) -> bool {
    let held = call.a.dtype.kind();
    let floats = matches!(held, Kind::F32 | Kind::F64);
    let bias = (call.bias.as_ref()).is_none_or(|bias| floats && bias.dtype.kind() == held);
    bias && call.scales.is_none() && call.addend.is_none()
}

fn float<T: Float>(call: &MatmulCall) -> Result<Buffer> {
    let bias = call.bias.as_ref().map(dense::<T>).transpose()?;
    let rows = call.a.layout.shape.dims().first().copied();
    if rows.is_some_and(|m| m <= matvec::MOST_ROWS)
        && let Some(columns) = Columns::of(&call.b)?
    {
        let x = dense::<T>(&call.a)?;
        let n = call.b.layout.shape[1];
        let len = call.a.layout.shape[0] * n;
        let run = |out: &mut [T]| {
            matvec::product(&x, &columns, out);
            if let Some(bias) = &bias {
                out.chunks_mut(n).for_each(|row| plus(row, bias));
            }
        };
        return Ok(stored(call.dtype, len, run)?.buffer());
    }
    let (a, b) = (operand::<T>(&call.a)?, operand::<T>(&call.b)?);
    let problem = Problem::new(&a.layout, &b.layout);
    let [m, n, k] = problem.sizes;
    let product = |out: &mut [T], starts: (usize, usize), threads| {
        let (a, b) = problem.operands(starts, &a.data, &b.data);
        gemm_biased((out, n), [m, n, k], a, b, (false, bias.as_deref()), threads)
    };
    let len = problem.starts.len() * m * n;
    Ok(try_stored(call.dtype, len, |out: &mut [T]| {
        let (single, batch) = (m * n * k, problem.starts.len());
        let mut matrices = out.chunks_mut(m * n).zip(&problem.starts);
        if single * batch < SMALL {
            matrices.try_for_each(|(out, starts)| product(out, *starts, Parallelism::None))
        } else if batch >= 2 * rayon::current_num_threads() {
            parallel::try_each(usize::MAX, matrices, |_, (out, starts)| {
                product(out, *starts, Parallelism::None)
            })
        } else {
            matrices.try_for_each(|(out, starts)| product(out, *starts, Parallelism::Rayon(0)))
        }
    })?
    .buffer())
}

fn int<T: Int>(call: &MatmulCall) -> Result<Buffer> {
    let (a, b) = (operand::<T>(&call.a)?, operand::<T>(&call.b)?);
    let problem = Problem::new(&a.layout, &b.layout);
    let [m, n, k] = problem.sizes;
    let len = problem.starts.len() * m * n;
    Ok(stored(call.dtype, len, |out: &mut [T]| {
        let row = |i: usize, out: &mut [T]| {
            out.fill(T::ZERO);
            let (a, b) = problem.operands(problem.starts[i / m], &a.data, &b.data);
            let at = |m: &Matrix<'_, T>, i: usize, j: usize| {
                m.data[(m.start as isize + i as isize * m.rows + j as isize * m.cols) as usize]
            };
            for p in 0..k {
                let left = at(&a, i % m, p);
                if b.cols == 1 {
                    let start = (b.start as isize + p as isize * b.rows) as usize;
                    out.iter_mut()
                        .zip(&b.data[start..start + n])
                        .for_each(|(out, right)| *out = out.add(left.mul(*right)));
                } else {
                    out.iter_mut()
                        .enumerate()
                        .for_each(|(j, out)| *out = out.add(left.mul(at(&b, p, j))));
                }
            }
        };
        parallel::each(out.len() * k, out.chunks_mut(n), row);
    })?
    .buffer())
}

/// The backend's matmul kernel.
pub(crate) fn matmul(call: &MatmulCall) -> Result<Buffer> {
    match call.a.dtype.kind() {
        Kind::F32 => float::<f32>(call),
        Kind::F64 => float::<f64>(call),
        Kind::I32 => int::<i32>(call),
        Kind::I64 => int::<i64>(call),
        Kind::U32 => int::<u32>(call),
        Kind::Bool => Err(Error::DType {
            op: "matmul",
            dtype: call.a.dtype,
            expected: "a number",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, read, values, views};
    use anymesh_kernel::DType;

    #[test]
    fn products_of_all_layouts_and_dtypes_equal_the_plain_loop() {
        for (batch, [m, n, k]) in [
            (vec![], [5, 4, 3]),
            (vec![], [1, 9, 17]),
            (vec![], [1, 7, 71]),
            (vec![], [3, 6, 133]),
            (vec![], [40, 1, 33]),
            (vec![3], [4, 5, 6]),
            (vec![2, 3], [7, 2, 1]),
        ] {
            let shape = |a: usize, b: usize| [batch.clone(), vec![a, b]].concat();
            for dtype in [
                DType::F32,
                DType::F64,
                DType::F16,
                DType::BF16,
                DType::F8E4M3,
                DType::I32,
                DType::I64,
                DType::U8,
            ] {
                for a in views(&shape(m, k), dtype, 31, true) {
                    for b in views(&shape(k, n), dtype, 32, true) {
                        let out = if dtype.kind() == Kind::F32 {
                            DType::F32
                        } else {
                            dtype
                        };
                        let got = read(
                            &matmul(&MatmulCall {
                                op: "test",
                                a: a.clone(),
                                b: b.clone(),
                                scales: None,
                                bias: None,
                                addend: None,
                                dtype: out,
                            })
                            .expect("runs"),
                            out,
                        );
                        let (x, y) = (values(&a), values(&b));
                        let mut expected = vec![];
                        for p in 0..batch.iter().product::<usize>() {
                            for i in 0..m {
                                for j in 0..n {
                                    let sum: f64 = (0..k)
                                        .map(|q| x[(p * m + i) * k + q] * y[(p * k + q) * n + j])
                                        .sum();
                                    expected.push(if dtype == DType::U8 {
                                        f64::from(sum as i64 as u8)
                                    } else {
                                        sum
                                    });
                                }
                            }
                        }
                        assert_close(
                            &got,
                            &expected,
                            0.0,
                            &format!("{dtype} {:?} {:?}", a.layout, b.layout),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_bias_gives_the_bits_of_a_product_and_a_sum() {
        for [m, n, k] in [
            [1, 40, 64],
            [3, 9, 5],
            [40, 1, 33],
            [70, 90, 600],
            [200, 33, 20],
        ] {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                let a = &views(&[m, k], dtype, 1, false)[0];
                let mut b = views(&[n, k], dtype, 2, false)[0].clone();
                b.layout = b.layout.permute(&[1, 0]);
                for bias in views(&[n], dtype, 3, false) {
                    let run = |bias: Option<View>, dtype: DType| {
                        let call = MatmulCall {
                            op: "test",
                            a: a.clone(),
                            b: b.clone(),
                            scales: None,
                            bias,
                            addend: None,
                            dtype,
                        };
                        assert!(fits(&call));
                        read(&matmul(&call).expect("runs"), dtype)
                    };
                    let (wide, bias_of) = (dtype.kind().dtype(), values(&bias));
                    let sums: Vec<f64> = (run(None, wide).iter().enumerate())
                        .map(|(i, x)| match wide {
                            DType::F64 => x + bias_of[i % n],
                            _ => f64::from(*x as f32 + bias_of[i % n] as f32),
                        })
                        .collect();
                    assert_eq!(run(Some(bias), wide), sums, "{m}x{n}x{k} {dtype}");
                }
            }
        }
    }

    #[test]
    fn large_products_are_the_same_for_any_number_of_threads() {
        for rows in [1, 3, 150] {
            same_for_any_number_of_threads(rows);
        }
    }

    fn same_for_any_number_of_threads(rows: usize) {
        let a = &views(&[rows, 130], DType::F32, 1, false)[0];
        let mut b = views(&[2000, 130], DType::F32, 2, false)[0].clone();
        b.layout = b.layout.permute(&[1, 0]);
        let call = MatmulCall {
            op: "test",
            a: a.clone(),
            b,
            scales: None,
            bias: None,
            addend: None,
            dtype: DType::F32,
        };
        let threads = |n: usize| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(n)
                .build()
                .expect("threads")
        };
        let runs = [1, 2, 5]
            .map(|n| threads(n).install(|| read(&matmul(&call).expect("runs"), DType::F32)));
        assert_eq!(runs[0], runs[1]);
        assert_eq!(runs[0], runs[2]);
    }
}
