//! The result and its log-sum-exps.

use super::{
    How, bring_rows, head, place_of_thread, score, settle, share, store, stride, sum_of, weigh,
    words,
};
use crate::{
    attention::{LOWEST, place},
    hopper::{address_mut, descriptor, exp2, shared_address},
};
use cubecl::prelude::*;

/// The largest of a value over four neighbouring threads.
#[cube]
fn top_of(value: f32) -> f32 {
    let value = max(value, plane_shuffle_xor(value, 1u32));
    max(value, plane_shuffle_xor(value, 2u32))
}

/// The lowest score of all for keys behind what a row sees, where `look` says that there may be some.
#[cube]
fn hide<S: Size>(
    scores: Vector<f32, S>,
    first: usize,
    look: bool,
    sights: (usize, usize),
    #[comptime] how: How,
) -> Vector<f32, S> {
    let mut scores = scores;
    if look {
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

/// `N` sums, `S` scores and `W` words of weights of a thread.
#[cube]
fn run<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    out: &mut [u32],
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
    let (scores_count, sums_count) = comptime!((how.scores(), how.sums()));
    // The last queries see most keys, so their cubes start first. Surplus cubes of the grid repeat
    // an earlier one.
    let (blocks, lines) = (
        (queries + comptime!(rows - 1)) / rows,
        *numbers.index(6usize),
    );
    let row = (blocks - 1usize - CUBE_POS / lines % blocks) * rows;
    let line = CUBE_POS % lines;
    let (batch, query_head) = (line / heads, line % heads);
    let key_head = query_head / *numbers.index(1usize);
    let q_base = head(buffers, numbers, batch, query_head, how.q);
    let k_base = head(buffers, numbers, batch, key_head, how.k);
    let v_base = head(buffers, numbers, batch, key_head, how.v);
    let (k_stride, v_stride) = (stride(numbers, how.k), stride(numbers, how.v));
    // It is written to by its address; this keeps it an output.
    if queries == 0usize {
        out[0] = 0u32;
    }
    let out_base = address_mut(out);
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((how.own() + 4 * how.tile() + 1024) / 4),
        1024usize,
    );
    let own = (shared_address(&memory) + 1023u32) & 0xffff_fc00u32;
    let tiles = own + comptime!(how.own() as u32);

    let (group_row, thread_row) = place_of_thread();
    let lane = UNIT_POS as usize % 32usize;
    let mine = row + group_row + thread_row;
    // How many keys a query sees: those before it.
    let end = if comptime!(how.causal) {
        max(min(row + rows, queries) + keys, queries) - queries
    } else {
        keys
    };
    let (sight, sight8, least) = if comptime!(how.causal) {
        (
            max(mine + 1usize + keys, queries) - queries,
            max(mine + 9usize + keys, queries) - queries,
            max(row + group_row + 1usize + keys, queries) - queries,
        )
    } else {
        (keys, keys, keys)
    };
    let most = if comptime!(how.causal) {
        max(row + group_row + 64usize + keys, queries) - queries
    } else {
        keys
    };
    let (sight, sight8, least) = (min(sight, keys), min(sight8, keys), min(least, keys));

    bring_rows(
        q_base,
        stride(numbers, how.q),
        row,
        queries,
        size,
        own,
        rows,
        how,
    );
    let start = 0usize.runtime();
    bring_rows(k_base, k_stride, start, keys, size, tiles, columns, how);
    let q_at = descriptor(own + group_row as u32 * 128u32, 0usize);
    let factor = scale * std::f32::consts::LOG2_E;
    let first = lane % 4usize * 2usize;
    let mut top = LOWEST.runtime();
    let mut top8 = LOWEST.runtime();
    let mut total = 0.0f32;
    let mut total8 = 0.0f32;
    let mut sums = Vector::<f32, N>::new(0.0f32);
    let mut column = 0usize;
    let mut stage = 0u32;
    let to = tiles + tile;
    bring_rows(v_base, v_stride, start, keys, size, to, columns, how);
    gpu_asm!("cp.async.commit_group;");
    while column < end {
        gpu_asm!("cp.async.wait_group 0; fence.proxy.async.shared::cta;");
        sync_cube();
        let at = tiles + stage * comptime!(2 * tile);
        let next = tiles + (1u32 - stage) * comptime!(2 * tile);
        let then = column + columns;
        if then < end {
            bring_rows(k_base, k_stride, then, keys, size, next, columns, how);
            let to = next + tile;
            bring_rows(v_base, v_stride, then, keys, size, to, columns, how);
        }
        gpu_asm!("cp.async.commit_group;");
        // The last tiles may be behind what the rows of this warp group see.
        if column < most {
            let begun = score::<S>(q_at, descriptor(at, 0usize), how);
            let scores = settle::<S>(begun, scores_count, 0usize);
            let look = then > least;
            let scores = hide::<S>(scores, column + first, look, (sight, sight8), how);
            let (scores, tops, shrinks, added) = soften::<S>(scores, (top, top8), factor, how);
            top = tops.0;
            top8 = tops.1;
            total = total * shrinks.0 + added.0;
            total8 = total8 * shrinks.1 + added.1;
            sums = shrunk::<N>(sums, shrinks, sums_count);
            let weights = words::<S, W>(scores, how);
            let values = descriptor(at + tile, comptime!(columns * 128));
            let adding = weigh::<N, W>(sums, weights, values, how);
            sums = settle::<N>(adding, sums_count, 0usize);
        }
        column = then;
        stage = 1u32 - stage;
    }
    gpu_asm!("cp.async.wait_group 0;");

    let (total, total8) = (sum_of(total), sum_of(total8));
    let (empty, empty8) = (total == 0.0f32, total8 == 0.0f32);
    let by = select(empty, 0.0f32, 1.0f32 / total);
    let by8 = select(empty8, 0.0f32, 1.0f32 / total8);
    store::<N>(
        out_base,
        &sums,
        place(numbers, batch, query_head, 0usize),
        mine,
        queries,
        size,
        (by, by8),
        how,
    );
    if lane % 4usize == 0usize {
        if mine < queries {
            let log = top * scale + f32::ln(select(empty, 1.0f32, total));
            lse[line * queries + mine] = u32::reinterpret(select(empty, nothing, log));
        }
        if mine + 8usize < queries {
            let log = top8 * scale + f32::ln(select(empty8, 1.0f32, total8));
            lse[line * queries + mine + 8usize] = u32::reinterpret(select(empty8, nothing, log));
        }
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
    if comptime!(how.blocks == 1) {
        run::<Const<32>, Const<32>, Const<16>>(buffers, out, lse, numbers, scale, nothing, how);
    } else if comptime!(how.blocks == 2) {
        run::<Const<64>, Const<64>, Const<32>>(buffers, out, lse, numbers, scale, nothing, how);
    } else if comptime!(how.blocks == 3) {
        run::<Const<96>, Const<32>, Const<16>>(buffers, out, lse, numbers, scale, nothing, how);
    } else {
        run::<Const<128>, Const<32>, Const<16>>(buffers, out, lse, numbers, scale, nothing, how);
    }
}
