//! The commands of the book: where a block of shell is followed by a block of text, the text is what
//! the commands print.
//!
//! A line `...` in the text stands for any lines. Times differ from run to run and are not compared.

#![cfg(unix)]

use std::{fs, path::Path, process::Command};

/// Every block of shell with the text that follows it at once, in all pages below a folder.
fn shown(folder: &Path, found: &mut Vec<(String, String, String)>) {
    let mut entries: Vec<_> = fs::read_dir(folder)
        .expect("the folder is there")
        .map(|entry| entry.expect("it can be listed").path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            shown(&path, found);
        } else if path.extension().is_some_and(|e| e == "md") {
            let page = fs::read_to_string(&path).expect("it can be read");
            for block in page.split("```sh\n").skip(1) {
                let Some((commands, rest)) = block.split_once("\n```\n\n```text\n") else {
                    continue;
                };
                // The text belongs to another block of shell otherwise.
                if let (false, Some((text, _))) =
                    (commands.contains("```"), rest.split_once("\n```"))
                {
                    let name = path.display().to_string();
                    found.push((name, commands.to_string(), text.to_string()));
                }
            }
        }
    }
}

/// A line without what differs between runs: times, and how much room they were given.
fn comparable(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let unit = |word: &&str| ["ns", "us", "ms", "s"].contains(word);
    let mut out = vec![];
    for (i, word) in words.iter().enumerate() {
        let number = word.parse::<f64>().is_ok();
        match number && words.get(i + 1).is_some_and(unit) {
            true => out.push("_"),
            false => out.push(word),
        }
    }
    out.join(" ")
}

/// Whether the lines are those expected, where `...` stands for any number of them.
fn fits(expected: &[String], lines: &[String]) -> bool {
    match expected.split_first() {
        None => lines.is_empty(),
        Some((any, rest)) if any == "..." => (0..=lines.len()).any(|n| fits(rest, &lines[n..])),
        Some((first, rest)) => lines.first() == Some(first) && fits(rest, &lines[1..]),
    }
}

#[test]
fn commands_print_what_the_book_shows() {
    let bin = Path::new(env!("CARGO_BIN_EXE_anymesh"));
    let folder = std::env::temp_dir().join(format!("anymesh-book-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for the commands");
    let paths = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{paths}", bin.parent().expect("a folder").display());
    let mut blocks = vec![];
    shown(
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")),
        &mut blocks,
    );
    assert!(blocks.len() >= 8, "only {} blocks were found", blocks.len());
    for (page, commands, text) in blocks {
        let ran = Command::new("sh")
            .args(["-e", "-c", &commands])
            .env("PATH", &path)
            .env("ANYMESH_DEVICE", "cpu")
            .current_dir(&folder)
            .output()
            .expect("a shell");
        let printed = String::from_utf8_lossy(&ran.stdout).into_owned();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{page}: {commands}\n{errors}");
        let lines = |text: &str| text.trim_end().lines().map(comparable).collect::<Vec<_>>();
        assert!(
            fits(&lines(&text), &lines(&printed)),
            "{page}: {commands}\nprints\n{printed}\nand not\n{text}"
        );
    }
    fs::remove_dir_all(&folder).expect("the folder goes");
}
