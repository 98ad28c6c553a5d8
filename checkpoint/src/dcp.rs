//! Folders of `torch.distributed.checkpoint`, read without Python and without executing anything.
//!
//! Such a folder has a `.metadata` pickle, which says which region of which tensor is at which
//! bytes of which file, and `__i_j.distcp` files, whose items are archives of `torch.save`. Both
//! kinds of pickle are read by a reader that knows a list of plain data types and refuses every
//! other name.
//!
//! ```no_run
//! use anymesh_checkpoint::{dcp, Source};
//!
//! let checkpoint = dcp::Folder::open("step-1000")?;
//! for (name, info) in checkpoint.tensors() {
//!     println!("{name}: {}{:?}", info.dtype, info.shape);
//! }
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod archive;
mod metadata;
mod pickle;

use crate::positioned::Positioned;
use crate::source::check_region;
use crate::{Error, Result, Source, TensorInfo, copy_region};
use anymesh_core::Region;
use archive::Stored;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

pub use metadata::{Chunk, Metadata, Tensor};

/// The file that makes a folder a checkpoint.
pub const METADATA: &str = ".metadata";

/// A folder of `torch.distributed.checkpoint` that is read region by region: only the chunks that a
/// region touches, and of those only its rows.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    metadata: Metadata,
    tensors: BTreeMap<String, TensorInfo>,
    files: Mutex<HashMap<String, Arc<Positioned>>>,
    /// What is known of items, by file and offset.
    items: Mutex<HashMap<(String, u64), Arc<Stored>>>,
}

impl Folder {
    /// Opens a folder and checks its metadata; its files are opened when something of them is first
    /// read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let at = path.join(METADATA);
        let bytes = std::fs::read(&at).map_err(|e| Error::io(&at, "read", &e))?;
        let metadata = Metadata::parse(&bytes, &at)?;
        check_files(path, &metadata)?;
        let tensors = metadata
            .tensors
            .iter()
            .filter_map(|(name, tensor)| {
                Some((
                    name.clone(),
                    TensorInfo {
                        dtype: metadata::dtype(&tensor.dtype)?,
                        shape: tensor.shape.clone(),
                    },
                ))
            })
            .collect();
        Ok(Self {
            path: path.into(),
            metadata,
            tensors,
            files: Mutex::default(),
            items: Mutex::default(),
        })
    }

    /// Which regions are in which files.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The names of values that are not tensors, such as step counters: they are pickles of any
    /// kind, and are not read.
    pub fn objects(&self) -> &[String] {
        &self.metadata.objects
    }

    fn file(&self, name: &str) -> Result<Arc<Positioned>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = files.get(name) {
            return Ok(file.clone());
        }
        let file = Arc::new(Positioned::open(&self.path.join(name))?);
        files.insert(name.into(), file.clone());
        Ok(file)
    }

    /// Where the elements of a chunk are. Candidate once; two threads that look at the same time
    /// find the same.
    fn stored(
        &self,
        tensor: &str,
        info: &TensorInfo,
        chunk: &Chunk,
        file: &Positioned,
    ) -> Result<Arc<Stored>> {
        let key = (chunk.file.clone(), chunk.offset);
        let wrong = |detail: String| Error::Index {
            path: self.path.join(METADATA),
            tensor: tensor.into(),
            file: chunk.file.clone(),
            detail,
        };
        let known = self
            .items
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
            .cloned();
        let stored = match known {
            Some(stored) => stored,
            None => {
                let stored = Arc::new(archive::read(file, chunk.offset, chunk.length)?);
                self.items
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .insert(key, stored.clone());
                stored
            }
        };
        if metadata::dtype(&stored.dtype) != Some(info.dtype)
            || stored.shape != chunk.region.shape[..]
        {
            return Err(wrong(format!(
                "{}{:?} is stored where the metadata says {}{:?}",
                stored.dtype,
                stored.shape,
                info.dtype,
                &chunk.region.shape[..]
            )));
        }
        Ok(stored)
    }
}

/// Whether every item lies in its file and has room for its elements: afterwards what a tensor
/// takes in memory is bounded by what is on the disk.
fn check_files(folder: &Path, metadata: &Metadata) -> Result<()> {
    let mut lengths: HashMap<&str, Option<u64>> = HashMap::new();
    for (name, tensor) in &metadata.tensors {
        let size = metadata::dtype(&tensor.dtype).map_or(0, |dtype| dtype.size());
        for chunk in &tensor.chunks {
            let length = *lengths.entry(&chunk.file).or_insert_with(|| {
                std::fs::metadata(folder.join(&chunk.file))
                    .ok()
                    .filter(|data| data.is_file())
                    .map(|data| data.len())
            });
            let end = chunk.offset.checked_add(chunk.length);
            let detail = match length {
                None => "the file is not there".into(),
                Some(length) if end.is_none_or(|end| end > length) => {
                    format!(
                        "{} bytes at {} do not lie in a file of {length}; it was cut short",
                        chunk.length, chunk.offset
                    )
                }
                _ if chunk.length < (chunk.region.numel() * size) as u64 => {
                    format!(
                        "{} bytes cannot hold a region of {} elements",
                        chunk.length,
                        chunk.region.numel()
                    )
                }
                _ => continue,
            };
            return Err(Error::Index {
                path: folder.join(METADATA),
                tensor: name.clone(),
                file: chunk.file.clone(),
                detail,
            });
        }
    }
    Ok(())
}

impl Source for Folder {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        let all = self
            .metadata
            .tensors
            .iter()
            .filter(|(name, _)| !self.tensors.contains_key(*name));
        all.map(|(name, tensor)| (name.clone(), tensor.dtype.clone()))
            .collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        match (self.tensors.get(name), self.metadata.tensors.get(name)) {
            (None, Some(tensor)) => Err(Error::ForeignType {
                path: self.path.join(METADATA),
                tensor: name.into(),
                dtype: tensor.dtype.clone(),
            }),
            _ => crate::source::find(&self.tensors, name),
        }
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        check_region(name, info, region, out)?;
        let size = info.dtype.size();
        for chunk in self
            .metadata
            .tensors
            .get(name)
            .map_or(&[][..], |tensor| &tensor.chunks)
        {
            // A region without elements touches nothing, and every region of a scalar is all of it.
            let Some(part) = (region.numel() > 0)
                .then(|| chunk.region.intersect(region))
                .flatten()
            else {
                continue;
            };
            let file = self.file(&chunk.file)?;
            let stored = self.stored(name, info, chunk, &file)?;
            let inner = Region {
                start: part
                    .start
                    .iter()
                    .zip(&chunk.region.start)
                    .map(|(a, b)| a - b)
                    .collect(),
                shape: part.shape.clone(),
            };
            let mut bytes = vec![];
            let target = if part == *region {
                &mut *out
            } else {
                bytes.resize(part.numel() * size, 0);
                &mut bytes
            };
            file.read_strided(stored.base, &stored.strides, &inner, size, target)?;
            // Of less than a whole chunk there is no sum.
            if part == chunk.region && stored.sum.is_some_and(|sum| sum != crc32fast::hash(target))
            {
                return Err(Error::Damaged {
                    path: file.path().into(),
                    tensor: name.into(),
                    start: part.start.to_vec(),
                    shape: part.shape.to_vec(),
                    offset: chunk.offset,
                });
            }
            if part != *region {
                copy_region(&bytes, &part, out, region, &part, size);
            }
        }
        Ok(())
    }
}
