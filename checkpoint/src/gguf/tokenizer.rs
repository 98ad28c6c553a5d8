//! The tokenizer of a file, as `tokenizer.json` of Hugging Face's library.

use super::pre_tokenizer::{PreTokenizer, byte_level};
use super::{File, sentence_piece};
use crate::Result;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

impl File {
    /// The tokenizer as `tokenizer.json` of the library `tokenizers`.
    ///
    /// It is made of byte-level tokenizers (`gpt2`) whose rule for cutting texts is known here, and
    /// of those of SentencePiece that merge pairs (`llama`). Others are an error.
    pub fn tokenizer(&self) -> Result<Value> {
        match self.metadata().text(MODEL) {
            Some("gpt2") => byte_level_tokenizer(self),
            Some("llama") => sentence_piece::tokenizer(self),
            Some(other) => Err(self.wrong(
                MODEL,
                format!("'{other}' has no counterpart known here; 'gpt2' and 'llama' have"),
            )),
            None => Err(self.wrong(MODEL, "the file has no tokenizer")),
        }
    }

    /// What `tokenizer_config.json` says: the tokens that have a meaning, and the template by which
    /// conversations become texts.
    pub fn tokenizer_config(&self) -> Result<Map<String, Value>> {
        let vocabulary = Vocabulary::of(self)?;
        let mut config = Map::from_iter([
            ("tokenizer_class".into(), "PreTrainedTokenizerFast".into()),
            ("clean_up_tokenization_spaces".into(), false.into()),
        ]);
        for name in ["bos", "eos", "unk", "pad"] {
            if let Some((_, token)) = vocabulary.special(self, name)? {
                config.insert(format!("{name}_token"), token.into());
            }
        }
        if let Some(template) = self.metadata().text("tokenizer.chat_template") {
            config.insert("chat_template".into(), template.into());
        }
        let length = self
            .architecture()
            .map(|name| format!("{name}.context_length"));
        if let Some(length) = length.and_then(|key| self.metadata().count(&key)) {
            config.insert("model_max_length".into(), length.into());
        }
        Ok(config)
    }
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A piece of text.
    Normal,
    /// It says something about the text, such as that it begins.
    Control,
    /// A piece of text that is found before all others.
    UserDefined,
    /// It stands for nothing.
    Unused,
    /// One byte.
    Byte,
}

/// The tokens of a file.
pub(super) struct Vocabulary<'f> {
    pub(super) tokens: Vec<&'f str>,
    pub(super) kinds: Vec<Kind>,
    /// The numbers of tokens that stand for something.
    pub(super) ids: BTreeMap<&'f str, usize>,
}

impl<'f> Vocabulary<'f> {
    pub(super) fn of(file: &'f File) -> Result<Self> {
        let tokens: Vec<&str> = file
            .metadata()
            .texts(TOKENS)
            .ok_or_else(|| file.wrong(TOKENS, "it is missing, or no list of texts"))?
            .collect();
        let kinds = match file.metadata().get(TYPES) {
            None => vec![Kind::Normal; tokens.len()],
            Some(Value::Array(kinds)) if kinds.len() == tokens.len() => kinds
                .iter()
                .map(|kind| match kind.as_u64() {
                    Some(0 | 1) => Ok(Kind::Normal),
                    // The unknown token is written like a special one.
                    Some(2 | 3) => Ok(Kind::Control),
                    Some(4) => Ok(Kind::UserDefined),
                    Some(5) => Ok(Kind::Unused),
                    Some(6) => Ok(Kind::Byte),
                    _ => Err(file.wrong(TYPES, format!("there is no type {kind}"))),
                })
                .collect::<Result<_>>()?,
            Some(_) => {
                let count = tokens.len();
                return Err(file.wrong(TYPES, format!("it is no list of {count} numbers")));
            }
        };
        let mut ids = BTreeMap::new();
        for (id, token) in tokens.iter().enumerate() {
            if kinds[id] == Kind::Unused {
                continue;
            }
            if let Some(other) = ids.insert(*token, id) {
                let detail = format!("tokens {other} and {id} are both {token:?}");
                return Err(file.wrong(TOKENS, detail));
            }
        }
        Ok(Self { tokens, kinds, ids })
    }

