//! What can go wrong when a model is built, fed or trained.

use std::path::PathBuf;

/// Everything that can go wrong. Each variant says where, and what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor op, a mesh or a device.
    #[error(transparent)]
    Tensor(#[from] anymesh_core::Error),
    /// A checkpoint or a model's files.
    #[error(transparent)]
    Checkpoint(#[from] anymesh_checkpoint::Error),
    /// A schedule of a pipeline.
    #[error(transparent)]
    Schedule(#[from] anymesh_schedule::Error),
    /// A parameter that is not what it should be.
    #[error("parameter '{name}': {detail}")]
    Parameter {
        /// Its name.
        name: String,
        /// What is wrong, and what to do.
        detail: String,
    },
    /// A pattern of parameter names that says nothing.
    #[error("the pattern '{pattern}' {detail}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A setting that is out of range, unknown, or contradicts another.
    #[error("{key}: {detail}")]
    Config {
        /// The setting, such as `optimizer.lr`.
        key: String,
        /// What is wrong, and what to do.
        detail: String,
    },
    /// A file of data that is not what it should be.
    #[error("{path}, byte {offset}: {detail}", path = path.display())]
    Data {
        /// The file.
        path: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong, and what to do.
        detail: String,
    },
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
    /// Text that could not be made tokens, or tokens that could not be made text.
    #[error("{path}: {detail}", path = path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A training run that cannot go on.
    #[error("step {step}: {detail}")]
    Stopped {
        /// The step at which it ended.
        step: u64,
        /// Why, and what to do.
        detail: String,
    },
}

impl Error {
    /// A setting that cannot be.
    pub fn config(key: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Config {
            key: key.into(),
            detail: detail.into(),
        }
    }

    /// What the file system refused.
    pub fn io(path: impl Into<PathBuf>, action: &'static str, reason: &std::io::Error) -> Self {
        Self::Io {
            path: path.into(),
            action,
            reason: reason.to_string(),
        }
    }

    /// A parameter that is not what it should be.
    pub fn parameter(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Parameter {
            name: name.into(),
            detail: detail.into(),
        }
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
