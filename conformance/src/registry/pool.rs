//! Pools and resizing.

use super::{
    Attr, AttrKind, Call, Entry, Sample, attr, entry, one, required,
    sample::{distinct, small},
    two,
};
use anymesh_core::{
    Result, Tensor,
    ops::{AvgPool, Interpolate, MaxPool},
};
use serde_json::{Value, json};

const KERNEL: Attr = required("kernel", AttrKind::Sizes, "the size of the window");
const STRIDE: Attr = attr(
    "stride",
    AttrKind::Sizes,
    "null",
    "the step of the window; its size where absent",
);
const PADDING: Attr = attr(
    "padding",
    AttrKind::Sizes,
    "0",
    "places before and after each dimension",
);
const DILATION: Attr = attr(
    "dilation",
    AttrKind::Sizes,
    "1",
    "the step between the elements of a window",
);
const CEIL: Attr = attr(
    "ceil_mode",
    AttrKind::Bool,
    "false",
    "whether a window may reach over the end",
);
const COUNT_PAD: Attr = attr(
    "count_include_pad",
    AttrKind::Bool,
    "true",
    "whether padding counts in the mean",
);
const OUT: Attr = required("out", AttrKind::Sizes, "the sizes of the result");
const MAX: &[Attr] = &[KERNEL, STRIDE, PADDING, DILATION, CEIL];
const AVG: &[Attr] = &[KERNEL, STRIDE, PADDING, CEIL, COUNT_PAD];
const RESIZE: &[Attr] = &[
    required(
        "size",
        AttrKind::Sizes,
        "the new sizes of the last dimensions",
    ),
    attr(
        "mode",
        AttrKind::Choice(&["nearest", "linear"]),
        "\"nearest\"",
        "how a value between elements is found",
    ),
    attr(
        "align_corners",
        AttrKind::Bool,
        "false",
        "whether the first and last elements keep their places",
    ),
];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "max_pool1d",
        "x",
        MAX,
        |c| one(c.x(0)?.max_pool1d(&max_options(c)?)),
        |_| max_pools(1),
    ),
    entry(
        "max_pool2d",
        "x",
        MAX,
        |c| one(c.x(0)?.max_pool2d(&max_options(c)?)),
        |_| max_pools(2),
    ),
    entry(
        "max_pool3d",
        "x",
        MAX,
        |c| one(c.x(0)?.max_pool3d(&max_options(c)?)),
        |_| max_pools(3),
    ),
    entry(
        "max_pool1d_with_indices",
        "x",
        MAX,
        |c| two(c.x(0)?.max_pool1d_with_indices(&max_options(c)?)),
        |_| max_pools(1),
    ),
    entry(
        "max_pool2d_with_indices",
        "x",
        MAX,
        |c| two(c.x(0)?.max_pool2d_with_indices(&max_options(c)?)),
        |_| max_pools(2),
    ),
    entry(
        "max_pool3d_with_indices",
        "x",
        MAX,
        |c| two(c.x(0)?.max_pool3d_with_indices(&max_options(c)?)),
        |_| max_pools(3),
    ),
    entry(
        "avg_pool1d",
        "x",
        AVG,
        |c| one(c.x(0)?.avg_pool1d(&avg_options(c)?)),
        |_| avg_pools(1),
    ),
    entry(
        "avg_pool2d",
        "x",
        AVG,
        |c| one(c.x(0)?.avg_pool2d(&avg_options(c)?)),
        |_| avg_pools(2),
    ),
    entry(
        "avg_pool3d",
        "x",
        AVG,
        |c| one(c.x(0)?.avg_pool3d(&avg_options(c)?)),
        |_| avg_pools(3),
    ),
    entry(
        "adaptive_max_pool1d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_max_pool1d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 1),
    ),
    entry(
        "adaptive_max_pool2d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_max_pool2d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 2),
    ),
    entry(
        "adaptive_max_pool3d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_max_pool3d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 3),
    ),
    entry(
        "adaptive_avg_pool1d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_avg_pool1d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 1),
    ),
    entry(
        "adaptive_avg_pool2d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_avg_pool2d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 2),
    ),
    entry(
        "adaptive_avg_pool3d",
        "x",
        &[OUT],
        |c| one(c.x(0)?.adaptive_avg_pool3d(c.attrs.array("out")?)),
        |op| adaptive_pools(op, 3),
    ),
    entry("interpolate", "x", RESIZE, interpolate, interpolations),
];

