//! What a thread remembers.

use anymesh_kernel::Mixed;
use std::{cell::RefCell, hash::Hash};

/// A table of one thread, so that nobody waits for a lock. It is emptied when it has grown large,
/// so that a program with ever new shapes does not grow for ever.
pub(crate) struct Table<K, V>(RefCell<Mixed<K, V>>);

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
