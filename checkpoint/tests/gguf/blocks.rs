//! Every type of blocks, packed here by how it is described and held against the plain formula.

use crate::build::Build;
use crate::common::{Random, Temporary};
use anymesh_checkpoint::Source;
use anymesh_checkpoint::gguf::TensorType;
use anymesh_core::{bf16, f16};

/// A packed block and what it holds.
type Block = (Vec<u8>, Vec<f32>);

fn scale(random: &mut Random) -> f16 {
    f16::from_f32((random.below(4001) as f32 - 2000.0) / 977.0)
}

fn quants(random: &mut Random, count: usize, below: usize) -> Vec<u8> {
    (0..count).map(|_| random.below(below) as u8).collect()
}

/// 16 bytes, the first half of the numbers in their low nibbles.
fn nibbles(quants: &[u8]) -> Vec<u8> {
    (0..16)
        .map(|i| quants[i] & 15 | (quants[i + 16] & 15) << 4)
        .collect()
}

/// The fifth bits of 32 numbers.
fn fifth(quants: &[u8]) -> [u8; 4] {
    let bits = (0..32).fold(0u32, |bits, i| bits | u32::from(quants[i] >> 4) << i);
    bits.to_le_bytes()
}

fn q4_0(random: &mut Random) -> Block {
    let (d, q) = (scale(random), quants(random, 32, 16));
    let block = [d.to_le_bytes().to_vec(), nibbles(&q)].concat();
    let number = |q: &u8| d.to_f32() * f32::from(i16::from(*q) - 8);
    (block, q.iter().map(number).collect())
}

fn q4_1(random: &mut Random) -> Block {
    let (d, m, q) = (scale(random), scale(random), quants(random, 32, 16));
    let block = [
        d.to_le_bytes().to_vec(),
        m.to_le_bytes().to_vec(),
        nibbles(&q),
    ]
    .concat();
    let number = |q: &u8| d.to_f32() * f32::from(*q) + m.to_f32();
    (block, q.iter().map(number).collect())
}

fn q5_0(random: &mut Random) -> Block {
    let (d, q) = (scale(random), quants(random, 32, 32));
    let block = [d.to_le_bytes().to_vec(), fifth(&q).to_vec(), nibbles(&q)].concat();
    let number = |q: &u8| d.to_f32() * f32::from(i16::from(*q) - 16);
    (block, q.iter().map(number).collect())
}

fn q5_1(random: &mut Random) -> Block {
    let (d, m, q) = (scale(random), scale(random), quants(random, 32, 32));
    let block = [
        d.to_le_bytes().to_vec(),
        m.to_le_bytes().to_vec(),
        fifth(&q).to_vec(),
        nibbles(&q),
    ]
    .concat();
    let number = |q: &u8| d.to_f32() * f32::from(*q) + m.to_f32();
    (block, q.iter().map(number).collect())
}

fn q8_0(random: &mut Random) -> Block {
    let (d, q) = (scale(random), quants(random, 32, 256));
    let block = [d.to_le_bytes().to_vec(), q.clone()].concat();
    let number = |q: &u8| d.to_f32() * f32::from(*q as i8);
    (block, q.iter().map(number).collect())
}

fn q4_k(random: &mut Random) -> Block {
    let (d, dmin) = (scale(random), scale(random));
    let (scales, offsets) = (quants(random, 8, 64), quants(random, 8, 64));
    let q = quants(random, 256, 16);
    let mut packed = [0u8; 12];
    for i in 0..4 {
        packed[i] = scales[i] | scales[i + 4] >> 4 << 6;
        packed[i + 4] = offsets[i] | offsets[i + 4] >> 4 << 6;
        packed[i + 8] = scales[i + 4] & 15 | (offsets[i + 4] & 15) << 4;
    }
    let byte = |i: usize| {
        let first = i / 32 * 64 + i % 32;
        q[first] | q[first + 32] << 4
    };
    let block = [
        d.to_le_bytes().to_vec(),
        dmin.to_le_bytes().to_vec(),
        packed.to_vec(),
        (0..128).map(byte).collect(),
    ]
    .concat();
    let number = |i: usize| {
        let (scale, offset) = (f32::from(scales[i / 32]), f32::from(offsets[i / 32]));
        d.to_f32() * scale * f32::from(q[i]) - dmin.to_f32() * offset
    };
    (block, (0..256).map(number).collect())
}

