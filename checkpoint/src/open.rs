//! Whatever holds tensors, by its path.

use crate::{
    Checkpoint, Error, Result, Source, dcp, hugging_face, list, manifest, safetensors, split,
};
use std::{fmt, path::Path};

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A checkpoint of ours: a folder with a manifest.
    Checkpoint,
    /// One safetensors file.
    Safetensors,
    /// A Hugging Face folder.
    HuggingFace,
    /// A folder of `torch.distributed.checkpoint`.
    Torch,
    /// A folder with a file for each rank, see [`split`](crate::split).
    Split,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Checkpoint => "checkpoint",
            Kind::Safetensors => "safetensors file",
            Kind::HuggingFace => "Hugging Face folder",
            Kind::Torch => "torch folder",
            Kind::Split => "split folder",
        })
    }
}

impl Kind {
    /// What is at a path, going by the names of files; an error where it is nothing that holds
    /// tensors.
    pub fn of(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let has = |name: &str| path.join(name).exists();
        if has(manifest::NAME) {
            return Ok(Kind::Checkpoint);
        }
        if path.is_file() {
            return Ok(Kind::Safetensors);
        }
        if has(hugging_face::SINGLE) || has(hugging_face::INDEX) {
            return Ok(Kind::HuggingFace);
        }
        if has(dcp::METADATA) {
            return Ok(Kind::Torch);
        }
        if has(&split::file_name(0, 0)) {
            return Ok(Kind::Split);
        }
        if !path.exists() {
            return Err(Error::Io {
                path: path.into(),
                action: "open",
                reason: "there is no such file or folder".into(),
            });
        }
        Err(Error::Format {
            path: path.into(),
            what: "checkpoint",
            detail: nothing(path),
        })
    }
}

/// Why a folder is nothing that can be opened, and what to give instead.
fn nothing(path: &Path) -> String {
    // The folder above is what people give most often.
    let inside: Vec<String> = list(path)
        .unwrap_or_default()
        .into_iter()
        .filter(|found| found.step.is_ok())
        .map(|found| found.path.display().to_string())
        .collect();
    match inside.as_slice() {
        [] => format!(
            "it has neither {} (a checkpoint) nor {} or {} (Hugging Face) nor {} (torch) nor {} (split by rank): give the folder of one checkpoint, or a safetensors file",
            manifest::NAME,
            hugging_face::SINGLE,
            hugging_face::INDEX,
            dcp::METADATA,
            split::file_name(0, 0)
        ),
        [only] => format!("it is a folder with a checkpoint in it: give {only}"),
        [newest, others @ ..] => {
            let more = if others.len() > 4 {
                format!(" and {} more", others.len() - 4)
            } else {
                String::new()
            };
            let others = others
                .iter()
                .take(4)
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ");
            format!(
                "it is a folder of checkpoints: give one of them, such as the newest, {newest}; there are also {others}{more}"
            )
        }
    }
}

/// Opens what is at a path: a checkpoint of ours, a safetensors file, a Hugging Face folder, a
/// folder of `torch.distributed.checkpoint`, or one that was split by rank.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn Source>> {
    let path = path.as_ref();
    Ok(match Kind::of(path)? {
        Kind::Checkpoint => Box::new(Checkpoint::open(path)?),
        Kind::Safetensors => Box::new(safetensors::File::open(path)?),
        Kind::HuggingFace => Box::new(hugging_face::Folder::open(path)?),
        Kind::Torch => Box::new(dcp::Folder::open(path)?),
        Kind::Split => Box::new(split::Folder::open(path)?),
    })
}
