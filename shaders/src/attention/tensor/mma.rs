//! Products of NVIDIA's GPUs from Ampere on: a warp multiplies 16 rows, with operands in registers.
//!
//! 16-bit operands come from shared memory as the instructions want them. Floats of 32 bits are split
//! into two of 11 bits each, and three of the four products of those are added: what is left out is
//! smaller than the last bit of an `f32`. Their order along the summed dimension is free, so a thread
//! takes neighbours: four at a time, in one read.

use super::How;
use crate::hopper::{held, kind, moves, now, registers};
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// Names of registers.
fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}{i}")).collect()
}

/// A product of 16 rows and 8 columns is added to the sums `to`.
fn product(to: &[String], a: &[&str], b: [&str; 2], kind: &str) -> String {
    let (to, a, b) = (to.join(", "), a.join(", "), b.join(", "));
    let depth = if kind == "tf32" { 8 } else { 16 };
    format!(
        "mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{{to}}}, {{{a}}}, {{{b}}}, {{{to}}};\n"
    )
}

/// Splits floats into the 11 bits that are nearest, and the rest. An infinity's rest is NaN.
fn split(values: &[String], high: &[String], low: &[String]) -> String {
    let parts = values.iter().zip(high.iter().zip(low));
    let text = parts.map(|(x, (h, l))| {
        format!("add.u32 {h}, {x}, 0x1000; and.b32 {h}, {h}, 0xffffe000; sub.f32 {l}, {x}, {h};\n")
    });
    text.collect()
}

/// Products of split floats: with rests first. Several sums take turns, so that none is waited for.
fn split_products(
    sums: &[&[String]],
    a: [&[String]; 2],
    b: &[[[&str; 2]; 2]],
    order: [usize; 4],
) -> String {
    let mut text = String::new();
    for (left, right) in [(1, 0), (0, 1), (0, 0)] {
        let a = order.map(|i| a[left][i].as_str());
        for (sums, b) in sums.iter().zip(b) {
            text += &product(sums, &a, b[right], "tf32");
        }
    }
    text
}

/// Products of 16 own rows with a tile's in PTX: results, then where the thread's own row, its row of
/// the tile, and their chunks begin.
fn score_text(how: How) -> String {
    if how.dtype == DType::F32 {
        return score_split_text(how);
    }
    let (count, kind) = (how.scores(), kind(how.dtype));
    let sums = registers(0, count);
    let [own, own_chunk, tile, tile_chunk] = [0, 1, 2, 3].map(|i| count + i);
    let mut text = String::from("{ .reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, p;\n");
    for sum in &sums {
        text += &format!("mov.f32 {sum}, 0f00000000;\n");
    }
    for i in 0..how.steps {
        // 16 features further: two chunks along the line, and then the next block of lines.
        let (chunk, block) = (i % 4 * 32, i / 4 * 128);
        let (a, b) = (block * how.rows(), block * how.columns);
        text += &format!(
            "xor.b32 p, %{own_chunk}, {chunk}; add.u32 p, p, %{own};\n\
             ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{a0, a1, a2, a3}}, [p + {a}];\n\
             xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n"
        );
        for (j, eight) in sums.chunks(8).enumerate() {
            let at = b + j * 16 * 128;
            text += &format!(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0, b1, b2, b3}}, [p + {at}];\n"
            );
            let a = ["a0", "a1", "a2", "a3"];
            text += &product(&eight[..4], &a, ["b0", "b1"], kind);
            text += &product(&eight[4..], &a, ["b2", "b3"], kind);
        }
    }
    text + "}"
}

