//! What the book says about the command is so: `docs/cli.md` is written from the command itself,
//! and every command line in the pages and in the README is one that it takes.

use crate::Cli;
use clap::{Arg, Command, CommandFactory, Parser};
use std::{fs, path::PathBuf};

/// Set to have `docs/cli.md` written anew.
const UPDATE: &str = "ANYMESH_UPDATE_DOCS";

const HEAD: &str = "# The command

`cargo install --path cli` installs `anymesh`; `anymesh doctor` says which devices it finds. Every command and option is on this page, which is written from the command itself: a test compares them.

Types of tensors are written as they are printed, `f32[64@dp, 32]{sum:tp}`; meshes as `dp=2,tp=4`. The device is the one that `ANYMESH_DEVICE` names, else CUDA, else a GPU, else the CPU; software GPUs only
by name. Commands other than `ckpt`, `launch` and `trace`, which say theirs below, exit with 0 when they are done and with another code after an error.
";

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// A text of help in Markdown: what stands in backticks stays as it is.
fn escaped(text: &str) -> String {
    let parts = text.trim().split('`').enumerate().map(|(i, part)| {
        let special = |c: char| c == '|' || (i % 2 == 0 && "*_[]<>\\".contains(c));
        let escape = |c: char| match special(c) {
            true => vec!['\\', c],
            false => vec![c],
        };
        part.chars().flat_map(escape).collect::<String>()
    });
    parts.collect::<Vec<_>>().join("`")
}

/// How an argument is written on the command line.
fn spelled(arg: &Arg) -> String {
    let values = arg.get_action().takes_values();
    let values: Vec<String> = match arg.get_value_names() {
        Some(names) if values => names.iter().map(|n| n.to_string()).collect(),
        _ => vec![],
    };
    let long = arg.get_long().map(|long| format!("--{long}"));
    let short = arg.get_short().map(|short| format!("-{short}"));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    [names.join(", "), values.join(" ")].join(" ").trim().into()
}

fn row(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help());
    let mut text = help
        .map_or(String::new(), |h| h.to_string())
        .replace('\n', " ");
    let defaults = arg.get_default_values();
    if arg.get_action().takes_values() && !defaults.is_empty() {
        let defaults: Vec<_> = defaults.iter().map(|d| d.to_string_lossy()).collect();
        text += &format!(" (`{}` if not given)", defaults.join(" "));
    }
    let possible: Vec<_> = arg.get_possible_values();
    if arg.get_action().takes_values() && !possible.is_empty() {
        let names: Vec<_> = possible
            .iter()
            .map(|p| format!("`{}`", p.get_name()))
            .collect();
        text += &format!(" (one of {})", names.join(", "));
    }
    format!(
        "| `{}` | {} |\n",
        spelled(arg).replace('|', "\\|"),
        escaped(&text)
    )
}

/// A command and all commands below it.
fn section(command: &mut Command, name: &str, page: &mut String) {
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    *page += &format!(
        "\n{} {name}\n\n",
        if name.contains("ckpt ") { "###" } else { "##" }
    );
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        *page += &format!("{}.\n\n", escaped(about.to_string().trim_end_matches('.')));
    }
    *page += &format!("```text\n{usage}\n```\n");
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) = command
        .get_arguments()
        .filter(shown)
        .partition(|a| a.is_positional());
    if !positional.is_empty() || !options.is_empty() {
        *page += "\n| | |\n|---|---|\n";
        page.extend(positional.into_iter().chain(options).map(row));
    }
    if let Some(more) = command.get_after_long_help().or(command.get_after_help()) {
        *page += &format!("\n{}\n", escaped(&more.to_string()));
    }
    for below in command.get_subcommands_mut() {
        if !below.is_hide_set() && below.get_name() != "help" {
            let name = format!("{name} {}", below.get_name());
            section(below, &name, page);
        }
    }
}

fn page() -> String {
    let mut command = Cli::command().name("anymesh").bin_name("anymesh");
    command.build();
    let mut page = HEAD.to_string();
    for below in command.get_subcommands_mut() {
        if !below.is_hide_set() && below.get_name() != "help" {
            let name = format!("anymesh {}", below.get_name());
            section(below, &name, &mut page);
        }
    }
    page
}

#[test]
fn the_page_of_the_command_has_every_command_and_option() {
    let (path, page) = (root().join("docs/cli.md"), page());
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, &page).expect("docs/cli.md can be written");
    }
    let kept = fs::read_to_string(&path).expect("docs/cli.md is there");
    let differs = kept.lines().zip(page.lines()).find(|(a, b)| a != b);
    assert!(
        kept == page,
        "docs/cli.md is not what the command says ({differs:?}): `{UPDATE}=1 cargo test -p anymesh-cli book` writes it"
    );
}

/// The words of a command line as a shell takes them, up to a comment.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (vec![], None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The command lines of `anymesh` in the blocks of shell of a page.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut found = vec![];
    for block in text.split("```sh\n").skip(1) {
        let block = block.split("\n```").next().unwrap_or("");
        for line in block.replace("\\\n", " ").lines() {
            let words = words(line);
            let ends = |w: &String| ["&&", "||", "|", ">", ";"].contains(&w.as_str());
            let each = words
                .split(ends)
                .filter(|c| c.first().is_some_and(|w| w == "anymesh"));
            found.extend(each.map(<[String]>::to_vec));
        }
    }
    found
}

#[test]
fn every_command_in_the_book_and_in_the_readme_is_one() {
    let mut pages = vec![root().join("README.md")];
    for folder in ["docs", "docs/concepts", "docs/tutorial"] {
        let entries = fs::read_dir(root().join(folder)).expect("the folder is there");
        pages.extend(entries.map(|e| e.expect("it can be listed").path()));
    }
    let (mut seen, mut wrong) = (0, vec![]);
    for page in pages
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == "md"))
    {
        for command in commands(&fs::read_to_string(page).expect("it can be read")) {
            seen += 1;
            if let Err(error) = Cli::try_parse_from(&command) {
                wrong.push(format!(
                    "{}: {}\n{error}",
                    page.display(),
                    command.join(" ")
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 30, "only {seen} commands were found");
}

#[test]
fn a_line_is_cut_as_a_shell_cuts_it() {
    assert_eq!(
        words(r#"anymesh rule add --in "f32[8@dp, 4]" --attrs '{"a": "b c"}'  # why"#),
        [
            "anymesh",
            "rule",
            "add",
            "--in",
            "f32[8@dp, 4]",
            "--attrs",
            r#"{"a": "b c"}"#
        ]
    );
    assert_eq!(words("a#b ''"), ["a#b", ""]);
}
