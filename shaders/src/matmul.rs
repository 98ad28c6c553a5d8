//! Batched matrix products.
//!
//! Two kernels. `tiles` gives a cube a square of the output and stages panels of both operands in
//! shared memory; `dots` gives each output some threads that share the summed dimension, for
//! vectors and small matrices. Both can split the summed dimension over cubes where there are few
//! outputs; a reduction then adds the parts. The order of every sum is fixed by the shapes and
//! strides, so results are the same bits every time.

use crate::{
    CubeBackend, Memory,
    map::CUBE,
    program::{bind, wrap},
    tile::{
        Matrix, Square, V4, address, distinct, duty, element, fetch, multiply, put, put_row, splits,
    },
};
use anymesh_kernel::{
    Buffer, DType, Dims, Error, Kind, Layout, MapProgram, Result, Shape, View,
    backend::{MapCall, MapInput, MatmulCall, ReduceCall, ReduceOp},
    layout::collapse,
};
use cubecl::prelude::*;
use smallvec::smallvec;

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    /// The operands' dtype.
    dtype: DType,
    /// What is stored: a dtype of 32 or 64 bits, or any where rows are whole.
    stored: DType,
    /// Whether the rows of the output are multiples of four.
    whole: bool,
    /// Which buffer is the right operand's: the left's own, or the next.
    right: usize,
    /// Batch dimensions.
    rank: usize,
    /// The part of the output that a cube computes (`tiles`).
    square: Square,
    /// Threads that share an output (`dots`).
    across: usize,
    /// Whether neighbouring threads step along the summed dimension when they read the left and the
    /// right operand.
    along: (bool, bool),
}

/// The operands of one product of the batch. `numbers` are the sizes m, n, k, the steps per split,
/// the products, the splits, then start, row stride and column stride of both operands, then the
/// batch's dimensions and both its strides.
#[cube]
fn operands(
    numbers: &Sequence<usize>,
    product: usize,
    split: usize,
    #[comptime] rank: usize,
) -> (Matrix, Matrix) {
    let (m, n, k, steps) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let mut a = *numbers.index(6usize);
    let mut b = *numbers.index(9usize);
    let (a_row, a_col, b_row, b_col) = (
        *numbers.index(7usize),
        *numbers.index(8usize),
        *numbers.index(10usize),
        *numbers.index(11usize),
    );
    let mut rest = product;
    #[unroll]
    for d in 0..rank {
        let extent = *numbers.index(comptime!(12 + rank - 1 - d));
        let at = rest % extent;
        rest /= extent;
        a += at * *numbers.index(comptime!(12 + 2 * rank - 1 - d));
        b += at * *numbers.index(comptime!(12 + 3 * rank - 1 - d));
    }
    let first = split * steps;
    let depth = min(k - first, steps);
    (
        Matrix {
            start: a + first * a_col,
            rows: m,
            row_stride: a_row,
            depth,
            depth_stride: a_col,
        },
        Matrix {
            start: b + first * b_row,
            rows: n,
            row_stride: b_col,
            depth,
            depth_stride: b_row,
        },
    )
}

