//! A matrix product for each group of rows, `GroupedCall`.
//!
//! Where groups end is data, so the grid has room for every way they can lie: as many squares of
//! rows as there are, and one more for each group, which may begin inside of one. A cube finds its
//! group by walking along the ends. Two kernels: `rows` multiplies the rows of a group with its
//! matrix, `sums` adds up the outer products of its rows. Both are a cube's share of a plain product.

mod hopper;

use crate::{
    Cores, CubeBackend,
    map::CUBE,
    program::{bind, wrap},
    tile::{Matrix, Square, V4, address, distinct, duty, fetch, multiply, put_row},
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Result,
    backend::{GroupedCall, GroupedOp},
};
use cubecl::prelude::*;

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
    /// The part of the output that a cube computes.
    square: Square,
    /// Whether neighbouring threads step along the summed dimension when they read the left and the
    /// right operand.
    along: (bool, bool),
}

/// End `i`, not below the one before it and not beyond the rows.
#[cube]
fn end(ends: &[i32], numbers: &Sequence<usize>, i: usize, before: usize) -> usize {
    let found = ends[*numbers.index(10usize) + i * *numbers.index(11usize)];
    let found = select(found < 0, 0usize, usize::cast_from(found));
    max(before, min(found, *numbers.index(0usize)))
}

/// Rows that a cube works on: from `row` on, before `stop`, all of one group.
#[derive(CubeType)]
struct Place {
    row: usize,
    stop: usize,
    group: usize,
}

/// Where the `square`-th square of `side` rows lies, counted group by group. Rows of no group are
/// those of one more; behind all there is no row.
#[cube]
fn place(ends: &[i32], numbers: &Sequence<usize>, square: usize, #[comptime] side: usize) -> Place {
    let (n, all) = (*numbers.index(0usize), *numbers.index(13usize));
    let mut left = square;
    let mut start = 0usize;
    let mut row = n;
    let mut stop = 0usize;
    let mut group = 0usize;
    for i in 0..all + 1usize {
        let next = if i < all {
            end(ends, numbers, i, start)
        } else {
            n
        };
        let squares = (next - start + comptime!(side - 1)) / side;
        let here = stop == 0usize && left < squares;
        row = select(here, start + left * side, row);
        stop = select(here, next, stop);
        group = select(here, i, group);
        left -= min(left, squares);
        start = next;
    }
    Place { row, stop, group }
}

/// Adds the products of all steps of two operands to the share of this thread.
#[cube]
fn accumulate<W: Numeric, T: Numeric>(
    buffers: &Sequence<Box<[W]>>,
    a: &Matrix,
    b: &Matrix,
    row: usize,
    column: usize,
    sums: &mut Array<V4<T>>,
    #[comptime] how: How,
) {
    let (side, depth, pitch) =
        comptime!((how.square.side(), how.square.depth(), how.square.pitch()));
    let mut left = Shared::<[V4<T>]>::new_slice(comptime!(depth * pitch));
    let mut right = Shared::<[V4<T>]>::new_slice(comptime!(depth * pitch));
    let (a_words, b_words) = (buffers.index(0usize), buffers.index(how.right));
    let unit = UNIT_POS as usize;
    let (a_step, a_four) = duty(unit, comptime!(side / 4), depth, how.along.0);
    let (b_step, b_four) = duty(unit, comptime!(side / 4), depth, how.along.1);
    let mut next_a = fetch::<W, T>(a_words, a, row + a_four * 4usize, a_step, how.dtype);
    let mut next_b = fetch::<W, T>(b_words, b, column + b_four * 4usize, b_step, how.dtype);
    let (x, y) = (unit % 16usize, unit / 16usize);
    let mut step = 0usize;
    while step < a.depth {
        left[a_step * pitch + a_four] = next_a;
        right[b_step * pitch + b_four] = next_b;
        sync_cube();
        step += depth;
        // The next panels are on their way while this one is used; past the end these are zeros
        // nobody reads.
        next_a = fetch::<W, T>(a_words, a, row + a_four * 4usize, step + a_step, how.dtype);
        next_b = fetch::<W, T>(
            b_words,
            b,
            column + b_four * 4usize,
            step + b_step,
            how.dtype,
        );
        multiply(&left, &right, sums, x, y, how.square);
        sync_cube();
    }
}

/// Stores the share of this thread of the rows from `row` up to `stop`.
#[cube]
fn store<W: Numeric, T: Numeric>(
    out: &mut [W],
    base: usize,
    row: usize,
    stop: usize,
    column: usize,
    columns: usize,
    sums: &Array<V4<T>>,
    #[comptime] how: How,
) {
    let fours = comptime!(how.square.fours);
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 16usize, unit / 16usize);
    #[unroll]
    for i in 0..comptime!(4 * fours) {
        let r = row + y * 4usize + comptime!(i / 4 * 64 + i % 4);
        if r < stop {
            #[unroll]
            for j in 0..fours {
                let c = column + x * 4usize + comptime!(j * 64);
                put_row::<W, T>(
                    out,
                    base + r * columns + c,
                    max(columns, c) - c,
                    sums[comptime!(i * fours + j)],
                    how.stored,
                    how.whole,
                );
            }
        }
    }
}

