//! Attention on the tensor cores of NVIDIA's GPUs.
//!
//! A warp group has 64 rows: queries, or keys for their gradients; all rows of a cube are of one head.
//! Where its warps multiply, it may have two panels of 64 queries: what was read of a tile is then used
//! for both. The other side comes in tiles. Where Hopper's cores multiply on their own, threads that do
//! nothing else bring tiles, as far ahead as there is room, and barriers in shared memory say what is
//! there and what is no longer needed. So warp groups go at their own pace, and while one makes
//! weights, the tensor cores have work of another; for the result also of the same one. Where warps
//! multiply (`mma.rs`), or cubes are small, all threads bring the next tile while they use this one
//! (`joint.rs`).
//!
//! Scores stay in registers: the threads that hold a row are four neighbours. What they become, rounded
//! to the operands' dtype as it would be for a product in memory, is the left operand of the next
//! product where it is. Gradients for queries and for keys are launches of their own, which compute the
//! scores again: every number is summed by one cube in a fixed order, so bits are always the same.

pub(super) mod backward;
mod documents;
pub(super) mod forward;
mod mma;
mod wgmma;

use super::{Goal, Operand, Sizes};
use crate::{
    Cores,
    hopper::{address, bring, pack, put4, trade},
};
use anymesh_kernel::{DType, View, backend::AttentionCall};
use cubecl::prelude::*;
use documents::{Own, columns_of_rows, of_documents, own_documents, span_of};

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct How {
    goal: Goal,
    cores: Cores,
    dtype: DType,
    causal: bool,
    /// Where the documents are among the buffers.
    documents: Option<usize>,
    /// Size of a head, in blocks of 128 bytes.
    blocks: usize,
    /// Steps of 16 features that there are.
    steps: usize,
    /// Panels of 64 rows that a warp group has.
    panels: usize,
    /// Warp groups that compute.
    groups: usize,
    /// Threads beside them that bring tiles; where there are none, all do.
    suppliers: usize,
    /// Registers of a supplier and of a thread that computes; none where the compiler decides.
    registers: (u32, u32),
    /// Columns of a tile.
    columns: usize,
    /// Cubes that are to share a multiprocessor, so many that they hide each other's waits.
    cubes: usize,
    /// Whether keys get their gradients and values theirs.
    slopes: bool,
    values: bool,
    /// Whether gradients are in one buffer.
    packed: bool,
    q: Place,
    k: Place,
    v: Place,
    grad: Place,
    /// The result, where it is read.
    out: Place,
}

/// Where an operand is among the buffers, and its offset and strides among the numbers.
type Place = (usize, usize);

/// Panels of rows of a warp group, warp groups that compute, columns of a tile, and cubes that are to
/// share a multiprocessor.
type Form = (usize, usize, usize, usize);

impl How {
    /// A launch for `goal`: how many warp groups there are, how wide tiles are and how many cubes
    /// share a multiprocessor is what fits in registers and in shared memory. None where nothing does.
    fn new(goal: Goal, call: &AttentionCall, cores: Cores, room: usize) -> Option<Self> {
        let (size, dtype) = (Sizes::new(call).size, call.q.dtype);
        // Only 16-bit operands can be turned on their way to Hopper's.
        let cores = if dtype == DType::F32 {
            Cores::Mma
        } else {
            cores
        };
        // What a thread holds of a row is a power of two.
        let blocks = (size * dtype.size()).div_ceil(128).next_power_of_two();
        let with = |(panels, groups, columns, cubes): Form| {
            let small = goal != Goal::Result && blocks == 1;
            let supplied = cores == Cores::Wgmma && !small;
            // All that a multiprocessor has; where there is one warp group, the compiler's are enough.
            let registers = match groups {
                _ if !supplied => (0, 0),
                1 => (0, 0),
                2 => (40, 232),
                _ => (32, 160),
            };
            Self {
                goal,
                cores,
                dtype,
                causal: call.causal,
                documents: None,
                blocks,
                steps: size.div_ceil(16),
                panels,
                groups,
                suppliers: if supplied { 128 } else { 0 },
                registers,
                columns,
                cubes,
                slopes: goal != Goal::Value,
                values: goal == Goal::Value || (goal == Goal::Key && size <= 128),
                packed: false,
                q: (0, 0),
                k: (0, 0),
                v: (0, 0),
                grad: (0, 0),
                out: (0, 0),
            }
        };
        let mut forms = Self::forms(goal, cores, dtype, blocks)
            .iter()
            .map(|form| with(*form));
        // Two panels take the registers of two cubes: one alone would leave the cores idle.
        forms.find(|how| {
            let cubes = if how.panels > 1 { how.cubes } else { 1 };
            cubes * how.shared() <= room
        })
    }

