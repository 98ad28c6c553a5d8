//! What cells print and show.

use crate::written::{NOTEBOOKS, cells, text};
use anymesh::show::Show;
use std::{cell::RefCell, collections::BTreeMap, error::Error, sync::Once};

/// How a notebook ends.
pub(crate) type Outcome = Result<(), Box<dyn Error>>;

/// What a cell gave.
#[derive(Clone, Debug, Default, PartialEq)]
struct Given {
    printed: String,
    html: String,
}

thread_local! {
    static NOW: RefCell<(usize, BTreeMap<usize, Given>)> = RefCell::default();
}

/// The cell with this number begins.
pub(crate) fn begin(cell: usize) {
    NOW.with_borrow_mut(|now| now.0 = cell);
}

fn given(change: impl FnOnce(&mut Given)) {
    NOW.with_borrow_mut(|(cell, all)| change(all.entry(*cell).or_default()));
}

/// What `println!` of a cell does.
pub(crate) fn line(text: std::fmt::Arguments<'_>) {
    given(|g| g.printed += &format!("{text}\n"));
}

/// The value at the end of a cell.
pub(crate) fn show(value: &impl Show) {
    given(|g| g.html = value.html());
}

/// Lines of programs differ between a notebook and its program.
fn without_lines(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(".rs:") {
        let path = |c: char| c.is_alphanumeric() || "/._-".contains(c);
        let begin = rest[..at].rfind(|c| !path(c)).map_or(0, |i| i + 1);
        let after = &rest[at + 4..];
        let end = after.find(|c: char| !c.is_ascii_digit() && c != ':').unwrap_or(after.len());
        out += &rest[..begin];
        out += "LINE";
        rest = &after[end..];
    }
    out + rest
}

/// Runs the program of a notebook, and holds what its cells give against what is kept.
pub(crate) fn hold(notebook: usize, run: fn() -> Outcome) {
    static FOLDER: Once = Once::new();
    FOLDER.call_once(|| {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/notebooks");
        std::env::set_current_dir(folder).expect("the folder of the notebooks");
    });
    let name = NOTEBOOKS[notebook].0;
    NOW.take();
    if let Err(error) = run() {
        panic!("{name}, cell {}: {error}", NOW.with_borrow(|now| now.0));
    }
    let (_, mut all) = NOW.take();
    for (number, cell) in cells(name).iter().enumerate() {
        let tags = cell["metadata"]["tags"].as_array().into_iter().flatten();
        if tags.filter(|tag| **tag == "volatile").count() > 0 {
            continue;
        }
        let mut kept = Given::default();
        for output in cell["outputs"].as_array().into_iter().flatten() {
            match output["output_type"].as_str() {
                Some("stream") => kept.printed += &text(&output["text"]),
                _ => kept.html += &text(&output["data"]["text/html"]),
            }
        }
        let here = all.remove(&number).unwrap_or_default();
        let same = |a: &str, b: &str| without_lines(a.trim_end()) == without_lines(b.trim_end());
        assert!(
            same(&kept.printed, &here.printed) && same(&kept.html, &here.html),
            "{name}, cell {}: it is kept that it gives\n{}\n{}\nand now it gives\n{}\n{}",
            number + 1,
            kept.printed,
            kept.html,
            here.printed,
            here.html
        );
    }
}

#[test]
fn lines_of_programs_are_left_out() {
    let text = without_lines("matmul at src/lib.rs:147:56: would; add (tests/x/n.rs:3:4)");
    assert_eq!(text, "matmul at LINE would; add (LINE)");
}
