//! Writing elements by index.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry,
    index::wait,
    one, required,
    sample::{floats, index, small},
};
use anymesh_core::{DType, Result, Tensor, backend::ScatterOp};
use serde_json::{Value, json};

const AXIS: Attr = attr("axis", AttrKind::Int, "0", "the dimension that is indexed");
const MODES: &[(&str, ScatterOp)] = &[
    ("set", ScatterOp::Set),
    ("add", ScatterOp::Add),
    ("mul", ScatterOp::Mul),
    ("min", ScatterOp::Min),
    ("max", ScatterOp::Max),
];
const MODE: Attr = attr(
    "mode",
    AttrKind::Choice(&["set", "add", "mul", "min", "max"]),
    "\"set\"",
    "how values that meet are joined",
);
const ACCUMULATE: Attr = attr(
    "accumulate",
    AttrKind::Bool,
    "false",
    "whether values add to what is there",
);

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "scatter",
        "x, index, src",
        &[AXIS, MODE],
        |c| along(c, |x, axis, at, src, mode| x.scatter(axis, at, src, mode)),
        scatters,
    ),
    entry(
        "put_along_axis",
        "x, index, values",
        &[AXIS, MODE],
        |c| {
            along(c, |x, axis, at, src, mode| {
                x.put_along_axis(axis, at, src, mode)
            })
        },
        puts,
    ),
    entry(
        "index_put",
        "x, indices..., values",
        &[ACCUMULATE],
        index_put,
        index_puts,
    ),
    entry(
        "index_add",
        "x, index, src",
        &[AXIS],
        |c| one(c.x(0)?.index_add(c.attrs.int("axis")?, c.x(1)?, c.x(2)?)),
        index_adds,
    ),
    entry(
        "scatter_nd",
        "index, updates",
        &[required(
            "shape",
            AttrKind::Sizes,
            "the shape of the result",
        )],
        scatter_nd,
        scatters_nd,
    ),
    entry(
        "scatter_nd_add",
        "x, index, updates",
        &[],
        |c| one(c.x(0)?.scatter_nd_add(c.x(1)?, c.x(2)?)),
        scatters_nd_add,
    ),
    entry("bincount", "x, weights?", BINCOUNT, bincount, bincounts),
    entry(
        "one_hot",
        "x",
        &[required(
            "classes",
            AttrKind::Size,
            "the size of the new dimension",
        )],
        |c| one(c.x(0)?.one_hot(c.attrs.size("classes")?)),
        one_hots,
    ),
];

const BINCOUNT: &[Attr] = &[attr(
    "minlength",
    AttrKind::Size,
    "0",
    "the least number of bins",
)];

fn along(
    c: &Call<'_>,
    f: fn(&Tensor, i64, &Tensor, &Tensor, ScatterOp) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    one(f(
        c.x(0)?,
        c.attrs.int("axis")?,
        c.x(1)?,
        c.x(2)?,
        c.attrs.choice("mode", MODES)?,
    ))
}

fn index_put(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let last = c.inputs.len() - 1;
    let mode = if c.attrs.bool("accumulate")? {
        ScatterOp::Add
    } else {
        ScatterOp::Set
    };
    one(c.x(0)?.index_put(&c.all(1..last)?, c.x(last)?, mode))
}

fn scatter_nd(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(Tensor::scatter_nd(
        c.x(0)?,
        c.x(1)?,
        c.attrs.sizes("shape")?,
    ))
}

fn bincount(c: &Call<'_>) -> Result<Vec<Tensor>> {
    one(wait(
        c,
        c.x(0)?
            .bincount_async(c.maybe(1), c.attrs.size("minlength")?),
    ))
}

/// A call that writes `[shape of the values]` at positions in a dimension of `size`. Products stay
/// small.
fn written(x: &[usize], at: &[usize], size: usize, values: &[usize], attrs: Value) -> Sample {
    let values = if attrs["mode"] == "mul" {
        floats(values, Fill::Pick(&[1, 2, -1]))
    } else {
        small(values)
    };
    Sample::new([small(x), index(at, size), values], attrs)
}

