//! The result and its log-sum-exps.

mod joint;

use super::{
    How, Own, STAGES, barrier, bring_rows, columns_of_rows, head, of_documents, own_documents,
    piece_of, place_of_thread, score, settle, share, span_of, store, stride, sum_of, turn, weigh,
    words,
};
use crate::{
    attention::{LOWEST, place},
    hopper::{
        address_mut, arrive, arrive_brought, exp2, make_barrier, resize_registers, see_brought,
        shared_address, wait_for,
    },
};
use cubecl::prelude::*;

/// The largest of a value over four neighbouring threads.
#[cube]
fn top_of(value: f32) -> f32 {
    let value = max(value, plane_shuffle_xor(value, 1u32));
    max(value, plane_shuffle_xor(value, 2u32))
}

/// The lowest score of all for keys of the tile at `column` that a row does not see: behind its sight,
/// or of another document. The `least` of all sights says whether the first need a look.
#[cube]
fn hide<S: Size>(
    buffers: &Sequence<Box<[u32]>>,
    scores: Vector<f32, S>,
    column: usize,
    least: usize,
    sights: (usize, usize),
    own: &Own,
    #[comptime] how: How,
) -> Vector<f32, S> {
    let columns = comptime!(how.columns);
    let first = column + UNIT_POS as usize % 4usize * 2usize;
    let mut scores = scores;
    if column + columns > least {
        #[unroll]
        for i in 0..comptime!(how.scores() / 2) {
            let key = first + comptime!(i / 2 * 8);
            let sight = if comptime!(i % 2 == 0) {
                sights.0
            } else {
                sights.1
            };
            let (low, high) = (comptime!(2 * i), comptime!(2 * i + 1));
            scores.insert(low, select(key < sight, scores.extract(low), LOWEST));
            scores.insert(
                high,
                select(key + 1usize < sight, scores.extract(high), LOWEST),
            );
        }
    }
    if comptime!(how.documents.is_some()) {
        if column < own.clear || column + columns > own.clear_end {
            scores = of_documents::<S>(buffers, scores, 0usize, first, LOWEST.runtime(), own, how);
        }
    }
    scores
}

/// Scores as weights under the largest so far; the largest, what that makes of earlier sums, and the
/// weights' sums, each of both rows.
#[cube]
fn soften<S: Size>(
    scores: Vector<f32, S>,
    tops: (f32, f32),
    factor: f32,
    #[comptime] how: How,
) -> (Vector<f32, S>, (f32, f32), (f32, f32), (f32, f32)) {
    let mut scores = scores;
    let mut reached = LOWEST.runtime();
    let mut reached8 = LOWEST.runtime();
    #[unroll]
    for i in 0..comptime!(how.scores() / 4) {
        let (a, b) = (
            scores.extract(comptime!(4 * i)),
            scores.extract(comptime!(4 * i + 1)),
        );
        let (c, d) = (
            scores.extract(comptime!(4 * i + 2)),
            scores.extract(comptime!(4 * i + 3)),
        );
        reached = max(reached, max(a, b));
        reached8 = max(reached8, max(c, d));
    }
    let (new, new8) = (max(tops.0, top_of(reached)), max(tops.1, top_of(reached8)));
    let (shrink, shrink8) = (
        exp2((tops.0 - new) * factor),
        exp2((tops.1 - new8) * factor),
    );
    // A query that has seen nothing has the lowest score of all, and so do keys it cannot see: with
    // this base their weights are nothing.
    let base = select(new > LOWEST, new * factor, 0.0f32);
    let base8 = select(new8 > LOWEST, new8 * factor, 0.0f32);
    let mut sum = 0.0f32;
    let mut sum8 = 0.0f32;
    #[unroll]
    for i in 0..comptime!(how.scores() / 4) {
        let a = exp2(scores.extract(comptime!(4 * i)) * factor - base);
        let b = exp2(scores.extract(comptime!(4 * i + 1)) * factor - base);
        let c = exp2(scores.extract(comptime!(4 * i + 2)) * factor - base8);
        let d = exp2(scores.extract(comptime!(4 * i + 3)) * factor - base8);
        sum += a + b;
        sum8 += c + d;
        scores.insert(comptime!(4 * i), a);
        scores.insert(comptime!(4 * i + 1), b);
        scores.insert(comptime!(4 * i + 2), c);
        scores.insert(comptime!(4 * i + 3), d);
    }
    (scores, (new, new8), (shrink, shrink8), (sum, sum8))
}

