//! Grouped products of 16-bit floats on the tensor cores of Hopper GPUs.
//!
//! Two or three warp groups share a tile of the output, 64 rows by 256 columns each: the larger the
//! tile, the less is read from the cache, which is what bounds it. All threads bring panels of both operands to shared memory, asynchronously and
//! [`STAGES`] ahead; the tensor cores read them there. A panel has [`DEPTH`] steps of the summed
//! dimension and lies in lines of 128 bytes, along that dimension or across it as memory does, in
//! the order of chunks that the hardware calls its 128-byte swizzle.
//!
//! Cubes stay: each goes through tiles until there are none, and the panels of the next tile are on
//! their way while a tile is stored. The instructions are PTX: CubeCL has no others for them.

use super::end;
use anymesh_kernel::{
    DType,
    backend::{GroupedCall, GroupedOp},
};
use cubecl::prelude::*;

/// Steps of the summed dimension in a stage: 128 bytes.
const DEPTH: usize = 64;
/// Stages in shared memory.
const STAGES: usize = 4;
/// Columns of a tile.
pub(super) const COLUMNS: usize = 256;
/// Bytes of 64 lines.
const BLOCK: usize = 64 * 128;

/// What a thread has of the sums: two rows, eight apart, and two neighbouring columns of every eight.
type Sums = Vector<f32, Const<REGISTERS>>;
const REGISTERS: usize = 128;

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct How {
    /// Of the operands: bf16 or f16.
    pub(super) dtype: DType,
    /// Of the result: theirs, or f32.
    pub(super) stored: DType,
    /// Warp groups, on top of each other.
    pub(super) down: usize,
    /// Whether the right operand's memory goes along the summed dimension. The left's does in
    /// products of rows, and neither does in sums.
    pub(super) along: bool,
    /// Whether outer products are summed.
    pub(super) sums: bool,
}

impl How {
    /// Rows of a tile.
    pub(super) fn rows(self) -> usize {
        64 * self.down
    }

    /// Threads of a cube.
    pub(super) fn threads(self) -> usize {
        128 * self.down
    }

    /// Bytes of a stage.
    fn stage(self) -> usize {
        (self.rows() + COLUMNS) * 128
    }
}

/// Which kernel computes a call whose operands are dense, if there is one.
pub(super) fn how(call: &GroupedCall) -> Option<How> {
    let ([n, k, m], dtype) = (call.sizes(), call.a.dtype);
    let small = matches!(dtype, DType::BF16 | DType::F16);
    let stored = call.dtype == dtype || call.dtype == DType::F32;
    // Chunks of 16 bytes are brought as they are.
    let chunks = |offset: usize, strides: &[isize]| {
        offset.is_multiple_of(8) && strides.iter().all(|s| *s > 0 && s % 8 == 0)
    };
    let (a, b) = (&call.a.layout, &call.b.layout);
    let sizes = k.is_multiple_of(8) && m.is_multiple_of(8) && k > 0;
    if !small || !stored || !sizes || a.strides[1] != 1 || !chunks(a.offset, &a.strides[..1]) {
        return None;
    }
    let last = b.shape.rank() - 1;
    let (across, along) = (b.strides[last] == 1, b.strides[last - 1] == 1);
    let others = |dims: &[usize]| {
        let strides: Vec<isize> = dims.iter().map(|&d| b.strides[d]).collect();
        chunks(b.offset, &strides)
    };
    let how = |down, along, sums| How {
        dtype,
        stored: call.dtype,
        down,
        along,
        sums,
    };
    match call.mode {
        GroupedOp::Rows => {
            let each = n / call.groups().max(1);
            let down = if each <= 160 { 2 } else { 3 };
            if across && others(&[0, 1]) {
                Some(how(down, false, false))
            } else if along && others(&[0, 2]) {
                Some(how(down, true, false))
            } else {
                None
            }
        }
        GroupedOp::Sums { .. } if across && others(&[0]) => Some(how(3, false, true)),
        GroupedOp::Sums { .. } => None,
    }
}

