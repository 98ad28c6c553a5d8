use super::*;
use anymesh_core::{
    Error,
    ops::{Rng, RopeOptions, RopeStyle},
};

/// Rotates element `pair(i).0` with `pair(i).1`.
fn naive_rope(
    data: &[f64],
    s: usize,
    d: usize,
    offset: usize,
    pair: impl Fn(usize) -> (usize, usize),
) -> Vec<f64> {
    let mut out = data.to_vec();
    for (row, x) in data.chunks(d).enumerate() {
        for i in 0..d / 2 {
            let (sin, cos) =
                ((offset + row % s) as f64 * 10_000f64.powf(-2.0 * i as f64 / d as f64)).sin_cos();
            let (a, b) = pair(i);
            out[row * d + a] = x[a] * cos - x[b] * sin;
            out[row * d + b] = x[b] * cos + x[a] * sin;
        }
    }
    out
}

#[test]
fn rope_pairs_halves_or_neighbours() {
    let (s, d) = (5, 8);
    let data = values(2 * s * d, -1.0, 1.0, 1);
    let x = tensor(&data, &[2, s, d]);
    let (cos, sin) = Tensor::rope_tables(
        s,
        d,
        &RopeOptions {
            offset: 3,
            ..Default::default()
        },
        &*DEVICE,
    )
    .expect("valid");
    let half = naive_rope(&data, s, d, 3, |i| (i, i + d / 2));
    assert_close(
        &x.rope(&cos, &sin, RopeStyle::Half).expect("valid"),
        &half,
        1e-6,
    );
    let neighbours = naive_rope(&data, s, d, 3, |i| (2 * i, 2 * i + 1));
    assert_close(
        &x.rope(&cos, &sin, RopeStyle::Interleaved).expect("valid"),
        &neighbours,
        1e-6,
    );
}

#[test]
fn rope_with_negated_sines_undoes_it() {
    let x = tensor(&values(6 * 4, -1.0, 1.0, 1), &[6, 4]);
    let (cos, sin) = Tensor::rope_tables(
        6,
        4,
        &RopeOptions {
            base: 100.0,
            offset: 1000,
        },
        &*DEVICE,
    )
    .expect("valid");
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        let there = x.rope(&cos, &sin, style).expect("valid");
        assert_close(
            &there
                .rope(&cos, &sin.neg().expect("valid"), style)
                .expect("valid"),
            &read(&x),
            1e-6,
        );
    }
}

#[test]
fn tables_may_differ_between_samples() {
    let x = tensor(&values(2 * 3 * 4, -1.0, 1.0, 1), &[2, 1, 3, 4]);
    let tables = [0, 7].map(|offset| {
        Tensor::rope_tables(
            3,
            4,
            &RopeOptions {
                base: 100.0,
                offset: offset,
            },
            &*DEVICE,
        )
        .expect("valid")
    });
    let both = |pick: fn(&(Tensor, Tensor)) -> &Tensor| {
        let data: Vec<f64> = tables.iter().flat_map(|t| read(pick(t))).collect();
        tensor(&data, &[2, 1, 3, 2])
    };
    let y = read(
        &x.rope(&both(|t| &t.0), &both(|t| &t.1), RopeStyle::Half)
            .expect("valid"),
    );
    let second = x
        .narrow(0, 1, 1)
        .and_then(|x| x.rope(&tables[1].0, &tables[1].1, RopeStyle::Half))
        .expect("valid");
    assert_close(&second, &y[12..], 1e-7);
}

#[test]
fn distant_positions_keep_precise_angles() {
    let (cos, _) = Tensor::rope_tables(
        1,
        2,
        &RopeOptions {
            offset: 1_000_003,
            ..Default::default()
        },
        &*DEVICE,
    )
    .expect("valid");
    assert_close(&cos, &[1_000_003f64.cos()], 1e-7);
}

#[test]
fn gates_multiply_halves_of_the_last_axis() {
    let data = values(3 * 4, -3.0, 3.0, 1);
    let x = tensor(&data, &[3, 4]);
    let pairs: Vec<(f64, f64)> = data
        .chunks(4)
        .flat_map(|row| [(row[0], row[2]), (row[1], row[3])])
        .collect();
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let expect =
        |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|(a, b)| f(*a, *b)).collect::<Vec<_>>();
    assert_close(
        &x.swiglu().expect("valid"),
        &expect(&|a, b| a * sigmoid(a) * b),
        1e-14,
    );
    assert_close(
        &x.glu().expect("valid"),
        &expect(&|a, b| a * sigmoid(b)),
        1e-14,
    );
    let (a, b) = (
        x.narrow(1, 0, 2).expect("fits"),
        x.narrow(1, 2, 2).expect("fits"),
    );
    assert_close(
        &a.swiglu2(&b).expect("valid"),
        &read(&x.swiglu().expect("valid")),
        0.0,
    );
    assert_close(
        &a.geglu2(&b).expect("valid"),
        &read(&x.geglu().expect("valid")),
        0.0,
    );
    // gelu(1) from a table of the normal distribution.
    let one = tensor(&[1.0, 2.0], &[2]);
    assert_close(
        &one.geglu().expect("valid"),
        &[2.0 * 0.841_344_746_068_542_9],
        1e-12,
    );
}

