//! `ckpt inspect`.

use super::*;

#[test]
fn inspect_shows_a_tree_with_layouts_and_state() {
    let case = Case::new("inspect");
    let out = text(&["inspect", &case.at("one")]);
    for part in [
        "layers ",
        "├─ 0.w",
        "└─ 1.w",
        "f32[64@dp, 64@tp]",
        "16.0 KiB",
        "8 regions",
        "step 7",
        "dp=2, tp=4",
        "consumed_samples: 123",
        "3 tensors, 32.0 KiB",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
    let flat = text(&["inspect", &case.at("one"), "--flat"]);
    assert!(
        flat.contains("layers.0.w  f32[64@dp, 64@tp]  16.0 KiB  8 regions"),
        "{flat}"
    );
    assert_eq!(text(&["inspect", &case.at("one"), "--quiet"]), "");
}

#[test]
fn layers_that_are_alike_are_shown_once_unless_all_are_asked_for() {
    let case = Case::new("fold");
    let device = anymesh::device("cpu").unwrap();
    let x = Tensor::full([4], 1, DType::BF16, &device).unwrap();
    let names: Vec<String> = (0..12)
        .map(|i| format!("model.layers.{i}.norm.weight"))
        .collect();
    case.save(
        "deep",
        &names
            .iter()
            .map(|name| (name.as_str(), x.clone()))
            .collect::<Vec<_>>(),
    );
    let out = text(&["inspect", &case.at("deep")]);
    assert!(
        out.contains(
            "model.layers.{0..11}.norm.weight  bf16[4]  8 B  × 12  1 region\n12 tensors, 96 B"
        ),
        "{out}"
    );
    let all = text(&["inspect", &case.at("deep"), "--all"]);
    let numbers: Vec<&str> = all
        .lines()
        .filter_map(|l| l.strip_prefix("├─ ").or(l.strip_prefix("└─ ")))
        .filter_map(|l| l.split('.').next())
        .collect();
    assert_eq!(
        numbers,
        ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"]
    );
}

#[test]
fn everything_is_in_the_json() {
    let case = Case::new("inspect-json");
    let (code, json) = object(&["inspect", &case.at("one"), "--filter", "layers.*"]);
    assert_eq!(code, 0);
    assert_eq!(
        (
            json["tensors"].as_array().unwrap().len(),
            &json["state"]["consumed_samples"]
        ),
        (2, &json!(123))
    );
    let expected = json!({"name": "layers.0.w", "dtype": "f32", "shape": [64, 64], "layout": "f32[64@dp, 64@tp]", "bytes": 16384, "boxes": 8});
    assert_eq!(json["tensors"][0], expected);
    assert_eq!(
        (&json["kind"], &json["step"], &json["mesh"]),
        (
            &json!("checkpoint"),
            &json!(7),
            &json!([["dp", 2], ["tp", 4]])
        )
    );
}

#[test]
fn sums_are_the_same_in_every_layout_and_format() {
    let case = Case::new("sums");
    let (one, two, file) = (case.at("one"), case.at("two"), case.at("all.safetensors"));
    reshard(&one, &two, "x=3", "layers.*=[_, @x]");
    text(&["merge", &one, &file]);
    let sums = |path: &str| -> Vec<String> {
        let (_, json) = object(&["inspect", path, "--sums", "--memory-limit", "64M"]);
        json["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| format!("{} {}", t["name"], t["sum"]))
            .collect()
    };
    let expected = sums(&one);
    assert!(
        expected.len() == 3 && expected.iter().all(|s| !s.contains("null")),
        "{expected:?}"
    );
    assert_eq!(
        (sums(&two), sums(&file)),
        (expected.clone(), expected.clone())
    );
    let w: Vec<u8> = (0..4096).flat_map(|i| (i as f32).to_le_bytes()).collect();
    assert_eq!(
        expected[0],
        format!(
            "\"layers.0.w\" \"{}\"",
            anymesh::checkpoint::manifest::checksum(&w)
        )
    );
    let out = text(&["inspect", &one, "--sums", "--filter", "layers.0.w"]);
    assert!(
        out.contains(&anymesh::checkpoint::manifest::checksum(&w)),
        "{out}"
    );
}

#[test]
fn a_checkpoint_is_drawn_and_written_as_a_page() {
    let case = Case::new("inspect-page");
    let page = text(&["inspect", &case.at("one"), "--html", "-"]);
    assert!(
        page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"),
        "{page}"
    );
    for part in [
        "layers.0.w",
        "f32[64@dp, 64@tp]",
        "checkpoint of step 7",
        "3 tensors, 32 KiB",
        "consumed_samples",
    ] {
        assert!(page.contains(part), "{part} in {page}");
    }
    let svg = case.at("one.svg");
    let json = object(&["inspect", &case.at("one"), "--svg", &svg]).1;
    assert_eq!(
        json["tensors"].as_array().map(Vec::len),
        Some(3),
        "the answer is printed too"
    );
    assert!(
        std::fs::read_to_string(svg)
            .unwrap()
            .contains(">layers.1</text>")
    );
    let only = text(&[
        "inspect",
        &case.at("one"),
        "--filter",
        "layers.0.*",
        "--html",
        "-",
    ]);
    assert!(
        !only.contains("layers.1.w") && only.contains("1 tensor"),
        "{only}"
    );
}
