//! Convolution, pooling and resizing.

use super::{Cases, Fill, View, input};
use anymesh_core::{
    DType, Device, Result, Tensor,
    ops::{AvgPool, Conv, ConvTranspose, Interpolate, MaxPool},
};

const FLOATS: [DType; 5] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
];

fn data(device: &Device, dtype: DType, shape: &[usize], view: View, seed: u64) -> Result<Tensor> {
    let fill = match dtype {
        DType::U8 => Fill::Integers(0, 255),
        d if d.is_int() => Fill::Integers(-100, 100),
        _ => Fill::Uniform(-1.0, 1.0),
    };
    input(device, dtype, shape, view, fill, seed)
}

/// Whole numbers: the sum of a few products of them is exact in every dtype.
fn whole(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
    input(
        device,
        dtype,
        shape,
        View::Contiguous,
        Fill::Integers(-1, 1),
        seed,
    )
}

fn convolutions(cases: &mut Cases) {
    let one = |stride, padding, dilation, groups| Conv {
        stride: [stride],
        padding: [padding],
        dilation: [dilation],
        groups,
    };
    for (channels, length, out, kernel, options) in [
        (1, 1, 1, 1, one(1, 0, 1, 1)),
        (3, 20, 5, 3, one(1, 1, 1, 1)),
        (4, 33, 6, 4, one(2, 3, 2, 2)),
        (6, 65, 6, 7, one(3, 3, 1, 6)),
        (6, 40, 12, 5, one(1, 4, 2, 6)),
        (2, 257, 3, 9, one(5, 0, 3, 1)),
    ] {
        for dtype in FLOATS {
            cases.add(
                "conv1d",
                dtype,
                format!("{dtype} {channels}x{length} to {out}, kernel {kernel}, {options:?}"),
                move |d| {
                    let weight = data(
                        d,
                        dtype,
                        &[out, channels / options.groups, kernel],
                        View::Contiguous,
                        2,
                    )?;
                    Ok(vec![
                        data(d, dtype, &[2, channels, length], View::Contiguous, 1)?
                            .conv1d(&weight, None, &options)?,
                    ])
                },
            );
        }
        cases.add(
            "conv_transpose1d",
            DType::F32,
            format!("{channels}x{length} to {out}, kernel {kernel}, {options:?}"),
            move |d| {
                let Conv {
                    stride,
                    padding,
                    dilation,
                    groups,
                } = options;
                let more = ConvTranspose {
                    stride,
                    padding,
                    dilation,
                    groups,
                    output_padding: [stride[0].max(dilation[0]) - 1],
                };
                let weight = data(
                    d,
                    DType::F32,
                    &[channels, out / groups, kernel],
                    View::Contiguous,
                    4,
                )?;
                let x = data(
                    d,
                    DType::F32,
                    &[2, channels, length + 6],
                    View::Contiguous,
                    3,
                )?;
                Ok(vec![x.conv_transpose1d(&weight, None, &more)?])
            },
        );
    }
    let two = |stride, padding, dilation, groups| Conv {
        stride,
        padding,
        dilation,
        groups,
    };
    for (channels, size, out, kernel, options) in [
        (1, [1, 1], 1, [1, 1], two([1, 1], [0, 0], [1, 1], 1)),
        (3, [9, 11], 4, [3, 3], two([1, 1], [1, 1], [1, 1], 1)),
        (3, [17, 16], 8, [3, 5], two([2, 3], [1, 2], [1, 1], 1)),
        (8, [10, 10], 8, [3, 3], two([1, 1], [1, 1], [1, 1], 8)),
        (4, [12, 9], 8, [2, 3], two([1, 2], [2, 0], [2, 3], 4)),
        (6, [7, 20], 9, [1, 1], two([1, 1], [0, 0], [1, 1], 3)),
        (16, [14, 14], 32, [3, 3], two([2, 2], [1, 1], [1, 1], 1)),
        (2, [5, 5], 3, [5, 5], two([1, 1], [0, 0], [1, 1], 1)),
    ] {
        for dtype in FLOATS {
            cases.add(
                "conv2d",
                dtype,
                format!("{dtype} {channels}x{size:?} to {out}, kernel {kernel:?}, {options:?}"),
                move |d| {
                    let weight = data(
                        d,
                        dtype,
                        &[out, channels / options.groups, kernel[0], kernel[1]],
                        View::Contiguous,
                        6,
                    )?;
                    Ok(vec![
                        data(
                            d,
                            dtype,
                            &[2, channels, size[0], size[1]],
                            View::Contiguous,
                            5,
                        )?
                        .conv2d(&weight, None, &options)?,
                    ])
                },
            );
        }
        for dtype in [DType::F32, DType::BF16] {
            cases.add(
                "conv_transpose2d",
                dtype,
                format!("{dtype} {channels}x{size:?} to {out}, kernel {kernel:?}, {options:?}"),
                move |d| {
                    let Conv {
                        stride,
                        padding,
                        dilation,
                        groups,
                    } = options;
                    let more = ConvTranspose {
                        stride,
                        padding,
                        dilation,
                        groups,
                        output_padding: [0, stride[1] - 1],
                    };
                    let weight = data(
                        d,
                        dtype,
                        &[channels, out.div_ceil(groups), kernel[0], kernel[1]],
                        View::Contiguous,
                        8,
                    )?;
                    Ok(vec![
                        data(
                            d,
                            dtype,
                            &[2, channels, size[0] + 2, size[1] + 2],
                            View::Contiguous,
                            7,
                        )?
                        .conv_transpose2d(&weight, None, &more)?,
                    ])
                },
            );
        }
    }
    for view in View::ALL {
        cases.add(
            "conv2d",
            DType::F32,
            format!("{view:?} input and weight"),
            move |d| {
                Ok(vec![data(d, DType::F32, &[2, 3, 8, 9], view, 9)?.conv2d(
                    &data(d, DType::F32, &[4, 3, 3, 2], view, 10)?,
                    None,
                    &Conv::default(),
                )?])
            },
        );
        cases.add(
            "conv_transpose2d",
            DType::F32,
            format!("{view:?} input and weight"),
            move |d| {
                let stride = ConvTranspose {
                    stride: [2, 1],
                    ..ConvTranspose::default()
                };
                Ok(vec![
                    data(d, DType::F32, &[2, 3, 4, 5], view, 11)?.conv_transpose2d(
                        &data(d, DType::F32, &[3, 4, 3, 2], view, 12)?,
                        None,
                        &stride,
                    )?,
                ])
            },
        );
    }
    for dtype in [DType::F32, DType::F16] {
        for (stride, padding, dilation, groups) in [
            ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
            ([2, 1, 2], [1, 0, 2], [1, 2, 1], 2),
            ([1, 1, 1], [1, 1, 1], [1, 1, 1], 4),
        ] {
            cases.add("conv3d", dtype, format!("{dtype} stride {stride:?}, padding {padding:?}, dilation {dilation:?}, {groups} groups"), move |d| {
                let options = Conv { stride, padding, dilation, groups };
                Ok(vec![data(d, dtype, &[2, 4, 5, 6, 7], View::Contiguous, 13)?.conv3d(
                    &data(d, dtype, &[8, 4 / groups, 2, 3, 3], View::Contiguous, 14)?,
                    None,
                    &options,
                )?])
            });
            cases.add("conv_transpose3d", dtype, format!("{dtype} stride {stride:?}, padding {padding:?}, dilation {dilation:?}, {groups} groups"), move |d| {
                let options = ConvTranspose { stride, padding, dilation, groups, output_padding: [0; 3] };
                Ok(vec![data(d, dtype, &[2, 4, 3, 4, 5], View::Contiguous, 15)?.conv_transpose3d(
                    &data(d, dtype, &[4, 2, 2, 3, 3], View::Contiguous, 16)?,
                    None,
                    &options,
                )?])
            });
        }
    }
    for dtype in FLOATS {
        cases.add(
            "conv2d",
            dtype,
            format!("{dtype} whole numbers with bias, exact"),
            move |d| {
                Ok(vec![whole(d, dtype, &[2, 2, 9, 9], 17)?.conv2d(
                    &whole(d, dtype, &[5, 2, 2, 2], 18)?,
                    Some(&whole(d, dtype, &[5], 19)?),
                    &Conv::default(),
                )?])
            },
        );
        cases.add(
            "conv_transpose1d",
            dtype,
            format!("{dtype} whole numbers with bias, exact"),
            move |d| {
                let options = ConvTranspose {
                    stride: [2],
                    ..ConvTranspose::default()
                };
                Ok(vec![whole(d, dtype, &[2, 2, 9], 20)?.conv_transpose1d(
                    &whole(d, dtype, &[2, 5, 3], 21)?,
                    Some(&whole(d, dtype, &[5], 22)?),
                    &options,
                )?])
            },
        );
    }
}

