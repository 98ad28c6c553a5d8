//! Products of Hopper: a warp group begins them and goes on. Both operands, or the right one, lie in
//! shared memory.

use super::How;
use crate::hopper::{descriptor, kind, moves, now, registers};
use cubecl::prelude::*;

/// Begins the products of 64 own rows with a tile's, in PTX: results, then the two descriptors.
fn score_text(how: How) -> String {
    let (count, columns, kind) = (how.scores(), how.columns, kind(how.dtype));
    let list = registers(0, count).join(", ");
    let (own, tile) = (count, count + 1);
    let mut text = String::from("{ .reg .pred p; .reg .u64 a, b; wgmma.fence.sync.aligned;\n");
    for i in 0..how.steps {
        // 16 features further: 32 bytes along the line, and then the next block of 64.
        let at = |lines: usize| (i / 4 * lines * 128 + i % 4 * 32) / 16;
        let (a, b, on) = (at(how.rows()), at(columns), u8::from(i > 0));
        text += &format!(
            "add.u64 a, %{own}, {a}; add.u64 b, %{tile}, {b}; setp.ne.b32 p, {on}, 0;\n\
             wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{list}}}, a, b, p, 1, 1, 0, 0;\n"
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

#[cube]
pub(super) fn score<S: Size>(own: u32, tile: u32, #[comptime] how: How) -> Vector<f32, S> {
    let text = comptime!(score_text(how));
    let (own, tile) = (descriptor(own, 0usize), descriptor(tile, 0usize));
    let out: Vector<f32, S>;
    gpu_asm!("{text} // {o} {a} {b}", o = out(_) out, a = in(_) own, b = in(_) tile);
    out
}

/// Begins to add a tile's rows, weighted, to the sums, in PTX.
fn weigh_text(how: How) -> String {
    let (count, words, kind) = (how.sums(), how.words(), kind(how.dtype));
    let list = registers(0, count).join(", ");
    let weights = registers(2 * count, words);
    let tile = 2 * count + words;
    let mut text = String::from("{ .reg .pred p; .reg .u64 b; setp.ne.b32 p, 1, 0;\n");
    text += &moves(count);
    text += "wgmma.fence.sync.aligned;\n";
    for (i, four) in weights.chunks(4).enumerate() {
        // 16 columns further: 16 lines.
        let (b, four) = (i * 128, four.join(", "));
        text += &format!(
            "add.u64 b, %{tile}, {b};\n\
             wgmma.mma_async.sync.aligned.m64n{}k16.f32.{kind}.{kind} {{{list}}}, {{{four}}}, b, p, 1, 1, 1;\n",
            how.blocks * 64
        );
    }
    text + "wgmma.commit_group.sync.aligned; }"
}

#[cube]
pub(super) fn weigh<N: Size, W: Size>(
    sums: Vector<f32, N>,
    weights: Vector<u32, W>,
    tile: u32,
    #[comptime] how: How,
) -> Vector<f32, N> {
    let text = comptime!(weigh_text(how));
    let tile = descriptor(tile, comptime!(how.columns * 128));
    let (sums, weights) = (now(&sums), now(&weights));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{text} // {o} {c} {w} {v}",
        o = out(_) out, c = in(_) sums, w = in(_) weights, v = in(_) tile
    );
    out
}

/// What a product gives once at most `pending` later ones are under way.
#[cube]
pub(super) fn settle<N: Size>(
    values: Vector<f32, N>,
    #[comptime] count: usize,
    #[comptime] pending: usize,
) -> Vector<f32, N> {
    let text = comptime!(format!(
        "wgmma.wait_group.sync.aligned {pending};\n{}",
        moves(count)
    ));
    let values = now(&values);
    let out: Vector<f32, N>;
    gpu_asm!("{text} // {o} {c}", o = out(_) out, c = in(_) values);
    out
}
