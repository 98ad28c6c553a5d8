use super::*;
use crate::data::tests::Folder;

const TEXTS: [&str; 5] = [
    "One sharded tensor program, any mesh.",
    "größer ... 🦀🦀 naïve\n\n  two  spaces\t",
    "",
    "日本語のテキスト",
    "plain",
];

fn trained() -> Tokenizer {
    let text = "one mesh, another mesh, any mesh: the same program on every mesh. ".repeat(20);
    Tokenizer::train_bpe([text], 300).expect("trained")
}

#[test]
fn text_comes_back_whole_and_as_a_stream() {
    for tokenizer in [Tokenizer::bytes(), trained()] {
        for text in TEXTS {
            let tokens = tokenizer.encode(text).expect("text");
            assert!(
                tokens
                    .iter()
                    .all(|t| (*t as usize) < tokenizer.vocabulary())
            );
            assert_eq!(tokenizer.decode(&tokens).expect("tokens"), text);
            let mut stream = tokenizer.stream();
            let mut streamed = String::new();
            for token in &tokens {
                streamed += &stream.push(*token).expect("a token");
                assert!(text.starts_with(&streamed), "{streamed:?} of {text:?}");
            }
            streamed += &stream.finish().expect("the rest");
            assert_eq!(streamed, text);
        }
    }
}

#[test]
fn a_stream_of_bytes_that_are_no_text_does_not_stall() {
    let tokenizer = Tokenizer::bytes();
    let mut stream = tokenizer.stream();
    let bytes = [0x61, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x62];
    let pieces: Vec<String> = bytes
        .into_iter()
        .map(|b| stream.push(b).expect("a token"))
        .collect();
    assert_eq!(pieces[0], "a");
    assert!(pieces[4].contains('\u{fffd}'), "{pieces:?}");
    assert!(pieces[9].ends_with('b'), "{pieces:?}");
    // Half a character at the end is told in the end.
    let mut stream = tokenizer.stream();
    assert_eq!(stream.push(0xc3).expect("a token"), "");
    assert_eq!(stream.finish().expect("the rest"), "\u{fffd}");
}

#[test]
fn special_tokens_are_not_text() {
    for tokenizer in [Tokenizer::bytes(), trained()] {
        let mut tokens = tokenizer.encode("a").expect("text");
        tokens.extend(tokenizer.special().eos);
        tokens.extend(tokenizer.encode("b").expect("text"));
        assert_eq!(tokens.len(), 3);
        assert_eq!(tokenizer.decode(&tokens).expect("tokens"), "ab");
        let end = tokenizer.special().eos.expect("an end");
        assert_eq!(tokenizer.token(end).as_deref(), Some("<|endoftext|>"));
        assert_eq!(tokenizer.id("<|endoftext|>"), Some(end));
        let beyond = tokenizer.vocabulary() as u32;
        let error = tokenizer.decode(&[beyond]).expect_err("no such token");
        assert!(
            error.to_string().contains("not in the vocabulary"),
            "{error}"
        );
    }
}

#[test]
fn a_trained_tokenizer_is_smaller_than_bytes_and_the_same_every_time() {
    let (a, b) = (trained(), trained());
    assert_eq!(a.describe(), b.describe());
    assert!(
        a.vocabulary() > 257 && a.vocabulary() <= 300,
        "{}",
        a.vocabulary()
    );
    let text = "another mesh, any mesh";
    assert!(a.encode(text).expect("text").len() * 2 < text.len());
    let error = Tokenizer::train_bpe(["x"], 256).expect_err("too few");
    assert!(error.to_string().contains("257"), "{error}");
}

#[test]
fn what_is_saved_is_what_is_opened() {
    for tokenizer in [Tokenizer::bytes(), trained()] {
        let folder = Folder::new("saved-tokenizer");
        tokenizer.save(folder.path()).expect("saved");
        let opened = Tokenizer::open(folder.path()).expect("opened");
        assert_eq!(opened.vocabulary(), tokenizer.vocabulary());
        assert_eq!(opened.special(), tokenizer.special());
        for text in TEXTS {
            let tokens = tokenizer.encode(text).expect("text");
            assert_eq!(opened.encode(text).expect("text"), tokens, "{text}");
            assert_eq!(opened.decode(&tokens).expect("tokens"), text);
        }
    }
}

