//! Attention and its gradients without the matrix of scores ever being in memory.
//!
//! A cube of 128 threads has some rows (queries, or keys for their gradients) and walks over the
//! other side in tiles of columns. A tile's scores are a product of panels in shared memory, each
//! thread holding 4 by 4 of them, or up to 8 by 8 where there is room for larger tiles; turned into
//! weights they go to shared memory, from where they weigh the rows of values that the result sums. Softmax runs along: a new maximum rescales
//! what was summed before. Gradients need no atomics: each cube owns its rows of the result and
//! computes the scores again, so results are the same bits every time.

mod backward;
mod call;
mod documents;
mod forward;
mod tensor;

pub(crate) use call::{fits, fits_backward};

use crate::{
    CubeBackend, math,
    tile::{Matrix, duty, fetch, put_row},
    words::{F4, U4},
};
use anymesh_kernel::{DType, map::Unary};
use call::{Bound, Sizes};
use cubecl::prelude::*;

/// Threads of a cube: 16 groups of four rows by 8 groups of four columns.
const THREADS: u32 = 128;
/// The widest head that is held in large tiles.
const LARGE: usize = 64;
/// Shared memory that large tiles want.
const LARGE_ROOM: usize = 100 << 10;
/// Less than any score, and finite: infinities must not be subtracted from each other.
const LOWEST: f32 = -3.0e38;
/// Where outputs are among the numbers: offset and strides of batches, heads and rows of each.
const OUTPUTS: usize = 32;
/// The widest head whose sums fit in registers.
const WIDEST: usize = 256;

/// One operand as a kernel sees it when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Operand {
    /// Position among the buffers.
    buffer: usize,
    dtype: DType,
    /// Where its offset and strides start among the numbers.
    first: usize,
}

/// What a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Goal {
    /// The forward pass; the other goals are the gradients.
    Result,
    Query,
    Key,
    Value,
}

/// What a cube works on at a time, and where it is in shared memory: a panel has the rows of a cube and
/// the columns of a tile, each along some steps of the size of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    /// Fours of rows of a thread.
    tall: usize,
    /// Fours of columns of a thread.
    wide: usize,
    /// Steps of a panel.
    depth: usize,
    /// Operands whose rows stay in the panel for all tiles; where there are none, rows come with the
    /// columns, step by step.
    held: usize,
}

impl Tile {
    /// The tile for a goal and heads of this size: large ones where there is room for them.
    fn new(goal: Goal, size: usize, room: usize) -> Self {
        if size > LARGE || room < LARGE_ROOM {
            return Self {
                tall: 1,
                wide: 1,
                depth: 16,
                held: 0,
            };
        }
        let (tall, held) = match goal {
            Goal::Result => (2, 1),
            Goal::Query | Goal::Key => (1, 2),
            Goal::Value => (1, 1),
        };
        Self {
            tall,
            wide: 2,
            depth: size.next_multiple_of(16),
            held,
        }
    }

    /// Rows of a cube.
    fn rows(self) -> usize {
        64 * self.tall
    }

    /// Columns of a tile.
    fn columns(self) -> usize {
        32 * self.wide
    }

    /// Vectors from one step or column to the next, in panels and weights of rows; the odd ones keep
    /// threads off the same banks.
    fn row_pitch(self) -> usize {
        self.rows() / 4 + 1
    }

    fn column_pitch(self) -> usize {
        self.columns() / 4 + 1
    }

    /// Vectors of an operand's rows.
    fn own(self) -> usize {
        self.depth * self.row_pitch()
    }

    /// Where the rows of an operand are in the panel.
    fn own_at(self, operand: usize) -> usize {
        operand * self.own()
    }

    /// Where the columns are.
    fn columns_at(self) -> usize {
        self.held.max(1) * self.own()
    }

    /// Where values and maxima are: they take turns with what is not held.
    fn free_at(self) -> usize {
        self.held * self.own()
    }

    /// Vectors of the panel.
    fn panel(self) -> usize {
        self.columns_at() + self.depth * self.column_pitch()
    }

