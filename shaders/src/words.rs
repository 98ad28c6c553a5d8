//! Elements as they lie in memory: every buffer is a list of `u32` words, whatever its dtype.
//!
//! Shader languages have no 8-bit and 16-bit storage, so those dtypes are packed in words and
//! converted by shifts; 32-bit dtypes are bit casts; 64-bit dtypes are two words (on devices that
//! can compute with them). Kernels work on four consecutive elements at a time: *lanes*.

use crate::nvidia;
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// Two words.
pub(crate) type U2 = Vector<u32, Const<2>>;
/// Four words, or four `u32` lanes.
pub(crate) type U4 = Vector<u32, Const<4>>;
/// Four `u64` lanes.
pub(crate) type Q4 = Vector<u64, Const<4>>;
/// Four `f32` lanes.
pub(crate) type F4 = Vector<f32, Const<4>>;
/// Four `i32` lanes.
pub(crate) type I4 = Vector<i32, Const<4>>;
/// Four logical lanes.
pub(crate) type B4 = Vector<bool, Const<4>>;
/// Four `f64` lanes.
pub(crate) type D4 = Vector<f64, Const<4>>;
/// Four `i64` lanes.
pub(crate) type L4 = Vector<i64, Const<4>>;

// Four aligned elements of each size, as lanes of bits. `at` is the position of the first element.

#[cube]
pub(crate) fn lanes32(words: &[U4], at: usize) -> U4 {
    words[at / 4usize]
}

#[cube]
pub(crate) fn lanes16(words: &[U2], at: usize) -> U4 {
    let pair = words[at / 4usize];
    halves(pair.extract(0usize), pair.extract(1usize))
}

/// The halves of two words, low ones first.
#[cube]
pub(crate) fn halves(a: u32, b: u32) -> U4 {
    let mut out = U4::empty();
    out.insert(0usize, a & 0xffffu32);
    out.insert(1usize, a >> 16u32);
    out.insert(2usize, b & 0xffffu32);
    out.insert(3usize, b >> 16u32);
    out
}

#[cube]
pub(crate) fn lanes8(words: &[u32], at: usize) -> U4 {
    let word = words[at / 4usize];
    let mut out = U4::empty();
    #[unroll]
    for lane in 0..4usize {
        out.insert(lane, (word >> comptime!(lane as u32 * 8)) & 0xffu32);
    }
    out
}

#[cube]
pub(crate) fn lanes64(words: &[U4], at: usize) -> Q4 {
    let (a, b) = (words[at / 2usize], words[at / 2usize + 1usize]);
    let mut out = Q4::empty();
    #[unroll]
    for lane in 0..2usize {
        out.insert(
            lane,
            join(
                a.extract(comptime!(2 * lane)),
                a.extract(comptime!(2 * lane + 1)),
            ),
        );
        out.insert(
            comptime!(lane + 2),
            join(
                b.extract(comptime!(2 * lane)),
                b.extract(comptime!(2 * lane + 1)),
            ),
        );
    }
    out
}

// One element of each size, as bits.

#[cube]
pub(crate) fn join(low: u32, high: u32) -> u64 {
    (high as u64) << 32u64 | (low as u64)
}

/// The bits of one element of a dtype of at most 32 bits.
#[cube]
pub(crate) fn bits_at(words: &[u32], at: usize, #[comptime] size: usize) -> u32 {
    if comptime!(size == 4) {
        words[at]
    } else if comptime!(size == 2) {
        (words[at / 2usize] >> ((at % 2usize) as u32 * 16u32)) & 0xffffu32
    } else {
        (words[at / 4usize] >> ((at % 4usize) as u32 * 8u32)) & 0xffu32
    }
}

/// The bits of one 64-bit element.
#[cube]
pub(crate) fn wide_at(words: &[u32], at: usize) -> u64 {
    join(words[at * 2usize], words[at * 2usize + 1usize])
}

// Lanes of bits back into words.

#[cube]
pub(crate) fn pack16(bits: U4) -> U2 {
    let mut out = U2::empty();
    out.insert(
        0usize,
        bits.extract(0usize) & 0xffffu32 | bits.extract(1usize) << 16u32,
    );
    out.insert(
        1usize,
        bits.extract(2usize) & 0xffffu32 | bits.extract(3usize) << 16u32,
    );
    out
}