fn scatters(_: &'static str) -> Vec<Sample> {
    vec![
        written(&[5, 7], &[3, 7], 5, &[3, 7], json!({})),
        written(
            &[4, 3],
            &[8, 3],
            4,
            &[8, 3],
            json!({"axis": 0, "mode": "add"}),
        ),
        written(
            &[2, 4, 3],
            &[2, 4, 5],
            3,
            &[2, 4, 5],
            json!({"axis": -1, "mode": "max"}),
        ),
        // The index is smaller than the values and the tensor.
        written(
            &[4, 8],
            &[3, 5],
            8,
            &[4, 5],
            json!({"axis": 1, "mode": "mul"}),
        ),
        written(&[8, 2], &[5, 2], 8, &[5, 2], json!({"mode": "min"})),
        // Many values for few places: the last one counts, and products meet zeros.
        written(&[3, 2], &[8, 2], 3, &[8, 2], json!({})),
        Sample::new(
            [
                small(&[4, 3]),
                index(&[7, 3], 4),
                floats(&[7, 3], Fill::Pick(&[0, 1, 2, -1])),
            ],
            json!({"mode": "mul"}),
        ),
    ]
}

fn puts(_: &'static str) -> Vec<Sample> {
    vec![
        written(&[5, 7], &[3, 7], 5, &[3, 7], json!({})),
        written(
            &[4, 3],
            &[8, 1],
            4,
            &[1, 3],
            json!({"axis": 0, "mode": "add"}),
        ),
        written(
            &[2, 4, 3],
            &[1, 4, 5],
            3,
            &[5],
            json!({"axis": -1, "mode": "max"}),
        ),
        written(&[4, 8], &[4, 5], 8, &[], json!({"axis": 1, "mode": "mul"})),
        written(&[8, 2], &[5, 2], 8, &[5, 2], json!({"mode": "min"})),
    ]
}

fn index_puts(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[4], 5), small(&[4, 7])], json!({})),
        Sample::new(
            [
                small(&[4, 3, 2]),
                index(&[5], 4),
                index(&[5], 3),
                small(&[5, 2]),
            ],
            json!({"accumulate": true}),
        ),
        Sample::new(
            [small(&[8, 4]), index(&[3], 8), small(&[4])],
            json!({"accumulate": true}),
        ),
        Sample::new(
            [
                small(&[4, 8]),
                index(&[3, 1], 4),
                index(&[5], 8),
                small(&[3, 5]),
            ],
            json!({}),
        ),
    ]
}

fn index_adds(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[3], 5), small(&[3, 7])], json!({})),
        Sample::new(
            [small(&[4, 2, 3]), index(&[5], 3), small(&[4, 2, 5])],
            json!({"axis": -1}),
        ),
        Sample::new(
            [small(&[3, 4]), index(&[8], 4), small(&[3, 8])],
            json!({"axis": 1}),
        ),
    ]
}

fn scatters_nd(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new(
            [index(&[4, 1], 5), small(&[4, 7])],
            json!({"shape": [5, 7]}),
        ),
        Sample::new(
            [index(&[5, 2], 3), small(&[5, 2])],
            json!({"shape": [4, 3, 2]}),
        ),
        Sample::new(
            [index(&[3, 4, 1], 8), small(&[3, 4])],
            json!({"shape": [8]}),
        ),
    ]
}

fn scatters_nd_add(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new(
            [small(&[5, 7]), index(&[4, 1], 5), small(&[4, 7])],
            json!({}),
        ),
        Sample::new(
            [small(&[4, 3, 2]), index(&[5, 2], 3), small(&[5, 2])],
            json!({}),
        ),
        Sample::new(
            [small(&[8]), index(&[3, 4, 1], 8), small(&[3, 4])],
            json!({}),
        ),
    ]
}

fn bincounts(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([index(&[7], 5)], json!({})),
        Sample::new([index(&[8], 4), small(&[8])], json!({"minlength": 6})),
        Sample::new(
            [
                Input::new(DType::I64, &[2], Fill::Index(3)),
                Input::new(DType::I32, &[2], Fill::Int { lo: 1, hi: 4 }),
            ],
            json!({}),
        ),
    ]
}

fn one_hots(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([index(&[5], 7)], json!({"classes": 7})),
        Sample::new([index(&[4, 2], 5)], json!({"classes": 3})),
        Sample::new([index(&[3], 8)], json!({"classes": 8})),
    ]
}