/// A cube computes a square of the output.
#[cube(launch_unchecked, address_type = "dynamic")]
fn tiles<W: Numeric, T: Numeric>(
    buffers: &Sequence<Box<[W]>>,
    out: &mut [W],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) {
    let (side, depth, pitch, fours) = comptime!((
        how.square.side(),
        how.square.depth(),
        how.square.pitch(),
        how.square.fours
    ));
    let mut left = Shared::<[V4<T>]>::new_slice(comptime!(depth * pitch));
    let mut right = Shared::<[V4<T>]>::new_slice(comptime!(depth * pitch));
    let (m, n, products, splits) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(4usize),
        *numbers.index(5usize),
    );
    let (down, across) = (
        (m + comptime!(side - 1)) / side,
        (n + comptime!(side - 1)) / side,
    );
    let (square, rest) = (CUBE_POS % (down * across), CUBE_POS / (down * across));
    // Surplus cubes of the grid repeat an earlier one.
    let (product, split) = (rest % products, rest / products % splits);
    let (a, b) = operands(numbers, product, split, how.rank);
    let (row, column) = (square / across * side, square % across * side);
    let (a_words, b_words) = (buffers.index(0usize), buffers.index(how.right));

    let unit = UNIT_POS as usize;
    let (a_step, a_four) = duty(unit, comptime!(side / 4), depth, how.along.0);
    let (b_step, b_four) = duty(unit, comptime!(side / 4), depth, how.along.1);
    let mut next_a = fetch::<W, T>(a_words, &a, row + a_four * 4usize, a_step, how.dtype);
    let mut next_b = fetch::<W, T>(b_words, &b, column + b_four * 4usize, b_step, how.dtype);
    let (x, y) = (unit % 16usize, unit / 16usize);
    let mut sums = Array::<V4<T>>::new(comptime!(how.square.share()));
    #[unroll]
    for i in 0..comptime!(how.square.share()) {
        sums[i] = V4::new(T::from_int(0));
    }
    let mut step = 0usize;
    while step < a.depth {
        left[a_step * pitch + a_four] = next_a;
        right[b_step * pitch + b_four] = next_b;
        sync_cube();
        step += depth;
        // The next panels are on their way while this one is used; past the end these are zeros
        // nobody reads.
        next_a = fetch::<W, T>(a_words, &a, row + a_four * 4usize, step + a_step, how.dtype);
        next_b = fetch::<W, T>(
            b_words,
            &b,
            column + b_four * 4usize,
            step + b_step,
            how.dtype,
        );
        multiply(&left, &right, &mut sums, x, y, how.square);
        sync_cube();
    }
    let base = (split * products + product) * m * n;
    #[unroll]
    for i in 0..comptime!(4 * fours) {
        let r = row + y * 4usize + comptime!(i / 4 * 64 + i % 4);
        if r < m {
            #[unroll]
            for j in 0..fours {
                let c = column + x * 4usize + comptime!(j * 64);
                put_row::<W, T>(
                    out,
                    base + r * n + c,
                    max(n, c) - c,
                    sums[comptime!(i * fours + j)],
                    how.stored,
                    how.whole,
                );
            }
        }
    }
}

/// `across` threads share an output.
#[cube(launch_unchecked, address_type = "dynamic")]
fn dots<W: Numeric, T: Numeric>(
    buffers: &Sequence<Box<[W]>>,
    out: &mut [W],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) {
    let across = comptime!(how.across);
    let outputs = comptime!(CUBE as usize / across);
    let unit = UNIT_POS as usize;
    let (lane, slot) = if comptime!(how.along.1) {
        (unit % across, unit / across)
    } else {
        (unit / outputs, unit % outputs)
    };
    let (m, n, products, splits) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(4usize),
        *numbers.index(5usize),
    );
    let output = CUBE_POS * outputs + slot;
    let (row, column) = (output / n % m, output % n);
    let rest = output / n / m;
    let (a, b) = operands(numbers, rest % products, rest / products % splits, how.rank);
    let (a_words, b_words) = (buffers.index(0usize), buffers.index(how.right));
    let mut sum = T::from_int(0);
    let mut step = lane;
    while step < a.depth {
        let x = element::<W, T>(
            a_words,
            a.start + row * a.row_stride + step * a.depth_stride,
            how.dtype,
        );
        let y = element::<W, T>(
            b_words,
            b.start + column * b.row_stride + step * b.depth_stride,
            how.dtype,
        );
        sum += x * y;
        step += across;
    }
    if comptime!(across > 1) {
        let mut parts = Shared::<[T]>::new_slice(comptime!(CUBE as usize));
        let me = slot * across + lane;
        let mut half = comptime!(across / 2).runtime();
        while half > 0usize {
            parts[me] = sum;
            sync_cube();
            if lane < half {
                sum += parts[me + half];
            }
            sync_cube();
            half /= 2usize;
        }
    }
    if lane == 0usize && output < m * n * products * splits {
        put::<W, T>(out, output, sum, how.stored);
    }
}

