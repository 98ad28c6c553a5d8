//! Plans that were made, by what they are for. What was not used for longest goes first.

use crate::{graph::Key, plan::Plan};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

/// Lists without a plan that are remembered.
const SEEN: usize = 1 << 16;

pub(crate) struct Cache {
    limit: usize,
    bytes: usize,
    clock: u64,
    plans: HashMap<u64, Kept>,
    /// The forms of lists that came, by their hashes.
    seen: HashSet<u64>,
}

struct Kept {
    key: Key,
    plan: Arc<Plan>,
    bytes: usize,
    used: u64,
}

impl Cache {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            bytes: 0,
            clock: 0,
            plans: HashMap::new(),
            seen: HashSet::new(),
        }
    }

    /// Whether a list comes for the first time, as far as is remembered.
    pub(crate) fn is_new(&mut self, key: &Key) -> bool {
        if self.seen.len() >= SEEN {
            self.seen.clear();
        }
        self.seen.insert(key.form())
    }

    /// The plan for this key. Keys are compared whole: two that share a hash are not the same.
    pub(crate) fn get(&mut self, key: &Key) -> Option<Arc<Plan>> {
        self.clock += 1;
        let kept = self.plans.get_mut(&key.hash())?;
        if kept.key != *key {
            return None;
        }
        kept.used = self.clock;
        Some(kept.plan.clone())
    }

    pub(crate) fn insert(&mut self, key: Key, plan: Arc<Plan>) {
        let bytes = key.bytes() + plan.bytes();
        if bytes > self.limit {
            return;
        }
        while self.bytes + bytes > self.limit {
            let oldest = self.plans.iter().min_by_key(|(_, kept)| kept.used);
            let Some(oldest) = oldest.map(|(hash, _)| *hash) else {
                break;
            };
            self.remove(oldest);
        }
        self.remove(key.hash());
        self.bytes += bytes;
        let (hash, used) = (key.hash(), self.clock);
        let kept = Kept {
            key,
            plan,
            bytes,
            used,
        };
        self.plans.insert(hash, kept);
    }

    fn remove(&mut self, hash: u64) {
        if let Some(gone) = self.plans.remove(&hash) {
            self.bytes -= gone.bytes;
        }
    }
}
