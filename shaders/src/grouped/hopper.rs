//! Grouped products of 16-bit floats on the tensor cores of Hopper GPUs.
//!
//! Four warp groups share a tile of the output, 64 rows by 128 columns each, on top of each other and
//! side by side. All threads bring panels of both operands to shared memory, asynchronously and
//! [`STAGES`] ahead; the tensor cores read them there. A panel has [`DEPTH`] steps of the summed
//! dimension and lies in lines of 128 bytes, along that dimension or across it as memory does, in
//! the order of chunks that the hardware calls its 128-byte swizzle.
//!
//! The instructions are PTX: CubeCL has no others for them.

use super::{Place, end, place};
use crate::words;
use anymesh_kernel::{
    DType,
    backend::{GroupedCall, GroupedOp},
};
use cubecl::prelude::*;

/// Four warp groups.
pub(super) const THREADS: u32 = 512;
/// Steps of the summed dimension in a stage: 128 bytes.
const DEPTH: usize = 64;
/// Stages in shared memory, of 48 KiB.
const STAGES: usize = 4;
/// Bytes of a stage: 384 lines of 128.
const STAGE: usize = 384 * 128;
/// Bytes of 64 lines.
const BLOCK: usize = 64 * 128;

type Sums = Vector<f32, Const<64>>;

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct How {
    /// Of the operands: bf16 or f16.
    pub(super) dtype: DType,
    /// Of the result: theirs, or f32.
    pub(super) stored: DType,
    /// How many warp groups lie on top of each other; the others lie side by side.
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

    /// Columns of a tile.
    pub(super) fn columns(self) -> usize {
        128 * (4 / self.down)
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
            let down = if each <= 160 { 2 } else { 4 };
            if across && others(&[0, 1]) {
                Some(how(down, false, false))
            } else if along && others(&[0, 2]) {
                Some(how(down, true, false))
            } else {
                None
            }
        }
        GroupedOp::Sums { .. } if across && others(&[0]) => Some(how(2, false, true)),
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
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(lines / 64) {
        if comptime!(along) {
            let chunk = unit % 8usize;
            let line = unit / 8usize + comptime!(64 * i);
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
            let per = comptime!(lines / 8);
            let chunk = unit % per;
            let line = unit / per + comptime!(THREADS as usize / per * i);
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

/// How the tensor cores find a panel: lines of 128 bytes, swizzled, in groups of eight, and blocks of
/// 64 lines one behind the other.
#[cube]
fn descriptor(at: u32, #[comptime] along: bool) -> u64 {
    let between = comptime!(if along { 1u64 } else { (BLOCK / 16) as u64 });
    let rest = comptime!(between << 16 | 64u64 << 32 | 1u64 << 62);
    u64::cast_from((at & 0x3ffffu32) >> 4u32) | rest
}

/// The product of one stage: what it does in PTX, to the registers of the sums, the sums before, and
/// two descriptors.
fn multiply_text(how: How) -> String {
    let list: Vec<String> = (0..64).map(|i| format!("%{i}")).collect();
    let list = list.join(", ");
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
    for i in 0..64 {
        text += &format!("mov.f32 %{i}, %{};\n", 64 + i);
    }
    text += "mov.u64 a, %128; mov.u64 b, %129;\nwgmma.fence.sync.aligned;\n";
    for i in 0..DEPTH / 16 {
        if i > 0 {
            let (a, b) = (step(a_along), step(how.along));
            text += &format!("add.u64 a, a, {a}; add.u64 b, b, {b};\n");
        }
        text += &format!(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind} {{{list}}}, a, b, p, 1, 1, {a_turned}, {b_turned};\n"
        );
    }
    text += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}";
    text
}

/// The sums with the product of a stage added.
#[cube]
fn multiply(sums: Sums, a: u64, b: u64, #[comptime] how: How) -> Sums {
    let text = comptime!(multiply_text(how));
    let out: Sums;
    gpu_asm!(
        "{text} // {o} {c} {a} {b}",
        o = out(_) out, c = in(_) sums, a = in(_) a, b = in(_) b
    );
    out
}

/// What a variable holds now.
#[cube]
fn now(sums: &Sums) -> Sums {
    intrinsic!(|scope| sums.read_value(scope).into())
}

/// See [`rows`](super::rows) for the numbers.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn hopper(
    buffers: &Sequence<Box<[u32]>>,
    ends: &[i32],
    out: &mut [u32],
    numbers: &Sequence<usize>,
    #[comptime] how: How,
    #[comptime] right: usize,
) {
    let (tall, wide) = comptime!((how.rows(), how.columns()));
    let (n, k, m, groups) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let first = *numbers.index(12usize);
    let across = (m + comptime!(wide - 1)) / wide;
    let (a_base, b_base) = (
        address(buffers.index(0usize)) + u64::cast_from(*numbers.index(4usize)) * 2u64,
        address(buffers.index(right)) + u64::cast_from(*numbers.index(7usize)) * 2u64,
    );
    let column = CUBE_POS % across * wide;
    let mut a = Source {
        base: a_base,
        stride: *numbers.index(5usize),
        first: 0usize,
        stop: 0usize,
        depth: 0usize,
    };
    let mut b = Source {
        base: b_base,
        stride: *numbers.index(8usize),
        first: column,
        stop: m,
        depth: 0usize,
    };
    let mut written = 0usize;
    if comptime!(how.sums) {
        let down = (k + comptime!(tall - 1)) / tall;
        let (rest, group) = (CUBE_POS / across % down, CUBE_POS / across / down);
        // Surplus cubes of the grid have no group.
        let inside = group < groups;
        let mut start = 0usize;
        let mut stop = 0usize;
        for i in 0..select(inside, first + group + 1usize, 0usize) {
            start = stop;
            stop = end(ends, numbers, i, stop);
        }
        a.base += u64::cast_from(start * a.stride) * 2u64;
        b.base += u64::cast_from(start * b.stride) * 2u64;
        a.first = rest * tall;
        a.stop = select(inside, k, 0usize);
        a.depth = stop - start;
        b.depth = stop - start;
        written = group * k * m;
    } else {
        let Place { row, stop, group } = place(ends, numbers, CUBE_POS / across, tall);
        let counts = group >= first && group < first + groups && stop > row;
        let matrix = select(counts, group - first, 0usize);
        b.base += u64::cast_from(matrix) * u64::cast_from(*numbers.index(14usize)) * 2u64;
        if comptime!(how.along) {
            b.stride = *numbers.index(9usize);
        }
        a.first = min(row, n);
        a.stop = stop;
        a.depth = select(counts, k, 0usize);
        b.depth = a.depth;
    }

    let memory =
        Shared::<[u32]>::new_aligned_slice(comptime!((STAGES * STAGE + 1024) / 4), 1024usize);
    let panels = (shared_address(&memory) + 1023u32) & 0xffff_fc00u32;
    let right_panel = comptime!((tall * 128) as u32);
    let unit = UNIT_POS as usize;
    let group = unit / 128usize;
    let (below, beside) = (group % how.down, group / how.down);
    let (a_at, b_at) = (
        panels + below as u32 * comptime!(BLOCK as u32),
        panels + right_panel + beside as u32 * comptime!(2 * BLOCK as u32),
    );

    let mut sums = Sums::new(0.0f32);
    let steps = (a.depth + comptime!(DEPTH - 1)) / DEPTH;
    #[unroll]
    for s in 0..comptime!(STAGES - 1) {
        let to = panels + comptime!((s * STAGE) as u32);
        bring_panel(
            &a,
            to,
            comptime!(s * DEPTH).runtime(),
            tall,
            comptime!(!how.sums),
        );
        bring_panel(
            &b,
            to + right_panel,
            comptime!(s * DEPTH).runtime(),
            wide,
            how.along,
        );
        gpu_asm!("cp.async.commit_group;");
    }
    let mut step = 0usize;
    while step < steps {
        gpu_asm!("cp.async.wait_group 2; fence.proxy.async.shared::cta;");
        sync_cube();
        let next = step + comptime!(STAGES - 1);
        let to = panels + (next % STAGES) as u32 * comptime!(STAGE as u32);
        bring_panel(&a, to, next * DEPTH, tall, comptime!(!how.sums));
        bring_panel(&b, to + right_panel, next * DEPTH, wide, how.along);
        gpu_asm!("cp.async.commit_group;");
        let stage = (step % STAGES) as u32 * comptime!(STAGE as u32);
        sums = multiply(
            now(&sums),
            descriptor(a_at + stage, comptime!(!how.sums)),
            descriptor(b_at + stage, how.along),
            how,
        );
        step += 1usize;
    }
    gpu_asm!("cp.async.wait_group 0;");

    // A thread has pairs of columns of two rows, eight apart.
    let (warp, lane) = (unit % 128usize / 32usize, unit % 32usize);
    let top = a.first + below * 64usize + warp * 16usize + lane / 4usize;
    let edge = column + beside * 128usize + lane % 4usize * 2usize;
    #[unroll]
    for half in 0..2usize {
        let row = top + comptime!(8 * half);
        if row < a.stop {
            #[unroll]
            for pair in 0..8usize {
                let at = edge + comptime!(16 * pair);
                let mut values = words::F4::empty();
                values.insert(0usize, sums.extract(comptime!(8 * pair + 2 * half)));
                values.insert(1usize, sums.extract(comptime!(8 * pair + 2 * half + 1)));
                values.insert(2usize, sums.extract(comptime!(8 * pair + 4 + 2 * half)));
                values.insert(3usize, sums.extract(comptime!(8 * pair + 5 + 2 * half)));
                let place = written + row * m + at;
                if comptime!(how.stored == DType::F32) {
                    #[unroll]
                    for i in 0..4usize {
                        let on = comptime!(i % 2 + i / 2 * 8);
                        if at + on < m {
                            out[place + on] = u32::reinterpret(values.extract(i));
                        }
                    }
                } else {
                    let packed = words::pack16(words::f32_to_small(values, how.stored));
                    if at < m {
                        out[place / 2usize] = packed.extract(0usize);
                    }
                    if at + 8usize < m {
                        out[place / 2usize + 4usize] = packed.extract(1usize);
                    }
                }
            }
        }
    }
}
