//! Convolutions over up to three spatial dimensions.
//!
//! Seen as a product: output channels by output positions, summed over channels and window.
//! `windows` computes squares of it as matmul does, gathering the right operand from the input as
//! it goes; `direct` gives each output element a thread, for groups of few channels. Windows of one
//! element are plain matrix products. A transposed convolution reads the same way: an output
//! gathers from those inputs whose windows cover it.

use crate::{
    CubeBackend,
    map::CUBE,
    program::wrap,
    tile::{Matrix, Square, V4, address, duty, element, fetch, multiply, put, put_row, splits},
};
use anymesh_kernel::{Buffer, DType, Error, Kind, Layout, Result, Shape, View, backend::ConvCall};
use cubecl::prelude::*;

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    /// The operands' dtype.
    dtype: DType,
    /// What is stored: a dtype of 32 or 64 bits, or any where rows are whole.
    stored: DType,
    /// Whether four neighbouring positions are always of one image.
    whole: bool,
    transposed: bool,
    /// The first spatial dimension that is more than a formality.
    first: usize,
    square: Square,
}

// Places among the numbers of a launch; dimension `d` has its own from `DIMS + 7 * d` on.
const ROWS: usize = 0;
const COLUMNS: usize = 1;
const DEPTH: usize = 2;
const STEPS: usize = 3;
const GROUPS: usize = 4;
const SPLITS: usize = 5;
/// Positions of an output image.
const POSITIONS: usize = 6;
/// Input channels of a group.
const CHANNELS: usize = 7;
const START: usize = 8;
const IMAGE_STRIDE: usize = 9;
const CHANNEL_STRIDE: usize = 10;
const DIMS: usize = 11;
const OUT: usize = 0;
const IN: usize = 1;
const WINDOW: usize = 2;
const IN_STRIDE: usize = 3;
const STRIDE: usize = 4;
const PADDING: usize = 5;
const DILATION: usize = 6;

#[cube]
fn number(numbers: &Sequence<usize>, #[comptime] d: usize, #[comptime] what: usize) -> usize {
    *numbers.index(comptime!(DIMS + 7 * d + what))
}

/// Where along dimension `d` an output reads for a tap of the window, and whether that is inside
/// the input.
#[cube]
fn source(
    out: usize,
    tap: usize,
    numbers: &Sequence<usize>,
    #[comptime] d: usize,
    #[comptime] transposed: bool,
) -> (usize, bool) {
    let (extent, stride) = (number(numbers, d, IN), number(numbers, d, STRIDE));
    let (padding, reach) = (
        number(numbers, d, PADDING),
        tap * number(numbers, d, DILATION),
    );
    if comptime!(transposed) {
        let at = (out + padding - reach) / stride;
        (
            at,
            reach <= out + padding && at < extent && at * stride + reach == out + padding,
        )
    } else {
        // Below zero this wraps to something large.
        let at = out * stride + reach - padding;
        (at, at < extent)
    }
}

/// Four neighbouring output positions: image and coordinates of each.
#[cube]
fn places(column: usize, numbers: &Sequence<usize>, #[comptime] first: usize) -> Array<usize> {
    let mut out = Array::<usize>::new(16usize);
    #[unroll]
    for l in 0..4usize {
        let mut rest = min(column + l, *numbers.index(COLUMNS) - 1usize);
        #[unroll]
        for k in 0..comptime!(3 - first) {
            let d = comptime!(2 - k);
            out[comptime!(4 * l + 1 + d)] = rest % number(numbers, d, OUT);
            rest /= number(numbers, d, OUT);
        }
        out[comptime!(4 * l)] = rest;
    }
    out
}

