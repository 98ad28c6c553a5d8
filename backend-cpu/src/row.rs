//! Softmax and norms over rows. Statistics and the whole row's arithmetic are in `f64`, rounded
//! once.

use crate::{
    element::is_held_as_stored,
    fold::{Exps, lanes},
    grid::dense,
    memory::{Memory, stored},
    parallel,
    scalar::{self, Float},
    simd::{dispatch, vectorized},
};
use anymesh_kernel::{
    Error, Kind, Result, View,
    backend::{Buffers, RowCall, RowOp},
};

/// Whether a row is computed here: a sum is not where it is rounded before it is normalised.
pub(crate) fn fits(call: &RowCall) -> bool {
    call.residual.is_none() || is_held_as_stored(call.input.dtype)
}

/// The backend's row kernel.
pub(crate) fn row(call: &RowCall) -> Result<Buffers> {
    match call.input.dtype.kind() {
        Kind::F32 => rows::<f32>(call),
        Kind::F64 => rows::<f64>(call),
        _ => Err(Error::DType {
            op: "row",
            dtype: call.input.dtype,
            expected: "a float",
        }),
    }
}

fn rows<T: Float>(call: &RowCall) -> Result<Buffers> {
    match &call.mode {
        RowOp::Softmax => each_row::<T>(call, |_, x, out| softmax(x, out)),
        RowOp::LogSoftmax => each_row::<T>(call, |_, x, out| log_softmax(x, out)),
        RowOp::Norm {
            rms,
            eps,
            weight,
            bias,
            groups,
            channels,
            inner,
        } => {
            let (rms, eps, groups, channels, inner) = (*rms, *eps, *groups, *channels, *inner);
            let weight = weight.as_ref().map(parameters).transpose()?;
            let bias = bias.as_ref().map(parameters).transpose()?;
            each_row::<T>(call, |r, x, out| {
                let (mean, scale) = moments(x, rms, eps);
                let first = r % groups * channels;
                if let (1, Some(w), Some(b)) = (inner, &weight, &bias) {
                    let (w, b) = (&w[first..first + channels], &b[first..first + channels]);
                    let columns = out.iter_mut().zip(x).zip(w.iter().zip(b));
                    return vectorized(|| {
                        columns.for_each(|((out, x), (w, b))| {
                            *out = T::narrow((x.wide() - mean) * (scale * w) + b)
                        })
                    });
                }
                if let (None, None) = (&weight, &bias) {
                    return vectorized(|| {
                        out.iter_mut()
                            .zip(x)
                            .for_each(|(out, x)| *out = T::narrow((x.wide() - mean) * scale))
                    });
                }
                for (j, (x, out)) in x.chunks(inner).zip(out.chunks_mut(inner)).enumerate() {
                    let factor = scale * weight.as_ref().map_or(1.0, |w| w[first + j]);
                    let shift = bias.as_ref().map_or(0.0, |b| b[first + j]);
                    out.iter_mut()
                        .zip(x)
                        .for_each(|(out, x)| *out = T::narrow((x.wide() - mean) * factor + shift));
                }
            })
        }
    }
}

/// Weights of any float type, in `f64`.
fn parameters(view: &View) -> Result<Vec<f64>> {
    Ok(match view.dtype.kind() {
        Kind::F64 => dense::<f64>(view)?.to_vec(),
        _ => dense::<f32>(view)?.iter().map(|v| f64::from(*v)).collect(),
    })
}

