//! Joining, padding, repeating, rolling, triangles.

use super::{
    Attr, AttrKind, Call, Entry, Sample, attr, entry, one, required,
    sample::{distinct, integers, small},
    shape::over,
};
use anymesh_core::{Error, Result, Tensor, ops::PadMode};
use serde_json::json;

const AXIS: Attr = attr(
    "axis",
    AttrKind::Int,
    "0",
    "the dimension along which to join",
);
const K: Attr = attr("k", AttrKind::Int, "0", "the diagonal: column minus row");
const PAD: &[Attr] = &[
    required(
        "pairs",
        AttrKind::Pairs,
        "elements before and after each dimension",
    ),
    attr(
        "mode",
        AttrKind::Choice(&["constant", "reflect", "replicate", "circular"]),
        "\"constant\"",
        "what to put there",
    ),
    attr("value", AttrKind::Number, "0", "the constant"),
];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "concat",
        "tensors...",
        &[AXIS],
        |c| {
            one(Tensor::concat(
                &c.all(0..c.inputs.len())?,
                c.attrs.int("axis")?,
            ))
        },
        concats,
    ),
    entry(
        "stack",
        "tensors...",
        &[AXIS],
        |c| {
            one(Tensor::stack(
                &c.all(0..c.inputs.len())?,
                c.attrs.int("axis")?,
            ))
        },
        stacks,
    ),
    entry("pad", "x", PAD, pad, pads),
    entry(
        "roll",
        "x",
        ROLL,
        |c| {
            one(c
                .x(0)?
                .roll(&c.attrs.ints("shifts")?, &c.attrs.ints("axes")?))
        },
        |_| {
            over(&[
                (&[5, 7], json!({"shifts": 2})),
                (&[4, 3], json!({"shifts": [1], "axes": [0]})),
                (&[2, 8], json!({"shifts": [-3, 1], "axes": [-1, 0]})),
            ])
        },
    ),
    entry(
        "tile",
        "x",
        &[required(
            "reps",
            AttrKind::Sizes,
            "copies along each dimension",
        )],
        |c| one(c.x(0)?.tile(&c.attrs.sizes("reps")?)),
        |_| {
            over(&[
                (&[5, 2], json!({"reps": [1, 3]})),
                (&[4], json!({"reps": [2, 2]})),
                (&[2, 1, 4], json!({"reps": 2})),
            ])
        },
    ),
    entry(
        "repeat_interleave",
        "x",
        REPEAT,
        |c| {
            one(c
                .x(0)?
                .repeat_interleave(c.attrs.size("n")?, c.attrs.int("axis")?))
        },
        |_| {
            over(&[
                (&[5, 7], json!({"n": 2})),
                (&[3, 4], json!({"n": 3, "axis": -1})),
                (&[2, 8], json!({"n": 2, "axis": 0})),
            ])
        },
    ),
    entry(
        "triu",
        "x",
        &[K],
        |c| one(c.x(0)?.triu(c.attrs.int("k")?)),
        triangles,
    ),
    entry(
        "tril",
        "x",
        &[K],
        |c| one(c.x(0)?.tril(c.attrs.int("k")?)),
        triangles,
    ),
    entry(
        "diag",
        "x",
        &[K],
        |c| one(c.x(0)?.diag(c.attrs.int("k")?)),
        |_| {
            over(&[
                (&[5], json!({})),
                (&[4], json!({"k": -1})),
                (&[3, 8], json!({"k": 2})),
                (&[2], json!({"k": 1})),
            ])
        },
    ),
];

const ROLL: &[Attr] = &[
    required("shifts", AttrKind::Ints, "how far elements move"),
    attr(
        "axes",
        AttrKind::Ints,
        "[]",
        "the dimension of each shift; none for one shift of the flattened tensor",
    ),
];
const REPEAT: &[Attr] = &[
    required("n", AttrKind::Size, "copies of each element"),
    attr("axis", AttrKind::Int, "0", "the dimension that grows"),
];

fn pad(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let mode = match c.attrs.str("mode")?.as_str() {
        "constant" => PadMode::Constant(c.attrs.number("value")?),
        "reflect" => PadMode::Reflect,
        "replicate" => PadMode::Replicate,
        "circular" => PadMode::Circular,
        other => {
            return Err(Error::argument(
                c.op,
                "mode",
                format!("there is no mode '{other}'"),
            ));
        }
    };
    one(c.x(0)?.pad(&c.attrs.pairs("pairs")?, mode))
}

fn concats(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), small(&[2, 7])], json!({})),
        Sample::new(
            [small(&[3, 4]), small(&[3, 1]), small(&[3, 8])],
            json!({"axis": -1}),
        ),
        Sample::new([integers(&[4, 3]), small(&[4, 3])], json!({"axis": 0})),
        Sample::new([small(&[2, 4, 3]), small(&[2, 4, 3])], json!({"axis": 1})),
    ]
}

fn stacks(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), small(&[5, 7])], json!({})),
        Sample::new(
            [small(&[4, 2]), integers(&[4, 2]), small(&[4, 2])],
            json!({"axis": -1}),
        ),
        Sample::new([small(&[8, 3]), small(&[8, 3])], json!({"axis": 1})),
    ]
}

fn pads(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 4])], json!({"pairs": [[1, 2], [0, 0]]})),
        // Not zero: a sum of padded parts would add it up.
        Sample::new(
            [small(&[4, 3])],
            json!({"pairs": [[0, 1], [2, 0]], "value": 2}),
        ),
        Sample::new(
            [distinct(&[3, 8])],
            json!({"pairs": [[0, 0], [2, 1]], "mode": "reflect"}),
        ),
        Sample::new(
            [distinct(&[2, 5])],
            json!({"pairs": [[1, 0], [0, 3]], "mode": "replicate"}),
        ),
        Sample::new(
            [distinct(&[4, 2])],
            json!({"pairs": [[3, 1], [0, 2]], "mode": "circular"}),
        ),
    ]
}

fn triangles(_: &'static str) -> Vec<Sample> {
    over(&[
        (&[5, 7], json!({})),
        (&[2, 4, 3], json!({"k": -1})),
        (&[8, 4], json!({"k": 1})),
    ])
}
