use super::*;
use anymesh_core::ops::loss::LossReduction::{self, *};
use anymesh_core::ops::{GaussianNll, PoissonNll, TripletMargin};

/// Checks a loss against a formula over positions, with every reduction.
#[track_caller]
fn check(
    losses: &[f64],
    shape: &[usize],
    run: impl Fn(LossReduction) -> anymesh_core::Result<Tensor>,
) {
    let each = run(None).expect("valid");
    assert_eq!(each.dims(), shape);
    assert_close(&each, losses, 1e-12);
    let sum: f64 = losses.iter().sum();
    for (reduction, expected) in [(Sum, sum), (Mean, sum / losses.len() as f64)] {
        let all = run(reduction).expect("valid");
        assert_eq!(all.rank(), 0);
        assert_close(&all, &[expected], 1e-12);
    }
}

fn zip(x: &[f64], y: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| f(*x, *y)).collect()
}

#[test]
fn regression_losses_follow_their_definitions() {
    let (a, b) = (values(12, -2.0, 2.0, 1), values(12, -2.0, 2.0, 2));
    let (x, y) = (tensor(&a, &[3, 4]), tensor(&b, &[3, 4]));
    check(&zip(&a, &b, |x, y| (x - y).powi(2)), &[3, 4], |r| {
        x.mse_loss(&y, r)
    });
    check(&zip(&a, &b, |x, y| (x - y).abs()), &[3, 4], |r| {
        x.l1_loss(&y, r)
    });
}

#[test]
fn smooth_l1_divides_by_beta_and_huber_multiplies_by_delta() {
    let (a, b) = ([0.0; 4], [0.25, 0.5, 1.0, -3.0]);
    let (x, y) = (tensor(&a, &[4]), tensor(&b, &[4]));
    check(
        &[0.25 * 0.25 / 2.0 / 0.5, 0.5 - 0.25, 1.0 - 0.25, 3.0 - 0.25],
        &[4],
        |r| x.smooth_l1_loss(&y, 0.5, r),
    );
    check(
        &[0.03125, 0.125, 0.5 * (1.0 - 0.25), 0.5 * (3.0 - 0.25)],
        &[4],
        |r| x.huber_loss(&y, 0.5, r),
    );
    check(&[0.25, 0.5, 1.0, 3.0], &[4], |r| {
        x.smooth_l1_loss(&y, 0.0, r)
    });
}

#[test]
fn binary_cross_entropy_clamps_logarithms_and_weighs_positives() {
    let (p, t) = ([0.0, 1.0, 0.3, 0.9], [1.0, 1.0, 0.25, 0.0]);
    let term = |p: f64, t: f64| -(t * p.ln().max(-100.0) + (1.0 - t) * (1.0 - p).ln().max(-100.0));
    check(&zip(&p, &t, term), &[4], |r| {
        tensor(&p, &[4]).bce_loss(&tensor(&t, &[4]), r)
    });

    let (x, t) = (values(6, -5.0, 5.0, 1), values(6, 0.0, 1.0, 2));
    let weight = [3.0, 0.5];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let expected: Vec<f64> = (0..6)
        .map(|i| {
            -(weight[i % 2] * t[i] * sigmoid(x[i]).ln() + (1.0 - t[i]) * (1.0 - sigmoid(x[i])).ln())
        })
        .collect();
    check(&expected, &[3, 2], |r| {
        tensor(&x, &[3, 2]).bce_with_logits_loss(
            &tensor(&t, &[3, 2]),
            Some(&tensor(&weight, &[2])),
            r,
        )
    });
    let far = tensor(&[-1000.0, 1000.0], &[2])
        .bce_with_logits_loss(&tensor(&[1.0, 1.0], &[2]), Option::None, None)
        .expect("valid");
    assert_close(&far, &[1000.0, 0.0], 0.0);
}

#[test]
fn divergence_is_zero_where_the_target_is_zero() {
    let (x, t) = ([-1.0, f64::NEG_INFINITY, -2.0], [0.5, 0.0, 0.25]);
    check(
        &[0.5 * (0.5f64.ln() + 1.0), 0.0, 0.25 * (0.25f64.ln() + 2.0)],
        &[3],
        |r| tensor(&x, &[3]).kl_div_loss(&tensor(&t, &[3]), false, r),
    );
    let (x, t) = (values(5, -3.0, 0.0, 1), values(5, -3.0, 0.0, 2));
    check(&zip(&x, &t, |x, t| t.exp() * (t - x)), &[5], |r| {
        tensor(&x, &[5]).kl_div_loss(&tensor(&t, &[5]), true, r)
    });
}

#[test]
fn margin_losses_follow_their_definitions() {
    let (x, other) = (values(4, -2.0, 2.0, 1), values(4, -2.0, 2.0, 2));
    let sign = [1.0, -1.0, 1.0, -1.0];
    let (a, b, t) = (tensor(&x, &[4]), tensor(&other, &[4]), tensor(&sign, &[4]));
    check(&zip(&x, &sign, |x, t| (1.0 - t * x).max(0.0)), &[4], |r| {
        a.hinge_loss(&t, 1.0, r)
    });
    check(
        &zip(
            &x,
            &sign,
            |x, t| if t == 1.0 { x } else { (0.5 - x).max(0.0) },
        ),
        &[4],
        |r| a.hinge_embedding_loss(&t, 0.5, r),
    );
    let gaps: Vec<f64> = (0..4)
        .map(|i| (0.25 - sign[i] * (x[i] - other[i])).max(0.0))
        .collect();
    check(&gaps, &[4], |r| a.margin_ranking_loss(&b, &t, 0.25, r));
}

