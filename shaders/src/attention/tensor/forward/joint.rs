//! The result where warps multiply: all threads bring tiles, the next one while this one is used.

use super::{Piece, finish, hide, piece, pieces, shrunk, sights, soften};
use crate::{
    attention::{
        LOWEST,
        tensor::{
            How, Own, bring_rows, head, own_documents, place_of_thread, score, span_of, stride,
            weigh, words,
        },
    },
    hopper::shared_address,
};
use cubecl::prelude::*;

/// What a thread has to do with in a panel: its own first row and what its two rows see, the least of
/// what the panel's rows see, the columns between which tiles matter to them, and documents.
#[derive(CubeType, Clone, Copy)]
struct Panel {
    mine: usize,
    sights: (usize, usize),
    least: usize,
    begin: usize,
    end: usize,
    documents: Own,
}

/// The panel at a row of the piece, for the thread whose first row in it is `thread_row`.
#[cube]
fn panel(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    piece: &Piece,
    row: usize,
    thread_row: usize,
    #[comptime] how: How,
) -> Panel {
    let (heads, queries, keys) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let columns = comptime!(how.columns);
    let batch = piece.line / heads;
    let top_row = piece.row + row;
    let mine = top_row + thread_row;
    let (sights, least, most) = sights(top_row, mine, queries, keys, how);
    let span = span_of(buffers, numbers, batch, min(top_row, queries - 1usize), how);
    let documents = own_documents(buffers, batch, mine, &span, queries, keys, how);
    let begin = max(piece.begin, span.first / columns * columns);
    let end = select(
        top_row < queries,
        min(most, min(piece.end, span.end)),
        0usize,
    );
    Panel {
        mine,
        sights,
        least,
        begin,
        end,
        documents,
    }
}

/// Whether the tile at `column` matters to a panel.
#[cube]
fn matters(panel: &Panel, column: usize) -> bool {
    column >= panel.begin && column < panel.end
}

/// `count` values of a panel of two, of which the second's follow the first's.
#[cube]
fn part<T: Scalar, N: Size, N2: Size>(
    both: Vector<T, N2>,
    #[comptime] first: usize,
    #[comptime] count: usize,
) -> Vector<T, N> {
    let mut part = Vector::<T, N>::empty();
    #[unroll]
    for i in 0..count {
        part.insert(i, both.extract(comptime!(first + i)));
    }
    part
}

/// `count` values of each panel, one after the other.
#[cube]
fn joined<T: Scalar, N: Size, N2: Size>(
    first: Vector<T, N>,
    second: Vector<T, N>,
    #[comptime] count: usize,
) -> Vector<T, N2> {
    let mut both = Vector::<T, N2>::empty();
    #[unroll]
    for i in 0..count {
        both.insert(i, first.extract(i));
        both.insert(comptime!(count + i), second.extract(i));
    }
    both
}

