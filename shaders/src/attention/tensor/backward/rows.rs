//! What the threads do that compute gradients.

use super::{OWN_READ, OWN_THERE, Room, TILE_READ, TILE_THERE, piece, pieces};
use crate::{
    attention::{
        Goal, LOWEST, place,
        tensor::{
            How, STAGES, barrier, head, of_documents, own_documents, place_of_thread, score,
            settle, span_of, store, stride, sum_of, turn, weigh,
        },
    },
    hopper::{arrive, exp2, get2_shared, get4, pack, put1, see_brought, unpack, wait_for},
};
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// More than any log-sum-exp: under it, weights are nothing.
pub(super) const HIGHEST: f32 = 3.0e38;

/// A log-sum-exp to base 2. A query that sees nothing has no weights.
#[cube]
fn log_sum(lse: f32) -> f32 {
    select(lse > LOWEST, lse * std::f32::consts::LOG2_E, HIGHEST)
}

/// `D` of a query: the mean, under its weights, of what each key's value adds to the loss. Four
/// neighbouring threads have a query.
#[cube]
pub(super) fn mean_rise(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    batch: usize,
    own_head: usize,
    query: usize,
    #[comptime] how: How,
) -> f32 {
    let (queries, size) = (*numbers.index(2usize), *numbers.index(4usize));
    let lane = UNIT_POS as usize % 4usize;
    let element = comptime!(how.dtype.size() as u64);
    let query = min(query, queries - 1usize);
    let grad = head(buffers, numbers, batch, own_head, how.grad, how)
        + u64::cast_from(query * stride(numbers, how.grad)) * element;
    let out = head(buffers, numbers, batch, own_head, how.out, how)
        + u64::cast_from(query * stride(numbers, how.out)) * element;
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..comptime!(how.blocks * 2) {
        let feature = (lane + comptime!(4 * i)) * comptime!(how.chunk());
        if feature < size {
            let at = u64::cast_from(feature) * element;
            let (grads, outs) = (get4(grad + at), get4(out + at));
            #[unroll]
            for word in 0..4usize {
                let (a, b) = (grads.extract(word), outs.extract(word));
                if comptime!(how.dtype == DType::F32) {
                    sum += f32::reinterpret(a) * f32::reinterpret(b);
                } else {
                    sum += unpack(a, false, how.dtype) * unpack(b, false, how.dtype);
                    sum += unpack(a, true, how.dtype) * unpack(b, true, how.dtype);
                }
            }
        }
    }
    sum_of(sum)
}

