use super::*;
use anymesh_core::ops::NormOptions;
use anymesh_core::{Error, ops::norm};

fn mean_var(row: &[f64]) -> (f64, f64) {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    (
        mean,
        row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64,
    )
}

#[test]
fn layer_norm_uses_the_biased_variance_over_trailing_dimensions() {
    let (data, w, b) = (
        values(24, -2.0, 5.0, 1),
        values(12, -1.0, 1.0, 2),
        values(12, -1.0, 1.0, 3),
    );
    let expected: Vec<f64> = data
        .chunks(12)
        .flat_map(|row| {
            let (mean, var) = mean_var(row);
            row.iter()
                .zip(w.iter().zip(&b))
                .map(|(x, (w, b))| (x - mean) / (var + 1e-5).sqrt() * w + b)
                .collect::<Vec<_>>()
        })
        .collect();
    let (x, w, b) = (
        tensor(&data, &[2, 3, 4]),
        tensor(&w, &[3, 4]),
        tensor(&b, &[3, 4]),
    );
    assert_close(
        &x.layer_norm(&NormOptions::new().dims(2).weight(&w).bias(&b))
            .expect("valid"),
        &expected,
        1e-13,
    );
}

#[test]
fn rms_norm_leaves_the_mean_alone() {
    let (data, w) = (values(12, 1.0, 5.0, 1), values(4, -1.0, 1.0, 2));
    let expected: Vec<f64> = data
        .chunks(4)
        .flat_map(|row| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / 4.0;
            row.iter()
                .zip(&w)
                .map(|(x, w)| x / (square + 1e-6).sqrt() * w)
                .collect::<Vec<_>>()
        })
        .collect();
    assert_close(
        &tensor(&data, &[3, 4])
            .rms_norm(&NormOptions::new().weight(&tensor(&w, &[4])).eps(1e-6))
            .expect("valid"),
        &expected,
        1e-13,
    );
}

#[test]
fn group_norm_groups_neighbouring_channels() {
    let (n, c, spatial, groups) = (2, 6, 5, 3);
    let (data, w, b) = (
        values(n * c * spatial, -2.0, 5.0, 1),
        values(c, -1.0, 1.0, 2),
        values(c, -1.0, 1.0, 3),
    );
    let per = c / groups;
    let mut expected = vec![0.0; data.len()];
    for sample in 0..n {
        for group in 0..groups {
            let at = |channel: usize, k: usize| (sample * c + group * per + channel) * spatial + k;
            let all: Vec<f64> = (0..per)
                .flat_map(|ch| (0..spatial).map(move |k| (ch, k)))
                .map(|(ch, k)| data[at(ch, k)])
                .collect();
            let (mean, var) = mean_var(&all);
            for ch in 0..per {
                for k in 0..spatial {
                    let channel = group * per + ch;
                    expected[at(ch, k)] =
                        (data[at(ch, k)] - mean) / (var + 1e-5).sqrt() * w[channel] + b[channel];
                }
            }
        }
    }
    let (x, w, b) = (
        tensor(&data, &[n, c, spatial]),
        tensor(&w, &[c]),
        tensor(&b, &[c]),
    );
    assert_close(
        &x.group_norm(groups, &NormOptions::new().weight(&w).bias(&b))
            .expect("valid"),
        &expected,
        1e-13,
    );
}

#[test]
fn instance_norm_is_group_norm_with_a_group_for_each_channel() {
    let x = tensor(&values(2 * 3 * 8, -2.0, 5.0, 1), &[2, 3, 2, 4]);
    let w = tensor(&values(3, -1.0, 1.0, 2), &[3]);
    let expected = read(
        &x.group_norm(3, &NormOptions::new().weight(&w))
            .expect("valid"),
    );
    assert_close(
        &x.instance_norm(&NormOptions::new().weight(&w))
            .expect("valid"),
        &expected,
        0.0,
    );
}

