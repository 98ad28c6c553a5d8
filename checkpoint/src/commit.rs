//! What makes files a checkpoint: a temporary folder under a lock, the manifest last, and one
//! rename. Where several processes save together, they agree before each step.

use crate::{
    Error, Result,
    files::Files,
    manifest::{self, Manifest, Stored, StoredRegion},
    plan::Placed,
    root::{Lock, TEMPORARY, lock},
    world::World,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// A checkpoint that is being written.
#[derive(Debug)]
pub(crate) struct PendingCheckpoint {
    root: PathBuf,
    path: PathBuf,
    /// Where files are written until they are a checkpoint.
    pub(crate) folder: PathBuf,
    pub(crate) world: World,
    /// Held by the process that leads.
    _lock: Option<Lock>,
}

/// What a manifest says that is not known from the files: step, state, and how tensors lie.
pub(crate) struct Head<'a> {
    pub(crate) step: u64,
    pub(crate) state: &'a Map<String, Value>,
    pub(crate) placed: &'a BTreeMap<String, Placed>,
}

/// What a process has written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    /// The names and layouts it was told to save: the same in every process.
    layouts: u64,
    pub(crate) files: BTreeMap<String, u64>,
    pub(crate) regions: BTreeMap<String, Vec<StoredRegion>>,
}

impl Written {
    /// Nothing yet, of tensors with these layouts.
    pub(crate) fn of(placed: &BTreeMap<String, Placed>) -> Self {
        let text: Vec<String> = placed
            .iter()
            .map(|(name, p)| format!("{name}\0{}", p.layout()))
            .collect();
        Self {
            layouts: xxhash_rust::xxh3::xxh3_64(text.join("\0").as_bytes()),
            files: BTreeMap::new(),
            regions: BTreeMap::new(),
        }
    }
}

impl PendingCheckpoint {
    /// Takes the lock and makes the temporary folder. Every process that saves calls this, with an
    /// error where it is not `ready`.
    pub(crate) fn new(
        files: &dyn Files,
        root: &Path,
        name: &str,
        world: World,
        ready: Result<()>,
    ) -> Result<Self> {
        let (path, folder) = (root.join(name), root.join(format!("{TEMPORARY}{name}")));
        let begun = ready.and_then(|()| {
            if world.leads() {
                prepare(files, root, name, &path, &folder).map(Some)
            } else {
                Ok(None)
            }
        });
        let made = matches!(begun, Ok(Some(_)));
        match world.agree(begun) {
            Ok(_lock) => Ok(Self {
                root: root.into(),
                path,
                folder,
                world,
                _lock,
            }),
            Err(error) => {
                if made {
                    // Best effort: what is left is not a checkpoint, and the next save removes it.
                    let _ = files.remove_folder(&folder);
                }
                Err(error)
            }
        }
    }

    /// Makes what all processes have written a checkpoint, or removes it. Every process that saves
    /// calls this.
    pub(crate) fn complete(
        self,
        files: &dyn Files,
        written: Result<Written>,
        head: &Head<'_>,
    ) -> Result<PathBuf> {
        let done = self.commit(files, written, head);
        if done.is_err() && self.world.leads() {
            // Best effort, as above.
            let _ = files.remove_folder(&self.folder);
        }
        done.map(|()| self.path)
    }

    fn commit(&self, files: &dyn Files, written: Result<Written>, head: &Head<'_>) -> Result<()> {
        let written = self.world.agree(written)?;
        let committed = self.collect(written).and_then(|all| {
            if self.world.leads() {
                self.rename(files, all, head)
            } else {
                Ok(())
            }
        });
        self.world.agree(committed)
    }

