//! Numbers that are simple enough to be the same in any language, so that peers begin with the same
//! weights and see the same tokens.

/// A number from -1 to 1 for each position of each stream.
pub(crate) fn noise(stream: u64, at: u64) -> f64 {
    let x = (stream << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 29)) >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

/// The stream of a parameter.
pub(crate) fn stream(name: &str) -> u64 {
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, hash).into()
}
