//! A list that comes again with all of its memory where it lay.
//!
//! Nobody sees the memory in which a list only passes something on to itself, so it is not taken from
//! the pool: it has to be free when the list is queued, and whoever takes it later comes later in the
//! queue. So of all launches there is nothing to do but for those whose results somebody holds.

use super::{Origin, Step};
use crate::{
    memory::{Hold, place},
    pool::{Pieces, Pool},
    trace::Act,
};
use anymesh_kernel::{
    Buffer, Mixed,
    backend::{Buffers, Operands, Wanted},
};
use anymesh_shaders::Memory;
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// Where the memory of a list lies.
pub(super) struct Room {
    /// All that it takes on its way, in order, neighbours joined.
    ranges: Vec<Range<u64>>,
    /// For each launch its results.
    results: Vec<SmallVec<[At; 1]>>,
    /// Operands of the list whose memory some result takes.
    written: Vec<usize>,
}

/// Where a result is.
#[derive(Clone, Copy)]
enum At {
    /// In a piece of the pool that the list took.
    Piece(Piece),
    /// In the memory of an operand of the list.
    Operand(usize),
}

/// A piece of the pool, and how many bytes of it a result has.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    address: u64,
    size: u64,
    bytes: usize,
}

/// A result that is wanted.
pub(super) enum Result {
    Piece(Piece),
    Operand(Buffer),
}

impl Room {
    /// Of a list with operands at these addresses; nothing where it cannot be told.
    pub(super) fn new(pieces: Pieces, operands: &[u64], steps: &[Step]) -> Option<Self> {
        let mut taken = Mixed::<u64, u64>::default();
        let mut all: Vec<Range<u64>> = vec![];
        let mut results: Vec<SmallVec<[At; 1]>> = Vec::with_capacity(steps.len());
        for step in steps {
            for act in &step.memory {
                if let Act::Take { bytes, address } = *act {
                    taken.insert(address, bytes);
                    all.push(address..address + pieces.rounded(bytes));
                }
            }
            let piece = |address: u64, bytes: usize| {
                let size = *taken.get(&address)?;
                Some(At::Piece(Piece {
                    address,
                    size,
                    bytes,
                }))
            };
            let at = |origin: &Origin| match *origin {
                Origin::Taken { address, bytes } => piece(address, bytes),
                Origin::Operand { address, bytes, .. } => piece(address, bytes).or_else(|| {
                    let operand = operands.iter().position(|own| *own == address);
                    operand.map(At::Operand)
                }),
            };
            results.push(step.results.iter().map(at).collect::<Option<_>>()?);
        }
        all.sort_unstable_by_key(|range| (range.start, range.end));
        let mut ranges: Vec<Range<u64>> = vec![];
        for range in all {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        let operand = |at: &At| match at {
            At::Operand(k) => Some(*k),
            At::Piece(_) => None,
        };
        let mut written: Vec<usize> = results.iter().flatten().filter_map(operand).collect();
        written.sort_unstable();
        written.dedup();
        Some(Self {
            ranges,
            results,
            written,
        })
    }

    /// The results that are wanted, if all memory can lie where it lay once `given_up` is free.
    pub(super) fn fits(
        &self,
        pool: &mut Pool,
        wanted: &[Wanted],
        operands: usize,
        given_up: Operands<'_>,
    ) -> Option<Vec<Result>> {
        let given_up = |k: usize| given_up(k).filter(is_alone);
        if self.written.iter().any(|k| given_up(*k).is_none()) {
            return None;
        }
        // Results keep the operands that they are in; the memory of others comes back.
        let mut found = Vec::with_capacity(wanted.len());
        for wanted in wanted {
            let of_launch = self.results.get(wanted.launch as usize)?;
            found.push(match *of_launch.get(usize::from(wanted.result))? {
                At::Piece(piece) if pool.is_within_a_slab(piece.size, piece.address) => {
                    Result::Piece(piece)
                }
                At::Piece(_) => return None,
                At::Operand(k) => Result::Operand(given_up(k)?),
            });
        }
        let kept = |buffer: &Buffer| {
            let same = |result: &Result| matches!(result, Result::Operand(own) if own.same(buffer));
            found.iter().any(same)
        };
        let given: Vec<Range<u64>> = (0..operands)
            .filter_map(given_up)
            .filter(|buffer| !kept(buffer))
            .filter_map(|buffer| Some(place(buffer.get::<Memory>().ok()?)))
            .collect();
        let starts: Vec<u64> = given.iter().map(|range| range.start).collect();
        if !pool.will_be_free(&self.ranges, &starts) {
            return None;
        }
        let bytes: u64 = self
            .ranges
            .iter()
            .map(|range| range.end - range.start)
            .sum();
        let again: u64 = given.iter().map(|given| self.shared(given)).sum();
        pool.pass(bytes.saturating_sub(again));
        Some(found)
    }

    /// How many bytes of a range are among the list's own.
    fn shared(&self, range: &Range<u64>) -> u64 {
        let first = self.ranges.partition_point(|own| own.end <= range.start);
        let near = self.ranges[first..]
            .iter()
            .take_while(|own| own.start < range.end);
        near.map(|own| own.end.min(range.end) - own.start.max(range.start))
            .sum()
    }
}

/// Whether no other buffer shares the memory of this one.
fn is_alone(buffer: &Buffer) -> bool {
    let memory = buffer.get::<Memory>();
    memory.is_ok_and(|memory| Arc::strong_count(memory.owner()) == 1)
}

/// Takes what is wanted.
pub(super) fn taken(hold: &mut Hold<'_>, wanted: Vec<Result>) -> Option<Buffers> {
    hold.settle();
    let mut results = Buffers::with_capacity(wanted.len());
    for result in wanted {
        results.push(match result {
            Result::Operand(buffer) => buffer,
            Result::Piece(piece) if hold.pool().take_at(piece.size, piece.address) => {
                hold.memory(piece.address, piece.bytes).buffer()
            }
            Result::Piece(_) => return None,
        });
    }
    Some(results)
}
