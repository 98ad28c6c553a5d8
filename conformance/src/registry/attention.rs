//! Attention, rotary embedding and gated units.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one,
    sample::{floats, small},
};
use anymesh_core::{
    DType, Error, Result, Tensor,
    ops::{Attention, AttentionOptions, RopeStyle, attention::attention_backward},
};
use serde_json::json;

const OPTIONS: &[Attr] = &[
    attr(
        "scale",
        AttrKind::Float,
        "null",
        "the factor on the scores; one over the root of the vectors' size where absent",
    ),
    attr(
        "causal",
        AttrKind::Bool,
        "false",
        "whether a query sees only keys up to its own position",
    ),
];
const STYLE: Attr = attr(
    "style",
    AttrKind::Choice(&["half", "interleaved"]),
    "\"half\"",
    "which elements form a pair",
);
const STYLES: &[(&str, RopeStyle)] = &[
    ("half", RopeStyle::Half),
    ("interleaved", RopeStyle::Interleaved),
];

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "attention",
        "q, k, v, mask?, query_documents?, key_documents?",
        OPTIONS,
        forward,
        forwards,
    ),
    entry(
        "attention_backward",
        "q, k, v, out, lse, grad, mask?, query_documents?, key_documents?",
        OPTIONS,
        backward,
        backwards,
    ),
    entry(
        "rope",
        "x, cos, sin",
        &[STYLE],
        |c| {
            one(c
                .x(0)?
                .rope(c.x(1)?, c.x(2)?, c.attrs.choice("style", STYLES)?))
        },
        ropes,
    ),
    entry("glu", "x", &[], |c| one(c.x(0)?.glu()), halves),
    entry("swiglu", "x", &[], |c| one(c.x(0)?.swiglu()), halves),
    entry("geglu", "x", &[], |c| one(c.x(0)?.geglu()), halves),
    entry(
        "swiglu2",
        "x, y",
        &[],
        |c| one(c.x(0)?.swiglu2(c.x(1)?)),
        pairs,
    ),
    entry(
        "geglu2",
        "x, y",
        &[],
        |c| one(c.x(0)?.geglu2(c.x(1)?)),
        pairs,
    ),
];

fn options(c: &Call<'_>, mask: usize) -> Result<AttentionOptions> {
    let documents = match (c.maybe(mask + 1), c.maybe(mask + 2)) {
        (Some(queries), Some(keys)) => Some([queries.clone(), keys.clone()]),
        (None, None) => None,
        _ => {
            let detail = "documents are of queries and of keys: one of both is missing";
            return Err(Error::argument(c.op, "inputs", detail));
        }
    };
    Ok(AttentionOptions {
        scale: c.attrs.opt_float("scale")?,
        causal: c.attrs.bool("causal")?,
        mask: c.maybe(mask).cloned(),
        documents,
    })
}

fn forward(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let Attention { out, lse } = c.x(0)?.attention(c.x(1)?, c.x(2)?, &options(c, 3)?)?;
    Ok(vec![out, lse])
}

fn backward(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let forward = Attention {
        out: c.x(3)?.clone(),
        lse: c.x(4)?.clone(),
    };
    let (dq, dk, dv) = attention_backward(
        c.x(0)?,
        c.x(1)?,
        c.x(2)?,
        &forward,
        c.x(5)?,
        &options(c, 6)?,
    )?;
    Ok(vec![dq, dk, dv])
}

/// Queries `[b, h, s, d]`, keys `[b, g, t, d]` and values `[b, g, t, e]`.
fn operands(b: usize, h: usize, g: usize, s: usize, t: usize, d: usize, e: usize) -> Vec<Input> {
    vec![
        small(&[b, h, s, d]),
        small(&[b, g, t, d]),
        small(&[b, g, t, e]),
    ]
}

/// Which keys are seen: most of them, so that every query sees one.
fn seen(shape: &[usize]) -> Input {
    Input::new(DType::Bool, shape, Fill::Pick(&[1, 1, 1, 1, 0]))
}

/// One of a few documents for each position.
fn documents(b: usize, len: usize) -> Input {
    Input::new(DType::I32, &[b, len], Fill::Int { lo: 0, hi: 1 })
}