/// Sizes and strides of a call, with the batch in as few dimensions as it goes.
struct Problem {
    m: usize,
    n: usize,
    k: usize,
    batch: Shape,
    /// Offset, row stride and column stride.
    a: (usize, isize, isize),
    b: (usize, isize, isize),
    batch_strides: [Dims<isize>; 2],
}

impl Problem {
    fn new(a: &Layout, b: &Layout) -> Self {
        let rank = a.shape.rank();
        let (mut m, n, k) = (a.shape[rank - 2], b.shape[rank - 1], a.shape[rank - 1]);
        let mut batch = Shape::from(&a.shape.dims()[..rank - 2]);
        let mut batch_strides = [
            Dims::from(&a.strides[..rank - 2]),
            Dims::from(&b.strides[..rank - 2]),
        ];
        let mut a_row = a.strides[rank - 2];
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
            a_row = tall.strides[0];
            batch = Shape::from([]);
            batch_strides = [Dims::new(), Dims::new()];
        }
        let batch = collapse(&batch, &mut batch_strides);
        Self {
            m,
            n,
            k,
            batch,
            a: (a.offset, a_row, a.strides[rank - 1]),
            b: (b.offset, b.strides[rank - 2], b.strides[rank - 1]),
            batch_strides,
        }
    }

    fn outputs(&self) -> usize {
        self.batch.numel() * self.m * self.n
    }

    /// Whether threads that bring a panel should walk along the summed dimension: where memory
    /// does.
    fn along(&self) -> (bool, bool) {
        let along = |depth: isize, rows: isize| depth.abs() == 1 || (depth != 0 && rows.abs() != 1);
        (along(self.a.2, self.a.1), along(self.b.1, self.b.2))
    }

    /// How to run: the kernel (`across` is 0 for tiles), and into how many parts the summed
    /// dimension is cut.
    fn plan(&self, dtype: DType, wanted: DType, right: usize) -> (How, usize) {
        let whole = self.n.is_multiple_of(4);
        let held = dtype.kind().dtype();
        let outputs = self.outputs();
        let square = Square::fitting(self.m, self.n, self.batch.numel(), dtype.size() == 8);
        let base = How {
            dtype,
            stored: held,
            whole,
            right,
            rank: self.batch.rank(),
            square,
            across: 0,
            along: self.along(),
        };
        if self.m.min(self.n) == 1 || self.m * self.n <= 256 {
            // The larger operand decides who reads what.
            let along = if self.n >= self.m {
                base.along.1
            } else {
                base.along.0
            };
            let most = match (along, outputs) {
                (true, 0..4096) => CUBE as usize,
                (true, _) => 32,
                (false, 0..131_072) => 8,
                (false, _) => 1,
            };
            let across = self.k.div_ceil(8).next_power_of_two().clamp(1, most);
            let how = How {
                across,
                along: (along, along),
                whole: false,
                ..base
            };
            return (
                how,
                splits(
                    (outputs * across).div_ceil(CUBE as usize),
                    self.k,
                    64 * across,
                ),
            );
        }
        let splits = splits(
            square.count(self.m, self.n) * self.batch.numel(),
            self.k,
            256,
        );
        (
            How {
                stored: if splits == 1 && whole { wanted } else { held },
                ..base
            },
            splits,
        )
    }
}

