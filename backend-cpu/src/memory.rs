//! Host memory of tensors: aligned to a cache line, recycled, and refused with an error where there
//! is not enough.

use crate::element::{Held, is_held_as_stored, store};
use anymesh_kernel::{Buffer, DType, Error, Result, backend::HostMemory};
use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use std::{
    collections::BTreeMap,
    ops::Deref,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The device's name.
pub(crate) const NAME: &str = "cpu";
/// More than this cannot be addressed; less may be free.
pub(crate) const MAX_BYTES: u64 = isize::MAX as u64;

/// Widest vector register, and a cache line.
const ALIGN: usize = 64;
/// Memory from this size on is kept when it is freed.
const KEPT_FROM: usize = 16 << 10;
/// At most this much is kept.
const KEPT_LIMIT: usize = 512 << 20;

/// Freed memory. The system takes longer to hand out fresh pages than most kernels take to fill
/// them.
static KEPT: Mutex<Kept> = Mutex::new(Kept::new());

/// Freed memory by size, and by age.
struct Kept {
    /// By number of words, and number in the order of freeing.
    by_size: BTreeMap<(usize, u64), Vec<u64>>,
    /// Sizes in the order of freeing.
    by_age: BTreeMap<u64, usize>,
    words: usize,
    freed: u64,
}

impl Kept {
    const fn new() -> Self {
        Self {
            by_size: BTreeMap::new(),
            by_age: BTreeMap::new(),
            words: 0,
            freed: 0,
        }
    }

    fn lock() -> MutexGuard<'static, Self> {
        KEPT.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&mut self, memory: Vec<u64>) {
        self.freed += 1;
        self.words += memory.len();
        self.by_age.insert(self.freed, memory.len());
        self.by_size.insert((memory.len(), self.freed), memory);
    }

    fn remove(&mut self, size: usize, number: u64) -> Option<Vec<u64>> {
        self.by_age.remove(&number);
        let memory = self.by_size.remove(&(size, number))?;
        self.words -= memory.len();
        Some(memory)
    }

    /// The smallest that is large enough and not much larger; of those the one that was freed last,
    /// of which a cache may still hold something.
    fn take(&mut self, count: usize) -> Option<Vec<u64>> {
        let fits = (count, 0)..=(count.saturating_add(count / 4), u64::MAX);
        let size = self.by_size.range(fits).next()?.0.0;
        let (_, number) = *self.by_size.range(..=(size, u64::MAX)).next_back()?.0;
        self.remove(size, number)
    }

    /// The oldest of what is more than is kept.
    fn surplus(&mut self) -> Option<Vec<u64>> {
        if self.words * 8 <= KEPT_LIMIT {
            return None;
        }
        let (number, size) = self.by_age.first_key_value()?;
        self.remove(*size, *number)
    }
}

/// Asks the system for large pages, as many as lie within this memory: where elements lie is found
/// sooner then, and there are fewer pages to ask for.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn in_large_pages(words: &[u64]) {
    const PAGE: usize = 2 << 20;
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let first = (bytes.as_ptr() as usize).wrapping_neg() % PAGE;
    let whole = bytes.len().saturating_sub(first) / PAGE * PAGE;
    if whole == 0 {
        return;
    }
    let pages = &bytes[first..first + whole];
    // SAFETY: memory that is ours. It is an advice, which changes no contents; a system that cannot
    // follow it says so, and nothing is different.
    unsafe {
        libc::madvise(
            pages.as_ptr().cast_mut().cast(),
            pages.len(),
            libc::MADV_HUGEPAGE,
        )
    };
}

#[cfg(not(target_os = "linux"))]
fn in_large_pages(_: &[u64]) {}

