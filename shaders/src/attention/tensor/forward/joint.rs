//! The result where warps multiply: all threads bring tiles, the next one while this one is used.

use super::{finish, hide, piece, pieces, shrunk, sights, soften};
use crate::{
    attention::{
        LOWEST,
        tensor::{
            How, bring_rows, head, own_documents, place_of_thread, score, span_of, stride, weigh,
            words,
        },
    },
    hopper::shared_address,
};
use cubecl::prelude::*;

/// Computes a piece of `N` sums of a thread from `S` scores in `W` words.
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
    let top_row = piece.row + group_row;
    let mine = top_row + thread_row;
    let (sights, least, most) = sights(top_row, mine, queries, keys, how);
    let span = span_of(buffers, numbers, batch, min(top_row, queries - 1usize), how);
    let ids = own_documents(buffers, batch, mine, &span, queries, keys, how);
    // The tiles that this warp group has to do with.
    let begin = max(piece.begin, span.first / columns * columns);
    let end = select(
        top_row < queries,
        min(most, min(piece.end, span.end)),
        0usize,
    );

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
    let mut top = LOWEST.runtime();
    let mut top8 = LOWEST.runtime();
    let mut total = 0.0f32;
    let mut total8 = 0.0f32;
    let mut sums = Vector::<f32, N>::new(0.0f32);
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
        if column >= begin && column < end {
            let scores = score::<S>(own_at, at, how);
            let scores = hide::<S>(buffers, scores, column, least, sights, &ids, how);
            let (scores, tops, shrinks, added) = soften::<S>(scores, (top, top8), factor, how);
            top = tops.0;
            top8 = tops.1;
            total = total * shrinks.0 + added.0;
            total8 = total8 * shrinks.1 + added.1;
            sums = shrunk::<N>(sums, shrinks, comptime!(how.sums()));
            sums = weigh::<N, W>(sums, words::<S, W>(scores, how), at + tile, how);
        }
        column = then;
        stage = 1u32 - stage;
    }
    let (tops, totals) = ((top, top8), (total, total8));
    finish::<N>(
        out, lse, &sums, tops, totals, &piece, mine, numbers, scale, nothing, how,
    );
}
