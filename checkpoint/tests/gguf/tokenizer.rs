//! Tokenizers as `tokenizer.json`.

use crate::build::{Build, Value};
use crate::common::Temporary;
use anymesh_checkpoint::{Error, gguf};
use serde_json::{Value as Json, json};

/// Six tokens of bytes, two that mean something, one that nobody uses.
const TOKENS: [&str; 9] = [
    "<s>", "</s>", "a", "b", "ab", "Ġ", "Ġab", "<user>", "[PAD8]",
];
const TYPES: [i32; 9] = [3, 3, 1, 1, 1, 1, 1, 4, 5];

fn byte_level(pre: &str) -> Build {
    Build::new()
        .value("general.architecture", Value::text("llama"))
        .value("llama.context_length", Value::u32(64))
        .value("tokenizer.ggml.model", Value::text("gpt2"))
        .value("tokenizer.ggml.pre", Value::text(pre))
        .value("tokenizer.ggml.tokens", Value::texts(&TOKENS))
        .value(
            "tokenizer.ggml.token_type",
            Value::array(&TYPES.map(Value::i32)),
        )
        .value("tokenizer.ggml.merges", Value::texts(&["a b", "Ġ ab"]))
        .value("tokenizer.ggml.bos_token_id", Value::u32(0))
        .value("tokenizer.ggml.eos_token_id", Value::u32(1))
}

/// Puts another value in the place of one.
fn with(mut build: Build, key: &str, value: Option<Value>) -> Build {
    build.values.retain(|(k, _)| k != key);
    match value {
        Some(value) => build.value(key, value),
        None => build,
    }
}

fn tokenizer(build: &Build, folder: &Temporary) -> Result<Json, Error> {
    build.open(folder).expect("opens").tokenizer()
}

#[test]
fn byte_level_tokenizers_keep_tokens_merges_and_meanings() {
    let folder = Temporary::here();
    let json = tokenizer(&byte_level("smollm"), &folder).expect("known");
    assert_eq!(
        json["model"]["vocab"],
        json!({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "Ġab": 6, "<user>": 7})
    );
    assert_eq!(json["model"]["merges"], json!(["a b", "Ġ ab"]));
    assert_eq!(
        (&json["model"]["type"], &json["model"]["ignore_merges"]),
        (&json!("BPE"), &json!(false))
    );
    let added: Vec<(&Json, &Json, &Json)> = json["added_tokens"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|token| (&token["id"], &token["content"], &token["special"]))
        .collect();
    let expected = [
        (&json!(0), &json!("<s>"), &json!(true)),
        (&json!(1), &json!("</s>"), &json!(true)),
        (&json!(7), &json!("<user>"), &json!(false)),
    ];
    assert_eq!(added, expected);
    let steps = &json["pre_tokenizer"]["pretokenizers"];
    assert_eq!(
        steps[0],
        json!({"type": "Digits", "individual_digits": true})
    );
    assert_eq!(steps[1]["use_regex"], true);
    assert_eq!(json["decoder"]["type"], "ByteLevel");
    // It is not said that texts begin with a token, and this kind does not without.
    assert_eq!(json["post_processor"]["type"], "ByteLevel");
}

#[test]
fn the_rule_for_words_follows_its_name() {
    let folder = Temporary::here();
    let rule = |pre: &str| tokenizer(&byte_level(pre), &folder).expect("known");
    let (llama, qwen, gpt2) = (rule("llama-bpe"), rule("qwen2"), rule("gpt-2"));
    let words = |json: &Json| {
        let pattern = &json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
        pattern.as_str().expect("an expression").to_string()
    };
    assert!(words(&llama).contains(r"\p{N}{1,3}| "));
    assert!(words(&qwen).contains(r"\p{N}| ") && !words(&qwen).contains("{1,3}"));
    assert_eq!(qwen["normalizer"], json!({"type": "NFC"}));
    assert_eq!(
        (&llama["normalizer"], &gpt2["normalizer"]),
        (&Json::Null, &Json::Null)
    );
    assert_eq!(gpt2["pre_tokenizer"]["type"], "ByteLevel");
    let ignores = |json: &Json| json["model"]["ignore_merges"].as_bool();
    assert_eq!(
        [&llama, &qwen, &gpt2].map(ignores),
        [Some(true), Some(false), Some(false)]
    );
}

#[test]
fn texts_begin_and_end_with_tokens_where_the_file_says_so() {
    let folder = Temporary::here();
    // Llama 3 begins texts by itself.
    let json = tokenizer(&byte_level("llama-bpe"), &folder).expect("known");
    let template = &json["post_processor"]["processors"][1];
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    assert_eq!(template["single"], json!([begin, text]));
    let ids = json!({"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}});
    assert_eq!(template["special_tokens"], ids);

    let said = |pre: &str, begins: bool, ends: bool| {
        let build = byte_level(pre)
            .value("tokenizer.ggml.add_bos_token", Value::bool(begins))
            .value("tokenizer.ggml.add_eos_token", Value::bool(ends));
        tokenizer(&build, &folder).expect("known")["post_processor"].clone()
    };
    assert_eq!(said("llama-bpe", false, false)["type"], "ByteLevel");
    let both = said("smollm", true, true);
    assert_eq!(
        both["processors"][1]["pair"].as_array().map(Vec::len),
        Some(6)
    );
}

#[test]
fn the_tokens_with_a_meaning_and_the_template_of_chats_are_in_the_configuration() {
    let folder = Temporary::here();
    let build = byte_level("smollm")
        .value("tokenizer.ggml.padding_token_id", Value::u32(8))
        .value(
            "tokenizer.chat_template",
            Value::text("{% for m in messages %}"),
        );
    let config = build.open(&folder).expect("opens").tokenizer_config();
    let expected = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD8]",
        "chat_template": "{% for m in messages %}", "model_max_length": 64,
    });
    assert_eq!(Json::Object(config.expect("whole")), expected);
}