    /// Vectors of the weights.
    fn weights(self) -> usize {
        self.columns() * self.row_pitch()
    }

    /// Vectors of scores of a thread.
    fn scores(self) -> usize {
        4 * self.tall * self.wide
    }
}

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    goal: Goal,
    tile: Tile,
    /// Whether the gradients for values come with those for keys, and whether in a buffer of their own.
    both: bool,
    apart: bool,
    causal: bool,
    /// Where the documents are among the buffers.
    documents: Option<usize>,
    /// Whether the device's own `exp` is accurate.
    native: bool,
    q: Operand,
    k: Operand,
    v: Operand,
    grad: Operand,
    /// The result, where it is read.
    out: Operand,
    /// Groups of 32 features in a row of the result.
    groups: usize,
    /// What is stored: f32, or any dtype where rows are whole.
    stored: DType,
    /// Whether rows of the result are multiples of four.
    whole: bool,
}

impl How {
    /// Columns whose values fit in the panel at once.
    fn batch(&self) -> usize {
        let most = (self.tile.panel() - self.tile.free_at()) / (8 * self.groups);
        let most = 1 << most.ilog2();
        most.min(self.tile.columns())
    }

    /// Vectors of a thread's sums.
    fn sums(&self) -> usize {
        4 * self.tile.tall * self.groups
    }
}

/// One head of an operand: rows are positions, depth is the size of the head. The numbers start
/// with query heads, query heads for each key head, queries, keys, size of keys and size of values.
#[cube]
fn head(
    numbers: &Sequence<usize>,
    batch: usize,
    head: usize,
    #[comptime] first: usize,
    #[comptime] queries: bool,
    #[comptime] values: bool,
) -> Matrix {
    let rows = if comptime!(queries) {
        *numbers.index(2usize)
    } else {
        *numbers.index(3usize)
    };
    let depth = if comptime!(values) {
        *numbers.index(5usize)
    } else {
        *numbers.index(4usize)
    };
    Matrix {
        start: *numbers.index(first)
            + batch * *numbers.index(comptime!(first + 1))
            + head * *numbers.index(comptime!(first + 2)),
        rows,
        row_stride: *numbers.index(comptime!(first + 3)),
        depth,
        depth_stride: *numbers.index(comptime!(first + 4)),
    }
}

/// Brings some steps of rows from `row` on to the panel.
#[cube]
fn bring(
    words: &[u32],
    matrix: &Matrix,
    row: usize,
    step: usize,
    panel: &mut [F4],
    #[comptime] at: usize,
    #[comptime] rows: usize,
    #[comptime] dtype: DType,
    #[comptime] tile: Tile,
) {
    let (fours, depth) = comptime!((rows / 4, tile.depth));
    let all = comptime!(fours * depth);
    #[unroll]
    for part in 0..comptime!(all.div_ceil(THREADS as usize)) {
        let number = UNIT_POS as usize + comptime!(part * THREADS as usize);
        if comptime!((part + 1) * THREADS as usize <= all) || number < all {
            let (s, four) = duty(number, fours, depth, true);
            panel[at + s * comptime!(fours + 1) + four] =
                fetch::<u32, f32>(words, matrix, row + four * 4usize, step + s, dtype);
        }
    }
}

