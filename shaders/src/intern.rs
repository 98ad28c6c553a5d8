//! Compile-time arguments of kernels, each kept once.
//!
//! CubeCL clones, hashes and compares all compile-time arguments at every launch. Those that hold
//! lists go behind a pointer with a hash that is computed once.

use std::{
    collections::HashSet,
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
};

/// A value that an [`Interner`] keeps.
pub(crate) struct Interned<T>(Arc<Hashed<T>>);

struct Hashed<T> {
    hash: u64,
    value: T,
}

/// Keeps equal values once. It grows as the set of compiled kernels does.
pub(crate) struct Interner<T>(Mutex<HashSet<Interned<T>>>);

impl<T: Hash + Eq> Interner<T> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(HashSet::new()))
    }

    /// The kept value that equals this one.
    pub(crate) fn intern(&self, value: T) -> Interned<T> {
        // Fixed keys: names of kernels are made from the hash, and should not change between runs.
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        let hash = hasher.finish();
        let new = Interned(Arc::new(Hashed { hash, value }));
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(&new) {
            return known.clone();
        }
        kept.insert(new.clone());
        new
    }
}

impl<T> Clone for Interned<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Deref for Interned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T: PartialEq> PartialEq for Interned<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || self.0.hash == other.0.hash && self.0.value == other.0.value
    }
}

impl<T: Eq> Eq for Interned<T> {}

impl<T> Hash for Interned<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl<T: Debug> Debug for Interned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.value.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_kept_once_and_others_apart() {
        let kept = Interner::new();
        let (a, b, c) = (
            kept.intern(vec![1, 2]),
            kept.intern(vec![1, 2]),
            kept.intern(vec![2, 1]),
        );
        assert!(Arc::ptr_eq(&a.0, &b.0));
        assert_ne!(a, c);
        assert_eq!((&*a, &*c), (&vec![1, 2], &vec![2, 1]));
    }

    #[test]
    fn values_of_two_interners_are_compared_by_value() {
        let (a, b) = (Interner::new().intern("x"), Interner::new().intern("x"));
        assert_eq!(a, b);
    }
}