/// The input elements of one step (a channel and a tap) for four positions; zero outside.
#[cube]
fn gather<W: Numeric, T: Numeric>(
    input: &[W],
    places: &Array<usize>,
    start: usize,
    step: usize,
    end: usize,
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) -> V4<T> {
    let mut taps = Array::<usize>::new(3usize);
    let mut rest = step;
    #[unroll]
    for k in 0..comptime!(3 - how.first) {
        let d = comptime!(2 - k);
        taps[d] = rest % number(numbers, d, WINDOW);
        rest /= number(numbers, d, WINDOW);
    }
    let channel = start + rest * *numbers.index(CHANNEL_STRIDE);
    let mut out = V4::<T>::empty();
    #[unroll]
    for l in 0..4usize {
        let mut at = channel + places[comptime!(4 * l)] * *numbers.index(IMAGE_STRIDE);
        let mut inside = step < end;
        #[unroll]
        for d in how.first..3usize {
            let (place, found) = source(
                places[comptime!(4 * l + 1 + d)],
                taps[d],
                numbers,
                d,
                how.transposed,
            );
            at += place * number(numbers, d, IN_STRIDE);
            inside = inside && found;
        }
        let value = element::<W, T>(input, select(inside, at, start), how.dtype);
        out.insert(l, select(inside, value, T::from_int(0)));
    }
    out
}

