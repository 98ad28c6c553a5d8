//! Products of NVIDIA's GPUs from Ampere on: a warp multiplies 16 rows, with operands in registers.
//! Where its warp group has two panels, it has 16 rows of each: what it reads of a tile, which is what
//! takes longest, is multiplied with both, and the second panel's results follow the first one's.
//!
//! 16-bit operands come from shared memory as the instructions want them. Floats of 32 bits are split
//! into two of 11 bits each, and three of the four products of those are added: what is left out is of
//! the size of an `f32`'s last bit. Their order along the summed dimension is free, so a thread
//! takes neighbours: four at a time, in one read.

use super::How;
use crate::hopper::{held, kind, moves, now, registers};
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// A product of 16 rows and 8 columns is added to the sums `to`.
fn product(to: &[String], a: &[impl AsRef<str>], b: [&str; 2], kind: &str) -> String {
    let a: Vec<&str> = a.iter().map(AsRef::as_ref).collect();
    let (to, a, b) = (to.join(", "), a.join(", "), b.join(", "));
    let depth = if kind == "tf32" { 8 } else { 16 };
    format!(
        "mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{{to}}}, {{{a}}}, {{{b}}}, {{{to}}};\n"
    )
}

/// Floats in registers, their first 11 bits, and the rests.
struct Split {
    values: Vec<String>,
    parts: [Vec<String>; 2],
}

impl Split {
    /// `count` of each, whose names begin with the three letters.
    fn new(letters: [&str; 3], count: usize) -> Self {
        let [values, high, low] =
            letters.map(|letter| (0..count).map(|i| format!("{letter}{i}")).collect());
        Self {
            values,
            parts: [high, low],
        }
    }

    fn names(&self) -> String {
        let [high, low] = &self.parts;
        [&self.values, high, low]
            .map(|names| names.join(", "))
            .join(", ")
    }

    /// Reads four values from each of the addresses, in PTX.
    fn read(&self, addresses: impl IntoIterator<Item = String>) -> String {
        let fours = self.values.chunks(4).zip(addresses);
        fours
            .map(|(four, at)| format!("ld.shared.v4.b32 {{{}}}, [{at}];\n", four.join(", ")))
            .collect()
    }

    /// Splits the values: the nearest of 11 bits, and what is left. That of an infinity is NaN.
    fn split(&self) -> String {
        let [high, low] = &self.parts;
        let all = self.values.iter().zip(high.iter().zip(low));
        all.map(|(x, (h, l))| {
            format!(
                "add.u32 {h}, {x}, 0x1000; and.b32 {h}, {h}, 0xffffe000; sub.f32 {l}, {x}, {h};\n"
            )
        })
        .collect()
    }

    fn part<const N: usize>(&self, part: usize, of: [usize; N]) -> [&str; N] {
        of.map(|i| self.parts[part][i].as_str())
    }
}

/// Adds products of split floats to four sums, which take turns, so that none is waited for: those
/// with a rest first. `a` of the left ones are multiplied with `b` of the right ones for each sum.
fn split_products(
    sums: &[String],
    left: &Split,
    a: [usize; 4],
    right: &Split,
    b: impl Fn(usize) -> [usize; 2],
) -> String {
    let mut text = String::new();
    for (of_left, of_right) in [(1, 0), (0, 1), (0, 0)] {
        for (k, sums) in sums.chunks(4).enumerate() {
            let (a, b) = (left.part(of_left, a), right.part(of_right, b(k)));
            text += &product(sums, &a, b, "tf32");
        }
    }
    text
}

/// Four registers of each panel of 16-bit rows.
fn of_panels(how: How) -> Vec<Vec<String>> {
    (0..how.panels)
        .map(|panel| (0..4).map(|i| format!("a{}", 4 * panel + i)).collect())
        .collect()
}

/// Products of 16 own rows of each panel with a tile's in PTX: results, then where the thread's own
/// row, its row of the tile, and their chunks begin.
fn score_text(how: How) -> String {
    if how.dtype == DType::F32 {
        return score_split_text(how);
    }
    let (count, kind) = (how.panels * how.scores(), kind(how.dtype));
    let sums = registers(0, count);
    let [own, own_chunk, tile, tile_chunk] = [0, 1, 2, 3].map(|i| count + i);
    let left = of_panels(how);
    let names = left.concat().join(", ");
    let mut text = format!("{{ .reg .b32 {names}, b0, b1, b2, b3, p;\n");
    for sum in &sums {
        text += &format!("mov.f32 {sum}, 0f00000000;\n");
    }
    for i in 0..how.steps {
        // 16 features further: two chunks along the line, and then the next block of lines.
        let (chunk, block) = (i % 4 * 32, i / 4 * 128);
        let (a, b) = (block * how.rows(), block * how.columns);
        text += &format!("xor.b32 p, %{own_chunk}, {chunk}; add.u32 p, p, %{own};\n");
        for (panel, four) in left.iter().enumerate() {
            let (four, at) = (four.join(", "), a + panel * 64 * 128);
            text += &format!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{four}}}, [p + {at}];\n");
        }
        text += &format!("xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n");
        for j in 0..how.columns / 16 {
            let at = b + j * 16 * 128;
            text += &format!(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0, b1, b2, b3}}, [p + {at}];\n"
            );
            for (a, sums) in left.iter().zip(sums.chunks(how.scores())) {
                let eight = &sums[8 * j..8 * j + 8];
                text += &product(&eight[..4], a, ["b0", "b1"], kind);
                text += &product(&eight[4..], a, ["b2", "b3"], kind);
            }
        }
    }
    text + "}"
}