/// Computes a piece: for each of its panels a thread has `N` sums, from `S` scores in `W` words.
#[cube]
pub(super) fn run<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    out: u64,
    lse: &mut [u32],
    numbers: &Sequence<usize>,
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    let size!(N2) = comptime!(2 * how.sums());
    let size!(S2) = comptime!(2 * how.scores());
    let size!(W2) = comptime!(2 * how.words());
    let (heads, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, columns, tile) = comptime!((how.rows(), how.columns, how.tile() as u32));
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((how.own() + 4 * how.tile() + 1024) / 4),
        1024usize,
    );
    let own = (shared_address(&memory) + 1023u32) & 0xffff_fc00u32;
    let tiles = own + comptime!(how.own() as u32);
    // Surplus cubes of the grid repeat an earlier one.
    let piece = piece(buffers, numbers, CUBE_POS % pieces(numbers, how), how);
    let (batch, query_head) = (piece.line / heads, piece.line % heads);
    let key_head = query_head / *numbers.index(1usize);
    let (group_row, thread_row) = place_of_thread();
    let group_row = group_row * comptime!(how.panels);
    let mut panels = Sequence::<Panel>::new();
    #[unroll]
    for i in 0..comptime!(how.panels) {
        let row = group_row + comptime!(64 * i);
        panels.push(panel(buffers, numbers, &piece, row, thread_row, how));
    }
    let first = panels.index(0usize);

    let q_base = head(buffers, numbers, batch, query_head, how.q, how);
    let k_base = head(buffers, numbers, batch, key_head, how.k, how);
    let v_base = head(buffers, numbers, batch, key_head, how.v, how);
    let (q_stride, k_stride, v_stride) = (
        stride(numbers, how.q),
        stride(numbers, how.k),
        stride(numbers, how.v),
    );
    let mut column = piece.begin;
    if column < piece.end {
        bring_rows(q_base, q_stride, piece.row, queries, size, own, rows, how);
        bring_rows(k_base, k_stride, column, keys, size, tiles, columns, how);
        let to = tiles + tile;
        bring_rows(v_base, v_stride, column, keys, size, to, columns, how);
    }
    let own_at = own + group_row as u32 * 128u32;
    let factor = scale * std::f32::consts::LOG2_E;
    let (scores_count, sums_count, words_count) =
        comptime!((how.scores(), how.sums(), how.words()));
    let mut top = LOWEST.runtime();
    let mut top8 = LOWEST.runtime();
    let mut total = 0.0f32;
    let mut total8 = 0.0f32;
    let mut sums = Vector::<f32, N>::new(0.0f32);
    let mut below_top = LOWEST.runtime();
    let mut below_top8 = LOWEST.runtime();
    let mut below_total = 0.0f32;
    let mut below_total8 = 0.0f32;
    let mut below_sums = Vector::<f32, N>::new(0.0f32);
    let mut stage = 0u32;
    while column < piece.end {
        let at = tiles + stage * comptime!(2 * tile);
        let next = tiles + (1u32 - stage) * comptime!(2 * tile);
        let then = column + columns;
        gpu_asm!("cp.async.wait_all;");
        sync_cube();
        if then < piece.end {
            bring_rows(k_base, k_stride, then, keys, size, next, columns, how);
            let to = next + tile;
            bring_rows(v_base, v_stride, then, keys, size, to, columns, how);
        }
        if comptime!(how.panels == 1) {
            if matters(first, column) {
                let scores = score::<S>(own_at, at, how);
                let (sights, documents) = (first.sights, &first.documents);
                let scores =
                    hide::<S>(buffers, scores, column, first.least, sights, documents, how);
                let (scores, tops, shrinks, added) = soften::<S>(scores, (top, top8), factor, how);
                top = tops.0;
                top8 = tops.1;
                total = total * shrinks.0 + added.0;
                total8 = total8 * shrinks.1 + added.1;
                sums = shrunk::<N>(sums, shrinks, sums_count);
                sums = weigh::<N, W>(sums, words::<S, W>(scores, 1usize, how), at + tile, how);
            }
        } else if matters(first, column) || matters(panels.index(1usize), column) {
            // What the tile does not matter to sees none of it, and has weights of nothing.
            let both = score::<S2>(own_at, at, how);
            let scores = part::<f32, S, S2>(both, 0usize, scores_count);
            let (sights, documents) = (first.sights, &first.documents);
            let scores = hide::<S>(buffers, scores, column, first.least, sights, documents, how);
            let (scores, tops, shrinks, added) = soften::<S>(scores, (top, top8), factor, how);
            top = tops.0;
            top8 = tops.1;
            total = total * shrinks.0 + added.0;
            total8 = total8 * shrinks.1 + added.1;
            let weights = words::<S, W>(scores, 1usize, how);
            let below = panels.index(1usize);
            let scores = part::<f32, S, S2>(both, scores_count, scores_count);
            let (sights, documents) = (below.sights, &below.documents);
            let scores = hide::<S>(buffers, scores, column, below.least, sights, documents, how);
            let tops = (below_top, below_top8);
            let (scores, tops, below_shrinks, added) = soften::<S>(scores, tops, factor, how);
            below_top = tops.0;
            below_top8 = tops.1;
            below_total = below_total * below_shrinks.0 + added.0;
            below_total8 = below_total8 * below_shrinks.1 + added.1;
            let below_weights = words::<S, W>(scores, 1usize, how);
            let both = joined::<f32, N, N2>(
                shrunk::<N>(sums, shrinks, sums_count),
                shrunk::<N>(below_sums, below_shrinks, sums_count),
                sums_count,
            );
            let weights = joined::<u32, W, W2>(weights, below_weights, words_count);
            let both = weigh::<N2, W2>(both, weights, at + tile, how);
            sums = part::<f32, N, N2>(both, 0usize, sums_count);
            below_sums = part::<f32, N, N2>(both, sums_count, sums_count);
        }
        column = then;
        stage = 1u32 - stage;
    }
    let (tops, totals) = ((top, top8), (total, total8));
    let mine = first.mine;
    finish::<N>(
        out, lse, &sums, tops, totals, &piece, mine, numbers, scale, nothing, how,
    );
    if comptime!(how.panels == 2) {
        let (tops, totals) = ((below_top, below_top8), (below_total, below_total8));
        let (sums, mine) = (below_sums, panels.index(1usize).mine);
        finish::<N>(
            out, lse, &sums, tops, totals, &piece, mine, numbers, scale, nothing, how,
        );
    }
}