/// A cube computes a square of the product: rows are a group's output channels, columns are
/// positions in all images.
#[cube(launch_unchecked, address_type = "dynamic")]
fn windows<W: Numeric, T: Numeric>(
    input: &[W],
    weight: &[W],
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
    let (rows, columns, groups) = (
        *numbers.index(ROWS),
        *numbers.index(COLUMNS),
        *numbers.index(GROUPS),
    );
    let (down, across) = (
        (rows + comptime!(side - 1)) / side,
        (columns + comptime!(side - 1)) / side,
    );
    let (square, rest) = (CUBE_POS % (down * across), CUBE_POS / (down * across));
    // Surplus cubes of the grid repeat an earlier one.
    let (group, split) = (rest % groups, rest / groups % *numbers.index(SPLITS));
    let (row, column) = (square / across * side, square % across * side);

    let unit = UNIT_POS as usize;
    let (a_step, a_four) = duty(unit, comptime!(side / 4), depth, true);
    let (b_step, b_four) = duty(unit, comptime!(side / 4), depth, false);
    let begin = split * *numbers.index(STEPS);
    let end = min(begin + *numbers.index(STEPS), *numbers.index(DEPTH));
    let a = Matrix {
        start: group * rows * *numbers.index(DEPTH),
        rows,
        row_stride: *numbers.index(DEPTH),
        depth: end,
        depth_stride: 1usize.runtime(),
    };
    let places = places(column + b_four * 4usize, numbers, how.first);
    let start =
        *numbers.index(START) + group * *numbers.index(CHANNELS) * *numbers.index(CHANNEL_STRIDE);
    let mut next_a = fetch::<W, T>(weight, &a, row + a_four * 4usize, begin + a_step, how.dtype);
    let mut next_b = gather::<W, T>(input, &places, start, begin + b_step, end, numbers, how);
    let (x, y) = (unit % 16usize, unit / 16usize);
    let mut sums = Array::<V4<T>>::new(comptime!(how.square.share()));
    #[unroll]
    for i in 0..comptime!(how.square.share()) {
        sums[i] = V4::new(T::from_int(0));
    }
    let mut step = begin;
    while step < end {
        left[a_step * pitch + a_four] = next_a;
        right[b_step * pitch + b_four] = next_b;
        sync_cube();
        step += depth;
        next_a = fetch::<W, T>(weight, &a, row + a_four * 4usize, step + a_step, how.dtype);
        next_b = gather::<W, T>(input, &places, start, step + b_step, end, numbers, how);
        multiply(&left, &right, &mut sums, x, y, how.square);
        sync_cube();
    }
    let positions = *numbers.index(POSITIONS);
    #[unroll]
    for j in 0..fours {
        let c = column + x * 4usize + comptime!(j * 64);
        #[unroll]
        for i in 0..comptime!(4 * fours) {
            let r = row + y * 4usize + comptime!(i / 4 * 64 + i % 4);
            let sum = sums[comptime!(i * fours + j)];
            let channel = group * rows + r;
            let base = (split * columns * groups * rows) + channel * positions;
            if r < rows {
                if comptime!(how.whole) {
                    let at = base + c / positions * groups * rows * positions + c % positions;
                    put_row::<W, T>(out, at, max(columns, c) - c, sum, how.stored, true);
                } else {
                    #[unroll]
                    for l in 0..4usize {
                        let c = c + l;
                        if c < columns {
                            put::<W, T>(
                                out,
                                base + c / positions * groups * rows * positions + c % positions,
                                sum.extract(l),
                                how.stored,
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A thread computes one element of the output.
#[cube(launch_unchecked, address_type = "dynamic")]
fn direct<W: Numeric, T: Numeric>(
    input: &[W],
    weight: &[W],
    out: &mut [W],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
) {
    let (rows, groups, positions) = (
        *numbers.index(ROWS),
        *numbers.index(GROUPS),
        *numbers.index(POSITIONS),
    );
    let at = ABSOLUTE_POS;
    if at < rows * groups * *numbers.index(COLUMNS) {
        let (w, h, d) = (
            at % number(numbers, 2usize, OUT),
            at / number(numbers, 2usize, OUT) % number(numbers, 1usize, OUT),
            at % positions / number(numbers, 2usize, OUT) / number(numbers, 1usize, OUT),
        );
        let (channel, image) = (
            at / positions % (rows * groups),
            at / positions / (rows * groups),
        );
        let channels = *numbers.index(CHANNELS);
        let mut tap = channel * *numbers.index(DEPTH);
        let first = *numbers.index(START)
            + image * *numbers.index(IMAGE_STRIDE)
            + channel / rows * channels * *numbers.index(CHANNEL_STRIDE);
        let mut sum = T::from_int(0);
        let mut c = 0usize;
        while c < channels {
            let plane = first + c * *numbers.index(CHANNEL_STRIDE);
            let mut i = 0usize;
            while i < number(numbers, 0usize, WINDOW) {
                let (x, x_inside) = source(d, i, numbers, 0usize, how.transposed);
                let mut j = 0usize;
                while j < number(numbers, 1usize, WINDOW) {
                    let (y, y_inside) = source(h, j, numbers, 1usize, how.transposed);
                    if x_inside && y_inside {
                        let line = plane
                            + x * number(numbers, 0usize, IN_STRIDE)
                            + y * number(numbers, 1usize, IN_STRIDE);
                        let mut k = 0usize;
                        while k < number(numbers, 2usize, WINDOW) {
                            let (z, z_inside) = source(w, k, numbers, 2usize, how.transposed);
                            if z_inside {
                                let value = element::<W, T>(
                                    input,
                                    line + z * number(numbers, 2usize, IN_STRIDE),
                                    how.dtype,
                                );
                                sum += value * element::<W, T>(weight, tap + k, how.dtype);
                            }
                            k += 1usize;
                        }
                    }
                    tap += number(numbers, 2usize, WINDOW);
                    j += 1usize;
                }
                i += 1usize;
            }
            c += 1usize;
        }
        put::<W, T>(out, at, sum, how.stored);
    }
}

impl CubeBackend {
    pub(crate) fn run_conv(&self, call: &ConvCall) -> Result<Buffer> {
        if let Some(product) = call.as_product() {
            return self.run_matmul(&product);
        }
        match call.input.dtype.kind() {
            Kind::F32 => self.conv_as::<u32, f32>(call),
            Kind::I32 => self.conv_as::<u32, i32>(call),
            Kind::U32 => self.conv_as::<u32, u32>(call),
            Kind::F64 => self.conv_as::<f64, f64>(call),
            Kind::I64 => self.conv_as::<i64, i64>(call),
            Kind::Bool => Err(Error::DType {
                op: "conv",
                dtype: call.input.dtype,
                expected: "a number",
            }),
        }
    }

    /// The convolution computed in `T`, from and to words `W`.
    fn conv_as<W: Numeric, T: Numeric>(&self, call: &ConvCall) -> Result<Buffer> {
        let dtype = call.input.dtype;
        let (input, window) = (&call.input.layout, &call.weight.layout.shape.dims()[2..]);
        let (rows, channels) = (call.channels / call.groups, input.shape[1] / call.groups);
        let weight = self.window_rows(call, rows, channels)?;
        let positions: usize = call.out.iter().product();
        let (columns, depth) = (
            input.shape[0] * positions,
            channels * window.iter().product::<usize>(),
        );
        let outputs = call.channels * columns;

        let held = dtype.kind().dtype();
        let square = Square::fitting(rows, columns, call.groups, dtype.size() == 8);
        let by_element = rows < 16 && depth * rows < 16 * 1024;
        let parts = if by_element {
            1
        } else {
            splits(square.count(rows, columns) * call.groups, depth, 256)
        };
        let steps = depth.div_ceil(parts).next_multiple_of(16);
        let parts = depth.div_ceil(steps);
        let whole = positions.is_multiple_of(4) && !by_element;
        let formal = |d: usize| {
            call.out[d] == 1 && input.shape[2 + d] == 1 && window[d] == 1 && call.padding[d] == 0
        };
        let first = (0..3).take_while(|&d| formal(d)).count();
        let how = How {
            dtype,
            stored: if parts == 1 && whole { dtype } else { held },
            whole,
            transposed: call.transposed,
            first,
            square,
        };

        let (source, out) = (
            crate::memory(&call.input)?,
            self.alloc(how.stored, outputs * parts)?,
        );
        let address = address(
            &[source, crate::memory(&weight)?],
            dtype,
            &[outputs * parts + CUBE as usize],
        );
        let wrapped = |stride: isize| wrap(stride as i64, address);
        let mut numbers = vec![
            rows,
            columns,
            depth,
            steps,
            call.groups,
            parts,
            positions,
            channels,
        ];
        numbers.extend([
            input.offset,
            wrapped(input.strides[0]),
            wrapped(input.strides[1]),
        ]);
        for (d, taps) in window.iter().enumerate() {
            let (extent, stride) = (input.shape[2 + d], wrapped(input.strides[2 + d]));
            numbers.extend([
                call.out[d],
                extent,
                *taps,
                stride,
                call.stride[d],
                call.padding[d],
                call.dilation[d],
            ]);
        }
        let numbers = numbers.into_iter().collect();
        let (client, dim, word) = (&self.client, CubeDim::new_1d(CUBE), size_of::<W>());
        let (x, w, y) = (
            crate::arg(source, word),
            crate::arg(crate::memory(&weight)?, word),
            crate::arg(&out, word),
        );
        // SAFETY: reads are guarded by the window test or clamped into the operands, writes by the
        // output's sizes.
        unsafe {
            if by_element {
                direct::launch_unchecked::<W, T>(
                    client,
                    crate::cubes(outputs, CUBE),
                    dim,
                    address,
                    x,
                    w,
                    y,
                    numbers,
                    how,
                );
            } else {
                let count = crate::cubes(square.count(rows, columns) * call.groups * parts, 1);
                windows::launch_unchecked::<W, T>(
                    client, count, dim, address, x, w, y, numbers, how,
                );
            }
        }
        if parts > 1 {
            self.add_parts(out, how.stored, parts, outputs, dtype)
        } else {
            self.convert(out, how.stored, dtype, outputs)
        }
    }

    /// The weights dense as `[groups, output channels, input channels, window]`.
    fn window_rows(&self, call: &ConvCall, rows: usize, channels: usize) -> Result<View> {
        let dtype = call.input.dtype;
        let layout = &call.weight.layout;
        let view = if call.transposed {
            let split: Shape = [call.groups, channels, rows]
                .into_iter()
                .chain(layout.shape.dims()[2..].iter().copied())
                .collect();
            let strides = [layout.strides[0] * channels as isize]
                .into_iter()
                .chain(layout.strides.iter().copied())
                .collect();
            View {
                layout: Layout {
                    shape: split,
                    strides,
                    offset: layout.offset,
                }
                .permute(&[0, 2, 1, 3, 4, 5]),
                ..call.weight.clone()
            }
        } else {
            call.weight.clone()
        };
        let dense = self.dense(&view, dtype)?;
        // Shader languages refuse to bind one buffer twice.
        Ok(if dense.buffer.same(&call.input.buffer) {
            View {
                buffer: self.copy_as(&dense, dtype)?,
                ..dense
            }
        } else {
            dense
        })
    }
}