/// [`score_text`] of floats that are split.
fn score_split_text(how: How) -> String {
    let count = how.scores();
    let sums = registers(0, count);
    let [own, own_chunk, tile, tile_chunk] = [0, 1, 2, 3].map(|i| count + i);
    // Four tile's rows at a time.
    let [x, h, l] = ["x", "h", "l"].map(|name| names(name, 8));
    let [y, g, m] = ["y", "g", "m"].map(|name| names(name, 16));
    let all = [&x, &h, &l, &y, &g, &m].map(|names| names.join(", "));
    let mut text = format!("{{ .reg .b32 {}, p;\n", all.join(", "));
    for sum in &sums {
        text += &format!("mov.f32 {sum}, 0f00000000;\n");
    }
    for i in 0..how.steps {
        // 16 features further: four chunks along the line, and then the next block of lines.
        let (chunk, block) = (i % 2 * 64, i / 2 * 128);
        let (a, b) = (block * how.rows(), block * how.columns);
        text += &format!("xor.b32 p, %{own_chunk}, {chunk}; add.u32 p, p, %{own};\n");
        for (row, four) in x.chunks(4).enumerate() {
            let (four, at) = (four.join(", "), a + row * 8 * 128);
            text += &format!("ld.shared.v4.b32 {{{four}}}, [p + {at}];\n");
        }
        text += &split(&x, &h, &l);
        text += &format!("xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n");
        for (j, some) in sums.chunks(16).enumerate() {
            for (k, four) in y.chunks(4).enumerate() {
                let (four, at) = (four.join(", "), b + (4 * j + k) * 8 * 128);
                text += &format!("ld.shared.v4.b32 {{{four}}}, [p + {at}];\n");
            }
            text += &split(&y, &g, &m);
            let some: Vec<&[String]> = some.chunks(4).collect();
            for half in 0..2 {
                // Two of a thread's four features, of both rows.
                let first = 2 * half;
                let pair = |of: &'_ [String], k: usize| {
                    [4 * k + first, 4 * k + first + 1].map(|i| of[i].clone())
                };
                let pairs: Vec<[[String; 2]; 2]> =
                    (0..4).map(|k| [pair(&g, k), pair(&m, k)]).collect();
                let b: Vec<_> = pairs
                    .iter()
                    .map(|p| p.each_ref().map(|q| q.each_ref().map(String::as_str)))
                    .collect();
                let order = [first, first + 4, first + 1, first + 5];
                text += &split_products(&some, [&h, &l], &b, order);
            }
        }
    }
    text + "}"
}

/// Where a thread reads a panel of lines from shared memory for [`score`]: its line, and its chunk in
/// the first lines. The left operand's fragments are in another order than the right one's.
#[cube]
fn lines(at: u32, #[comptime] left: bool, #[comptime] how: How) -> (u32, u32) {
    let lane = UNIT_POS % 32u32;
    if comptime!(how.dtype == DType::F32) {
        let line = lane / 4u32;
        (at + line * 128u32, (lane % 4u32 ^ swizzle(line)) * 16u32)
    } else if comptime!(left) {
        (
            at + lane % 16u32 * 128u32,
            (lane / 16u32 ^ lane % 8u32) * 16u32,
        )
    } else {
        let line = lane / 16u32 * 8u32 + lane % 8u32;
        (
            at + line * 128u32,
            (lane / 8u32 % 2u32 ^ lane % 8u32) * 16u32,
        )
    }
}

/// What chunks of a line are exchanged by where floats have 32 bits: so that neither threads that read
/// chunks of two neighbouring lines nor such that read two chunks of every other line meet.
#[cube]
pub(super) fn swizzle(line: u32) -> u32 {
    (line / 2u32 % 4u32 * 2u32) ^ (line % 2u32 * 4u32)
}

#[cube]
pub(super) fn score<S: Size>(own: u32, tile: u32, #[comptime] how: How) -> Vector<f32, S> {
    let text = comptime!(score_text(how));
    // A warp has 16 rows.
    let own = own + UNIT_POS / 32u32 % 4u32 * 2048u32;
    let (own, own_chunk) = lines(own, true, how);
    let (tile, tile_chunk) = lines(tile, false, how);
    let (own, own_chunk) = (held::<u32>(own), held::<u32>(own_chunk));
    let (tile, tile_chunk) = (held::<u32>(tile), held::<u32>(tile_chunk));
    let out: Vector<f32, S>;
    gpu_asm!(
        "{text} // {o} {a} {b} {c} {d}",
        o = out(_) out, a = in(_) own, b = in(_) own_chunk, c = in(_) tile, d = in(_) tile_chunk
    );
    out
}

