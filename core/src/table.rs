//! What a thread remembers.

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::{BuildHasherDefault, Hash, Hasher},
};

/// Mixes words by multiplication: keys are short and not chosen by an adversary.
#[derive(Default)]
pub(crate) struct Mix(u64);

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

/// A table of one thread, so that nobody waits for a lock. It is emptied when it has grown large,
/// so that a program with ever new shapes does not grow for ever.
pub(crate) struct Table<K, V>(RefCell<HashMap<K, V, BuildHasherDefault<Mix>>>);

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Eq + Hash, V: Clone> Table<K, V> {
    const LIMIT: usize = 1 << 16;

    pub(crate) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: std::borrow::Borrow<Q>,
    {
        self.0.borrow().get(key).cloned()
    }

    pub(crate) fn insert(&self, key: K, value: V) {
        let mut table = self.0.borrow_mut();
        if table.len() >= Self::LIMIT {
            table.clear();
        }
        table.insert(key, value);
    }
}
