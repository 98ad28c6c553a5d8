//! Checkpoints: any mesh in, any mesh out, never half-written.
//!
//! Everything that holds tensors is a [`Source`]: a checkpoint of ours, a Hugging Face folder, a file, a mapping of names and shapes over another source. A source
//! is read box by box, so that nothing is larger in memory than what was asked for.

#![forbid(unsafe_code)]

mod boxes;
pub mod dcp;
mod error;
pub mod hugging_face;
mod positioned;
pub mod safetensors;
mod source;

pub use error::{Error, Result};
pub use source::{Memory, Source, TensorInfo, copy_box};