    /// Measured; the next one where a multiprocessor has no room for the first.
    ///
    /// For Hopper's cores, of the result, and where sums fill the registers, the tallest tiles, with
    /// threads that bring them; of the gradients of small heads short ones, whose cubes hide each
    /// other's waits. Where warps multiply, two panels, if there are registers for their sums: then half as
    /// much is read from shared memory. Of keys and values there are sums of both instead: a launch for
    /// each, of two panels, was slower.
    fn forms(goal: Goal, cores: Cores, dtype: DType, blocks: usize) -> &'static [Form] {
        match (cores, goal, blocks) {
            (Cores::Wgmma, Goal::Result, 1) => &[(1, 3, 128, 1)],
            (Cores::Wgmma, Goal::Query, 1) => &[(1, 1, 64, 4)],
            (Cores::Wgmma, Goal::Key, 1) => &[(1, 1, 64, 3)],
            (Cores::Wgmma, Goal::Result | Goal::Query, 2) => &[(1, 2, 128, 1)],
            (Cores::Wgmma, Goal::Result, _) | (Cores::Wgmma, _, 1 | 2) => &[(1, 2, 64, 1)],
            (Cores::Wgmma, ..) => &[(1, 1, 64, 1)],
            (Cores::Mma, Goal::Result, 1) => &[(1, 1, 64, 4)],
            (Cores::Mma, Goal::Result, 2) if dtype == DType::F32 => &[(1, 2, 64, 2), (1, 1, 64, 1)],
            (Cores::Mma, Goal::Result, 2) => {
                &[(2, 1, 64, 2), (1, 2, 128, 1), (1, 2, 64, 1), (1, 1, 64, 1)]
            }
            (Cores::Mma, Goal::Result, _) => &[(1, 2, 64, 1), (1, 1, 64, 1), (1, 1, 32, 1)],
            (Cores::Mma, _, 1) => &[(1, 1, 64, 3)],
            (Cores::Mma, Goal::Query, 2) if dtype != DType::F32 => &[(2, 1, 32, 2), (1, 1, 64, 2)],
            (Cores::Mma, _, 2) => &[(1, 1, 64, 2)],
            (Cores::Mma, ..) => &[(1, 1, 64, 1), (1, 1, 32, 1)],
        }
    }

    /// This launch with its operands in their places.
    pub(super) fn placed(mut self, how: &super::How, packed: bool) -> Self {
        let place = |operand: &Operand| (operand.buffer, operand.first);
        self.documents = how.documents;
        self.packed = packed;
        self.q = place(&how.q);
        self.k = place(&how.k);
        self.v = place(&how.v);
        self.grad = place(&how.grad);
        self.out = place(&how.out);
        self
    }

    /// What the launch computes.
    pub(super) fn goal(self) -> Goal {
        self.goal
    }

    /// Whether one launch gives the gradients for keys and for values.
    pub(super) fn gives_both(self) -> bool {
        self.slopes && self.values
    }

    /// Buffers of a launch's outputs.
    pub(super) fn outputs(self) -> usize {
        if self.gives_both() && !self.packed {
            2
        } else {
            1
        }
    }

    /// Whether rows are queries.
    fn by_query(self) -> bool {
        matches!(self.goal, Goal::Result | Goal::Query)
    }

    /// Rows of a cube.
    pub(super) fn rows(self) -> usize {
        64 * self.panels * self.groups
    }

    /// Threads of a cube.
    pub(super) fn threads(self) -> usize {
        128 * self.groups + self.suppliers
    }

    /// Cubes that a launch needs for so many pieces of work, on so many multiprocessors. For the result
    /// each takes one piece after the other, and what the next one needs comes while one ends. Pieces
    /// of gradients differ more and take longer, and threads that bring what they use would wait: they go
    /// to whichever multiprocessor is free.
    pub(super) fn launched(self, pieces: usize, processors: usize) -> usize {
        if self.goal == Goal::Result && self.suppliers > 0 {
            pieces.min(processors * self.cubes)
        } else {
            pieces
        }
    }

    /// Threads that bring tiles.
    fn bringing(self) -> usize {
        if self.suppliers == 0 {
            self.threads()
        } else {
            self.suppliers
        }
    }

    /// Operands whose own rows are in shared memory.
    fn owns(self) -> usize {
        1 + (self.goal != Goal::Result && self.slopes) as usize
    }

    /// Bytes of an operand's own rows in shared memory.
    fn own(self) -> usize {
        self.rows() * self.blocks * 128
    }

    /// Bytes of a tile of one operand.
    fn tile(self) -> usize {
        self.columns * self.blocks * 128
    }

    /// Bytes of all that a cube has in shared memory, and 1 KiB to begin at a multiple of it.
    fn shared(self) -> usize {
        let tiles = 2 * STAGES as usize * self.tile();
        // Two numbers of each column in each stage, for gradients, and barriers.
        let rest = STAGES as usize * 8 * self.columns + 128;
        self.owns() * self.own() + tiles + rest + 1024
    }

    /// Elements of a chunk of 16 bytes.
    fn chunk(self) -> usize {
        16 / self.dtype.size()
    }

    /// Scores of a thread for a panel.
    fn scores(self) -> usize {
        self.columns / 2
    }

    /// Words that weights of so many columns are.
    fn words(self) -> usize {
        self.scores() * self.dtype.size() / 4
    }

    /// Sums of a thread for a panel: two rows, eight apart, and a fourth of the features.
    fn sums(self) -> usize {
        self.blocks * 4 * self.chunk()
    }
}

