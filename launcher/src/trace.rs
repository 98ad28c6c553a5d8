//! What a thread does for a launch of a list: the memory that it takes and gives back, and what it has
//! launched.

use crate::replay::Held;
use std::cell::RefCell;

/// What is done to the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Take { bytes: u64, address: u64 },
    Give { address: u64 },
}

/// What one launch of a list comes to.
#[derive(Default)]
pub(crate) struct Trace {
    pub(crate) memory: Vec<Act>,
    pub(crate) launches: Vec<Held>,
}

thread_local! {
    static TRACE: RefCell<Option<Trace>> = const { RefCell::new(None) };
}

/// From here on it is written down.
pub(crate) fn begin() {
    TRACE.set(Some(Trace::default()));
}

/// What was done since it began.
pub(crate) fn end() -> Option<Trace> {
    TRACE.take()
}

fn note(write: impl FnOnce(&mut Trace)) {
    TRACE.with_borrow_mut(|trace| trace.as_mut().map(write));
}

pub(crate) fn took(bytes: u64, address: u64) {
    note(|trace| trace.memory.push(Act::Take { bytes, address }));
}

pub(crate) fn gave(address: u64) {
    note(|trace| trace.memory.push(Act::Give { address }));
}

pub(crate) fn launched(held: &Held) {
    note(|trace| trace.launches.push(held.clone()));
}
