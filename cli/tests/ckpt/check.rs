//! `ckpt verify` and `ckpt diff`.

use super::*;

#[test]
fn verify_says_what_is_damaged_with_its_exit_code() {
    let case = Case::new("verify");
    let one = case.at("one");
    assert!(text(&["verify", &one]).contains("3 tensors, 32.0 KiB: 0 damaged"));
    case.damage("one/rank-00002.safetensors");
    let (code, out, _) = said(&["verify", &one]);
    assert!(
        code == 1 && out.contains("rank-00002") && out.contains("1 damaged"),
        "{out}"
    );
    let (code, json) = object(&["verify", &one]);
    let damaged = json["damaged"].as_array().unwrap();
    assert_eq!(
        (code, &json["whole"], &json["sums"], damaged.len()),
        (1, &json!(false), &json!(true), 1)
    );
    assert!(
        damaged[0]["file"]
            .as_str()
            .unwrap()
            .ends_with("rank-00002.safetensors"),
        "{json}"
    );
    let tensor = damaged[0]["tensor"].as_str().unwrap();
    assert_eq!(object(&["verify", &one, "--remove", tensor]).0, 0);
    assert_eq!(
        said(&["verify", &one, "--quiet"]),
        (1, String::new(), String::new())
    );
    assert_eq!(ckpt(&["verify", &case.at("two")]).status.code(), Some(2));
}

#[test]
fn a_file_that_was_cut_short_or_is_gone_is_damage() {
    let case = Case::new("verify-cut");
    let file = case.at("one/rank-00001.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 9]).unwrap();
    let (code, out, _) = said(&["verify", &case.at("one")]);
    assert!(code == 1 && out.contains("cut short"), "{out}");
    std::fs::remove_file(&file).unwrap();
    let (code, json) = object(&["verify", &case.at("one")]);
    assert!(
        code == 1
            && json["damaged"][0]["file"]
                .as_str()
                .unwrap()
                .ends_with("rank-00001.safetensors"),
        "{json}"
    );
}

#[test]
fn verify_checks_other_formats_as_far_as_they_go_and_says_so() {
    let case = Case::new("verify-others");
    let (one, file, folder, split) = (
        case.at("one"),
        case.at("all.safetensors"),
        case.at("hf"),
        case.at("split"),
    );
    text(&["merge", &one, &file]);
    text(&["export", &one, &folder, "--max-file-size", "20K"]);
    text(&[
        "split",
        &one,
        &split,
        "--mesh",
        "tp=2",
        "--layout",
        "layers.0.w=[@tp, _]",
    ]);
    for path in [&file, &folder, &split] {
        let out = text(&["verify", path]);
        assert!(
            out.contains("3 tensors") && out.contains("0 damaged") && out.contains("no sums"),
            "{out}"
        );
        assert_eq!(object(&["verify", path]).1["sums"], false);
    }
    // A header that says another size.
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let (code, out, _) = said(&["verify", &file]);
    assert!(code == 1 && out.contains("1 damaged"), "{out}");
    // An index that says other bytes than the files have.
    let index = case.at("hf/model.safetensors.index.json");
    let changed = std::fs::read_to_string(&index)
        .unwrap()
        .replace("\"total_size\": 32776", "\"total_size\": 32777");
    std::fs::write(&index, changed).unwrap();
    let (code, out, _) = said(&["verify", &folder]);
    assert!(
        code == 1 && out.contains("total_size says 32777 bytes, the tensors have 32776"),
        "{out}"
    );
    // A replica that is not one.
    case.damage("split/model-rank-1-part-0.safetensors");
    let (code, out, _) = said(&["verify", &split]);
    assert!(code == 1 && out.contains("ranks 0 and 1"), "{out}");
}

#[test]
fn diff_tells_names_types_and_values() {
    let case = Case::new("diff");
    let (one, cast) = (case.at("one"), case.at("cast"));
    text(&[
        "cast",
        &one,
        &cast,
        "--dtype",
        "bf16",
        "--only",
        "layers.1.*",
    ]);
    let (code, out, _) = said(&["diff", &one, &cast]);
    assert!(
        code == 1 && out.contains("layers.1.w: f32[64, 64] and bf16[64, 64]"),
        "{out}"
    );
    assert_eq!(
        object(&["diff", &one, &cast, "--filter", "layers.0.w"]),
        (
            0,
            json!({"equal": true, "compared": 1, "values": false, "differences": []})
        )
    );
    let back = case.at("back");
    text(&["cast", &cast, &back, "--dtype", "f32"]);
    let (code, out, _) = said(&["diff", &one, &back, "--values"]);
    // 257 is the first number that bf16 does not have; it is element 256 of layers.1.w.
    assert!(
        code == 1
            && out.contains("layers.1.w: ")
            && out.contains("the first at [4, 0]: 257.0 and 256.0"),
        "{out}"
    );
    let (code, json) = object(&["diff", &one, &back, "--values", "--memory-limit", "64M"]);
    let difference = &json["differences"][0];
    assert_eq!(
        (
            code,
            &json["equal"],
            &difference["name"],
            &difference["what"]
        ),
        (1, &json!(false), &json!("layers.1.w"), &json!("values"))
    );
    assert_eq!(
        (&difference["largest"], &difference["first"]),
        (
            &json!(8.0),
            &json!({"at": [4, 0], "left": 257.0, "right": 256.0})
        )
    );
}

#[test]
fn diff_tells_what_only_one_has() {
    let case = Case::new("diff-names");
    let (one, part) = (case.at("one"), case.at("part"));
    text(&["reshard", &one, &part, "--mesh", "x=1", "--remove", "step"]);
    assert_eq!(
        said(&["diff", &one, &part]).1,
        "step: only in the first\n1 of 3 tensors differ in names and types\n"
    );
    assert_eq!(
        object(&["diff", &part, &one]).1["differences"],
        json!([{"name": "step", "what": "only_right"}])
    );
    assert_eq!(
        text(&["diff", &one, &part, "--remove", "step", "--values"]),
        "0 of 2 tensors differ in names, types and values\n"
    );
}