/// Where a slice of shared memory lies in it.
#[cube]
fn shared_address(memory: &[u32]) -> u32 {
    let pointer = unsafe { memory.as_ptr_unchecked() };
    let out: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}",
        o = out(_) out, p = in(_) pointer, options(nomem)
    );
    out
}

/// Where a buffer lies.
#[cube]
fn address(memory: &[u32]) -> u64 {
    let pointer = unsafe { memory.as_ptr_unchecked() };
    let out: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) out, p = in(_) pointer, options(nomem));
    out
}

/// Where a buffer lies that is written to.
#[cube]
fn address_mut(memory: &mut [u32]) -> u64 {
    let pointer = unsafe { memory.as_mut_ptr_unchecked() };
    let out: u64;
    gpu_asm!("mov.u64 {o}, {p};", o = out(_) out, p = in(_) pointer, options(nomem));
    out
}

/// Begins to bring 16 bytes to shared memory; zeros where `bytes` is 0.
#[cube]
fn bring(to: u32, from: u64, bytes: u32) {
    gpu_asm!(
        "cp.async.cg.shared.global [{to}], [{from}], 16, {bytes};",
        to = in(_) to, from = in(_) from, bytes = in(_) bytes
    );
}

/// An operand: its place in memory, the lines of its panel that there are, and the steps of the sum.
#[derive(CubeType, Clone, Copy)]
struct Source {
    /// Address of its first element.
    base: u64,
    /// Elements from a line to the next, or from a step of the sum to the next.
    stride: usize,
    /// The first row or column of the tile.
    first: usize,
    /// Where rows or columns end.
    stop: usize,
    /// Steps of the sum.
    depth: usize,
}

/// Begins to bring the panel of `lines` rows or columns from step `step` on to shared memory at `to`.
#[cube]
fn bring_panel(
    source: &Source,
    to: u32,
    step: usize,
    #[comptime] lines: usize,
    #[comptime] along: bool,
    #[comptime] threads: usize,
) {
    let unit = UNIT_POS as usize;
    // Chunks of a line that is brought at once, and the lines that all threads bring.
    let (per, all) = comptime!(if along {
        (8, lines)
    } else {
        (lines / 8, DEPTH)
    });
    let each = comptime!(threads / per);
    let (chunk, top) = (unit % per, unit / per);
    #[unroll]
    for i in 0..comptime!(all.div_ceil(each)) {
        let line = top + comptime!(each * i);
        if comptime!(each * (i + 1) <= all) || line < all {
            if comptime!(along) {
                let row = source.first + line;
                let inside = row < source.stop && step + chunk * 8usize < source.depth;
                let at = select(inside, row * source.stride + step + chunk * 8usize, 0usize);
                let place = line * 128usize + ((chunk ^ (line % 8usize)) * 16usize);
                bring(
                    to + place as u32,
                    source.base + u64::cast_from(at) * 2u64,
                    select(inside, 16u32, 0u32),
                );
            } else {
                let row = source.first + chunk * 8usize;
                let inside = row < source.stop && step + line < source.depth;
                let at = select(inside, (step + line) * source.stride + row, 0usize);
                let place = chunk / 8usize * BLOCK
                    + line * 128usize
                    + ((chunk % 8usize) ^ (line % 8usize)) * 16usize;
                bring(
                    to + place as u32,
                    source.base + u64::cast_from(at) * 2u64,
                    select(inside, 16u32, 0u32),
                );
            }
        }
    }
}

/// How the tensor cores find a panel: lines of 128 bytes, swizzled, in groups of eight, and blocks of
/// 64 lines one behind the other.
#[cube]
fn descriptor(at: u32, #[comptime] along: bool) -> u64 {
    let between = comptime!(if along { 1u64 } else { (BLOCK / 16) as u64 });
    let rest = comptime!(between << 16 | 64u64 << 32 | 1u64 << 62);
    u64::cast_from((at & 0x3ffffu32) >> 4u32) | rest
}

/// The registers of the sums, from `from` on.
fn registers(from: usize) -> Vec<String> {
    (from..from + REGISTERS).map(|i| format!("%{i}")).collect()
}

/// Makes the registers of the sums those before.
fn moves() -> String {
    let pairs = registers(0).into_iter().zip(registers(REGISTERS));
    pairs
        .map(|(to, from)| format!("mov.f32 {to}, {from};\n"))
        .collect()
}

