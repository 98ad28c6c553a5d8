//! Whatever holds tensors, by its path.

use crate::{Checkpoint, Error, Result, Source, manifest, safetensors};
use std::path::Path;

/// Opens what is at a path: a checkpoint of ours or a safetensors file.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn Source>> {
    let path = path.as_ref();
    if path.join(manifest::NAME).exists() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    if path.is_file() {
        return Ok(Box::new(safetensors::File::open(path)?));
    }
    if !path.exists() {
        return Err(Error::Io { path: path.into(), action: "open", reason: "there is no such file or folder".into() });
    }
    let detail = format!("it has no {}: give the folder of one checkpoint, or a safetensors file", manifest::NAME);
    Err(Error::Format { path: path.into(), what: "checkpoint", detail })
}
