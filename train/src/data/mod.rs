//! Data: what a model is trained on, as a function of a seed and a position.
//!
//! A [`Source`] has samples by number. A [`Loader`] makes batches of them: which sample comes at
//! which position is a formula ([`Shuffle`], [`Mixture`]), so that the state of a run is the number
//! of samples it has consumed, and a run goes on from there on any mesh.
//!
//! | from | to | by |
//! |---|---|---|
//! | files of text, JSON lines, Parquet | [`Records`] | [`Text`], [`JsonLines`], `Parquet` with the feature `parquet`; [`open_records`] |
//! | [`Records`] | [`Documents`]: tokens by number | [`Tokenized`] with a [`Tokenizer`] and a [`Form`] |
//! | [`Documents`] | files of tokens, [`Megatron`]'s | [`tokenize`], [`tokenize_once`] |
//! | files of tokens | [`Tokens`]: one long row | [`TokenFile`], [`Megatron`] |
//! | [`Tokens`], [`Documents`] | a [`Source`] of rows | [`Concat`], [`FirstFit`], [`Each`] |
//! | [`Source`]s | batches on a mesh | [`Mixture`], [`Loader`] |
//!
//! Files that are truncated, damaged or change while they are read give errors with file and
//! offset.

mod file;
mod first_fit;
mod json_lines;
mod loader;
mod megatron;
mod memory;
mod mixture;
mod pack;
mod parallel;
#[cfg(feature = "parquet")]
mod parquet;
mod records;
mod sample;
mod shuffle;
mod text;
mod token_file;
mod tokenize;
mod tokenized;
mod tokenizer;

pub use first_fit::FirstFit;
pub use json_lines::JsonLines;
pub use loader::{Batch, IntoMixture, Loader, LoaderOptions, Step, Steps};
pub use megatron::{Megatron, MegatronWriter};
pub use memory::Memory;
pub use mixture::Mixture;
pub use pack::{Concat, Each};
#[cfg(feature = "parquet")]
pub use parquet::Parquet;
pub use records::{Field, Records, open_records};
pub use sample::{Document, Documents, IGNORED, Joined, PADDING, Sample, Source, Tokens};
pub use shuffle::Shuffle;
pub use text::{Split, Text};
pub use token_file::{TokenFile, TokenType};
pub use tokenize::{Tokenization, tokenize, tokenize_once};
pub use tokenized::{Form, Tokenized};
pub use tokenizer::{Special, TextStream, Tokenizer};

#[cfg(test)]
pub(crate) mod tests;
