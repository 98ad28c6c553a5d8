//! Where documents keep rows and columns apart.

use super::How;
use crate::attention::documents::{Span, columns_of, first_of, span};
use cubecl::prelude::*;

/// What a thread compares documents with: where those of the columns begin and how many there are,
/// the documents of its two rows, and the columns where nothing needs to be compared.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Own {
    columns: usize,
    count: usize,
    document: u32,
    document8: u32,
    pub(super) clear: usize,
    pub(super) clear_end: usize,
}

/// Where columns may be of the documents of the 64 rows from `row` on: anywhere, if there are none.
#[cube]
pub(super) fn span_of(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    batch: usize,
    row: usize,
    #[comptime] how: How,
) -> Span {
    let (queries, keys) = (*numbers.index(2usize), *numbers.index(3usize));
    if comptime!(how.documents.is_some()) {
        let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
        span(
            documents,
            batch,
            row,
            queries,
            keys,
            comptime!(how.by_query()),
        )
    } else {
        let end = if comptime!(how.by_query()) {
            keys
        } else {
            queries
        };
        Span {
            first: 0usize.runtime(),
            end,
            clear: 0usize.runtime(),
            clear_end: end,
        }
    }
}

/// The columns that are to be looked at for a cube's rows, where there are documents.
#[cube]
pub(super) fn columns_of_rows(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    batch: usize,
    row: usize,
    #[comptime] rows: usize,
    #[comptime] how: How,
) -> (usize, usize) {
    let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
    let sizes = (*numbers.index(2usize), *numbers.index(3usize));
    let by_query = comptime!(how.by_query());
    columns_of(documents, batch, row, sizes, rows, by_query)
}

/// That of a thread whose first row is `mine`, with the span of its warp group's rows.
#[cube]
pub(super) fn own_documents(
    buffers: &Sequence<Box<[u32]>>,
    batch: usize,
    mine: usize,
    span: &Span,
    queries: usize,
    keys: usize,
    #[comptime] how: How,
) -> Own {
    let (rows, count) = if comptime!(how.by_query()) {
        (queries, keys)
    } else {
        (keys, queries)
    };
    let mut document = 0u32;
    let mut document8 = 0u32;
    if comptime!(how.documents.is_some()) {
        let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
        let at = first_of(batch, queries, keys, comptime!(how.by_query()));
        document = documents[at + min(mine, rows - 1usize)];
        document8 = documents[at + min(mine + 8usize, rows - 1usize)];
    }
    Own {
        columns: first_of(batch, queries, keys, comptime!(!how.by_query())),
        count,
        document,
        document8,
        clear: span.clear,
        clear_end: span.clear_end,
    }
}

/// Other values of a panel for columns from `first` on that are of other documents than a thread's rows.
#[cube]
pub(super) fn of_documents<S: Size>(
    buffers: &Sequence<Box<[u32]>>,
    values: Vector<f32, S>,
    #[comptime] panel: usize,
    first: usize,
    other: f32,
    own: &Own,
    #[comptime] how: How,
) -> Vector<f32, S> {
    let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
    let mut values = values;
    let last = own.count - 1usize;
    #[unroll]
    for i in 0..comptime!(how.scores() / 4) {
        let column = first + comptime!(8 * i);
        let theirs = documents[own.columns + min(column, last)];
        let next = documents[own.columns + min(column + 1usize, last)];
        #[unroll]
        for below in 0..2usize {
            let low = comptime!(panel * how.scores() + 4 * i + 2 * below);
            let high = comptime!(low + 1);
            let document = if comptime!(below == 0) {
                own.document
            } else {
                own.document8
            };
            values.insert(low, select(theirs == document, values.extract(low), other));
            values.insert(high, select(next == document, values.extract(high), other));
        }
    }
    values
}
