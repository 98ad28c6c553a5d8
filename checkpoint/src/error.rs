//! What can go wrong with a checkpoint.

use std::path::{Path, PathBuf};

/// Everything that can go wrong. Each variant says where, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file system refused.
    #[error("{path}: {action} failed: {reason}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done, such as `read`.
        action: &'static str,
        /// The system's words.
        reason: String,
    },
    /// A file that is not what it should be.
    #[error("{path}: not a valid {what}: {detail}", path = path.display())]
    Format {
        /// The file or folder.
        path: PathBuf,
        /// What it was read as, such as `safetensors file`.
        what: &'static str,
        /// What is wrong.
        detail: String,
    },
    /// Bytes that are not those that were written.
    #[error("{path}: tensor '{tensor}', box {region}: the stored bytes are damaged ({detail}); load an older checkpoint or a replica", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Which part of it.
        region: String,
        /// How that shows.
        detail: String,
    },
    /// A tensor that is not there.
    #[error("there is no tensor '{name}'{hint}")]
    Missing {
        /// The name asked for.
        name: String,
        /// Names that are near, or nothing.
        hint: String,
    },
    /// A tensor whose element type this library has none for. The rest of the file can be read.
    #[error("{path}: tensor '{tensor}' has elements of type {dtype}, which has no counterpart here; remove it or convert it first", path = path.display())]
    ForeignType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type as the file names it.
        dtype: String,
    },
    /// A list of tensors and the files they are in that does not agree with the files.
    #[error("{path}: tensor '{tensor}' and file '{file}': {detail}", path = path.display())]
    Index {
        /// The list.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The file it is said to be in, or is in.
        file: String,
        /// What does not agree.
        detail: String,
    },
    /// A pickle that asks for something that is not plain checkpoint data. Nothing of a pickle is
    /// ever executed.
    #[error("{path}: the pickle asks for '{global}', which is not one of the plain data types of a checkpoint; nothing was executed", path = path.display())]
    ForbiddenGlobal {
        /// The file.
        path: PathBuf,
        /// Module and name.
        global: String,
    },
    /// A statement of a mapping that cannot be carried out.
    #[error("mapping line {line}: {detail}\n{trace}")]
    Mapping {
        /// The user's line, from 1.
        line: usize,
        /// What is wrong.
        detail: String,
        /// The statement and what it was expanded to on the way, a line each.
        trace: String,
    },
    /// Another process failed while several saved together.
    #[error(
        "saving failed in the processes of ranks {ranks:?}, whose errors say why: nothing was committed"
    )]
    Elsewhere {
        /// The first rank of each process that failed.
        ranks: Vec<usize>,
    },
    /// An argument outside its domain.
    #[error("{0}")]
    Argument(String),
    /// An error of the tensor library.
    #[error(transparent)]
    Core(#[from] anymesh_core::Error),
}

impl Error {
    /// An error of the file system.
    pub fn io(path: impl AsRef<Path>, action: &'static str, error: &std::io::Error) -> Self {
        Self::Io {
            path: path.as_ref().into(),
            action,
            reason: error.to_string(),
        }
    }

    /// A file that is not what it should be.
    pub fn format(path: impl AsRef<Path>, what: &'static str, detail: impl Into<String>) -> Self {
        Self::Format {
            path: path.as_ref().into(),
            what,
            detail: detail.into(),
        }
    }
}

/// Shorthand used by every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
