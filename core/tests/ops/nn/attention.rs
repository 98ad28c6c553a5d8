use super::*;
use anymesh_core::{
    Error,
    ops::attention::{
        Attention, AttentionOptions, attention_backward, backward_decomposed, decomposed,
    },
};

#[derive(Clone, Copy)]
struct Sizes {
    b: usize,
    h: usize,
    hk: usize,
    s: usize,
    t: usize,
    d: usize,
    dv: usize,
}

const SIZES: Sizes = Sizes {
    b: 2,
    h: 4,
    hk: 2,
    s: 3,
    t: 5,
    d: 6,
    dv: 7,
};

struct Problem {
    sizes: Sizes,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl Problem {
    fn new(sizes: Sizes) -> Self {
        let Sizes {
            b,
            h,
            hk,
            s,
            t,
            d,
            dv,
        } = sizes;
        Self {
            sizes,
            q: values(b * h * s * d, -1.0, 1.0, 1),
            k: values(b * hk * t * d, -1.0, 1.0, 2),
            v: values(b * hk * t * dv, -1.0, 1.0, 3),
        }
    }

    fn tensors(&self) -> [Tensor; 3] {
        let Sizes {
            b,
            h,
            hk,
            s,
            t,
            d,
            dv,
        } = self.sizes;
        [
            tensor(&self.q, &[b, h, s, d]),
            tensor(&self.k, &[b, hk, t, d]),
            tensor(&self.v, &[b, hk, t, dv]),
        ]
    }

    /// Output and log-sum-exp; `score` changes the score of (batch, head, query, key).
    fn naive(&self, scale: f64, score: impl Fn([usize; 4], f64) -> f64) -> (Vec<f64>, Vec<f64>) {
        let Sizes {
            b,
            h,
            hk,
            s,
            t,
            d,
            dv,
        } = self.sizes;
        let (mut out, mut lse) = (vec![], vec![]);
        for (n, head, i) in
            (0..b).flat_map(|n| (0..h).flat_map(move |head| (0..s).map(move |i| (n, head, i))))
        {
            let group = n * hk + head / (h / hk);
            let scores: Vec<f64> = (0..t)
                .map(|j| {
                    let dot: f64 = (0..d)
                        .map(|x| {
                            self.q[((n * h + head) * s + i) * d + x]
                                * self.k[(group * t + j) * d + x]
                        })
                        .sum();
                    score([n, head, i, j], dot * scale)
                })
                .collect();
            let sum: f64 = scores.iter().map(|x| x.exp()).sum();
            let weight = |j: usize| {
                if sum == 0.0 {
                    0.0
                } else {
                    scores[j].exp() / sum
                }
            };
            out.extend((0..dv).map(|x| {
                (0..t)
                    .map(|j| weight(j) * self.v[(group * t + j) * dv + x])
                    .sum::<f64>()
            }));
            lse.push(sum.ln());
        }
        (out, lse)
    }
}

#[track_caller]
fn check(problem: &Problem, options: &AttentionOptions, expected: &(Vec<f64>, Vec<f64>)) {
    let [q, k, v] = problem.tensors();
    for done in [
        q.attention(&k, &v, options).expect("valid"),
        decomposed(&q, &k, &v, options).expect("valid"),
    ] {
        assert_close(&done.out, &expected.0, 1e-12);
        assert_close(&done.lse, &expected.1, 1e-12);
    }
}

#[test]
fn query_heads_share_key_heads_in_runs() {
    let problem = Problem::new(SIZES);
    let expected = problem.naive(1.0 / 6f64.sqrt(), |_, score| score);
    check(&problem, &AttentionOptions::default(), &expected);
}

#[test]
fn the_causal_mask_is_aligned_to_the_last_query_and_key() {
    for (s, t) in [(3, 5), (4, 4), (1, 6)] {
        let problem = Problem::new(Sizes { s, t, ..SIZES });
        let expected = problem.naive(0.5, |[_, _, i, j], score| {
            if j + s <= i + t {
                score
            } else {
                f64::NEG_INFINITY
            }
        });
        check(
            &problem,
            &AttentionOptions {
                causal: true,
                scale: Some(0.5),
                mask: None,
                documents: None,
            },
            &expected,
        );
    }
}

#[test]
fn queries_that_see_no_key_give_zeros() {
    let problem = Problem::new(Sizes {
        s: 5,
        t: 3,
        ..SIZES
    });
    let expected = problem.naive(0.5, |[_, _, i, j], score| {
        if j + 5 <= i + 3 {
            score
        } else {
            f64::NEG_INFINITY
        }
    });
    assert_eq!(expected.0[0], 0.0);
    assert_eq!(expected.1[0], f64::NEG_INFINITY);
    check(
        &problem,
        &AttentionOptions {
            causal: true,
            scale: Some(0.5),
            mask: None,
            documents: None,
        },
        &expected,
    );
}

#[test]
fn masks_broadcast_over_heads_and_queries() {
    let problem = Problem::new(SIZES);
    let seen = [
        true, false, true, true, false, false, true, true, false, true,
    ];
    let expected = problem.naive(1.0, |[n, _, _, j], score| {
        if seen[n * 5 + j] {
            score
        } else {
            f64::NEG_INFINITY
        }
    });
    let mask = Tensor::from_slice(&seen, [2, 1, 1, 5], &*DEVICE).expect("fits");
    check(
        &problem,
        &AttentionOptions {
            mask: Some(mask),
            scale: Some(1.0),
            causal: false,
            documents: None,
        },
        &expected,
    );

    let added = values(4 * 3 * 5, -1.0, 1.0, 9);
    let expected = problem.naive(1.0, |[_, head, i, j], score| {
        score + added[(head * 3 + i) * 5 + j]
    });
    check(
        &problem,
        &AttentionOptions {
            mask: Some(tensor(&added, &[4, 3, 5])),
            scale: Some(1.0),
            causal: false,
            documents: None,
        },
        &expected,
    );
}

#[test]
fn strided_inputs_compute_the_same() {
    let problem = Problem::new(SIZES);
    let [q, k, v] = problem.tensors();
    let options = AttentionOptions::default();
    let expected = read(&q.attention(&k, &v, &options).expect("valid").out);
    // As projections leave them: [b, s, h, d], seen as [b, h, s, d].
    let moved = [&q, &k, &v].map(|x| {
        x.transpose(1, 2)
            .and_then(|x| x.contiguous())
            .and_then(|x| x.transpose(1, 2))
            .expect("valid")
    });
    assert!(!moved[0].is_contiguous());
    assert_close(
        &moved[0]
            .attention(&moved[1], &moved[2], &options)
            .expect("valid")
            .out,
        &expected,
        1e-14,
    );
}

/// Central differences of `sum(out * grad)`.
#[test]
fn gradients_agree_with_finite_differences() {
    let sizes = Sizes {
        b: 1,
        s: 3,
        t: 4,
        d: 2,
        dv: 3,
        ..SIZES
    };
    for (causal, masked) in [(false, false), (true, false), (false, true)] {
        let problem = Problem::new(sizes);
        let mask = masked
            .then(|| Tensor::from_slice(&[true, false, true, true], [4], &*DEVICE).expect("fits"));
        let options = AttentionOptions {
            causal,
            scale: None,
            mask,
            documents: None,
        };
        let grad = values(sizes.h * sizes.s * sizes.dv, -1.0, 1.0, 4);
        let [q, k, v] = problem.tensors();
        let forward = q.attention(&k, &v, &options).expect("valid");
        let weights = tensor(&grad, &[1, sizes.h, sizes.s, sizes.dv]);
        let (dq, dk, dv) =
            attention_backward(&q, &k, &v, &forward, &weights, &options).expect("valid");
        let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
            let moved = Problem {
                sizes,
                q: q.to_vec(),
                k: k.to_vec(),
                v: v.to_vec(),
            };
            let [q, k, v] = moved.tensors();
            read(&q.attention(&k, &v, &options).expect("valid").out)
                .iter()
                .zip(&grad)
                .map(|(o, g)| o * g)
                .sum()
        };
        let slope = |which: usize, i: usize| {
            let at = |step: f64| {
                let mut parts = [problem.q.clone(), problem.k.clone(), problem.v.clone()];
                parts[which][i] += step;
                loss(&parts[0], &parts[1], &parts[2])
            };
            (at(1e-5) - at(-1e-5)) / 2e-5
        };
        for (which, actual) in [dq, dk, dv].iter().enumerate() {
            let expected: Vec<f64> = (0..actual.numel()).map(|i| slope(which, i)).collect();
            assert_close(actual, &expected, 1e-8);
        }
    }
}

