//! Pooling and resizing.

use super::*;

/// For each window of one dimension the places it covers (not those in the padding), by PyTorch's
/// rule.
fn windows(
    n: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
    dilation: usize,
    ceil: bool,
) -> Vec<(Vec<usize>, usize)> {
    let span = dilation * (kernel - 1) + 1;
    let room = n + 2 * padding - span;
    let mut out = if ceil {
        room.div_ceil(stride)
    } else {
        room / stride
    } + 1;
    if ceil && (out - 1) * stride >= n + padding {
        out -= 1;
    }
    (0..out)
        .map(|i| {
            let start = (i * stride) as isize - padding as isize;
            let real = (0..kernel)
                .map(|k| start + (k * dilation) as isize)
                .filter(|p| (0..n as isize).contains(p))
                .map(|p| p as usize)
                .collect();
            let with_padding = (start + kernel as isize).min((n + padding) as isize) - start;
            (real, with_padding as usize)
        })
        .collect()
}

#[test]
fn max_pool_agrees_with_the_loops_and_points_at_the_first_largest() {
    for (kernel, stride, padding, dilation, ceil_mode) in [
        ([2, 2], [2, 2], [0, 0], [1, 1], false),
        ([3, 2], [1, 3], [1, 1], [1, 1], false),
        ([3, 3], [2, 2], [1, 1], [2, 1], true),
        ([2, 4], [3, 3], [1, 2], [1, 1], true),
    ] {
        let x = numbers(&[2, 7, 9], 3);
        let data = floats(&x);
        let (rows, columns) = (
            windows(7, kernel[0], stride[0], padding[0], dilation[0], ceil_mode),
            windows(9, kernel[1], stride[1], padding[1], dilation[1], ceil_mode),
        );
        let (mut expected, mut places) = (vec![], vec![]);
        for n in 0..2 {
            for (r, _) in &rows {
                for (c, _) in &columns {
                    let all: Vec<usize> = r
                        .iter()
                        .flat_map(|y| c.iter().map(move |x| y * 9 + x))
                        .collect();
                    let best = all
                        .iter()
                        .copied()
                        .reduce(|a, b| {
                            if data[n * 63 + b] > data[n * 63 + a] {
                                b
                            } else {
                                a
                            }
                        })
                        .expect("not empty");
                    expected.push(data[n * 63 + best]);
                    places.push(best as i32);
                }
            }
        }
        let pool = MaxPool {
            kernel,
            stride,
            padding,
            dilation,
            ceil_mode,
        };
        let (values, indices) = x.max_pool2d_with_indices(&pool).expect("pools");
        assert_eq!(values.dims(), [2, rows.len(), columns.len()]);
        assert_eq!(
            (floats(&values), indices.to_vec::<i32>().expect("i32")),
            (expected.clone(), places),
            "{pool:?}"
        );
        assert_eq!(
            floats(
                &x.t()
                    .expect("t")
                    .contiguous()
                    .expect("copies")
                    .t()
                    .expect("t")
                    .max_pool2d(&pool)
                    .expect("pools")
            ),
            expected
        );
    }
}

#[test]
fn padding_never_wins_a_max_pool() {
    let pool = MaxPool {
        padding: [1],
        stride: [1],
        ..MaxPool::new([3])
    };
    let x = tensor(&[f32::NEG_INFINITY; 3], &[1, 3]);
    let (values, indices) = x.max_pool1d_with_indices(&pool).expect("pools");
    assert_eq!(floats(&values), [f32::NEG_INFINITY; 3]);
    assert_eq!(indices.to_vec::<i32>().expect("i32"), [0, 0, 1]);
    let negative = tensor(&[-400., -300., -2.], &[1, 3]);
    for dtype in [
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I32,
        DType::I64,
        DType::F16,
    ] {
        let x = negative.cast(dtype).expect("casts");
        assert_eq!(
            floats(&x.max_pool1d(&pool).expect("pools"))[2],
            -2.0,
            "{dtype}"
        );
        assert_eq!(
            floats(&x.max_pool1d(&pool).expect("pools"))[0],
            floats(&x)[1],
            "{dtype}"
        );
    }
    let nan = tensor(&[1., f32::NAN, 2., 3.], &[4])
        .max_pool1d(&MaxPool::new([2]))
        .expect("pools");
    assert!(floats(&nan)[0].is_nan() && floats(&nan)[1] == 3.0);
}

