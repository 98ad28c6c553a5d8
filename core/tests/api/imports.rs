//! In a drawing of the imports no circle crosses a folder.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The folders of core, each before those that may import it.
const FOLDERS: [&str; 6] = ["transport", "grad", "reshard", "spmd", "ops", "indexing"];

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of core") {
        let path = entry.expect("an entry of a folder").path();
        if path.is_dir() {
            files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The modules of the crate that a file names, in `crate::name` or in `crate::{.., name::..}`.
fn imports(text: &str) -> BTreeSet<String> {
    let code: Vec<&str> = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""))
        .collect();
    let code = code.join("\n");
    let word = |text: &str| -> String {
        text.trim_start()
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect()
    };
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(word(rest));
            continue;
        };
        let (mut depth, mut start) = (1, 0);
        for (i, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 || (depth == 1 && c == ',') {
                found.insert(word(&list[start..i]));
                start = i + 1;
            }
            if depth == 0 {
                break;
            }
        }
    }
    found
}

#[test]
fn folders_import_only_those_before_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = vec![];
    for (n, folder) in FOLDERS.iter().enumerate() {
        let mut all = vec![];
        files(&source.join(folder), &mut all);
        assert!(!all.is_empty(), "{folder} is a folder of core");
        for file in all {
            let text = fs::read_to_string(&file).expect("a source file");
            for import in imports(&text) {
                if FOLDERS[n + 1..].contains(&import.as_str()) {
                    wrong.push(format!("{} imports {import}", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn imports_are_found_alone_and_in_lists() {
    let text = "use crate::{Error, // spmd::x\n    ops::{Map, run}, grad};\ncrate::reshard::run()";
    let expected = ["Error", "grad", "ops", "reshard"].map(String::from);
    assert_eq!(imports(text), BTreeSet::from(expected));
}
