//! Which parts of a device's memory are in use: numbers only, no driver.
//!
//! Memory is taken from the driver in slabs and cut into pieces. A piece that is given back joins the
//! free pieces beside it. The smallest free piece that is large enough is taken, found by its size in
//! an ordered set of those that are free. Pieces know the one before them and where they end, so that
//! neighbours are looked up by address.
//!
//! There is one queue of work, so a piece may be taken again as soon as it is given back: what is
//! queued later runs later.

use anymesh_kernel::Mixed;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// Pieces begin and end at multiples of this, which is what the fastest loads, cuBLASLt and bindings of
/// wgpu want.
pub(crate) const ALIGNMENT: u64 = 512;

/// Up to here pieces lie in slabs of their own, so that they do not cut up the large ones.
const SMALL: u64 = 1 << 20;

const SMALL_SLAB: u64 = 16 << 20;
const LARGE_SLAB: u64 = 64 << 20;

/// Slabs larger than that are rounded to this, the driver's pages.
const PAGE: u64 = 2 << 20;

/// So much may be taken from the driver for nothing.
const SPARE: u64 = 256 << 20;

/// Bytes in use and beside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// In buffers that are held.
    pub live: u64,
    /// The most that was live at a time.
    pub peak: u64,
    /// Taken from the driver and in no buffer: the next buffers lie there.
    pub cached: u64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    /// Where its slab begins.
    slab: u64,
    /// Where the piece before it begins; here, if it is the first of its slab.
    before: u64,
    free: bool,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    bytes: u64,
    small: bool,
}

/// The memory of a device, by address.
#[derive(Debug)]
pub(crate) struct Pool {
    kind: Pieces,
    slabs: BTreeMap<u64, Slab>,
    pieces: Mixed<u64, Piece>,
    /// Free pieces: of which kind, how large, where.
    free: BTreeSet<(bool, u64, u64)>,
    live: u64,
    peak: u64,
    reserved: u64,
}

/// What pieces of memory are to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pieces {
    /// Parts of larger pieces of its memory, all of which kernels reach by address.
    #[default]
    OfSlabs,
    /// Each is a buffer of the driver, which is bound to a kernel as a whole or in part. What shares a
    /// buffer is taken for the same memory there: it could not be bound for reading and for writing,
    /// and kernels that have nothing to do with each other would wait for each other.
    Buffers,
}

impl Pieces {
    /// The size of the piece for so many bytes. Buffers have few different sizes, none of which is an
    /// eighth too large, so that those which are given back fit others.
    pub(crate) fn rounded(self, bytes: u64) -> u64 {
        let step = match self {
            Self::OfSlabs => ALIGNMENT,
            Self::Buffers => (bytes.max(1).next_power_of_two() / 16).clamp(ALIGNMENT, PAGE),
        };
        bytes.max(1).next_multiple_of(step)
    }

    /// The slab to ask the driver for where no piece of so many bytes is free: what is best, and the
    /// least that would do.
    pub(crate) fn slab(self, bytes: u64) -> [u64; 2] {
        let bytes = self.rounded(bytes);
        let least = bytes.next_multiple_of(PAGE);
        match self {
            Self::Buffers => [bytes, bytes],
            Self::OfSlabs if bytes <= SMALL => [SMALL_SLAB, PAGE],
            Self::OfSlabs => [least.max(LARGE_SLAB), least],
        }
    }

    /// Whether a free piece of so many bytes is one to take a piece from.
    fn fits(self, whole: u64, bytes: u64) -> bool {
        match self {
            Self::OfSlabs => whole >= bytes,
            Self::Buffers => whole == bytes,
        }
    }
}

impl Pool {
    pub(crate) fn new(kind: Pieces) -> Self {
        Self {
            kind,
            slabs: BTreeMap::new(),
            pieces: Mixed::default(),
            free: BTreeSet::new(),
            live: 0,
            peak: 0,
            reserved: 0,
        }
    }

