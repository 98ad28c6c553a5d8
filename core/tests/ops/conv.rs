//! Convolution, pooling and resizing (`conv/pool.rs`), held against loops over plain vectors.

mod pool;

use crate::support::{floats, numbers, tensor};
use anymesh_core::{
    DType, Error, Result, Tensor,
    ops::{AvgPool, Conv, ConvTranspose, Interpolate, MaxPool},
};

fn is_shape_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Shape { .. }))
}

fn is_argument_error<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::Argument { .. }))
}

/// The value at `[n, c, y, x]`, zero outside.
fn at(t: &[f32], dims: &[usize], n: usize, c: usize, y: isize, x: isize) -> f32 {
    if y < 0 || x < 0 || y >= dims[2] as isize || x >= dims[3] as isize {
        0.0
    } else {
        t[((n * dims[1] + c) * dims[2] + y as usize) * dims[3] + x as usize]
    }
}

fn naive_conv2d(input: &Tensor, weight: &Tensor, o: &Conv<2>) -> (Vec<usize>, Vec<f32>) {
    let (x, w, xd, wd) = (floats(input), floats(weight), input.dims(), weight.dims());
    let size = |d: usize| {
        (xd[d + 2] + 2 * o.padding[d] - o.dilation[d] * (wd[d + 2] - 1) - 1) / o.stride[d] + 1
    };
    let (oh, ow) = (size(0), size(1));
    let mut out = vec![];
    for n in 0..xd[0] {
        for c in 0..wd[0] {
            let group = c / (wd[0] / o.groups);
            for i in 0..oh {
                for j in 0..ow {
                    let mut sum = 0.0;
                    for k in 0..wd[1] {
                        for p in 0..wd[2] {
                            for q in 0..wd[3] {
                                let y = (i * o.stride[0] + p * o.dilation[0]) as isize
                                    - o.padding[0] as isize;
                                let z = (j * o.stride[1] + q * o.dilation[1]) as isize
                                    - o.padding[1] as isize;
                                sum += at(&x, xd, n, group * wd[1] + k, y, z)
                                    * w[((c * wd[1] + k) * wd[2] + p) * wd[3] + q];
                            }
                        }
                    }
                    out.push(sum);
                }
            }
        }
    }
    (vec![xd[0], wd[0], oh, ow], out)
}