#[cube]
pub(crate) fn pack8(bits: U4) -> u32 {
    let b = bits & U4::new(0xffu32);
    b.extract(0usize)
        | b.extract(1usize) << 8u32
        | b.extract(2usize) << 16u32
        | b.extract(3usize) << 24u32
}

#[cube]
pub(crate) fn split64(bits: Q4, #[comptime] half: usize) -> U4 {
    let (a, b) = (
        bits.extract(comptime!(2 * half)),
        bits.extract(comptime!(2 * half + 1)),
    );
    let mut out = U4::empty();
    out.insert(0usize, a as u32);
    out.insert(1usize, (a >> 32u64) as u32);
    out.insert(2usize, b as u32);
    out.insert(3usize, (b >> 32u64) as u32);
    out
}

// Small floats from and to f32. All round to nearest even.

/// Expands a float with `mantissa` bits and exponent bias `bias` given as bits without its sign,
/// exactly.
#[cube]
fn widen(magnitude: U4, #[comptime] mantissa: u32, #[comptime] bias: i32) -> F4 {
    // Put the fields where f32 has them, then move the exponent's bias by a multiplication: it also
    // makes subnormals right, and does not meet f32 subnormals on the way but for zero exponents,
    // which are handled by subtraction of the hidden one.
    let shift = comptime!(23 - mantissa);
    let normal = F4::reinterpret(
        (magnitude << U4::new(shift)) + U4::new(comptime!(((127 - bias) as u32) << 23)),
    );
    let hidden = U4::new(comptime!(((128 - bias) as u32) << 23));
    let subnormal =
        F4::reinterpret((magnitude << U4::new(shift)) + hidden) - F4::reinterpret(hidden);
    let small = magnitude.less_than(&U4::new(comptime!(1u32 << mantissa)));
    select_many(small, subnormal, normal)
}

/// Rounds `|x|` to a small float; the exponent runs on past the format's maximum.
#[cube]
fn shorten(x: F4, #[comptime] mantissa: u32, #[comptime] bias: i32) -> U4 {
    let shift = comptime!(23 - mantissa);
    let bits = U4::reinterpret(x) & U4::new(0x7fff_ffffu32);
    let rebias = U4::new(comptime!(((127 - bias) as u32) << 23));
    let odd = (bits >> U4::new(shift)) & U4::new(1u32);
    let normal =
        (bits - rebias + U4::new(comptime!((1u32 << (shift - 1)) - 1)) + odd) >> U4::new(shift);
    // Below the smallest normal: adding a power of two whose last place is the subnormal spacing
    // makes the adder round.
    let magic = U4::new(comptime!(((128 - bias) as u32 + shift) << 23));
    let subnormal = U4::reinterpret(F4::reinterpret(bits) + F4::reinterpret(magic)) - magic;
    let small = bits.less_than(&U4::new(comptime!(((128 - bias) as u32) << 23)));
    select_many(small, subnormal, normal)
}

#[cube]
fn sign_to_f32(sign: U4, value: F4) -> F4 {
    F4::reinterpret(U4::reinterpret(value) | sign)
}

#[cube]
pub(crate) fn bf16_to_f32(bits: U4) -> F4 {
    F4::reinterpret(bits << U4::new(16u32))
}

#[cube]
pub(crate) fn f32_to_bf16(x: F4) -> U4 {
    let bits = U4::reinterpret(x);
    let odd = (bits >> U4::new(16u32)) & U4::new(1u32);
    let rounded = (bits + U4::new(0x7fffu32) + odd) >> U4::new(16u32);
    let nan = (bits & U4::new(0x7fff_ffffu32)).greater_than(&U4::new(0x7f80_0000u32));
    select_many(nan, (bits >> U4::new(16u32)) | U4::new(0x40u32), rounded)
}

/// f16, or f8e5m2 placed in the upper byte of an f16 (it has the same exponent).
#[cube]
pub(crate) fn f16_to_f32(bits: U4) -> F4 {
    let magnitude = bits & U4::new(0x7fffu32);
    let finite = widen(magnitude, 10u32, 15i32);
    let special = F4::reinterpret((magnitude << U4::new(13u32)) | U4::new(0x7f80_0000u32));
    let value = select_many(magnitude.less_than(&U4::new(0x7c00u32)), finite, special);
    sign_to_f32((bits & U4::new(0x8000u32)) << U4::new(16u32), value)
}