/// The bytes of one buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    words: Vec<u64>,
    /// First byte that is aligned to [`ALIGN`].
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` bytes with any contents: the caller writes all of them.
    pub(crate) fn new(len: usize) -> Result<Self> {
        let no_memory = || Error::OutOfMemory {
            device: NAME.into(),
            bytes: len as u64,
        };
        let count = len.checked_add(ALIGN).ok_or_else(no_memory)?.div_ceil(8);
        // Words instead of cache-line-sized blocks: only up to the natural alignment does the
        // system hand out pages without clearing them by hand.
        let fresh = || {
            let words: Vec<u64> = bytemuck::allocation::try_zeroed_vec(count).ok()?;
            in_large_pages(&words);
            Some(words)
        };
        let retry = || {
            drop(std::mem::replace(&mut *Kept::lock(), Kept::new()));
            fresh()
        };
        let recycled = || (count * 8 >= KEPT_FROM).then(|| Kept::lock().take(count));
        let words: Vec<u64> = (recycled().flatten())
            .or_else(fresh)
            .or_else(retry)
            .ok_or_else(no_memory)?;
        let start = (words.as_ptr() as usize).wrapping_neg() % ALIGN;
        Ok(Self { words, start, len })
    }

    /// A copy of `bytes`.
    pub(crate) fn copy_of(bytes: &[u8]) -> Result<Self> {
        let mut memory = Self::new(bytes.len())?;
        memory.bytes_mut().copy_from_slice(bytes);
        Ok(memory)
    }

    /// Any contents for `n` elements of type `T`.
    pub(crate) fn elements<T>(n: usize) -> Result<Self> {
        Self::new(n.saturating_mul(size_of::<T>()))
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

    pub(crate) fn typed<T: AnyBitPattern>(&self) -> &[T] {
        typed(self.bytes())
    }

    pub(crate) fn buffer(self) -> Buffer {
        let bytes = self.len;
        Buffer::new(self, bytes)
    }
}

impl HostMemory for Memory {
    fn bytes(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }

    fn into_buffer(self: Box<Self>) -> Buffer {
        self.buffer()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !(KEPT_FROM..=KEPT_LIMIT).contains(&(self.words.len() * 8)) {
            return;
        }
        let mut kept = Kept::lock();
        kept.put(std::mem::take(&mut self.words));
        while let Some(old) = kept.surplus() {
            // Given back to the system outside the lock.
            drop(kept);
            drop(old);
            kept = Kept::lock();
        }
    }
}

/// Values in row-major order: those of a buffer, or a copy.
#[derive(Debug)]
pub(crate) enum Dense<'a, T> {
    Borrowed(&'a [T]),
    Copied(Memory),
}

impl<T: AnyBitPattern> Deref for Dense<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Dense::Borrowed(values) => values,
            Dense::Copied(memory) => typed(memory.bytes()),
        }
    }
}

/// The bytes of a buffer of this backend.
pub(crate) fn bytes_of(buffer: &Buffer) -> Result<&[u8]> {
    Ok(buffer.get::<Memory>()?.bytes())
}

/// `len` elements of `dtype`, all of which `compute` writes as values of its kind `T`.
pub(crate) fn stored<T: Held>(
    dtype: DType,
    len: usize,
    compute: impl FnOnce(&mut [T]),
) -> Result<Memory> {
    try_stored(dtype, len, |out| {
        compute(out);
        Ok(())
    })
}

/// [`stored`] for what may fail.
pub(crate) fn try_stored<T: Held>(
    dtype: DType,
    len: usize,
    compute: impl FnOnce(&mut [T]) -> Result<()>,
) -> Result<Memory> {
    let mut memory = Memory::new(len.saturating_mul(dtype.size()))?;
    if is_held_as_stored(dtype) {
        compute(memory.typed_mut())?;
    } else {
        let mut values = Memory::elements::<T>(len)?;
        compute(values.typed_mut())?;
        store::<T>(typed(values.bytes()), dtype, memory.bytes_mut());
    }
    Ok(memory)
}

/// Zeros that are only needed while a kernel runs.
pub(crate) fn vector<T: Zeroable>(n: usize) -> Result<Vec<T>> {
    let bytes = n as u64 * size_of::<T>() as u64;
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| Error::OutOfMemory {
        device: NAME.into(),
        bytes,
    })
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
        for len in [1, 7, 64, 1000, 1 << 20, 2 << 20, (6 << 20) + 5] {
            let memory = Memory::new(len).expect("small");
            assert_eq!(memory.bytes().as_ptr() as usize % ALIGN, 0);
            assert_eq!(memory.bytes().len(), len);
        }
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(
                matches!(Memory::new(len), Err(Error::OutOfMemory { bytes, .. }) if bytes == len as u64),
                "{len}"
            );
        }
    }

    #[test]
    fn freed_memory_is_reused_and_limited() {
        let len = (5 << 20) + 12345;
        let address = Memory::new(len).expect("small").bytes().as_ptr() as usize;
        // Other tests may take it first; that all of a hundred tries are beaten to it is not
        // credible.
        assert!(
            (0..100).any(
                |_| Memory::new(len - 1000).expect("small").bytes().as_ptr() as usize == address
            )
        );
        drop(
            (0..200)
                .map(|_| Memory::new(4 << 20).expect("small"))
                .collect::<Vec<_>>(),
        );
        let kept = Kept::lock();
        let words: usize = kept.by_size.values().map(Vec::len).sum();
        assert!(words == kept.words && words * 8 <= KEPT_LIMIT);
        assert_eq!(kept.by_size.len(), kept.by_age.len());
    }
}
