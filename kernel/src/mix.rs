//! A hasher for keys that a program makes itself.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// Mixes words by multiplication: for keys that are short and not chosen by an adversary, such as
/// shapes, addresses and serial numbers.
///
/// ```
/// use anymesh_kernel::Mixed;
/// let mut seen = Mixed::<u64, &str>::default();
/// seen.insert(512, "first");
/// assert_eq!(seen.get(&512), Some(&"first"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Mix(u64);

/// A table whose keys are [mixed](Mix).
pub type Mixed<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}