/// A word-level tokenizer with a template, truncation and padding.
const WORDS: &str = r#"{
    "version": "1.0",
    "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    "added_tokens": [],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}, "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}}},
    "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "b": 5, "c": 6, "d": 7, "e": 9}, "unk_token": "[UNK]"}
}"#;

#[test]
fn truncation_and_padding_of_a_file_are_not_done() {
    let tokenizer = Tokenizer::from_json(WORDS.as_bytes(), "words").expect("a tokenizer");
    assert_eq!(
        tokenizer.vocabulary(),
        10,
        "one more than the largest, with a hole at 8"
    );
    assert_eq!(
        tokenizer.encode("A b c d e zoo").expect("text"),
        [4, 5, 6, 7, 9, 3]
    );
    assert_eq!(
        tokenizer.encode_whole("a b c d").expect("text"),
        [1, 4, 5, 6, 7, 2]
    );
    let short = tokenizer.clone().truncated(4).expect("long enough");
    assert_eq!(short.encode_whole("a b c d").expect("text"), [1, 4, 5, 2]);
    assert_eq!(short.encode_whole("a").expect("text"), [1, 4, 2]);
    assert_ne!(short.describe(), tokenizer.describe());
    assert!(tokenizer.truncated(0).is_err());
    let bytes = Tokenizer::bytes().truncated(2).expect("long enough");
    assert_eq!(bytes.encode("abc").expect("text"), [97, 98]);
}

#[test]
fn special_tokens_come_from_the_files_beside() {
    let folder = Folder::new("special");
    let path = folder.write("tokenizer.json", WORDS.as_bytes());
    let special = || {
        Tokenizer::open(&path)
            .expect("a tokenizer")
            .special()
            .clone()
    };
    assert_eq!(special(), Special::default());
    folder.write(
        "config.json",
        br#"{"bos_token_id": 4, "eos_token_id": [5, 6], "pad_token_id": null}"#,
    );
    let expected = Special {
        bos: Some(4),
        eos: Some(5),
        pad: None,
        stops: vec![5, 6],
    };
    assert_eq!(special(), expected);
    folder.write("generation_config.json", br#"{"eos_token_id": [6, 9]}"#);
    folder.write(
        "special_tokens_map.json",
        br#"{"pad_token": {"content": "[PAD]", "lstrip": false}}"#,
    );
    folder.write(
        "tokenizer_config.json",
        br#"{"eos_token": "[SEP]", "bos_token": "not there", "pad_token": null}"#,
    );
    let expected = Special {
        bos: Some(4),
        eos: Some(2),
        pad: Some(0),
        stops: vec![2, 5, 6, 9],
    };
    assert_eq!(special(), expected);
    folder.write("config.json", b"{\"bos_token_id\": 4");
    let error = Tokenizer::open(&path).expect_err("no JSON");
    assert!(
        matches!(&error, Error::Tokenizer { path, .. } if path.ends_with("config.json")),
        "{error}"
    );
}

#[test]
fn damaged_files_are_errors() {
    let folder = Folder::new("damaged-tokenizer");
    let error = Tokenizer::open(folder.path()).expect_err("nothing is there");
    assert!(matches!(error, Error::Io { .. }), "{error}");
    for len in 0..WORDS.len() {
        let error = Tokenizer::from_json(&WORDS.as_bytes()[..len], "words");
        assert!(matches!(error, Err(Error::Tokenizer { .. })), "{len} bytes");
    }
    // Other characters may or may not be a tokenizer, and never end the program.
    for at in 0..WORDS.len() {
        for byte in [b'"', b'9', b'}', 0xff] {
            let mut bytes = WORDS.as_bytes().to_vec();
            bytes[at] = byte;
            if let Ok(tokenizer) = Tokenizer::from_json(&bytes, "words") {
                let _ = tokenizer.encode_whole("a b zoo");
            }
        }
    }
}
