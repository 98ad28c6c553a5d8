//! Philox 4x32-10: random words as a pure function of a counter and a key.

use crate::words::U4;
use cubecl::prelude::*;

#[cube]
fn mul_high(a: U4, b: U4) -> U4 {
    a.mul_hi(b)
}

/// Word `which` at counter (`low`, `high`, `stream`, 0) under key (`seed_low`, `seed_high`).
#[cube]
pub(crate) fn word(
    low: U4,
    high: U4,
    stream: U4,
    seed_low: U4,
    seed_high: U4,
    #[comptime] which: u32,
) -> U4 {
    let (mut c0, mut c1, mut c2, mut c3) = (low, high, stream, U4::new(0u32));
    let (mut k0, mut k1) = (seed_low, seed_high);
    #[unroll]
    for round in 0..10u32 {
        if comptime!(round > 0) {
            k0 += U4::new(0x9E37_79B9u32);
            k1 += U4::new(0xBB67_AE85u32);
        }
        let (m0, m1) = (U4::new(0xD251_1F53u32), U4::new(0xCD9E_8D57u32));
        let (high0, low0) = (mul_high(c0, m0), c0 * m0);
        let (high1, low1) = (mul_high(c2, m1), c2 * m1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
    }
    if comptime!(which == 0) {
        c0
    } else if comptime!(which == 1) {
        c1
    } else if comptime!(which == 2) {
        c2
    } else {
        c3
    }
}
