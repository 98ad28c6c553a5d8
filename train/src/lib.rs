//! Training on any mesh: modules, optimizers, data, a trainer, and real models.
//!
//! A model is a struct of layers ([`Module`]); its parameters ([`Param`]) are known by the names
//! that Hugging Face gives them. A parameter has two layouts: one that it is stored and optimized
//! in, and one that it is computed with, and all stages of ZeRO are choices of the first
//! ([`Zero`]). Nothing here knows how many ranks there are.
//!
//! | | |
//! |---|---|
//! | [`Module`], [`Param`], [`Build`], [`Policy`] | models: parameters by name, layouts, dtypes, first values |
//! | [`nn`] | layers |
//! | [`data`] | text and tokens from files, packed and shuffled into batches on a mesh; tokenizers |
//! | [`BatchSpec`] | batch sizes with their units, the rest from those that are given |
//! | [`log`] | TensorBoard's event files, JSON lines, a line of progress |

#![forbid(unsafe_code)]

// What the derive writes names this crate from outside.
extern crate self as anymesh_train;

mod batch;
mod build;
pub mod data;
mod error;
pub mod log;
mod lora;
mod module;
pub mod nn;
mod param;
mod pass;
mod pattern;
mod policy;
mod summary;

pub use anymesh_train_derive::Module;
pub use batch::{BatchSize, BatchSpec};
pub use build::{Build, Init, Zero, join, key};
pub use error::{Error, Result};
pub use lora::{Adapter, Lora, add_lora, merge_lora};
pub use module::Module;
pub use param::Param;
pub use pass::Pass;
pub use pattern::Pattern;
pub use policy::Policy;
pub use summary::{Row, Summary};
