//! The gradients by small cubes, of which several share a multiprocessor where there is room and hide
//! each other's waits. All their threads bring tiles, the next one while this one is used.

use super::rows::{HIGHEST, mean_rise};
use crate::{
    Cores,
    attention::{
        Goal, LOWEST, place,
        tensor::{
            How, Own, bring_rows, columns_of_rows, head, of_documents, own_documents, piece_of,
            place_of_thread, score, settle, span_of, store, stride, weigh, words,
        },
    },
    hopper::{exp2, put1, see_brought, shared_address},
};
use cubecl::prelude::*;

/// A query's log-sum-exp to base 2. One that there is not or that sees nothing has no weights.
#[cube]
fn log_sum(stats: &Sequence<Box<[u32]>>, base: usize, query: usize, queries: usize) -> f32 {
    let lse = f32::reinterpret(stats.index(0usize)[base + min(query, queries - 1usize)]);
    let there = query < queries && lse > LOWEST;
    select(there, lse * std::f32::consts::LOG2_E, HIGHEST)
}

/// A query's log-sum-exp to base 2, and its `D`.
#[cube]
fn statistics(
    stats: &Sequence<Box<[u32]>>,
    base: usize,
    query: usize,
    queries: usize,
) -> (f32, f32) {
    let mean = f32::reinterpret(stats.index(1usize)[base + min(query, queries - 1usize)]);
    (log_sum(stats, base, query, queries), mean)
}

/// What a thread has to do with in a panel: its own first row, from or up to which column its two rows
/// have to do with them, and all rows of the panel; documents; and where rows are queries, both
/// log-sum-exps and both `D`.
#[derive(CubeType, Clone, Copy)]
struct Panel {
    mine: usize,
    edges: (usize, usize),
    whole: usize,
    documents: Own,
    lses: (f32, f32),
    means: (f32, f32),
}

/// The panel that begins at a row, for the thread whose first row in it is `thread_row`.
#[cube]
fn panel(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    means_to: u64,
    line: (usize, usize),
    row: usize,
    thread_row: usize,
    #[comptime] how: How,
) -> Panel {
    let by_query = comptime!(how.by_query());
    let (heads, queries, keys) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let (batch, own_head) = line;
    let own_rows = if comptime!(by_query) { queries } else { keys };
    let mine = row + thread_row;
    // For queries the end, for keys the start. Tiles that lie on the right side for all rows of the
    // panel need no look.
    let (edge, edge8, whole) = if comptime!(by_query && how.causal) {
        (
            min(max(mine + 1usize + keys, queries) - queries, keys),
            min(max(mine + 9usize + keys, queries) - queries, keys),
            min(max(row + 1usize + keys, queries) - queries, keys),
        )
    } else if comptime!(by_query) {
        (keys, keys, keys)
    } else if comptime!(how.causal) {
        (
            max(mine + queries, keys) - keys,
            max(mine + 8usize + queries, keys) - keys,
            max(row + 63usize + queries, keys) - keys,
        )
    } else {
        (0usize.runtime(), 0usize.runtime(), 0usize.runtime())
    };
    let span = span_of(buffers, numbers, batch, min(row, own_rows - 1usize), how);
    let documents = own_documents(buffers, batch, mine, &span, queries, keys, how);
    let mut lses = (0.0f32.runtime(), 0.0f32.runtime());
    let mut means = (0.0f32.runtime(), 0.0f32.runtime());
    if comptime!(by_query) {
        let base = (batch * heads + own_head) * queries;
        let below = mine + 8usize;
        lses.0 = log_sum(stats, base, mine, queries);
        lses.1 = log_sum(stats, base, below, queries);
        means.0 = mean_rise(buffers, numbers, batch, own_head, mine, how);
        means.1 = mean_rise(buffers, numbers, batch, own_head, below, how);
        // Those for keys come after and read them here.
        if UNIT_POS % 4u32 == 0u32 {
            if mine < queries {
                put1(means_to + u64::cast_from(base + mine) * 4u64, means.0);
            }
            if below < queries {
                put1(means_to + u64::cast_from(base + below) * 4u64, means.1);
            }
        }
    }
    Panel {
        mine,
        edges: (edge, edge8),
        whole,
        documents,
        lses,
        means,
    }
}

