//! The commands of the book: where a block of shell is followed by a block of text, the text is what
//! the commands print. What `docs/pictures/list.txt` lists is what they draw.
//!
//! A line `...` in the text stands for any lines. Times differ from run to run and are not compared.

#![cfg(unix)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

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

/// The pages.
fn docs() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"))
}

/// A folder of its own for the commands of a test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("anymesh-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder for the commands");
    folder
}

/// Runs lines of shell with the command in the path, and gives what they print.
fn ran(commands: &str, folder: &Path) -> String {
    let bin = Path::new(env!("CARGO_BIN_EXE_anymesh"));
    let paths = std::env::var("PATH").unwrap_or_default();
    let ran = Command::new("sh")
        .args(["-e", "-c", commands])
        .env(
            "PATH",
            format!("{}:{paths}", bin.parent().expect("a folder").display()),
        )
        .env("ANYMESH_DEVICE", "cpu")
        .current_dir(folder)
        .output()
        .expect("a shell");
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{commands}\n{errors}");
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

#[test]
fn pictures_are_what_their_commands_draw() {
    let (folder, pictures) = (folder("pictures"), docs().join("pictures"));
    let list = fs::read_to_string(pictures.join("list.txt")).expect("the list is there");
    let commands: Vec<&str> = list.lines().filter(|line| !line.starts_with('#')).collect();
    ran(&commands.join("\n"), &folder);
    let mut seen = 0;
    for entry in fs::read_dir(&folder).expect("it is there") {
        let drawn = entry.expect("it can be listed").path();
        let kept = pictures.join(drawn.file_name().expect("a name"));
        if std::env::var_os("ANYMESH_UPDATE_DOCS").is_some() {
            fs::copy(&drawn, &kept).expect("docs/pictures can be written");
        }
        let (drawn, same) = (fs::read(&drawn), fs::read(&kept));
        assert!(
            drawn.expect("it was drawn") == same.unwrap_or_default(),
            "{} is not what its command draws: ANYMESH_UPDATE_DOCS=1 keeps what it draws now",
            kept.display()
        );
        seen += 1;
    }
    assert_eq!(seen, commands.len(), "a picture for each command");
    fs::remove_dir_all(&folder).expect("the folder goes");
}

#[test]
fn commands_print_what_the_book_shows() {
    let folder = folder("book");
    let mut blocks = vec![];
    shown(&docs(), &mut blocks);
    assert!(blocks.len() >= 8, "only {} blocks were found", blocks.len());
    for (page, commands, text) in blocks {
        let printed = ran(&commands, &folder);
        let lines = |text: &str| text.trim_end().lines().map(comparable).collect::<Vec<_>>();
        assert!(
            fits(&lines(&text), &lines(&printed)),
            "{page}: {commands}\nprints\n{printed}\nand not\n{text}"
        );
    }
    fs::remove_dir_all(&folder).expect("the folder goes");
}
