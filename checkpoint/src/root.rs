//! The folder that holds checkpoints: its lock, and its hidden folders that are no checkpoints.

use crate::{Error, Result};
use std::{
    fs::{File, TryLockError},
    path::Path,
};

/// How the name of a folder begins that is being written.
pub(crate) const TEMPORARY: &str = ".tmp-";
/// How the name of a folder begins that is being removed.
pub(crate) const REMOVED: &str = ".old-";

/// Keeps other writers out of a folder for as long as it lives; the system releases it when the
/// process ends, however that happens.
#[derive(Debug)]
pub(crate) struct Lock(File);

/// Closing the file is not enough: a process that is being started by another thread shares it
/// until it has become another program.
impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Locks a folder against other writers.
pub(crate) fn lock(root: &Path) -> Result<Lock> {
    let path = root.join(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(|e| Error::io(&path, "open", &e))?;
    match file.try_lock() {
        Ok(()) => Ok(Lock(file)),
        Err(TryLockError::WouldBlock) => Err(Error::Locked { root: root.into() }),
        Err(TryLockError::Error(error)) => Err(Error::io(path, "lock", &error)),
    }
}
