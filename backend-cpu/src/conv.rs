//! Convolutions. Both directions walk the same pairs: position `j` on the small side (the output,
//! or the input of a transposed convolution) meets `j * stride + tap * dilation - padding` on the
//! large side.

use crate::{
    grid::dense,
    matmul::{Matrix, gemm},
    memory::{stored, vector},
    parallel,
    scalar::{Float, Int},
};
use anymesh_kernel::{Buffer, Error, Kind, Result, backend::ConvCall};
use gemm::Parallelism;
use std::ops::Range;

/// Elements of unfolded input that are held at a time.
const UNFOLDED: usize = 1 << 20;

/// The geometry of a call.
struct Space<'a> {
    call: &'a ConvCall,
    batch: usize,
    /// Channels per group, in and out.
    channels: [usize; 2],
    taps: [usize; 3],
    small: [usize; 3],
    large: [usize; 3],
}

impl<'a> Space<'a> {
    fn new(call: &'a ConvCall) -> Self {
        let (input, weight) = (
            call.input.layout.shape.dims(),
            call.weight.layout.shape.dims(),
        );
        let inside = [input[2], input[3], input[4]];
        let (small, large) = if call.transposed {
            (inside, call.out)
        } else {
            (call.out, inside)
        };
        let channels = [input[1] / call.groups, call.channels / call.groups];
        Self {
            call,
            batch: input[0],
            channels,
            taps: [weight[2], weight[3], weight[4]],
            small,
            large,
        }
    }

    fn tap_count(&self) -> usize {
        self.taps.iter().product()
    }

    fn inside(&self) -> usize {
        if self.call.transposed {
            self.small.iter().product()
        } else {
            self.large.iter().product()
        }
    }

    fn outside(&self) -> usize {
        self.call.out.iter().product()
    }

    /// Where one weight lies: `o` and `c` count inside the group.
    fn weight(&self, group: usize, o: usize, c: usize, tap: usize) -> usize {
        let [cs, os] = self.channels;
        let pair = if self.call.transposed {
            (group * cs + c) * os + o
        } else {
            (group * os + o) * cs + c
        };
        pair * self.tap_count() + tap
    }

    /// Positions on the small side, along `axis`, whose partner under tap `k` is inside the large
    /// side.
    fn valid(&self, axis: usize, k: usize) -> Range<usize> {
        let (stride, shift) = (self.call.stride[axis], k * self.call.dilation[axis]);
        let low = self.call.padding[axis]
            .saturating_sub(shift)
            .div_ceil(stride);
        let high = (self.large[axis] + self.call.padding[axis])
            .saturating_sub(shift)
            .div_ceil(stride)
            .min(self.small[axis]);
        low..high.max(low)
    }

    fn partner(&self, axis: usize, j: usize, k: usize) -> usize {
        j * self.call.stride[axis] + k * self.call.dilation[axis] - self.call.padding[axis]
    }

    /// Calls `f(small, large, len)` for runs of pairs under one tap, for small positions in
    /// `range`. The large side steps by the last stride.
    fn pairs(&self, tap: usize, range: Range<usize>, mut f: impl FnMut(usize, usize, usize)) {
        let k = [
            tap / (self.taps[1] * self.taps[2]),
            tap / self.taps[2] % self.taps[1],
            tap % self.taps[2],
        ];
        let [depth, height, width] = [0, 1, 2].map(|axis| self.valid(axis, k[axis]));
        let (_, h, w) = (self.small[0], self.small[1], self.small[2]);
        for row in range.start / w..range.end.div_ceil(w) {
            let (i, j) = (row / h, row % h);
            if !depth.contains(&i) || !height.contains(&j) {
                continue;
            }
            let start = width.start.max(range.start.saturating_sub(row * w));
            let end = width.end.min(range.end - row * w);
            if start < end {
                let large = (self.partner(0, i, k[0]) * self.large[1] + self.partner(1, j, k[1]))
                    * self.large[2]
                    + self.partner(2, start, k[2]);
                f(row * w + start, large, end - start);
            }
        }
    }
}

/// The backend's convolution kernel.
pub(crate) fn conv(call: &ConvCall) -> Result<Buffer> {
    match call.input.dtype.kind() {
        Kind::F32 => float::<f32>(call),
        Kind::F64 => float::<f64>(call),
        Kind::I32 => direct(
            &Space::new(call),
            |acc, w, x| Int::add(acc, Int::mul(w, x)),
            i32::default(),
        ),
        Kind::I64 => direct(
            &Space::new(call),
            |acc, w, x| Int::add(acc, Int::mul(w, x)),
            i64::default(),
        ),
        Kind::U32 => direct(
            &Space::new(call),
            |acc, w, x| Int::add(acc, Int::mul(w, x)),
            u32::default(),
        ),
        Kind::Bool => Err(Error::DType {
            op: "conv",
            dtype: call.input.dtype,
            expected: "a number",
        }),
    }
}