/// The thread's products of the cube's rows of `a` and a tile's of `b`: for each four of its rows and
/// each of its columns a vector of rows. Where rows are held, `operand` says which.
#[cube]
fn products(
    a_words: &[u32],
    a: &Matrix,
    row: usize,
    b_words: &[u32],
    b: &Matrix,
    column: usize,
    panel: &mut [F4],
    #[comptime] dtypes: (DType, DType),
    #[comptime] operand: usize,
    #[comptime] tile: Tile,
) -> Array<F4> {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 8usize, unit / 8usize);
    let (tall, wide) = comptime!((tile.tall, tile.wide));
    let (row_pitch, column_pitch) = comptime!((tile.row_pitch(), tile.column_pitch()));
    let rows_at = comptime!(if tile.held > 0 {
        tile.own_at(operand)
    } else {
        0
    });
    let columns_at = comptime!(tile.columns_at());
    let mut sums = zeros(comptime!(tile.scores()));
    let mut step = 0usize;
    while step < a.depth {
        if comptime!(tile.held == 0) {
            let rows = comptime!(tile.rows());
            bring(a_words, a, row, step, panel, 0usize, rows, dtypes.0, tile);
        }
        let columns = comptime!(tile.columns());
        bring(
            b_words, b, column, step, panel, columns_at, columns, dtypes.1, tile,
        );
        sync_cube();
        for four in 0..comptime!(tile.depth / 4) {
            #[unroll]
            for s in 0..4usize {
                let s = four * 4usize + s;
                #[unroll]
                for j in 0..wide {
                    let columns = panel[columns_at + s * column_pitch + x + comptime!(8 * j)];
                    #[unroll]
                    for i in 0..tall {
                        let rows = panel[rows_at + s * row_pitch + y + comptime!(16 * i)];
                        #[unroll]
                        for c in 0..4usize {
                            sums[comptime!((i * wide + j) * 4 + c)] +=
                                rows * F4::new(columns.extract(c));
                        }
                    }
                }
            }
        }
        sync_cube();
        step += comptime!(tile.depth);
    }
    sums
}

/// The column of a tile whose weights are at this place: columns of a thread lie apart, so that threads
/// are off the same banks when they write them.
#[cube]
fn column_at(place: usize) -> usize {
    place / 32usize * 32usize + place % 8usize * 4usize + place % 32usize / 8usize
}

/// Adds the rows of `b` from `column` on, weighted, to the thread's part of the result: its rows of
/// `groups` vectors of features.
#[cube]
fn weigh(
    weights: &[F4],
    b_words: &[u32],
    b: &Matrix,
    column: usize,
    panel: &mut [F4],
    sums: &mut Array<F4>,
    #[comptime] dtype: DType,
    #[comptime] how: How,
) {
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 8usize, unit / 8usize);
    let (width, batch, groups) = comptime!((8 * how.groups, how.batch(), how.groups));
    let (columns, tall, pitch, at) = comptime!((
        how.tile.columns(),
        how.tile.tall,
        how.tile.row_pitch(),
        how.tile.free_at()
    ));
    let together = comptime!(batch.min(4));
    let features = Matrix {
        start: b.start,
        rows: b.depth,
        row_stride: b.depth_stride,
        depth: b.rows,
        depth_stride: b.row_stride,
    };
    let mut first = 0usize;
    while first < columns {
        #[unroll]
        for part in 0..comptime!((width * batch).div_ceil(THREADS as usize)) {
            let number = unit + comptime!(part * THREADS as usize);
            if comptime!((part + 1) * THREADS as usize <= width * batch) || number < width * batch {
                panel[at + number] = fetch::<u32, f32>(
                    b_words,
                    &features,
                    number % width * 4usize,
                    column + column_at(first + number / width),
                    dtype,
                );
            }
        }
        sync_cube();
        for some in 0..comptime!(batch / together) {
            #[unroll]
            for c in 0..together {
                let c = some * together + c;
                #[unroll]
                for i in 0..tall {
                    let weight = weights[(first + c) * pitch + y + comptime!(16 * i)];
                    #[unroll]
                    for g in 0..groups {
                        let value = panel[at + c * width + x + comptime!(8 * g)];
                        #[unroll]
                        for r in 0..4usize {
                            sums[comptime!((i * 4 + r) * groups + g)] +=
                                F4::new(weight.extract(r)) * value;
                        }
                    }
                }
            }
        }
        sync_cube();
        first += batch;
    }
}

/// Puts the thread's weights where all threads can read them.
#[cube]
fn share(weights: &mut [F4], values: &Array<F4>, #[comptime] tile: Tile) {
    let unit = UNIT_POS as usize;
    let (tall, wide, pitch) = comptime!((tile.tall, tile.wide, tile.row_pitch()));
    #[unroll]
    for i in 0..tall {
        #[unroll]
        for j in 0..wide {
            #[unroll]
            for c in 0..4usize {
                let place = comptime!(32 * j + 8 * c) + unit % 8usize;
                weights[place * pitch + unit / 8usize + comptime!(16 * i)] =
                    values[comptime!((i * wide + j) * 4 + c)];
            }
        }
    }
}

