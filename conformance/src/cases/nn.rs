//! Cases for softmax, the norms, gated units, rotary embedding, similarity and dropout.

use super::{Cases, Fill, View, input, input::to_bytes, random_values};
use anymesh_core::{
    DType::{self, *},
    Device, Result, Tensor,
    ops::{NormOptions, Rng, RopeOptions, RopeStyle, norm, softmax as sm},
};

pub(super) const FLOATS: [DType; 4] = [F32, F16, BF16, F64];
const LAYOUTS: [View; 5] = View::ALL;
/// Row lengths on both sides of what fused kernels treat differently.
const LENGTHS: [usize; 8] = [1, 2, 31, 256, 257, 1000, 4099, 8193];

/// An input with values that neither overflow nor vanish.
pub(super) fn plain(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
    input(
        device,
        dtype,
        shape,
        View::Contiguous,
        Fill::Uniform(-3.0, 3.0),
        seed,
    )
}

/// An input with given values.
pub(super) fn exactly(
    device: &Device,
    dtype: DType,
    shape: &[usize],
    values: &[f64],
) -> Result<Tensor> {
    Tensor::from_bytes(&to_bytes(values, dtype), dtype, shape, device)
}

/// Softmax and its logarithm.
pub(super) fn softmax() -> Cases {
    let mut cases = Cases::new("softmax");
    type Run = fn(&Tensor, i64) -> Result<Tensor>;
    let ops: [(&'static str, Run, Run); 2] = [
        ("softmax", Tensor::softmax, sm::decomposed),
        ("log_softmax", Tensor::log_softmax, sm::log_decomposed),
    ];
    for (op, run, decomposed) in ops {
        for dtype in FLOATS {
            for n in LENGTHS {
                cases.add(op, dtype, format!("{dtype} [3, {n}]"), move |d| {
                    let x = plain(d, dtype, &[3, n], n as u64)?;
                    Ok(vec![run(&x, -1)?, decomposed(&x, -1)?])
                });
            }
            for shape in [[5000, 3], [1000, 33], [1, 20_000], [257, 64]] {
                cases.add(op, dtype, format!("{dtype} {shape:?}"), move |d| {
                    Ok(vec![run(&plain(d, dtype, &shape, 5)?, 1)?])
                });
            }
            for axis in 0..3 {
                cases.add(
                    op,
                    dtype,
                    format!("{dtype} [5, 7, 33] axis {axis}"),
                    move |d| {
                        let x = plain(d, dtype, &[5, 7, 33], 6)?;
                        Ok(vec![run(&x, axis)?, decomposed(&x, axis)?])
                    },
                );
            }
        }
        for view in LAYOUTS {
            for dtype in [F32, BF16] {
                for axis in [0, 2] {
                    cases.add(
                        op,
                        dtype,
                        format!("{dtype} {view:?} axis {axis}"),
                        move |d| {
                            Ok(vec![run(
                                &input(d, dtype, &[4, 6, 65], view, Fill::Uniform(-3.0, 3.0), 7)?,
                                axis,
                            )?])
                        },
                    );
                }
            }
        }
        for dtype in [F32, F16, BF16] {
            for n in [5, 300, 5000] {
                cases.add(
                    op,
                    dtype,
                    format!("{dtype} of large values, [4, {n}]"),
                    move |d| {
                        Ok(vec![run(
                            &input(
                                d,
                                dtype,
                                &[4, n],
                                View::Contiguous,
                                Fill::Integers(9_990, 10_000),
                                8,
                            )?,
                            1,
                        )?])
                    },
                );
                cases.add(
                    op,
                    dtype,
                    format!("{dtype} with -inf, and a row of only -inf, [3, {n}]"),
                    move |d| {
                        let mut values = random_values(3 * n, Fill::Uniform(-3.0, 3.0), 9);
                        values
                            .iter_mut()
                            .step_by(3)
                            .for_each(|v| *v = f64::NEG_INFINITY);
                        values[n..2 * n].fill(f64::NEG_INFINITY);
                        let x = exactly(d, dtype, &[3, n], &values)?;
                        Ok(vec![run(&x, 1)?, decomposed(&x, 1)?])
                    },
                );
                cases.add(
                    op,
                    dtype,
                    format!("{dtype} with NaN and +inf, [3, {n}]"),
                    move |d| {
                        let mut values = random_values(3 * n, Fill::Uniform(-3.0, 3.0), 10);
                        (values[1], values[n]) = (f64::NAN, f64::INFINITY);
                        let x = exactly(d, dtype, &[3, n], &values)?;
                        Ok(vec![run(&x, 1)?, decomposed(&x, 1)?])
                    },
                );
            }
        }
        cases.add(op, F32, "empty batch", move |d| {
            Ok(vec![run(&plain(d, F32, &[0, 5], 1)?, 1)?])
        });
        cases.add(op, F32, "empty axis", move |d| {
            Ok(vec![run(&plain(d, F32, &[5, 0], 1)?, 1)?])
        });
    }
    cases
}

/// Layer, RMS, group, instance and batch norm.
pub(super) fn norms() -> Cases {
    let mut cases = Cases::new("norm");
    for dtype in FLOATS {
        for n in LENGTHS {
            cases.add("layer_norm", dtype, format!("{dtype} [5, {n}]"), move |d| {
                let (x, w, b) = (
                    plain(d, dtype, &[5, n], 1)?,
                    plain(d, dtype, &[n], 2)?,
                    plain(d, dtype, &[n], 3)?,
                );
                let spec = norm::Norm {
                    rms: false,
                    eps: 1e-5,
                    weight: Some(&w),
                    bias: Some(&b),
                    groups: 1,
                    channels: n,
                    inner: 1,
                };
                Ok(vec![
                    x.layer_norm(&NormOptions::new().weight(&w).bias(&b))?,
                    norm::decomposed(&x, &spec)?,
                ])
            });
            cases.add("rms_norm", dtype, format!("{dtype} [5, {n}]"), move |d| {
                let (x, w) = (plain(d, dtype, &[5, n], 4)?, plain(d, dtype, &[n], 5)?);
                let spec = norm::Norm {
                    rms: true,
                    eps: 1e-6,
                    weight: Some(&w),
                    bias: None,
                    groups: 1,
                    channels: n,
                    inner: 1,
                };
                Ok(vec![
                    x.rms_norm(&NormOptions::new().weight(&w).eps(1e-6))?,
                    norm::decomposed(&x, &spec)?,
                ])
            });
        }
        // A sum and its norm are those of the two ops, to the bit.
        for n in LENGTHS {
            for rms in [false, true] {
                let op = if rms {
                    "add_rms_norm"
                } else {
                    "add_layer_norm"
                };
                cases.add(op, dtype, format!("{dtype} [5, {n}]"), move |d| {
                    let (x, y) = (plain(d, dtype, &[5, n], 6)?, plain(d, dtype, &[5, n], 7)?);
                    let (w, b) = (plain(d, dtype, &[n], 8)?, plain(d, dtype, &[n], 9)?);
                    let options = NormOptions::new().weight(&w);
                    let options = if rms { options } else { options.bias(&b) };
                    let (sum, normed) = match rms {
                        true => x.add_rms_norm(&y, &options)?,
                        false => x.add_layer_norm(&y, &options)?,
                    };
                    let apart = x.add(&y)?;
                    let alone = match rms {
                        true => apart.rms_norm(&options)?,
                        false => apart.layer_norm(&options)?,
                    };
                    let same = [sum.eq(&apart)?, normed.eq(&alone)?];
                    Ok([sum, normed].into_iter().chain(same).collect())
                });
            }
        }
        for groups in [1, 2, 3, 6] {
            cases.add(
                "group_norm",
                dtype,
                format!("{dtype} [3, 6, 5, 7] in {groups} groups"),
                move |d| {
                    let (x, w, b) = (
                        plain(d, dtype, &[3, 6, 5, 7], 6)?,
                        plain(d, F32, &[6], 7)?,
                        plain(d, F32, &[6], 8)?,
                    );
                    let spec = norm::Norm {
                        rms: false,
                        eps: 1e-5,
                        weight: Some(&w),
                        bias: Some(&b),
                        groups,
                        channels: 6 / groups,
                        inner: 35,
                    };
                    Ok(vec![
                        x.group_norm(groups, &NormOptions::new().weight(&w).bias(&b))?,
                        norm::decomposed(&x, &spec)?,
                    ])
                },
            );
        }
        cases.add(
            "group_norm",
            dtype,
            format!("{dtype} [2, 8, 40, 41] in 2 groups, long rows"),
            move |d| {
                let (x, w) = (
                    plain(d, dtype, &[2, 8, 40, 41], 9)?,
                    plain(d, dtype, &[8], 10)?,
                );
                Ok(vec![x.group_norm(2, &NormOptions::new().weight(&w))?])
            },
        );
        for shape in [&[4, 3, 10][..], &[2, 5, 17, 19], &[2, 2, 3, 4, 5]] {
            let detail = format!("{dtype} {shape:?}");
            cases.add("instance_norm", dtype, detail.clone(), move |d| {
                let (x, w, b) = (
                    plain(d, dtype, shape, 11)?,
                    plain(d, F32, &[shape[1]], 12)?,
                    plain(d, F32, &[shape[1]], 13)?,
                );
                Ok(vec![
                    x.instance_norm(&NormOptions::new().weight(&w).bias(&b))?,
                    x.instance_norm(&NormOptions::new())?,
                ])
            });
            cases.add("batch_norm_train", dtype, detail.clone(), move |d| {
                let (x, w, b) = (
                    plain(d, dtype, shape, 14)?,
                    plain(d, F32, &[shape[1]], 15)?,
                    plain(d, F32, &[shape[1]], 16)?,
                );
                let done = x.batch_norm_train(&NormOptions::new().weight(&w).bias(&b))?;
                let (mean, var) = done.update_running(&w, &b, 0.1)?;
                Ok(vec![done.out, done.mean, done.var, mean, var])
            });
            cases.add("batch_norm", dtype, detail, move |d| {
                let (x, mean, w) = (
                    plain(d, dtype, shape, 17)?,
                    plain(d, F32, &[shape[1]], 18)?,
                    plain(d, F32, &[shape[1]], 19)?,
                );
                let var = input(
                    d,
                    F32,
                    &[shape[1]],
                    View::Contiguous,
                    Fill::Uniform(0.1, 4.0),
                    20,
                )?;
                Ok(vec![x.batch_norm(
                    &mean,
                    &var,
                    &NormOptions::new().weight(&w),
                )?])
            });
        }
        cases.add(
            "layer_norm",
            dtype,
            format!("{dtype} over two dimensions"),
            move |d| {
                let (x, w, b) = (
                    plain(d, dtype, &[3, 4, 5, 6], 21)?,
                    plain(d, dtype, &[5, 6], 22)?,
                    plain(d, dtype, &[5, 6], 23)?,
                );
                Ok(vec![
                    x.layer_norm(&NormOptions::new().dims(2).weight(&w).bias(&b))?,
                    x.layer_norm(&NormOptions::new().dims(4))?,
                ])
            },
        );
        cases.add(
            "layer_norm",
            dtype,
            format!("{dtype} far from zero"),
            move |d| {
                Ok(vec![
                    input(
                        d,
                        dtype,
                        &[4, 1000],
                        View::Contiguous,
                        Fill::Integers(30, 34),
                        24,
                    )?
                    .layer_norm(&NormOptions::new())?,
                ])
            },
        );
        cases.add(
            "layer_norm",
            dtype,
            format!("{dtype} many short rows"),
            move |d| {
                Ok(vec![
                    plain(d, dtype, &[5000, 3], 25)?.layer_norm(&NormOptions::new())?,
                ])
            },
        );
        cases.add("rms_norm", dtype, format!("{dtype} many rows"), move |d| {
            Ok(vec![
                plain(d, dtype, &[600, 128], 26)?.rms_norm(&NormOptions::new().eps(1e-6))?,
            ])
        });
        for other in [F32, F16, BF16] {
            cases.add(
                "layer_norm",
                dtype,
                format!("{dtype} with {other} parameters"),
                move |d| {
                    let (x, w, b) = (
                        plain(d, dtype, &[7, 130], 27)?,
                        plain(d, other, &[130], 28)?,
                        plain(d, F32, &[130], 29)?,
                    );
                    Ok(vec![
                        x.layer_norm(&NormOptions::new().weight(&w).bias(&b))?,
                        x.rms_norm(&NormOptions::new().weight(&w))?,
                    ])
                },
            );
        }
    }
    for view in LAYOUTS {
        for dtype in [F32, F16] {
            cases.add("layer_norm", dtype, format!("{dtype} {view:?}"), move |d| {
                let x = input(d, dtype, &[6, 4, 70], view, Fill::Uniform(-3.0, 3.0), 30)?;
                let w = input(d, dtype, &[70], view, Fill::Uniform(-3.0, 3.0), 31)?;
                Ok(vec![
                    x.layer_norm(&NormOptions::new().weight(&w))?,
                    x.rms_norm(&NormOptions::new().weight(&w))?,
                ])
            });
            cases.add(
                "batch_norm_train",
                dtype,
                format!("{dtype} {view:?}"),
                move |d| {
                    let done = input(d, dtype, &[6, 4, 70], view, Fill::Uniform(-3.0, 3.0), 32)?
                        .batch_norm_train(&NormOptions::new())?;
                    Ok(vec![done.out, done.mean, done.var])
                },
            );
        }
    }
    cases.add("layer_norm", F32, "empty batch", |d| {
        Ok(vec![
            plain(d, F32, &[0, 5], 1)?.layer_norm(&NormOptions::new())?,
        ])
    });
    cases
}

/// Rotary embedding, gated units, directions.
pub(super) fn features() -> Cases {
    let mut cases = Cases::new("features");
    for dtype in FLOATS {
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            for shape in [&[7, 8][..], &[2, 3, 65, 64], &[1, 130, 2], &[2, 0, 4]] {
                cases.add(
                    "rope",
                    dtype,
                    format!("{dtype} {style:?} {shape:?}"),
                    move |d| {
                        let (cos, sin) = Tensor::rope_tables(
                            shape[shape.len() - 2],
                            shape[shape.len() - 1],
                            &RopeOptions {
                                offset: 1000,
                                ..Default::default()
                            },
                            d,
                        )?;
                        Ok(vec![plain(d, dtype, shape, 1)?.rope(&cos, &sin, style)?])
                    },
                );
            }
            for view in LAYOUTS {
                cases.add(
                    "rope",
                    dtype,
                    format!("{dtype} {style:?} {view:?}"),
                    move |d| {
                        let (cos, sin) = Tensor::rope_tables(
                            9,
                            16,
                            &RopeOptions {
                                base: 500.0,
                                ..Default::default()
                            },
                            d,
                        )?;
                        Ok(vec![
                            input(d, dtype, &[2, 3, 9, 16], view, Fill::Uniform(-3.0, 3.0), 2)?
                                .rope(&cos, &sin, style)?,
                        ])
                    },
                );
            }
        }
        for view in if dtype == F32 {
            &LAYOUTS[..]
        } else {
            &LAYOUTS[..1]
        }
        .iter()
        .copied()
        {
            let wide =
                move |d: &Device| input(d, dtype, &[5, 6, 34], view, Fill::Uniform(-5.0, 5.0), 3);
            cases.add("swiglu", dtype, format!("{dtype} {view:?}"), move |d| {
                Ok(vec![wide(d)?.swiglu()?])
            });
            cases.add("geglu", dtype, format!("{dtype} {view:?}"), move |d| {
                Ok(vec![wide(d)?.geglu()?])
            });
            cases.add("glu", dtype, format!("{dtype} {view:?}"), move |d| {
                Ok(vec![wide(d)?.glu()?])
            });
            cases.add("swiglu2", dtype, format!("{dtype} {view:?}"), move |d| {
                Ok(vec![wide(d)?.swiglu2(&plain(d, dtype, &[5, 6, 34], 4)?)?])
            });
            cases.add("geglu2", dtype, format!("{dtype} {view:?}"), move |d| {
                Ok(vec![wide(d)?.geglu2(&plain(d, dtype, &[5, 6, 34], 4)?)?])
            });
        }
        for p in [1.0, 2.0, 3.5, f64::INFINITY] {
            for axis in [0, 1] {
                cases.add(
                    "normalize",
                    dtype,
                    format!("{dtype} order {p} axis {axis}"),
                    move |d| {
                        Ok(vec![
                            input(
                                d,
                                dtype,
                                &[40, 33],
                                View::Transposed,
                                Fill::Uniform(-3.0, 3.0),
                                5,
                            )?
                            .normalize(p, axis, 1e-12)?,
                        ])
                    },
                );
            }
        }
        for axis in [0, 1] {
            cases.add(
                "cosine_similarity",
                dtype,
                format!("{dtype} axis {axis}"),
                move |d| {
                    Ok(vec![plain(d, dtype, &[40, 33], 6)?.cosine_similarity(
                        &plain(d, dtype, &[40, 33], 7)?,
                        axis,
                        1e-8,
                    )?])
                },
            );
        }
    }
    cases
}

