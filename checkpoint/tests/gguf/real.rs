//! The SmolLM2 model that `scripts/models` fetches, held against the Python packages of GGUF and of
//! tokenizers, and against what llama.cpp makes of it.

use crate::common::{Temporary, data};
use anymesh_checkpoint::{Source, gguf};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file, where it was fetched.
fn smollm2() -> Option<PathBuf> {
    let folder = std::env::var_os("ANYMESH_MODELS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/models"),
        PathBuf::from,
    );
    let path = folder.join("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if !path.is_file() {
        println!(
            "skipped: {} is not there, scripts/models fetches it",
            path.display()
        );
        return None;
    }
    Some(path)
}

/// What the script says, if Python has the packages.
fn python(packages: &str, args: &[&Path]) -> Option<String> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let has = Command::new(&python)
        .args(["-c", &format!("import {packages}")])
        .output();
    if !has.is_ok_and(|out| out.status.success()) {
        println!("skipped: {python} with {packages} is not there");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/make_gguf.py");
    let out = Command::new(&python).arg(script).args(args).output();
    let out = out.expect("runs");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    Some(String::from_utf8(out.stdout).expect("text"))
}

#[test]
fn every_tensor_is_what_the_python_package_makes_of_it() {
    let Some(path) = smollm2() else { return };
    let Some(sums) = python("gguf", &[Path::new("sums"), &path]) else {
        return;
    };
    let file = gguf::File::open(&path).expect("opens");
    let mut count = 0;
    for line in sums.lines() {
        let [name, kind, shape, sum] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let info = file.info(name).expect("it is there");
        let sizes: Vec<String> = info.shape.iter().map(usize::to_string).collect();
        assert_eq!(sizes.join(","), shape, "{name}");
        assert_eq!(
            file.tensor_type(name).expect("known").name(),
            kind,
            "{name}"
        );
        let bytes = file.read_all(name).expect("reads");
        assert_eq!(crc32fast::hash(&bytes).to_string(), sum, "{name}");
        count += 1;
    }
    assert_eq!((count, file.tensors().len()), (272, 272));
}

#[test]
fn its_configuration_is_that_of_the_model() {
    let Some(path) = smollm2() else { return };
    let model = gguf::Model::open(&path).expect("a model");
    assert_eq!(
        Value::Object(model.config().clone()),
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0, "vocab_size": 49152, "max_position_embeddings": 8192,
            "tie_word_embeddings": true, "torch_dtype": "float32",
            "attention_bias": false, "mlp_bias": false,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        })
    );
    assert_eq!(model.tensors().len(), 272);
    let embedding = model
        .info("model.embed_tokens.weight")
        .expect("it is there");
    assert_eq!(embedding.to_string(), "f32[49152, 576]");
}

/// `smollm2.tokens.json` is what llama.cpp gives for these texts.
#[test]
fn its_tokenizer_gives_the_tokens_of_llama_cpp() {
    let Some(path) = smollm2() else { return };
    assert_tokens(&path, "gguf/smollm2.tokens.json");
}

/// `pieces.tokens.json` is what SentencePiece gives with the tokenizer of `pieces.gguf`.
#[test]
fn a_tokenizer_of_sentence_piece_gives_its_tokens() {
    assert_tokens(&data("gguf/pieces.gguf"), "gguf/pieces.tokens.json");
}

/// Holds the tokens that Hugging Face's library gives, with the tokenizer that is made of a file,
/// against recorded ones.
fn assert_tokens(path: &Path, recorded: &str) {
    let name = format!("tokens-{}", recorded.replace('/', "-"));
    let folder = Temporary::new(&name);
    let json = gguf::File::open(path).expect("opens").tokenizer();
    let (tokenizer, recorded) = (folder.join("tokenizer.json"), data(recorded));
    std::fs::write(&tokenizer, json.expect("known").to_string()).expect("writes");
    let args = [Path::new("encode"), &tokenizer, &recorded];
    let Some(found) = python("gguf, tokenizers", &args) else {
        return;
    };
    let recorded: Value =
        serde_json::from_slice(&std::fs::read(&recorded).expect("recorded")).expect("JSON");
    let recorded = recorded.as_array().expect("a list");
    assert_eq!(found.lines().count(), recorded.len());
    for (line, expected) in found.lines().zip(recorded) {
        assert_eq!(line, expected["tokens"].to_string(), "{}", expected["text"]);
    }
}