/// Both rows' sums, each times its factor.
#[cube]
fn shrunk<N: Size>(
    sums: Vector<f32, N>,
    by: (f32, f32),
    #[comptime] count: usize,
) -> Vector<f32, N> {
    let mut sums = sums;
    #[unroll]
    for i in 0..count {
        let by = if comptime!(i % 4 < 2) { by.0 } else { by.1 };
        sums.insert(i, sums.extract(i) * by);
    }
    sums
}

/// Barriers, by what ends their turns: rows of queries are there, or no longer needed; and so on for
/// each stage of keys and of values.
const QUERIES_THERE: u32 = 0;
const QUERIES_READ: u32 = 1;
const KEYS_THERE: u32 = 2;
const KEYS_READ: u32 = KEYS_THERE + STAGES;
const VALUES_THERE: u32 = KEYS_READ + STAGES;
const VALUES_READ: u32 = VALUES_THERE + STAGES;
const BARRIERS: u32 = VALUES_READ + STAGES;
/// Where things are in shared memory.
#[derive(CubeType, Clone, Copy)]
struct Room {
    queries: u32,
    keys: u32,
    values: u32,
    barriers: u32,
}

#[cube]
fn room(memory: &[u32], #[comptime] how: How) -> Room {
    let (own, tiles) = comptime!((how.own() as u32, STAGES * how.tile() as u32));
    let queries = (shared_address(memory) + 1023u32) & 0xffff_fc00u32;
    Room {
        queries,
        keys: queries + own,
        values: queries + comptime!(own + tiles),
        barriers: queries + comptime!(own + 2 * tiles),
    }
}

/// A piece of work: the first row, its line (batch and head), and the keys that its rows see: from the
/// tile at `begin` on.
#[derive(CubeType, Clone, Copy)]
struct Piece {
    row: usize,
    line: usize,
    begin: usize,
    end: usize,
}

/// How many there are.
#[cube]
fn pieces(numbers: &Sequence<usize>, #[comptime] how: How) -> usize {
    let rows = comptime!(how.rows());
    (*numbers.index(2usize) + comptime!(rows - 1)) / rows * *numbers.index(6usize)
}

/// A piece of this number. The last queries see most keys, so they come first.
#[cube]
fn piece(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    number: usize,
    #[comptime] how: How,
) -> Piece {
    let (queries, keys, size) = (
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, lines) = (comptime!(how.rows()), *numbers.index(6usize));
    let blocks = (queries + comptime!(rows - 1)) / rows;
    let (block, line) = piece_of(number, blocks, lines, keys * size, *numbers.index(1usize));
    let row = (blocks - 1usize - block) * rows;
    let end = if comptime!(how.causal) {
        max(min(row + rows, queries) + keys, queries) - queries
    } else {
        keys
    };
    let mut begin = 0usize;
    let mut last = end;
    if comptime!(how.documents.is_some()) {
        let batch = line / *numbers.index(0usize);
        let own = columns_of_rows(buffers, numbers, batch, row, rows, how);
        last = min(own.1, end);
        begin = min(own.0, last) / comptime!(how.columns) * comptime!(how.columns);
    }
    Piece {
        row,
        line,
        begin,
        end: last,
    }
}

