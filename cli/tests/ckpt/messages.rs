//! What is said when something is asked wrongly: what to do instead, with exit code 2, as JSON
//! where that was asked for.

use super::*;
use std::path::Path;

/// Asserts that a command cannot be done and says all of this, in words and as JSON.
fn refuses(args: &[&str], parts: &[&str]) {
    let (code, out, error) = said(args);
    assert!(code == 2 && out.is_empty(), "{args:?}: {code} {out}{error}");
    parts
        .iter()
        .for_each(|part| assert!(error.contains(part), "{args:?}: '{part}' in '{error}'"));
    let (code, json) = object(args);
    let error = json["error"]
        .as_str()
        .unwrap_or_else(|| panic!("{args:?}: {json}"));
    assert_eq!((code, json.as_object().unwrap().len()), (2, 1), "{args:?}");
    parts
        .iter()
        .for_each(|part| assert!(error.contains(part), "{args:?}: '{part}' in '{error}'"));
}

#[test]
fn a_path_that_is_nothing_or_holds_checkpoints_is_explained() {
    let case = Case::new("paths");
    let (root, one, none) = (case.at(""), case.at("one"), case.at("none"));
    text(&["reshard", &one, &case.at("two"), "--mesh", "x=1"]);
    for command in ["inspect", "verify"] {
        refuses(&[command, &none], &["none", "no such file or folder"]);
        refuses(
            &[command, &root],
            &["folder of checkpoints", "one", "two", "such as the newest"],
        );
    }
    refuses(&["diff", &one, &root], &["folder of checkpoints"]);
    std::fs::create_dir(case.at("empty")).unwrap();
    refuses(
        &["export", &case.at("empty"), &case.at("x")],
        &[
            "manifest.json",
            "model.safetensors",
            "give the folder of one checkpoint",
        ],
    );
    std::fs::write(case.at("text.txt"), "hello").unwrap();
    refuses(
        &["inspect", &case.at("text.txt")],
        &["text.txt", "not a valid safetensors file"],
    );
    // A whole file of another program is not damaged; what stays of a failed download is.
    std::fs::write(case.at("model.h5"), b"\x89HDF\r\n\x1a\n\0\0\0\0").unwrap();
    for command in ["inspect", "verify"] {
        refuses(
            &[command, &case.at("model.h5")],
            &["model.h5: this is an HDF5 file", "safetensors.numpy"],
        );
    }
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    std::fs::write(case.at("pointer.safetensors"), pointer).unwrap();
    let (code, json) = object(&["verify", &case.at("pointer.safetensors")]);
    assert_eq!((code, &json["whole"]), (1, &json!(false)));
    let error = json["damaged"][0]["error"].as_str().unwrap();
    assert!(error.contains("git lfs pull"), "{error}");
    refuses(
        &["prune", &one, "--keep-last", "1"],
        &[
            "is one checkpoint",
            "give the folder that holds checkpoints",
        ],
    );
    refuses(&["prune", &none, "--keep-last", "1"], &["none"]);
    refuses(
        &["prune", &root, "--keep-last", "1", "--protect", "best"],
        &["--protect best", "nothing of that name"],
    );
}

#[test]
fn a_target_that_exists_stays_as_it_is() {
    let case = Case::new("targets");
    let one = case.at("one");
    let before = object(&["inspect", &one, "--sums"]);
    for args in [
        vec!["reshard", &one, &one, "--mesh", "x=1"],
        vec!["cast", &one, &one, "--dtype", "f16"],
        vec!["export", &one, &one],
        vec!["import", &one, &one],
    ] {
        refuses(
            &args,
            &["one exists already: remove it or choose another name"],
        );
    }
    let file = case.at("a.safetensors");
    text(&["merge", &one, &file]);
    refuses(&["merge", &one, &file], &["exists already"]);
    refuses(
        &["split", &one, &one, "--mesh", "tp=2"],
        &["exists already"],
    );
    assert_eq!(object(&["inspect", &one, "--sums"]), before);
}

#[test]
fn options_that_do_not_fit_say_what_would() {
    let case = Case::new("options");
    let (one, to) = (case.at("one"), case.at("to"));
    refuses(
        &["cast", &one, &to, "--dtype", "bf17"],
        &["bf17", "there are", "bf16"],
    );
    refuses(
        &["cast", &one, &to, "--dtype", "i32"],
        &["no such float dtype"],
    );
    refuses(
        &["cast", &one, &to, "--dtype", "f16", "--only", "layer.*"],
        &["'layer.*' matches no tensor", "layers.0.w"],
    );
    refuses(
        &["inspect", &one, "--filter", "layer.*"],
        &["'layer.*' matches no tensor", "layers.0.w"],
    );
    refuses(
        &["diff", &one, &one, "--remove", "x"],
        &["'x' matches no tensor"],
    );
    refuses(
        &["export", &one, &to, "--filter", "step", "--remove", "st*"],
        &["no tensor is left"],
    );
    for (options, parts) in [
        (&["--mesh", "x"][..], &["--mesh x", "such as dp=2,tp=4"][..]),
        (
            &["--mesh", "x=2", "--layout", "layers"],
            &["\"layers\" is no layout", "NAMES=SHARDING"],
        ),
        (
            &["--mesh", "x=2", "--layout", "layers.*=[@q, _]"],
            &["layers.*=[@q, _]", "q", "such as \"*.weight=[@x, _]\""],
        ),
        (
            &["--mesh", "x=2", "--layout", "step=[@x, _]"],
            &[
                "step=[@x, _]",
                "for tensors of 2 dimensions",
                "'step' has 0",
            ],
        ),
        (
            &["--mesh", "x=2", "--layout", "layer.*=[@x, _]"],
            &["layer.*", "matches no tensor", "layers.0.w"],
        ),
        (
            &[
                "--mesh",
                "x=2",
                "--layout",
                "*=[...]",
                "--layout",
                "*.w=[@x, _]",
            ],
            &["*.w=[@x, _]", "that a layout before it matches"],
        ),
        (
            &["--mesh", "x=2", "--memory-limit", "1M"],
            &["--memory-limit 1.0 MiB", "at least 64.0 MiB"],
        ),
        (
            &["--mesh", "x=2", "--memory-limit", "1X"],
            &["'x' is no unit"],
        ),
    ] {
        refuses(&[&["reshard", &one, &to], options].concat(), parts);
    }
    refuses(
        &[
            "merge",
            &one,
            &case.at("a.safetensors"),
            "--max-file-size",
            "1G",
        ],
        &["--max-file-size is for folders"],
    );
    refuses(
        &["merge", &one, &to, "--mesh", "tp=2"],
        &["is a checkpoint: leave it out"],
    );
    refuses(
        &["export", &one, &to, "--configs", &case.at("")],
        &["--configs", "config.json"],
    );
    refuses(
        &["map", &one, &to, "--statements", &case.at("none.txt")],
        &["none.txt"],
    );
    std::fs::write(case.at("map.txt"), "step -> steps\nnothing -> something\n").unwrap();
    refuses(
        &["map", &one, &to, "--statements", &case.at("map.txt")],
        &["line 2", "there is no tensor 'nothing'"],
    );
    refuses(&["reshard", &one], &["<TO>"]);
    refuses(&["frobnicate"], &["frobnicate"]);
    assert!(!Path::new(&to).exists());
}

#[test]
fn the_help_says_what_exit_codes_mean() {
    assert!(text(&["--help"]).contains("Exit codes: 0 yes or done, 1 the answer is no"));
    assert!(text(&["verify", "--help"]).contains("Exit codes"));
}