#[test]
fn gradients_of_queries_that_see_nothing_are_zero() {
    let problem = Problem::new(Sizes {
        s: 5,
        t: 3,
        ..SIZES
    });
    let [q, k, v] = problem.tensors();
    let options = AttentionOptions {
        causal: true,
        ..Default::default()
    };
    let forward = q.attention(&k, &v, &options).expect("valid");
    let grad = tensor(&values(2 * 4 * 5 * 7, -1.0, 1.0, 4), &[2, 4, 5, 7]);
    for (dq, dk, dv) in [
        attention_backward(&q, &k, &v, &forward, &grad, &options).expect("valid"),
        backward_decomposed(&q, &k, &v, &forward, &grad, &options).expect("valid"),
    ] {
        assert_eq!(read(&dq)[..12], [0.0; 12]);
        assert!(read(&dk).iter().chain(&read(&dv)).all(|x| x.is_finite()));
    }
}

#[test]
fn half_precision_keeps_its_dtype_and_the_statistics_in_f32() {
    let problem = Problem::new(SIZES);
    let expected = problem.naive(1.0 / 6f64.sqrt(), |_, score| score);
    let [q, k, v] = problem
        .tensors()
        .map(|x| x.cast(DType::F16).expect("castable"));
    let Attention { out, lse } = q
        .attention(&k, &v, &AttentionOptions::default())
        .expect("valid");
    assert_eq!((out.dtype(), lse.dtype()), (DType::F16, DType::F32));
    assert_close(&out, &expected.0, 2e-3);
    assert_close(&lse, &expected.1, 2e-3);
}