/// How the goals of a call are computed on these cores, by a device with so much shared memory for a
/// cube; none where they are not: heads must have one size, and lie in chunks of 16 bytes.
pub(super) fn how<const GOALS: usize>(
    call: &AttentionCall,
    goals: [Goal; GOALS],
    cores: Option<Cores>,
    room: usize,
) -> Option<[How; GOALS]> {
    let (sizes, dtype) = (Sizes::new(call), call.q.dtype);
    let widest = match dtype {
        DType::BF16 | DType::F16 => 256,
        DType::F32 => 128,
        _ => return None,
    };
    let operands = [&call.q, &call.k, &call.v];
    // Maxima are found before scores are scaled.
    let scale = call.scale > 0.0 && call.scale.is_finite();
    let fits = scale
        && operands.iter().all(|view| view.dtype == dtype)
        && (16..=widest).contains(&sizes.size)
        && sizes.size.is_multiple_of(16 / dtype.size())
        && sizes.value_size == sizes.size
        && operands.into_iter().all(in_chunks);
    let cores = cores.filter(|_| fits)?;
    let mut all = goals
        .into_iter()
        .filter_map(|goal| How::new(goal, call, cores, room));
    let mut made = [all.next()?; GOALS];
    for how in &mut made[1..] {
        *how = all.next()?;
    }
    Some(made)
}

/// Whether rows of heads are made of chunks of 16 bytes.
pub(super) fn in_chunks(view: &View) -> bool {
    let layout = &view.layout;
    let (outer, chunk) = (&layout.strides[..3], 16 / view.dtype.size());
    layout.strides[3] == 1
        && layout.offset.is_multiple_of(chunk)
        && outer.iter().all(|s| *s >= 0 && *s as usize % chunk == 0)
}

/// Begins the products of a warp group's rows, of which the first is at `own`, with a tile's. Nothing
/// may touch them before [`settle`].
#[cube]
fn score<S: Size>(own: u32, tile: u32, #[comptime] how: How) -> Vector<f32, S> {
    if comptime!(how.cores == Cores::Wgmma) {
        wgmma::score::<S>(own, tile, how)
    } else {
        mma::score::<S>(own, tile, how)
    }
}

/// Begins to add a tile's rows, weighted, to the sums. Nothing may touch these before [`settle`].
#[cube]
fn weigh<N: Size, W: Size>(
    sums: Vector<f32, N>,
    weights: Vector<u32, W>,
    tile: u32,
    #[comptime] how: How,
) -> Vector<f32, N> {
    if comptime!(how.cores == Cores::Wgmma) {
        wgmma::weigh::<N, W>(sums, weights, tile, how)
    } else {
        mma::weigh::<N, W>(sums, weights, tile, how)
    }
}

/// What a product gives once at most `pending` later ones are under way.
#[cube]
fn settle<N: Size>(
    values: Vector<f32, N>,
    #[comptime] count: usize,
    #[comptime] pending: usize,
    #[comptime] how: How,
) -> Vector<f32, N> {
    if comptime!(how.cores == Cores::Wgmma) {
        wgmma::settle::<N>(values, count, pending)
    } else {
        values
    }
}

/// Says how many cubes are to share a multiprocessor: the compiler keeps to the registers that there
/// are then.
#[cube]
fn share(#[comptime] how: How) {
    let text = comptime!(format!("// cubes of a multiprocessor: {}", how.cubes));
    gpu_asm!("{text}");
}