/// SentencePiece joins what makes the piece with the highest score; so the order of merges is that
/// of scores.
#[test]
fn scores_of_sentence_piece_become_merges() {
    let folder = Temporary::here();
    let tokens = [
        "<unk>", "<s>", "</s>", "<0x0A>", "▁ab", "ab", "▁", "a", "b", "▁a",
    ];
    let scores = [0.0, 0.0, 0.0, 0.0, -2.0, -1.0, -4.0, -5.0, -6.0, -3.0];
    let types = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1];
    let build = Build::new()
        .value("tokenizer.ggml.model", Value::text("llama"))
        .value("tokenizer.ggml.tokens", Value::texts(&tokens))
        .value(
            "tokenizer.ggml.scores",
            Value::array(&scores.map(Value::f32)),
        )
        .value(
            "tokenizer.ggml.token_type",
            Value::array(&types.map(Value::i32)),
        )
        .value("tokenizer.ggml.bos_token_id", Value::u32(1))
        .value("tokenizer.ggml.unknown_token_id", Value::u32(0));
    let json = tokenizer(&build, &folder).expect("known");
    assert_eq!(
        json["model"]["merges"],
        json!(["a b", "▁ ab", "▁a b", "▁ a"])
    );
    assert_eq!(
        (&json["model"]["byte_fallback"], &json["model"]["unk_token"]),
        (&json!(true), &json!("<unk>"))
    );
    assert_eq!(
        json["post_processor"]["single"][0]["SpecialToken"]["id"],
        "<s>"
    );
    assert_eq!(json["normalizer"]["normalizers"][0]["prepend"], "▁");
    let without = build
        .clone()
        .value("tokenizer.ggml.add_space_prefix", Value::bool(false));
    let json = tokenizer(&without, &folder).expect("known");
    assert_eq!(json["normalizer"]["normalizers"][0]["type"], "Replace");
    let short = with(
        build,
        "tokenizer.ggml.scores",
        Some(Value::array(&[Value::f32(0.0)])),
    );
    let error = tokenizer(&short, &folder).expect_err("one score");
    assert!(
        error.to_string().contains("no list of 10 numbers"),
        "{error}"
    );
}

#[test]
fn what_is_wrong_with_a_tokenizer_is_named() {
    let folder = Temporary::here();
    let build = byte_level("smollm");
    for (key, value, part) in [
        ("tokenizer.ggml.model", None, "no tokenizer"),
        ("tokenizer.ggml.model", Some(Value::text("bert")), "'bert'"),
        ("tokenizer.ggml.pre", None, "how texts are cut"),
        (
            "tokenizer.ggml.pre",
            Some(Value::text("default")),
            "known: gpt-2, smollm",
        ),
        ("tokenizer.ggml.tokens", None, "missing"),
        (
            "tokenizer.ggml.tokens",
            Some(Value::texts(&["a", "a"])),
            "no list of 2 numbers",
        ),
        (
            "tokenizer.ggml.token_type",
            Some(Value::text("x")),
            "no list of 9 numbers",
        ),
        (
            "tokenizer.ggml.token_type",
            Some(Value::array(&[9; 9].map(Value::i32))),
            "no type 9",
        ),
        ("tokenizer.ggml.merges", None, "missing"),
        (
            "tokenizer.ggml.merges",
            Some(Value::texts(&["ab"])),
            "not two tokens",
        ),
        (
            "tokenizer.ggml.merges",
            Some(Value::texts(&["a b c"])),
            "not two tokens",
        ),
        (
            "tokenizer.ggml.merges",
            Some(Value::texts(&["b a"])),
            "\"ba\"",
        ),
        (
            "tokenizer.ggml.merges",
            Some(Value::texts(&["a z"])),
            "\"z\"",
        ),
    ] {
        let error = tokenizer(&with(build.clone(), key, value), &folder).expect_err(part);
        let Error::GgufModel { item, detail, .. } = &error else {
            panic!("{error}");
        };
        // A list of types that is too long is the fault of the types.
        assert!(item == key || key.ends_with("tokens"), "{error}");
        assert!(detail.contains(part), "'{part}' in {error}");
    }
    let twice = with(build.clone(), "tokenizer.ggml.token_type", None);
    let twice = with(
        twice,
        "tokenizer.ggml.tokens",
        Some(Value::texts(&["x", "a", "x"])),
    );
    let error = tokenizer(&twice, &folder).expect_err("two of one");
    assert!(
        error.to_string().contains("tokens 0 and 2 are both \"x\""),
        "{error}"
    );
    let outside = with(
        byte_level("llama-bpe"),
        "tokenizer.ggml.bos_token_id",
        Some(Value::u32(9)),
    );
    let error = tokenizer(&outside, &folder).expect_err("no such token");
    assert!(error.to_string().contains("no token 9"), "{error}");
    let file: gguf::File = outside.open(&folder).expect("opens");
    assert!(file.tokenizer_config().is_err());
}
