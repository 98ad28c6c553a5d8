//! GGUF files, which llama.cpp and its relatives keep models in.
//!
//! [`File`] is such a file as it is: tensors under their names there, metadata, a tokenizer.
//! [`Model`] is the same under the names of Hugging Face, for the architectures whose names are
//! known, with a `config.json`. Both are read region by region, and of a quantized tensor only the
//! blocks that hold the region; its elements are f32.
//!
//! Nothing in a file is believed before it is checked, which happens once, when it is opened.
//!
//! ```
//! use anymesh_checkpoint::{gguf, Source};
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gguf/llama.gguf");
//! let file = gguf::File::open(path)?;
//! assert_eq!(file.architecture(), Some("llama"));
//! assert_eq!(file.tensor_type("blk.0.attn_q.weight").map(|kind| kind.name()), Some("Q8_0"));
//! assert_eq!(file.info("blk.0.attn_q.weight")?.to_string(), "f32[32, 32]");
//!
//! let model = gguf::Model::new(file)?;
//! assert_eq!(model.config()["num_key_value_heads"], 2);
//! let name = "model.layers.0.self_attn.q_proj.weight";
//! assert_eq!(model.read_all(name)?.len(), 32 * 32 * 4);
//! # Ok::<(), anymesh_checkpoint::Error>(())
//! ```

mod blocks;
mod config;
mod cursor;
mod defect;
mod header;
mod metadata;
mod model;
mod names;
mod pre_tokenizer;
mod sentence_piece;
mod tokenizer;

use crate::positioned::{Positioned, SPAN};
use crate::regions::{row_major, slabs};
use crate::source::check_region;
use crate::{Error, ReadAt, Result, Source, TensorInfo};
use anymesh_core::Region;
use header::{Header, Stored};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

pub use blocks::TensorType;
pub use defect::Defect;
pub use metadata::Metadata;
pub use model::Model;
pub use names::{ARCHITECTURES, hugging_face_name};

const WHAT: &str = "GGUF file";

/// A GGUF file that is read region by region.
///
/// Shapes are row-major, as everywhere here: the reverse of the order in the file. Elements of
/// quantized tensors are read as f32; those of other types as what they are.
#[derive(Debug)]
pub struct File {
    file: Positioned,
    header: Header,
}

impl File {
    /// Opens a file, and checks everything that stands before its data.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::of(Positioned::open(path.as_ref())?)
    }

    /// A file that `reader` has, checked in the same way; `path` is for errors.
    ///
    /// ```
    /// use anymesh_checkpoint::{Source, gguf};
    /// use std::sync::Arc;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gguf/llama.gguf");
    /// let bytes = std::fs::read(path)?;
    /// let file = gguf::File::reading("llama.gguf", Arc::new(bytes))?;
    /// assert_eq!(file.read_all("output_norm.weight")?.len(), 32 * 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reading(path: impl AsRef<Path>, reader: Arc<dyn ReadAt>) -> Result<Self> {
        Self::of(Positioned::reading(path.as_ref(), reader))
    }

    fn of(file: Positioned) -> Result<Self> {
        let header = header::read(&file)?;
        Ok(Self { file, header })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The version of the format.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// The architecture of the model, such as `llama`.
    pub fn architecture(&self) -> Option<&str> {
        self.metadata().text("general.architecture")
    }

    /// How the elements of a tensor are stored; `None` where there is no such tensor or its type is
    /// not read here.
    pub fn tensor_type(&self, name: &str) -> Option<&'static TensorType> {
        self.header.stored.get(name).map(|stored| stored.kind)
    }

    /// How many bytes a tensor has in the file.
    pub fn stored_bytes(&self, name: &str) -> Option<usize> {
        let (info, kind) = (self.header.tensors.get(name)?, self.tensor_type(name)?);
        Some(info.numel() / kind.block() * kind.bytes())
    }

    /// An error about the model or its tokenizer.
    fn wrong(&self, item: impl Into<String>, detail: impl Into<String>) -> Error {
        Error::GgufModel {
            path: self.path().into(),
            item: item.into(),
            detail: detail.into(),
        }
    }

    /// Reads a region of rows that lie wherever `strides` lead: bytes from one index to the next of
    /// every dimension but the last, which is that of the elements of a row.
    fn read_rows(
        &self,
        stored: Stored,
        strides: &[u64],
        region: &Region,
        out: &mut [u8],
    ) -> Result<()> {
        let (kind, size) = (stored.kind, stored.kind.bytes());
        let strides = [strides, &[size as u64]].concat();
        let Some(unpack) = kind.unpack() else {
            return self
                .file
                .read_strided(stored.offset, &strides, region, size, out);
        };
        let (Some(&first), Some(&width)) = (region.start.last(), region.shape.last()) else {
            return Ok(());
        };
        if region.numel() == 0 {
            return Ok(());
        }
        // The region in blocks; they come in the order of the rows.
        let (from, to) = (first / kind.block(), (first + width).div_ceil(kind.block()));
        let (mut start, mut shape) = (region.start.to_vec(), region.shape.to_vec());
        let last = start.len() - 1;
        (start[last], shape[last]) = (from, to - from);
        let mut elements = vec![0.0; kind.block()];
        let mut bytes = vec![];
        let mut count = 0;
        for mut part in slabs(shape, size, SPAN as usize) {
            part.start.iter_mut().zip(&start).for_each(|(a, b)| *a += b);
            bytes.resize(part.numel() * size, 0);
            self.file
                .read_strided(stored.offset, &strides, &part, size, &mut bytes)?;
            for block in bytes.chunks_exact(size) {
                unpack(block, &mut elements);
                let (row, block) = (count / (to - from), from + count % (to - from));
                // What the row of the region has of the block.
                let begin = (block * kind.block()).max(first);
                let end = ((block + 1) * kind.block()).min(first + width);
                let at = 4 * (row * width + begin - first);
                let wanted = &elements[begin - block * kind.block()..][..end - begin];
                out[at..at + 4 * wanted.len()]
                    .as_chunks_mut()
                    .0
                    .iter_mut()
                    .zip(wanted)
                    .for_each(|(out, x)| *out = x.to_le_bytes());
                count += 1;
            }
        }
        Ok(())
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
            .map(|(name, kind)| (name.clone(), kind.clone()))
            .collect()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        if let Some(kind) = self.header.foreign.get(name) {
            return Err(Error::ForeignType {
                path: self.path().into(),
                tensor: name.into(),
                dtype: kind.clone(),
            });
        }
        crate::source::find(&self.header.tensors, name)
    }

    fn read(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        check_region(name, info, region, out)?;
        let Some(stored) = self.header.stored.get(name) else {
            return Ok(());
        };
        let Some((row, rows)) = info.shape.split_last() else {
            return self.file.read_at(stored.offset, out);
        };
        let row = row / stored.kind.block() * stored.kind.bytes();
        self.read_rows(*stored, &row_major(rows, row), region, out)
    }
}