impl CubeBackend {
    pub(crate) fn run_matmul(&self, call: &MatmulCall) -> Result<Buffer> {
        match call.a.dtype.kind() {
            Kind::F32 => self.matmul_as::<u32, f32>(call),
            Kind::I32 => self.matmul_as::<u32, i32>(call),
            Kind::U32 => self.matmul_as::<u32, u32>(call),
            Kind::F64 => self.matmul_as::<f64, f64>(call),
            Kind::I64 => self.matmul_as::<i64, i64>(call),
            Kind::Bool => Err(Error::DType {
                op: "matmul",
                dtype: call.a.dtype,
                expected: "a number",
            }),
        }
    }

    /// The product computed in `T`, from and to words `W`.
    fn matmul_as<W: Numeric, T: Numeric>(&self, call: &MatmulCall) -> Result<Buffer> {
        let problem = Problem::new(&call.a.layout, &call.b.layout);
        let (buffers, [_, right]) = distinct([&call.a, &call.b])?;
        let (how, splits) = problem.plan(call.a.dtype, call.dtype, right);
        let steps = problem.k.div_ceil(splits).next_multiple_of(16);
        let splits = problem.k.div_ceil(steps);
        let outputs = problem.outputs();
        let out = self.alloc(how.stored, outputs * splits)?;
        let address = address(
            &buffers,
            call.a.dtype,
            &[outputs * splits * how.across.max(1) + CUBE as usize],
        );

        let mut numbers = vec![
            problem.m,
            problem.n,
            problem.k,
            steps,
            problem.batch.numel(),
            splits,
        ];
        let mut push =
            |strides: &[isize]| numbers.extend(strides.iter().map(|&s| wrap(s as i64, address)));
        push(&[
            problem.a.0 as isize,
            problem.a.1,
            problem.a.2,
            problem.b.0 as isize,
            problem.b.1,
            problem.b.2,
        ]);
        push(
            &problem
                .batch
                .dims()
                .iter()
                .map(|&n| n as isize)
                .collect::<Dims<isize>>(),
        );
        problem
            .batch_strides
            .iter()
            .for_each(|strides| push(strides));

        let handles: Vec<_> = buffers
            .iter()
            .map(|m| (m.handle.clone(), m.bytes))
            .collect();
        let (inputs, result) = (
            bind(&handles, size_of::<W>()),
            crate::arg(&out, size_of::<W>()),
        );
        let (client, dim, numbers) = (
            &self.client,
            CubeDim::new_1d(CUBE),
            numbers.into_iter().collect(),
        );
        // SAFETY: reads are clamped into the operands and writes guarded by the output's sizes.
        unsafe {
            if how.across > 0 {
                let count = crate::cubes(outputs * splits * how.across, CUBE);
                dots::launch_unchecked::<W, T>(
                    client, count, dim, address, inputs, result, numbers, how,
                );
            } else {
                let count = crate::cubes(
                    how.square.count(problem.m, problem.n) * problem.batch.numel() * splits,
                    1,
                );
                tiles::launch_unchecked::<W, T>(
                    client, count, dim, address, inputs, result, numbers, how,
                );
            }
        }
        if splits > 1 {
            self.add_parts(out, how.stored, splits, outputs, call.dtype)
        } else {
            self.convert(out, how.stored, call.dtype, outputs)
        }
    }

    /// Adds the parts `[splits, outputs]` of a product.
    pub(crate) fn add_parts(
        &self,
        parts: Memory,
        held: DType,
        splits: usize,
        outputs: usize,
        dtype: DType,
    ) -> Result<Buffer> {
        let shape = Shape::from([splits, outputs]);
        let input = MapInput {
            view: View {
                buffer: parts.buffer(),
                dtype: held,
                layout: Layout::contiguous(shape.clone()),
            },
            window: None,
        };
        let map = MapCall {
            op: "matmul",
            program: MapProgram::cast(held, held),
            shape,
            inputs: smallvec![input],
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        };
        self.run_reduce(&ReduceCall {
            map,
            axes: smallvec![0],
            mode: ReduceOp::Sum,
            scale: None,
            dtype,
        })
    }
}
