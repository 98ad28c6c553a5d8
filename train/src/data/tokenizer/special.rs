//! Tokens with a meaning of their own, as the files of a model name them.

use crate::{Error, Result};
use serde_json::{Map, Value};
use std::{fs, io::ErrorKind, path::Path};

/// Tokens with a meaning of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Special {
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Fills what is too short.
    pub pad: Option<u32>,
    /// All that end what a model writes: the end of text, the end of a turn.
    pub stops: Vec<u32>,
}

impl Special {
    /// What the files in a model's folder say: first those of the tokenizer, which name tokens,
    /// then those of the model, which number them.
    pub(super) fn of_folder(folder: &Path, id: impl Fn(&str) -> Option<u32>) -> Result<Self> {
        let names = [
            object(&folder.join("tokenizer_config.json"))?,
            object(&folder.join("special_tokens_map.json"))?,
        ];
        let numbers = [
            object(&folder.join("config.json"))?,
            object(&folder.join("generation_config.json"))?,
        ];
        Ok(Self::of_objects(&names, &numbers, id))
    }

    /// What objects say that name tokens, and then those that number them.
    pub(crate) fn of_objects(
        names: &[Map<String, Value>],
        numbers: &[Map<String, Value>],
        id: impl Fn(&str) -> Option<u32>,
    ) -> Self {
        let named = |name: &str| {
            let text = |object: &Map<String, Value>| {
                let value = object.get(name)?;
                // As text, or as an object that describes an added token.
                let text = value.as_str().or_else(|| value.get("content")?.as_str());
                id(text?)
            };
            names.iter().find_map(text)
        };
        let numbered = |name: &str| -> Vec<u32> {
            let several = |object: &Map<String, Value>| match object.get(name) {
                Some(Value::Array(list)) => list.iter().filter_map(number).collect(),
                Some(one) => number(one).into_iter().collect(),
                None => vec![],
            };
            numbers.iter().flat_map(several).collect()
        };
        let one = |name: &str| {
            let found = named(&format!("{name}_token"));
            found.or_else(|| numbered(&format!("{name}_token_id")).first().copied())
        };
        let (bos, eos, pad) = (one("bos"), one("eos"), one("pad"));
        let mut stops: Vec<u32> = eos.into_iter().collect();
        for stop in numbered("eos_token_id") {
            if !stops.contains(&stop) {
                stops.push(stop);
            }
        }
        Self {
            bos,
            eos,
            pad,
            stops,
        }
    }

    /// A `tokenizer_config.json` that names them.
    pub(super) fn to_config(&self, token: impl Fn(u32) -> Option<String>) -> String {
        let named = [("bos", self.bos), ("eos", self.eos), ("pad", self.pad)];
        let mut config = Map::new();
        config.insert(
            "tokenizer_class".into(),
            Value::from("PreTrainedTokenizerFast"),
        );
        for (name, id) in named {
            if let Some(token) = id.and_then(&token) {
                config.insert(format!("{name}_token"), Value::from(token));
            }
        }
        format!("{:#}\n", Value::Object(config))
    }
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok())
}

/// The object in a file; an empty one where there is no file.
fn object(path: &Path) -> Result<Map<String, Value>> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Map::new()),
        Err(e) => return Err(Error::io(path, "read", &e)),
    };
    serde_json::from_slice(&text).map_err(|e| Error::Tokenizer {
        path: path.into(),
        detail: format!("not a JSON object: {e}"),
    })
}