/// A gradient of `N` sums of a thread for `first`, and for keys one for `second`, from `S` scores in
/// `W` words: of all its panels, one after the other.
#[cube]
pub(super) fn run<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    outputs: (u64, u64),
    numbers: &Sequence<usize>,
    scale: f32,
    #[comptime] how: How,
) {
    let (first, second) = outputs;
    let by_query = comptime!(how.goal == Goal::Query);
    let (heads, group, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, columns, tile) = comptime!((how.rows(), how.columns, how.tile() as u32));
    let scores_count = comptime!(how.scores());
    let (all_scores, all_sums) = comptime!((how.panels * how.scores(), how.panels * how.sums()));
    let (own_rows, other_rows) = if comptime!(by_query) {
        (queries, keys)
    } else {
        (keys, queries)
    };
    // Late queries and early keys have most to do, so their cubes start first. Surplus cubes of the
    // grid repeat an earlier one.
    let (blocks, lines) = (
        (own_rows + comptime!(rows - 1)) / rows,
        *numbers.index(6usize),
    );
    let (elements, shared) = if comptime!(by_query) {
        (keys * size, group)
    } else {
        (queries * size * group, 1usize.runtime())
    };
    let number = CUBE_POS % (blocks * lines);
    let (block, line) = piece_of(number, blocks, lines, elements, shared);
    let row = if comptime!(by_query) {
        (blocks - 1usize - block) * rows
    } else {
        block * rows
    };
    let own_heads = if comptime!(by_query) {
        heads
    } else {
        heads / group
    };
    let (batch, own_head) = (line / own_heads, line % own_heads);
    // A key's gradient gathers from all query heads that share it.
    let (first_head, head_count) = if comptime!(by_query) {
        (own_head / group, 1usize.runtime())
    } else {
        (own_head * group, group)
    };
    // The own rows, and the tiles: of what scores are made, and of what their gradient is.
    let (own_a, own_b) = comptime!(if by_query {
        (how.q, how.grad)
    } else {
        (how.k, how.v)
    });
    let (tile_a, tile_b) = comptime!(if by_query {
        (how.k, how.v)
    } else {
        (how.q, how.grad)
    });
    let a_stride = stride(numbers, tile_a);
    let b_stride = stride(numbers, tile_b);
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((how.owns() * how.own() + 4 * how.tile() + 1024) / 4),
        1024usize,
    );
    let mut columns_stats = Shared::<[f32]>::new_slice(comptime!(4 * how.columns));
    let own = (shared_address(&memory) + 1023u32) & 0xffff_fc00u32;
    let tiles = own + comptime!((how.owns() * how.own()) as u32);

    let (group_row, thread_row) = place_of_thread();
    let unit = UNIT_POS as usize;
    let lane = unit % 32usize;
    let group_row = group_row * comptime!(how.panels);
    // The columns that the rows of this cube have to do with.
    let (begin, end) = if comptime!(!how.causal) {
        (0usize.runtime(), other_rows)
    } else if comptime!(by_query) {
        (
            0usize.runtime(),
            max(min(row + rows, queries) + keys, queries) - queries,
        )
    } else {
        (
            (max(row + queries, keys) - keys) / columns * columns,
            queries,
        )
    };
    let mut begin = begin;
    let mut end = end;
    if comptime!(how.documents.is_some()) {
        let (first, last) = columns_of_rows(buffers, numbers, batch, row, rows, how);
        begin = max(begin, first / columns * columns);
        end = min(end, last);
    }

    let own_first = head(buffers, numbers, batch, own_head, own_a, how);
    bring_rows(
        own_first,
        stride(numbers, own_a),
        row,
        own_rows,
        size,
        own,
        rows,
        how,
    );
    if comptime!(how.slopes) {
        let own_second = head(buffers, numbers, batch, own_head, own_b, how);
        let to = own + comptime!(how.own() as u32);
        bring_rows(
            own_second,
            stride(numbers, own_b),
            row,
            own_rows,
            size,
            to,
            rows,
            how,
        );
    }
    let per_head = (max(end, begin) - begin + comptime!(columns - 1)) / columns;
    let all = per_head * head_count;
    let mut panels = Sequence::<Panel>::new();
    #[unroll]
    for i in 0..comptime!(how.panels) {
        let line = (batch, own_head);
        let at = row + group_row + comptime!(64 * i);
        panels.push(panel(
            buffers, stats, numbers, second, line, at, thread_row, how,
        ));
    }
    let mut a_base = head(buffers, numbers, batch, first_head, tile_a, how);
    let mut b_base = head(buffers, numbers, batch, first_head, tile_b, how);
    let mut base = (batch * heads + first_head) * queries;
    if all > 0usize {
        bring_rows(
            a_base, a_stride, begin, other_rows, size, tiles, columns, how,
        );
        let to = tiles + tile;
        bring_rows(b_base, b_stride, begin, other_rows, size, to, columns, how);
        if comptime!(!by_query) {
            if unit < columns {
                let (lse, mean) = statistics(stats, base, begin + unit, queries);
                columns_stats[unit] = lse;
                columns_stats[columns + unit] = mean;
            }
        }
    }
    gpu_asm!("cp.async.commit_group;");
    let own_at = own + group_row as u32 * 128u32;
    let b_at = own_at + comptime!(how.own() as u32);
    let factor = scale * std::f32::consts::LOG2_E;
    let mine_first = lane % 4usize * 2usize;
    // Products under way beside the one that is waited for.
    let (slopes_pending, values_pending) = comptime!((how.slopes as usize, how.values as usize));
    let mut slopes = Vector::<f32, N>::new(0.0f32);
    let mut values = Vector::<f32, N>::new(0.0f32);
    let mut index = 0usize;
    let mut column = begin;
    let mut stage = 0u32;
    // The next tile: where it begins, of which head, and how many of that are left.
    let mut then = begin;
    let mut ahead = first_head;
    let mut left = per_head;
    let mut next_lse = 0.0f32;
    let mut next_mean = 0.0f32;
    while index < all {
        let at = tiles + stage * comptime!(2 * tile);
        let next = tiles + (1u32 - stage) * comptime!(2 * tile);
        let later = index + 1usize;
        gpu_asm!("cp.async.wait_group 0;");
        if comptime!(how.cores == Cores::Wgmma) {
            see_brought();
        }
        sync_cube();
        let scores = score::<S>(own_at, at, how);
        let rises = if comptime!(how.slopes) {
            score::<S>(b_at, at + tile, how)
        } else {
            Vector::<f32, S>::new(0.0f32)
        };
        then += columns;
        left -= 1usize;
        if later < all {
            if left == 0usize {
                then = begin;
                left = per_head;
                ahead += 1usize;
                a_base = head(buffers, numbers, batch, ahead, tile_a, how);
                b_base = head(buffers, numbers, batch, ahead, tile_b, how);
                base += queries;
            }
            bring_rows(a_base, a_stride, then, other_rows, size, next, columns, how);
            let to = next + tile;
            bring_rows(b_base, b_stride, then, other_rows, size, to, columns, how);
            if comptime!(!by_query) {
                if unit < columns {
                    let (lse, mean) = statistics(stats, base, then + unit, queries);
                    next_lse = lse;
                    next_mean = mean;
                }
            }
        }
        gpu_asm!("cp.async.commit_group;");
        let scores = settle::<S>(scores, all_scores, slopes_pending, how);
        let here = stage as usize * comptime!(2 * columns);
        let mut weights = Vector::<f32, S>::empty();
        #[unroll]
        for i in 0..comptime!(scores_count / 4) {
            let at = here + mine_first + comptime!(8 * i);
            #[unroll]
            for panel in 0..comptime!(how.panels) {
                let (lse, lse_next, lse8, lse8_next) = if comptime!(by_query) {
                    let lses = panels.index(panel).lses;
                    (lses.0, lses.0, lses.1, lses.1)
                } else {
                    let (a, b) = (columns_stats[at], columns_stats[at + 1usize]);
                    (a, b, a, b)
                };
                let e = comptime!(panel * scores_count + 4 * i);
                weights.insert(e, exp2(scores.extract(e) * factor - lse));
                let e = comptime!(panel * scores_count + 4 * i + 1);
                weights.insert(e, exp2(scores.extract(e) * factor - lse_next));
                let e = comptime!(panel * scores_count + 4 * i + 2);
                weights.insert(e, exp2(scores.extract(e) * factor - lse8));
                let e = comptime!(panel * scores_count + 4 * i + 3);
                weights.insert(e, exp2(scores.extract(e) * factor - lse8_next));
            }
        }
        #[unroll]
        for panel in 0..comptime!(how.panels) {
            let own = panels.index(panel);
            let look = if comptime!(by_query) {
                column + columns > own.whole
            } else {
                column < own.whole
            };
            if look {
                let first = column + mine_first;
                #[unroll]
                for i in 0..comptime!(scores_count / 2) {
                    let at = first + comptime!(i / 2 * 8);
                    let edge = if comptime!(i % 2 == 0) {
                        own.edges.0
                    } else {
                        own.edges.1
                    };
                    let low = comptime!(panel * scores_count + 2 * i);
                    let high = comptime!(panel * scores_count + 2 * i + 1);
                    let (seen, seen_next) = if comptime!(by_query) {
                        (at < edge, at + 1usize < edge)
                    } else {
                        (at >= edge, at + 1usize >= edge)
                    };
                    weights.insert(low, select(seen, weights.extract(low), 0.0f32));
                    weights.insert(high, select(seen_next, weights.extract(high), 0.0f32));
                }
            }
            if comptime!(how.documents.is_some()) {
                let ids = &own.documents;
                if column < ids.clear || column + columns > ids.clear_end {
                    let (first, none) = (column + mine_first, 0.0f32.runtime());
                    weights = of_documents::<S>(buffers, weights, panel, first, none, ids, how);
                }
            }
        }
        if comptime!(how.values) {
            let words = words::<S, W>(weights, how.panels, how);
            values = weigh::<N, W>(values, words, at + tile, how);
        }
        if comptime!(how.slopes) {
            let rises = settle::<S>(rises, all_scores, values_pending, how);
            #[unroll]
            for i in 0..comptime!(scores_count / 2) {
                let at = here + mine_first + comptime!(columns + i / 2 * 8);
                #[unroll]
                for panel in 0..comptime!(how.panels) {
                    let (mean, mean_next) = if comptime!(by_query) {
                        let means = panels.index(panel).means;
                        if comptime!(i % 2 == 0) {
                            (means.0, means.0)
                        } else {
                            (means.1, means.1)
                        }
                    } else {
                        (columns_stats[at], columns_stats[at + 1usize])
                    };
                    let low = comptime!(panel * scores_count + 2 * i);
                    let high = comptime!(panel * scores_count + 2 * i + 1);
                    weights.insert(low, weights.extract(low) * (rises.extract(low) - mean));
                    let change = weights.extract(high) * (rises.extract(high) - mean_next);
                    weights.insert(high, change);
                }
            }
            let words = words::<S, W>(weights, how.panels, how);
            slopes = weigh::<N, W>(slopes, words, at, how);
        }
        slopes = settle::<N>(slopes, all_sums, 0usize, how);
        values = settle::<N>(values, all_sums, 0usize, how);
        if comptime!(!by_query) {
            if unit < columns {
                let to = (1u32 - stage) as usize * comptime!(2 * columns) + unit;
                columns_stats[to] = next_lse;
                columns_stats[to + columns] = next_mean;
            }
        }
        index = later;
        column = then;
        stage = 1u32 - stage;
    }
    gpu_asm!("cp.async.wait_group 0;");
    #[unroll]
    for panel in 0..comptime!(how.panels) {
        let mine = panels.index(panel).mine;
        if comptime!(how.slopes) {
            let to = place(numbers, batch, own_head, 0usize);
            let by = (scale, scale);
            store::<N>(first, &slopes, panel, to, mine, own_rows, size, by, how);
        }
        if comptime!(how.values) {
            let to = place(numbers, batch, own_head, comptime!(how.slopes as usize));
            let by = (1.0f32.runtime(), 1.0f32.runtime());
            store::<N>(second, &values, panel, to, mine, own_rows, size, by, how);
        }
    }
}