#[test]
fn normalize_and_cosine_similarity_follow_their_definitions() {
    let (a, b) = (values(6, -2.0, 2.0, 1), values(6, -2.0, 2.0, 2));
    let (x, y) = (tensor(&a, &[2, 3]), tensor(&b, &[2, 3]));
    for p in [1.0, 2.0, 2.5, f64::INFINITY] {
        let norm = |row: &[f64]| {
            if p.is_infinite() {
                row.iter().fold(0f64, |m, v| m.max(v.abs()))
            } else {
                row.iter()
                    .map(|v| v.abs().powf(p))
                    .sum::<f64>()
                    .powf(1.0 / p)
            }
        };
        let expected: Vec<f64> = a
            .chunks(3)
            .flat_map(|row| row.iter().map(|v| v / norm(row)).collect::<Vec<_>>())
            .collect();
        assert_close(&x.normalize(p, 1, 1e-12).expect("valid"), &expected, 1e-13);
    }
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let expected: Vec<f64> = a
        .chunks(3)
        .zip(b.chunks(3))
        .map(|(x, y)| dot(x, y) / (dot(x, x).sqrt() * dot(y, y).sqrt()))
        .collect();
    assert_close(
        &x.cosine_similarity(&y, 1, 1e-8).expect("valid"),
        &expected,
        1e-13,
    );
    assert_close(
        &tensor(&[0.0; 3], &[3])
            .normalize(2.0, 0, 1e-12)
            .expect("valid"),
        &[0.0; 3],
        0.0,
    );
    assert!(matches!(
        x.normalize(0.0, 1, 1e-12),
        Err(Error::Argument {
            op: "normalize",
            ..
        })
    ));
}

#[test]
fn dropout_scales_the_survivors_of_its_mask() {
    let data = values(1000, 1.0, 2.0, 1);
    let rng = Rng::new(11);
    let mask = Tensor::dropout_mask([1000], 0.25, &*DEVICE, rng)
        .expect("valid")
        .to_vec::<bool>()
        .expect("readable");
    let kept = mask.iter().filter(|m| **m).count();
    assert!((680..820).contains(&kept), "{kept}");
    let expected: Vec<f64> = data
        .iter()
        .zip(&mask)
        .map(|(x, m)| if *m { x / 0.75 } else { 0.0 })
        .collect();
    assert_close(
        &tensor(&data, &[1000]).dropout(0.25, rng).expect("valid"),
        &expected,
        1e-14,
    );
    let residual = values(1000, -1.0, 1.0, 2);
    let sum: Vec<f64> = expected.iter().zip(&residual).map(|(x, r)| x + r).collect();
    assert_close(
        &tensor(&data, &[1000])
            .dropout_add(&tensor(&residual, &[1000]), 0.25, rng)
            .expect("valid"),
        &sum,
        1e-14,
    );
}

#[test]
fn the_dropout_mask_depends_on_the_key_and_the_index_alone() {
    let mask = |x: &Tensor, rng| {
        read(&x.dropout(0.5, rng).expect("valid"))
            .iter()
            .map(|v| *v != 0.0)
            .collect::<Vec<_>>()
    };
    let rng = Rng::new(3);
    let flat = tensor(&[1.0; 600], &[600]);
    let first = mask(&flat, rng);
    assert_eq!(first, mask(&flat, rng));
    assert_eq!(first, mask(&flat.reshape([30, 20]).expect("fits"), rng));
    assert_eq!(first, mask(&flat.cast(DType::F16).expect("castable"), rng));
    // The position in the tensor counts, not the place in memory.
    assert_eq!(
        first,
        mask(&tensor(&[1.0; 600], &[20, 30]).t().expect("a matrix"), rng)
    );
    assert_ne!(first, mask(&flat, rng.next()));
    assert_ne!(first, mask(&flat, Rng::new(4)));
}

#[test]
fn dropout_of_everything_is_zero_and_of_nothing_is_the_input() {
    let x = tensor(&[1.0, f64::INFINITY, 3.0], &[3]);
    assert_close(&x.dropout(1.0, Rng::new(1)).expect("valid"), &[0.0; 3], 0.0);
    assert_close(&x.dropout(0.0, Rng::new(1)).expect("valid"), &read(&x), 0.0);
    for p in [-0.1, 1.1, f64::NAN] {
        assert!(
            matches!(
                x.dropout(p, Rng::new(1)),
                Err(Error::Argument { op: "dropout", .. })
            ),
            "{p}"
        );
    }
}