/// Where a chunk of a line is among so many: blocks of 128 bytes of all lines follow each other, and
/// chunks are exchanged so that threads that read several lines at once do not wait for each other.
#[cube]
fn place_of_chunk(
    line: usize,
    chunk: usize,
    #[comptime] lines: usize,
    #[comptime] how: How,
) -> u32 {
    let by = if comptime!(how.dtype == DType::F32) {
        mma::swizzle(line as u32)
    } else {
        line as u32 % 8u32
    };
    (chunk / 8usize * comptime!(lines * 128) + line * 128usize) as u32
        + ((chunk as u32 % 8u32) ^ by) * 16u32
}

/// Begins to bring `lines` rows of a head from `first` on to shared memory at `to`, zeros behind the
/// last and behind the size of the head.
#[cube]
fn bring_rows(
    base: u64,
    stride: usize,
    first: usize,
    stop: usize,
    size: usize,
    to: u32,
    #[comptime] lines: usize,
    #[comptime] how: How,
) {
    let per = comptime!(how.blocks * 8);
    let (chunk_size, element) = comptime!((how.chunk(), how.dtype.size() as u64));
    let (all, threads) = comptime!((lines * per, how.bringing()));
    // Suppliers are the last threads.
    let unit = UNIT_POS as usize - comptime!(how.threads() - how.bringing());
    if comptime!(threads % (8 * per) == 0 && all % threads == 0) {
        // A thread brings the same chunk of lines that are equally far apart: a step for each.
        let apart = comptime!(threads / per);
        let (line, chunk) = (unit / per, unit % per);
        let to = to + place_of_chunk(line, chunk, lines, how);
        let bytes = select(chunk * chunk_size < size, 16u32, 0u32);
        let step = u64::cast_from(stride) * comptime!(element * apart as u64);
        let own = base + u64::cast_from(line * stride + chunk * chunk_size) * element;
        let mut from = own + u64::cast_from(first) * u64::cast_from(stride) * element;
        if first + lines <= stop {
            #[unroll]
            for i in 0..comptime!(all / threads) {
                bring(to + comptime!((apart * i * 128) as u32), from, bytes);
                from += step;
            }
        } else {
            #[unroll]
            for i in 0..comptime!(all / threads) {
                let inside = first + line + comptime!(apart * i) < stop;
                bring(
                    to + comptime!((apart * i * 128) as u32),
                    select(inside, from, base),
                    select(inside, bytes, 0u32),
                );
                from += step;
            }
        }
    } else {
        #[unroll]
        for i in 0..comptime!(all.div_ceil(threads)) {
            let at = unit + comptime!(threads * i);
            if comptime!(threads * (i + 1) <= all) || at < all {
                let (line, chunk) = (at / per, at % per);
                let row = first + line;
                let inside = row < stop && chunk * chunk_size < size;
                let from = select(inside, row * stride + chunk * chunk_size, 0usize);
                bring(
                    to + place_of_chunk(line, chunk, lines, how),
                    base + u64::cast_from(from) * element,
                    select(inside, 16u32, 0u32),
                );
            }
        }
    }
}

/// Where a head of an operand lies.
#[cube]
fn head(
    buffers: &Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    batch: usize,
    head: usize,
    #[comptime] place: Place,
    #[comptime] how: How,
) -> u64 {
    let (buffer, first) = comptime!(place);
    let at = *numbers.index(first)
        + batch * *numbers.index(comptime!(first + 1))
        + head * *numbers.index(comptime!(first + 2));
    address(buffers.index(buffer)) + u64::cast_from(at) * comptime!(how.dtype.size() as u64)
}

/// From a row of an operand to the next.
#[cube]
fn stride(numbers: &Sequence<usize>, #[comptime] place: Place) -> usize {
    let (_, first) = comptime!(place);
    *numbers.index(comptime!(first + 3))
}