fn float<T: Float>(call: &ConvCall) -> Result<Buffer> {
    let space = Space::new(call);
    // With a channel or two per group the unfolded input would be used once: not worth making.
    if space.channels[1] <= 2 && !call.transposed || space.channels[0] <= 2 && call.transposed {
        return direct(&space, |acc, w, x| acc + w * x, T::default());
    }
    if call.transposed {
        transposed::<T>(&space)
    } else {
        forward::<T>(&space)
    }
}

/// One output plane at a time, one weight at a time.
fn direct<T: crate::element::Held>(
    space: &Space<'_>,
    step: impl Fn(T, T, T) -> T + Sync,
    zero: T,
) -> Result<Buffer> {
    let call = space.call;
    let (input, weight) = (dense::<T>(&call.input)?, dense::<T>(&call.weight)?);
    let ([cs, os], inside, outside, stride) = (
        space.channels,
        space.inside(),
        space.outside(),
        call.stride[2],
    );
    let small = 0..space.small.iter().product();
    let plane = |i: usize, out: &mut [T]| {
        let (n, channel) = (i / call.channels, i % call.channels);
        let (group, o) = (channel / os, channel % os);
        for c in 0..cs {
            let image = &input[((n * call.groups + group) * cs + c) * inside..][..inside];
            for tap in 0..space.tap_count() {
                let w = weight[space.weight(group, o, c, tap)];
                space.pairs(tap, small.clone(), |small, large, len| {
                    let (out, image, out_step, in_step) = if call.transposed {
                        (&mut out[large..], &image[small..], stride, 1)
                    } else {
                        (&mut out[small..], &image[large..], 1, stride)
                    };
                    if out_step == 1 && in_step == 1 {
                        out[..len]
                            .iter_mut()
                            .zip(&image[..len])
                            .for_each(|(out, x)| *out = step(*out, w, *x));
                    } else {
                        out.iter_mut()
                            .step_by(out_step)
                            .zip(image.iter().step_by(in_step))
                            .take(len)
                            .for_each(|(out, x)| *out = step(*out, w, *x));
                    }
                });
            }
        }
    };
    let len = space.batch * call.channels * outside;
    let out = stored(call.input.dtype, len, |out: &mut [T]| {
        out.fill(zero);
        let work = len * cs * space.tap_count();
        parallel::each(work, out.chunks_mut(outside), plane);
    })?;
    Ok(out.buffer())
}

/// Runs `work` for every group of every image: in parallel where there are enough of them, else
/// with parallel products.
fn groups<T: Float>(
    space: &Space<'_>,
    work: impl Fn(usize, &mut [T], Parallelism) -> Result<()> + Sync,
) -> Result<Buffer> {
    let len = space.batch * space.call.channels * space.outside();
    let mut result = Ok(());
    let out = stored(space.call.input.dtype, len, |out: &mut [T]| {
        let size = space.channels[1] * space.outside();
        result = if space.batch * space.call.groups >= rayon::current_num_threads() {
            parallel::try_each(usize::MAX, out.chunks_mut(size), |i, out| {
                work(i, out, Parallelism::None)
            })
        } else {
            out.chunks_mut(size)
                .enumerate()
                .try_for_each(|(i, out)| work(i, out, Parallelism::Rayon(0)))
        };
    })?;
    result?;
    Ok(out.buffer())
}

/// Positions of the small side that are unfolded at a time.
fn chunk(rows: usize, positions: usize) -> usize {
    (UNFOLDED / rows).clamp(1, positions)
}