    /// The token with a meaning (`bos`, `eos`, `unk`, `pad`), with its number.
    pub(super) fn special(&self, file: &File, name: &str) -> Result<Option<(usize, &'f str)>> {
        let long = match name {
            "unk" => "unknown",
            "pad" => "padding",
            name => name,
        };
        let key = format!("tokenizer.ggml.{long}_token_id");
        let Some(id) = file.metadata().count(&key) else {
            return Ok(None);
        };
        let id = id as usize;
        match self.tokens.get(id) {
            Some(token) => Ok(Some((id, token))),
            None => Err(file.wrong(
                key,
                format!("there is no token {id}: there are {}", self.tokens.len()),
            )),
        }
    }

    /// The tokens that are found before texts are cut.
    pub(super) fn added(&self) -> Vec<Value> {
        let added = |(id, token): (usize, &&str)| {
            let special = match self.kinds[id] {
                Kind::Control => true,
                Kind::UserDefined => false,
                _ => return None,
            };
            Some(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            }))
        };
        self.tokens.iter().enumerate().filter_map(added).collect()
    }

    /// Tokens and their numbers.
    pub(super) fn to_json(&self) -> Value {
        self.ids
            .iter()
            .map(|(token, id)| (token.to_string(), Value::from(*id)))
            .collect::<Map<_, _>>()
            .into()
    }
}

/// The step that adds the tokens for the beginning and the end of texts, where they are added.
/// `begins` is for files that do not say.
pub(super) fn template(
    file: &File,
    vocabulary: &Vocabulary<'_>,
    begins: bool,
) -> Result<Option<Value>> {
    let says = |key: &str| file.metadata().get(key).and_then(|value| value.as_bool());
    let begins = says("tokenizer.ggml.add_bos_token").unwrap_or(begins);
    let ends = says("tokenizer.ggml.add_eos_token").unwrap_or(false);
    let token = |wanted: bool, name: &str| match wanted {
        true => vocabulary.special(file, name),
        false => Ok(None),
    };
    let (first, last) = (token(begins, "bos")?, token(ends, "eos")?);
    if first.is_none() && last.is_none() {
        return Ok(None);
    }
    let part = |sequence: &str, type_id: usize| {
        let special =
            |(_, token): (usize, &str)| json!({"SpecialToken": {"id": token, "type_id": type_id}});
        let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
        [first.map(special), Some(text), last.map(special)]
            .into_iter()
            .flatten()
            .collect::<Vec<Value>>()
    };
    let tokens: Map<String, Value> = [first, last]
        .into_iter()
        .flatten()
        .map(|(id, token)| {
            let entry = json!({"id": token, "ids": [id], "tokens": [token]});
            (token.to_string(), entry)
        })
        .collect();
    let pair = [part("A", 0), part("B", 1)].concat();
    Ok(Some(json!({
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    })))
}

/// Tokens of bytes, each written as a printable character, merged pair by pair.
fn byte_level_tokenizer(file: &File) -> Result<Value> {
    let name = file
        .metadata()
        .text(PRE)
        .ok_or_else(|| file.wrong(PRE, "the file does not say how texts are cut into words"))?;
    let rule = PreTokenizer::of(name).ok_or_else(|| {
        let known = PreTokenizer::names();
        let detail =
            format!("how '{name}' cuts texts into words is not known here; known: {known}");
        file.wrong(PRE, detail)
    })?;
    let vocabulary = Vocabulary::of(file)?;
    let merges: Vec<&str> = file
        .metadata()
        .texts(MERGES)
        .ok_or_else(|| file.wrong(MERGES, "it is missing, or no list of texts"))?
        .collect();
    for merge in &merges {
        check_merge(&vocabulary, merge)
            .map_err(|why| file.wrong(MERGES, format!("{merge:?} {why}")))?;
    }
    let bytes = byte_level(true);
    let post_processor = match template(file, &vocabulary, rule.begins)? {
        Some(template) => json!({"type": "Sequence", "processors": [bytes, template]}),
        None => bytes.clone(),
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": rule.normalizer(),
        "pre_tokenizer": rule.to_json(),
        "post_processor": post_processor,
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rule.ignore_merges, "vocab": vocabulary.to_json(), "merges": merges,
        },
    }))
}

/// Whether a merge is two tokens that make a third.
fn check_merge(vocabulary: &Vocabulary<'_>, merge: &str) -> std::result::Result<(), String> {
    let (first, second) = merge
        .split_once(' ')
        .filter(|(_, second)| !second.contains(' '))
        .ok_or("is not two tokens with a space between them")?;
    let joined = format!("{first}{second}");
    match [first, second, &joined]
        .into_iter()
        .find(|token| !vocabulary.ids.contains_key(token))
    {
        Some(missing) => Err(format!("needs the token {missing:?}, which is not there")),
        None => Ok(()),
    }
}
