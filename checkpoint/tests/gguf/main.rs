//! GGUF files: what blocks hold, files of the Python package, files that are wrong, models under
//! Hugging Face's names, tokenizers.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod build;
mod files;
mod malformed;
mod model;
mod real;
mod tokenizer;