/// Of two neighbouring queries the log-sum-exps to base 2 and `D`, where they are columns.
#[cube]
fn column_statistics(at: u32, #[comptime] how: How) -> ((f32, f32), (f32, f32)) {
    if comptime!(how.goal == Goal::Query) {
        let nothing = 0.0f32.runtime();
        ((nothing, nothing), (nothing, nothing))
    } else if comptime!(how.slopes) {
        let lses = get2_shared(at);
        let means = get2_shared(at + comptime!(4 * how.columns as u32));
        (
            (log_sum(lses.extract(0usize)), log_sum(lses.extract(1usize))),
            (means.extract(0usize), means.extract(1usize)),
        )
    } else {
        let lses = get2_shared(at);
        let nothing = 0.0f32.runtime();
        (
            (log_sum(lses.extract(0usize)), log_sum(lses.extract(1usize))),
            (nothing, nothing),
        )
    }
}
/// Computes the rows of a warp group, of all pieces of this cube: `N` sums of a thread for each
/// gradient, `S` scores and `W` words of weights.
#[cube]
pub(super) fn compute<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    outputs: (u64, u64),
    numbers: &Sequence<usize>,
    room: &Room,
    scale: f32,
    #[comptime] how: How,
) {
    let by_query = comptime!(how.goal == Goal::Query);
    let (first_out, second_out) = outputs;
    let (heads, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (columns, bytes) = comptime!((how.columns, how.tile() as u32));
    let (scores_count, sums_count) = comptime!((how.scores(), how.sums()));
    let (group_row, thread_row) = place_of_thread();
    let lane = UNIT_POS as usize % 32usize;
    let own_at = room.own + group_row as u32 * 128u32;
    let b_at = own_at + comptime!(how.own() as u32);
    let factor = scale * std::f32::consts::LOG2_E;
    let mine_first = lane % 4usize * 2usize;
    let (own_rows, all) = pieces(numbers, how);
    let mut number = CUBE_POS;
    let mut done = 0u32;
    let mut tile = 0u32;
    while number < all {
        let piece = piece(buffers, numbers, number, how);
        let top_row = piece.row + group_row;
        let mine = top_row + thread_row;
        // For queries up to which column a row sees, for keys from which on it is seen. Between `none`
        // and `whole`, or the other way round, it differs from row to row of the warp group.
        let (edge, edge8, whole, none) = if comptime!(by_query && how.causal) {
            (
                min(max(mine + 1usize + keys, queries) - queries, keys),
                min(max(mine + 9usize + keys, queries) - queries, keys),
                min(max(top_row + 1usize + keys, queries) - queries, keys),
                min(max(top_row + 64usize + keys, queries) - queries, keys),
            )
        } else if comptime!(by_query) {
            (keys, keys, keys, keys)
        } else if comptime!(how.causal) {
            (
                max(mine + queries, keys) - keys,
                max(mine + 8usize + queries, keys) - keys,
                max(top_row + 63usize + queries, keys) - keys,
                max(top_row + queries, keys) - keys,
            )
        } else {
            (
                0usize.runtime(),
                0usize.runtime(),
                0usize.runtime(),
                0usize.runtime(),
            )
        };
        let at = min(top_row, own_rows - 1usize);
        let span = span_of(buffers, numbers, piece.batch, at, how);
        let own = own_documents(buffers, piece.batch, mine, &span, queries, keys, how);
        let mut row_lse = 0.0f32;
        let mut row_lse8 = 0.0f32;
        let mut row_mean = 0.0f32;
        let mut row_mean8 = 0.0f32;
        if comptime!(by_query) {
            let base = (piece.batch * heads + piece.head) * queries;
            let (at, at8) = (
                base + min(mine, queries - 1usize),
                base + min(mine + 8usize, queries - 1usize),
            );
            row_lse = log_sum(f32::reinterpret(stats.index(0usize)[at]));
            row_lse8 = log_sum(f32::reinterpret(stats.index(0usize)[at8]));
            row_mean = mean_rise(buffers, numbers, piece.batch, piece.head, mine, how);
            let below = mine + 8usize;
            row_mean8 = mean_rise(buffers, numbers, piece.batch, piece.head, below, how);
            // Those for keys come after and read them here.
            if lane % 4usize == 0usize {
                if mine < queries {
                    put1(second_out + u64::cast_from(base + mine) * 4u64, row_mean);
                }
                if below < queries {
                    put1(second_out + u64::cast_from(base + below) * 4u64, row_mean8);
                }
            }
        }
        let mut slopes = Vector::<f32, N>::new(0.0f32);
        let mut values = Vector::<f32, N>::new(0.0f32);
        let count = piece.tiles * piece.heads;
        if count > 0usize {
            wait_for(barrier(room.barriers, 0u32, OWN_THERE), done % 2u32);
            done += 1u32;
        }
        let mut index = 0usize;
        let mut column = piece.begin;
        let mut left = piece.tiles;
        while index < count {
            wait_for(barrier(room.barriers, tile, TILE_THERE), turn(tile));
            // Tiles at the end, or at the start, may be of no concern to this warp group.
            let mut concerned = if comptime!(by_query) {
                column < none && top_row < own_rows
            } else {
                column + columns > none && top_row < own_rows
            };
            if comptime!(how.documents.is_some()) {
                let meets = column < span.end && column + columns > span.first;
                concerned = concerned && meets;
            }
            if concerned {
                see_brought();
                let stage = tile % STAGES;
                let at = room.tiles + stage * comptime!(2 * bytes);
                let scores = score::<S>(own_at, at, how);
                let rises = if comptime!(how.slopes) {
                    score::<S>(b_at, at + bytes, how)
                } else {
                    Vector::<f32, S>::new(0.0f32)
                };
                let mut scores = settle::<S>(scores, scores_count, 0usize, how);
                let rises = if comptime!(how.slopes) {
                    settle::<S>(rises, scores_count, 0usize, how)
                } else {
                    rises
                };
                let look = if comptime!(by_query) {
                    column + columns > whole
                } else {
                    column < whole
                };
                if look {
                    let first = column + mine_first;
                    #[unroll]
                    for i in 0..comptime!(scores_count / 2) {
                        let at = first + comptime!(i / 2 * 8);
                        let edge = if comptime!(i % 2 == 0) { edge } else { edge8 };
                        let (low, high) = (comptime!(2 * i), comptime!(2 * i + 1));
                        let (seen, seen_next) = if comptime!(by_query) {
                            (at < edge, at + 1usize < edge)
                        } else {
                            (at >= edge, at + 1usize >= edge)
                        };
                        scores.insert(low, select(seen, scores.extract(low), LOWEST));
                        scores.insert(high, select(seen_next, scores.extract(high), LOWEST));
                    }
                }
                if comptime!(how.documents.is_some()) {
                    if column < own.clear || column + columns > own.clear_end {
                        let (first, lowest) = (column + mine_first, LOWEST.runtime());
                        scores =
                            of_documents::<S>(buffers, scores, 0usize, first, lowest, &own, how);
                    }
                }
                let here =
                    room.stats + stage * comptime!(8 * columns as u32) + mine_first as u32 * 4u32;
                let mut weights = Vector::<u32, W>::empty();
                let mut changes = Vector::<u32, W>::empty();
                #[unroll]
                for c in 0..comptime!(scores_count / 4) {
                    // Two neighbouring columns of two rows.
                    let ((column_lse, next_lse), (column_mean, next_mean)) =
                        column_statistics(here + comptime!(32 * c as u32), how);
                    #[unroll]
                    for below in 0..2usize {
                        let (lse, lse_next, mean, mean_next) = if comptime!(!by_query) {
                            (column_lse, next_lse, column_mean, next_mean)
                        } else if comptime!(below == 0) {
                            (row_lse, row_lse, row_mean, row_mean)
                        } else {
                            (row_lse8, row_lse8, row_mean8, row_mean8)
                        };
                        let (low, high) = comptime!((4 * c + 2 * below, 4 * c + 2 * below + 1));
                        let word = comptime!(2 * c + below);
                        let weight = exp2(scores.extract(low) * factor - lse);
                        let weight_next = exp2(scores.extract(high) * factor - lse_next);
                        if comptime!(how.values) {
                            weights.insert(word, pack(weight, weight_next, how.dtype));
                        }
                        if comptime!(how.slopes) {
                            let change = weight * (rises.extract(low) - mean);
                            let change_next = weight_next * (rises.extract(high) - mean_next);
                            changes.insert(word, pack(change, change_next, how.dtype));
                        }
                    }
                }
                if comptime!(how.values) {
                    values = weigh::<N, W>(values, weights, at + bytes, how);
                }
                if comptime!(how.slopes) {
                    slopes = weigh::<N, W>(slopes, changes, at, how);
                }
                slopes = settle::<N>(slopes, sums_count, 0usize, how);
                values = settle::<N>(values, sums_count, 0usize, how);
            }
            arrive(barrier(room.barriers, tile, TILE_READ));
            tile += 1u32;
            index += 1usize;
            column += columns;
            left -= 1usize;
            if left == 0usize {
                left = piece.tiles;
                column = piece.begin;
            }
        }
        if count > 0usize {
            arrive(barrier(room.barriers, 0u32, OWN_READ));
        }
        if comptime!(how.slopes) {
            let to = place(numbers, piece.batch, piece.head, 0usize);
            let by = (scale, scale);
            store::<N>(
                first_out, &slopes, 0usize, to, mine, own_rows, size, by, how,
            );
        }
        if comptime!(how.values) {
            let to = place(
                numbers,
                piece.batch,
                piece.head,
                comptime!(how.slopes as usize),
            );
            let by = (1.0f32.runtime(), 1.0f32.runtime());
            store::<N>(
                second_out, &values, 0usize, to, mine, own_rows, size, by, how,
            );
        }
        number += CUBE_COUNT;
    }
}
