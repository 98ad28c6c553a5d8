//! The types of tensors, and what the blocks of those that are quantized hold.
//!
//! A quantized row is cut into blocks of 32 or 256 elements. A block holds small whole numbers and
//! what they are multiplied by; all arithmetic here is in f32, in the order in which ggml does it,
//! so that the results are the same to the bit.

use anymesh_core::{DType, f16};

/// The type of the elements of a tensor in a GGUF file.
///
/// ```
/// # use anymesh_checkpoint::gguf::TensorType;
/// let q4_k = TensorType::of(12).unwrap();
/// assert_eq!((q4_k.name(), q4_k.block(), q4_k.bytes()), ("Q4_K", 256, 144));
/// ```
#[derive(Clone, Copy)]
pub struct TensorType {
    id: u32,
    name: &'static str,
    block: usize,
    bytes: usize,
    dtype: DType,
    unpack: Option<Unpack>,
}

/// Writes the elements of one block. Both slices have the lengths that the type says.
pub(super) type Unpack = fn(&[u8], &mut [f32]);

/// The types that are read.
static TYPES: [TensorType; 13] = [
    plain(0, "F32", 4, DType::F32),
    plain(1, "F16", 2, DType::F16),
    plain(30, "BF16", 2, DType::BF16),
    plain(28, "F64", 8, DType::F64),
    plain(26, "I32", 4, DType::I32),
    plain(27, "I64", 8, DType::I64),
    quantized(2, "Q4_0", 32, 18, q4_0),
    quantized(3, "Q4_1", 32, 20, q4_1),
    quantized(6, "Q5_0", 32, 22, q5_0),
    quantized(7, "Q5_1", 32, 24, q5_1),
    quantized(8, "Q8_0", 32, 34, q8_0),
    quantized(12, "Q4_K", 256, 144, q4_k),
    quantized(14, "Q6_K", 256, 210, q6_k),
];

/// The other types of ggml, by their names.
const FOREIGN: [(u32, &str); 22] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (13, "Q5_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

const fn plain(id: u32, name: &'static str, bytes: usize, dtype: DType) -> TensorType {
    TensorType {
        id,
        name,
        block: 1,
        bytes,
        dtype,
        unpack: None,
    }
}

const fn quantized(
    id: u32,
    name: &'static str,
    block: usize,
    bytes: usize,
    unpack: Unpack,
) -> TensorType {
    TensorType {
        id,
        name,
        block,
        bytes,
        dtype: DType::F32,
        unpack: Some(unpack),
    }
}

impl TensorType {
    /// The type with a number; `None` where it is not read here.
    pub fn of(id: u32) -> Option<&'static Self> {
        TYPES.iter().find(|kind| kind.id == id)
    }

    /// The name of a type that is not read here.
    pub(super) fn foreign(id: u32) -> String {
        FOREIGN
            .iter()
            .find(|(known, _)| *known == id)
            .map_or_else(|| format!("number {id}"), |(_, name)| name.to_string())
    }

    /// Its name in ggml, such as `Q4_K`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// How many elements a block has; 1 where the type is not quantized.
    pub fn block(&self) -> usize {
        self.block
    }

    /// How many bytes a block has.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What its elements are read as.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How a block is unpacked, where the type is quantized.
    pub(super) fn unpack(&self) -> Option<Unpack> {
        self.unpack
    }
}

impl PartialEq for TensorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for TensorType {}

impl std::fmt::Debug for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// Nibbles: the low ones are the first half of the block, the high ones the second.
fn nibbles(quants: &[u8], out: &mut [f32], number: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(quants.len());
    for ((q, low), high) in quants.iter().zip(low).zip(high) {
        *low = number(q & 15);
        *high = number(q >> 4);
    }
}

