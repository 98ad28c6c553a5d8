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
//! | [`models`] | GPT-2, Llama and its relatives, BERT; from files and to files |
//! | [`TextModel`], [`generate`], [`Sampling`], [`ChatTemplate`] | text |
//! | [`Encoder`] | vectors of sentences |
//! | [`data`] | text and tokens from files, packed and shuffled into batches on a mesh; tokenizers |
//! | [`BatchSpec`] | batch sizes with their units, the rest from those that are given |
//! | [`objective`] | what training makes small: losses |
//! | [`optim`] | optimizers, clipping, schedules, averages |
//! | [`trainer`], [`config`] | runs: steps, evaluation, checkpoints, faults; a run as one TOML file |
//! | [`log`] | TensorBoard's event files, JSON lines, a line of progress |

#![forbid(unsafe_code)]

// What the derive writes names this crate from outside.
extern crate self as anymesh_train;

mod batch;
mod build;
mod chat;
pub mod config;
pub mod data;
mod embed;
mod error;
mod generate;
mod grow;
pub mod log;
mod lora;
pub mod measure;
pub mod models;
mod module;
pub mod nn;
pub mod objective;
pub mod optim;
mod param;
mod pass;
mod pattern;
pub mod pipeline;
mod policy;
mod recompute;
mod sampling;
mod summary;
mod text;
pub mod trainer;

pub use anymesh_train_derive::Module;
pub use batch::{BatchSize, BatchSpec};
pub use build::{Build, Init, Zero, join, key};
pub use chat::{ChatTemplate, Message};
pub use embed::{Encoder, Pooling, Sentences, normalized};
pub use error::{Error, Result};
pub use generate::{Decoder, Finish, Generate, Generated, generate};
pub use grow::{grow_rows, grow_vocabulary};
pub use lora::{Adapter, Lora, add_lora, load_lora, lora_pass, lora_values, merge_lora, save_lora};
pub use module::Module;
pub use param::Param;
pub use pass::Pass;
pub use pattern::Pattern;
pub use policy::Policy;
pub use sampling::Sampling;
pub use summary::{Row, Summary};
pub use text::{Completion, TextModel};
