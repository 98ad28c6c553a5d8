//! Whatever holds tensors, by its path.

use crate::{
    Checkpoint, Error, FileFormat, Result, Source, dcp, gguf, hugging_face, list, manifest,
    safetensors, split,
};
use std::{
    fmt, fs,
    io::Read,
    path::{Path, PathBuf},
};

/// What is at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFormat {
    /// A checkpoint of ours: a folder with a manifest.
    Checkpoint,
    /// One safetensors file.
    Safetensors,
    /// One GGUF file.
    Gguf,
    /// A Hugging Face folder.
    HuggingFace,
    /// A folder of `torch.distributed.checkpoint`.
    Torch,
    /// A folder with a file for each rank, see [`split`](crate::split).
    Split,
}

impl fmt::Display for SourceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SourceFormat::Checkpoint => "checkpoint",
            SourceFormat::Safetensors => "safetensors file",
            SourceFormat::Gguf => "GGUF file",
            SourceFormat::HuggingFace => "Hugging Face folder",
            SourceFormat::Torch => "torch folder",
            SourceFormat::Split => "split folder",
        })
    }
}

impl SourceFormat {
    /// What is at a path, going by the names of files and, of a file, by how it begins; an error
    /// where it is nothing that holds tensors.
    pub fn of(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let has = |name: &str| path.join(name).exists();
        if has(manifest::NAME) {
            return Ok(SourceFormat::Checkpoint);
        }
        if path.is_file() {
            return Ok(match is_gguf(path) {
                true => SourceFormat::Gguf,
                false => SourceFormat::Safetensors,
            });
        }
        if has(hugging_face::SINGLE) || has(hugging_face::INDEX) {
            return Ok(SourceFormat::HuggingFace);
        }
        if has(dcp::METADATA) {
            return Ok(SourceFormat::Torch);
        }
        if has(&split::file_name(0, 0)) {
            return Ok(SourceFormat::Split);
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
            detail: why_not(path),
        })
    }
}

/// Whether a file begins as a GGUF file, or is called like one. No safetensors file begins so: its
/// header would be longer than headers may be.
fn is_gguf(path: &Path) -> bool {
    let mut first = [0; 4];
    let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut first));
    (read.is_ok() && FileFormat::of(&first) == Some(FileFormat::Gguf))
        || path.extension().is_some_and(|end| end == "gguf")
}

/// Why a folder is nothing that can be opened, and what to give instead.
fn why_not(path: &Path) -> String {
    // The folder above is what people give most often.
    let inside: Vec<String> = list(path)
        .unwrap_or_default()
        .into_iter()
        .filter(|found| found.step.is_ok())
        .map(|found| found.path.display().to_string())
        .collect();
    match inside.as_slice() {
        [] => format!(
            "{}it has neither {} (a checkpoint) nor {} or {} (Hugging Face) nor {} (torch) nor {} (split by rank): give the folder of one checkpoint, or a safetensors or GGUF file",
            other_files(path),
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

/// What files of models a folder has that it is not opened for, and what to do with them.
fn other_files(path: &Path) -> String {
    const ENDS: [&str; 9] = [
        "safetensors",
        "gguf",
        "bin",
        "pt",
        "pth",
        "ckpt",
        "h5",
        "onnx",
        "npz",
    ];
    let mut files: Vec<PathBuf> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|file| {
            ENDS.iter()
                .any(|end| file.extension().is_some_and(|e| e == *end))
        })
        .collect();
    files.sort();
    for file in &files {
        let opened = match is_gguf(file) {
            true => gguf::File::open(file).map(drop),
            false => safetensors::File::open(file).map(drop),
        };
        match opened {
            Ok(()) => return format!("give its file {}; ", file.display()),
            Err(Error::OtherFormat { found, .. }) => {
                let name = file.file_name().unwrap_or_default().display().to_string();
                return format!("its file {name} is {found}: {}; ", found.advice());
            }
            Err(_) => {}
        }
    }
    String::new()
}

/// Opens what is at a path: a checkpoint of ours, a safetensors file, a GGUF file (under its own
/// names, see [`gguf::Model`] for those of Hugging Face), a Hugging Face folder, a folder of
/// `torch.distributed.checkpoint`, or one that was split by rank.
pub fn open(path: impl AsRef<Path>) -> Result<Box<dyn Source>> {
    let path = path.as_ref();
    Ok(match SourceFormat::of(path)? {
        SourceFormat::Checkpoint => Box::new(Checkpoint::open(path)?),
        SourceFormat::Safetensors => Box::new(safetensors::File::open(path)?),
        SourceFormat::Gguf => Box::new(gguf::File::open(path)?),
        SourceFormat::HuggingFace => Box::new(hugging_face::Folder::open(path)?),
        SourceFormat::Torch => Box::new(dcp::Folder::open(path)?),
        SourceFormat::Split => Box::new(split::Folder::open(path)?),
    })
}
