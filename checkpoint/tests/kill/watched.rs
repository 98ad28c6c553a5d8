//! The disk, with something that happens in the middle of each operation: nothing, an error, or the
//! end of the process.

use anymesh_checkpoint::{
    Result,
    files::{Disk, Files, Output},
};
use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

type During = dyn Fn(usize, &'static str, &Path) -> Result<()> + Send + Sync;

/// Calls a function with the number of each operation, from 1, with its kind and its path.
/// Operations wait for each other, so that one that does not return ends all.
#[derive(Clone)]
pub(crate) struct Watched {
    during: Arc<During>,
    count: Arc<Mutex<usize>>,
}

impl Watched {
    pub(crate) fn new(
        during: impl Fn(usize, &'static str, &Path) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self {
            during: Arc::new(during),
            count: Arc::default(),
        }
    }

    /// How many operations there were.
    pub(crate) fn count(&self) -> usize {
        *self.count.lock().expect("not poisoned")
    }

    /// First a part of the operation, then what is to happen, then the rest.
    fn step<T>(
        &self,
        kind: &'static str,
        path: &Path,
        first: impl FnOnce() -> Result<()>,
        rest: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut count = self.count.lock().expect("not poisoned");
        *count += 1;
        first()?;
        (self.during)(*count, kind, path)?;
        rest()
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched")
    }
}

struct WatchedFile {
    inner: Box<dyn Output>,
    path: PathBuf,
    disk: Watched,
}

impl Output for WatchedFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (half, inner) = (bytes.len() / 2, Mutex::new(&mut self.inner));
        let write = |bytes: &[u8]| inner.lock().expect("not poisoned").write(bytes);
        self.disk.step(
            "write",
            &self.path,
            || write(&bytes[..half]),
            || write(&bytes[half..]),
        )
    }

    fn sync(&mut self) -> Result<()> {
        self.disk
            .step("sync", &self.path, || Ok(()), || self.inner.sync())
    }
}

impl Files for Watched {
    fn create(&self, path: &Path) -> Result<Box<dyn Output>> {
        let inner = self.step("create", path, || Ok(()), || Disk.create(path))?;
        Ok(Box::new(WatchedFile {
            inner,
            path: path.into(),
            disk: self.clone(),
        }))
    }

    fn create_folder(&self, path: &Path) -> Result<()> {
        self.step(
            "create folder",
            path,
            || Ok(()),
            || Disk.create_folder(path),
        )
    }

    fn sync_folder(&self, path: &Path) -> Result<()> {
        self.step("sync folder", path, || Ok(()), || Disk.sync_folder(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.step("rename", to, || Ok(()), || Disk.rename(from, to))
    }

    fn remove_folder(&self, path: &Path) -> Result<()> {
        let first = || {
            if let Some(Ok(entry)) = std::fs::read_dir(path)
                .ok()
                .and_then(|mut entries| entries.next())
            {
                std::fs::remove_file(entry.path()).expect("a file in the folder");
            }
            Ok(())
        };
        self.step("remove folder", path, first, || Disk.remove_folder(path))
    }
}
