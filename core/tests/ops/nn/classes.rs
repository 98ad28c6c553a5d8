use super::*;
use anymesh_core::{
    Error,
    ops::{
        cross_entropy::CrossEntropyOptions,
        loss::LossReduction::{self, *},
    },
};

/// Logits `[n, c, inner]` with targets `[n, inner]`.
struct Problem {
    n: usize,
    c: usize,
    inner: usize,
    x: Vec<f64>,
    target: Vec<i64>,
    weight: Vec<f64>,
}

impl Problem {
    fn new(n: usize, c: usize, inner: usize) -> Self {
        let target = values(n * inner, 0.0, c as f64, 2)
            .iter()
            .map(|v| *v as i64)
            .collect();
        Self {
            n,
            c,
            inner,
            x: values(n * c * inner, -3.0, 3.0, 1),
            target,
            weight: values(c, 0.2, 2.0, 3),
        }
    }

    fn log_softmax(&self, position: usize) -> Vec<f64> {
        let (i, k) = (position / self.inner, position % self.inner);
        let row: Vec<f64> = (0..self.c)
            .map(|c| self.x[(i * self.c + c) * self.inner + k])
            .collect();
        let lse = row.iter().map(|v| v.exp()).sum::<f64>().ln();
        row.iter().map(|v| v - lse).collect()
    }

    /// PyTorch's definition: the smooth part sums `w[k]` over all classes, and the mean divides by
    /// the weights of the targets.
    fn hard(
        &self,
        weighted: bool,
        ignore: i64,
        smoothing: f64,
        reduction: LossReduction,
    ) -> Vec<f64> {
        let weight = |c: usize| if weighted { self.weight[c] } else { 1.0 };
        let (mut losses, mut total) = (vec![], 0.0);
        for (position, &y) in self.target.iter().enumerate() {
            if y == ignore {
                losses.push(0.0);
                continue;
            }
            let log = self.log_softmax(position);
            let smooth: f64 = (0..self.c).map(|c| -weight(c) * log[c]).sum();
            losses.push(
                (1.0 - smoothing) * -weight(y as usize) * log[y as usize]
                    + smoothing / self.c as f64 * smooth,
            );
            total += weight(y as usize);
        }
        let sum: f64 = losses.iter().sum();
        match reduction {
            None => losses,
            Sum => vec![sum],
            Mean => vec![sum / total],
        }
    }

    fn logits(&self) -> Tensor {
        let shape: &[usize] = if self.inner == 1 {
            &[self.n, self.c]
        } else {
            &[self.n, self.c, self.inner]
        };
        tensor(&self.x, shape)
    }

    fn targets(&self) -> Tensor {
        let shape: &[usize] = if self.inner == 1 {
            &[self.n]
        } else {
            &[self.n, self.inner]
        };
        ints(&self.target, shape)
    }
}

