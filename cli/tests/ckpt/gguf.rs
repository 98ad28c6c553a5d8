//! GGUF files in every command that takes them.

use super::*;
use std::path::Path;

/// A small Llama model that the Python package wrote.
fn llama() -> String {
    recorded("llama.gguf")
}

fn recorded(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/data/gguf");
    path.join(name).to_str().unwrap().to_string()
}

/// A file of one tensor of four floats, with metadata.
fn built(values: &[(&str, u32, Vec<u8>)], kind: u32) -> Vec<u8> {
    let text = |x: &str| [&(x.len() as u64).to_le_bytes()[..], x.as_bytes()].concat();
    let mut out = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
    out.extend((values.len() as u64).to_le_bytes());
    for (key, kind, value) in values {
        out.extend([text(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
    }
    out.extend(text("w"));
    out.extend(1u32.to_le_bytes());
    out.extend(4u64.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend([1f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()));
    out
}

#[test]
fn inspect_shows_types_and_metadata() {
    let out = text(&["inspect", &llama()]);
    for part in [
        "attn_q",
        "f32[32, 32]",
        "Q8_0",
        "Q4_1",
        "F16",
        "GGUF version 3",
        "  general.architecture: \"llama\"",
        "  llama.attention.head_count_kv: 2",
        "  llama.attention.layer_norm_rms_epsilon: 0.00001",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
    let (code, json) = object(&["inspect", &llama(), "--filter", "blk.0.attn_k.weight"]);
    assert_eq!(code, 0);
    let expected = json!([{
        "name": "blk.0.attn_k.weight", "dtype": "f32", "shape": [16, 32], "layout": "f32[16, 32]",
        "bytes": 2048, "type": "Q8_0", "stored_bytes": 544,
    }]);
    assert_eq!(json["tensors"], expected);
    assert_eq!(
        (
            &json["kind"],
            &json["version"],
            &json["metadata"]["llama.rope.freq_base"]
        ),
        (&json!("GGUF file"), &json!(3), &json!(50000.0))
    );
}

#[test]
fn long_arrays_and_texts_are_shortened() {
    let case = Case::new("gguf-long");
    let mut array = 4u32.to_le_bytes().to_vec();
    array.extend(1000u64.to_le_bytes());
    (0..1000u32).for_each(|i| array.extend(i.to_le_bytes()));
    let long = "x".repeat(500);
    let string = [&500u64.to_le_bytes()[..], long.as_bytes()].concat();
    let file = built(&[("list", 9, array), ("template", 8, string)], 0);
    std::fs::write(case.at("long.gguf"), file).unwrap();
    let out = text(&["inspect", &case.at("long.gguf")]);
    assert!(
        out.contains("  list: [0, 1, 2, 3, 4, 5, 6, 7, ...] (1000)\n"),
        "{out}"
    );
    assert!(out.contains("x\"... (500 characters)\n"), "{out}");
    let (_, json) = object(&["inspect", &case.at("long.gguf")]);
    let list = json!({"length": 1000, "first": [0, 1, 2, 3, 4, 5, 6, 7]});
    assert_eq!(json["metadata"], json!({"list": list, "template": long}));
}

#[test]
fn import_and_export_give_the_model_of_hugging_face() {
    let case = Case::new("gguf-import");
    let (imported, folder, again) = (case.at("imported"), case.at("folder"), case.at("again"));
    text(&["import", &llama(), &imported]);
    let (_, json) = object(&["inspect", &imported]);
    assert_eq!(json["state"]["architecture"], "LlamaForCausalLM");
    assert_eq!(json["state"]["config"]["num_key_value_heads"], 2);
    assert_eq!(json["state"]["gguf"]["llama.block_count"], 2);

    let out = text(&["export", &llama(), &folder]);
    assert!(out.contains("24 tensors in 1 file"), "{out}");
    // The file has no tokenizer, and the folder says so.
    assert!(
        out.contains("no tokenizer.json") && !Path::new(&folder).join("tokenizer.json").exists()
    );
    let config = |folder: &str, name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(Path::new(folder).join(name)).unwrap()).unwrap()
    };
    let written = config(&folder, "config.json");
    assert_eq!(
        (&written["hidden_size"], &written["rope_theta"]),
        (&json!(32), &json!(50000.0))
    );
    assert_eq!(config(&folder, "generation_config.json")["eos_token_id"], 2);

    // By either way the same names, types and values, and the same configuration.
    for other in [&imported, &folder] {
        let out = text(&["diff", &llama(), other, "--values"]);
        assert!(
            out.contains("0 of 24 tensors differ in names, types and values"),
            "{out}"
        );
    }
    text(&["export", &imported, &again]);
    assert_eq!(config(&again, "config.json"), written);
    assert!(names(&imported).contains(&"model.layers.1.self_attn.q_proj.bias".to_string()));
}

#[test]
fn names_stay_where_that_is_asked_for_or_others_are_not_known() {
    let case = Case::new("gguf-raw");
    let raw = case.at("raw");
    text(&["import", &llama(), &raw, "--raw-names"]);
    assert_eq!(names(&raw), names(&llama()));
    text(&["diff", &llama(), &raw, "--raw-names", "--values"]);
    let (code, out, _) = said(&["diff", &llama(), &raw]);
    assert!(code == 1 && out.contains("only in the second"), "{out}");

    let types = case.at("types");
    text(&["import", &recorded("types.gguf"), &types]);
    assert_eq!(names(&types), names(&recorded("types.gguf")));
    let (code, json) = object(&["export", &recorded("types.gguf"), &case.at("folder")]);
    let notes = json["notes"].as_array().unwrap();
    assert_eq!((code, notes.len()), (0, 2), "{json}");
    assert!(notes[0].as_str().unwrap().contains("no config.json"));
    assert!(notes[1].as_str().unwrap().contains("no tokenizer.json"));
    // A part of a tensor whose blocks are cut by the mesh.
    text(&[
        "reshard",
        &recorded("types.gguf"),
        &case.at("cut"),
        "--mesh",
        "x=3",
        "--layout",
        "Q6_K=[_, @x]",
    ]);
    text(&["diff", &recorded("types.gguf"), &case.at("cut"), "--values"]);
}

#[test]
fn a_model_that_is_not_whole_says_what_is_missing() {
    let case = Case::new("gguf-missing");
    let name = [&5u64.to_le_bytes()[..], b"llama"].concat();
    let file = built(&[("general.architecture", 8, name)], 0);
    std::fs::write(case.at("odd.gguf"), file).unwrap();
    let (code, _, error) = said(&["import", &case.at("odd.gguf"), &case.at("to")]);
    assert!(
        code == 2
            && error.contains("odd.gguf: llama.attention.head_count: it is missing; --raw-names"),
        "{error}"
    );
    text(&[
        "import",
        &case.at("odd.gguf"),
        &case.at("to"),
        "--raw-names",
    ]);
    assert_eq!(names(&case.at("to")), ["w"]);
}

#[test]
fn tensors_of_other_types_are_not_left_out_silently() {
    let case = Case::new("gguf-foreign");
    std::fs::write(case.at("q5.gguf"), built(&[], 13)).unwrap();
    let out = text(&["inspect", &case.at("q5.gguf")]);
    assert!(out.contains("w  Q5_K, which cannot be read here"), "{out}");
    let (code, _, error) = said(&["import", &case.at("q5.gguf"), &case.at("to")]);
    assert!(
        code == 2 && error.contains("'w'") && error.contains("Q5_K"),
        "{error}"
    );
}

#[test]
fn verify_finds_what_is_cut_off_and_says_where() {
    let case = Case::new("gguf-verify");
    let out = text(&["verify", &llama()]);
    assert!(
        out.contains("GGUF file, 24 tensors") && out.contains("0 damaged"),
        "{out}"
    );
    assert!(out.contains("GGUF files have no sums"), "{out}");
    let whole = std::fs::read(llama()).unwrap();
    std::fs::write(case.at("half.gguf"), &whole[..whole.len() / 2]).unwrap();
    let (code, json) = object(&["verify", &case.at("half.gguf")]);
    let error = json["damaged"][0]["error"].as_str().unwrap();
    assert_eq!((code, &json["whole"]), (1, &json!(false)));
    assert!(
        error.contains("half.gguf: not a valid GGUF file: at byte "),
        "{error}"
    );
    assert!(json["damaged"][0]["offset"].is_u64());
    let (code, _, error) = said(&["inspect", &case.at("half.gguf")]);
    assert!(
        code == 2 && error.contains("not a valid GGUF file"),
        "{error}"
    );
    // Another version is not damage.
    let mut old = whole;
    old[4] = 1;
    std::fs::write(case.at("old.gguf"), old).unwrap();
    let (code, _, error) = said(&["verify", &case.at("old.gguf")]);
    assert!(code == 2 && error.contains("version 1"), "{error}");
}
