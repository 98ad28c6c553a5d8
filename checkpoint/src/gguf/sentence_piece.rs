//! Tokenizers of SentencePiece that merge pairs of pieces, as Llama 2 and Mistral have them.

use super::File;
use super::tokenizer::{Kind, Vocabulary, template};
use crate::Result;
use serde_json::{Value, json};

const SCORES: &str = "tokenizer.ggml.scores";
const TOKENS: &str = "tokenizer.ggml.tokens";

/// Pieces are at most so long. Every one is cut everywhere, and real ones are short.
const LONGEST: usize = 512;

/// Spaces are written as this character.
const SPACE: &str = "\u{2581}";

/// The tokenizer with the merges that its scores stand for: SentencePiece joins the two
/// neighbours that make the piece with the highest score, so the order of merges is that of scores.
pub(super) fn tokenizer(file: &File) -> Result<Value> {
    let vocabulary = Vocabulary::of(file)?;
    let scores = match file.metadata().get(SCORES) {
        Some(Value::Array(scores)) if scores.len() == vocabulary.tokens.len() => scores,
        _ => {
            let count = vocabulary.tokens.len();
            return Err(file.wrong(SCORES, format!("it is no list of {count} numbers")));
        }
    };
    let merges = merges(file, &vocabulary, &scores)?;
    let prefix = file
        .metadata()
        .get("tokenizer.ggml.add_space_prefix")
        .and_then(|value| value.as_bool())
        .unwrap_or(true);
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let normalizers = match prefix {
        true => vec![json!({"type": "Prepend", "prepend": SPACE}), spaces],
        false => vec![spaces],
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = vocabulary.special(file, "unk")?.map(|(_, token)| token);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": template(file, &vocabulary, true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": vocabulary.kinds.contains(&Kind::Byte),
            "ignore_merges": false, "vocab": vocabulary.to_json(), "merges": merges,
        },
    }))
}

/// All pairs of pieces that make a piece, the highest score of what they make first.
fn merges(file: &File, vocabulary: &Vocabulary<'_>, scores: &[Value]) -> Result<Vec<String>> {
    let normal = |token: &str| {
        let id = *vocabulary.ids.get(token)?;
        (vocabulary.kinds[id] == Kind::Normal).then_some(id)
    };
    let mut found = vec![];
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.kinds[id] != Kind::Normal {
            continue;
        }
        if token.len() > LONGEST || token.contains(' ') {
            let detail = format!("token {id} holds a space, or more than {LONGEST} bytes");
            return Err(file.wrong(TOKENS, detail));
        }
        let score = scores[id]
            .as_f64()
            .ok_or_else(|| file.wrong(SCORES, format!("that of token {id} is no number")))?;
        for (at, _) in token.char_indices().skip(1) {
            let (first, second) = token.split_at(at);
            if let (Some(a), Some(b)) = (normal(first), normal(second)) {
                found.push((score, first, second, a, b));
            }
        }
    }
    // Of pairs that make the same piece the one whose parts are older goes first.
    found.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.3, x.4).cmp(&(y.3, y.4))));
    Ok(found
        .into_iter()
        .map(|(_, first, second, ..)| format!("{first} {second}"))
        .collect())
}