#[test]
fn vector_losses_follow_their_definitions() {
    let [a, p, n] = [1, 2, 3].map(|seed| values(4 * 3, -2.0, 2.0, seed));
    let [x, y, z] = [&a, &p, &n].map(|v| tensor(v, &[4, 3]));
    let sign = [1.0, -1.0, -1.0, 1.0];
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let cosines: Vec<f64> = a
        .chunks(3)
        .zip(p.chunks(3))
        .map(|(x, y)| dot(x, y) / (dot(x, x) * dot(y, y)).sqrt())
        .collect();
    check(
        &zip(&cosines, &sign, |c, t| {
            if t == 1.0 {
                1.0 - c
            } else {
                (c - 0.2).max(0.0)
            }
        }),
        &[4],
        |r| x.cosine_embedding_loss(&y, &tensor(&sign, &[4]), 0.2, r),
    );
    for order in [1.0, 2.0, 3.0] {
        let distance = |x: &[f64], y: &[f64]| {
            x.iter()
                .zip(y)
                .map(|(x, y)| (x - y + 1e-6).abs().powf(order))
                .sum::<f64>()
                .powf(1.0 / order)
        };
        let expected: Vec<f64> = (0..4)
            .map(|i| {
                (distance(&a[3 * i..][..3], &p[3 * i..][..3])
                    - distance(&a[3 * i..][..3], &n[3 * i..][..3])
                    + 1.0)
                    .max(0.0)
            })
            .collect();
        check(&expected, &[4], |r| {
            x.triplet_margin_loss(
                &y,
                &z,
                &TripletMargin {
                    p: order,
                    reduction: r,
                    ..Default::default()
                },
            )
        });
    }
}

#[test]
fn likelihoods_follow_their_definitions() {
    let (x, t) = (values(4, -2.0, 2.0, 1), values(4, -2.0, 2.0, 2));
    let var: [f64; 4] = [0.5, 1e-9, 2.0, 1.0];
    let tau = std::f64::consts::TAU;
    let gaussian = |full: f64| -> Vec<f64> {
        (0..4)
            .map(|i| {
                0.5 * (var[i].max(1e-3).ln() + (x[i] - t[i]).powi(2) / var[i].max(1e-3)) + full
            })
            .collect()
    };
    let (a, b, v) = (tensor(&x, &[4]), tensor(&t, &[4]), tensor(&var, &[4]));
    check(&gaussian(0.0), &[4], |r| {
        a.gaussian_nll_loss(
            &b,
            &v,
            &GaussianNll {
                eps: 1e-3,
                reduction: r,
                ..Default::default()
            },
        )
    });
    check(&gaussian(0.5 * tau.ln()), &[4], |r| {
        a.gaussian_nll_loss(
            &b,
            &v,
            &GaussianNll {
                full: true,
                eps: 1e-3,
                reduction: r,
            },
        )
    });

    let counts = [0.0, 1.0, 2.0, 7.0];
    let c = tensor(&counts, &[4]);
    check(&zip(&x, &counts, |x, t| x.exp() - t * x), &[4], |r| {
        a.poisson_nll_loss(
            &c,
            &PoissonNll {
                eps: 0.0,
                reduction: r,
                ..Default::default()
            },
        )
    });
    let stirling = |t: f64| {
        if t > 1.0 {
            t * t.ln() - t + 0.5 * (tau * t).ln()
        } else {
            0.0
        }
    };
    let rates = [0.5, 2.0, 3.0, 4.0];
    let full = zip(&rates, &counts, |x, t| {
        x - t * (x + 1e-8).ln() + stirling(t)
    });
    check(&full, &[4], |r| {
        tensor(&rates, &[4]).poisson_nll_loss(
            &c,
            &PoissonNll {
                log_input: false,
                full: true,
                reduction: r,
                ..Default::default()
            },
        )
    });
}

#[test]
fn the_mean_of_no_losses_is_nan_and_their_sum_zero() {
    let none = tensor(&[], &[0]);
    assert_close(
        &none.mse_loss(&none, Mean).expect("valid"),
        &[f64::NAN],
        0.0,
    );
    assert_close(&none.mse_loss(&none, Sum).expect("valid"), &[0.0], 0.0);
    assert_eq!(none.mse_loss(&none, None).expect("valid").dims(), [0]);
}

#[test]
fn losses_of_small_floats_add_up_in_f32() {
    let x = Tensor::from_slice(&vec![1f32; 5000], [5000], &*DEVICE)
        .and_then(|x| x.cast(DType::F16))
        .expect("castable");
    let zero = tensor(&[0.0; 5000], &[5000])
        .cast(DType::F16)
        .expect("castable");
    let sum = x.l1_loss(&zero, Sum).expect("valid");
    assert_eq!(sum.dtype(), DType::F32);
    assert_close(&sum, &[5000.0], 0.0);
}
