//! Parts of a tensor, as views.

use super::{Attr, AttrKind, Call, Entry, Sample, attr, entry, one, required, shape::over};
use anymesh_core::{Result, Tensor};
use serde_json::json;

const AXIS: Attr = attr("axis", AttrKind::Int, "0", "the dimension to cut");
const SLICE: &[Attr] = &[
    AXIS,
    attr(
        "start",
        AttrKind::Int,
        "null",
        "the first element; negative counts from the end",
    ),
    attr("stop", AttrKind::Int, "null", "the element to stop before"),
    attr(
        "step",
        AttrKind::Int,
        "1",
        "the distance between elements; negative walks backwards",
    ),
];
const NARROW: &[Attr] = &[
    AXIS,
    attr("start", AttrKind::Size, "0", "the first element"),
    required("len", AttrKind::Size, "how many elements"),
];
const DIAGONAL: &[Attr] = &[
    attr("offset", AttrKind::Int, "0", "column minus row"),
    attr("axis1", AttrKind::Int, "0", "the dimension of rows"),
    attr("axis2", AttrKind::Int, "1", "the dimension of columns"),
];
const UNFOLD: &[Attr] = &[
    AXIS,
    required("size", AttrKind::Size, "the number of elements of a window"),
    attr("step", AttrKind::Size, "1", "the distance between windows"),
];

pub(super) const ENTRIES: &[Entry] = &[
    entry("slice", "x", SLICE, slice, slices),
    entry("narrow", "x", NARROW, narrow, |_| {
        over(&[
            (&[5, 7], json!({"axis": 1, "start": 2, "len": 4})),
            (&[8, 3], json!({"start": 4, "len": 4})),
            (&[2, 4], json!({"axis": -2, "len": 1})),
            (&[4], json!({"len": 4})),
        ])
    }),
    entry(
        "split",
        "x",
        &[
            required("sizes", AttrKind::Sizes, "the sizes of the parts"),
            AXIS,
        ],
        split,
        |_| {
            over(&[
                (&[5, 7], json!({"sizes": [3, 0, 2]})),
                (&[3, 8], json!({"sizes": [4, 4], "axis": -1})),
                (&[2, 5, 3], json!({"sizes": [1, 3, 1], "axis": 1})),
            ])
        },
    ),
    entry(
        "chunk",
        "x",
        &[required("n", AttrKind::Size, "the number of parts"), AXIS],
        chunk,
        |_| {
            over(&[
                (&[5, 7], json!({"n": 3})),
                (&[3, 8], json!({"n": 4, "axis": -1})),
                (&[2, 5], json!({"n": 3, "axis": 0})),
            ])
        },
    ),
    entry(
        "unbind",
        "x",
        &[AXIS],
        |c| c.x(0)?.unbind(c.attrs.int("axis")?),
        |_| {
            over(&[
                (&[5, 7], json!({"axis": -1})),
                (&[4, 2, 3], json!({})),
                (&[3, 2], json!({"axis": 1})),
            ])
        },
    ),
    entry(
        "flip",
        "x",
        &[attr(
            "axes",
            AttrKind::Ints,
            "[]",
            "the dimensions to reverse; none means all",
        )],
        flip,
        |_| {
            over(&[
                (&[5, 7], json!({})),
                (&[4, 2, 3], json!({"axes": [0]})),
                (&[2, 8], json!({"axes": [-1]})),
            ])
        },
    ),
    entry("diagonal", "x", DIAGONAL, diagonal, |_| {
        over(&[
            (&[5, 7], json!({})),
            (&[4, 3], json!({"offset": -1})),
            (&[3, 2, 4], json!({"offset": 1, "axis1": 0, "axis2": -1})),
            (&[4, 3, 5], json!({"axis1": 2, "axis2": 1})),
        ])
    }),
    entry("unfold", "x", UNFOLD, unfold, |_| {
        over(&[
            (&[7, 5], json!({"size": 3, "step": 2})),
            (&[3, 8], json!({"axis": -1, "size": 2, "step": 2})),
            (&[2, 5], json!({"axis": 1, "size": 3})),
        ])
    }),
];

fn slice(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let a = c.attrs;
    one(c.x(0)?.slice(
        a.int("axis")?,
        a.opt_int("start")?,
        a.opt_int("stop")?,
        a.int("step")?,
    ))
}

fn narrow(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.narrow(
        c.attrs.int("axis")?,
        c.attrs.size("start")?,
        c.attrs.size("len")?,
    ))
}

fn split(c: &Call<'_>) -> Result<Vec<Tensor>> {
    c.x(0)?
        .split(&c.attrs.sizes("sizes")?, c.attrs.int("axis")?)
}

fn chunk(c: &Call<'_>) -> Result<Vec<Tensor>> {
    c.x(0)?.chunk(c.attrs.size("n")?, c.attrs.int("axis")?)
}

fn flip(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.flip(&c.attrs.ints("axes")?))
}

fn diagonal(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.diagonal(
        c.attrs.int("offset")?,
        c.attrs.int("axis1")?,
        c.attrs.int("axis2")?,
    ))
}

fn unfold(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.unfold(
        c.attrs.int("axis")?,
        c.attrs.size("size")?,
        c.attrs.size("step")?,
    ))
}

fn slices(_: &'static str) -> Vec<Sample> {
    over(&[
        (&[5, 7], json!({"axis": 0, "start": 1})),
        (
            &[4, 8],
            json!({"axis": -1, "start": -1, "stop": null, "step": -3}),
        ),
        (&[8, 3], json!({"stop": 6, "step": 2})),
        (&[2, 4], json!({"axis": 1, "start": 1, "stop": 3})),
    ])
}
