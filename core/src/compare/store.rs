//! The values of a run, in memory as long as they fit and in a file beyond that.

use crate::{Error, Result};
use std::{
    borrow::Cow,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

/// Where a value is.
#[derive(Debug)]
pub(super) enum Slot {
    Memory(Vec<u8>),
    File { at: u64, bytes: usize },
}

/// Values by their slots.
#[derive(Debug)]
pub(super) struct Store {
    /// What memory may still take.
    left: u64,
    spill: Option<Spill>,
}

/// A file that is gone when the run is.
#[derive(Debug)]
struct Spill {
    file: File,
    path: PathBuf,
    end: u64,
}

impl Drop for Spill {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Spill {
    fn new() -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "anymesh-compare-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path);
        match file {
            Ok(file) => Ok(Self { file, path, end: 0 }),
            Err(error) => Err(failed("made", &path, &error)),
        }
    }
}

fn failed(what: &str, path: &std::path::Path, error: &io::Error) -> Error {
    let detail = format!(
        "{}, which has what does not fit into memory, cannot be {what}: {error}; allow more memory or set TMPDIR",
        path.display()
    );
    Error::argument("compare", "memory", detail)
}

impl Store {
    /// A store that takes so much memory.
    pub(super) fn new(memory: u64) -> Self {
        Self {
            left: memory,
            spill: None,
        }
    }

    pub(super) fn put(&mut self, bytes: Vec<u8>) -> Result<Slot> {
        if let Some(left) = self.left.checked_sub(bytes.len() as u64) {
            self.left = left;
            return Ok(Slot::Memory(bytes));
        }
        let spill = match &mut self.spill {
            Some(spill) => spill,
            none => none.insert(Spill::new()?),
        };
        let at = spill.end;
        (spill.file.seek(SeekFrom::Start(at)))
            .and_then(|_| spill.file.write_all(&bytes))
            .map_err(|error| failed("written", &spill.path, &error))?;
        spill.end += bytes.len() as u64;
        Ok(Slot::File {
            at,
            bytes: bytes.len(),
        })
    }

    pub(super) fn get<'s>(&mut self, slot: &'s Slot) -> Result<Cow<'s, [u8]>> {
        let (at, bytes) = match slot {
            Slot::Memory(bytes) => return Ok(Cow::Borrowed(bytes)),
            Slot::File { at, bytes } => (*at, *bytes),
        };
        let mut out = vec![0; bytes];
        if let Some(spill) = &mut self.spill {
            (spill.file.seek(SeekFrom::Start(at)))
                .and_then(|_| spill.file.read_exact(&mut out))
                .map_err(|error| failed("read", &spill.path, &error))?;
        }
        Ok(Cow::Owned(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_into_memory_is_found_in_a_file_which_goes_away() -> Result<()> {
        let mut store = Store::new(10);
        let slots: Vec<Slot> = (0..5u8)
            .map(|i| store.put(vec![i; 4]))
            .collect::<Result<_>>()?;
        let in_memory = |s: &&Slot| matches!(s, Slot::Memory(_));
        assert_eq!(slots.iter().filter(in_memory).count(), 2);
        for (i, slot) in slots.iter().enumerate().rev() {
            assert_eq!(*store.get(slot)?, [i as u8; 4]);
        }
        let path = store.spill.as_ref().map(|s| s.path.clone());
        let path = path.expect("a file");
        assert!(path.exists());
        drop(store);
        assert!(!path.exists());
        Ok(())
    }
}