/// Unfolds the input: one row for each channel and tap, one column for each output; then one
/// product with the weights.
fn forward<T: Float>(space: &Space<'_>) -> Result<Buffer> {
    let call = space.call;
    let (input, weight) = (dense::<T>(&call.input)?, dense::<T>(&call.weight)?);
    let ([cs, os], inside, outside, taps) = (
        space.channels,
        space.inside(),
        space.outside(),
        space.tap_count(),
    );
    let rows = cs * taps;
    let is_product =
        taps == 1 && call.stride == [1; 3] && call.padding == [0; 3] && inside == outside;
    groups::<T>(space, |i, out, threads| {
        let image = &input[i * cs * inside..][..cs * inside];
        let weights = Matrix::dense(&weight[i % call.groups * os * rows..][..os * rows], rows);
        if is_product {
            gemm(
                (out, outside),
                [os, outside, rows],
                weights,
                Matrix::dense(image, inside),
                false,
                threads,
            )?;
            return Ok(());
        }
        let columns = chunk(rows, outside);
        let mut unfolded = vector::<T>(rows * columns)?;
        for start in (0..outside).step_by(columns) {
            let count = columns.min(outside - start);
            let unfold = |row: usize, to: &mut [T]| {
                to.fill(T::default());
                let image = &image[row / taps * inside..][..inside];
                space.pairs(row % taps, start..start + count, |small, large, len| {
                    let to = &mut to[small - start..small - start + len];
                    match call.stride[2] {
                        1 => to.copy_from_slice(&image[large..large + len]),
                        step => to
                            .iter_mut()
                            .zip(image[large..].iter().step_by(step))
                            .for_each(|(to, x)| *to = *x),
                    }
                });
            };
            match threads {
                Parallelism::None => unfolded[..rows * count]
                    .chunks_mut(count)
                    .enumerate()
                    .for_each(|(row, to)| unfold(row, to)),
                Parallelism::Rayon(_) => {
                    let lines = unfolded[..rows * count].chunks_mut(count);
                    parallel::each(rows * count, lines, unfold);
                }
            }
            gemm(
                (&mut out[start..], outside),
                [os, count, rows],
                weights,
                Matrix::dense(&unfolded, count),
                false,
                threads,
            )?;
        }
        Ok(())
    })
}

