//! How texts are cut before tokens are looked for, by the name that a file gives to the rule.

use serde_json::{Value, json};

/// A rule by which texts are cut into words, and what else depends on it.
pub(super) struct PreTokenizer {
    pub(super) names: &'static [&'static str],
    words: Words,
    /// Texts are brought to Unicode's composed form first.
    composed: bool,
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Texts begin with the token for the beginning where the file does not say otherwise.
    pub(super) begins: bool,
}

enum Words {
    /// As GPT-2 did.
    Gpt2,
    /// As GPT-2 did, every digit by itself.
    Digits,
    /// By an expression.
    Split(&'static str),
}

/// Contractions in any case, letters with one sign before them, up to three digits, signs with
/// the line ends behind them, line ends, spaces.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The same, every digit by itself.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Words end where small letters are followed by capital ones; no contractions.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

static KNOWN: [PreTokenizer; 6] = [
    PreTokenizer {
        names: &["gpt-2"],
        words: Words::Gpt2,
        composed: false,
        ignore_merges: false,
        begins: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact"],
        words: Words::Digits,
        composed: false,
        ignore_merges: false,
        begins: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        words: Words::Split(LLAMA3),
        composed: false,
        ignore_merges: true,
        begins: true,
    },
    PreTokenizer {
        names: &["qwen2"],
        words: Words::Split(QWEN2),
        composed: true,
        ignore_merges: false,
        begins: false,
    },
    PreTokenizer {
        names: &["deepseek-r1-qwen"],
        words: Words::Split(QWEN2),
        composed: false,
        ignore_merges: false,
        begins: false,
    },
    PreTokenizer {
        names: &["tekken"],
        words: Words::Split(TEKKEN),
        composed: false,
        ignore_merges: true,
        begins: true,
    },
];

impl PreTokenizer {
    /// The rule of that name.
    pub(super) fn of(name: &str) -> Option<&'static Self> {
        KNOWN.iter().find(|rule| rule.names.contains(&name))
    }

    /// All names that are known.
    pub(super) fn names() -> String {
        let names: Vec<&str> = KNOWN.iter().flat_map(|rule| rule.names).copied().collect();
        names.join(", ")
    }

    pub(super) fn normalizer(&self) -> Value {
        match self.composed {
            true => json!({"type": "NFC"}),
            false => Value::Null,
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let first = match self.words {
            Words::Gpt2 => return byte_level(true),
            Words::Digits => {
                return sequence([
                    json!({"type": "Digits", "individual_digits": true}),
                    byte_level(true),
                ]);
            }
            Words::Split(words) => json!({
                "type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": false,
            }),
        };
        sequence([first, byte_level(false)])
    }
}

fn sequence(both: [Value; 2]) -> Value {
    json!({"type": "Sequence", "pretokenizers": both})
}

/// Bytes as printable characters; with `words`, texts are cut as GPT-2 did first.
pub(super) fn byte_level(words: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": words})
}