#[cube]
fn zeros<T: Numeric>(#[comptime] how: How) -> Array<V4<T>> {
    let mut sums = Array::<V4<T>>::new(comptime!(how.square.share()));
    #[unroll]
    for i in 0..comptime!(how.square.share()) {
        sums[i] = V4::new(T::from_int(0));
    }
    sums
}

/// `numbers` are the sizes n, k, m, the groups, then start, row stride and column stride of the left
/// operand, start, row stride and column stride of the right, start and stride of the ends, which of
/// them is the first group's, how many there are, and the stride of the right operand's matrices.
#[cube(launch_unchecked, address_type = "dynamic")]
fn rows<W: Numeric, T: Numeric>(
    buffers: &Sequence<Box<[W]>>,
    ends: &[i32],
    out: &mut [W],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) {
    let side = comptime!(how.square.side());
    let (k, m, groups) = (
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let first = *numbers.index(12usize);
    let across = (m + comptime!(side - 1)) / side;
    let column = CUBE_POS % across * side;
    let Place { row, stop, group } = place(ends, numbers, CUBE_POS / across, side);
    let counts = group >= first && group < first + groups;
    let matrix = select(counts, group - first, 0usize);
    let depth = select(counts && stop > row, k, 0usize);
    let a = Matrix {
        start: *numbers.index(4usize),
        rows: max(stop, 1usize),
        row_stride: *numbers.index(5usize),
        depth,
        depth_stride: *numbers.index(6usize),
    };
    let b = Matrix {
        start: *numbers.index(7usize) + matrix * *numbers.index(14usize),
        rows: m,
        row_stride: *numbers.index(9usize),
        depth,
        depth_stride: *numbers.index(8usize),
    };
    let mut sums = zeros::<T>(how);
    accumulate::<W, T>(buffers, &a, &b, row, column, &mut sums, how);
    store::<W, T>(out, 0usize, row, stop, column, m, &sums, how);
}

/// See [`rows`] for the numbers.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums<W: Numeric, T: Numeric>(
    buffers: &Sequence<Box<[W]>>,
    ends: &[i32],
    out: &mut [W],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) {
    let side = comptime!(how.square.side());
    let (k, m, groups) = (
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let first = *numbers.index(12usize);
    let (down, across) = (
        (k + comptime!(side - 1)) / side,
        (m + comptime!(side - 1)) / side,
    );
    let (square, group) = (CUBE_POS % (down * across), CUBE_POS / (down * across));
    let (row, column) = (square / across * side, square % across * side);
    // Surplus cubes of the grid have no group.
    let inside = group < groups;
    let mut start = 0usize;
    let mut stop = 0usize;
    let mut i = 0usize;
    while i < select(inside, first + group + 1usize, 0usize) {
        start = stop;
        stop = end(ends, numbers, i, stop);
        i += 1usize;
    }
    let depth = stop - start;
    let a = Matrix {
        start: *numbers.index(4usize) + start * *numbers.index(5usize),
        rows: k,
        row_stride: *numbers.index(6usize),
        depth,
        depth_stride: *numbers.index(5usize),
    };
    let b = Matrix {
        start: *numbers.index(7usize) + start * *numbers.index(8usize),
        rows: m,
        row_stride: *numbers.index(9usize),
        depth,
        depth_stride: *numbers.index(8usize),
    };
    let mut sums = zeros::<T>(how);
    accumulate::<W, T>(buffers, &a, &b, row, column, &mut sums, how);
    let stop = select(inside, k, 0usize);
    store::<W, T>(out, group * k * m, row, stop, column, m, &sums, how);
}

/// What [`rows`] and [`sums`] are told.
fn numbers(call: &GroupedCall, address: AddressType) -> Vec<usize> {
    let (a, b, ends) = (&call.a.layout, &call.b.layout, &call.ends.layout);
    let last = b.shape.rank() - 1;
    let [n, k, m] = call.sizes();
    let mut numbers = vec![n, k, m, call.groups()];
    let strides = [
        a.offset as isize,
        a.strides[0],
        a.strides[1],
        b.offset as isize,
        b.strides[last - 1],
        b.strides[last],
        ends.offset as isize,
        ends.strides[0],
        call.first as isize,
        ends.shape.numel() as isize,
        if last == 2 { b.strides[0] } else { 0 },
    ];
    numbers.extend(strides.iter().map(|&s| wrap(s as i64, address)));
    numbers
}

impl CubeBackend {
    pub(crate) fn run_grouped(&self, call: &GroupedCall) -> Result<Buffer> {
        match call.a.dtype.kind() {
            Kind::F32 => self.grouped_as::<u32, f32>(call),
            Kind::F64 => self.grouped_as::<f64, f64>(call),
            _ => Err(Error::DType {
                op: call.op,
                dtype: call.a.dtype,
                expected: "floats",
            }),
        }
    }

    /// The product computed in `T`, from and to words `W`.
    fn grouped_as<W: Numeric, T: Numeric>(&self, call: &GroupedCall) -> Result<Buffer> {
        let ([n, k, m], groups) = (call.sizes(), call.groups());
        let (buffers, [_, right]) = distinct([&call.a, &call.b])?;
        let wide = call.a.dtype.size() == 8;
        let (outputs, square) = match call.mode {
            GroupedOp::Rows => (n * m, Square::fitting(n / groups.max(1), m, groups, wide)),
            GroupedOp::Sums { .. } => (groups * k * m, Square::fitting(k, m, groups, wide)),
        };
        if self.cores == Some(Cores::Wgmma)
            && let Some(how) = hopper::how(call)
        {
            return self.grouped_on_hopper(call, how);
        }
        let whole = m.is_multiple_of(4);
        let held = call.a.dtype.kind().dtype();
        let stored = if whole { call.dtype } else { held };
        let out = self.alloc(stored, outputs)?;
        let (a, b) = (&call.a.layout, &call.b.layout);
        let all = call.ends.layout.shape.numel();
        let last = b.shape.rank() - 1;
        // Threads that bring a panel walk along the summed dimension where memory does.
        let along = |depth: isize, rows: isize| depth.abs() == 1 || (depth != 0 && rows.abs() != 1);
        let left = match call.mode {
            GroupedOp::Rows => along(a.strides[1], a.strides[0]),
            GroupedOp::Sums { .. } => along(a.strides[0], a.strides[1]),
        };
        let along = (left, along(b.strides[last - 1], b.strides[last]));
        let how = How {
            dtype: call.a.dtype,
            stored,
            whole,
            right,
            square,
            along,
        };
        let squares = match call.mode {
            GroupedOp::Rows => (n / square.side() + all + 1) * m.div_ceil(square.side()),
            GroupedOp::Sums { .. } => square.count(k, m) * groups,
        };
        let address = address(&buffers, call.a.dtype, &[outputs, squares + CUBE as usize]);
        let numbers = numbers(call, address);
        let handles: Vec<_> = (buffers.iter())
            .map(|m| (m.handle.clone(), m.bytes))
            .collect();
        let (inputs, result) = (
            bind(&handles, size_of::<W>()),
            crate::arg(&out, size_of::<W>()),
        );
        let ends = crate::arg(crate::memory(&call.ends)?, 4);
        let (client, dim, numbers) = (
            &self.client,
            CubeDim::new_1d(CUBE),
            numbers.into_iter().collect(),
        );
        let count = crate::cubes(squares, 1);
        // SAFETY: reads are clamped into the operands, ends into the rows, and writes guarded by the
        // output's sizes.
        unsafe {
            match call.mode {
                GroupedOp::Rows => rows::launch_unchecked::<W, T>(
                    client, count, dim, address, inputs, ends, result, numbers, how,
                ),
                GroupedOp::Sums { .. } => sums::launch_unchecked::<W, T>(
                    client, count, dim, address, inputs, ends, result, numbers, how,
                ),
            }
        }
        self.convert(out, stored, call.dtype, outputs)
    }

    /// The product of operands that the kernel for Hopper takes.
    fn grouped_on_hopper(&self, call: &GroupedCall, how: hopper::How) -> Result<Buffer> {
        let [n, k, m] = call.sizes();
        let (buffers, [_, right]) = distinct([&call.a, &call.b])?;
        let across = m.div_ceil(hopper::COLUMNS);
        let (outputs, tiles) = match call.mode {
            GroupedOp::Rows => (n * m, n / how.rows() + call.ends.layout.shape.numel() + 1),
            GroupedOp::Sums { groups } => (groups * k * m, k.div_ceil(how.rows()) * groups),
        };
        let out = self.alloc(call.dtype, outputs)?;
        let address = address(&buffers, call.a.dtype, &[outputs, tiles * across]);
        let mut numbers = numbers(call, address);
        numbers.extend([tiles, tiles * across]);
        let handles: Vec<_> = (buffers.iter())
            .map(|m| (m.handle.clone(), m.bytes))
            .collect();
        let hardware = &self.client.properties().hardware;
        let processors = hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
        // SAFETY: what is read lies inside of the operands, whose sizes and strides are multiples of
        // a chunk; ends are clamped into the rows, and writes guarded by the output's sizes.
        unsafe {
            hopper::hopper::launch_unchecked(
                &self.client,
                crate::cubes((tiles * across).min(processors), 1),
                CubeDim::new_1d(how.threads() as u32),
                address,
                bind(&handles, 4),
                crate::arg(crate::memory(&call.ends)?, 4),
                crate::arg(&out, 4),
                numbers.into_iter().collect(),
                how,
                right,
            );
        }
        Ok(out.buffer())
    }
}