#[test]
fn avg_pool_counts_what_pytorch_counts() {
    for (kernel, stride, padding, ceil_mode) in [
        ([2, 2], [2, 2], [0, 0], false),
        ([3, 2], [1, 3], [1, 1], false),
        ([3, 3], [2, 2], [1, 1], true),
        ([2, 4], [3, 3], [1, 2], true),
    ] {
        let x = numbers(&[2, 7, 9], 3);
        let data = floats(&x);
        let (rows, columns) = (
            windows(7, kernel[0], stride[0], padding[0], 1, ceil_mode),
            windows(9, kernel[1], stride[1], padding[1], 1, ceil_mode),
        );
        for count_include_pad in [true, false] {
            let mut expected = vec![];
            for n in 0..2 {
                for (r, r_padded) in &rows {
                    for (c, c_padded) in &columns {
                        let data = &data;
                        let sum: f32 = r
                            .iter()
                            .flat_map(|y| c.iter().map(move |x| data[n * 63 + y * 9 + x]))
                            .sum();
                        let count = if count_include_pad {
                            r_padded * c_padded
                        } else {
                            r.len() * c.len()
                        };
                        expected.push(sum / count as f32);
                    }
                }
            }
            let out = floats(
                &x.avg_pool2d(&AvgPool {
                    kernel,
                    stride,
                    padding,
                    ceil_mode,
                    count_include_pad,
                })
                .expect("pools"),
            );
            assert_eq!(out.len(), expected.len());
            assert!(
                out.iter()
                    .zip(&expected)
                    .all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs()),
                "{kernel:?} {count_include_pad} {out:?} {expected:?}"
            );
        }
    }
    let f8 = tensor(&[300., 300., 300.], &[3])
        .cast(DType::F8E4M3)
        .expect("casts");
    let edge = AvgPool {
        padding: [1],
        count_include_pad: false,
        ..AvgPool::new([3])
    };
    assert_eq!(
        floats(&f8.avg_pool1d(&edge).expect("pools")),
        [288.],
        "the sum does not fit f8e4m3, the mean does"
    );
}

