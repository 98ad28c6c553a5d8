//! What GGUF files have besides tensors: metadata, configuration, tokenizer.

use super::input::Opened;
use anymesh::checkpoint::{Source, gguf};
use clap::Args;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Elements of an array that are shown.
const SHOWN: usize = 8;

/// Characters of a text that are shown to people.
const SHOWN_TEXT: usize = 120;

/// Under which names the tensors of a GGUF file are taken.
#[derive(Args)]
pub(crate) struct Names {
    /// Take the tensors of a GGUF file under their names there and with their rows in the order of
    /// the file, not as Hugging Face has them, which is done where the architecture is known (llama
    /// and qwen2).
    #[arg(long)]
    pub(crate) raw_names: bool,
}

/// Whether Hugging Face's names of a file's tensors are known.
pub(crate) fn is_known(file: &gguf::File) -> bool {
    file.architecture()
        .is_some_and(|name| gguf::ARCHITECTURES.contains(&name))
}

/// The files beside the tensors of a Hugging Face folder, and what could not be made of them.
#[derive(Default)]
pub(crate) struct Files {
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    pub(crate) notes: Vec<String>,
}

impl Files {
    /// Those that are made of a GGUF file; none of anything else.
    pub(crate) fn of(from: &Opened) -> Self {
        let mut out = Self::default();
        let Some(file) = from.gguf() else {
            return out;
        };
        match from {
            Opened::Model(model) => {
                out.add("config.json", model.config().clone().into());
                out.add("generation_config.json", model.generation_config().into());
            }
            _ => out.notes.push(format!(
                "no config.json: the tensors have their names in {}",
                file.path().display()
            )),
        }
        let tokenizer = file
            .tokenizer()
            .and_then(|json| Ok((json, file.tokenizer_config()?)));
        match tokenizer {
            Ok((tokenizer, config)) => {
                out.add("tokenizer.json", tokenizer);
                out.add("tokenizer_config.json", config.into());
            }
            Err(error) => out.notes.push(format!("no tokenizer.json: {error}")),
        }
        out
    }

    fn add(&mut self, name: &str, json: Value) {
        let text = format!("{json:#}\n");
        self.files.insert(name.into(), text.into_bytes());
    }
}

/// What the state of a checkpoint keeps of a GGUF file: the configuration of the model, and the
/// metadata without the tokenizer, which is long.
pub(crate) fn state(from: &Opened) -> Map<String, Value> {
    let mut state = Map::new();
    if let Opened::Model(model) = from {
        let config = Value::Object(model.config().clone());
        if let Some(name) = config.pointer("/architectures/0") {
            state.insert("architecture".into(), name.clone());
        }
        state.insert("config".into(), config);
        let generation = model.generation_config();
        state.insert("generation_config".into(), generation.into());
    }
    if let Some(file) = from.gguf() {
        let metadata: Map<String, Value> = file
            .metadata()
            .keys()
            .filter(|key| !key.starts_with("tokenizer."))
            .filter_map(|key| Some((key.to_string(), file.metadata().get(key)?)))
            .collect();
        state.insert("gguf".into(), metadata.into());
    }
    state
}

/// How a tensor is stored, for programs.
pub(crate) fn describe(file: &gguf::File, name: &str, tensor: &mut Value) {
    if let (Some(kind), Some(bytes)) = (file.tensor_type(name), file.stored_bytes(name)) {
        tensor["type"] = kind.name().into();
        tensor["stored_bytes"] = bytes.into();
    }
}

/// Version and metadata, for programs; of long arrays the beginning.
pub(crate) fn metadata(file: &gguf::File, out: &mut Value) {
    let metadata = file.metadata();
    let shortened: Map<String, Value> = metadata
        .keys()
        .filter_map(|key| Some((key.to_string(), metadata.shortened(key, SHOWN)?)))
        .collect();
    out["version"] = file.version().into();
    out["metadata"] = shortened.into();
}

/// The same for people.
pub(crate) fn metadata_text(file: &gguf::File) -> String {
    let total: usize = file
        .tensors()
        .keys()
        .filter_map(|name| file.stored_bytes(name))
        .sum();
    let mut out = format!(
        "GGUF version {}, {} as stored\n",
        file.version(),
        super::human(total)
    );
    let metadata = file.metadata();
    for key in metadata.keys() {
        let value = metadata.shortened(key, SHOWN).unwrap_or_default();
        out += &format!("  {key}: {}\n", short(&value));
    }
    out
}

/// A value on one line that is not long.
fn short(value: &Value) -> String {
    match value {
        Value::String(text) if text.chars().count() > SHOWN_TEXT => {
            let first: String = text.chars().take(SHOWN_TEXT).collect();
            format!("{}... ({} characters)", json!(first), text.chars().count())
        }
        Value::Object(array) => {
            let empty = vec![];
            let first = array
                .get("first")
                .and_then(Value::as_array)
                .unwrap_or(&empty);
            let first: Vec<String> = first.iter().map(short).collect();
            let length = array.get("length").cloned().unwrap_or_default();
            format!("[{}, ...] ({length})", first.join(", "))
        }
        Value::Array(all) => {
            let all: Vec<String> = all.iter().map(short).collect();
            format!("[{}]", all.join(", "))
        }
        other => other.to_string(),
    }
}