/// The step of the window, or its size.
fn stride<const N: usize>(c: &Call<'_>) -> Result<[usize; N]> {
    c.attrs.array(if c.attrs.is_given("stride") {
        "stride"
    } else {
        "kernel"
    })
}

fn max_options<const N: usize>(c: &Call<'_>) -> Result<MaxPool<N>> {
    let a = c.attrs;
    Ok(MaxPool {
        kernel: a.array("kernel")?,
        stride: stride(c)?,
        padding: a.array("padding")?,
        dilation: a.array("dilation")?,
        ceil_mode: a.bool("ceil_mode")?,
    })
}

fn avg_options<const N: usize>(c: &Call<'_>) -> Result<AvgPool<N>> {
    let a = c.attrs;
    Ok(AvgPool {
        kernel: a.array("kernel")?,
        stride: stride(c)?,
        padding: a.array("padding")?,
        ceil_mode: a.bool("ceil_mode")?,
        count_include_pad: a.bool("count_include_pad")?,
    })
}

fn interpolate(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let linear = Interpolate::Linear {
        align_corners: c.attrs.bool("align_corners")?,
    };
    let mode = c.attrs.choice(
        "mode",
        &[("nearest", Interpolate::Nearest), ("linear", linear)],
    )?;
    one(c.x(0)?.interpolate(&c.attrs.sizes("size")?, mode))
}

/// A shape with the spatial sizes of `n` dimensions behind `lead`.
fn dims(lead: &[usize], space: [usize; 3], n: usize) -> Vec<usize> {
    lead.iter().chain(&space[..n]).copied().collect()
}

fn max_pools(n: usize) -> Vec<Sample> {
    let per = |sizes: [usize; 3]| sizes[..n].to_vec();
    let call = |lead: &[usize], space, attrs| Sample::new([distinct(&dims(lead, space, n))], attrs);
    vec![
        call(&[5, 3], [4, 1, 1], json!({"kernel": per([2, 1, 1])})),
        call(
            &[2, 4],
            [5, 1, 1],
            json!({"kernel": per([3, 1, 1]), "stride": 2, "padding": per([1, 0, 0])}),
        ),
        // Ties: the position of the first one counts.
        Sample::new(
            [small(&dims(&[1, 3], [5, 2, 2], n))],
            json!({"kernel": 2, "dilation": per([2, 1, 1]), "ceil_mode": true, "stride": 1}),
        ),
        call(&[4], [7, 2, 1], json!({"kernel": per([3, 2, 1])})),
    ]
}

fn avg_pools(n: usize) -> Vec<Sample> {
    let per = |sizes: [usize; 3]| sizes[..n].to_vec();
    let call =
        |lead: &[usize], space, attrs: Value| Sample::new([small(&dims(lead, space, n))], attrs);
    vec![
        // Windows of a power of two elements.
        call(&[5, 3], [4, 1, 1], json!({"kernel": per([2, 1, 1])})),
        call(
            &[2, 4],
            [5, 1, 1],
            json!({"kernel": per([2, 1, 1]), "stride": 2, "padding": per([1, 0, 0]), "count_include_pad": false}),
        ),
        call(&[1, 3], [5, 2, 2], json!({"kernel": 2, "ceil_mode": true})),
        call(&[4], [7, 2, 1], json!({"kernel": per([3, 1, 1])})).exact(false),
    ]
}

fn adaptive_pools(op: &'static str, n: usize) -> Vec<Sample> {
    let max = op.starts_with("adaptive_max");
    let call = |lead: &[usize], space, out: [usize; 3]| {
        Sample::new([small(&dims(lead, space, n))], json!({"out": out[..n]}))
    };
    vec![
        call(&[5, 3], [4, 1, 1], [2, 1, 1]),
        call(&[2, 4], [5, 1, 1], [3, 2, 1]).exact(max),
        call(&[3], [7, 2, 1], [3, 1, 2]).exact(max),
    ]
}

fn interpolations(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([distinct(&[5, 3, 4])], json!({"size": 7})),
        Sample::new([distinct(&[2, 4, 3, 2])], json!({"size": [2, 5]})),
        // Weights of eighths.
        Sample::new([small(&[3, 4, 4])], json!({"size": [8], "mode": "linear"})),
        Sample::new(
            [small(&[4, 2, 3])],
            json!({"size": [3, 5], "mode": "linear", "align_corners": true}),
        ),
        Sample::new([small(&[5, 2, 3])], json!({"size": 4, "mode": "linear"})).exact(false),
    ]
}