/// Calls `f` with the number, the values and the result of each row; values of a call with a residual
/// are the sums with it, which come first among the results.
fn each_row<T: Float>(call: &RowCall, f: impl Fn(usize, &[T], &mut [T]) + Sync) -> Result<Buffers> {
    let (n, dtype) = (call.input.layout.shape[1], call.input.dtype);
    let values = dense::<T>(&call.input)?;
    let residual = call.residual.as_ref().map(dense::<T>).transpose()?;
    let mut sums = Memory::elements::<T>(residual.as_ref().map_or(0, |r| r.len()))?;
    let out = stored(dtype, values.len(), |out: &mut [T]| {
        // Several rows per task, so that short ones are not all overhead.
        let group = (parallel::CHUNK / n).max(1);
        let sums = sums.typed_mut::<T>().chunks_mut(group * n);
        let sums = sums.chain(std::iter::repeat_with(Default::default));
        let tasks = out.chunks_mut(group * n).zip(sums);
        parallel::each(values.len(), tasks, |task, (out, sums)| {
            for (i, out) in out.chunks_mut(n).enumerate() {
                let r = task * group + i;
                let (own, x) = (r * n..(r + 1) * n, &values[r * n..(r + 1) * n]);
                let Some(residual) = &residual else {
                    f(r, x, out);
                    continue;
                };
                let (sums, pairs) = (&mut sums[i * n..(i + 1) * n], x.iter().zip(&residual[own]));
                vectorized(|| {
                    (sums.iter_mut().zip(pairs)).for_each(|(sum, (a, b))| *sum = *a + *b)
                });
                f(r, sums, out);
            }
        });
    })?;
    let sums = residual.map(|_| sums.buffer());
    Ok(sums.into_iter().chain([out.buffer()]).collect())
}

fn top<T: Float>(x: &[T]) -> f64 {
    lanes(x, T::LOWEST, scalar::max, scalar::max).wide()
}

/// `exp(x - top)`, and the sum of that.
fn exps_and_sum<T: Float>(x: &[T], top: f64) -> (Vec<f64>, f64) {
    let mut exps = vec![0.0; x.len()];
    dispatch(Exps(x, top, &mut exps));
    let sum = lanes(&exps, 0.0, |a, b| a + b, |a, b| a + b);
    (exps, sum)
}

fn softmax<T: Float>(x: &[T], out: &mut [T]) {
    let top = top(x);
    let (exps, sum) = exps_and_sum(x, top);
    vectorized(|| {
        out.iter_mut()
            .zip(&exps)
            .for_each(|(out, e)| *out = T::narrow(e / sum))
    });
}

fn log_softmax<T: Float>(x: &[T], out: &mut [T]) {
    let top = top(x);
    let log = exps_and_sum(x, top).1.ln();
    vectorized(|| {
        out.iter_mut()
            .zip(x)
            .for_each(|(out, x)| *out = T::narrow(x.wide() - top - log))
    });
}