/// Adds a tile's rows, weighted, to the sums, in PTX: results, sums, weights, and where the thread's
/// line and chunk begin.
fn weigh_text(how: How) -> String {
    if how.dtype == DType::F32 {
        return weigh_split_text(how);
    }
    let (count, words, kind) = (how.sums(), how.words(), kind(how.dtype));
    let sums = registers(0, count);
    let weights = registers(2 * count, words);
    let (tile, tile_chunk) = (2 * count + words, 2 * count + words + 1);
    let mut text = String::from("{ .reg .b32 b0, b1, b2, b3, p;\n");
    text += &moves(count);
    for (j, eight) in sums.chunks(8).enumerate().take(how.steps) {
        let (chunk, block) = (j % 4 * 32, j / 4 * how.columns * 128);
        text += &format!("xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n");
        for (i, a) in weights.chunks(4).enumerate() {
            let at = block + i * 16 * 128;
            text += &format!(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{b0, b1, b2, b3}}, [p + {at}];\n"
            );
            let a: Vec<&str> = a.iter().map(String::as_str).collect();
            text += &product(&eight[..4], &a, ["b0", "b1"], kind);
            text += &product(&eight[4..], &a, ["b2", "b3"], kind);
        }
    }
    text + "}"
}

/// [`weigh_text`] of floats that are split. Of every 32 features a thread has eight neighbours.
fn weigh_split_text(how: How) -> String {
    let (count, words) = (how.sums(), how.words());
    let sums = registers(0, count);
    let weights = registers(2 * count, words);
    let (even, odd) = (2 * count + words, 2 * count + words + 1);
    let [x, h, l] = ["x", "h", "l"].map(|name| names(name, 4));
    let [y, g, m] = ["y", "g", "m"].map(|name| names(name, 8));
    let all = [&x, &h, &l, &y, &g, &m].map(|names| names.join(", "));
    let mut text = format!("{{ .reg .b32 {};\n", all.join(", "));
    text += &moves(count);
    for (i, four) in weights.chunks(4).enumerate() {
        for (to, from) in x.iter().zip(four) {
            text += &format!("mov.b32 {to}, {from};\n");
        }
        text += &split(&x, &h, &l);
        for (j, some) in sums.chunks(16).enumerate().take(how.steps.div_ceil(2)) {
            let at = (j * how.columns + i * 8) * 128;
            for (line, four) in [even, odd].iter().zip(y.chunks(4)) {
                let four = four.join(", ");
                text += &format!("ld.shared.v4.b32 {{{four}}}, [%{line} + {at}];\n");
            }
            text += &split(&y, &g, &m);
            let some: Vec<&[String]> = some.chunks(4).collect();
            let b: Vec<[[&str; 2]; 2]> = (0..4)
                .map(|k| [[g[k].as_str(), &g[k + 4]], [m[k].as_str(), &m[k + 4]]])
                .collect();
            // Scores are in the order of rows, weights in that of columns.
            text += &split_products(&some, [&h, &l], &b, [0, 2, 1, 3]);
        }
    }
    text + "}"
}

#[cube]
pub(super) fn weigh<N: Size, W: Size>(
    sums: Vector<f32, N>,
    weights: Vector<u32, W>,
    tile: u32,
    #[comptime] how: How,
) -> Vector<f32, N> {
    let text = comptime!(weigh_text(how));
    let lane = UNIT_POS % 32u32;
    let (first, second) = if comptime!(how.dtype == DType::F32) {
        // Two neighbouring lines, and one chunk of each.
        let line = lane % 4u32 * 2u32;
        let at = tile + line * 128u32;
        let chunk = (lane / 4u32 ^ swizzle(line)) * 16u32;
        (at + chunk, at + 128u32 + (chunk ^ 64u32))
    } else {
        lines(tile, true, how)
    };
    let (first, second) = (held::<u32>(first), held::<u32>(second));
    let (sums, weights) = (now(&sums), now(&weights));
    let out: Vector<f32, N>;
    gpu_asm!(
        "{text} // {o} {c} {w} {a} {b}",
        o = out(_) out, c = in(_) sums, w = in(_) weights, a = in(_) first, b = in(_) second
    );
    out
}
