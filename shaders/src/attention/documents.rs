//! Documents of queries and keys, laid out for the kernels once for each call.
//!
//! One buffer has for each batch the documents of its queries and of its keys, and for every 64 rows
//! of either side a [`Span`]: where on the other side those lie that may be of the same documents.
//! Tiles outside of it are never looked at. It is found by comparing with the lowest and the highest
//! document of the rows, so it holds for documents in any order, and is tight where those of a document
//! lie together, as in packed sequences.

use super::Sizes;
use crate::{CubeBackend, Memory, program::bind, tile::distinct};
use anymesh_kernel::{DType, Result, backend::AttentionCall};
use cubecl::prelude::*;

/// Rows that have a span.
const ROWS: usize = 64;
/// Words of a span.
const SPAN: usize = 4;
/// Threads of a cube that finds one.
const THREADS: u32 = 256;

/// What rows have to do with on the other side.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    /// From the first column to the end of the last that may be of the rows' documents.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Columns that all are of the one document of all rows: nothing needs to be compared there.
    pub(super) clear: usize,
    pub(super) clear_end: usize,
}

/// Words of a batch.
#[cube]
fn words(queries: usize, keys: usize) -> usize {
    let spans = (queries + comptime!(ROWS - 1)) / ROWS + (keys + comptime!(ROWS - 1)) / ROWS;
    queries + keys + spans * SPAN
}

/// Where the documents of a batch's queries or keys begin.
#[cube]
pub(super) fn first_of(
    batch: usize,
    queries: usize,
    keys: usize,
    #[comptime] of_queries: bool,
) -> usize {
    let first = batch * words(queries, keys);
    if comptime!(of_queries) {
        first
    } else {
        first + queries
    }
}

/// Where the span of the rows from `row` on is.
#[cube]
fn span_at(
    batch: usize,
    row: usize,
    queries: usize,
    keys: usize,
    #[comptime] of_queries: bool,
) -> usize {
    let first = batch * words(queries, keys) + queries + keys;
    let block = row / ROWS;
    if comptime!(of_queries) {
        first + block * SPAN
    } else {
        first + ((queries + comptime!(ROWS - 1)) / ROWS + block) * SPAN
    }
}

/// The span of the 64 rows from `row` on.
#[cube]
pub(super) fn span(
    documents: &[u32],
    batch: usize,
    row: usize,
    queries: usize,
    keys: usize,
    #[comptime] of_queries: bool,
) -> Span {
    let at = span_at(batch, row, queries, keys, of_queries);
    Span {
        first: documents[at] as usize,
        end: documents[at + 1usize] as usize,
        clear: documents[at + 2usize] as usize,
        clear_end: documents[at + 3usize] as usize,
    }
}

/// The columns that are to be looked at for `rows` rows from `row` on, between the first and the end.
#[cube]
pub(super) fn columns_of(
    documents: &[u32],
    batch: usize,
    row: usize,
    sizes: (usize, usize),
    #[comptime] rows: usize,
    #[comptime] of_queries: bool,
) -> (usize, usize) {
    let (queries, keys) = sizes;
    let last = if comptime!(of_queries) {
        queries - 1usize
    } else {
        keys - 1usize
    };
    let mut first = max(queries, keys);
    let mut end = 0usize;
    #[unroll]
    for block in 0..comptime!(rows / ROWS) {
        let at = min(row + comptime!(block * ROWS), last);
        let span = span(documents, batch, at, queries, keys, of_queries);
        if span.first < span.end {
            first = min(first, span.first);
            end = max(end, span.end);
        }
    }
    (first, end)
}

