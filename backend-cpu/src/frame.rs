//! The registers of a program while it runs over a block of positions.

use crate::{element::Held, memory::typed};
use anymesh_kernel::map::Reg;

/// Positions per block: all registers of a typical program fit the first-level cache.
pub(crate) const BLOCK: usize = 1024;

/// A register's values for a block, of any kind. Vectors that lie across two cache lines take twice
/// as long.
#[repr(align(64))]
pub(crate) struct Words(pub(crate) [u64; BLOCK]);

/// Memory for a register's values. It is gone while it is written.
pub(crate) type Slot = Option<Box<Words>>;

/// Where a register's values for the current block are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// One value for the whole block.
    One(u64),
    /// One value for each row of the block, at the beginning of this slot.
    Rows(u16),
    /// This slot of the scratch memory.
    Slot(u16),
    /// The memory of an input, from this element on.
    Input(u8, usize),
    /// An output, written directly.
    Output(usize),
}

/// The values of a register for a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Src<'a, T> {
    /// The same everywhere.
    One(T),
    /// One for each position.
    Many(&'a [T]),
}

impl<'a, T: Held> Src<'a, T> {
    /// As values of another type of the same size.
    pub(crate) fn bits<B: Held>(self) -> Src<'a, B> {
        match self {
            Src::One(value) => Src::One(bytemuck::cast(value)),
            Src::Many(values) => Src::Many(bytemuck::cast_slice(values)),
        }
    }
}

impl<T: Copy> Src<'_, T> {
    #[inline(always)]
    pub(crate) fn at(&self, i: usize) -> T {
        match self {
            Src::One(value) => *value,
            Src::Many(values) => values[i],
        }
    }
}

/// What an instruction can read.
pub(crate) struct Frame<'s> {
    /// The memory of each input.
    pub(crate) inputs: &'s [&'s [u8]],
    pub(crate) slots: &'s [Slot],
    pub(crate) places: &'s [Place],
    pub(crate) outs: &'s [&'s mut [u8]],
    pub(crate) len: usize,
}

impl<'s> Frame<'s> {
    /// The values of an earlier register.
    #[inline]
    pub(crate) fn src<T: Held>(&self, reg: Reg) -> Src<'s, T> {
        match self.places[reg as usize] {
            Place::One(word) => Src::One(T::from_word(word)),
            Place::Slot(slot) | Place::Rows(slot) => {
                let words = self.slots[usize::from(slot)].as_ref();
                let words = words.map_or(&[][..], |words| &words.0);
                Src::Many(&bytemuck::cast_slice(words)[..self.len])
            }
            Place::Input(k, at) => {
                Src::Many(&typed(self.inputs[usize::from(k)])[at..at + self.len])
            }
            Place::Output(o) => {
                let all: &[T] = bytemuck::cast_slice(&*self.outs[o]);
                Src::Many(&all[..self.len])
            }
        }
    }

    /// Whether one of these registers holds a value for each row.
    pub(crate) fn has_rows(&self, registers: &[Reg]) -> bool {
        (registers.iter()).any(|r| matches!(self.places[usize::from(*r)], Place::Rows(_)))
    }

    /// Whether these registers hold one value for the whole block, or for each of its rows.
    pub(crate) fn is_constant(&self, registers: &[Reg]) -> bool {
        let one = |r: &Reg| matches!(self.places[usize::from(*r)], Place::One(_) | Place::Rows(_));
        registers.iter().all(one)
    }
}