#[test]
fn batch_norm_normalises_with_the_biased_variance_and_tracks_the_unbiased_one() {
    let (n, c, spatial) = (3, 2, 4);
    let data = values(n * c * spatial, -2.0, 5.0, 1);
    let channel = |ch: usize| -> Vec<f64> {
        (0..n * spatial)
            .map(|i| data[(i / spatial * c + ch) * spatial + i % spatial])
            .collect()
    };
    let stats: Vec<(f64, f64)> = (0..c).map(|ch| mean_var(&channel(ch))).collect();
    let (w, b) = ([1.5, -0.5], [0.25, 2.0]);
    let expected: Vec<f64> = (0..data.len())
        .map(|i| {
            let ch = i / spatial % c;
            (data[i] - stats[ch].0) / (stats[ch].1 + 1e-5).sqrt() * w[ch] + b[ch]
        })
        .collect();
    let x = tensor(&data, &[n, c, spatial]);
    let done = x
        .batch_norm_train(
            &NormOptions::new()
                .weight(&tensor(&w, &[c]))
                .bias(&tensor(&b, &[c])),
        )
        .expect("valid");
    assert_close(&done.out, &expected, 1e-13);
    assert_close(&done.var, &[stats[0].1, stats[1].1], 1e-13);

    let (mean, var) = done
        .update_running(&tensor(&[1.0, 2.0], &[c]), &tensor(&[3.0, 4.0], &[c]), 0.1)
        .expect("valid");
    let count = (n * spatial) as f64;
    assert_close(
        &mean,
        &[0.9 * 1.0 + 0.1 * stats[0].0, 0.9 * 2.0 + 0.1 * stats[1].0],
        1e-13,
    );
    let unbiased = |ch: usize| stats[ch].1 * count / (count - 1.0);
    assert_close(
        &var,
        &[0.9 * 3.0 + 0.1 * unbiased(0), 0.9 * 4.0 + 0.1 * unbiased(1)],
        1e-13,
    );
}

#[test]
fn batch_norm_at_inference_uses_the_given_statistics() {
    let x = tensor(&[1.0, 2.0, 3.0, 4.0], &[2, 2]);
    let (mean, var) = (tensor(&[1.0, 2.0], &[2]), tensor(&[3.0, 8.0], &[2]));
    let y = x
        .batch_norm(&mean, &var, &NormOptions::new().eps(1.0))
        .expect("valid");
    assert_close(&y, &[0.0, 0.0, 1.0, 2.0 / 3.0], 1e-14);
}

