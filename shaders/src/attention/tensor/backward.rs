//! The gradients for queries, keys and values.
//!
//! With weights `P`, the gradient `G` of the result and `D = sum(G * result)` of each query, the
//! gradient of the scores is `P * (G V' - D)`. Rows are queries, or keys: then everything is turned,
//! so that keys' rows are the left operands.

mod joint;
mod rows;

use super::{
    How, STAGES, barrier, bring_rows, columns_of_rows, head, piece_of, share, stride, turn,
};
use crate::{
    attention::Goal,
    hopper::{
        address, address_mut, arrive_brought, bring_word, make_barrier, resize_registers,
        shared_address, wait_for,
    },
};
use cubecl::prelude::*;
use rows::compute;

/// Barriers, by what ends their turns: own rows are there, or no longer needed; and so on for the
/// tile of each stage.
const OWN_THERE: u32 = 0;
const OWN_READ: u32 = 1;
const TILE_THERE: u32 = 2;
const TILE_READ: u32 = TILE_THERE + STAGES;
const BARRIERS: u32 = TILE_READ + STAGES;

/// Where things are in shared memory: own rows of both operands, tiles of both in each stage, two
/// numbers of each column in each stage, and barriers.
#[derive(CubeType, Clone, Copy)]
struct Room {
    own: u32,
    tiles: u32,
    stats: u32,
    barriers: u32,
}

#[cube]
fn room(memory: &[u32], #[comptime] how: How) -> Room {
    let (owns, tiles) = comptime!((
        (how.owns() * how.own()) as u32,
        2 * STAGES * how.tile() as u32
    ));
    let stats = comptime!(STAGES * 8 * how.columns as u32);
    let own = (shared_address(memory) + 1023u32) & 0xffff_fc00u32;
    Room {
        own,
        tiles: own + owns,
        stats: own + comptime!(owns + tiles),
        barriers: own + comptime!(owns + tiles + stats),
    }
}

/// A piece of work: the first own row, the batch, the own head, the first head of tiles and how many
/// there are, the first column and how many tiles each head has.
#[derive(CubeType, Clone, Copy)]
struct Piece {
    row: usize,
    batch: usize,
    head: usize,
    first_head: usize,
    heads: usize,
    begin: usize,
    tiles: usize,
}

/// Own rows, and how many pieces there are.
#[cube]
fn pieces(numbers: &Sequence<usize>, #[comptime] how: How) -> (usize, usize) {
    let rows = comptime!(how.rows());
    let own_rows = if comptime!(how.goal == Goal::Query) {
        *numbers.index(2usize)
    } else {
        *numbers.index(3usize)
    };
    let blocks = (own_rows + comptime!(rows - 1)) / rows;
    (own_rows, blocks * *numbers.index(6usize))
}

/// A piece of this number. Late queries and early keys have most to do, so they come first.
#[cube]
fn piece(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    number: usize,
    #[comptime] how: How,
) -> Piece {
    let by_query = comptime!(how.goal == Goal::Query);
    let (heads, group, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, columns) = comptime!((how.rows(), how.columns));
    let (own_rows, _) = pieces(numbers, how);
    let (blocks, lines) = (
        (own_rows + comptime!(rows - 1)) / rows,
        *numbers.index(6usize),
    );
    let (elements, shared) = if comptime!(by_query) {
        (keys * size, group)
    } else {
        (queries * size * group, 1usize.runtime())
    };
    let (block, line) = piece_of(number, blocks, lines, elements, shared);
    let (row, own_heads) = if comptime!(by_query) {
        ((blocks - 1usize - block) * rows, heads)
    } else {
        (block * rows, heads / group)
    };
    let (batch, own_head) = (line / own_heads, line % own_heads);
    // A key's gradient gathers from all query heads that share it.
    let (first_head, head_count) = if comptime!(by_query) {
        (own_head / group, 1usize.runtime())
    } else {
        (own_head * group, group)
    };
    // The columns that the rows have to do with.
    let (begin, end) = if comptime!(!how.causal && by_query) {
        (0usize.runtime(), keys)
    } else if comptime!(!how.causal) {
        (0usize.runtime(), queries)
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
        let rows = comptime!(64 * how.groups);
        let (first, last) = columns_of_rows(buffers, numbers, batch, row, rows, how);
        begin = max(begin, first / columns * columns);
        end = min(end, last);
    }
    Piece {
        row,
        batch,
        head: own_head,
        first_head,
        heads: head_count,
        begin,
        tiles: (max(end, begin) - begin + comptime!(columns - 1)) / columns,
    }
}

