//! Tokenizers: text to tokens and back.

mod bpe;
mod special;
mod stream;

use super::file::{hash, replace};
use crate::{Error, Result};
use std::{
    fs,
    panic::catch_unwind,
    path::{Path, PathBuf},
};
use tokenizers::{Tokenizer as HuggingFace, TruncationParams};

pub use special::Special;
pub use stream::TextStream;

/// Text to tokens and back: a `tokenizer.json` of Hugging Face, one [trained](Tokenizer::train_bpe)
/// here, or the bytes of the text.
///
/// Whatever a file says about truncation and padding is not done: texts are as long as they are.
///
/// ```
/// # use anymesh_train::data::Tokenizer;
/// let tokenizer = Tokenizer::bytes();
/// let tokens = tokenizer.encode("mesh")?;
/// assert_eq!(tokens, [109, 101, 115, 104]);
/// assert_eq!(tokenizer.decode(&tokens)?, "mesh");
/// assert_eq!((tokenizer.special().eos, tokenizer.vocabulary()), (Some(256), 257));
/// # Ok::<(), anymesh_train::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tokenizer {
    path: PathBuf,
    kind: Kind,
    special: Special,
    vocabulary: usize,
    longest: Option<usize>,
    hash: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

/// The end of text after the 256 bytes.
const END: u32 = 256;
/// How it is written.
const END_TEXT: &str = "<|endoftext|>";

impl Tokenizer {
    /// A token for each byte of the text, and one for its end: needs no files.
    pub fn bytes() -> Self {
        Self {
            path: "bytes".into(),
            kind: Kind::Bytes,
            special: Special {
                eos: Some(END),
                pad: Some(END),
                stops: vec![END],
                ..Special::default()
            },
            vocabulary: END as usize + 1,
            longest: None,
            hash: hash(b"bytes"),
        }
    }

    /// A `tokenizer.json`, or a folder with one, with the special tokens that the files beside it
    /// name.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let mut path = path.as_ref().to_path_buf();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        let json = fs::read(&path).map_err(|e| Error::io(&path, "read", &e))?;
        let mut tokenizer = Self::from_json(&json, &path)?;
        let folder = path.parent().unwrap_or(Path::new(""));
        tokenizer.special = Special::of_folder(folder, |token| tokenizer.id(token))?;
        Ok(tokenizer)
    }

    /// The text of a `tokenizer.json`, and what to call it in errors. It has no special tokens
    /// beyond those of its template until it is [given](Self::with_special) some.
    pub fn from_json(json: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let wrong = |detail: String| Error::Tokenizer {
            path: path.into(),
            detail,
        };
        // The crate panics on some files that are damaged: what is no JSON is found first, and the
        // rest shows when a text is tried, such as a template with a token that is not there.
        let checked = serde_json::from_slice::<serde::de::IgnoredAny>(json);
        checked.map_err(|e| wrong(format!("not JSON: {e}")))?;
        let tried = catch_unwind(|| -> tokenizers::Result<HuggingFace> {
            let inner = HuggingFace::from_bytes(json)?;
            inner.encode_fast("a b", true)?;
            Ok(inner)
        });
        let mut inner = tried
            .unwrap_or_else(|_| Err("the file is damaged".into()))
            .map_err(|e| wrong(format!("not a tokenizer.json that is understood: {e}")))?;
        inner
            .with_truncation(None)
            .map_err(|e| wrong(e.to_string()))?;
        inner.with_padding(None);
        let last = inner.get_vocab(true).into_values().max();
        let vocabulary = last.map_or(0, |id| id as usize + 1);
        if vocabulary == 0 {
            return Err(wrong("the vocabulary is empty".into()));
        }
        Ok(Self {
            path: path.into(),
            kind: Kind::HuggingFace(Box::new(inner)),
            special: Special::default(),
            vocabulary,
            longest: None,
            hash: hash(json),
        })
    }

    /// With these special tokens.
    pub fn with_special(mut self, special: Special) -> Self {
        self.special = special;
        self
    }

    /// One that cuts texts off after so many tokens, those of its template counted.
    pub fn truncated(mut self, longest: usize) -> Result<Self> {
        if longest == 0 {
            let detail = "is 0: a text needs at least one token";
            return Err(Error::config("data.length", detail));
        }
        if let Kind::HuggingFace(inner) = &mut self.kind {
            let truncation = TruncationParams {
                max_length: longest,
                ..TruncationParams::default()
            };
            if let Err(e) = inner.with_truncation(Some(truncation)) {
                return Err(Error::config("data.length", e.to_string()));
            }
        }
        self.longest = Some(longest);
        Ok(self)
    }

    /// The tokens of a text, or of a part of one: nothing is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokens(text, false)
    }

    /// The tokens of a whole text, with those that the tokenizer's template puts around it, such as
    /// `[CLS]` and `[SEP]`.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        self.tokens(text, true)
    }

    fn tokens(&self, text: &str, whole: bool) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => {
                let longest = self.longest.unwrap_or(usize::MAX);
                Ok(text.bytes().take(longest).map(u32::from).collect())
            }
            Kind::HuggingFace(inner) => {
                let encoded = inner.encode_fast(text, whole);
                Ok(encoded.map_err(|e| self.error(e))?.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens, without the special ones. Bytes that are no text become `�`.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        if let Some(token) = tokens.iter().find(|t| **t as usize >= self.vocabulary) {
            let detail = format!(
                "the token {token} is not in the vocabulary of {}",
                self.vocabulary
            );
            return Err(self.error(detail));
        }
        match &self.kind {
            Kind::Bytes => {
                let bytes = tokens.iter().filter_map(|t| u8::try_from(*t).ok());
                Ok(String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned())
            }
            Kind::HuggingFace(inner) => inner.decode(tokens, true).map_err(|e| self.error(e)),
        }
    }

    /// Decodes tokens as they come.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    fn error(&self, detail: impl ToString) -> Error {
        Error::Tokenizer {
            path: self.path.clone(),
            detail: detail.to_string(),
        }
    }

    /// The tokens with a meaning of their own.
    pub fn special(&self) -> &Special {
        &self.special
    }

    /// One more than the largest token.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// A token by how it is written in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes if token == END_TEXT => Some(END),
            Kind::Bytes => None,
            Kind::HuggingFace(inner) => inner.token_to_id(token),
        }
    }

    /// How a token is written in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        match &self.kind {
            Kind::Bytes if id == END => Some(END_TEXT.into()),
            Kind::Bytes => bpe::byte_char(u8::try_from(id).ok()?).map(String::from),
            Kind::HuggingFace(inner) => inner.id_to_token(id),
        }
    }

    /// What tokens depend on, for what is built from them.
    pub(crate) fn describe(&self) -> String {
        let longest = self.longest.map_or(0, |n| n as u64);
        let special = hash(format!("{:?}", self.special).as_bytes());
        format!("tokenizer {:016x} {special:016x} {longest}", self.hash)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into a folder, so that others read the
    /// tokenizer too.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", &e))?;
        let json = match &self.kind {
            Kind::Bytes => bpe::bytes_as_bpe(),
            Kind::HuggingFace(inner) => {
                let mut inner = inner.clone();
                inner.with_truncation(None).map_err(|e| self.error(e))?;
                inner.to_string(true).map_err(|e| self.error(e))?
            }
        };
        replace(&folder.join("tokenizer.json"), json.as_bytes())?;
        let config = self.special.to_config(|id| self.token(id));
        replace(&folder.join("tokenizer_config.json"), config.as_bytes())
    }
}

#[cfg(test)]
mod tests;
