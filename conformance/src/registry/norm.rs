//! Normalisations, softmax, and vectors compared by direction.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Sample, attr, entry, one,
    sample::{floats, small},
};
use anymesh_core::{Result, Tensor, ops::NormOptions};
use serde_json::json;

const AXIS: Attr = attr(
    "axis",
    AttrKind::Int,
    "-1",
    "the dimension along which vectors lie",
);
const DIMS: Attr = attr(
    "dims",
    AttrKind::Size,
    "1",
    "how many of the last dimensions are normalised together",
);
const EPS: Attr = attr(
    "eps",
    AttrKind::Float,
    "0.00001",
    "what keeps the divisor from zero",
);
const GROUPS: Attr = attr(
    "groups",
    AttrKind::Size,
    "1",
    "the number of runs of channels",
);
const ORDER: Attr = attr("p", AttrKind::Float, "2", "the order of the norm");
const TINY: Attr = attr("eps", AttrKind::Float, "1e-12", "the least divisor");
const LEAST: Attr = attr("eps", AttrKind::Float, "1e-8", "the least norm");

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "softmax",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.softmax(c.attrs.int("axis")?)),
        softmaxes,
    ),
    entry(
        "log_softmax",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.log_softmax(c.attrs.int("axis")?)),
        softmaxes,
    ),
    entry(
        "layer_norm",
        "x, weight?, bias?",
        &[DIMS, EPS],
        layer_norm,
        layer_norms,
    ),
    entry(
        "rms_norm",
        "x, weight?",
        &[DIMS, EPS],
        |c| {
            let options = NormOptions {
                bias: None,
                ..options(c, 1)?
            };
            one(c.x(0)?.rms_norm(&options.dims(c.attrs.size("dims")?)))
        },
        rms_norms,
    ),
    entry(
        "add_layer_norm",
        "x, branch, weight?, bias?",
        &[DIMS, EPS],
        |c| {
            let options = options(c, 2)?.dims(c.attrs.size("dims")?);
            let (sum, normed) = c.x(0)?.add_layer_norm(c.x(1)?, &options)?;
            Ok(vec![sum, normed])
        },
        sums_and_layer_norms,
    ),
    entry(
        "add_rms_norm",
        "x, branch, weight?",
        &[DIMS, EPS],
        |c| {
            let options = NormOptions {
                bias: None,
                dims: c.attrs.size("dims")?,
                ..options(c, 2)?
            };
            let (sum, normed) = c.x(0)?.add_rms_norm(c.x(1)?, &options)?;
            Ok(vec![sum, normed])
        },
        sums_and_rms_norms,
    ),
    entry(
        "group_norm",
        "x, weight?, bias?",
        &[GROUPS, EPS],
        group_norm,
        group_norms,
    ),
    entry(
        "instance_norm",
        "x, weight?, bias?",
        &[EPS],
        |c| one(c.x(0)?.instance_norm(&options(c, 1)?)),
        channel_norms,
    ),
    entry(
        "batch_norm",
        "x, mean, var, weight?, bias?",
        &[EPS],
        batch_norm,
        batch_norms,
    ),
    entry(
        "batch_norm_train",
        "x, weight?, bias?",
        &[EPS],
        batch_norm_train,
        channel_norms,
    ),
    entry(
        "normalize",
        "x",
        &[ORDER, AXIS, TINY],
        normalize,
        normalizations,
    ),
    entry(
        "cosine_similarity",
        "x, y",
        &[AXIS, LEAST],
        |c| {
            one(c
                .x(0)?
                .cosine_similarity(c.x(1)?, c.attrs.int("axis")?, c.attrs.float("eps")?))
        },
        similarities,
    ),
];

/// Weight and bias from operand `first` on, and `eps`.
fn options<'c>(c: &Call<'c>, first: usize) -> Result<NormOptions<'c>> {
    Ok(NormOptions {
        weight: c.maybe(first),
        bias: c.maybe(first + 1),
        eps: c.attrs.float("eps")?,
        ..NormOptions::new()
    })
}

fn layer_norm(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c
        .x(0)?
        .layer_norm(&options(c, 1)?.dims(c.attrs.size("dims")?)))
}

fn group_norm(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.group_norm(c.attrs.size("groups")?, &options(c, 1)?))
}

fn batch_norm(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.batch_norm(c.x(1)?, c.x(2)?, &options(c, 3)?))
}

fn batch_norm_train(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let norm = c.x(0)?.batch_norm_train(&options(c, 1)?)?;
    Ok(vec![norm.out, norm.mean, norm.var])
}