/// Brings the tiles of all pieces of this cube, as far ahead as there is room.
#[cube]
fn supply(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    room: &Room,
    #[comptime] how: How,
) {
    let by_query = comptime!(how.goal == Goal::Query);
    let (heads, queries, keys, size) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(4usize),
    );
    let (rows, columns, bytes) = comptime!((how.rows(), how.columns, how.tile() as u32));
    // The own rows, and the tiles: of what scores are made, and of what their gradient is.
    let (own_a, own_b, tile_a, tile_b) = comptime!(if by_query {
        (how.q, how.grad, how.k, how.v)
    } else {
        (how.k, how.v, how.q, how.grad)
    });
    let (own_rows, all) = pieces(numbers, how);
    let other_rows = if comptime!(by_query) { keys } else { queries };
    let (a_stride, b_stride) = (stride(numbers, tile_a), stride(numbers, tile_b));
    let unit = UNIT_POS as usize - comptime!(128 * how.groups);
    let mut number = CUBE_POS;
    let mut done = 0u32;
    let mut tile = 0u32;
    while number < all {
        let piece = piece(buffers, numbers, number, how);
        if piece.tiles > 0usize {
            wait_for(barrier(room.barriers, 0u32, OWN_READ), (done % 2u32) ^ 1u32);
            let from = head(buffers, numbers, piece.batch, piece.head, own_a, how);
            let step = stride(numbers, own_a);
            bring_rows(from, step, piece.row, own_rows, size, room.own, rows, how);
            if comptime!(how.slopes) {
                let from = head(buffers, numbers, piece.batch, piece.head, own_b, how);
                let step = stride(numbers, own_b);
                let to = room.own + comptime!(how.own() as u32);
                bring_rows(from, step, piece.row, own_rows, size, to, rows, how);
            }
            arrive_brought(barrier(room.barriers, 0u32, OWN_THERE));
            done += 1u32;
            let mut this_head = 0usize;
            while this_head < piece.heads {
                let tile_head = piece.first_head + this_head;
                let a_base = head(buffers, numbers, piece.batch, tile_head, tile_a, how);
                let b_base = head(buffers, numbers, piece.batch, tile_head, tile_b, how);
                let line = (piece.batch * heads + tile_head) * queries;
                let mut index = 0usize;
                while index < piece.tiles {
                    let first = piece.begin + index * columns;
                    let stage = tile % STAGES;
                    let to = room.tiles + stage * comptime!(2 * bytes);
                    wait_for(barrier(room.barriers, tile, TILE_READ), turn(tile) ^ 1u32);
                    bring_rows(a_base, a_stride, first, other_rows, size, to, columns, how);
                    let to = to + bytes;
                    bring_rows(b_base, b_stride, first, other_rows, size, to, columns, how);
                    if comptime!(!by_query) {
                        // Log-sum-exps of queries, and `D` where it is needed.
                        #[unroll]
                        for which in 0..comptime!(1 + how.slopes as usize) {
                            #[unroll]
                            for i in 0..comptime!(columns.div_ceil(how.suppliers)) {
                                let column = unit + comptime!(i * how.suppliers);
                                if column < columns {
                                    let query = first + column;
                                    let inside = query < queries;
                                    let at = line + select(inside, query, 0usize);
                                    let to = room.stats
                                        + stage * comptime!(8 * columns as u32)
                                        + comptime!((4 * columns * which) as u32)
                                        + column as u32 * 4u32;
                                    bring_word(
                                        to,
                                        address(stats.index(which)) + u64::cast_from(at) * 4u64,
                                        select(inside, 4u32, 0u32),
                                    );
                                }
                            }
                        }
                    }
                    arrive_brought(barrier(room.barriers, tile, TILE_THERE));
                    tile += 1u32;
                    index += 1usize;
                }
                this_head += 1usize;
            }
        }
        number += CUBE_COUNT;
    }
    gpu_asm!("cp.async.wait_all;");
}

#[cube]
fn run<N: Size, S: Size, W: Size>(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    outputs: (u64, u64),
    numbers: &Sequence<usize>,
    scale: f32,
    #[comptime] how: How,
) {
    let tiles = comptime!(2 * STAGES as usize * how.tile());
    let rest = comptime!(STAGES as usize * 8 * how.columns + 8 * BARRIERS as usize + 1024);
    let memory = Shared::<[u32]>::new_aligned_slice(
        comptime!((how.owns() * how.own() + tiles + rest) / 4),
        1024usize,
    );
    let room = room(&memory, how);
    let (suppliers, warps) = comptime!((how.suppliers, 4 * how.groups));
    if UNIT_POS == 0u32 {
        make_barrier(barrier(room.barriers, 0u32, OWN_THERE), suppliers);
        make_barrier(barrier(room.barriers, 0u32, OWN_READ), warps);
        #[unroll]
        for stage in 0..STAGES {
            make_barrier(barrier(room.barriers, stage, TILE_THERE), suppliers);
            make_barrier(barrier(room.barriers, stage, TILE_READ), warps);
        }
    }
    sync_cube();
    let (few, many) = comptime!(how.registers);
    if UNIT_POS >= comptime!(128 * how.groups as u32) {
        if comptime!(few > 0) {
            resize_registers(few, false);
        }
        supply(buffers, stats, numbers, &room, how);
    } else {
        if comptime!(few > 0) {
            resize_registers(many, true);
        }
        compute::<N, S, W>(buffers, stats, outputs, numbers, &room, scale, how);
    }
}

/// One gradient, or those for keys and values together: as many as there are outputs.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::attention) fn gradient(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    out: &mut [u32],
    other: &mut Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    scale: f32,
    #[comptime] how: How,
) {
    // They are written to by their addresses; this keeps them outputs.
    if *numbers.index(2usize) == 0usize {
        out[0] = 0u32;
    }
    let first = address_mut(out);
    let mut second = first;
    // For queries it is `D` of all of them, for keys the gradients for values.
    if comptime!(how.outputs() == 2 || how.goal == Goal::Query) {
        let other = other.index_mut(0usize);
        if *numbers.index(2usize) == 0usize {
            other[0] = 0u32;
        }
        second = address_mut(other);
    }
    let outputs = (first, second);
    share(how);
    let size!(N) = comptime!(how.panels * how.sums());
    let size!(S) = comptime!(how.panels * how.scores());
    let size!(W) = comptime!(how.panels * how.words());
    if comptime!(how.suppliers == 0) {
        joint::run::<N, S, W>(buffers, stats, outputs, numbers, scale, how);
    } else {
        run::<N, S, W>(buffers, stats, outputs, numbers, scale, how);
    }
}
