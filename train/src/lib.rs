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
//! | [`models`] | GPT-2, Llama and its relatives, BERT |
//! | [`objective`] | what training makes small: losses |

#![forbid(unsafe_code)]

// What the derive writes names this crate from outside.
extern crate self as anymesh_train;

mod build;
pub mod config;
mod error;
mod lora;
pub mod models;
mod module;
pub mod nn;
pub mod objective;
mod param;
mod pass;
mod pattern;
mod policy;
mod recompute;
mod summary;

pub use anymesh_train_derive::Module;
pub use build::{Build, Init, Zero, join, key};
pub use error::{Error, Result};
pub use lora::{Adapter, Lora, add_lora, load_lora, lora_pass, lora_values, merge_lora, save_lora};
pub use module::Module;
pub use param::Param;
pub use pass::Pass;
pub use pattern::Pattern;
pub use policy::Policy;
pub use summary::{Row, Summary};
