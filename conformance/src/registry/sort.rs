//! Sorting, searching and running reductions.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one, required,
    sample::{distinct, floats, small},
    two,
};
use anymesh_core::{
    DType, Result, Tensor,
    ops::{Order, Side},
};
use serde_json::{Value, json};

const AXIS: Attr = attr("axis", AttrKind::Int, "-1", "the dimension");
const DESCENDING: Attr = attr(
    "descending",
    AttrKind::Bool,
    "false",
    "whether the largest comes first",
);
const K: Attr = required("k", AttrKind::Size, "how many, or which");
const LARGEST: Attr = attr(
    "largest",
    AttrKind::Bool,
    "true",
    "whether the largest are taken",
);
const KEEPDIM: Attr = attr(
    "keepdim",
    AttrKind::Bool,
    "false",
    "whether the dimension stays with size 1",
);
const RIGHT: Attr = attr(
    "right",
    AttrKind::Bool,
    "false",
    "whether to go behind equal values",
);

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "sort",
        "x",
        &[AXIS, DESCENDING],
        |c| two(c.x(0)?.sort(c.attrs.int("axis")?, order(c, "descending")?)),
        sorts,
    ),
    entry(
        "argsort",
        "x",
        &[AXIS, DESCENDING],
        |c| {
            one(c
                .x(0)?
                .argsort(c.attrs.int("axis")?, order(c, "descending")?))
        },
        sorts,
    ),
    entry("topk", "x", &[K, AXIS, LARGEST], topk, |_| {
        ordered([
            json!({"k": 3, "axis": 0}),
            json!({"k": 2, "largest": false}),
            json!({"k": 3, "axis": -2}),
            json!({"k": 4, "axis": 1, "largest": false}),
        ])
    }),
    entry("kthvalue", "x", &[K, AXIS, KEEPDIM], kthvalue, |_| {
        ordered([
            json!({"k": 2, "axis": 0}),
            json!({"k": 3, "keepdim": true}),
            json!({"k": 1, "axis": -2}),
            json!({"k": 8, "axis": 1, "keepdim": true}),
        ])
    }),
    entry(
        "searchsorted",
        "x, queries",
        &[RIGHT],
        |c| {
            let right = c.attrs.bool("right")?;
            one(c
                .x(0)?
                .searchsorted(c.x(1)?, if right { Side::Right } else { Side::Left }))
        },
        searches,
    ),
    entry(
        "cumsum",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.cumsum(c.attrs.int("axis")?)),
        scans,
    ),
    entry(
        "cumprod",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.cumprod(c.attrs.int("axis")?)),
        scans,
    ),
    entry(
        "cummax",
        "x",
        &[AXIS],
        |c| two(c.x(0)?.cummax(c.attrs.int("axis")?)),
        scans,
    ),
    entry(
        "cummin",
        "x",
        &[AXIS],
        |c| two(c.x(0)?.cummin(c.attrs.int("axis")?)),
        scans,
    ),
    entry(
        "logcumsumexp",
        "x",
        &[AXIS],
        |c| one(c.x(0)?.logcumsumexp(c.attrs.int("axis")?)),
        scans,
    ),
];

/// The order in which the largest comes first, if the attribute is true.
fn order(c: &Call<'_>, attr: &str) -> Result<Order> {
    Ok(if c.attrs.bool(attr)? {
        Order::Descending
    } else {
        Order::Ascending
    })
}

fn topk(c: &Call<'_>) -> Result<Vec<Tensor>> {
    two(c.x(0)?.topk(
        c.attrs.size("k")?,
        c.attrs.int("axis")?,
        order(c, "largest")?,
    ))
}

fn kthvalue(c: &Call<'_>) -> Result<Vec<Tensor>> {
    two(c.x(0)?.kthvalue(
        c.attrs.size("k")?,
        c.attrs.int("axis")?,
        c.attrs.bool("keepdim")?,
    ))
}

/// Calls on different values, then on equal ones, whose order must stay.
fn ordered(attrs: [Value; 4]) -> Vec<Sample> {
    let ties = Fill::Int { lo: -1, hi: 1 };
    let inputs = [
        distinct(&[5, 7]),
        distinct(&[4, 2, 3]),
        floats(&[8, 3], ties),
        Input::new(DType::I32, &[2, 8], ties),
    ];
    inputs
        .into_iter()
        .zip(attrs)
        .map(|(input, attrs)| Sample::new([input], attrs))
        .collect()
}

fn sorts(_: &'static str) -> Vec<Sample> {
    ordered([
        json!({"axis": 0}),
        json!({"descending": true}),
        json!({"axis": -2, "descending": true}),
        json!({"axis": 1}),
    ])
}

fn searches(_: &'static str) -> Vec<Sample> {
    let sorted = |shape: &[usize]| floats(shape, Fill::Sorted);
    vec![
        Sample::new([sorted(&[7]), small(&[5, 3])], json!({})),
        Sample::new([sorted(&[4, 8]), small(&[4, 3])], json!({"right": true})),
        Sample::new(
            [
                Input::new(DType::I32, &[2, 5], Fill::Sorted),
                Input::new(DType::I32, &[2, 4], Fill::Int { lo: -2, hi: 6 }),
            ],
            json!({}),
        ),
    ]
}

fn scans(op: &'static str) -> Vec<Sample> {
    let fill = if op == "cumprod" {
        Fill::Pick(&[1, 2, -1])
    } else {
        Fill::Int { lo: -2, hi: 2 }
    };
    let call = |dtype, shape: &[usize], axis| {
        Sample::new([Input::new(dtype, shape, fill)], json!({"axis": axis}))
            .exact(op != "logcumsumexp")
    };
    let mut samples = vec![
        call(DType::F32, &[5, 7], 0),
        call(DType::F32, &[4, 2, 3], -1),
        call(DType::F32, &[8], 0),
        call(DType::I32, &[3, 4], 1),
    ];
    if op == "cumprod" {
        // None, one or several zeros in a row.
        samples.push(Sample::new(
            [floats(&[7, 5], Fill::Pick(&[0, 1, 2, -1]))],
            json!({"axis": 1}),
        ));
    }
    samples
}