fn q6_k(random: &mut Random) -> Block {
    let d = scale(random);
    let (scales, q) = (quants(random, 16, 256), quants(random, 256, 64));
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (i, q) in q.iter().enumerate() {
        // 128 numbers are four quarters of 32.
        let (half, quarter, at) = (i / 128, i % 128 / 32, i % 32);
        low[64 * half + 32 * (quarter % 2) + at] |= (q & 15) << (4 * (quarter / 2));
        high[32 * half + at] |= q >> 4 << (2 * quarter);
    }
    let block = [
        low.to_vec(),
        high.to_vec(),
        scales.clone(),
        d.to_le_bytes().to_vec(),
    ]
    .concat();
    let number =
        |i: usize| d.to_f32() * f32::from(scales[i / 16] as i8) * f32::from(i16::from(q[i]) - 32);
    (block, (0..256).map(number).collect())
}

#[test]
fn quantized_blocks_hold_what_their_formula_says() {
    let kinds: [(u32, fn(&mut Random) -> Block); 7] = [
        (2, q4_0),
        (3, q4_1),
        (6, q5_0),
        (7, q5_1),
        (8, q8_0),
        (12, q4_k),
        (14, q6_k),
    ];
    let folder = Temporary::here();
    let mut random = Random(17);
    for (id, block) in kinds {
        let kind = TensorType::of(id).expect("a type that is read");
        // Three rows of four blocks.
        let blocks: Vec<Block> = (0..12).map(|_| block(&mut random)).collect();
        let data: Vec<u8> = blocks.iter().flat_map(|b| b.0.clone()).collect();
        let expected: Vec<u8> = blocks
            .iter()
            .flat_map(|b| b.1.iter().flat_map(|x| x.to_le_bytes()))
            .collect();
        let row = 4 * kind.block() as u64;
        let file = Build::new()
            .tensor("w", &[row, 3], id, data)
            .open(&folder)
            .expect("opens");
        assert_eq!(file.tensor_type("w"), Some(kind));
        assert_eq!(file.stored_bytes("w"), Some(12 * kind.bytes()), "{kind}");
        assert_eq!(
            file.info("w").expect("it is there").to_string(),
            format!("f32[3, {row}]")
        );
        assert_eq!(file.read_all("w").expect("reads"), expected, "{kind}");
    }
}

/// A number of each nibble and byte that can be read without a computer.
#[test]
fn a_block_by_hand() {
    let folder = Temporary::here();
    // 0.5 is 0x3800 in 16 bits.
    let mut block = vec![0x00, 0x38, 0xf0];
    block.resize(18, 0x88);
    let file = Build::new().tensor("w", &[32], 2, block).open(&folder);
    let bytes = file.expect("opens").read_all("w").expect("reads");
    let floats: Vec<f32> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x))
        .collect();
    assert_eq!((floats[0], floats[16], floats[1]), (-4.0, 3.5, 0.0));
}

#[test]
fn other_types_keep_their_bits() {
    let folder = Temporary::here();
    let half = [0x7e01u16, 0xfc00, 0x0001, 0x3c00]
        .map(u16::to_le_bytes)
        .concat();
    let brain = [1.0f32, -2.5, 1e30, f32::NAN].map(|x| bf16::from_f32(x).to_le_bytes());
    let long = [i64::MIN, -1, 0, 7].map(i64::to_le_bytes).concat();
    let file = Build::new()
        .tensor("f16", &[2, 2], 1, half.clone())
        .tensor("bf16", &[4], 30, brain.concat())
        .tensor("i64", &[1, 4, 1], 27, long.clone())
        .tensor("scalar", &[], 0, 3f32.to_le_bytes().to_vec())
        .tensor("nothing", &[32, 0], 2, vec![])
        .open(&folder)
        .expect("opens");
    let tensor = |name: &str| {
        (
            file.info(name).expect("it is there").to_string(),
            file.read_all(name).expect("reads"),
        )
    };
    assert_eq!(tensor("f16"), ("f16[2, 2]".into(), half));
    assert_eq!(tensor("bf16"), ("bf16[4]".into(), brain.concat()));
    assert_eq!(tensor("i64"), ("i64[1, 4, 1]".into(), long));
    assert_eq!(
        tensor("scalar"),
        ("f32[]".into(), 3f32.to_le_bytes().to_vec())
    );
    assert_eq!(tensor("nothing"), ("f32[0, 32]".into(), vec![]));
}