    /// A piece of what is free.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = self.kind.rounded(bytes);
        let small = bytes <= SMALL;
        let found = self.free.range((small, bytes, 0)..).next().copied();
        let fits =
            |(kind, whole, _): &(bool, u64, u64)| *kind == small && self.kind.fits(*whole, bytes);
        let (_, whole, address) = found.filter(fits)?;
        self.cut(small, address..address + whole, address..address + bytes);
        Some(address)
    }

    /// The piece at this address, where all of it is free; whether it was.
    pub(crate) fn take_at(&mut self, bytes: u64, address: u64) -> bool {
        let bytes = self.kind.rounded(bytes);
        let (small, wanted) = (bytes <= SMALL, address..address + bytes);
        let around = |whole: &Range<u64>| whole.start <= address && wanted.end <= whole.end;
        // Mostly it begins where a free piece does.
        let begins = self.pieces.get(&address).filter(|piece| piece.free);
        let begins = begins.map(|piece| address..address + piece.bytes);
        let found = begins.or_else(|| {
            let kind = (small, bytes, 0)..=(small, u64::MAX, u64::MAX);
            let mut pieces = (self.free.range(kind)).map(|(_, whole, at)| *at..at + whole);
            pieces.find(around)
        });
        let free = |whole: &Range<u64>| {
            let entry = (small, whole.end - whole.start, whole.start);
            around(whole) && self.free.contains(&entry)
        };
        let Some(whole) = found.filter(free) else {
            return false;
        };
        self.cut(small, whole, wanted);
        true
    }

    /// Whether everything in these ranges, which are in order, is free once the pieces at the addresses
    /// `given` are.
    pub(crate) fn will_be_free(&self, ranges: &[Range<u64>], given: &[u64]) -> bool {
        let free = self.free.iter().map(|(_, bytes, at)| *at..at + bytes);
        let given = (given.iter()).filter_map(|at| Some(*at..at + self.pieces.get(at)?.bytes));
        let mut spans: Vec<Range<u64>> = free.chain(given).collect();
        spans.sort_unstable_by_key(|span| span.start);
        let mut spans = spans.into_iter().peekable();
        ranges.iter().all(|range| {
            let mut at = range.start;
            while at < range.end {
                match spans.peek() {
                    Some(span) if span.end <= at => drop(spans.next()),
                    Some(span) if span.start <= at => at = span.end,
                    _ => return false,
                }
            }
            true
        })
    }

    /// Whether so many bytes at this address lie in one slab, of the kind that they belong in.
    pub(crate) fn is_within_a_slab(&self, bytes: u64, address: u64) -> bool {
        let bytes = self.kind.rounded(bytes);
        let slab = self.slabs.range(..=address).next_back();
        slab.is_some_and(|(start, slab)| {
            slab.small == (bytes <= SMALL) && address + bytes <= start + slab.bytes
        })
    }

    /// So many bytes are filled on the way by what is queued next, beside what is in use.
    pub(crate) fn pass(&mut self, bytes: u64) {
        self.peak = self.peak.max(self.live + bytes);
    }

    /// Takes a part of a free piece; what is before and behind it stays free.
    fn cut(&mut self, small: bool, whole: Range<u64>, part: Range<u64>) {
        let Some(piece) = self.pieces.get(&whole.start).copied() else {
            return;
        };
        (self.free).remove(&(small, whole.end - whole.start, whole.start));
        let mut taken = Piece {
            bytes: part.end - part.start,
            free: false,
            ..piece
        };
        if whole.start < part.start {
            taken.before = whole.start;
            let bytes = part.start - whole.start;
            self.put(whole.start, Piece { bytes, ..piece }, small);
        }
        if part.end < whole.end {
            let rest = Piece {
                bytes: whole.end - part.end,
                before: part.start,
                ..piece
            };
            self.put(part.end, rest, small);
        } else if let Some(after) =
            (self.pieces.get_mut(&part.end)).filter(|p| p.slab == piece.slab)
        {
            after.before = part.start;
        }
        self.live += taken.bytes;
        self.peak = self.peak.max(self.live);
        self.pieces.insert(part.start, taken);
    }

    /// Gives a piece back.
    pub(crate) fn give(&mut self, address: u64) {
        let Some(piece) = self.pieces.get(&address).copied().filter(|p| !p.free) else {
            return;
        };
        self.live -= piece.bytes;
        let small = self.slabs.get(&piece.slab).is_some_and(|slab| slab.small);
        let (mut start, mut whole) = (
            address,
            Piece {
                free: true,
                ..piece
            },
        );
        let beside = |other: &Piece| other.free && other.slab == piece.slab;
        let end = address + piece.bytes;
        if let Some(after) = self.pieces.get(&end).copied().filter(beside) {
            self.free.remove(&(small, after.bytes, end));
            self.pieces.remove(&end);
            whole.bytes += after.bytes;
        }
        let before = self.pieces.get(&piece.before).copied();
        if let Some(before) = before.filter(|before| beside(before)) {
            self.free.remove(&(small, before.bytes, piece.before));
            self.pieces.remove(&address);
            (start, whole.before) = (piece.before, before.before);
            whole.bytes += before.bytes;
        }
        self.put(start, whole, small);
    }

    /// Puts a free piece where it belongs; the one behind it is told.
    fn put(&mut self, address: u64, piece: Piece, small: bool) {
        let after = self.pieces.get_mut(&(address + piece.bytes));
        if let Some(after) = after.filter(|after| after.slab == piece.slab) {
            after.before = address;
        }
        self.free.insert((small, piece.bytes, address));
        self.pieces.insert(address, piece);
    }

    /// Adds a slab that was asked for because of `wanted` bytes.
    pub(crate) fn add(&mut self, address: u64, bytes: u64, wanted: u64) {
        let small = self.kind.rounded(wanted) <= SMALL;
        self.slabs.insert(address, Slab { bytes, small });
        self.reserved += bytes;
        let whole = Piece {
            bytes,
            slab: address,
            before: address,
            free: true,
        };
        self.put(address, whole, small);
    }

    /// Whether much more is taken from the driver than there ever was in buffers: what fits only buffers
    /// of its own size may never be wanted again.
    pub(crate) fn is_wasteful(&self) -> bool {
        self.kind == Pieces::Buffers && self.reserved > 2 * self.peak + SPARE
    }

    /// Forgets the slabs of which nothing is in use: the driver may have them back.
    pub(crate) fn release(&mut self) -> Vec<u64> {
        let unused = |(address, slab): (&u64, &Slab)| {
            let first = self.pieces.get(address)?;
            (first.free && first.bytes == slab.bytes).then_some(*address)
        };
        let unused: Vec<_> = self.slabs.iter().filter_map(unused).collect();
        for address in &unused {
            if let Some(slab) = self.slabs.remove(address) {
                self.pieces.remove(address);
                self.free.remove(&(slab.small, slab.bytes, *address));
                self.reserved -= slab.bytes;
            }
        }
        unused
    }

    pub(crate) fn report(&self) -> MemoryUse {
        MemoryUse {
            live: self.live,
            peak: self.peak,
            cached: self.reserved - self.live,
        }
    }
}

#[cfg(test)]
mod tests;