fn forwards(_: &'static str) -> Vec<Sample> {
    let masked = |mut inputs: Vec<Input>, mask| {
        inputs.push(mask);
        inputs
    };
    let mut within = operands(2, 4, 2, 4, 6, 2, 2);
    within.extend([documents(2, 4), documents(2, 6)]);
    let within = Sample::new(within, json!({"causal": true})).without(3);
    let mut both = masked(operands(2, 2, 1, 4, 4, 2, 3), small(&[4, 4]));
    both.extend([documents(2, 4), documents(2, 4)]);
    [
        Sample::new(operands(3, 2, 2, 4, 4, 2, 1), json!({"causal": true})),
        // Two query heads for each key head, and more keys than queries.
        Sample::new(
            operands(2, 4, 2, 3, 5, 2, 1),
            json!({"scale": 0.5, "causal": true}),
        ),
        // Query heads that may be cut finer than there are key heads, or across their bounds.
        Sample::new(operands(1, 4, 1, 2, 3, 2, 1), json!({})),
        Sample::new(operands(1, 10, 2, 2, 3, 2, 1), json!({"causal": true})),
        Sample::new(
            masked(operands(2, 2, 1, 3, 4, 2, 3), seen(&[3, 4])),
            json!({}),
        ),
        Sample::new(
            masked(operands(1, 4, 4, 2, 3, 2, 2), small(&[4, 1, 3])),
            json!({}),
        ),
        within,
        Sample::new(both, json!({})),
    ]
    .map(|sample| sample.exact(false))
    .into()
}

fn backwards(_: &'static str) -> Vec<Sample> {
    // A log-sum-exp above all scores, so that the probabilities stay small.
    let with_results = |mut inputs: Vec<Input>, out: &[usize]| {
        inputs.extend([
            small(out),
            floats(&out[..3], Fill::Int { lo: 6, hi: 9 }),
            small(out),
        ]);
        inputs
    };
    let mut masked = with_results(operands(1, 4, 4, 2, 3, 2, 2), &[1, 4, 2, 2]);
    masked.push(seen(&[2, 3]));
    let mut within = with_results(operands(2, 4, 2, 4, 6, 2, 2), &[2, 4, 4, 2]);
    within.extend([documents(2, 4), documents(2, 6)]);
    let within = Sample::new(within, json!({"causal": true})).without(6);
    [
        Sample::new(
            with_results(operands(3, 2, 2, 4, 4, 2, 1), &[3, 2, 4, 1]),
            json!({"causal": true}),
        ),
        Sample::new(
            with_results(operands(2, 4, 2, 3, 5, 2, 1), &[2, 4, 3, 1]),
            json!({"scale": 0.5}),
        ),
        Sample::new(
            with_results(operands(1, 4, 1, 2, 3, 2, 1), &[1, 4, 2, 1]),
            json!({}),
        ),
        Sample::new(
            with_results(operands(1, 10, 2, 2, 3, 2, 1), &[1, 10, 2, 1]),
            json!({"causal": true}),
        ),
        Sample::new(masked, json!({})),
        within,
    ]
    .map(|sample| sample.exact(false))
    .into()
}

fn ropes(_: &'static str) -> Vec<Sample> {
    let table = |shape: &[usize]| floats(shape, Fill::Eighths { lo: -8, hi: 8 });
    let call = |x: &[usize], tables: &[usize], attrs| {
        Sample::new([small(x), table(tables), table(tables)], attrs)
    };
    vec![
        call(&[5, 6], &[5, 3], json!({})),
        call(&[2, 3, 8], &[3, 4], json!({"style": "interleaved"})),
        call(&[4, 2, 4], &[4, 1, 2], json!({"style": "half"})),
    ]
}

/// Each element on its own, with its partner in the other half.
fn halves(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 6])], json!({})),
        Sample::new([small(&[4, 3, 2])], json!({})),
        Sample::new([small(&[3, 8])], json!({})),
    ]
}

fn pairs(_: &'static str) -> Vec<Sample> {
    // The second operand may be partial, and is multiplied by rounded values.
    [&[5, 7][..], &[4, 2, 3], &[8]]
        .map(|shape| Sample::new([small(shape), small(shape)], json!({})).exact(false))
        .into()
}
