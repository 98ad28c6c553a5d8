//! Files of data, read at positions.
//!
//! Why not mapped into memory: whoever truncates a mapped file ends every process that reads it
//! with a signal, which no program can answer well, and a mapping is `unsafe`, which this crate
//! forbids. A read at a position costs one system call for each sample and gives an ordinary error;
//! the system's page cache holds what is read often, as it would for a mapping.

use crate::{Error, Result};
use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// A file of known length that several threads read at once.
#[derive(Debug)]
pub(crate) struct DataFile {
    path: PathBuf,
    len: u64,
    modified: u128,
    handle: Handle,
}

#[cfg(unix)]
type Handle = fs::File;
#[cfg(not(unix))]
type Handle = std::sync::Mutex<fs::File>;

impl DataFile {
    /// Opens a file that must have something in it.
    pub(crate) fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |e: &io::Error| Error::io(path, "open", e);
        let file = fs::File::open(path).map_err(|e| io(&e))?;
        let data = file.metadata().map_err(|e| io(&e))?;
        // A folder can be opened, and some devices have no end.
        if !data.is_file() {
            return Err(io(&io::Error::other("not an ordinary file")));
        }
        if data.len() == 0 {
            return Err(data_error(path, 0, "the file is empty"));
        }
        let modified = data.modified().ok();
        let since = modified.and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        #[cfg(not(unix))]
        let file = std::sync::Mutex::new(file);
        Ok(Self {
            path: path.into(),
            len: data.len(),
            modified: since.map_or(0, |t| t.as_nanos()),
            handle: file,
        })
    }

    /// How long it was when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// What an index that was built from the file must be built from again: its name, length and
    /// time.
    pub(crate) fn describe(&self) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        format!("{name} {} bytes, changed {}", self.len, self.modified)
    }

    /// Something wrong at an offset.
    pub(crate) fn error(&self, offset: u64, detail: impl Into<String>) -> Error {
        data_error(&self.path, offset, detail)
    }

    /// Fills `out` with the bytes at `offset`.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        read_exact(&self.handle, offset, out).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => {
                let now = fs::metadata(&self.path).map_or(self.len, |data| data.len());
                let end = u128::from(offset) + out.len() as u128;
                let detail = match now < self.len {
                    true => format!(
                        "the file ends here, and had {} bytes when it was opened: it was truncated meanwhile",
                        self.len
                    ),
                    false => format!("the file ends here, but bytes {offset} to {end} are needed: it is truncated"),
                };
                self.error(now, detail)
            }
            _ => Error::io(&self.path, "read", &e),
        })
    }

    /// The bytes of a range of the file.
    pub(crate) fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        // Checked before memory is asked for: lengths come from files.
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            let detail = format!(
                "the file ends here, but {len} bytes at byte {offset} are needed: it is truncated"
            );
            return Err(self.error(self.len, detail));
        }
        let len = usize::try_from(len)
            .map_err(|_| self.error(offset, format!("{len} bytes do not fit into memory")))?;
        let mut out = vec![0; len];
        self.read_at(offset, &mut out)?;
        Ok(out)
    }
}

/// Something wrong in a file.
pub(crate) fn data_error(path: &Path, offset: u64, detail: impl Into<String>) -> Error {
    Error::Data {
        path: path.into(),
        offset,
        detail: detail.into(),
    }
}

#[cfg(unix)]
fn read_exact(handle: &Handle, offset: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(handle, out, offset)
}

#[cfg(not(unix))]
fn read_exact(handle: &Handle, offset: u64, out: &mut [u8]) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = handle
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(out)
}

/// Writes a file in one step: whoever reads it sees all of it or what was there before.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let fresh = beside(path);
    let written = fs::write(&fresh, bytes).map_err(|e| Error::io(&fresh, "write", &e));
    let moved =
        written.and_then(|()| fs::rename(&fresh, path).map_err(|e| Error::io(path, "rename", &e)));
    if moved.is_err() {
        // What is left of it helps nobody; the first error is the one to tell.
        let _ = fs::remove_file(&fresh);
    }
    moved
}

/// A name beside a file that no other writer uses.
pub(crate) fn beside(path: &Path) -> PathBuf {
    static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}-{number}", std::process::id()))
}

/// A number for a text: FNV-1a.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tests::Folder;

    #[test]
    fn a_file_that_shrinks_is_an_error_with_the_place_where_it_ends() {
        let folder = Folder::new("shrinks");
        let path = folder.write("x", &[7; 100]);
        let file = DataFile::open(&path).expect("it is there");
        let mut out = [0; 10];
        file.read_at(90, &mut out).expect("inside of the file");
        assert_eq!(out, [7; 10]);
        fs::write(&path, [7; 95]).expect("it is ours");
        let error = file.read_at(90, &mut out).expect_err("it ends before");
        assert!(
            matches!(&error, Error::Data { offset: 95, detail, .. } if detail.contains("truncated meanwhile")),
            "{error}"
        );
    }

    #[test]
    fn lengths_beyond_the_file_ask_for_no_memory() {
        let folder = Folder::new("beyond");
        let file = DataFile::open(folder.write("x", &[7; 100])).expect("it is there");
        for (offset, len) in [(0, u64::MAX), (u64::MAX, 2), (99, 2), (101, 0)] {
            let error = file.read(offset, len).expect_err("beyond");
            assert!(matches!(error, Error::Data { offset: 100, .. }), "{error}");
        }
        assert_eq!(file.read(99, 1).expect("the last byte"), [7]);
    }

    #[test]
    fn folders_and_nothing_and_empty_files_cannot_be_opened() {
        let folder = Folder::new("folders");
        let error = DataFile::open(folder.path()).expect_err("a folder");
        assert!(
            error.to_string().contains("not an ordinary file"),
            "{error}"
        );
        let error = DataFile::open(folder.path().join("none")).expect_err("nothing");
        assert!(matches!(error, Error::Io { action: "open", .. }), "{error}");
        let error = DataFile::open(folder.write("empty", b"")).expect_err("empty");
        assert!(
            error.to_string().ends_with("byte 0: the file is empty"),
            "{error}"
        );
    }
}