/// Begins the product of one stage, in PTX: to the registers of the sums, from the sums before, and
/// two descriptors.
fn begin_text(how: How) -> String {
    let list = registers(0).join(", ");
    let kind = if how.dtype == DType::F16 {
        "f16"
    } else {
        "bf16"
    };
    let a_along = !how.sums;
    let (a_turned, b_turned) = (u8::from(!a_along), u8::from(!how.along));
    // 16 steps further: 32 bytes along the line, or 16 lines.
    let step = |along: bool| if along { 2 } else { 128 };
    let mut text = String::from("{ .reg .pred p; .reg .u64 a, b; setp.ne.b32 p, 1, 0;\n");
    text += &moves();
    let (a, b) = (2 * REGISTERS, 2 * REGISTERS + 1);
    text += &format!("mov.u64 a, %{a}; mov.u64 b, %{b};\nwgmma.fence.sync.aligned;\n");
    for i in 0..DEPTH / 16 {
        if i > 0 {
            let (a, b) = (step(a_along), step(how.along));
            text += &format!("add.u64 a, a, {a}; add.u64 b, b, {b};\n");
        }
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.{kind}.{kind} {{{list}}}, a, b, p, 1, 1, {a_turned}, {b_turned};\n"
        );
    }
    text + "wgmma.commit_group.sync.aligned;\n}"
}

/// The sums to which the product of a stage is being added: nothing may touch them before
/// [`finish`].
#[cube]
fn begin(sums: Sums, a: u64, b: u64, #[comptime] how: How) -> Sums {
    let text = comptime!(begin_text(how));
    let out: Sums;
    gpu_asm!(
        "{text} // {o} {c} {a} {b}",
        o = out(_) out, c = in(_) sums, a = in(_) a, b = in(_) b
    );
    out
}

/// The sums when the product is there.
#[cube]
fn finish(sums: Sums) -> Sums {
    let text = comptime!(format!("wgmma.wait_group.sync.aligned 0;\n{}", moves()));
    let out: Sums;
    gpu_asm!("{text} // {o} {c}", o = out(_) out, c = in(_) sums);
    out
}

/// What a variable holds now.
#[cube]
fn now(sums: &Sums) -> Sums {
    intrinsic!(|scope| sums.read_value(scope).into())
}

/// Two values in a word.
#[cube]
fn pack(low: f32, high: f32, #[comptime] dtype: DType) -> u32 {
    let kind = comptime!(if dtype == DType::F16 {
        "f16x2"
    } else {
        "bf16x2"
    });
    let out: u32;
    gpu_asm!(
        "cvt.rn.{kind}.f32 {o}, {high}, {low};",
        o = out(_) out, low = in(_) low, high = in(_) high, options(nomem)
    );
    out
}

/// The pair of sums from `at` on as a word.
#[cube]
fn pair(sums: &Sums, #[comptime] at: usize, #[comptime] how: How) -> u32 {
    pack(
        sums.extract(at),
        sums.extract(comptime!(at + 1)),
        how.stored,
    )
}

/// Trades words with the thread whose number differs by `bit`: the lower one has both first words
/// then, the upper one both second ones.
#[cube]
fn trade(x: u32, y: u32, lane: usize, #[comptime] bit: u32) -> (u32, u32) {
    let upper = (lane as u32 & bit) != 0u32;
    let got = plane_shuffle_xor(select(upper, x, y), bit);
    (select(upper, got, x), select(upper, y, got))
}

/// Stores 16 bytes.
#[cube]
fn put4(at: u64, a: u32, b: u32, c: u32, d: u32) {
    gpu_asm!(
        "st.global.v4.b32 [{at}], {{{a}, {b}, {c}, {d}}};",
        at = in(_) at, a = in(_) a, b = in(_) b, c = in(_) c, d = in(_) d
    );
}

/// Stores two floats.
#[cube]
fn put2(at: u64, a: f32, b: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{at}], {{{a}, {b}}};",
        at = in(_) at, a = in(_) a, b = in(_) b
    );
}