/// Brings the tiles of all pieces of this cube, as far ahead as there is room.
#[cube]
fn supply(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    room: &Room,
    #[comptime] how: How,
) {
    let (heads, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, columns, bytes) = comptime!((how.rows(), how.columns, how.tile() as u32));
    let (k_stride, v_stride) = (stride(numbers, how.k), stride(numbers, how.v));
    let all = pieces(numbers, how);
    let mut number = CUBE_POS;
    let mut done = 0u32;
    let mut tile = 0u32;
    while number < all {
        let piece = piece(buffers, numbers, number, how);
        let (batch, query_head) = (piece.line / heads, piece.line % heads);
        let key_head = query_head / *numbers.index(1usize);
        let count = (piece.end - piece.begin + comptime!(columns - 1)) / columns;
        if count > 0usize {
            let from = head(buffers, numbers, batch, query_head, how.q, how);
            let q_stride = stride(numbers, how.q);
            let to = room.queries;
            wait_for(
                barrier(room.barriers, 0u32, QUERIES_READ),
                (done % 2u32) ^ 1u32,
            );
            bring_rows(from, q_stride, piece.row, queries, size, to, rows, how);
            arrive_brought(barrier(room.barriers, 0u32, QUERIES_THERE));
            done += 1u32;
            let k_base = head(buffers, numbers, batch, key_head, how.k, how);
            let v_base = head(buffers, numbers, batch, key_head, how.v, how);
            // Values of a tile are used after the keys of the next.
            let mut index = 0usize;
            while index <= count {
                if index < count {
                    let to = room.keys + tile % STAGES * bytes;
                    let first = piece.begin + index * columns;
                    wait_for(barrier(room.barriers, tile, KEYS_READ), turn(tile) ^ 1u32);
                    bring_rows(k_base, k_stride, first, keys, size, to, columns, how);
                    arrive_brought(barrier(room.barriers, tile, KEYS_THERE));
                }
                if index > 0usize {
                    let last = tile - 1u32;
                    let to = room.values + last % STAGES * bytes;
                    let first = piece.begin + (index - 1usize) * columns;
                    wait_for(barrier(room.barriers, last, VALUES_READ), turn(last) ^ 1u32);
                    bring_rows(v_base, v_stride, first, keys, size, to, columns, how);
                    arrive_brought(barrier(room.barriers, last, VALUES_THERE));
                }
                index += 1usize;
                tile += 1u32;
            }
            tile -= 1u32;
        }
        number += CUBE_COUNT;
    }
    gpu_asm!("cp.async.wait_all;");
}

/// How many keys a thread's two queries see, the least of the 64 from `top_row` on, and the most.
#[cube]
fn sights(
    top_row: usize,
    mine: usize,
    queries: usize,
    keys: usize,
    #[comptime] how: How,
) -> ((usize, usize), usize, usize) {
    if comptime!(how.causal) {
        let sight = max(mine + 1usize + keys, queries) - queries;
        let sight8 = max(mine + 9usize + keys, queries) - queries;
        let least = max(top_row + 1usize + keys, queries) - queries;
        let most = max(top_row + 64usize + keys, queries) - queries;
        (
            (min(sight, keys), min(sight8, keys)),
            min(least, keys),
            most,
        )
    } else {
        ((keys, keys), keys, keys)
    }
}

/// Stores a thread's two rows and their log-sum-exps.
#[cube]
fn finish<N: Size>(
    out: u64,
    lse: &mut [u32],
    sums: &Vector<f32, N>,
    tops: (f32, f32),
    totals: (f32, f32),
    piece: &Piece,
    mine: usize,
    numbers: &Sequence<usize>,
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    let (heads, queries, size) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(4usize),
    );
    let (total, total8) = (sum_of(totals.0), sum_of(totals.1));
    let (empty, empty8) = (total == 0.0f32, total8 == 0.0f32);
    let by = select(empty, 0.0f32, 1.0f32 / total);
    let by8 = select(empty8, 0.0f32, 1.0f32 / total8);
    let place = place(numbers, piece.line / heads, piece.line % heads, 0usize);
    store::<N>(
        out,
        sums,
        0usize,
        place,
        mine,
        queries,
        size,
        (by, by8),
        how,
    );
    if UNIT_POS % 4u32 == 0u32 {
        let at = piece.line * queries + mine;
        if mine < queries {
            let log = tops.0 * scale + f32::ln(select(empty, 1.0f32, total));
            lse[at] = u32::reinterpret(select(empty, nothing, log));
        }
        if mine + 8usize < queries {
            let log = tops.1 * scale + f32::ln(select(empty8, 1.0f32, total8));
            lse[at + 8usize] = u32::reinterpret(select(empty8, nothing, log));
        }
    }
}

