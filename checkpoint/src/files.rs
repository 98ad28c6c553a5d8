//! The file system, as far as writing a checkpoint needs it: few operations, so that a test can
//! let each of them fail.

use crate::{Error, Result};
use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread::JoinHandle,
};

/// A file that is being written.
pub trait Output: Send {
    /// Appends bytes.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Returns when everything written is on the disk.
    fn sync(&mut self) -> Result<()>;
}

/// What changes a folder. Reading needs no such care.
pub trait Files: Send + Sync + fmt::Debug {
    /// A new file, empty; an error where there is one.
    fn create(&self, path: &Path) -> Result<Box<dyn Output>>;

    /// A new folder and those above it.
    fn create_folder(&self, path: &Path) -> Result<()>;

    /// Returns when the names in a folder are on the disk.
    fn sync_folder(&self, path: &Path) -> Result<()>;

    /// Renames in one step; an error where the new name exists.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Removes a folder with all in it.
    fn remove_folder(&self, path: &Path) -> Result<()>;
}

/// The real file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

/// After this many bytes a sync is started in the background, so that there is less left to wait
/// for at the end.
const EARLY: usize = 16 << 20;

#[derive(Debug)]
struct DiskFile {
    file: Arc<File>,
    path: PathBuf,
    /// Bytes written since a sync was last started.
    fresh: usize,
    syncer: Option<Syncer>,
}

/// A thread that syncs a file while more is written to it.
#[derive(Debug)]
struct Syncer {
    wake: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Output for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        (&*self.file)
            .write_all(bytes)
            .map_err(|e| Error::io(&self.path, "write", &e))?;
        self.fresh += bytes.len();
        if self.fresh >= EARLY {
            self.fresh = 0;
            let syncer = self.syncer.get_or_insert_with(|| {
                let ((wake, calls), file) = (sync_channel(1), self.file.clone());
                Syncer {
                    wake,
                    thread: std::thread::spawn(move || {
                        calls.iter().try_for_each(|()| file.sync_data())
                    }),
                }
            });
            // Full where a sync is waiting already; closed where one has failed, which `sync`
            // reports.
            let _ = syncer.wake.try_send(());
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        let early = self
            .syncer
            .take()
            .map_or(Ok(()), |Syncer { wake, thread }| {
                drop(wake);
                thread
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("the thread that syncs it panicked")))
            });
        early
            .and_then(|()| self.file.sync_all())
            .map_err(|e| Error::io(&self.path, "sync", &e))
    }
}

impl Files for Disk {
    fn create(&self, path: &Path) -> Result<Box<dyn Output>> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| Error::io(path, "create", &e))?;
        Ok(Box::new(DiskFile {
            file: Arc::new(file),
            path: path.into(),
            fresh: 0,
            syncer: None,
        }))
    }

    fn create_folder(&self, path: &Path) -> Result<()> {
        fs::create_dir_all(path).map_err(|e| Error::io(path, "create", &e))
    }

    fn sync_folder(&self, path: &Path) -> Result<()> {
        // Windows has no such thing: there a rename is durable by itself.
        if cfg!(windows) {
            return Ok(());
        }
        File::open(path)
            .and_then(|f| f.sync_all())
            .map_err(|e| Error::io(path, "sync", &e))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        if to.exists() {
            return Err(Error::Exists { path: to.into() });
        }
        fs::rename(from, to).map_err(|e| Error::io(to, "rename", &e))
    }

    fn remove_folder(&self, path: &Path) -> Result<()> {
        fs::remove_dir_all(path).map_err(|e| Error::io(path, "remove", &e))
    }
}