#[test]
fn cross_entropy_weighs_smooths_ignores_and_averages_as_pytorch_does() {
    for (n, c, inner) in [(7, 4, 1), (3, 5, 6)] {
        let problem = Problem::new(n, c, inner);
        for weighted in [false, true] {
            for smoothing in [0.0, 0.2, 1.0] {
                for ignore in [-100, 1] {
                    for reduction in [None, Mean, Sum] {
                        let weight = weighted.then(|| tensor(&problem.weight, &[c]));
                        let options = CrossEntropyOptions {
                            weight,
                            ignore_index: Some(ignore),
                            label_smoothing: smoothing,
                            reduction,
                        };
                        let expected = problem.hard(weighted, ignore, smoothing, reduction);
                        for targets in [
                            problem.targets(),
                            problem.targets().cast(DType::I32).expect("castable"),
                        ] {
                            let loss = problem
                                .logits()
                                .cross_entropy(&targets, &options)
                                .expect("valid");
                            assert_eq!(
                                loss.dims(),
                                if reduction == None {
                                    targets.dims()
                                } else {
                                    &[]
                                }
                            );
                            assert_close(&loss, &expected, 1e-12);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn nll_loss_of_log_softmax_is_cross_entropy() {
    let problem = Problem::new(6, 4, 3);
    let logs = problem.logits().log_softmax(1).expect("valid");
    let weight = tensor(&problem.weight, &[4]);
    for reduction in [None, Mean, Sum] {
        let loss = logs
            .nll_loss(&problem.targets(), Some(&weight), Some(2), reduction)
            .expect("valid");
        assert_close(&loss, &problem.hard(true, 2, 0.0, reduction), 1e-12);
    }
}

#[test]
fn probabilities_as_targets_average_over_positions() {
    let (n, c) = (5, 4);
    let problem = Problem::new(n, c, 1);
    let target = read(
        &tensor(&values(n * c, -1.0, 1.0, 7), &[n, c])
            .softmax(1)
            .expect("valid"),
    );
    let smoothing = 0.3;
    let losses: Vec<f64> = (0..n)
        .map(|i| {
            let log = problem.log_softmax(i);
            (0..c)
                .map(|k| {
                    -problem.weight[k]
                        * (target[i * c + k] * (1.0 - smoothing) + smoothing / c as f64)
                        * log[k]
                })
                .sum()
        })
        .collect();
    let sum: f64 = losses.iter().sum();
    for (reduction, expected) in [
        (None, losses.clone()),
        (Sum, vec![sum]),
        (Mean, vec![sum / n as f64]),
    ] {
        let options = CrossEntropyOptions {
            weight: Some(tensor(&problem.weight, &[c])),
            label_smoothing: smoothing,
            reduction,
            ..Default::default()
        };
        assert_close(
            &problem
                .logits()
                .cross_entropy(&tensor(&target, &[n, c]), &options)
                .expect("valid"),
            &expected,
            1e-12,
        );
    }
}

#[test]
fn a_single_position_needs_no_batch_axis() {
    let options = CrossEntropyOptions::default();
    let loss = tensor(&[1.0, 2.0, 0.5], &[3])
        .cross_entropy(&ints(&[1], &[]), &options)
        .expect("valid");
    let lse = (1f64.exp() + 2f64.exp() + 0.5f64.exp()).ln();
    assert_close(&loss, &[lse - 2.0], 1e-14);
}

#[test]
fn large_logits_do_not_overflow() {
    let x = Tensor::from_slice(&[1e4f32, 0.0, -1e4], [1, 3], &*DEVICE).expect("fits");
    assert_close(
        &x.cross_entropy(&ints(&[1], &[1]), &CrossEntropyOptions::default())
            .expect("valid"),
        &[1e4],
        0.0,
    );
}

#[test]
fn the_mean_is_nan_where_all_positions_are_ignored() {
    let loss = tensor(&[1.0, 2.0], &[1, 2])
        .cross_entropy(&ints(&[-100], &[1]), &CrossEntropyOptions::default())
        .expect("valid");
    assert_close(&loss, &[f64::NAN], 0.0);
}

#[test]
fn an_empty_batch_has_no_losses() {
    let (x, y) = (tensor(&[], &[0, 3]), ints(&[], &[0]));
    let run = |reduction| {
        x.cross_entropy(
            &y,
            &CrossEntropyOptions {
                reduction,
                ..Default::default()
            },
        )
        .expect("valid")
    };
    assert_eq!(run(None).dims(), [0]);
    assert_close(&run(Sum), &[0.0], 0.0);
    assert_close(&run(Mean), &[f64::NAN], 0.0);
}

#[test]
fn classes_out_of_range_are_refused_also_negative_ones() {
    let x = tensor(&[1.0, 2.0, 0.5], &[1, 3]);
    for class in [3, -1, -3, i64::MAX] {
        let loss = x
            .cross_entropy(&ints(&[class], &[1]), &CrossEntropyOptions::default())
            .and_then(|loss| loss.to_vec::<f64>());
        assert!(
            matches!(
                loss,
                Err(Error::IndexOutOfRange {
                    op: "cross_entropy",
                    len: 3,
                    ..
                })
            ),
            "{class}: {loss:?}"
        );
    }
}

#[test]
fn targets_that_do_not_fit_are_refused() {
    let x = tensor(&[0.0; 6], &[2, 3]);
    let options = CrossEntropyOptions::default();
    assert!(matches!(
        x.cross_entropy(&ints(&[0; 3], &[3]), &options),
        Err(Error::Shape {
            op: "cross_entropy",
            ..
        })
    ));
    let counts = Tensor::from_slice(&[0u8, 1], [2], &*DEVICE).expect("fits");
    assert!(matches!(
        x.cross_entropy(&counts, &options),
        Err(Error::DType {
            op: "cross_entropy",
            dtype: DType::U8,
            ..
        })
    ));
    assert!(matches!(
        x.nll_loss(&x, Option::None, Option::None, Mean),
        Err(Error::DType {
            op: "nll_loss",
            dtype: DType::F64,
            ..
        })
    ));
    let smooth = CrossEntropyOptions {
        label_smoothing: 1.5,
        ..Default::default()
    };
    assert!(matches!(
        x.cross_entropy(&ints(&[0; 2], &[2]), &smooth),
        Err(Error::Argument {
            op: "cross_entropy",
            ..
        })
    ));
    let weight = Some(tensor(&[1.0; 2], &[2]));
    assert!(matches!(
        x.cross_entropy(
            &ints(&[0; 2], &[2]),
            &CrossEntropyOptions {
                weight,
                ..Default::default()
            }
        ),
        Err(Error::Shape {
            op: "cross_entropy",
            ..
        })
    ));
}