/// Passes over a tile.
#[cube]
fn pass(room: &Room, tile: u32) {
    wait_for(barrier(room.barriers, tile, KEYS_THERE), turn(tile));
    arrive(barrier(room.barriers, tile, KEYS_READ));
    wait_for(barrier(room.barriers, tile, VALUES_THERE), turn(tile));
    arrive(barrier(room.barriers, tile, VALUES_READ));
}

/// Computes the rows of a warp group, of all pieces of this cube: `N` sums, `S` scores and `W` words
/// of weights of a thread.
///
/// The scores of the next tile and the sums of this one are computed side by side, and weights are
/// made of the first while the second go on.
#[cube]
fn compute<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    room: &Room,
    out: u64,
    lse: &mut [u32],
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    let (heads, queries, keys) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let (columns, bytes) = comptime!((how.columns, how.tile() as u32));
    let (scores_count, sums_count) = comptime!((how.scores(), how.sums()));
    let (group_row, thread_row) = place_of_thread();
    let q_at = room.queries + group_row as u32 * 128u32;
    let factor = scale * std::f32::consts::LOG2_E;
    let all = pieces(numbers, how);
    let mut number = CUBE_POS;
    let mut done = 0u32;
    let mut tile = 0u32;
    while number < all {
        let piece = piece(buffers, numbers, number, how);
        let top_row = piece.row + group_row;
        let mine = top_row + thread_row;
        let (sights, least, most) = sights(top_row, mine, queries, keys, how);
        let batch = piece.line / heads;
        let span = span_of(buffers, numbers, batch, min(top_row, queries - 1usize), how);
        let most = select(
            top_row < queries,
            min(most, min(piece.end, span.end)),
            0usize,
        );
        let count = (piece.end - piece.begin + comptime!(columns - 1)) / columns;
        // The tiles of this warp group among them.
        let begin = max(piece.begin, span.first / columns * columns);
        let own_count = (max(most, begin) - begin + comptime!(columns - 1)) / columns;
        let own = own_documents(buffers, batch, mine, &span, queries, keys, how);
        let mut top = LOWEST.runtime();
        let mut top8 = LOWEST.runtime();
        let mut total = 0.0f32;
        let mut total8 = 0.0f32;
        let mut sums = Vector::<f32, N>::new(0.0f32);
        if count > 0usize {
            wait_for(barrier(room.barriers, 0u32, QUERIES_THERE), done % 2u32);
            done += 1u32;
        }
        let after = tile + count as u32;
        if own_count > 0usize {
            if comptime!(how.documents.is_some()) {
                let before = tile + ((begin - piece.begin) / columns) as u32;
                while tile < before {
                    pass(room, tile);
                    tile += 1u32;
                }
            }
            wait_for(barrier(room.barriers, tile, KEYS_THERE), turn(tile));
            see_brought();
            let at = room.keys + tile % STAGES * bytes;
            let begun = score::<S>(q_at, at, how);
            let scores = settle::<S>(begun, scores_count, 0usize, how);
            arrive(barrier(room.barriers, tile, KEYS_READ));
            let mut column = begin;
            let scores = hide::<S>(buffers, scores, column, least, sights, &own, how);
            let (scores, tops, _, added) = soften::<S>(scores, (top, top8), factor, how);
            top = tops.0;
            top8 = tops.1;
            total = added.0;
            total8 = added.1;
            let mut weights = words::<S, W>(scores, 1usize, how);
            let mut index = 1usize;
            while index < own_count {
                let before = tile;
                column += columns;
                tile += 1u32;
                wait_for(barrier(room.barriers, tile, KEYS_THERE), turn(tile));
                wait_for(barrier(room.barriers, before, VALUES_THERE), turn(before));
                see_brought();
                let at = room.keys + tile % STAGES * bytes;
                let begun = score::<S>(q_at, at, how);
                let at = room.values + before % STAGES * bytes;
                let adding = weigh::<N, W>(sums, weights, at, how);
                let scores = settle::<S>(begun, scores_count, 1usize, how);
                arrive(barrier(room.barriers, tile, KEYS_READ));
                let scores = hide::<S>(buffers, scores, column, least, sights, &own, how);
                let (scores, tops, shrinks, added) = soften::<S>(scores, (top, top8), factor, how);
                top = tops.0;
                top8 = tops.1;
                total = total * shrinks.0 + added.0;
                total8 = total8 * shrinks.1 + added.1;
                // They have long been there. But the compiler would wait for the sums before it makes
                // weights, and does not move that over a wait.
                wait_for(barrier(room.barriers, before, VALUES_THERE), turn(before));
                sums = settle::<N>(adding, sums_count, 0usize, how);
                arrive(barrier(room.barriers, before, VALUES_READ));
                sums = shrunk::<N>(sums, shrinks, sums_count);
                weights = words::<S, W>(scores, 1usize, how);
                index += 1usize;
            }
            arrive(barrier(room.barriers, 0u32, QUERIES_READ));
            wait_for(barrier(room.barriers, tile, VALUES_THERE), turn(tile));
            see_brought();
            let at = room.values + tile % STAGES * bytes;
            let adding = weigh::<N, W>(sums, weights, at, how);
            sums = settle::<N>(adding, sums_count, 0usize, how);
            arrive(barrier(room.barriers, tile, VALUES_READ));
            tile += 1u32;
        } else if count > 0usize {
            arrive(barrier(room.barriers, 0u32, QUERIES_READ));
        }
        // The last tiles may be behind what the rows of this warp group see.
        while tile < after {
            pass(room, tile);
            tile += 1u32;
        }

        let (tops, totals) = ((top, top8), (total, total8));
        finish::<N>(
            out, lse, &sums, tops, totals, &piece, mine, numbers, scale, nothing, how,
        );
        number += CUBE_COUNT;
    }
}

