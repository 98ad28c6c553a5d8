//! Random tensors against an independent Philox, and against their distributions.

use crate::support::device;
use anymesh_core::{DType, Error, F8E4M3, F8E5M2, Result, Tensor, bf16, f16, ops::Rng};

/// Philox 4x32-10 as its authors define it.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = 0xd251_1f53u64 * u64::from(counter[0]);
        let b = 0xcd9e_8d57u64 * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [
            key[0].wrapping_add(0x9e37_79b9),
            key[1].wrapping_add(0xbb67_ae85),
        ];
    }
    counter
}

/// The words of element `i`.
fn words(rng: Rng, i: usize) -> [u32; 4] {
    philox(
        [i as u32, (i as u64 >> 32) as u32, rng.stream, 0],
        [rng.seed as u32, (rng.seed >> 32) as u32],
    )
}

const KEY: Rng = Rng {
    seed: 0x0123_4567_89ab_cdef,
    stream: 5,
};

#[test]
fn the_reference_generator_gives_the_published_vectors() {
    assert_eq!(
        philox([0; 4], [0; 2]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        philox([u32::MAX; 4], [u32::MAX; 2]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
}

#[test]
fn uniform_values_are_the_top_bits_of_the_words() -> Result<()> {
    let single = Tensor::uniform([37, 3], 0.0, 1.0, DType::F32, &device(), KEY)?.to_vec::<f32>()?;
    let double = Tensor::uniform([111], 0.0, 1.0, DType::F64, &device(), KEY)?.to_vec::<f64>()?;
    for i in 0..111 {
        let w = words(KEY, i);
        assert_eq!(single[i], (w[0] >> 8) as f32 / (1 << 24) as f32);
        let bits = u64::from(w[0] >> 5) << 26 | u64::from(w[1] >> 6);
        assert_eq!(double[i], bits as f64 / (1u64 << 53) as f64);
    }
    Ok(())
}

#[test]
fn uniform_values_stay_inside_their_bounds_in_every_float_dtype() -> Result<()> {
    for (low, high) in [
        (0.0, 1.0),
        (-1.0, 0.0),
        (0.1, 0.2),
        (3.0, 3.7),
        (-448.0, 448.0),
    ] {
        let draw = |dtype| Tensor::uniform([20_000], low, high, dtype, &device(), KEY);
        let check = |values: Vec<f64>, dtype: DType| {
            assert!(
                values.iter().all(|v| (low..high).contains(v)),
                "{dtype} {low} {high}: {:?}",
                values.iter().find(|v| !(low..high).contains(*v))
            );
        };
        check(draw(DType::F64)?.to_vec::<f64>()?, DType::F64);
        check(
            draw(DType::F32)?
                .to_vec::<f32>()?
                .into_iter()
                .map(f64::from)
                .collect(),
            DType::F32,
        );
        check(
            draw(DType::F16)?
                .to_vec::<f16>()?
                .into_iter()
                .map(f64::from)
                .collect(),
            DType::F16,
        );
        check(
            draw(DType::BF16)?
                .to_vec::<bf16>()?
                .into_iter()
                .map(f64::from)
                .collect(),
            DType::BF16,
        );
        check(
            draw(DType::F8E4M3)?
                .to_vec::<F8E4M3>()?
                .into_iter()
                .map(|v| v.to_f32().into())
                .collect(),
            DType::F8E4M3,
        );
        check(
            draw(DType::F8E5M2)?
                .to_vec::<F8E5M2>()?
                .into_iter()
                .map(|v| v.to_f32().into())
                .collect(),
            DType::F8E5M2,
        );
    }
    Ok(())
}

#[test]
fn a_value_depends_on_its_index_and_key_alone() -> Result<()> {
    let draw = |shape: &[usize], rng| {
        Tensor::uniform(shape, 0.0, 1.0, DType::F32, &device(), rng)?.to_vec::<f32>()
    };
    let long = draw(&[1000], KEY)?;
    assert_eq!(draw(&[10, 10], KEY)?, long[..100]);
    assert_eq!(draw(&[5, 1, 7, 2], KEY)?, long[..70]);
    assert_eq!(draw(&[1000], KEY)?, long);
    for other in [
        KEY.next(),
        Rng {
            seed: KEY.seed + 1,
            ..KEY
        },
        Rng {
            seed: KEY.seed ^ (1 << 40),
            ..KEY
        },
    ] {
        let same = draw(&[1000], other)?
            .iter()
            .zip(&long)
            .filter(|(a, b)| a == b)
            .count();
        assert!(same <= 1, "{other:?} repeats {same} values");
    }
    let mut rng = KEY;
    assert_eq!((rng.split(), rng), (KEY, KEY.next()));
    Ok(())
}

/// Mean and variance of 100 000 values within five standard errors.
#[track_caller]
fn check_moments(values: &[f64], mean: f64, variance: f64, kurtosis: f64) {
    let n = values.len() as f64;
    let m = values.iter().sum::<f64>() / n;
    let v = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    assert!(
        (m - mean).abs() < 5.0 * (variance / n).sqrt(),
        "mean {m}, expected {mean}"
    );
    assert!(
        (v - variance).abs() < 5.0 * variance * ((kurtosis - 1.0) / n).sqrt(),
        "variance {v}, expected {variance}"
    );
}

#[test]
fn distributions_have_their_moments() -> Result<()> {
    const N: usize = 100_000;
    let d = device();
    for seed in 0..4 {
        let rng = Rng::new(seed);
        let float = |t: Tensor| -> Result<Vec<f64>> { t.cast(DType::F64)?.to_vec() };
        check_moments(
            &float(Tensor::uniform([N], -2.0, 4.0, DType::F32, &d, rng)?)?,
            1.0,
            3.0,
            1.8,
        );
        check_moments(
            &float(Tensor::uniform([N], -2.0, 4.0, DType::F64, &d, rng)?)?,
            1.0,
            3.0,
            1.8,
        );
        check_moments(
            &float(Tensor::normal([N], 3.0, 2.0, DType::F32, &d, rng)?)?,
            3.0,
            4.0,
            3.0,
        );
        check_moments(
            &float(Tensor::normal([N], 0.0, 1.0, DType::F64, &d, rng)?)?,
            0.0,
            1.0,
            3.0,
        );
        let p = 0.2;
        let variance = p * (1.0 - p);
        check_moments(
            &float(Tensor::bernoulli([N], p, DType::U8, &d, rng)?)?,
            p,
            variance,
            (1.0 - 3.0 * variance) / variance,
        );
        check_moments(
            &float(Tensor::randint([N], -50, 51, DType::I32, &d, rng)?)?,
            0.0,
            850.0,
            1.8,
        );
    }
    Ok(())
}

#[test]
fn normal_values_follow_the_formula_and_have_tails() -> Result<()> {
    let values =
        Tensor::normal([100_000], 0.0, 1.0, DType::F32, &device(), KEY)?.to_vec::<f32>()?;
    for (i, v) in values.iter().enumerate().take(1000) {
        let w = words(KEY, i);
        let (u, t) = (
            f64::from((w[0] >> 8) + 1) / 2f64.powi(24),
            f64::from(w[1] >> 8) / 2f64.powi(24),
        );
        let expected = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * (t - 0.5)).cos();
        assert!(
            (f64::from(*v) - expected).abs() < 4e-6,
            "element {i}: {v}, expected {expected}"
        );
    }
    let outside = |limit: f32| values.iter().filter(|v| v.abs() > limit).count() as f64 / 1e5;
    assert!((outside(1.0) - 0.3173).abs() < 0.008);
    assert!((outside(2.0) - 0.0455).abs() < 0.0035);
    assert!((outside(3.0) - 0.0027).abs() < 0.0009);
    Ok(())
}

#[test]
fn bernoulli_compares_the_whole_first_word() -> Result<()> {
    let draws = Tensor::bernoulli([500], 0.3, DType::Bool, &device(), KEY)?.to_vec::<bool>()?;
    for (i, drawn) in draws.iter().enumerate() {
        assert_eq!(
            *drawn,
            f64::from(words(KEY, i)[0]) < (0.3 * 2f64.powi(32)).round()
        );
    }
    assert!(
        Tensor::bernoulli([100], 1.0, DType::Bool, &device(), KEY)?
            .to_vec::<bool>()?
            .iter()
            .all(|b| *b)
    );
    assert!(
        !Tensor::bernoulli([100], 0.0, DType::Bool, &device(), KEY)?
            .to_vec::<bool>()?
            .iter()
            .any(|b| *b)
    );
    Ok(())
}

/// `low + random * range / 2^bits`, rounded down, where `random` has 32 bits more than the range.
fn expected_integer(w: [u32; 4], low: i64, range: u64) -> i64 {
    let below = if range >> 32 == 0 {
        (((u128::from(w[1]) << 32 | u128::from(w[0])) * u128::from(range)) >> 64) as u64
    } else {
        let upper = (u128::from(w[2]) << 32 | u128::from(w[1])) * u128::from(range);
        ((upper + ((u128::from(w[0]) * u128::from(range)) >> 32)) >> 64) as u64
    };
    low.wrapping_add(below as i64)
}

#[test]
fn random_integers_scale_the_words_exactly_for_every_range() -> Result<()> {
    let d = device();
    let ranges = [
        (DType::I64, 0, 1),
        (DType::I64, -3, 7),
        (DType::I64, 5, 5 + (1 << 32) - 1),
        (DType::I64, -9, (1 << 32) - 9),
    ];
    let wide = [
        (DType::I64, 0, (1 << 32) + 1),
        (DType::I64, -(1 << 45), 1 << 52),
        (DType::I64, i64::MIN, i64::MAX),
        (DType::I32, -(1 << 31), 1 << 31),
    ];
    let small = [
        (DType::U8, 3, 256),
        (DType::U32, 0, 1 << 32),
        (DType::U32, 7, 3_000_000_007),
        (DType::I32, -2_000_000_000, 2_000_000_000),
    ];
    for (dtype, low, high) in ranges.into_iter().chain(wide).chain(small) {
        let range = high.wrapping_sub(low) as u64;
        let values = Tensor::randint([300], low, high, dtype, &d, KEY)?
            .cast(DType::I64)?
            .to_vec::<i64>()?;
        for (i, v) in values.iter().enumerate() {
            assert_eq!(
                *v,
                expected_integer(words(KEY, i), low, range),
                "{dtype} {low} to {high}, element {i}"
            );
            assert!((low..high).contains(v));
        }
    }
    Ok(())
}

#[test]
fn permutations_hold_every_number_once_in_random_order() -> Result<()> {
    for n in [0, 1, 2, 1000] {
        let mut values = Tensor::permutation(n, &device(), KEY)?.to_vec::<i32>()?;
        let fixed = values
            .iter()
            .enumerate()
            .filter(|(i, v)| *i as i32 == **v)
            .count();
        assert!(n < 1000 || fixed < 10, "{fixed} of {n} stayed in place");
        values.sort_unstable();
        assert_eq!(values, (0..n as i32).collect::<Vec<_>>());
    }
    // Each number comes first equally often.
    let mut first = [0usize; 4];
    for stream in 0..4000 {
        first[Tensor::permutation(4, &device(), Rng { stream, ..KEY })?.to_vec::<i32>()?[0]
            as usize] += 1;
    }
    assert!(first.iter().all(|n| n.abs_diff(1000) < 140), "{first:?}");
    Ok(())
}

#[test]
fn multinomial_draws_in_proportion_to_the_weights() -> Result<()> {
    let d = device();
    let weights = [0f32, 1.0, 3.0, 0.0, 4.0, 0.0, 2.0, 0.0, 0.0, 0.0, 5.0, 0.0];
    let x = Tensor::from_slice(&weights, [2, 6], &d)?;
    let n = 20_000;
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let draws = x.cast(dtype)?.multinomial(n, true, KEY)?;
        assert_eq!(draws.dims(), [2, n]);
        let draws = draws.to_vec::<i32>()?;
        for row in 0..2 {
            let total: f32 = weights[6 * row..6 * row + 6].iter().sum();
            for column in 0..6 {
                let p = f64::from(weights[6 * row + column] / total);
                let count = draws[row * n..(row + 1) * n]
                    .iter()
                    .filter(|v| **v as usize == column)
                    .count() as f64;
                assert!(
                    (count - p * n as f64).abs() <= 5.0 * (p * (1.0 - p) * n as f64).sqrt(),
                    "{dtype} row {row} column {column}: {count}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn without_replacement_no_position_comes_twice() -> Result<()> {
    let d = device();
    let x = Tensor::from_slice(&[1f32, 0.0, 2.0, 5.0], [4], &d)?.expand([3000, 4])?;
    let draws = x.multinomial(3, false, KEY)?.to_vec::<i32>()?;
    let mut first = [0f64; 4];
    for draw in draws.chunks(3) {
        let mut sorted = draw.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 2, 3], "the three positions with weight");
        first[draw[0] as usize] += 1.0;
    }
    for (count, p) in first.iter().zip([0.125, 0.0, 0.25, 0.625f64]) {
        assert!(
            (count - 3000.0 * p).abs() <= 5.0 * (3000.0 * p * (1.0 - p)).sqrt(),
            "{first:?}"
        );
    }
    Ok(())
}

#[test]
fn empty_draws_are_ordinary() -> Result<()> {
    let d = device();
    assert_eq!(
        Tensor::normal([0, 3], 0.0, 1.0, DType::F32, &d, KEY)?.dims(),
        [0, 3]
    );
    assert_eq!(
        Tensor::uniform((), 0.0, 1.0, DType::F32, &d, KEY)?.numel(),
        1
    );
    let none = Tensor::ones([0, 4], DType::F32, &d)?;
    assert_eq!(none.multinomial(2, true, KEY)?.dims(), [0, 2]);
    assert_eq!(
        Tensor::ones([3, 4], DType::F32, &d)?
            .multinomial(0, false, KEY)?
            .dims(),
        [3, 0]
    );
    Ok(())
}

#[test]
fn arguments_outside_their_domain_are_errors() -> Result<()> {
    let d = device();
    let uniform = |low, high, dtype| Tensor::uniform([2], low, high, dtype, &d, KEY);
    for (low, high) in [
        (1.0, 1.0),
        (2.0, 1.0),
        (f64::NAN, 1.0),
        (0.0, f64::INFINITY),
        (1e39, 2e39),
        (-3e38, 3e38),
    ] {
        assert!(
            matches!(uniform(low, high, DType::F32), Err(Error::Argument { .. })),
            "{low} {high}"
        );
    }
    assert!(
        matches!(
            uniform(1.01, 1.02, DType::F8E5M2),
            Err(Error::Argument { .. })
        ),
        "no value of the dtype lies between"
    );
    assert!(matches!(
        uniform(0.0, 1.0, DType::I32),
        Err(Error::DType { .. })
    ));
    for (mean, std) in [(0.0, -1.0), (f64::NAN, 1.0), (0.0, f64::INFINITY)] {
        assert!(matches!(
            Tensor::normal([2], mean, std, DType::F32, &d, KEY),
            Err(Error::Argument { .. })
        ));
    }
    for p in [-0.1, 1.5, f64::NAN] {
        assert!(matches!(
            Tensor::bernoulli([2], p, DType::Bool, &d, KEY),
            Err(Error::Argument { .. })
        ));
    }
    assert!(matches!(
        Tensor::randint([2], 3, 3, DType::I32, &d, KEY),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::randint([2], 0, 257, DType::U8, &d, KEY),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::randint([2], -1, 3, DType::U32, &d, KEY),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::randint([2], 0, 3, DType::F32, &d, KEY),
        Err(Error::DType { .. })
    ));
    assert!(matches!(
        Tensor::permutation(usize::MAX, &d, KEY),
        Err(Error::Positions { .. })
    ));
    let weights = Tensor::ones([2, 3], DType::F32, &d)?;
    assert!(matches!(
        weights.multinomial(4, false, KEY),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Tensor::ones((), DType::F32, &d)?.multinomial(1, true, KEY),
        Err(Error::Shape { .. })
    ));
    assert!(matches!(
        Tensor::ones([2, 0], DType::F32, &d)?.multinomial(1, true, KEY),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        weights.cast(DType::I32)?.multinomial(1, true, KEY),
        Err(Error::DType { .. })
    ));
    assert!(matches!(
        Tensor::normal([1 << 40, 1 << 40], 0.0, 1.0, DType::F32, &d, KEY),
        Err(Error::SizeOverflow { .. })
    ));
    Ok(())
}
