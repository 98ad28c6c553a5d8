//! A folder of checkpoints: which are whole, which is the newest, which may go.

use crate::{
    Checkpoint, Error, Result,
    files::{Disk, Files},
    root::{REMOVED, TEMPORARY, lock},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Something in a folder of checkpoints.
#[derive(Debug)]
pub struct Candidate {
    /// Where it is.
    pub path: PathBuf,
    /// Its step, or why it is no checkpoint that can be loaded.
    pub step: Result<u64>,
}

/// Everything in a folder that is or might have been a checkpoint, the newest first; what cannot be
/// loaded comes last, with the reason. Names do not matter: manifests do.
pub fn list(root: &Path) -> Result<Vec<Candidate>> {
    let entries = fs::read_dir(root).map_err(|e| Error::io(root, "read", &e))?;
    let mut found = vec![];
    for entry in entries {
        let path = entry.map_err(|e| Error::io(root, "read", &e))?.path();
        let hidden = path
            .file_name()
            .is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if path.is_dir() && !hidden {
            let step = Checkpoint::open(&path).map(|c| c.manifest().step);
            found.push(Candidate { path, step });
        }
    }
    found.sort_by(|a, b| (b.step.as_ref().ok(), &a.path).cmp(&(a.step.as_ref().ok(), &b.path)));
    Ok(found)
}

/// The newest checkpoint that is whole; `None` where there is none.
pub fn latest(root: &Path) -> Result<Option<Checkpoint>> {
    match list(root)?.into_iter().find(|f| f.step.is_ok()) {
        Some(found) => Checkpoint::open(found.path).map(Some),
        None => Ok(None),
    }
}

/// Which checkpoints stay.
#[derive(Clone, Debug, Default)]
pub struct Keep {
    /// The newest ones; at least one is always kept.
    pub last: usize,
    /// Those whose step is a multiple of this.
    pub every: Option<u64>,
    /// Those with these names, such as the best one.
    pub names: Vec<String>,
}

/// Removes whole checkpoints that `keep` does not name, and returns their paths. What is not a
/// whole checkpoint is left alone, and so is the newest. What processes that died left of theirs
/// (hidden folders that no reader looks at) is removed too.
pub fn rotate(root: &Path, keep: &Keep) -> Result<Vec<PathBuf>> {
    rotate_with(&Disk, root, keep)
}

/// [`rotate`] on another file system.
pub fn rotate_with(files: &dyn Files, root: &Path, keep: &Keep) -> Result<Vec<PathBuf>> {
    let _lock = lock(root)?;
    // Nobody is writing here, since we have the lock: processes that have ended left these.
    for entry in fs::read_dir(root).map_err(|e| Error::io(root, "read", &e))? {
        let path = entry.map_err(|e| Error::io(root, "read", &e))?.path();
        let ours = path.file_name().is_some_and(|name| {
            [TEMPORARY, REMOVED]
                .iter()
                .any(|prefix| name.to_string_lossy().starts_with(prefix))
        });
        if ours && path.is_dir() {
            files.remove_folder(&path)?;
        }
    }
    let whole: Vec<(PathBuf, u64)> = list(root)?
        .into_iter()
        .filter_map(|f| f.step.ok().map(|step| (f.path, step)))
        .collect();
    let mut removed = vec![];
    for (path, step) in whole.into_iter().skip(keep.last.max(1)) {
        let named = path
            .file_name()
            .is_some_and(|name| keep.names.iter().any(|n| **n == *name.to_string_lossy()));
        if named || keep.every.is_some_and(|n| n > 0 && step % n == 0) {
            continue;
        }
        // Out of sight in one step: a crash while files are removed leaves nothing that looks like
        // a checkpoint.
        let gone = path.with_file_name(format!(
            "{REMOVED}{}",
            path.file_name().unwrap_or_default().to_string_lossy()
        ));
        files.rename(&path, &gone)?;
        files.remove_folder(&gone)?;
        removed.push(path);
    }
    files.sync_folder(root)?;
    Ok(removed)
}
