//! Views: reshapes, permutations, slices and windows; casts.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one, required,
    sample::{bools, distinct, floats, integers, small},
};
use anymesh_core::{DType, Result, Tensor, ops::Indexing};
use serde_json::{Value, json};

const AXIS: Attr = attr("axis", AttrKind::Int, "0", "the dimension");
const ORDERS: &[(&str, Indexing)] = &[("ij", Indexing::Ij), ("xy", Indexing::Xy)];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "cast",
        "x",
        &[required("dtype", AttrKind::DType, "what to convert to")],
        |c| one(c.x(0)?.cast(c.attrs.dtype("dtype")?)),
        casts,
    ),
    entry(
        "contiguous",
        "x",
        &[],
        |c| one(c.x(0)?.contiguous()),
        |_| over(&[(&[5, 7], json!({})), (&[4, 2, 3], json!({}))]),
    ),
    entry(
        "reshape",
        "x",
        &[required(
            "dims",
            AttrKind::Ints,
            "the new shape; one size may be -1",
        )],
        reshape,
        reshapes,
    ),
    entry(
        "flatten",
        "x",
        FLATTEN,
        |c| one(c.x(0)?.flatten(c.attrs.int("start")?, c.attrs.int("end")?)),
        flattens,
    ),
    entry(
        "squeeze",
        "x",
        &[attr(
            "axes",
            AttrKind::Ints,
            "[]",
            "the dimensions of size 1 to remove; none means all",
        )],
        squeeze,
        squeezes,
    ),
    entry(
        "unsqueeze",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.unsqueeze(c.attrs.int("axis")?)),
        |_| {
            over(&[
                (&[5, 7], json!({"axis": 0})),
                (&[4, 3], json!({"axis": -1})),
                (&[2, 8], json!({"axis": 1})),
            ])
        },
    ),
    entry(
        "transpose",
        "x",
        TRANSPOSE,
        |c| one(c.x(0)?.transpose(c.attrs.int("a")?, c.attrs.int("b")?)),
        |_| {
            over(&[
                (&[5, 7], json!({})),
                (&[4, 2, 3], json!({"a": 0, "b": -1})),
                (&[2, 8], json!({"a": 1, "b": 1})),
            ])
        },
    ),
    entry(
        "permute",
        "x",
        &[required(
            "axes",
            AttrKind::Ints,
            "all dimensions in their new order",
        )],
        permute,
        |_| {
            over(&[
                (&[5, 7], json!({"axes": [1, 0]})),
                (&[4, 2, 3], json!({"axes": [2, 0, 1]})),
                (&[4, 2, 3], json!({"axes": [-1, 1, 0]})),
            ])
        },
    ),
    entry(
        "movedim",
        "x",
        MOVE,
        |c| {
            one(c
                .x(0)?
                .movedim(&c.attrs.ints("from")?, &c.attrs.ints("to")?))
        },
        |_| {
            over(&[
                (&[4, 2, 3], json!({"from": 0, "to": -1})),
                (&[5, 1, 7], json!({"from": [2, 0], "to": [0, 1]})),
            ])
        },
    ),
    entry(
        "expand",
        "x",
        &[required("shape", AttrKind::Sizes, "the shape to reach")],
        |c| one(c.x(0)?.expand(c.attrs.sizes("shape")?)),
        |_| {
            over(&[
                (&[5, 1], json!({"shape": [5, 7]})),
                (&[1, 3], json!({"shape": [4, 2, 3]})),
                (&[4], json!({"shape": [3, 4]})),
                (&[], json!({"shape": [5]})),
            ])
        },
    ),
    entry(
        "meshgrid",
        "tensors...",
        &[attr(
            "indexing",
            AttrKind::Choice(&["ij", "xy"]),
            "\"ij\"",
            "which tensor varies along dimension 0",
        )],
        grid,
        grids,
    ),
];

const FLATTEN: &[Attr] = &[
    attr("start", AttrKind::Int, "0", "the first dimension to merge"),
    attr("end", AttrKind::Int, "-1", "the last dimension to merge"),
];
const TRANSPOSE: &[Attr] = &[
    attr("a", AttrKind::Int, "-2", "one dimension"),
    attr("b", AttrKind::Int, "-1", "the other dimension"),
];
const MOVE: &[Attr] = &[
    required("from", AttrKind::Ints, "the dimensions to move"),
    required("to", AttrKind::Ints, "where each goes"),
];

fn reshape(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.reshape_infer(&c.attrs.ints("dims")?))
}

fn squeeze(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.squeeze(&c.attrs.ints("axes")?))
}

fn permute(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.permute(&c.attrs.ints("axes")?))
}

fn grid(c: &Call<'_>) -> Result<Vec<Tensor>> {
    Tensor::meshgrid(
        &c.all(0..c.inputs.len())?,
        c.attrs.choice("indexing", ORDERS)?,
    )
}

/// Calls on tensors whose elements are all different, so that each shows where it came from.
pub(super) fn over(calls: &[(&[usize], Value)]) -> Vec<Sample> {
    calls
        .iter()
        .map(|(shape, attrs)| Sample::new([distinct(shape)], attrs.clone()))
        .collect()
}

fn casts(_: &'static str) -> Vec<Sample> {
    let eighths = Fill::Eighths { lo: -32, hi: 32 };
    vec![
        Sample::new([integers(&[5, 7])], json!({"dtype": "f32"})),
        // Rounding to integers and to truth values does not distribute over sums.
        Sample::new([floats(&[4, 2, 3], eighths)], json!({"dtype": "i32"})),
        Sample::new([small(&[3, 8])], json!({"dtype": "bool"})),
        Sample::new([bools(&[5])], json!({"dtype": "u8"})),
        Sample::new([floats(&[4, 3], eighths)], json!({"dtype": "bf16"})),
    ]
}

fn reshapes(_: &'static str) -> Vec<Sample> {
    over(&[
        (&[5, 7], json!({"dims": [35]})),
        (&[4, 2, 3], json!({"dims": [8, -1]})),
        (&[4, 6], json!({"dims": [2, 2, 3, 2]})),
        (&[6, 4], json!({"dims": [4, 6]})),
        (&[8], json!({"dims": [1, 8, 1]})),
        (&[3, 5], json!({"dims": [5, 3]})),
    ])
}

fn flattens(_: &'static str) -> Vec<Sample> {
    over(&[
        (&[5, 7], json!({})),
        (&[4, 2, 3], json!({"start": 1})),
        (&[2, 4, 3], json!({"end": 1})),
        (&[3, 4], json!({"start": 1, "end": 1})),
    ])
}

fn squeezes(_: &'static str) -> Vec<Sample> {
    over(&[
        (&[1, 5, 1], json!({})),
        (&[4, 1, 3], json!({"axes": [1]})),
        (&[1, 7, 1], json!({"axes": [-1]})),
    ])
}

fn grids(_: &'static str) -> Vec<Sample> {
    let vector = |n: usize, dtype| Input::new(dtype, &[n], Fill::Distinct);
    vec![
        Sample::new([vector(5, DType::F32), vector(4, DType::F32)], json!({})),
        Sample::new(
            [vector(3, DType::F32), vector(8, DType::F32)],
            json!({"indexing": "xy"}),
        ),
        Sample::new(
            [
                vector(2, DType::I32),
                vector(3, DType::I32),
                vector(4, DType::I32),
            ],
            json!({"indexing": "ij"}),
        ),
    ]
}
