//! Checkpoints: any mesh in, any mesh out, never half-written.
//!
//! A checkpoint is a folder of ordinary safetensors files and a [`manifest`], written into a
//! temporary folder, synced and renamed. It is saved from tensors however they lie and loaded into
//! any sharding of any mesh, reading only what is needed.
//!
//! ```
//! # use anymesh_checkpoint::{Contents, latest, save};
//! # use anymesh_core::{DType, Mesh, Sharding, Tensor};
//! # use std::collections::BTreeMap;
//! # let root = std::env::temp_dir().join(format!("anymesh-doc-{}", std::process::id()));
//! # let device = anymesh_backend_cpu::device();
//! let mesh = Mesh::new("dp=2, tp=4", &device)?;
//! let w = Tensor::arange(0, 24, 1, DType::F32, &device)?.reshape([4, 6])?;
//! let w = w.to_mesh(&mesh, "[@dp, @tp]")?;
//! save(&root, "step-100", &Contents::new(100, BTreeMap::from([("w".to_string(), w)])))?;
//!
//! let other = Mesh::new("x=3", &device)?;
//! let found = latest(&root)?.expect("just saved");
//! let w = found.load("w", (&other, &Sharding::replicated().cut(0, 0)))?;
//! assert_eq!(w.type_string(), "f32[4@x, 6]");
//! assert_eq!(w.to_vec::<f32>()?, (0..24).map(|i| i as f32).collect::<Vec<_>>());
//! # std::fs::remove_dir_all(&root).ok();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Everything that holds tensors is a [`Source`]: a checkpoint, a file of another program, a
//! mapping of names and shapes over another source. A source is read region by region (a region is
//! a box of a tensor: where it begins, and its sizes), so that nothing is larger in memory than
//! what was asked for.

#![forbid(unsafe_code)]

mod average;
mod background;
mod commit;
mod contents;
pub mod dcp;
mod element;
mod error;
mod file_format;
pub mod files;
mod folder;
pub mod gguf;
pub mod hugging_face;
mod layouts;
mod load;
pub mod lora;
pub mod manifest;
pub mod map;
mod names;
mod open;
pub mod plan;
mod positioned;
mod read;
mod regions;
pub mod reproduction;
mod root;
pub mod safetensors;
mod save;
mod source;
pub mod split;
mod sum;
mod tensor_info;
mod training;
mod without;
mod world;

pub use background::Background;
pub use contents::{Contents, Fused, FusedPart, MASTER, Weights};
pub use element::number;
pub use error::{Difference, Error, Result};
pub use file_format::FileFormat;
pub use folder::{Candidate, Keep, latest, list, rotate, rotate_with};
pub use layouts::Layouts;
pub use load::{Load, Loaded, load};
pub use names::{matches, select};
pub use open::{SourceFormat, open};
pub use positioned::ReadAt;
pub use read::Checkpoint;
pub use regions::copy_region;
pub use save::{Saver, save};
pub use source::{Memory, Source};
pub use sum::content_sum;
pub use tensor_info::TensorInfo;
pub use training::{RandomKey, Training, config_files};
pub use without::Without;