/// [`score_text`] of floats that are split.
fn score_split_text(how: How) -> String {
    let count = how.scores();
    let sums = registers(0, count);
    let [own, own_chunk, tile, tile_chunk] = [0, 1, 2, 3].map(|i| count + i);
    // Two own rows, and four of the tile at a time.
    let (left, right) = (
        Split::new(["x", "h", "l"], 8),
        Split::new(["y", "g", "m"], 16),
    );
    let mut text = format!("{{ .reg .b32 {}, {}, p;\n", left.names(), right.names());
    for sum in &sums {
        text += &format!("mov.f32 {sum}, 0f00000000;\n");
    }
    for i in 0..how.steps {
        // 16 features further: four chunks along the line, and then the next block of lines.
        let (chunk, block) = (i % 2 * 64, i / 2 * 128);
        let (a, b) = (block * how.rows(), block * how.columns);
        text += &format!("xor.b32 p, %{own_chunk}, {chunk}; add.u32 p, p, %{own};\n");
        text += &left.read([0, 8].map(|line| format!("p + {}", a + line * 128)));
        text += &left.split();
        text += &format!("xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n");
        for (j, four) in sums.chunks(16).enumerate() {
            let line = |k: usize| (4 * j + k) * 8;
            text += &right.read((0..4).map(|k| format!("p + {}", b + line(k) * 128)));
            text += &right.split();
            // Two of a thread's four features, and then the others.
            for first in [0, 2] {
                let a = [first, first + 4, first + 1, first + 5];
                let b = |k| [4 * k + first, 4 * k + first + 1];
                text += &split_products(four, &left, a, &right, b);
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
        (at + line * 128u32, ((lane % 4u32) ^ swizzle(line)) * 16u32)
    } else if comptime!(left) {
        (
            at + lane % 16u32 * 128u32,
            ((lane / 16u32) ^ (lane % 8u32)) * 16u32,
        )
    } else {
        let line = lane / 16u32 * 8u32 + lane % 8u32;
        (
            at + line * 128u32,
            ((lane / 8u32 % 2u32) ^ (lane % 8u32)) * 16u32,
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
    // A warp has 16 rows of a panel.
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
    let (count, words) = (how.panels * how.sums(), how.panels * how.words());
    let kind = kind(how.dtype);
    let sums = registers(0, count);
    let weights = registers(2 * count, words);
    let (tile, tile_chunk) = (2 * count + words, 2 * count + words + 1);
    let mut text = String::from("{ .reg .b32 b0, b1, b2, b3, p;\n");
    text += &moves(count);
    for j in 0..how.steps {
        let (chunk, block) = (j % 4 * 32, j / 4 * how.columns * 128);
        text += &format!("xor.b32 p, %{tile_chunk}, {chunk}; add.u32 p, p, %{tile};\n");
        for i in 0..how.columns / 16 {
            let at = block + i * 16 * 128;
            text += &format!(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{b0, b1, b2, b3}}, [p + {at}];\n"
            );
            let panels = sums.chunks(how.sums()).zip(weights.chunks(how.words()));
            for (sums, weights) in panels {
                let (eight, a) = (&sums[8 * j..8 * j + 8], &weights[4 * i..4 * i + 4]);
                text += &product(&eight[..4], a, ["b0", "b1"], kind);
                text += &product(&eight[4..], a, ["b2", "b3"], kind);
            }
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
    let (left, right) = (
        Split::new(["x", "h", "l"], 4),
        Split::new(["y", "g", "m"], 8),
    );
    let mut text = format!("{{ .reg .b32 {}, {};\n", left.names(), right.names());
    text += &moves(count);
    for (i, four) in weights.chunks(4).enumerate() {
        for (to, from) in left.values.iter().zip(four) {
            text += &format!("mov.b32 {to}, {from};\n");
        }
        text += &left.split();
        for (j, some) in sums.chunks(16).enumerate().take(how.steps.div_ceil(2)) {
            let at = (j * how.columns + i * 8) * 128;
            text += &right.read([even, odd].map(|line| format!("%{line} + {at}")));
            text += &right.split();
            // Weights are in the order of rows, operands in that of columns.
            text += &split_products(some, &left, [0, 2, 1, 3], &right, |k| [k, k + 4]);
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
        let chunk = ((lane / 4u32) ^ swizzle(line)) * 16u32;
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