#[cube]
fn run<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    out: u64,
    lse: &mut [u32],
    numbers: &Sequence<usize>,
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    let tiles = comptime!(2 * STAGES as usize * how.tile());
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((how.own() + tiles + 8 * BARRIERS as usize + 1024) / 4),
        1024usize,
    );
    let room = room(&memory, how);
    let (suppliers, warps) = comptime!((how.suppliers, 4 * how.groups));
    if UNIT_POS == 0u32 {
        make_barrier(barrier(room.barriers, 0u32, QUERIES_THERE), suppliers);
        make_barrier(barrier(room.barriers, 0u32, QUERIES_READ), warps);
        #[unroll]
        for stage in 0..STAGES {
            make_barrier(barrier(room.barriers, stage, KEYS_THERE), suppliers);
            make_barrier(barrier(room.barriers, stage, KEYS_READ), warps);
            make_barrier(barrier(room.barriers, stage, VALUES_THERE), suppliers);
            make_barrier(barrier(room.barriers, stage, VALUES_READ), warps);
        }
    }
    sync_cube();
    let (few, many) = comptime!(how.registers);
    if UNIT_POS >= comptime!(128 * how.groups as u32) {
        if comptime!(few > 0) {
            resize_registers(few, false);
        }
        supply(buffers, numbers, &room, how);
    } else {
        if comptime!(few > 0) {
            resize_registers(many, true);
        }
        compute::<N, S, W>(buffers, numbers, &room, out, lse, scale, nothing, how);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::attention) fn forward(
    buffers: &Sequence<Box<[u32]>>,
    out: &mut [u32],
    lse: &mut [u32],
    numbers: &Sequence<usize>,
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    share(how);
    // It is written to by its address; this keeps it an output.
    if *numbers.index(2usize) == 0usize {
        out[0] = 0u32;
    }
    let out = address_mut(out);
    let size!(N) = how.sums();
    let size!(S) = how.scores();
    let size!(W) = how.words();
    if comptime!(how.suppliers == 0) {
        joint::run::<N, S, W>(buffers, out, lse, numbers, scale, nothing, how);
    } else {
        run::<N, S, W>(buffers, out, lse, numbers, scale, nothing, how);
    }
}
