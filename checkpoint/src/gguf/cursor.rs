//! The beginning of a file, read forwards.

use super::Defect;
use crate::positioned::Positioned;
use crate::{Error, Result};
use std::ops::Range;

/// As much is read at first; each further read doubles it.
const FIRST: u64 = 64 << 10;

/// Reads a file forwards from its beginning and keeps what it has read. Nothing is read or
/// allocated that the file does not have, whatever it says.
pub(super) struct Cursor<'f> {
    file: &'f Positioned,
    bytes: Vec<u8>,
    at: usize,
}

impl<'f> Cursor<'f> {
    pub(super) fn new(file: &'f Positioned) -> Self {
        Self {
            file,
            bytes: vec![],
            at: 0,
        }
    }

    /// Where the next bytes are.
    pub(super) fn offset(&self) -> u64 {
        self.at as u64
    }

    /// How many bytes there still are.
    pub(super) fn left(&self) -> u64 {
        self.file.len().saturating_sub(self.at as u64)
    }

    /// An error about what is at an offset.
    pub(super) fn wrong<T>(&self, offset: u64, defect: Defect) -> Result<T> {
        Err(Error::Gguf {
            path: self.file.path().into(),
            offset,
            defect,
        })
    }

    /// Passes over the next `n` bytes, which are `what`, and says where they are kept.
    pub(super) fn take(&mut self, n: u64, what: &'static str) -> Result<Range<usize>> {
        let left = self.left();
        let end = usize::try_from(n)
            .ok()
            .and_then(|n| self.at.checked_add(n))
            .filter(|_| n <= left);
        let Some(end) = end else {
            let needed = n;
            return self.wrong(self.offset(), Defect::Truncated { what, needed, left });
        };
        if end > self.bytes.len() {
            let had = self.bytes.len();
            let wanted = (end as u64).max(2 * had as u64).max(FIRST);
            self.bytes.resize(wanted.min(self.file.len()) as usize, 0);
            self.file.read_at(had as u64, &mut self.bytes[had..])?;
        }
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A text behind its length.
    pub(super) fn text(&mut self, what: &'static str) -> Result<&str> {
        let length = self.u64(what)?;
        let range = self.take(length, what)?;
        let offset = range.start as u64;
        if let Err(error) = std::str::from_utf8(&self.bytes[range.clone()]) {
            let offset = offset + error.valid_up_to() as u64;
            return self.wrong(offset, Defect::NotText { what });
        }
        Ok(std::str::from_utf8(&self.bytes[range]).unwrap_or_default())
    }

    /// What was passed over.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.truncate(self.at);
        self.bytes.shrink_to_fit();
        self.bytes
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let range = self.take(N as u64, what)?;
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[range]);
        Ok(out)
    }
}
