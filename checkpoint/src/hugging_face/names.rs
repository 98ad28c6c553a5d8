//! The names of the files of a Hugging Face folder.

use std::path::{Component, Path};

/// The only file of a model that has one.
pub const SINGLE: &str = "model.safetensors";

/// The list of which tensor is in which file.
pub const INDEX: &str = "model.safetensors.index.json";

/// The files beside the tensors that say what the model is.
pub const CONFIGS: [&str; 2] = ["config.json", "generation_config.json"];

/// A name that stays inside its folder, or nothing.
pub(super) fn plain_name(name: &str) -> Option<&str> {
    let mut parts = Path::new(name).components();
    (matches!(parts.next(), Some(Component::Normal(part)) if part == name)
        && parts.next().is_none())
    .then_some(name)
}
