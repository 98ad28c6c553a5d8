//! Tensors from nothing: constants, ranges, masks, and random values, whose bits are the same on
//! every device.

use super::{Cases, Fill, View, input};
use anymesh_core::{DType, Result, Tensor, ops::Rng};

const FLOATS: [DType; 6] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
];

fn one(t: Result<Tensor>) -> Result<Vec<Tensor>> {
    Ok(vec![t?])
}

/// Constants, ranges, identities and masks.
pub(super) fn cases() -> Cases {
    let mut cases = Cases::new("create");
    for dtype in DType::ALL {
        cases.add(
            "full",
            dtype,
            format!("zeros and ones {dtype}[3, 7]"),
            move |d| {
                Ok(vec![
                    Tensor::zeros([3, 7], dtype, d)?,
                    Tensor::ones([3, 7], dtype, d)?,
                    Tensor::ones((), dtype, d)?,
                    Tensor::ones([0, 2], dtype, d)?,
                ])
            },
        );
        for (n, m, k) in [(5, 5, 0), (3, 7, 2), (7, 3, -1), (1, 1, 5)] {
            cases.add(
                "eye",
                dtype,
                format!("{dtype}[{n}, {m}] k = {k}"),
                move |d| one(Tensor::eye(n, m, k, dtype, d)),
            );
        }
        if dtype != DType::Bool {
            for (start, end, step) in [(0, 67, 1), (3, 100, 7), (200, 2, -9), (5, 5, 1)] {
                cases.add(
                    "arange",
                    dtype,
                    format!("{dtype} {start} to {end} by {step}"),
                    move |d| one(Tensor::arange(start, end, step, dtype, d)),
                );
            }
        }
    }
    for (value, dtype) in [
        (-3, DType::I32),
        (-(1i64 << 40), DType::I64),
        (0xffff_fffb, DType::U32),
        (255, DType::U8),
    ] {
        cases.add("full", dtype, format!("{dtype} {value}"), move |d| {
            one(Tensor::full([33], value, dtype, d))
        });
        cases.add(
            "arange",
            dtype,
            format!("{dtype} up to {value}"),
            move |d| one(Tensor::arange(value - 40, value, 3, dtype, d)),
        );
    }
    for dtype in FLOATS {
        cases.add("full", dtype, format!("{dtype} 0.3"), move |d| {
            one(Tensor::full([5, 13], 0.3, dtype, d))
        });
        for (start, end, step) in [(0.0, 1.0, 0.1), (-2.5, 3.0, 0.7), (1.0, -1.0, -0.03125)] {
            cases.add(
                "arange",
                dtype,
                format!("{dtype} {start} to {end} by {step}"),
                move |d| one(Tensor::arange(start, end, step, dtype, d)),
            );
        }
        for (start, end, n) in [
            (0.0, 1.0, 11),
            (-3.0, 5.0, 64),
            (7.5, 7.5, 3),
            (2.0, 9.0, 1),
            (0.0, 1.0, 1001),
        ] {
            cases.add(
                "linspace",
                dtype,
                format!("{dtype} {n} from {start} to {end}"),
                move |d| one(Tensor::linspace(start, end, n, dtype, d)),
            );
        }
    }
    for (n, m, k) in [(5, 5, 0), (4, 9, 3), (9, 4, -2), (3, 67, 1)] {
        cases.add(
            "tril_mask",
            DType::Bool,
            format!("[{n}, {m}] k = {k}"),
            move |d| one(Tensor::tril_mask(n, m, k, d)),
        );
        cases.add(
            "triu_mask",
            DType::Bool,
            format!("[{n}, {m}] k = {k}"),
            move |d| one(Tensor::triu_mask(n, m, k, d)),
        );
        cases.add(
            "causal_mask",
            DType::Bool,
            format!("[{n}, {m}]"),
            move |d| one(Tensor::causal_mask(n, m, d)),
        );
    }
    cases
}

/// Random values. All but the normal distribution are exact.
pub(super) fn random() -> Cases {
    let mut cases = Cases::new("random");
    let keys = [
        Rng::new(0),
        Rng {
            seed: 0xdead_beef_0123_4567,
            stream: 3,
        },
    ];
    for dtype in FLOATS {
        for rng in keys {
            for (low, high) in [(0.0, 1.0), (-3.0, 5.0), (0.1, 0.7)] {
                cases.add(
                    "uniform",
                    dtype,
                    format!("{dtype} {low} to {high} {rng:?}"),
                    move |d| one(Tensor::uniform([7, 37], low, high, dtype, d, rng)),
                );
            }
            for (mean, std) in [(0.0, 1.0), (-2.0, 0.5)] {
                cases.add(
                    "normal",
                    dtype,
                    format!("{dtype} {mean} {std} {rng:?}"),
                    move |d| one(Tensor::normal([7, 37], mean, std, dtype, d, rng)),
                );
            }
        }
    }
    for dtype in DType::ALL {
        for p in [0.0, 0.3, 1.0] {
            cases.add("bernoulli", dtype, format!("{dtype} {p}"), move |d| {
                one(Tensor::bernoulli([5, 51], p, dtype, d, Rng::new(9)))
            });
        }
    }
    let ranges: &[(DType, i64, i64)] = &[
        (DType::U8, 0, 256),
        (DType::U8, 5, 6),
        (DType::I32, -7, 1000),
        (DType::I32, -(1 << 31), 1 << 31),
        (DType::I32, -2_000_000_000, 1_500_000_000),
        (DType::U32, 0, 1 << 32),
        (DType::U32, 0, 3_000_000_000),
        (DType::I64, 0, 10),
        (DType::I64, -(1 << 40), 1 << 41),
        (DType::I64, i64::MIN, i64::MAX),
    ];
    for &(dtype, low, high) in ranges {
        for rng in keys {
            cases.add(
                "randint",
                dtype,
                format!("{dtype} {low} to {high} {rng:?}"),
                move |d| one(Tensor::randint([259], low, high, dtype, d, rng)),
            );
        }
    }
    for n in [0, 1, 2, 100, 1025, 5000] {
        cases.add("permutation", DType::I32, format!("{n}"), move |d| {
            one(Tensor::permutation(n, d, Rng::new(n as u64)))
        });
    }
    for dtype in [DType::F32, DType::BF16] {
        for replacement in [true, false] {
            for (shape, samples) in [(&[10][..], 7), (&[3, 33], 9), (&[2, 2, 5], 1)] {
                cases.add(
                    "multinomial",
                    dtype,
                    format!("{samples} of {dtype}{shape:?}, replacement {replacement}"),
                    move |d| {
                        // Whole weights sum without rounding, so that the choice does not depend on
                        // the order of a sum.
                        let weights =
                            input(d, dtype, shape, View::Sliced, Fill::Integers(1, 8), 4)?;
                        one(weights.multinomial(samples, replacement, Rng::new(11)))
                    },
                );
            }
        }
    }
    cases
}