/// Nibbles, and their fifth bits in a word, one for each element in order.
fn five_bits(bits: &[u8], quants: &[u8], out: &mut [f32], number: impl Fn(u8) -> f32) {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    let fifth = |i: usize| (((bits >> i) & 1) as u8) << 4;
    let (low, high) = out.split_at_mut(16);
    for (i, ((q, low), high)) in quants.iter().zip(low).zip(high).enumerate() {
        *low = number(q & 15 | fifth(i));
        *high = number(q >> 4 | fifth(i + 16));
    }
}

/// A scale; 32 numbers of 4 bits, less 8.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    nibbles(&block[2..], out, |q| d * (f32::from(q) - 8.0));
}

/// A scale and an offset; 32 numbers of 4 bits.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block), half(&block[2..]));
    nibbles(&block[4..], out, |q| d * f32::from(q) + m);
}

/// A scale; the fifth bits, and 32 numbers of 4 bits, less 16.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    five_bits(&block[2..6], &block[6..], out, |q| {
        d * (f32::from(q) - 16.0)
    });
}

/// A scale and an offset; the fifth bits, and 32 numbers of 4 bits.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block), half(&block[2..]));
    five_bits(&block[4..8], &block[8..], out, |q| d * f32::from(q) + m);
}

/// A scale; 32 signed bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block);
    for (q, out) in block[2..].iter().zip(out) {
        *out = f32::from(*q as i8) * d;
    }
}

/// A scale of scales and one of offsets; eight of each in 6 bits; then 4 times 32 bytes, whose low
/// nibbles are one group of 32 and whose high ones the next.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half(block), half(&block[2..]));
    let packed = &block[4..16];
    for (pair, (quants, out)) in block[16..]
        .chunks_exact(32)
        .zip(out.chunks_exact_mut(64))
        .enumerate()
    {
        let [first, second] = [2 * pair, 2 * pair + 1].map(|group| {
            let (scale, offset) = six_bits(packed, group);
            (d * f32::from(scale), dmin * f32::from(offset))
        });
        let (low, high) = out.split_at_mut(32);
        for ((q, low), high) in quants.iter().zip(low).zip(high) {
            *low = first.0 * f32::from(q & 15) - first.1;
            *high = second.0 * f32::from(q >> 4) - second.1;
        }
    }
}

/// The scale and the offset of one of eight groups, of 6 bits each. Those of the first four are the
/// low bits of bytes 0 to 3 and 4 to 7; those of the others have their low 4 bits in bytes 8 to 11
/// and their high 2 above those of the first four.
fn six_bits(packed: &[u8], group: usize) -> (u8, u8) {
    match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => {
            let low = packed[group + 4];
            let high = |at: usize| packed[at] >> 6 << 4;
            (low & 15 | high(group - 4), low >> 4 | high(group))
        }
    }
}

/// Low 4 bits and high 2 bits of 256 numbers, less 32; 16 signed scales, each for 16 of them; a
/// scale of those. Each half of the block has 64 bytes of low bits, whose nibbles are quarters 0
/// and 1 (low) and 2 and 3 (high) of it, and 32 bytes of high bits, two for each quarter.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = (&rest[..16], half(&rest[16..]));
    let halves = low.chunks_exact(64).zip(high.chunks_exact(32));
    for (((low, high), scales), out) in halves
        .zip(scales.chunks_exact(8))
        .zip(out.chunks_exact_mut(128))
    {
        for (quarter, out) in out.chunks_exact_mut(32).enumerate() {
            let low = &low[32 * (quarter % 2)..][..32];
            let (nibble, pair) = (4 * (quarter / 2), 2 * quarter);
            let scale = |i: usize| d * f32::from(scales[2 * quarter + i] as i8);
            let scale = [scale(0), scale(1)];
            for (i, ((low, high), out)) in low.iter().zip(high).zip(out).enumerate() {
                let q = low >> nibble & 15 | (high >> pair & 3) << 4;
                *out = scale[i / 16] * (f32::from(q) - 32.0);
            }
        }
    }
}