/// A float with IEEE-like infinities: f16 (10 mantissa bits) or f8e5m2 (2).
#[cube]
pub(crate) fn f32_to_ieee(x: F4, #[comptime] mantissa: u32) -> U4 {
    let bits = U4::reinterpret(x);
    let magnitude = bits & U4::new(0x7fff_ffffu32);
    let infinity = U4::new(comptime!(31u32 << mantissa));
    let finite = shorten(x, mantissa, 15i32);
    // From 2^16 on everything is infinite; below, rounding may still carry into it.
    let big = magnitude.greater_equal(&U4::new(0x4780_0000u32));
    let value = select_many(big, infinity, finite);
    let nan = magnitude.greater_than(&U4::new(0x7f80_0000u32));
    let value = select_many(
        nan,
        infinity | U4::new(comptime!(1u32 << (mantissa - 1))),
        value,
    );
    value | ((bits >> U4::new(31u32)) << U4::new(comptime!(mantissa + 5)))
}

#[cube]
pub(crate) fn f8e4m3_to_f32(bits: U4) -> F4 {
    let magnitude = bits & U4::new(0x7fu32);
    let finite = widen(magnitude, 3u32, 7i32);
    let nan = F4::reinterpret(U4::new(0x7fc0_0000u32) | (magnitude & U4::new(0u32)));
    let value = select_many(magnitude.equal(&U4::new(0x7fu32)), nan, finite);
    sign_to_f32((bits & U4::new(0x80u32)) << U4::new(24u32), value)
}

#[cube]
pub(crate) fn f32_to_f8e4m3(x: F4) -> U4 {
    let bits = U4::reinterpret(x);
    let magnitude = bits & U4::new(0x7fff_ffffu32);
    let finite = shorten(x, 3u32, 7i32);
    // 464 is half way between the largest value, 448, and the next step: ties to even keep it; all
    // above is NaN.
    let big = magnitude.greater_than(&U4::new(0x43e8_0000u32));
    select_many(big, U4::new(0x7fu32), finite) | ((bits >> U4::new(31u32)) << U4::new(7u32))
}

/// `f16`s, by the device's own conversion where it has one.
#[cube]
#[allow(unused_variables)]
fn half_to_f32(bits: U4) -> F4 {
    intrinsic!(|scope| match nvidia::is_target(scope) {
        true => nvidia::from_f16::expand(scope, bits),
        false => f16_to_f32::expand(scope, bits),
    })
}

/// To `bf16` or `f16`, by the device's own conversion where it has one.
#[cube]
#[allow(unused_variables)]
fn f32_to_half(x: F4, #[comptime] dtype: DType) -> U4 {
    intrinsic!(|scope| match (nvidia::is_target(scope), dtype) {
        (true, _) => nvidia::round16::expand(scope, x, dtype),
        (false, DType::BF16) => f32_to_bf16::expand(scope, x),
        (false, _) => f32_to_ieee::expand(scope, x, 10u32),
    })
}

/// Small floats by dtype: lanes of bits to f32.
#[cube]
pub(crate) fn small_to_f32(bits: U4, #[comptime] dtype: DType) -> F4 {
    if comptime!(dtype == DType::BF16) {
        bf16_to_f32(bits)
    } else if comptime!(dtype == DType::F16) {
        half_to_f32(bits)
    } else if comptime!(dtype == DType::F8E5M2) {
        f16_to_f32(bits << U4::new(8u32))
    } else if comptime!(dtype == DType::F8E4M3) {
        f8e4m3_to_f32(bits)
    } else {
        F4::reinterpret(bits)
    }
}

/// Small floats by dtype: f32 to lanes of bits.
#[cube]
pub(crate) fn f32_to_small(x: F4, #[comptime] dtype: DType) -> U4 {
    if comptime!(dtype == DType::BF16 || dtype == DType::F16) {
        f32_to_half(x, dtype)
    } else if comptime!(dtype == DType::F8E5M2) {
        f32_to_ieee(x, 2u32)
    } else if comptime!(dtype == DType::F8E4M3) {
        f32_to_f8e4m3(x)
    } else {
        U4::reinterpret(x)
    }
}