fn pools(cases: &mut Cases) {
    for dtype in [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::I32,
        DType::U8,
    ] {
        for (kernel, stride, padding, dilation, ceil_mode) in [
            ([2, 2], [2, 2], [0, 0], [1, 1], false),
            ([3, 3], [1, 2], [1, 1], [1, 1], false),
            ([3, 2], [2, 3], [1, 1], [2, 1], true),
            ([1, 5], [1, 4], [0, 2], [1, 1], true),
        ] {
            cases.add(
                "max_pool2d_with_indices",
                dtype,
                format!("{dtype} kernel {kernel:?}, stride {stride:?}, padding {padding:?}, dilation {dilation:?}, ceil {ceil_mode}"),
                move |d| {
                    let pool = MaxPool { kernel, stride, padding, dilation, ceil_mode };
                    let (values, indices) = data(d, dtype, &[2, 3, 13, 14], View::Transposed, 1)?.max_pool2d_with_indices(&pool)?;
                    Ok(vec![values, indices])
                },
            );
            if dtype.is_float() {
                cases.add("avg_pool2d", dtype, format!("{dtype} kernel {kernel:?}, stride {stride:?}, padding {padding:?}, ceil {ceil_mode}"), move |d| {
                    let x = data(d, dtype, &[2, 3, 13, 14], View::Contiguous, 2)?;
                    [true, false]
                        .into_iter()
                        .map(|count_include_pad| x.avg_pool2d(&AvgPool { kernel, stride, padding, ceil_mode, count_include_pad }))
                        .collect()
                });
            }
        }
    }
    for dtype in [DType::F32, DType::BF16] {
        cases.add(
            "max_pool1d",
            dtype,
            format!("{dtype} with NaN and infinities"),
            move |d| {
                Ok(vec![
                    input(
                        d,
                        dtype,
                        &[3, 257],
                        View::Contiguous,
                        Fill::Special(-1.0, 1.0),
                        3,
                    )?
                    .max_pool1d(&MaxPool {
                        padding: [1],
                        ..MaxPool::new([3])
                    })?,
                ])
            },
        );
        cases.add("max_pool3d", dtype, format!("{dtype} 2x3x2"), move |d| {
            Ok(vec![
                data(d, dtype, &[2, 5, 7, 6], View::Sliced, 4)?
                    .max_pool3d(&MaxPool::new([2, 3, 2]))?,
            ])
        });
        cases.add("avg_pool3d", dtype, format!("{dtype} 2x3x2"), move |d| {
            Ok(vec![
                data(d, dtype, &[2, 5, 7, 6], View::Sliced, 5)?
                    .avg_pool3d(&AvgPool::new([2, 3, 2]))?,
            ])
        });
        cases.add("avg_pool1d", dtype, format!("{dtype} of 1030"), move |d| {
            Ok(vec![
                data(d, dtype, &[1, 1030], View::Negative, 6)?.avg_pool1d(&AvgPool::new([7]))?,
            ])
        });
        cases.add(
            "max_pool2d",
            dtype,
            format!("{dtype} 3x3 over the last of four dimensions"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[2, 3, 13, 14], View::Negative, 11)?.max_pool2d(&MaxPool {
                        padding: [1, 0],
                        ..MaxPool::new([3, 3])
                    })?,
                ])
            },
        );
        cases.add(
            "max_pool1d_with_indices",
            dtype,
            format!("{dtype} of 1030"),
            move |d| {
                let (values, indices) = data(d, dtype, &[2, 1030], View::Sliced, 12)?
                    .max_pool1d_with_indices(&MaxPool {
                        stride: [3],
                        ..MaxPool::new([4])
                    })?;
                Ok(vec![values, indices])
            },
        );
        cases.add(
            "max_pool3d_with_indices",
            dtype,
            format!("{dtype} 2x3x2"),
            move |d| {
                let (values, indices) = data(d, dtype, &[2, 5, 7, 6], View::Contiguous, 13)?
                    .max_pool3d_with_indices(&MaxPool::new([2, 3, 2]))?;
                Ok(vec![values, indices])
            },
        );
        cases.add(
            "adaptive_avg_pool1d",
            dtype,
            format!("{dtype} 257 to 10"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[2, 257], View::Contiguous, 14)?.adaptive_avg_pool1d([10])?,
                ])
            },
        );
        cases.add(
            "adaptive_max_pool1d",
            dtype,
            format!("{dtype} 257 to 10"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[2, 257], View::Contiguous, 15)?.adaptive_max_pool1d([10])?,
                ])
            },
        );
        cases.add(
            "adaptive_avg_pool3d",
            dtype,
            format!("{dtype} 5x7x6 to 2x3x4"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[2, 5, 7, 6], View::Contiguous, 16)?
                        .adaptive_avg_pool3d([2, 3, 4])?,
                ])
            },
        );
        cases.add(
            "adaptive_max_pool3d",
            dtype,
            format!("{dtype} 5x7x6 to 2x3x4"),
            move |d| {
                Ok(vec![
                    data(d, dtype, &[2, 5, 7, 6], View::Contiguous, 17)?
                        .adaptive_max_pool3d([2, 3, 4])?,
                ])
            },
        );
        for out in [1, 4, 5, 13, 20] {
            cases.add(
                "adaptive_avg_pool2d",
                dtype,
                format!("{dtype} 13x10 to {out}x4"),
                move |d| {
                    Ok(vec![
                        data(d, dtype, &[2, 3, 13, 10], View::Contiguous, 7)?
                            .adaptive_avg_pool2d([out, 4])?,
                    ])
                },
            );
            cases.add(
                "adaptive_max_pool2d",
                dtype,
                format!("{dtype} 13x10 to {out}x4"),
                move |d| {
                    Ok(vec![
                        data(d, dtype, &[2, 3, 13, 10], View::Contiguous, 8)?
                            .adaptive_max_pool2d([out, 4])?,
                    ])
                },
            );
        }
    }
}

fn resizes(cases: &mut Cases) {
    for dtype in FLOATS {
        for mode in [
            Interpolate::Nearest,
            Interpolate::Linear {
                align_corners: false,
            },
            Interpolate::Linear {
                align_corners: true,
            },
        ] {
            for (from, to) in [([5, 7], [10, 14]), ([9, 8], [4, 5]), ([3, 1], [7, 4])] {
                cases.add(
                    "interpolate",
                    dtype,
                    format!("{dtype} {mode:?} {from:?} to {to:?}"),
                    move |d| {
                        Ok(vec![
                            data(d, dtype, &[2, 3, from[0], from[1]], View::Transposed, 9)?
                                .interpolate(&to, mode)?,
                        ])
                    },
                );
            }
        }
    }
    cases.add(
        "interpolate",
        DType::U8,
        "u8 nearest over three dimensions",
        |d| {
            Ok(vec![
                data(d, DType::U8, &[2, 3, 4, 5], View::Contiguous, 10)?
                    .interpolate(&[5, 3, 11], Interpolate::Nearest)?,
            ])
        },
    );
}

pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("conv");
    convolutions(&mut cases);
    pools(&mut cases);
    resizes(&mut cases);
    cases
}