    /// What every process has written.
    fn collect(&self, mine: Written) -> Result<Vec<Written>> {
        if !self.world.is_shared() {
            return Ok(vec![mine]);
        }
        let text = serde_json::to_vec(&mine).map_err(|e| {
            Error::Argument(format!(
                "what was written cannot be told to the other processes: {e}"
            ))
        })?;
        let mut all = vec![];
        for (rank, text) in self.world.gather(&text)? {
            let wrong = |e: serde_json::Error| {
                Error::Argument(format!(
                    "the process of rank {rank} did not say what it has written: {e}"
                ))
            };
            let other: Written = serde_json::from_slice(&text).map_err(wrong)?;
            if other.layouts != mine.layouts {
                return Err(Error::Argument(format!(
                    "the process of rank {rank} saves other names or layouts than this one: \
                     every process must make the same call"
                )));
            }
            all.push(other);
        }
        Ok(all)
    }

    /// Writes the manifest and gives the folder its name.
    fn rename(&self, files: &dyn Files, all: Vec<Written>, head: &Head<'_>) -> Result<()> {
        let mesh = head
            .placed
            .values()
            .map(|p| &p.mesh)
            .find(|m| m.ranks() > 1);
        let mut manifest = Manifest {
            format: manifest::FORMAT.into(),
            version: manifest::VERSION,
            step: head.step,
            mesh: mesh
                .map(|m| {
                    m.axes()
                        .iter()
                        .map(|(name, size)| (name.to_string(), *size))
                        .collect()
                })
                .unwrap_or_default(),
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
            state: head.state.clone(),
        };
        for (name, placed) in head.placed {
            let info = &placed.info;
            manifest.tensors.insert(
                name.clone(),
                Stored {
                    dtype: info.dtype.name().into(),
                    shape: info.shape.clone(),
                    layout: placed.layout(),
                    regions: vec![],
                },
            );
        }
        for written in all {
            for (name, bytes) in &written.files {
                let path = self.folder.join(name);
                let seen = if self.world.is_shared() {
                    std::fs::metadata(&path).map(|m| m.len()).unwrap_or(0)
                } else {
                    *bytes
                };
                if seen != *bytes {
                    let reason = format!(
                        "another process wrote {bytes} bytes, {seen} are seen here: save into a folder that all processes share"
                    );
                    return Err(Error::Io {
                        path,
                        action: "find",
                        reason,
                    });
                }
            }
            manifest.files.extend(written.files);
            for (tensor, regions) in written.regions {
                if let Some(to) = manifest.tensors.get_mut(&tensor) {
                    to.regions.extend(regions);
                }
            }
        }
        manifest
            .tensors
            .values_mut()
            .for_each(|t| t.regions.sort_by(|a, b| a.start.cmp(&b.start)));
        manifest
            .check()
            .map_err(|detail| Error::format(&self.folder, "checkpoint", detail))?;
        let mut out = files.create(&self.folder.join(manifest::NAME))?;
        out.write(manifest.to_text().as_bytes())?;
        out.sync()?;
        drop(out);
        files.sync_folder(&self.folder)?;
        files.rename(&self.folder, &self.path)?;
        files.sync_folder(&self.root)
    }
}

/// The lock and the temporary folder.
fn prepare(files: &dyn Files, root: &Path, name: &str, path: &Path, folder: &Path) -> Result<Lock> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return Err(Error::BadName {
            name: name.into(),
            what: "the name of a checkpoint: use a file name that does not begin with a dot",
        });
    }
    let missing: Vec<&Path> = root
        .ancestors()
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .collect();
    files.create_folder(root)?;
    // After a power cut a checkpoint is found only if the names of the folders above it are there.
    for folder in missing {
        files.sync_folder(
            folder
                .parent()
                .filter(|p| !p.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
        )?;
    }
    let lock = lock(root)?;
    if path.exists() {
        return Err(Error::Exists { path: path.into() });
    }
    if folder.exists() {
        // What a crash left behind: nobody else writes here, since we have the lock.
        files.remove_folder(folder)?;
    }
    files.create_folder(folder)?;
    Ok(lock)
}
