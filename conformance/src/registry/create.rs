//! Tensors from nothing but numbers, and random ones.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Sample, attr, entry, one, required,
    sample::{floats, small},
    two,
};
use anymesh_core::{Result, Tensor, ops::RopeOptions};
use serde_json::{Value, json};

const SHAPE: Attr = required("shape", AttrKind::Sizes, "the shape");
const DTYPE: Attr = attr("dtype", AttrKind::DType, "\"f32\"", "the dtype");
const START: Attr = attr("start", AttrKind::Number, "0", "the first value");
const ROWS: Attr = required("n", AttrKind::Size, "the number of rows");
const COLUMNS: Attr = required("m", AttrKind::Size, "the number of columns");
const K: Attr = attr("k", AttrKind::Int, "0", "the diagonal: column minus row");
const SEED: Attr = attr("seed", AttrKind::Size, "0", "the seed");
const STREAM: Attr = attr("stream", AttrKind::Size, "0", "which draw of the seed");
const P: Attr = attr("p", AttrKind::Float, "0.5", "the probability");
const BAND: &[Attr] = &[ROWS, COLUMNS, K];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "full",
        "",
        &[
            SHAPE,
            required("value", AttrKind::Number, "the value"),
            DTYPE,
        ],
        full,
        |_| {
            calls([
                json!({"shape": [5, 7], "value": 2}),
                json!({"shape": [4, 2, 3], "value": 1, "dtype": "i32"}),
                json!({"shape": [8], "value": true, "dtype": "bool"}),
            ])
        },
    ),
    entry("arange", "", ARANGE, arange, |_| {
        calls([
            json!({"end": 7}),
            json!({"start": 9, "end": 1, "step": -1, "dtype": "i32"}),
            json!({"start": 0.5, "end": 2, "step": 0.75, "dtype": "f32"}),
        ])
    }),
    entry("linspace", "", LINSPACE, linspace, |_| {
        calls([
            json!({"start": -1, "end": 2, "n": 7}),
            json!({"end": 1, "n": 8}),
            json!({"start": 3, "end": 4, "n": 2, "dtype": "f16"}),
        ])
    }),
    entry("eye", "", &[ROWS, COLUMNS, K, DTYPE], eye, |_| {
        calls([
            json!({"n": 5, "m": 7}),
            json!({"n": 8, "m": 4, "k": -2, "dtype": "i32"}),
            json!({"n": 2, "m": 3, "k": 1}),
        ])
    }),
    entry(
        "tril_mask",
        "",
        BAND,
        |c| band(c, |n, m, k, c| Tensor::tril_mask(n, m, k, c.place)),
        bands,
    ),
    entry(
        "triu_mask",
        "",
        BAND,
        |c| band(c, |n, m, k, c| Tensor::triu_mask(n, m, k, c.place)),
        bands,
    ),
    entry(
        "causal_mask",
        "",
        CAUSAL,
        |c| {
            one(Tensor::causal_mask(
                c.attrs.size("queries")?,
                c.attrs.size("keys")?,
                c.place,
            ))
        },
        |_| {
            calls([
                json!({"queries": 5, "keys": 7}),
                json!({"queries": 4, "keys": 8}),
                json!({"queries": 3, "keys": 2}),
            ])
        },
    ),
    entry("rope_tables", "", ROPE, rope, |_| {
        calls([
            json!({"length": 5, "d": 6}),
            json!({"length": 4, "d": 8, "base": 100, "offset": 3}),
            json!({"length": 2, "d": 2}),
        ])
    }),
    entry(
        "uniform",
        "",
        &[
            SHAPE,
            attr("low", AttrKind::Float, "0", "the least value"),
            attr(
                "high",
                AttrKind::Float,
                "1",
                "the bound that is not reached",
            ),
            DTYPE,
            SEED,
            STREAM,
        ],
        uniform,
        |_| {
            drawn([
                json!({"low": -1, "high": 2}),
                json!({"dtype": "bf16"}),
                json!({"seed": 3, "stream": 2}),
            ])
        },
    ),
    entry(
        "normal",
        "",
        &[
            SHAPE,
            attr("mean", AttrKind::Float, "0", "the mean"),
            attr("std", AttrKind::Float, "1", "the standard deviation"),
            DTYPE,
            SEED,
            STREAM,
        ],
        normal,
        |_| {
            drawn([
                json!({"mean": 1, "std": 2}),
                json!({"dtype": "f16"}),
                json!({"seed": 3, "stream": 2}),
            ])
        },
    ),
    entry(
        "bernoulli",
        "",
        &[SHAPE, P, DTYPE, SEED, STREAM],
        bernoulli,
        |_| {
            drawn([
                json!({"p": 0.25}),
                json!({"dtype": "bool"}),
                json!({"seed": 3, "stream": 2}),
            ])
        },
    ),
    entry("randint", "", RANDINT, randint, |_| {
        drawn([
            json!({"low": -4, "high": 9}),
            json!({"high": 5, "dtype": "u8"}),
            json!({"high": 7, "seed": 3, "stream": 2}),
        ])
    }),
    entry(
        "permutation",
        "",
        &[
            required("n", AttrKind::Size, "how many numbers"),
            SEED,
            STREAM,
        ],
        permutation,
        |_| {
            calls([
                json!({"n": 7}),
                json!({"n": 8, "seed": 3}),
                json!({"n": 2, "stream": 1}),
            ])
        },
    ),
    entry("multinomial", "x", MULTINOMIAL, multinomial, multinomials),
    entry(
        "dropout",
        "x",
        &[P, SEED, STREAM],
        |c| one(c.x(0)?.dropout(c.attrs.float("p")?, c.attrs.rng()?)),
        dropouts,
    ),
    entry(
        "dropout_add",
        "x, residual",
        &[P, SEED, STREAM],
        |c| {
            one(c
                .x(0)?
                .dropout_add(c.x(1)?, c.attrs.float("p")?, c.attrs.rng()?))
        },
        dropouts,
    ),
    entry(
        "dropout_mask",
        "",
        &[SHAPE, P, SEED, STREAM],
        |c| {
            one(Tensor::dropout_mask(
                c.attrs.sizes("shape")?,
                c.attrs.float("p")?,
                c.place,
                c.attrs.rng()?,
            ))
        },
        |_| {
            drawn([
                json!({"p": 0.25}),
                json!({}),
                json!({"seed": 3, "stream": 2}),
            ])
        },
    ),
];