#[cube]
fn exp(x: F4, #[comptime] native: bool) -> F4 {
    if comptime!(native) {
        math::unary_native(x, Unary::Exp)
    } else {
        math::unary(x, Unary::Exp)
    }
}

#[cube]
fn zeros(#[comptime] n: usize) -> Array<F4> {
    let mut out = Array::<F4>::new(n);
    #[unroll]
    for i in 0..n {
        out[i] = F4::new(0.0f32);
    }
    out
}

/// Four numbers from `first` on.
#[cube]
fn count(first: usize) -> U4 {
    let mut out = U4::empty();
    #[unroll]
    for l in 0..4usize {
        out.insert(l, (first + l) as u32);
    }
    out
}

/// How many keys each query sees: those before it. One number for each query, so that whether it
/// sees a key is one comparison: several conditions joined by `&&` are branches in WGSL, four for
/// each joint, and a loop with many of them takes some shader compilers minutes and gigabytes.
#[cube]
fn sight(query: U4, queries: usize, keys: usize, #[comptime] causal: bool) -> U4 {
    let queries = U4::new(queries as u32);
    let zero = U4::new(0u32);
    let end = if comptime!(causal) {
        let end = query + U4::new(keys as u32 + 1u32);
        select_many(end.less_than(&queries), zero, end - queries)
    } else {
        U4::new(keys as u32)
    };
    select_many(query.less_than(&queries), end, zero)
}

/// Keys that the queries before `end` see, all together.
#[cube]
fn seen(end: usize, queries: usize, keys: usize, #[comptime] causal: bool) -> usize {
    if comptime!(causal) {
        max(min(end, queries) + keys, queries) - queries
    } else {
        keys
    }
}

/// Documents of four rows from `first` on, which begin `at` their place and of which there are `len`.
#[cube]
fn documents_of(documents: &[u32], at: usize, first: usize, len: usize) -> U4 {
    let mut out = U4::empty();
    #[unroll]
    for l in 0..4usize {
        out.insert(l, documents[at + min(first + l, len - 1usize)]);
    }
    out
}

/// Where a head of the output of this number begins, and from a row of it to the next.
#[cube]
fn place(
    numbers: &Sequence<usize>,
    batch: usize,
    head: usize,
    #[comptime] output: usize,
) -> (usize, usize) {
    let first = comptime!(OUTPUTS + 4 * output);
    (
        *numbers.index(first)
            + batch * *numbers.index(comptime!(first + 1))
            + head * *numbers.index(comptime!(first + 2)),
        *numbers.index(comptime!(first + 3)),
    )
}

/// Stores the thread's part of the result at the rows from `row` on of a head that lies `at` its
/// place.
#[cube]
fn store(
    out: &mut [u32],
    sums: &Array<F4>,
    at: (usize, usize),
    row: usize,
    rows: usize,
    features: usize,
    #[comptime] how: How,
) {
    let unit = UNIT_POS as usize;
    let (base, stride) = at;
    #[unroll]
    for r in 0..comptime!(4 * how.tile.tall) {
        let at = row + unit / 8usize * 4usize + comptime!(r / 4 * 64 + r % 4);
        if at < rows {
            #[unroll]
            for g in 0..how.groups {
                let feature = (unit % 8usize) * 4usize + comptime!(32 * g);
                let room = max(features, feature) - feature;
                put_row::<u32, f32>(
                    out,
                    base + at * stride + feature,
                    room,
                    sums[comptime!(r * how.groups + g)],
                    how.stored,
                    how.whole,
                );
            }
        }
    }
}

impl CubeBackend {
    /// Whether the device's own functions are accurate, and how much memory a cube can share.
    fn able(&self) -> (bool, usize) {
        let room = self.client.properties().hardware.max_shared_memory_size;
        (self.native, room)
    }
}
