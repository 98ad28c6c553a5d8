//! Picking elements by index, and ops whose results have as many elements as the data says.

use super::{
    Attr, AttrKind, Call, Entry, Fill, Input, Sample, attr, entry, one, required,
    sample::{bools, distinct, floats, index, small},
};
use anymesh_core::{DType, Result, Tensor};
use serde_json::json;

const AXIS: Attr = attr("axis", AttrKind::Int, "0", "the dimension that is indexed");

pub(super) const ENTRIES: &[Entry] = &[
    entry(
        "gather",
        "x, index",
        &[AXIS],
        |c| one(c.x(0)?.gather(c.attrs.int("axis")?, c.x(1)?)),
        gathers,
    ),
    entry(
        "take_along_axis",
        "x, index",
        &[AXIS],
        |c| one(c.x(0)?.take_along_axis(c.attrs.int("axis")?, c.x(1)?)),
        takes,
    ),
    entry(
        "index_select",
        "x, index",
        &[AXIS],
        |c| one(c.x(0)?.index_select(c.attrs.int("axis")?, c.x(1)?)),
        selects,
    ),
    entry(
        "index_get",
        "x, indices...",
        &[],
        |c| one(c.x(0)?.index_get(&c.all(1..c.inputs.len())?)),
        gets,
    ),
    entry(
        "gather_axes",
        "x, indices...",
        &[required(
            "axes",
            AttrKind::Sizes,
            "the dimension of each index",
        )],
        gather_axes,
        gathers_axes,
    ),
    entry(
        "gather_nd",
        "x, index",
        &[],
        |c| one(c.x(0)?.gather_nd(c.x(1)?)),
        gathers_nd,
    ),
    entry(
        "embedding",
        "table, ids",
        &[],
        |c| one(c.x(0)?.embedding(c.x(1)?)),
        embeddings,
    ),
    entry(
        "nonzero",
        "x",
        &[],
        |c| one(wait(c, c.x(0)?.nonzero_async())),
        nonzeros,
    ),
    entry(
        "masked_select",
        "x, mask",
        &[],
        |c| one(wait(c, c.x(0)?.masked_select_async(c.x(1)?))),
        masked_selects,
    ),
    entry("unique", "x", &[], unique, uniques),
];

/// Waits for an op that reads a number of elements from the device.
#[cfg(not(target_family = "wasm"))]
pub(super) fn wait<T>(_: &Call<'_>, reading: impl Future<Output = Result<T>>) -> Result<T> {
    pollster::block_on(reading)
}

/// A browser cannot wait.
#[cfg(target_family = "wasm")]
pub(super) fn wait<T>(c: &Call<'_>, _: impl Future<Output = Result<T>>) -> Result<T> {
    let (what, hint) = (
        format!("waiting for {}", c.op),
        format!("await the method {}_async", c.op),
    );
    Err(anymesh_core::Error::Unsupported {
        device: c.place.mesh.to_string(),
        what,
        hint,
    })
}

fn gather_axes(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let (axes, indices) = (c.attrs.sizes("axes")?, c.all(1..c.inputs.len())?);
    if axes.len() != indices.len() {
        return Err(anymesh_core::Error::argument(
            c.op,
            "axes",
            format!(
                "{} axes were given for {} indices",
                axes.len(),
                indices.len()
            ),
        ));
    }
    one(c
        .x(0)?
        .gather_axes(&axes.into_iter().zip(indices).collect::<Vec<_>>()))
}

fn unique(c: &Call<'_>) -> Result<Vec<Tensor>> {
    let found = wait(c, c.x(0)?.unique_async())?;
    Ok(vec![found.values, found.inverse, found.counts])
}

/// Positions in a dimension of `size`, half of them counted from its end.
fn both_ends(shape: &[usize], size: i64) -> Input {
    Input::new(
        DType::I32,
        shape,
        Fill::Int {
            lo: -size,
            hi: size - 1,
        },
    )
}

fn gathers(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[3, 7], 5)], json!({})),
        Sample::new(
            [small(&[4, 2, 3]), both_ends(&[4, 2, 4], 3)],
            json!({"axis": -1}),
        ),
        // An index that is smaller in another dimension.
        Sample::new([small(&[8, 4]), index(&[5, 2], 8)], json!({"axis": 0})),
    ]
}

fn takes(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[3, 7], 5)], json!({})),
        Sample::new(
            [small(&[4, 1, 3]), both_ends(&[1, 2, 4], 3)],
            json!({"axis": -1}),
        ),
        Sample::new([small(&[8, 2]), index(&[8, 4], 2)], json!({"axis": 1})),
        Sample::new([small(&[4, 3]), index(&[8, 1], 4)], json!({"axis": 0})),
    ]
}

fn selects(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[3], 5)], json!({})),
        Sample::new([small(&[4, 2, 3]), both_ends(&[4], 3)], json!({"axis": -1})),
        Sample::new(
            [small(&[2, 8]), Input::new(DType::I64, &[8], Fill::Distinct)],
            json!({"axis": 1}),
        ),
    ]
}

fn gets(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[4], 5)], json!({})),
        Sample::new(
            [small(&[4, 3, 2]), both_ends(&[5, 1], 4), index(&[2], 3)],
            json!({}),
        ),
        Sample::new([small(&[8, 4]), index(&[3], 8), index(&[3], 4)], json!({})),
    ]
}

fn gathers_axes(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[4], 7)], json!({"axes": 1})),
        // Neighbours stay in place, others come first.
        Sample::new(
            [small(&[2, 4, 3]), index(&[5], 4), both_ends(&[5], 3)],
            json!({"axes": [1, 2]}),
        ),
        Sample::new(
            [small(&[4, 2, 3]), index(&[5, 1], 4), index(&[2], 3)],
            json!({"axes": [0, 2]}),
        ),
    ]
}

fn gathers_nd(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7]), index(&[4, 1], 5)], json!({})),
        Sample::new([small(&[4, 3, 2]), both_ends(&[5, 2], 3)], json!({})),
        Sample::new([small(&[4, 8]), index(&[3, 2, 2], 4)], json!({})),
    ]
}

fn embeddings(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[7, 5]), index(&[4], 7)], json!({})),
        Sample::new([small(&[8, 4]), index(&[2, 3], 8)], json!({})),
        Sample::new([small(&[2, 3]), both_ends(&[5], 2)], json!({})),
    ]
}

fn nonzeros(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([floats(&[5, 7], Fill::Int { lo: -1, hi: 1 })], json!({})),
        Sample::new([bools(&[4, 2, 3])], json!({})),
        Sample::new([Input::new(DType::I32, &[8], Fill::Bool)], json!({})),
    ]
}

fn masked_selects(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([distinct(&[5, 7]), bools(&[5, 7])], json!({})),
        Sample::new([distinct(&[4, 1, 3]), bools(&[2, 1])], json!({})),
        Sample::new([distinct(&[4]), bools(&[3, 4])], json!({})),
    ]
}

fn uniques(_: &'static str) -> Vec<Sample> {
    vec![
        Sample::new([small(&[5, 7])], json!({})),
        Sample::new(
            [Input::new(DType::I32, &[4, 2], Fill::Int { lo: -2, hi: 2 })],
            json!({}),
        ),
        Sample::new([distinct(&[3, 4])], json!({})),
    ]
}
