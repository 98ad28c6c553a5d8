//! Cases for the losses.

use super::{
    Cases, Fill, View, input,
    nn::{FLOATS, plain},
};
use anymesh_core::{
    DType::{self, *},
    Device, Result, Tensor,
    ops::{
        GaussianNll, PoissonNll, TripletMargin, cross_entropy::CrossEntropyOptions,
        loss::LossReduction,
    },
};

const REDUCTIONS: [LossReduction; 3] =
    [LossReduction::None, LossReduction::Mean, LossReduction::Sum];

fn uniform(
    device: &Device,
    dtype: DType,
    shape: &[usize],
    low: f64,
    high: f64,
    seed: u64,
) -> Result<Tensor> {
    input(
        device,
        dtype,
        shape,
        View::Contiguous,
        Fill::Uniform(low, high),
        seed,
    )
}

/// -1 and 1.
fn signs(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
    let bits = super::random_values(shape.iter().product(), Fill::Integers(0, 1), seed);
    super::nn::exactly(
        device,
        dtype,
        shape,
        &bits.iter().map(|b| 2.0 * b - 1.0).collect::<Vec<_>>(),
    )
}

/// Losses that compare tensors position by position or vector by vector.
pub(super) fn pointwise() -> Cases {
    let mut cases = Cases::new("loss");
    type Run = fn(&Device, DType, LossReduction) -> Result<Tensor>;
    const SHAPE: [usize; 2] = [13, 57];
    let ops: [(&'static str, Run); 14] = [
        ("mse_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.mse_loss(&plain(d, t, &SHAPE, 2)?, r)
        }),
        ("l1_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.l1_loss(&plain(d, t, &SHAPE, 2)?, r)
        }),
        ("smooth_l1_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.smooth_l1_loss(&plain(d, t, &SHAPE, 2)?, 1.5, r)
        }),
        ("huber_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.huber_loss(&plain(d, t, &SHAPE, 2)?, 1.5, r)
        }),
        ("bce_loss", |d, t, r| {
            uniform(d, t, &SHAPE, 0.0, 1.0, 1)?.bce_loss(&uniform(d, t, &SHAPE, 0.0, 1.0, 2)?, r)
        }),
        ("bce_with_logits_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.bce_with_logits_loss(
                &uniform(d, t, &SHAPE, 0.0, 1.0, 2)?,
                Some(&uniform(d, F32, &[57], 0.5, 2.0, 3)?),
                r,
            )
        }),
        ("kl_div_loss", |d, t, r| {
            uniform(d, t, &SHAPE, -7.0, -1.0, 1)?.kl_div_loss(
                &uniform(d, t, &SHAPE, 0.0, 0.1, 2)?,
                false,
                r,
            )
        }),
        ("hinge_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.hinge_loss(&signs(d, t, &SHAPE, 2)?, 1.0, r)
        }),
        ("hinge_embedding_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.hinge_embedding_loss(&signs(d, t, &SHAPE, 2)?, 1.0, r)
        }),
        ("margin_ranking_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.margin_ranking_loss(
                &plain(d, t, &SHAPE, 2)?,
                &signs(d, t, &SHAPE, 3)?,
                0.5,
                r,
            )
        }),
        ("cosine_embedding_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.cosine_embedding_loss(
                &plain(d, t, &SHAPE, 2)?,
                &signs(d, t, &[13], 3)?,
                0.1,
                r,
            )
        }),
        ("triplet_margin_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.triplet_margin_loss(
                &plain(d, t, &SHAPE, 2)?,
                &plain(d, t, &SHAPE, 3)?,
                &TripletMargin {
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
        ("gaussian_nll_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.gaussian_nll_loss(
                &plain(d, t, &SHAPE, 2)?,
                &uniform(d, t, &[13, 1], 0.1, 2.0, 3)?,
                &GaussianNll {
                    full: true,
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
        ("poisson_nll_loss", |d, t, r| {
            plain(d, t, &SHAPE, 1)?.poisson_nll_loss(
                &input(d, t, &SHAPE, View::Contiguous, Fill::Integers(0, 9), 2)?,
                &PoissonNll {
                    full: true,
                    reduction: r,
                    ..Default::default()
                },
            )
        }),
    ];
    for (op, run) in ops {
        for dtype in FLOATS {
            for reduction in if dtype == F32 {
                &REDUCTIONS[..]
            } else {
                &REDUCTIONS[..2]
            }
            .iter()
            .copied()
            {
                cases.add(op, dtype, format!("{dtype} {reduction:?}"), move |d| {
                    Ok(vec![run(d, dtype, reduction)?])
                });
            }
        }
    }
    cases
}

/// Cross-entropy and negative log-likelihood.
pub(super) fn classes() -> Cases {
    let mut cases = Cases::new("loss");
    for dtype in FLOATS {
        for reduction in if dtype == F32 {
            &REDUCTIONS[..]
        } else {
            &REDUCTIONS[..2]
        }
        .iter()
        .copied()
        {
            for smoothing in [0.0, 0.1] {
                for weighted in [false, true] {
                    let options =
                        move |d: &Device, classes: usize| -> Result<CrossEntropyOptions> {
                            let weight = if weighted {
                                Some(uniform(d, F32, &[classes], 0.2, 2.0, 9)?)
                            } else {
                                None
                            };
                            Ok(CrossEntropyOptions {
                                weight,
                                ignore_index: Some(3),
                                label_smoothing: smoothing,
                                reduction,
                            })
                        };
                    let detail =
                        format!("{dtype} {reduction:?} smoothing {smoothing} weights {weighted}");
                    cases.add(
                        "cross_entropy",
                        dtype,
                        format!("{detail} classes"),
                        move |d| {
                            let target =
                                input(d, I32, &[31], View::Contiguous, Fill::Integers(0, 10), 2)?;
                            let pixels = input(
                                d,
                                I32,
                                &[2, 5, 4],
                                View::Contiguous,
                                Fill::Integers(0, 6),
                                3,
                            )?;
                            Ok(vec![
                                plain(d, dtype, &[31, 11], 1)?
                                    .cross_entropy(&target, &options(d, 11)?)?,
                                plain(d, dtype, &[2, 7, 5, 4], 4)?
                                    .cross_entropy(&pixels, &options(d, 7)?)?,
                            ])
                        },
                    );
                    cases.add(
                        "cross_entropy",
                        dtype,
                        format!("{detail} probabilities"),
                        move |d| {
                            let target = uniform(d, dtype, &[31, 11], 0.0, 0.2, 5)?;
                            Ok(vec![
                                plain(d, dtype, &[31, 11], 6)?
                                    .cross_entropy(&target, &options(d, 11)?)?,
                            ])
                        },
                    );
                }
            }
            cases.add(
                "cross_entropy",
                dtype,
                format!("{dtype} {reduction:?} i64 classes"),
                move |d| {
                    let target = input(d, I64, &[31], View::Sliced, Fill::Integers(0, 10), 2)?;
                    Ok(vec![plain(d, dtype, &[31, 11], 1)?.cross_entropy(
                        &target,
                        &CrossEntropyOptions {
                            reduction,
                            ..Default::default()
                        },
                    )?])
                },
            );
            cases.add(
                "nll_loss",
                dtype,
                format!("{dtype} {reduction:?}"),
                move |d| {
                    let target =
                        input(d, I32, &[31, 3], View::Transposed, Fill::Integers(0, 10), 2)?;
                    let weight = uniform(d, dtype, &[11], 0.2, 2.0, 9)?;
                    Ok(vec![
                        uniform(d, dtype, &[31, 11, 3], -5.0, 0.0, 1)?.nll_loss(
                            &target,
                            Some(&weight),
                            Some(1),
                            reduction,
                        )?,
                    ])
                },
            );
            for classes in [1, 257, 5003] {
                cases.add(
                    "cross_entropy",
                    dtype,
                    format!("{dtype} {reduction:?} {classes} classes"),
                    move |d| {
                        let target = input(
                            d,
                            I32,
                            &[19],
                            View::Contiguous,
                            Fill::Integers(0, classes as i64 - 1),
                            2,
                        )?;
                        let x = input(
                            d,
                            dtype,
                            &[19, classes],
                            View::Sliced,
                            Fill::Uniform(-20.0, 20.0),
                            7,
                        )?;
                        Ok(vec![x.cross_entropy(
                            &target,
                            &CrossEntropyOptions {
                                reduction,
                                ..Default::default()
                            },
                        )?])
                    },
                );
            }
        }
    }
    cases
}