/// One product of weights and input gives what every input position adds under every tap; then
/// folding adds it up.
fn transposed<T: Float>(space: &Space<'_>) -> Result<Buffer> {
    let call = space.call;
    let (input, weight) = (dense::<T>(&call.input)?, dense::<T>(&call.weight)?);
    let ([cs, os], inside, outside, taps) = (
        space.channels,
        space.inside(),
        space.outside(),
        space.tap_count(),
    );
    let rows = os * taps;
    groups::<T>(space, |i, out, threads| {
        let image = &input[i * cs * inside..][..cs * inside];
        let weights = Matrix::dense(&weight[i % call.groups * cs * rows..][..cs * rows], rows).t();
        let columns = chunk(rows, inside);
        let mut unfolded = vector::<T>(rows * columns)?;
        out.fill(T::default());
        for start in (0..inside).step_by(columns) {
            let count = columns.min(inside - start);
            let image = Matrix {
                start,
                ..Matrix::dense(image, inside)
            };
            gemm(
                (&mut unfolded[..rows * count], count),
                [rows, count, cs],
                weights,
                image,
                false,
                threads,
            )?;
            for (row, from) in unfolded[..rows * count].chunks(count).enumerate() {
                let out = &mut out[row / taps * outside..][..outside];
                space.pairs(row % taps, start..start + count, |small, large, len| {
                    let from = &from[small - start..small - start + len];
                    out[large..]
                        .iter_mut()
                        .step_by(call.stride[2])
                        .zip(from)
                        .for_each(|(out, x)| *out = *out + *x);
                });
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, coordinates, read, values, views};
    use anymesh_kernel::DType;

    /// Straight from the definition.
    fn naive(call: &ConvCall) -> Vec<f64> {
        let (x, w) = (values(&call.input), values(&call.weight));
        let (xs, ws) = (
            call.input.layout.shape.dims(),
            call.weight.layout.shape.dims(),
        );
        let at = |shape: &[usize], c: [usize; 5]| {
            (((c[0] * shape[1] + c[1]) * shape[2] + c[2]) * shape[3] + c[3]) * shape[4] + c[4]
        };
        let (cs, os) = (xs[1] / call.groups, call.channels / call.groups);
        let out_shape = [xs[0], call.channels, call.out[0], call.out[1], call.out[2]];
        let mut out = vec![0.0; out_shape.iter().product()];
        let small = if call.transposed {
            [xs[2], xs[3], xs[4]]
        } else {
            call.out
        };
        let large = if call.transposed {
            call.out
        } else {
            [xs[2], xs[3], xs[4]]
        };
        let positions = coordinates(&small);
        for n in 0..xs[0] {
            for channel in 0..call.channels {
                let group = channel / os;
                for c in 0..cs {
                    for k in coordinates(&ws[2..]) {
                        for j in &positions {
                            let partner = [0, 1, 2].map(|a| {
                                (j[a] * call.stride[a] + k[a] * call.dilation[a])
                                    .checked_sub(call.padding[a])
                            });
                            let [Some(d), Some(h), Some(v)] = partner else {
                                continue;
                            };
                            if d >= large[0] || h >= large[1] || v >= large[2] {
                                continue;
                            }
                            let ((i, o), weight) = if call.transposed {
                                (
                                    ([j[0], j[1], j[2]], [d, h, v]),
                                    [group * cs + c, channel % os, k[0], k[1], k[2]],
                                )
                            } else {
                                (
                                    ([d, h, v], [j[0], j[1], j[2]]),
                                    [channel, c, k[0], k[1], k[2]],
                                )
                            };
                            out[at(&out_shape, [n, channel, o[0], o[1], o[2]])] += x
                                [at(xs, [n, group * cs + c, i[0], i[1], i[2]])]
                                * w[at(ws, weight)];
                        }
                    }
                }
            }
        }
        out
    }

    #[test]
    fn convolutions_of_all_kinds_equal_the_definition() {
        // Spatial size, kernel, stride, padding, dilation, groups, channels in and out.
        let cases: [([[usize; 3]; 5], usize, [usize; 2]); 8] = [
            (
                [[1, 1, 9], [1, 1, 3], [1, 1, 1], [0, 0, 1], [1, 1, 1]],
                1,
                [2, 3],
            ),
            (
                [[1, 5, 6], [1, 3, 2], [1, 2, 1], [0, 1, 0], [1, 1, 2]],
                1,
                [3, 4],
            ),
            (
                [[1, 6, 6], [1, 3, 3], [1, 2, 3], [0, 2, 1], [1, 2, 1]],
                2,
                [4, 8],
            ),
            (
                [[4, 3, 5], [2, 2, 3], [1, 1, 2], [1, 0, 1], [2, 1, 1]],
                1,
                [2, 5],
            ),
            (
                [[1, 5, 5], [1, 3, 3], [1, 1, 1], [0, 1, 1], [1, 1, 1]],
                4,
                [4, 4],
            ),
            (
                [[1, 4, 4], [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]],
                1,
                [5, 6],
            ),
            (
                [[1, 4, 7], [1, 4, 4], [1, 3, 3], [0, 3, 3], [1, 1, 1]],
                1,
                [3, 3],
            ),
            (
                [[1, 1, 2000], [1, 1, 5], [1, 1, 2], [0, 0, 2], [1, 1, 1]],
                1,
                [200, 3],
            ),
        ];
        for ([size, taps, stride, padding, dilation], groups, [c, o]) in cases {
            for transposed in [false, true] {
                let span = [0, 1, 2].map(|a| (taps[a] - 1) * dilation[a] + 1);
                let out = if transposed {
                    // One more than the least size: as with an output padding.
                    [0, 1, 2].map(|a| {
                        ((size[a] - 1) * stride[a] + span[a] + usize::from(stride[a] > 1))
                            .saturating_sub(2 * padding[a])
                            .max(1)
                    })
                } else {
                    [0, 1, 2].map(|a| (size[a] + 2 * padding[a] - span[a]) / stride[a] + 1)
                };
                let weights = if transposed {
                    [c, o / groups]
                } else {
                    [o, c / groups]
                };
                let big = size[2] > 1000;
                let dtypes = [
                    DType::F32,
                    DType::F64,
                    DType::BF16,
                    DType::I32,
                    DType::I64,
                    DType::U8,
                ];
                for dtype in dtypes.into_iter().take(if big { 1 } else { 6 }) {
                    let inputs = views(&[2, c, size[0], size[1], size[2]], dtype, 71, true);
                    let kernels = views(
                        &[weights[0], weights[1], taps[0], taps[1], taps[2]],
                        dtype,
                        72,
                        true,
                    );
                    for (input, weight) in inputs.iter().zip(&kernels).take(if big { 1 } else { 9 })
                    {
                        let call = ConvCall {
                            op: "test",
                            input: input.clone(),
                            weight: weight.clone(),
                            channels: o,
                            out,
                            stride,
                            padding,
                            dilation,
                            groups,
                            transposed,
                        };
                        let wrap = |v: &f64| {
                            if dtype == DType::U8 {
                                f64::from(*v as i64 as u8)
                            } else {
                                *v
                            }
                        };
                        let expected: Vec<f64> = naive(&call).iter().map(wrap).collect();
                        let tolerance = if dtype == DType::BF16 { 4e-3 } else { 0.0 };
                        assert_close(
                            &read(&conv(&call).expect("runs"), dtype),
                            &expected,
                            tolerance,
                            &format!("{dtype} {call:?}"),
                        );
                    }
                }
            }
        }
    }
}