/// A group on the way through all: its rows, and the squares of rows before it.
#[derive(CubeType)]
struct Walk {
    group: usize,
    start: usize,
    stop: usize,
    before: usize,
}

/// Goes to the group of the `square`-th square of `side` rows. Rows of no group are those of one
/// more; behind all there is no row.
#[cube]
fn seek(
    walk: &mut Walk,
    ends: &[i32],
    numbers: &Sequence<usize>,
    square: usize,
    #[comptime] side: usize,
) {
    let (n, all) = (*numbers.index(0usize), *numbers.index(13usize));
    if square < walk.before {
        walk.group = 0usize;
        walk.start = 0usize;
        walk.stop = end(ends, numbers, 0usize, 0usize);
        walk.before = 0usize;
    }
    let mut squares = (walk.stop - walk.start + comptime!(side - 1)) / side;
    while walk.group <= all && square - walk.before >= squares {
        walk.before += squares;
        walk.start = walk.stop;
        walk.group += 1usize;
        if walk.group < all {
            walk.stop = end(ends, numbers, walk.group, walk.start);
        } else {
            walk.stop = n;
        }
        squares = (walk.stop - walk.start + comptime!(side - 1)) / side;
    }
}

/// Goes to a group.
#[cube]
fn seek_group(walk: &mut Walk, ends: &[i32], numbers: &Sequence<usize>, group: usize) {
    while walk.group < min(group, *numbers.index(13usize) - 1usize) {
        walk.group += 1usize;
        walk.start = walk.stop;
        walk.stop = end(ends, numbers, walk.group, walk.start);
    }
}

/// A tile of the output, what it is made of, and in how many stages: one at least, of zeros.
#[derive(CubeType)]
struct Tile {
    a: Source,
    b: Source,
    /// Which group's of the sums it is.
    group: usize,
    steps: usize,
    walk: Walk,
}

/// Columns of tiles that are gone through together, so that their matrices stay in the cache.
const BAND: usize = 4;