fn normalize(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.normalize(
        c.attrs.float("p")?,
        c.attrs.int("axis")?,
        c.attrs.float("eps")?,
    ))
}

/// Means and roots round, and so depend on the order of sums.
fn rounded<const N: usize>(samples: [Sample; N]) -> Vec<Sample> {
    samples.map(|sample| sample.exact(false)).into()
}

fn softmaxes(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7])], json!({"axis": 0})),
        Sample::new([small(&[4, 2, 3])], json!({})),
        Sample::new([small(&[2, 8])], json!({"axis": 1})),
        Sample::new([small(&[8])], json!({"axis": 0})),
    ])
}

fn layer_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7]), small(&[7]), small(&[7])], json!({})),
        Sample::new(
            [small(&[4, 2, 3]), small(&[2, 3])],
            json!({"dims": 2, "eps": 0.125}),
        ),
        Sample::new([small(&[3, 8]), small(&[8])], json!({})).without(1),
        Sample::new([small(&[2, 4])], json!({"dims": 1})),
    ])
}

fn rms_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7]), small(&[7])], json!({})),
        Sample::new(
            [small(&[4, 2, 3]), small(&[2, 3])],
            json!({"dims": 2, "eps": 0.125}),
        ),
        Sample::new([small(&[3, 8])], json!({})),
    ])
}

fn sums_and_layer_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new(
            [small(&[5, 7]), small(&[5, 7]), small(&[7]), small(&[7])],
            json!({}),
        ),
        Sample::new(
            [small(&[4, 2, 3]), small(&[4, 2, 3]), small(&[2, 3])],
            json!({"dims": 2, "eps": 0.125}),
        ),
        Sample::new([small(&[3, 8]), small(&[3, 8]), small(&[8])], json!({})).without(2),
        Sample::new([small(&[2, 4]), small(&[2, 4])], json!({"dims": 1})),
    ])
}

fn sums_and_rms_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7]), small(&[5, 7]), small(&[7])], json!({})),
        Sample::new(
            [small(&[4, 2, 3]), small(&[4, 2, 3]), small(&[2, 3])],
            json!({"dims": 2, "eps": 0.125}),
        ),
        Sample::new([small(&[3, 8]), small(&[3, 8])], json!({})),
    ])
}

fn group_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new(
            [small(&[5, 4, 3]), small(&[4]), small(&[4])],
            json!({"groups": 2}),
        ),
        Sample::new(
            [small(&[2, 6, 4]), small(&[6])],
            json!({"groups": 3, "eps": 0.125}),
        ),
        Sample::new([small(&[4, 8]), small(&[8])], json!({"groups": 4})).without(1),
        Sample::new([small(&[3, 5, 2])], json!({})),
    ])
}

fn channel_norms(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 3, 4]), small(&[3]), small(&[3])], json!({})),
        Sample::new([small(&[4, 2, 5]), small(&[2])], json!({"eps": 0.125})),
        Sample::new([small(&[2, 4, 2, 3]), small(&[4])], json!({})).without(1),
        Sample::new([small(&[3, 5, 2])], json!({})),
    ])
}

fn batch_norms(_: &'static str) -> Vec<Sample> {
    let variances = |shape: &[usize]| floats(shape, Fill::Int { lo: 1, hi: 4 });
    // With given statistics each element is on its own.
    vec![
        Sample::new(
            [
                small(&[5, 3, 2]),
                small(&[3]),
                variances(&[3]),
                small(&[3]),
                small(&[3]),
            ],
            json!({}),
        ),
        Sample::new(
            [small(&[4, 2, 5]), small(&[2]), variances(&[2]), small(&[2])],
            json!({"eps": 0.125}),
        ),
        Sample::new(
            [small(&[2, 8]), small(&[8]), variances(&[8]), small(&[8])],
            json!({}),
        )
        .without(3),
        Sample::new([small(&[3, 5]), small(&[5]), variances(&[5])], json!({})),
    ]
}

fn normalizations(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7])], json!({})),
        Sample::new([small(&[4, 2, 3])], json!({"axis": 0, "p": 1})),
        Sample::new([small(&[2, 8])], json!({"p": "inf", "eps": 0.5})),
        Sample::new([small(&[8, 3])], json!({"p": 3, "axis": -2})),
    ])
}

fn similarities(_: &'static str) -> Vec<Sample> {
    rounded([
        Sample::new([small(&[5, 7]), small(&[5, 7])], json!({})),
        Sample::new([small(&[4, 2, 3]), small(&[4, 2, 3])], json!({"axis": 0})),
        Sample::new(
            [small(&[2, 8]), small(&[2, 8])],
            json!({"axis": 1, "eps": 0.5}),
        ),
    ])
}