#[test]
fn adaptive_pools_cover_the_input_with_uneven_windows() {
    for (n, out) in [(7, 3), (10, 4), (5, 5), (3, 7), (9, 1)] {
        let x = numbers(&[2, n, 6], n);
        let data = floats(&x);
        let bounds = |i: usize| (i * n / out, ((i + 1) * n).div_ceil(out));
        let column = |b: usize, i: usize, c: usize| {
            (bounds(i).0..bounds(i).1)
                .map(|y| data[(b * n + y) * 6 + c])
                .collect::<Vec<f32>>()
        };
        let (mut means, mut largest) = (vec![], vec![]);
        for b in 0..2 {
            for i in 0..out {
                for c in 0..3 {
                    let both = [column(b, i, 2 * c), column(b, i, 2 * c + 1)].concat();
                    means.push(both.iter().sum::<f32>() / both.len() as f32);
                    largest.push(both.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                }
            }
        }
        let average = floats(&x.adaptive_avg_pool2d([out, 3]).expect("pools"));
        assert!(
            average
                .iter()
                .zip(&means)
                .all(|(a, b)| (a - b).abs() < 1e-5)
                && average.len() == means.len(),
            "{n} to {out}"
        );
        assert_eq!(
            floats(&x.adaptive_max_pool2d([out, 3]).expect("pools")),
            largest,
            "{n} to {out}"
        );
    }
    let x = tensor(&[1., 2., f32::INFINITY, 4., 5.], &[5]);
    assert_eq!(
        floats(&x.adaptive_avg_pool1d([2]).expect("pools")),
        [f32::INFINITY, f32::INFINITY],
        "not NaN"
    );
    assert_eq!(
        floats(&x.adaptive_avg_pool1d([5]).expect("pools")),
        floats(&x)
    );
}

#[test]
fn pools_that_make_no_sense_are_typed_errors() {
    let x = numbers(&[1, 2, 5], 1);
    assert!(is_argument_error(x.max_pool1d(&MaxPool {
        stride: [0],
        ..MaxPool::new([2])
    })));
    assert!(is_argument_error(x.max_pool1d(&MaxPool::new([0]))));
    assert!(
        is_argument_error(x.max_pool1d(&MaxPool {
            padding: [2],
            ..MaxPool::new([3])
        })),
        "more than half a window"
    );
    assert!(is_shape_error(x.max_pool1d(&MaxPool::new([6]))));
    assert!(is_shape_error(
        x.avg_pool3d(&AvgPool::new([1, 1, 1]))
            .and_then(|t| t.avg_pool2d(&AvgPool::new([9, 9])))
    ));
    assert!(is_shape_error(
        numbers(&[3], 1).max_pool2d(&MaxPool::new([1, 1]))
    ));
    assert!(is_shape_error(
        numbers(&[2, 0], 1).max_pool1d(&MaxPool::new([1]))
    ));
    assert!(is_shape_error(x.adaptive_avg_pool1d([0])));
    assert!(matches!(
        x.cast(DType::I32)
            .expect("casts")
            .avg_pool1d(&AvgPool::new([2])),
        Err(Error::DType { .. })
    ));
    assert!(matches!(
        x.cast(DType::Bool)
            .expect("casts")
            .max_pool1d(&MaxPool::new([2])),
        Err(Error::DType { .. })
    ));
    assert_eq!(
        numbers(&[0, 5], 1)
            .max_pool1d_with_indices(&MaxPool::new([2]))
            .expect("empty")
            .1
            .dims(),
        [0, 2]
    );
    assert_eq!(
        numbers(&[0, 5], 1)
            .avg_pool1d(&AvgPool::new([2]))
            .expect("empty")
            .dims(),
        [0, 2]
    );
}

#[test]
fn nearest_takes_the_floor() {
    let x = tensor(&[0., 1., 2., 3., 4.], &[1, 1, 5]);
    assert_eq!(
        floats(&x.interpolate(&[3], Interpolate::Nearest).expect("resizes")),
        [0., 1., 3.]
    );
    assert_eq!(
        floats(&x.interpolate(&[7], Interpolate::Nearest).expect("resizes")),
        [0., 0., 1., 2., 2., 3., 4.]
    );
    let flags = x
        .cast(DType::Bool)
        .expect("casts")
        .interpolate(&[2], Interpolate::Nearest)
        .expect("any dtype");
    assert_eq!(flags.to_vec::<bool>().expect("bool"), [false, true]);
}

#[test]
fn linear_interpolation_is_separable_with_either_corner_rule() {
    let (n, m) = (4, 5);
    let x = numbers(&[2, n, m], 4);
    let data = floats(&x);
    for align_corners in [false, true] {
        for (h, w) in [(8, 10), (3, 4), (1, 7), (4, 5)] {
            let place = |i: usize, from: usize, to: usize| match align_corners {
                true if to == 1 => 0.0,
                true => i as f32 * (from - 1) as f32 / (to - 1) as f32,
                false => ((i as f32 + 0.5) * from as f32 / to as f32 - 0.5).max(0.0),
            };
            let mut expected = vec![];
            for b in 0..2 {
                for i in 0..h {
                    for j in 0..w {
                        let (y, z) = (place(i, n, h), place(j, m, w));
                        let (y0, z0) = (y as usize, z as usize);
                        let (y1, z1) = ((y0 + 1).min(n - 1), (z0 + 1).min(m - 1));
                        let (fy, fz) = (y - y0 as f32, z - z0 as f32);
                        let v = |y: usize, z: usize| data[(b * n + y) * m + z];
                        expected.push(
                            (v(y0, z0) * (1.0 - fz) + v(y0, z1) * fz) * (1.0 - fy)
                                + (v(y1, z0) * (1.0 - fz) + v(y1, z1) * fz) * fy,
                        );
                    }
                }
            }
            let out = floats(
                &x.interpolate(&[h, w], Interpolate::Linear { align_corners })
                    .expect("resizes"),
            );
            assert!(
                out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5)
                    && out.len() == expected.len(),
                "{h}x{w} {align_corners}"
            );
        }
    }
    let infinite = tensor(&[1., f32::INFINITY], &[1, 2])
        .interpolate(
            &[3],
            Interpolate::Linear {
                align_corners: true,
            },
        )
        .expect("resizes");
    assert_eq!(
        floats(&infinite),
        [1., f32::INFINITY, f32::INFINITY],
        "a neighbour without weight does not count"
    );
}

#[test]
fn resizes_that_make_no_sense_are_typed_errors() {
    let x = numbers(&[1, 2, 3], 1);
    assert!(is_argument_error(x.interpolate(&[], Interpolate::Nearest)));
    assert!(is_argument_error(
        x.interpolate(&[1, 1, 1, 1], Interpolate::Nearest)
    ));
    assert!(is_shape_error(
        numbers(&[3], 1).interpolate(&[1, 1], Interpolate::Nearest)
    ));
    assert!(is_shape_error(
        numbers(&[1, 0], 1).interpolate(&[2], Interpolate::Nearest)
    ));
    assert!(matches!(
        x.cast(DType::I32).expect("casts").interpolate(
            &[2],
            Interpolate::Linear {
                align_corners: true
            }
        ),
        Err(Error::DType { .. })
    ));
    assert_eq!(
        x.interpolate(&[0], Interpolate::Nearest)
            .expect("empty")
            .dims(),
        [1, 2, 0]
    );
    assert!(
        x.interpolate(&[usize::MAX], Interpolate::Nearest).is_err(),
        "more than can be addressed"
    );
}