/// Goes to a tile by its number; behind the last one there is nothing.
#[cube]
fn aim(
    tile: &mut Tile,
    ends: &[i32],
    numbers: &Sequence<usize>,
    index: usize,
    a_base: u64,
    b_base: u64,
    #[comptime] how: How,
) {
    let (tall, wide) = comptime!((how.rows(), COLUMNS));
    let (k, m, groups) = (
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let (first, squares) = (*numbers.index(12usize), *numbers.index(15usize));
    let across = (m + comptime!(wide - 1)) / wide;
    if comptime!(how.sums) {
        let down = (k + comptime!(tall - 1)) / tall;
        let (rest, group) = (index / across % down, index / across / down);
        let inside = group < groups;
        seek_group(&mut tile.walk, ends, numbers, first + group);
        let start = tile.walk.start;
        tile.a.base = a_base + u64::cast_from(start) * u64::cast_from(tile.a.stride) * 2u64;
        tile.b.base = b_base + u64::cast_from(start) * u64::cast_from(tile.b.stride) * 2u64;
        tile.a.first = rest * tall;
        tile.a.stop = select(inside, k, 0usize);
        tile.b.first = index % across * wide;
        tile.a.depth = select(inside, tile.walk.stop - start, 0usize);
        tile.group = group;
    } else {
        let band = min(
            index / (squares * comptime!(BAND)),
            (across - 1usize) / comptime!(BAND),
        );
        let rest = index - band * squares * comptime!(BAND);
        let width = min(comptime!(BAND).runtime(), across - band * comptime!(BAND));
        let square = rest / width;
        seek(&mut tile.walk, ends, numbers, square, tall);
        let (start, group) = (tile.walk.start, tile.walk.group);
        let counts = group >= first && group < first + groups;
        let matrix = select(counts, group - first, 0usize);
        let step = u64::cast_from(*numbers.index(14usize));
        tile.b.base = b_base + u64::cast_from(matrix) * step * 2u64;
        tile.a.first = start + (square - tile.walk.before) * tall;
        tile.a.stop = tile.walk.stop;
        tile.b.first = (band * comptime!(BAND) + rest % width) * wide;
        tile.a.depth = select(counts, k, 0usize);
    }
    tile.b.depth = tile.a.depth;
    tile.steps = max((tile.a.depth + comptime!(DEPTH - 1)) / DEPTH, 1usize);
}

/// A tile before the first.
#[cube]
fn start(
    ends: &[i32],
    numbers: &Sequence<usize>,
    a_base: u64,
    b_base: u64,
    #[comptime] how: How,
) -> Tile {
    let b_stride = if comptime!(how.along) {
        *numbers.index(9usize)
    } else {
        *numbers.index(8usize)
    };
    Tile {
        a: Source {
            base: a_base,
            stride: *numbers.index(5usize),
            first: 0usize,
            stop: 0usize,
            depth: 0usize,
        },
        b: Source {
            base: b_base,
            stride: b_stride,
            first: 0usize,
            stop: *numbers.index(2usize),
            depth: 0usize,
        },
        group: 0usize,
        steps: 0usize,
        walk: Walk {
            group: 0usize,
            start: 0usize,
            stop: end(ends, numbers, 0usize, 0usize),
            before: 0usize,
        },
    }
}

/// The stage that is brought next: of which tile, and that tile's place among those that are noted.
#[derive(CubeType)]
struct Coming {
    tile: Tile,
    index: usize,
    step: usize,
    stage: u32,
    noted: usize,
}

/// Tiles that are on their way at most, and numbers of each.
const NOTES: usize = 8;
const NOTE: usize = 5;

/// Notes where the tile lies for when it is computed.
#[cube]
fn note(coming: &mut Coming, notes: &mut [u32]) {
    if UNIT_POS == 0u32 {
        let at = coming.noted * NOTE;
        notes[at] = coming.tile.a.first as u32;
        notes[at + 1usize] = coming.tile.a.stop as u32;
        notes[at + 2usize] = coming.tile.b.first as u32;
        notes[at + 3usize] = coming.tile.group as u32;
        notes[at + 4usize] = coming.tile.steps as u32;
    }
    coming.noted = (coming.noted + 1usize) % NOTES;
}

/// Begins to bring a stage, and goes on to the next.
#[cube]
fn bring_next(
    coming: &mut Coming,
    notes: &mut [u32],
    panels: u32,
    ends: &[i32],
    numbers: &Sequence<usize>,
    a_base: u64,
    b_base: u64,
    #[comptime] how: How,
) {
    let to = panels + coming.stage * comptime!(how.stage() as u32);
    let (rows, threads) = comptime!((how.rows(), how.threads()));
    let at = coming.step * DEPTH;
    bring_panel(&coming.tile.a, to, at, rows, comptime!(!how.sums), threads);
    let right = to + comptime!((rows * 128) as u32);
    bring_panel(&coming.tile.b, right, at, COLUMNS, how.along, threads);
    gpu_asm!("cp.async.commit_group;");
    coming.stage = (coming.stage + 1u32) % comptime!(STAGES as u32);
    coming.step += 1usize;
    if coming.step >= coming.tile.steps {
        coming.index += CUBE_COUNT;
        coming.step = 0usize;
        let index = coming.index;
        aim(&mut coming.tile, ends, numbers, index, a_base, b_base, how);
        note(coming, notes);
    }
}

/// The numbers are those of [`rows`](super::rows), and behind them the squares of rows and the tiles
/// that there are room for.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn hopper(
    buffers: &Sequence<Box<[u32]>>,
    ends: &[i32],
    out: &mut [u32],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
    #[comptime] right: usize,
) {
    let (k, m, tiles) = (
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(16usize),
    );
    let (a_base, b_base) = (
        address(buffers.index(0usize)) + u64::cast_from(*numbers.index(4usize)) * 2u64,
        address(buffers.index(right)) + u64::cast_from(*numbers.index(7usize)) * 2u64,
    );
    // It is written to by its address; this keeps it an output.
    if tiles == 0usize {
        out[0] = 0u32;
    }
    let out_base = address_mut(out);
    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * how.stage() + 1024) / 4), 1024usize);
    let mut notes = Shared::<[u32]>::new_slice(comptime!(NOTES * NOTE));
    let panels = (shared_address(&memory) + 1023u32) & 0xffff_fc00u32;
    let unit = UNIT_POS as usize;
    let below = unit / 128usize;
    let (a_at, b_at) = (
        panels + below as u32 * comptime!(BLOCK as u32),
        panels + comptime!((how.rows() * 128) as u32),
    );

    // What is brought is ahead of what is computed, also into the tiles that follow.
    let mut coming = Coming {
        tile: start(ends, numbers, a_base, b_base, how),
        index: CUBE_POS,
        step: 0usize,
        stage: 0u32,
        noted: 0usize,
    };
    aim(
        &mut coming.tile,
        ends,
        numbers,
        CUBE_POS,
        a_base,
        b_base,
        how,
    );
    note(&mut coming, &mut notes);
    #[unroll]
    for _ in 0..comptime!(STAGES - 1) {
        bring_next(
            &mut coming,
            &mut notes,
            panels,
            ends,
            numbers,
            a_base,
            b_base,
            how,
        );
    }
    sync_cube();
    let mut stage = 0u32;
    let mut noted = 0usize;
    let mut index = CUBE_POS;
    while index < tiles {
        let steps = notes[noted * NOTE + 4usize];
        let mut sums = Sums::new(0.0f32);
        let mut step = 0u32;
        while step < steps {
            gpu_asm!("cp.async.wait_group 2; fence.proxy.async.shared::cta;");
            sync_cube();
            let from = stage * comptime!(how.stage() as u32);
            sums = begin(
                now(&sums),
                descriptor(a_at + from, comptime!(!how.sums)),
                descriptor(b_at + from, how.along),
                how,
            );
            bring_next(
                &mut coming,
                &mut notes,
                panels,
                ends,
                numbers,
                a_base,
                b_base,
                how,
            );
            sums = finish(now(&sums));
            stage = (stage + 1u32) % comptime!(STAGES as u32);
            step += 1u32;
        }

        let at = noted * NOTE;
        let (warp, lane) = (unit % 128usize / 32usize, unit % 32usize);
        let top = notes[at] as usize + below * 64usize + warp * 16usize + lane / 4usize;
        let (stop, edge) = (notes[at + 1usize] as usize, notes[at + 2usize] as usize);
        let written = if comptime!(how.sums) {
            notes[at + 3usize] as usize * k * m
        } else {
            0usize.runtime()
        };
        #[unroll]
        for half in 0..2usize {
            let row = top + comptime!(8 * half);
            let inside = row < stop;
            let begins = written + row * m;
            if comptime!(how.stored == DType::F32) {
                #[unroll]
                for pair in 0..comptime!(COLUMNS / 8) {
                    let at = edge + comptime!(8 * pair) + lane % 4usize * 2usize;
                    if inside && at < m {
                        put2(
                            out_base + u64::cast_from(begins + at) * 4u64,
                            sums.extract(comptime!(4 * pair + 2 * half)),
                            sums.extract(comptime!(4 * pair + 2 * half + 1)),
                        );
                    }
                }
            } else {
                #[unroll]
                for four in 0..comptime!(COLUMNS / 32) {
                    let first = comptime!(16 * four + 2 * half);
                    let (w0, w1) = (
                        pair(&sums, first, how),
                        pair(&sums, comptime!(first + 4), how),
                    );
                    let (w2, w3) = (
                        pair(&sums, comptime!(first + 8), how),
                        pair(&sums, comptime!(first + 12), how),
                    );
                    // Four threads have pairs of each of four eights; then each has one eight.
                    let (w0, w1) = trade(w0, w1, lane, 1u32);
                    let (w2, w3) = trade(w2, w3, lane, 1u32);
                    let (w0, w2) = trade(w0, w2, lane, 2u32);
                    let (w1, w3) = trade(w1, w3, lane, 2u32);
                    let at = edge + comptime!(32 * four) + lane % 4usize * 8usize;
                    if inside && at < m {
                        put4(
                            out_base + u64::cast_from(begins + at) * 2u64,
                            w0,
                            w1,
                            w2,
                            w3,
                        );
                    }
                }
            }
        }
        noted = (noted + 1usize) % NOTES;
        index += CUBE_COUNT;
    }
    gpu_asm!("cp.async.wait_group 0;");
}