#[test]
fn one_value_per_channel_has_no_unbiased_variance() {
    let done = tensor(&[1.0, 2.0], &[1, 2])
        .batch_norm_train(&NormOptions::new())
        .expect("valid");
    let zero = tensor(&[0.0, 0.0], &[2]);
    let error = done.update_running(&zero, &zero, 0.1).expect_err("0 / 0");
    assert!(
        matches!(
            error,
            Error::Argument {
                op: "batch_norm_train",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn parameters_may_have_another_float_dtype() {
    let x = tensor(&values(12, -1.0, 1.0, 1), &[3, 4]);
    let w = tensor(&[1.0, 2.0, 0.5, -1.0], &[4]);
    let expected = read(&x.layer_norm(&NormOptions::new().weight(&w)).expect("valid"));
    let y = x
        .cast(DType::F32)
        .expect("castable")
        .layer_norm(&NormOptions::new().weight(&w.cast(DType::BF16).expect("castable")))
        .expect("valid");
    assert_eq!(y.dtype(), DType::F32);
    assert_close(&y, &expected, 1e-5);
}

#[test]
fn a_norm_far_from_zero_keeps_its_precision() {
    let data: Vec<f64> = values(1000, 0.0, 1.0, 1)
        .iter()
        .map(|v| (v * 4.0).round() + 3000.0)
        .collect();
    let expected = read(
        &tensor(&data, &[1, 1000])
            .layer_norm(&NormOptions::new().eps(0.0))
            .expect("valid"),
    );
    let y = tensor(&data, &[1, 1000])
        .cast(DType::F32)
        .expect("castable")
        .layer_norm(&NormOptions::new().eps(0.0))
        .expect("valid");
    assert_close(&y, &expected, 1e-3);
}

#[test]
fn empty_batches_are_empty_and_empty_rows_are_refused() {
    assert_eq!(
        tensor(&[], &[0, 4])
            .layer_norm(&NormOptions::new())
            .expect("valid")
            .dims(),
        [0, 4]
    );
    assert_eq!(
        tensor(&[], &[0, 4, 2])
            .group_norm(2, &NormOptions::new())
            .expect("valid")
            .dims(),
        [0, 4, 2]
    );
    let errors = [
        tensor(&[], &[4, 0])
            .layer_norm(&NormOptions::new())
            .expect_err("no mean"),
        tensor(&[], &[4, 0])
            .rms_norm(&NormOptions::new())
            .expect_err("no mean"),
        tensor(&[], &[2, 4, 0])
            .group_norm(2, &NormOptions::new())
            .expect_err("no mean"),
        tensor(&[], &[0, 4])
            .batch_norm_train(&NormOptions::new())
            .expect_err("no mean"),
    ];
    for error in errors {
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
}

#[test]
fn the_decomposition_refuses_rows_that_do_not_divide() {
    let spec = norm::Norm {
        rms: false,
        eps: 0.0,
        weight: None,
        bias: None,
        groups: 1,
        channels: 5,
        inner: 1,
    };
    assert!(matches!(
        norm::decomposed(&tensor(&[0.0; 4], &[4]), &spec),
        Err(Error::Shape {
            op: "layer_norm",
            ..
        })
    ));
}

/// Numbers that are not alike, of any dtype.
fn mixed(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let count = shape.iter().product();
    tensor(&values(count, -3.0, 3.0, seed), shape)
        .cast(dtype)
        .expect("a float")
}

fn bytes(x: &Tensor) -> Vec<u64> {
    let wide = x.cast(DType::F64).expect("a float");
    read(&wide).into_iter().map(f64::to_bits).collect()
}

#[test]
fn a_sum_and_its_norm_are_those_of_two_ops_to_the_bit_with_their_gradients() {
    // Rows long enough for one kernel on the CPU too, and parameters of another dtype than theirs.
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let inputs = [
            mixed(&[3, 2, 30], dtype, 1),
            mixed(&[3, 2, 30], dtype, 2),
            mixed(&[2, 30], DType::F32, 3),
            mixed(&[2, 30], DType::F32, 4),
        ];
        let (of_sum, of_norm) = (mixed(&[3, 2, 30], dtype, 5), mixed(&[3, 2, 30], dtype, 6));
        let run = |rms: bool, at_once: bool, both: bool| {
            let t = inputs
                .each_ref()
                .map(|x| x.require_grad().expect("tracked"));
            let options = NormOptions::new().dims(2).weight(&t[2]);
            let (sum, normed) = match (at_once, rms) {
                (true, true) => t[0].add_rms_norm(&t[1], &options),
                (true, false) => t[0].add_layer_norm(&t[1], &options.bias(&t[3])),
                (false, true) => {
                    (t[0].add(&t[1])).and_then(|s| Ok((s.clone(), s.rms_norm(&options)?)))
                }
                (false, false) => (t[0].add(&t[1]))
                    .and_then(|s| Ok((s.clone(), s.layer_norm(&options.bias(&t[3]))?))),
            }
            .expect("valid");
            let terms =
                |x: &Tensor, g: &Tensor| (x.mul(g)).and_then(|x| x.sum(&[], false)).expect("valid");
            let mut loss = terms(&normed, &of_norm);
            if both {
                loss = loss.add(&terms(&sum, &of_sum)).expect("valid");
            }
            let found = loss.backward().expect("a loss");
            let wanted = if rms { &t[..3] } else { &t[..] };
            let mut all = vec![bytes(&sum), bytes(&normed)];
            all.extend(wanted.iter().map(|x| bytes(&found.of(x).expect("tracked"))));
            all
        };
        for rms in [false, true] {
            for both in [false, true] {
                assert_eq!(
                    run(rms, true, both),
                    run(rms, false, both),
                    "{dtype} {rms} {both}"
                );
            }
        }
    }
}

#[test]
fn a_sum_that_broadcasts_or_is_promoted_has_its_norm_too() {
    let (x, y) = (mixed(&[4, 6], DType::F32, 1), mixed(&[6], DType::BF16, 2));
    let (sum, normed) = x.add_layer_norm(&y, &NormOptions::new()).expect("valid");
    assert_eq!((sum.dtype(), sum.dims()), (DType::F32, &[4, 6][..]));
    let alone = x
        .add(&y)
        .and_then(|sum| sum.layer_norm(&NormOptions::new()));
    assert_eq!(bytes(&normed), bytes(&alone.expect("valid")));
    let bias = NormOptions::new().bias(&y);
    assert!(matches!(
        x.add_rms_norm(&x, &bias),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.add_layer_norm(&x, &NormOptions::new().dims(3)),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        x.add_layer_norm(&mixed(&[5], DType::F32, 3), &NormOptions::new()),
        Err(Error::Shape { .. })
    ));
}

/// Only the sum is used, or only the norm: what nobody used has no part in the gradient.
#[test]
fn the_gradient_of_a_sum_goes_to_both_summands_though_nobody_uses_its_norm() {
    let x = mixed(&[2, 3], DType::F64, 1)
        .require_grad()
        .expect("tracked");
    let y = mixed(&[2, 3], DType::F64, 2)
        .require_grad()
        .expect("tracked");
    let (sum, _) = x.add_layer_norm(&y, &NormOptions::new()).expect("valid");
    let found = sum
        .sum(&[], false)
        .and_then(|s| s.backward())
        .expect("a loss");
    for t in [&x, &y] {
        assert_eq!(read(&found.of(t).expect("tracked")), [1.0; 6]);
    }
}