const ARANGE: &[Attr] = &[
    START,
    required("end", AttrKind::Number, "the bound that is not reached"),
    attr("step", AttrKind::Number, "1", "the distance of neighbours"),
    attr("dtype", AttrKind::DType, "\"i32\"", "the dtype"),
];
const LINSPACE: &[Attr] = &[
    attr("start", AttrKind::Float, "0", "the first value"),
    required("end", AttrKind::Float, "the last value"),
    required("n", AttrKind::Size, "how many values"),
    DTYPE,
];
const CAUSAL: &[Attr] = &[
    required("queries", AttrKind::Size, "the number of rows"),
    required("keys", AttrKind::Size, "the number of columns"),
];
const ROPE: &[Attr] = &[
    required("length", AttrKind::Size, "the number of positions"),
    required("d", AttrKind::Size, "the size of the vectors to rotate"),
    attr(
        "base",
        AttrKind::Float,
        "10000",
        "the base of the frequencies",
    ),
    attr("offset", AttrKind::Size, "0", "the first position"),
];
const RANDINT: &[Attr] = &[
    SHAPE,
    attr("low", AttrKind::Int, "0", "the least value"),
    required("high", AttrKind::Int, "the bound that is not reached"),
    attr("dtype", AttrKind::DType, "\"i32\"", "the dtype"),
    SEED,
    STREAM,
];
const MULTINOMIAL: &[Attr] = &[
    required("samples", AttrKind::Size, "positions to draw from each row"),
    attr(
        "replacement",
        AttrKind::Bool,
        "false",
        "whether a position may come twice",
    ),
    SEED,
    STREAM,
];

fn full(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(Tensor::full(
        c.attrs.sizes("shape")?,
        c.attrs.number("value")?,
        c.attrs.dtype("dtype")?,
        c.place,
    ))
}