/// Stores a thread's two rows of a panel's sums, each times its factor, to a head in its place.
#[cube]
fn store<N: Size>(
    to: u64,
    sums: &Vector<f32, N>,
    #[comptime] panel: usize,
    place: (usize, usize),
    row: usize,
    rows: usize,
    size: usize,
    factors: (f32, f32),
    #[comptime] how: How,
) {
    let lane = UNIT_POS as usize % 32usize;
    let (base, stride) = place;
    let from = comptime!(panel * how.sums());
    #[unroll]
    for half in 0..2usize {
        let at = row + comptime!(8 * half);
        let by = if comptime!(half == 0) {
            factors.0
        } else {
            factors.1
        };
        let place = base + at * stride;
        if comptime!(how.dtype == DType::F32) {
            // Of every 32 features a thread has eight.
            #[unroll]
            for eight in 0..comptime!(how.sums() / 16) {
                #[unroll]
                for four in 0..2usize {
                    let mut words = Array::<u32>::new(4usize);
                    #[unroll]
                    for i in 0..4usize {
                        let sum =
                            sums.extract(comptime!(from + 16 * eight + 4 * i + 2 * half + four));
                        words[i] = u32::reinterpret(sum * by);
                    }
                    let feature = comptime!(32 * eight + 4 * four) + lane % 4usize * 8usize;
                    if at < rows && feature < size {
                        let to = to + u64::cast_from(place + feature) * 4u64;
                        put4(to, words[0], words[1], words[2], words[3]);
                    }
                }
            }
        } else {
            #[unroll]
            for four in 0..comptime!(how.blocks * 2) {
                let mut words = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    let first = comptime!(from + 16 * four + 4 * i + 2 * half);
                    words[i] = pack(
                        sums.extract(first) * by,
                        sums.extract(comptime!(first + 1)) * by,
                        how.dtype,
                    );
                }
                // Four neighbours have two features of each eight; afterwards one has all of eight.
                let (w0, w1) = trade(words[0], words[1], lane, 1u32);
                let (w2, w3) = trade(words[2], words[3], lane, 1u32);
                let (w0, w2) = trade(w0, w2, lane, 2u32);
                let (w1, w3) = trade(w1, w3, lane, 2u32);
                let feature = comptime!(32 * four) + lane % 4usize * 8usize;
                if at < rows && feature < size {
                    put4(to + u64::cast_from(place + feature) * 2u64, w0, w1, w2, w3);
                }
            }
        }
    }
}

/// Tiles that there is room for, of each operand.
const STAGES: u32 = 2;

/// The barrier of a tile of this number, of those that begin with number `first`: there is one for
/// each stage. What has no stages is number 0.
#[cube]
fn barrier(barriers: u32, tile: u32, #[comptime] first: u32) -> u32 {
    barriers + comptime!(8 * first) + tile % STAGES * 8u32
}

/// Whose turn a tile of this number is at its barriers.
#[cube]
fn turn(tile: u32) -> u32 {
    tile / STAGES % 2u32
}

/// Elements of a tile's operand that are worked on at a time, so that both operands stay in the
/// cache: 32 of its megabytes.
const CACHED: usize = 1 << 23;

/// The block and the line of a piece of work. Blocks of a few lines, whose tiles have `elements` each,
/// come one after the other, so that these stay in the cache; `shared` lines have the same ones.
#[cube]
fn piece_of(
    number: usize,
    blocks: usize,
    lines: usize,
    elements: usize,
    shared: usize,
) -> (usize, usize) {
    let near = min(max(CACHED / max(elements, 1usize), 1usize) * shared, lines);
    let first = number / (near * blocks) * near;
    let (rest, near) = (number % (near * blocks), min(near, lines - first));
    (rest / near, first + rest % near)
}

/// A thread's place: the row of its warp group, and its own first row in it.
#[cube]
fn place_of_thread() -> (usize, usize) {
    let unit = UNIT_POS as usize;
    let (warp, lane) = (unit % 128usize / 32usize, unit % 32usize);
    // The same for all threads of a warp, which the compiler does not know otherwise.
    let group = plane_broadcast(UNIT_POS / 128u32, 0u32) as usize;
    (group * 64usize, warp * 16usize + lane / 4usize)
}

/// The sum over four neighbouring threads.
#[cube]
fn sum_of(value: f32) -> f32 {
    let value = value + plane_shuffle_xor(value, 1u32);
    value + plane_shuffle_xor(value, 2u32)
}

/// Weights of so many panels as words, in the order of the next product's left operand.
#[cube]
fn words<S: Size, W: Size>(
    weights: Vector<f32, S>,
    #[comptime] panels: usize,
    #[comptime] how: How,
) -> Vector<u32, W> {
    let mut words = Vector::<u32, W>::empty();
    #[unroll]
    for i in 0..comptime!(panels * how.words()) {
        if comptime!(how.dtype == DType::F32) {
            words.insert(i, u32::reinterpret(weights.extract(i)));
        } else {
            // Words of a step of 16 columns: both rows of the first eight, then of the others.
            let (low, high) = (comptime!(2 * i), comptime!(2 * i + 1));
            words.insert(
                i,
                pack(weights.extract(low), weights.extract(high), how.dtype),
            );
        }
    }
    words
}