fn naive_conv_transpose2d(
    input: &Tensor,
    weight: &Tensor,
    o: &ConvTranspose<2>,
) -> (Vec<usize>, Vec<f32>) {
    let (x, w, xd, wd) = (floats(input), floats(weight), input.dims(), weight.dims());
    let size = |d: usize| {
        (xd[d + 2] - 1) * o.stride[d] + o.dilation[d] * (wd[d + 2] - 1) + o.output_padding[d] + 1
            - 2 * o.padding[d]
    };
    let dims = [xd[0], wd[1] * o.groups, size(0), size(1)];
    let mut out = vec![0f32; dims.iter().product()];
    for n in 0..xd[0] {
        for c in 0..xd[1] {
            let group = c / (xd[1] / o.groups);
            for i in 0..xd[2] {
                for j in 0..xd[3] {
                    for k in 0..wd[1] {
                        for p in 0..wd[2] {
                            for q in 0..wd[3] {
                                let y = (i * o.stride[0] + p * o.dilation[0]) as isize
                                    - o.padding[0] as isize;
                                let z = (j * o.stride[1] + q * o.dilation[1]) as isize
                                    - o.padding[1] as isize;
                                if (0..dims[2] as isize).contains(&y)
                                    && (0..dims[3] as isize).contains(&z)
                                {
                                    let to = ((n * dims[1] + group * wd[1] + k) * dims[2]
                                        + y as usize)
                                        * dims[3]
                                        + z as usize;
                                    out[to] += at(&x, xd, n, c, i as isize, j as isize)
                                        * w[((c * wd[1] + k) * wd[2] + p) * wd[3] + q];
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    (dims.to_vec(), out)
}

const GRID: [([usize; 2], [usize; 2], [usize; 2], usize); 7] = [
    ([1, 1], [0, 0], [1, 1], 1),
    ([2, 1], [1, 2], [1, 1], 1),
    ([1, 3], [2, 1], [2, 1], 2),
    ([3, 2], [0, 3], [1, 2], 4),
    ([1, 1], [1, 1], [1, 1], 4),
    ([2, 2], [2, 2], [2, 2], 2),
    ([5, 1], [0, 0], [3, 1], 1),
];

#[test]
fn conv2d_agrees_with_the_loops() {
    for (stride, padding, dilation, groups) in GRID {
        let options = Conv {
            stride,
            padding,
            dilation,
            groups,
        };
        let (x, w) = (
            numbers(&[2, 4, 9, 8], 1),
            numbers(&[8, 4 / groups, 3, 2], 2),
        );
        let (dims, expected) = naive_conv2d(&x, &w, &options);
        let out = x.conv2d(&w, None, &options).expect("convolves");
        assert_eq!(
            (out.dims(), floats(&out)),
            (&dims[..], expected.clone()),
            "{options:?}"
        );
        // The same elements stored channels-last.
        let last = |t: &Tensor| {
            t.permute(&[0, 2, 3, 1])
                .expect("permutes")
                .contiguous()
                .expect("copies")
                .permute(&[0, 3, 1, 2])
                .expect("permutes")
        };
        assert_eq!(
            floats(
                &last(&x)
                    .conv2d(&last(&w), None, &options)
                    .expect("convolves")
            ),
            expected,
            "{options:?}"
        );
        let bias = numbers(&[8], 3);
        let plane = dims[2] * dims[3];
        let biased: Vec<f32> = expected
            .iter()
            .enumerate()
            .map(|(i, v)| v + floats(&bias)[i / plane % 8])
            .collect();
        assert_eq!(
            floats(&x.conv2d(&w, Some(&bias), &options).expect("convolves")),
            biased
        );
    }
}

#[test]
fn conv_transpose2d_agrees_with_the_loops() {
    for (stride, padding, dilation, groups) in GRID {
        for output_padding in [[0, 0], [stride[0].max(dilation[0]) - 1, 0]] {
            let options = ConvTranspose {
                stride,
                padding,
                dilation,
                groups,
                output_padding,
            };
            let (x, w) = (numbers(&[2, 4, 5, 6], 1), numbers(&[4, 3, 3, 2], 2));
            let (dims, expected) = naive_conv_transpose2d(&x, &w, &options);
            let out = x.conv_transpose2d(&w, None, &options).expect("convolves");
            assert_eq!(
                (out.dims(), floats(&out)),
                (&dims[..], expected),
                "{options:?}"
            );
        }
    }
}

#[test]
fn one_and_three_dimensions_agree_with_two() {
    let (x, w) = (numbers(&[2, 3, 10], 1), numbers(&[4, 3, 3], 2));
    let line = x
        .conv1d(
            &w,
            None,
            &Conv {
                stride: [2],
                padding: [1],
                dilation: [2],
                groups: 1,
            },
        )
        .expect("1-D");
    let wide = Conv {
        stride: [1, 2],
        padding: [0, 1],
        dilation: [1, 2],
        groups: 1,
    };
    let flat = x
        .unsqueeze(2)
        .expect("adds")
        .conv2d(&w.unsqueeze(2).expect("adds"), None, &wide)
        .expect("2-D");
    assert_eq!(floats(&line), floats(&flat));

    let (x, w) = (numbers(&[1, 2, 6, 7], 3), numbers(&[4, 1, 3, 2], 4));
    let flat = x
        .conv2d(
            &w,
            None,
            &Conv {
                stride: [2, 1],
                padding: [1, 1],
                dilation: [1, 1],
                groups: 2,
            },
        )
        .expect("2-D");
    let deep = Conv {
        stride: [2, 1, 1],
        padding: [1, 1, 0],
        dilation: [1, 1, 1],
        groups: 2,
    };
    let deep = x
        .unsqueeze(-1)
        .expect("adds")
        .conv3d(&w.unsqueeze(-1).expect("adds"), None, &deep)
        .expect("3-D");
    assert_eq!(floats(&flat), floats(&deep));

    let (x, w) = (numbers(&[1, 3, 5], 5), numbers(&[3, 2, 4], 6));
    let line = x
        .conv_transpose1d(
            &w,
            None,
            &ConvTranspose {
                stride: [3],
                padding: [1],
                output_padding: [2],
                ..Default::default()
            },
        )
        .expect("1-D");
    let deep = ConvTranspose {
        stride: [1, 3, 1],
        padding: [0, 1, 0],
        output_padding: [0, 2, 0],
        ..Default::default()
    };
    let around = |t: &Tensor| t.unsqueeze(2).expect("adds").unsqueeze(-1).expect("adds");
    assert_eq!(
        floats(&line),
        floats(
            &around(&x)
                .conv_transpose3d(&around(&w), None, &deep)
                .expect("3-D")
        )
    );
}

#[test]
fn the_window_is_not_flipped_and_the_transpose_is_the_gradient() {
    let x = tensor(&[0., 0., 1., 0., 0.], &[1, 1, 5]);
    let w = tensor(&[1., 2., 3.], &[1, 1, 3]);
    let same = Conv {
        padding: [1],
        ..Conv::default()
    };
    assert_eq!(
        floats(&x.conv1d(&w, None, &same).expect("convolves")),
        [0., 3., 2., 1., 0.]
    );
    assert_eq!(
        floats(
            &x.conv_transpose1d(
                &w,
                None,
                &ConvTranspose {
                    padding: [1],
                    ..Default::default()
                }
            )
            .expect("spreads")
        ),
        [0., 1., 2., 3., 0.]
    );
}

#[test]
fn convolutions_without_elements_are_zero_or_empty() {
    let options = Conv {
        padding: [2],
        ..Conv::default()
    };
    let out = numbers(&[1, 0, 3], 0)
        .conv1d(
            &numbers(&[2, 0, 3], 0),
            Some(&tensor(&[1., 2.], &[2])),
            &options,
        )
        .expect("no channels");
    assert_eq!(
        (out.dims(), floats(&out)),
        (
            &[1usize, 2, 5][..],
            vec![1., 1., 1., 1., 1., 2., 2., 2., 2., 2.]
        )
    );
    assert_eq!(
        numbers(&[0, 2, 3], 0)
            .conv1d(&numbers(&[4, 2, 1], 0), None, &Conv::default())
            .expect("no batch")
            .dims(),
        [0, 4, 3]
    );
    let out = numbers(&[1, 1, 0], 0)
        .conv1d(&numbers(&[1, 1, 3], 0), None, &options)
        .expect("only padding");
    assert_eq!(floats(&out), [0., 0.]);
}

#[test]
fn convolutions_that_make_no_sense_are_typed_errors() {
    let (x, w) = (numbers(&[1, 4, 6], 1), numbers(&[6, 4, 3], 2));
    let plain = Conv::default();
    assert!(is_argument_error(x.conv1d(
        &w,
        None,
        &Conv {
            stride: [0],
            ..plain
        }
    )));
    assert!(is_argument_error(x.conv1d(
        &w,
        None,
        &Conv {
            dilation: [0],
            ..plain
        }
    )));
    assert!(is_argument_error(x.conv1d(
        &w,
        None,
        &Conv { groups: 0, ..plain }
    )));
    assert!(
        is_argument_error(x.conv1d(&w, None, &Conv { groups: 3, ..plain })),
        "3 does not divide 4 channels"
    );
    assert!(
        is_argument_error(x.conv1d(&numbers(&[5, 2, 3], 1), None, &Conv { groups: 2, ..plain })),
        "2 does not divide 5 outputs"
    );
    assert!(
        is_argument_error(x.conv1d(&numbers(&[6, 4, 0], 1), None, &plain)),
        "an empty window"
    );
    assert!(
        is_shape_error(x.conv1d(&w, None, &Conv { groups: 2, ..plain })),
        "the weight takes 8 channels"
    );
    assert!(
        is_shape_error(x.conv1d(&numbers(&[6, 4, 7], 2), None, &plain)),
        "a window larger than the input"
    );
    assert!(is_shape_error(x.conv1d(
        &w,
        None,
        &Conv {
            dilation: [3],
            ..plain
        }
    )));
    assert!(is_shape_error(x.conv1d(
        &w,
        Some(&numbers(&[4], 1)),
        &plain
    )));
    assert!(is_shape_error(numbers(&[4, 6], 1).conv1d(&w, None, &plain)));
    assert!(matches!(
        x.cast(DType::I32).expect("casts").conv1d(&w, None, &plain),
        Err(Error::DType { .. })
    ));
    assert!(
        x.conv1d(
            &w,
            None,
            &Conv {
                padding: [usize::MAX / 2],
                ..plain
            }
        )
        .is_err()
    );
    assert!(
        x.conv1d(
            &w,
            None,
            &Conv {
                dilation: [usize::MAX],
                ..plain
            }
        )
        .is_err()
    );
    assert_eq!(
        x.conv1d(
            &w,
            None,
            &Conv {
                stride: [usize::MAX],
                ..plain
            }
        )
        .expect("one window")
        .dims(),
        [1, 6, 1]
    );
    let t = ConvTranspose::default();
    let w = numbers(&[4, 2, 3], 2);
    assert!(
        is_argument_error(x.conv_transpose1d(
            &w,
            None,
            &ConvTranspose {
                output_padding: [1],
                ..t
            }
        )),
        "less than the stride"
    );
    assert!(
        is_shape_error(x.conv_transpose1d(&w, None, &ConvTranspose { padding: [4], ..t })),
        "nothing is left"
    );
    assert!(is_shape_error(
        numbers(&[1, 3, 6], 1).conv_transpose1d(&w, None, &t)
    ));
    assert!(
        x.conv_transpose1d(
            &w,
            None,
            &ConvTranspose {
                stride: [usize::MAX / 3],
                ..t
            }
        )
        .is_err()
    );
}