#[test]
fn empty_problems_have_empty_or_zero_results() {
    let none = tensor(&[], &[0, 2, 3, 4])
        .attention(
            &tensor(&[], &[0, 2, 5, 4]),
            &tensor(&[], &[0, 2, 5, 6]),
            &AttentionOptions::default(),
        )
        .expect("valid");
    assert_eq!(
        (none.out.dims(), none.lse.dims()),
        (&[0, 2, 3, 6][..], &[0, 2, 3][..])
    );
    let q = tensor(&[1.0; 4], &[1, 1, 2, 2]);
    let blind = q
        .attention(
            &tensor(&[], &[1, 1, 0, 2]),
            &tensor(&[], &[1, 1, 0, 2]),
            &AttentionOptions::default(),
        )
        .expect("valid");
    assert_close(&blind.out, &[0.0; 4], 0.0);
    assert_close(&blind.lse, &[f64::NEG_INFINITY; 2], 0.0);
}

#[test]
fn shapes_and_dtypes_that_do_not_fit_are_refused() {
    let [q, k, v] = Problem::new(SIZES).tensors();
    let options = AttentionOptions::default();
    let shape = |r: Result<Attention, Error>| {
        assert!(
            matches!(
                r,
                Err(Error::Shape {
                    op: "attention",
                    ..
                })
            ),
            "{r:?}"
        )
    };
    shape(q.attention(&v, &k, &options));
    shape(
        q.reshape([8, 3, 6])
            .expect("fits")
            .attention(&k, &v, &options),
    );
    shape(q.narrow(1, 0, 3).expect("fits").attention(&k, &v, &options));
    let mask = Some(tensor(&[0.0; 4], &[4]));
    shape(q.attention(
        &k,
        &v,
        &AttentionOptions {
            mask,
            ..Default::default()
        },
    ));
    let mixed = q.attention(&k.cast(DType::F32).expect("castable"), &v, &options);
    assert!(
        matches!(
            mixed,
            Err(Error::DType {
                op: "attention",
                dtype: DType::F32,
                ..
            })
        ),
        "{mixed:?}"
    );
    let counts = Some(ints(&[0; 5], &[5]));
    let masked = q.attention(
        &k,
        &v,
        &AttentionOptions {
            mask: counts,
            ..Default::default()
        },
    );
    assert!(
        matches!(
            masked,
            Err(Error::DType {
                op: "attention",
                dtype: DType::I64,
                ..
            })
        ),
        "{masked:?}"
    );
}