fn arange(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::arange(
        a.number("start")?,
        a.number("end")?,
        a.number("step")?,
        a.dtype("dtype")?,
        c.place,
    ))
}

fn linspace(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::linspace(
        a.float("start")?,
        a.float("end")?,
        a.size("n")?,
        a.dtype("dtype")?,
        c.place,
    ))
}

fn eye(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(Tensor::eye(
        c.attrs.size("n")?,
        c.attrs.size("m")?,
        c.attrs.int("k")?,
        c.attrs.dtype("dtype")?,
        c.place,
    ))
}

fn band(
    c: &Call<'_>,
    f: fn(usize, usize, i64, &Call<'_>) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    one(f(
        c.attrs.size("n")?,
        c.attrs.size("m")?,
        c.attrs.int("k")?,
        c,
    ))
}

fn rope(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    two(Tensor::rope_tables(
        a.size("length")?,
        a.size("d")?,
        &RopeOptions {
            base: a.float("base")?,
            offset: a.size("offset")?,
        },
        c.place,
    ))
}

fn uniform(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::uniform(
        a.sizes("shape")?,
        a.float("low")?,
        a.float("high")?,
        a.dtype("dtype")?,
        c.place,
        a.rng()?,
    ))
}

fn normal(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::normal(
        a.sizes("shape")?,
        a.float("mean")?,
        a.float("std")?,
        a.dtype("dtype")?,
        c.place,
        a.rng()?,
    ))
}

fn bernoulli(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::bernoulli(
        a.sizes("shape")?,
        a.float("p")?,
        a.dtype("dtype")?,
        c.place,
        a.rng()?,
    ))
}

fn randint(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(Tensor::randint(
        a.sizes("shape")?,
        a.int("low")?,
        a.int("high")?,
        a.dtype("dtype")?,
        c.place,
        a.rng()?,
    ))
}

fn permutation(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(Tensor::permutation(
        c.attrs.size("n")?,
        c.place,
        c.attrs.rng()?,
    ))
}

fn multinomial(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.multinomial(
        c.attrs.size("samples")?,
        c.attrs.bool("replacement")?,
        c.attrs.rng()?,
    ))
}

/// Calls without operands.
fn calls<const N: usize>(attrs: [Value; N]) -> Vec<Sample> {
    attrs
        .into_iter()
        .map(|attrs| Sample::new([], attrs))
        .collect()
}

/// Calls of random ops, in three shapes.
fn drawn(attrs: [Value; 3]) -> Vec<Sample> {
    let shapes: [&[usize]; 3] = [&[5, 7], &[4, 2, 3], &[8]];
    let with_shape = |(mut attrs, shape): (Value, &[usize])| {
        attrs["shape"] = json!(shape);
        Sample::new([], attrs)
    };
    attrs.into_iter().zip(shapes).map(with_shape).collect()
}

fn bands(_: &'static str) -> Vec<Sample> {
    calls([
        json!({"n": 5, "m": 7}),
        json!({"n": 8, "m": 4, "k": -2}),
        json!({"n": 2, "m": 3, "k": 1}),
    ])
}

fn multinomials(_: &'static str) -> Vec<Sample> {
    let weights = |shape: &[usize]| floats(shape, Fill::Int { lo: 1, hi: 4 });
    vec![
        Sample::new([weights(&[5, 7])], json!({"samples": 3})),
        Sample::new(
            [weights(&[4, 3])],
            json!({"samples": 8, "replacement": true, "seed": 3}),
        ),
        Sample::new(
            [weights(&[8])],
            json!({"samples": 5, "replacement": true, "stream": 1}),
        ),
        Sample::new([weights(&[2, 4])], json!({"samples": 4, "seed": 5})),
    ]
}

fn dropouts(op: &'static str) -> Vec<Sample> {
    let operands = if op == "dropout" { 1 } else { 2 };
    let call = |shape: &[usize], attrs| Sample::new(vec![small(shape); operands], attrs);
    vec![
        call(&[5, 7], json!({})),
        call(&[4, 2, 3], json!({"p": 0.75, "seed": 3})),
        call(&[8], json!({"p": 0, "stream": 1})),
    ]
}