/// The mask is exact: it is a comparison of integers in disguise.
pub(super) fn dropout() -> Cases {
    let mut cases = Cases::new("dropout");
    for p in [0.0, 0.1, 0.5, 0.9, 1.0] {
        cases.add("dropout_mask", Bool, format!("p {p}"), move |d| {
            Ok(vec![Tensor::dropout_mask(
                [3, 333],
                p,
                d,
                Rng {
                    seed: 0x1234_5678_9abc_def0,
                    stream: 3,
                },
            )?])
        });
        for dtype in FLOATS {
            for view in [View::Contiguous, View::Transposed] {
                cases.add(
                    "dropout",
                    dtype,
                    format!("{dtype} p {p} {view:?}"),
                    move |d| {
                        Ok(vec![
                            input(d, dtype, &[21, 50], view, Fill::Uniform(-3.0, 3.0), 1)?
                                .dropout(p, Rng::new(5))?,
                        ])
                    },
                );
            }
            cases.add("dropout_add", dtype, format!("{dtype} p {p}"), move |d| {
                Ok(vec![plain(d, dtype, &[21, 50], 2)?.dropout_add(
                    &plain(d, dtype, &[21, 50], 3)?,
                    p,
                    Rng::new(6),
                )?])
            });
        }
    }
    cases
}
