//! Whatever holds tensors, by its path.

use crate::{Checkpoint, Error, Result, Source, dcp, hugging_face, manifest, safetensors};
use std::path::Path;

/// Opens what is at a path: a checkpoint of ours, a safetensors file, a Hugging Face folder, or a folder of `torch.distributed.checkpoint`.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn Source>> {
    let path = path.as_ref();
    let has = |name: &str| path.join(name).exists();
    if has(manifest::NAME) {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    if path.is_file() {
        return Ok(Box::new(safetensors::File::open(path)?));
    }
    if has(hugging_face::SINGLE) || has(hugging_face::INDEX) {
        return Ok(Box::new(hugging_face::Folder::open(path)?));
    }
    if has(dcp::METADATA) {
        return Ok(Box::new(dcp::Folder::open(path)?));
    }
    if !path.exists() {
        return Err(Error::Io { path: path.into(), action: "open", reason: "there is no such file or folder".into() });
    }
    let detail = format!(
        "it has neither {} (a checkpoint) nor {} or {} (Hugging Face) nor .metadata (torch): give the folder of one checkpoint, or a safetensors file",
        manifest::NAME,
        hugging_face::SINGLE,
        hugging_face::INDEX
    );
    Err(Error::Format { path: path.into(), what: "checkpoint", detail })
}
