//! Reductions.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one,
    sample::{distinct, floats, small},
    two,
};
use anymesh_core::{DType, Result, Tensor};
use serde_json::{Value, json};

const AXES: Attr = attr(
    "axes",
    AttrKind::Ints,
    "[]",
    "the dimensions to reduce; none means all",
);
const AXIS: Attr = attr(
    "axis",
    AttrKind::Int,
    "null",
    "the dimension to reduce; absent means the flattened tensor",
);
const ONE_AXIS: Attr = attr("axis", AttrKind::Int, "-1", "the dimension to reduce");
const KEEPDIM: Attr = attr(
    "keepdim",
    AttrKind::Bool,
    "false",
    "whether reduced dimensions stay with size 1",
);
const CORRECTION: Attr = attr(
    "correction",
    AttrKind::Size,
    "1",
    "what is taken off the number of elements before dividing",
);
const ORDER: Attr = attr("p", AttrKind::Float, "2", "the order of the norm");

/// An op that takes axes and keepdim.
macro_rules! plain {
    ($name:ident) => {
        entry(
            stringify!($name),
            "x",
            &[AXES, KEEPDIM],
            |c| {
                one(c
                    .x(0)?
                    .$name(&c.attrs.ints("axes")?, c.attrs.bool("keepdim")?))
            },
            plain,
        )
    };
}

pub(super) const ENTRIES: &[Entry] = &[
    plain!(sum),
    plain!(mean),
    plain!(prod),
    plain!(max),
    plain!(min),
    plain!(amax),
    plain!(amin),
    plain!(any),
    plain!(all),
    plain!(count_nonzero),
    plain!(logsumexp),
    entry("norm", "x", &[ORDER, AXES, KEEPDIM], norm, norms),
    entry(
        "var",
        "x",
        &[AXES, KEEPDIM, CORRECTION],
        |c| spread(c, |x, axes, keep, n| x.var(axes, keep, n)),
        spreads,
    ),
    entry(
        "std",
        "x",
        &[AXES, KEEPDIM, CORRECTION],
        |c| spread(c, |x, axes, keep, n| x.std(axes, keep, n)),
        spreads,
    ),
    entry(
        "argmax",
        "x",
        &[AXIS, KEEPDIM],
        |c| {
            one(c
                .x(0)?
                .argmax(c.attrs.opt_int("axis")?, c.attrs.bool("keepdim")?))
        },
        positions,
    ),
    entry(
        "argmin",
        "x",
        &[AXIS, KEEPDIM],
        |c| {
            one(c
                .x(0)?
                .argmin(c.attrs.opt_int("axis")?, c.attrs.bool("keepdim")?))
        },
        positions,
    ),
    entry(
        "max_with_indices",
        "x",
        &[ONE_AXIS, KEEPDIM],
        |c| {
            two(c
                .x(0)?
                .max_with_indices(c.attrs.int("axis")?, c.attrs.bool("keepdim")?))
        },
        positions,
    ),
    entry(
        "min_with_indices",
        "x",
        &[ONE_AXIS, KEEPDIM],
        |c| {
            two(c
                .x(0)?
                .min_with_indices(c.attrs.int("axis")?, c.attrs.bool("keepdim")?))
        },
        positions,
    ),
    entry(
        "median",
        "x",
        &[AXIS, KEEPDIM],
        |c| {
            two(c
                .x(0)?
                .median(c.attrs.opt_int("axis")?, c.attrs.bool("keepdim")?))
        },
        positions,
    ),
];

fn norm(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(c.x(0)?.norm(
        c.attrs.float("p")?,
        &c.attrs.ints("axes")?,
        c.attrs.bool("keepdim")?,
    ))
}

fn spread(
    c: &Call<'_>,
    f: fn(&Tensor, &[i64], bool, usize) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    one(f(
        c.x(0)?,
        &c.attrs.ints("axes")?,
        c.attrs.bool("keepdim")?,
        c.attrs.size("correction")?,
    ))
}

/// Shapes and axes that every reduction is called with.
fn shapes() -> [(&'static [usize], Value); 4] {
    [
        (&[5, 7], json!({"axes": [0]})),
        (&[4, 2, 3], json!({"axes": [-1, 0], "keepdim": true})),
        (&[8, 4], json!({})),
        (&[2, 5], json!({"axes": [1], "keepdim": true})),
    ]
}

fn plain(op: &'static str) -> Vec<Sample> {
    let fill = match op {
        // Products and conjunctions of small values say little once a zero is among them.
        "prod" => Fill::Pick(&[1, 2, -1, 1]),
        "all" => Fill::Pick(&[1, 1, 1, 1, 1, 0]),
        "any" => Fill::Pick(&[0, 0, 0, 0, 0, 1]),
        "count_nonzero" => Fill::Int { lo: -1, hi: 1 },
        _ => Fill::Int { lo: -4, hi: 4 },
    };
    let other = if matches!(op, "any" | "all" | "count_nonzero") {
        DType::Bool
    } else {
        DType::I32
    };
    let sample = |(i, (shape, attrs)): (usize, (&[usize], Value))| {
        // A mean over a power of two is exact; the third call has 32 elements.
        let exact = !matches!((op, i), ("logsumexp", _) | ("mean", 0 | 1 | 3));
        Sample::new(
            [Input::new(
                if i == 3 { other } else { DType::F32 },
                shape,
                fill,
            )],
            attrs,
        )
        .exact(exact)
    };
    shapes().into_iter().enumerate().map(sample).collect()
}

fn norms(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7])], json!({"axes": [0]})),
        Sample::new(
            [small(&[4, 2, 3])],
            json!({"p": 1, "axes": [-1, 0], "keepdim": true}),
        ),
        Sample::new([small(&[8, 4])], json!({"p": 3})).exact(false),
        Sample::new([small(&[2, 5])], json!({"p": "inf", "axes": [1]})),
        Sample::new([distinct(&[3, 4])], json!({"p": "-inf", "axes": [-2]})),
        Sample::new(
            [small(&[3, 4])],
            json!({"p": 0, "axes": [1], "keepdim": true}),
        ),
    ]
}

fn spreads(_: &'static str) -> Vec<Sample> {
    let corrected = |(i, (shape, mut attrs)): (usize, (&[usize], Value))| {
        attrs["correction"] = json!(i % 2);
        Sample::new([small(shape)], attrs).exact(false)
    };
    shapes().into_iter().enumerate().map(corrected).collect()
}

fn positions(op: &'static str) -> Vec<Sample> {
    let whole = if op.ends_with("_with_indices") {
        json!({"keepdim": true})
    } else {
        json!({"axis": null, "keepdim": true})
    };
    vec![
        Sample::new([distinct(&[5, 7])], json!({"axis": 0})),
        Sample::new([distinct(&[4, 2, 3])], whole),
        // Ties: the first one counts, wherever it lies.
        Sample::new(
            [floats(&[3, 8], Fill::Int { lo: 0, hi: 2 })],
            json!({"axis": -1, "keepdim": true}),
        ),
        Sample::new(
            [Input::new(DType::I32, &[8, 3], Fill::Int { lo: -1, hi: 1 })],
            json!({"axis": 0}),
        ),
    ]
}