/// Copies the documents of 64 rows of one side and finds their span on the other; `found` is for what
/// each thread finds.
#[cube]
fn lay_out_rows(
    own: &[u32],
    other: &[u32],
    out: &mut [u32],
    found: &mut [u32],
    number: usize,
    sizes: (usize, usize),
    #[comptime] of_queries: bool,
) {
    let (queries, keys) = sizes;
    let (own_rows, other_rows) = if comptime!(of_queries) {
        (queries, keys)
    } else {
        (keys, queries)
    };
    let unit = UNIT_POS as usize;
    let blocks = (own_rows + comptime!(ROWS - 1)) / ROWS;
    let (batch, row) = (number / blocks, number % blocks * ROWS);
    let to = first_of(batch, queries, keys, of_queries);
    let from = batch * own_rows;
    if unit < ROWS && row + unit < own_rows {
        out[to + row + unit] = own[from + row + unit];
    }
    let mut lowest = i32::reinterpret(own[from + row]);
    let mut highest = lowest;
    for i in 1..ROWS {
        let document = i32::reinterpret(own[from + min(row + i, own_rows - 1usize)]);
        lowest = min(lowest, document);
        highest = max(highest, document);
    }
    let mut first = other_rows as u32;
    let mut end = 0u32;
    let mut count = 0u32;
    let mut column = unit;
    while column < other_rows {
        let document = i32::reinterpret(other[batch * other_rows + column]);
        if lowest <= document {
            if document <= highest {
                first = min(first, column as u32);
                end = column as u32 + 1u32;
                count += 1u32;
            }
        }
        column += THREADS as usize;
    }
    found[unit * 3usize] = first;
    found[unit * 3usize + 1usize] = end;
    found[unit * 3usize + 2usize] = count;
    sync_cube();
    let mut half = comptime!(THREADS as usize / 2).runtime();
    while half > 0usize {
        if unit < half {
            let (own, other) = (unit * 3usize, (unit + half) * 3usize);
            found[own] = min(found[own], found[other]);
            found[own + 1usize] = max(found[own + 1usize], found[other + 1usize]);
            found[own + 2usize] += found[other + 2usize];
        }
        sync_cube();
        half /= 2usize;
    }
    if unit == 0usize {
        let (end, count) = (found[1], found[2]);
        let first = min(found[0], end);
        let together = count == end - first;
        let clear = lowest == highest && together;
        let at = span_at(batch, row, queries, keys, of_queries);
        out[at] = first;
        out[at + 1usize] = end;
        out[at + 2usize] = select(clear, first, 0u32);
        out[at + 3usize] = select(clear, end, 0u32);
    }
}

/// Cubes for the rows of queries, then those for the rows of keys.
#[cube(launch_unchecked)]
fn lay_out(
    buffers: &Sequence<Box<[u32]>>,
    out: &mut [u32],
    numbers: &Sequence<usize>,
    #[comptime] places: (usize, usize),
) {
    let mut found = Shared::<[u32]>::new_slice(comptime!(3 * THREADS as usize));
    let (batches, queries, keys) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
    );
    let of_queries = (queries + comptime!(ROWS - 1)) / ROWS * batches;
    let of_keys = (keys + comptime!(ROWS - 1)) / ROWS * batches;
    let (q, k) = (
        buffers.index(comptime!(places.0)),
        buffers.index(comptime!(places.1)),
    );
    // Surplus cubes of the grid repeat an earlier one.
    let number = CUBE_POS % (of_queries + of_keys);
    let sizes = (queries, keys);
    if number < of_queries {
        lay_out_rows(q, k, out, &mut found, number, sizes, true);
    } else {
        let number = number - of_queries;
        lay_out_rows(k, q, out, &mut found, number, sizes, false);
    }
}

impl CubeBackend {
    /// The documents of a call for its kernels, where it has any.
    pub(super) fn documents(&self, call: &AttentionCall) -> Result<Option<Memory>> {
        let Some([queries, keys]) = &call.documents else {
            return Ok(None);
        };
        let sizes = Sizes::new(call);
        let dense = [
            self.dense(queries, DType::I32)?,
            self.dense(keys, DType::I32)?,
        ];
        let (buffers, places) = distinct([&dense[0], &dense[1]])?;
        let spans = sizes.queries.div_ceil(ROWS) + sizes.keys.div_ceil(ROWS);
        let words = sizes.batch * (sizes.queries + sizes.keys + SPAN * spans);
        let out = self.alloc(DType::I32, words)?;
        let buffers: Vec<_> = (buffers.iter())
            .map(|m| (m.handle.clone(), m.bytes))
            .collect();
        let numbers = [sizes.batch, sizes.queries, sizes.keys];
        // SAFETY: rows are clamped into the documents, and the buffer has room for all of them and
        // their spans.
        unsafe {
            lay_out::launch_unchecked(
                &self.client,
                crate::cubes(spans * sizes.batch, 1),
                CubeDim::new_1d(THREADS),
                bind(&buffers, 4),
                crate::arg(&out, 4),
                numbers.into_iter().collect(),
                (places[0], places[1]),
            );
        }
        Ok(Some(out))
    }
}
