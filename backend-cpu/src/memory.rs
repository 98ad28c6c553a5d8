//! Host memory of tensors: zeroed by the system, aligned to a cache line, and refused with an error where there is not enough.

use crate::element::{Held, is_held_as_stored, store};
use anymesh_core::{Buffer, DType, Error, Result};
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};

/// Widest vector register, and a cache line.
const ALIGN: usize = 64;

/// The bytes of one buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    words: Vec<u64>,
    /// First byte that is aligned to [`ALIGN`].
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` bytes of zero.
    pub(crate) fn zeroed(len: usize) -> Result<Self> {
        // Words instead of cache-line-sized blocks: only up to the natural alignment does the system hand out lazily zeroed
        // pages; anything wider is cleared by hand, which would cost a whole extra pass over large outputs.
        let words: Vec<u64> = len.checked_add(ALIGN).and_then(|bytes| bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(8)).ok()).ok_or(Error::TooLarge {
            device: crate::NAME.into(),
            bytes: len as u64,
            limit: crate::MAX_BYTES,
        })?;
        let start = (words.as_ptr() as usize).wrapping_neg() % ALIGN;
        Ok(Self { words, start, len })
    }

    /// A copy of `bytes`.
    pub(crate) fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut memory = Self::zeroed(bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        Ok(memory)
    }

    /// Zeros for `n` elements of type `T`.
    pub(crate) fn elements<T>(n: usize) -> Result<Self> {
        Self::zeroed(n.saturating_mul(size_of::<T>()))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start..self.start + self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[self.start..self.start + self.len]
    }

    pub(crate) fn typed_mut<T: AnyBitPattern + NoUninit>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.bytes_mut())
    }

    pub(crate) fn buffer(self) -> Buffer {
        Buffer::new(self)
    }
}

/// The bytes of a buffer of this backend.
pub(crate) fn bytes_of(buffer: &Buffer) -> Result<&[u8]> {
    Ok(buffer.get::<Memory>()?.bytes())
}

/// `len` elements of `dtype` that `compute` fills (from zero) as values of its kind `T`.
pub(crate) fn stored<T: Held>(dtype: DType, len: usize, compute: impl FnOnce(&mut [T])) -> Result<Memory> {
    let mut memory = Memory::zeroed(len.saturating_mul(dtype.size()))?;
    if is_held_as_stored(dtype) {
        compute(memory.typed_mut());
    } else {
        let mut values = vector::<T>(len)?;
        compute(&mut values);
        store(&values, dtype, memory.bytes_mut());
    }
    Ok(memory)
}

/// Zeros that are only needed while a kernel runs.
pub(crate) fn vector<T: Zeroable>(n: usize) -> Result<Vec<T>> {
    let bytes = n as u64 * size_of::<T>() as u64;
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| Error::TooLarge { device: crate::NAME.into(), bytes, limit: crate::MAX_BYTES })
}

/// Elements from the start of aligned bytes; what does not fill an element at the end is left out.
pub(crate) fn typed<T: AnyBitPattern>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_impossible_sizes_are_errors() {
        for len in [1, 7, 64, 1000, 1 << 20] {
            let memory = Memory::zeroed(len).expect("small");
            assert_eq!(memory.bytes().as_ptr() as usize % ALIGN, 0);
            assert_eq!(memory.bytes().len(), len);
        }
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(matches!(Memory::zeroed(len), Err(Error::TooLarge { .. })), "{len}");
        }
    }
}
