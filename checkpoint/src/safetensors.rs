//! Ordinary safetensors files, in and out.
//!
//! Why not the `safetensors` crate: it takes a file as one slice, which is either all of it in
//! memory or a memory map (`unsafe`, and a crash when another process cuts the file short). Here a
//! file is read at positions, only where a region needs it, and written as a stream.
//!
//! ```
//! use anymesh_checkpoint::{safetensors, Source, TensorInfo};
//! use anymesh_core::DType;
//! use std::collections::BTreeMap;
//!
//! # let name = format!("anymesh-doc-safetensors-{}", std::process::id());
//! # let folder = std::env::temp_dir().join(name);
//! # std::fs::create_dir_all(&folder).unwrap();
//! let path = folder.join("model.safetensors");
//! let info = TensorInfo { dtype: DType::U8, shape: vec![4] };
//! let tensors = BTreeMap::from([("bias".to_string(), info)]);
//! safetensors::write(&path, &tensors, &BTreeMap::new(), |_name, out| out.write(&[1, 2, 3, 4]))?;
//!
//! let file = safetensors::File::open(&path)?;
//! assert_eq!(file.read_all("bias")?, [1, 2, 3, 4]);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod header;
mod write;

use crate::positioned::Positioned;
use crate::regions::row_major;
use crate::source::check_region;
use crate::{Error, ReadAt, Result, Source, TensorInfo};
use anymesh_core::Region;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub use header::Header;
pub use write::{CHUNK, TensorWriter, write, write_source};
pub(crate) use write::{copy_tensor, header_of, refuse_foreign, sync_folder, write_in_place};

/// A safetensors file that is read region by region.
///
/// The header is checked once, when the file is opened. The rows of a region that lie at most 8 KiB
/// apart are read in one call of at most 1 MiB: at most 8 KiB are read too much for each row, and 1
/// MiB is the memory a read needs besides its target.
#[derive(Debug)]
pub struct File {
    file: Positioned,
    header: Header,
}

impl File {
    /// Opens a file and checks its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::of(Positioned::open(path.as_ref())?)
    }

    /// A file that `reader` has, checked in the same way; `path` is for errors.
    pub fn reading(path: impl AsRef<Path>, reader: Arc<dyn ReadAt>) -> Result<Self> {
        Self::of(Positioned::reading(path.as_ref(), reader))
    }

    fn of(file: Positioned) -> Result<Self> {
        let header = header::read(&file)?;
        Ok(Self { file, header })
    }

    /// The free-form strings of the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// What the header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Closes the file until it is read again.
    pub(crate) fn close(&mut self) {
        self.file.close();
    }
}

impl Source for File {
    fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.header.tensors
    }

    fn foreign(&self) -> Vec<(String, String)> {
        self.header
            .foreign
            .iter()
            .map(|(name, dtype)| (name.clone(), dtype.clone()))
            .collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        if let Some(dtype) = self.header.foreign.get(name) {
            return Err(Error::ForeignType {
                path: self.file.path().into(),
                tensor: name.into(),
                dtype: dtype.clone(),
            });
        }
        crate::source::find(&self.header.tensors, name)
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        check_region(name, info, region, out)?;
        let base = self.header.offsets.get(name).copied().unwrap_or(0);
        let size = info.dtype.size();
        self.file
            .read_strided(base, &row_major(&info.shape, size), region, size, out)
    }
}
