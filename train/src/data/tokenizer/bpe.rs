//! A byte-level BPE of one's own.

use super::{END, END_TEXT, Special, Tokenizer};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerBuilder,
    models::bpe::{BPE, BpeTrainer},
    pre_tokenizers::byte_level::ByteLevel,
};

impl Tokenizer {
    /// Learns a byte-level BPE from texts: the 256 bytes, an end of text, and the pairs that come
    /// most often, until there are `vocabulary` tokens or no pair comes twice.
    ///
    /// ```
    /// # use anymesh_train::data::Tokenizer;
    /// let text = "the mesh, the other mesh, the mesh".repeat(10);
    /// let tokenizer = Tokenizer::train_bpe([&text], 270)?;
    /// assert!(tokenizer.encode("the mesh")?.len() < 8);
    /// assert_eq!(tokenizer.decode(&tokenizer.encode("größer 🦀")?)?, "größer 🦀");
    /// # Ok::<(), anymesh_train::Error>(())
    /// ```
    pub fn train_bpe<T, I>(texts: I, vocabulary: usize) -> Result<Self>
    where
        T: AsRef<str> + Send,
        I: IntoIterator<Item = T>,
        I::IntoIter: Send,
    {
        if vocabulary <= END as usize {
            let detail = format!("is {vocabulary}: the bytes and the end of text are 257 tokens");
            return Err(Error::config("tokenizer.vocabulary", detail));
        }
        let wrong = |e: tokenizers::Error| Error::Tokenizer {
            path: "bpe".into(),
            detail: e.to_string(),
        };
        let bytes = ByteLevel::new(false, true, true);
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocabulary)
            .min_frequency(2)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(vec![AddedToken::from(END_TEXT, true)])
            .build();
        let mut inner = TokenizerBuilder::<
            BPE,
            NormalizerWrapper,
            PreTokenizerWrapper,
            PostProcessorWrapper,
            DecoderWrapper,
        >::new()
        .with_model(BPE::default())
        .with_pre_tokenizer(Some(bytes.into()))
        .with_decoder(Some(bytes.into()))
        .build()
        .map_err(wrong)?;
        inner
            .train(&mut trainer, texts.into_iter())
            .map_err(wrong)?;
        let json = inner.to_string(false).map_err(wrong)?;
        let tokenizer = Self::from_json(json.as_bytes(), "bpe")?;
        let end = tokenizer.id(END_TEXT);
        Ok(tokenizer.with_special(Special {
            bos: None,
            eos: end,
            pad: end,
            stops: end.into_iter().collect(),
        }))
    }
}

/// How GPT-2's vocabularies write a byte: as itself where that can be seen, else as one of the
/// characters from 256 on, in order.
pub(super) fn byte_char(byte: u8) -> Option<char> {
    let seen = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match seen(byte) {
        true => Some(byte.into()),
        false => {
            let before = (0..byte).filter(|b| !seen(*b)).count();
            char::from_u32(256 + before as u32)
        }
    }
}

/// The `tokenizer.json` of the byte tokenizer: a BPE without merges.
pub(super) fn bytes_as_bpe() -> String {
    let vocabulary: Map<String, Value> = (0..=u8::MAX)
        .filter_map(|b| Some((byte_char(b)?.to_string(), Value::from(b))))
        .collect();
    let level = |kind: &str| json!({"type": kind, "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let end = json!({
        "id": END, "content": END_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true
    });
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [end],
        "normalizer": null,
        "pre_tokenizer": level("ByteLevel"),
        "post_processor": null,
        "decoder": level("ByteLevel"),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []}
    });
    format!("{tokenizer:#}\n")
}