/// What is subtracted, and what is multiplied with.
fn moments<T: Float>(x: &[T], rms: bool, eps: f64) -> (f64, f64) {
    let n = x.len() as f64;
    let mean = if rms {
        0.0
    } else {
        lanes(x, 0.0, |sum, x| sum + x.wide(), |a, b| a + b) / n
    };
    let square = |sum: f64, x: T| sum + (x.wide() - mean) * (x.wide() - mean);
    let variance = lanes(x, 0.0, square, |a, b| a + b) / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, dense_view, random, read, values};
    use anymesh_kernel::{Buffer, DType};

    fn tolerance(dtype: DType) -> f64 {
        match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-7,
            _ => 4e-3,
        }
    }

    fn fused(input: &View, mode: RowOp) -> Buffer {
        let call = RowCall {
            op: "test",
            input: input.clone(),
            residual: None,
            mode,
        };
        row(&call).expect("runs").remove(0)
    }

    #[test]
    fn a_sum_and_its_norm_are_those_of_two_launches() {
        for (dtype, rows, n) in [
            (DType::F32, 7, 300),
            (DType::F64, 3, 17),
            (DType::F32, 300, 500),
        ] {
            let of = |seed| dense_view(&random(rows * n, seed, false), dtype, [rows, n]);
            let (input, residual) = (of(95), of(96));
            let sums = values(&input).into_iter().zip(values(&residual));
            let sums: Vec<f64> = match dtype {
                DType::F32 => sums.map(|(a, b)| f64::from(a as f32 + b as f32)).collect(),
                _ => sums.map(|(a, b)| a + b).collect(),
            };
            let mode = RowOp::Norm {
                rms: false,
                eps: 1e-5,
                weight: Some(dense_view(&random(n, 97, false), dtype, [n])),
                bias: Some(dense_view(&random(n, 98, false), dtype, [n])),
                groups: 1,
                channels: n,
                inner: 1,
            };
            let call = RowCall {
                op: "test",
                input,
                residual: Some(residual),
                mode: mode.clone(),
            };
            assert!(fits(&call));
            let made = row(&call).expect("runs");
            assert_eq!(read(&made[0], dtype), sums);
            let normed = fused(&dense_view(&sums, dtype, [rows, n]), mode);
            assert_eq!(read(&made[1], dtype), read(&normed, dtype));
        }
    }

    #[test]
    fn softmax_and_its_logarithm_equal_their_definitions() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for (rows, n) in [(1, 1), (3, 7), (5, 1500), (70_000, 2)] {
                let input = dense_view(&random(rows * n, 81, false), dtype, [rows, n]);
                let (mut soft, mut log) = (vec![], vec![]);
                for row in values(&input).chunks(n) {
                    let sum: f64 = row.iter().map(|x| x.exp()).sum();
                    soft.extend(row.iter().map(|x| x.exp() / sum));
                    log.extend(row.iter().map(|x| x - sum.ln()));
                }
                let run = |mode| read(&fused(&input, mode), dtype);
                assert_close(&run(RowOp::Softmax), &soft, tolerance(dtype), "softmax");
                assert_close(
                    &run(RowOp::LogSoftmax),
                    &log,
                    tolerance(dtype),
                    "log-softmax",
                );
            }
        }
        let input = dense_view(
            &[1000.0, 1001.0, f64::NEG_INFINITY, 0.0],
            DType::F32,
            [2, 2],
        );
        let got = read(&fused(&input, RowOp::Softmax), DType::F32);
        assert_close(
            &got,
            &[0.268_941_421_369_995, 0.731_058_578_630_005, 0.0, 1.0],
            1e-7,
            "large and infinite values",
        );
    }

    #[test]
    fn norms_equal_their_definitions_with_parameters_of_any_arrangement() {
        let (eps, rows, n) = (1e-5, 6, 12);
        for dtype in [DType::F64, DType::F32, DType::F16] {
            let input = dense_view(&random(rows * n, 91, false), dtype, [rows, n]);
            for (rms, groups, channels, inner) in [
                (false, 1, 12, 1),
                (true, 1, 12, 1),
                (false, 3, 4, 3),
                (false, 2, 1, 12),
            ] {
                let weight = dense_view(
                    &random(groups * channels, 92, false),
                    DType::F32,
                    [groups * channels],
                );
                let bias = dense_view(
                    &random(groups * channels, 93, false),
                    dtype,
                    [groups * channels],
                );
                let (w, b) = (values(&weight), values(&bias));
                for with in [false, true] {
                    let mode = RowOp::Norm {
                        rms,
                        eps,
                        weight: with.then(|| weight.clone()),
                        bias: with.then(|| bias.clone()),
                        groups,
                        channels,
                        inner,
                    };
                    let mut expected = vec![];
                    for (r, row) in values(&input).chunks(n).enumerate() {
                        let mean = if rms {
                            0.0
                        } else {
                            row.iter().sum::<f64>() / n as f64
                        };
                        let variance =
                            row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                        for (j, x) in row.iter().enumerate() {
                            let y = (x - mean) / (variance + eps).sqrt();
                            let at = r % groups * channels + j / inner;
                            expected.push(if with { y * w[at] + b[at] } else { y });
                        }
                    }
                    assert_close(
                        &read(&fused(&input, mode), dtype),
                        &expected,
                        tolerance(dtype),
                        "norm",
                    );
                }
            }
        }
    }
}
