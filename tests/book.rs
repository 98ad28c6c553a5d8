//! The book in `docs/`: every page is in its table of contents and among the doctests, every link
//! leads somewhere, and what pages show of files is what the files have.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The pages, by their paths in `docs/`, but for the table of contents.
fn pages() -> BTreeSet<String> {
    fn walk(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("it can be listed").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "md") {
                let name = path.strip_prefix(docs()).expect("it is below");
                found.insert(name.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(&docs(), &mut found);
    found.remove("SUMMARY.md");
    found
}

/// The text without blocks of code and without `code`, in which brackets are no links.
fn prose(text: &str) -> String {
    let (mut out, mut block) = (String::new(), false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            block = !block;
        } else if !block {
            let parts = line.split('`').enumerate();
            // A word stands for code, so that headings keep their anchors and links their texts.
            out.extend(parts.map(|(i, part)| if i % 2 == 0 { part } else { "code" }));
        }
        out.push('\n');
    }
    out
}

/// Where the links and pictures of a page lead.
fn links(text: &str) -> Vec<String> {
    let text = prose(text);
    let starts = text.match_indices("](");
    starts
        .filter_map(|(at, _)| text[at + 2..].split_once(')'))
        .map(|(link, _)| link.to_string())
        .collect()
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut block = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        block ^= line.starts_with("```");
        if let (false, Some(heading)) = (block, line.strip_prefix('#')) {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = heading
                .chars()
                .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            found.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
        }
    }
    found
}

#[test]
fn every_page_is_in_the_table_of_contents_and_runs_as_a_doctest() {
    let listed: BTreeSet<String> = links(&read(docs().join("SUMMARY.md")))
        .into_iter()
        .collect();
    assert_eq!(
        listed,
        pages(),
        "docs/SUMMARY.md against the pages in docs/"
    );
    let tested = read(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/book.rs"));
    for page in pages() {
        assert!(
            tested.contains(&format!("\"{page}\"")),
            "docs/{page} is not in src/book.rs, so nobody compiles its code"
        );
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut wrong = vec![];
    for page in pages() {
        let path = docs().join(&page);
        let text = read(&path);
        for link in links(&text) {
            if link.starts_with("https://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => path.clone(),
                file => path.parent().expect("a folder").join(file),
            };
            let inside = target
                .canonicalize()
                .is_ok_and(|t| docs().canonicalize().is_ok_and(|docs| t.starts_with(docs)));
            if !inside {
                wrong.push(format!("docs/{page}: {link} is not a file of the book"));
            } else if !anchor.is_empty() && !anchors(&read(&target)).contains(anchor) {
                wrong.push(format!("docs/{page}: {link} has no such heading"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_tutorial_shows_the_program_that_its_pages_run() {
    let program = read(docs().join("tutorial/model.rs"));
    let page = read(docs().join("tutorial/3-mesh.md"));
    assert!(
        page.contains(&program),
        "docs/tutorial/3-mesh.md must have docs/tutorial/model.rs as it is"
    );
}

#[test]
fn rust_that_is_compiled_only_says_why() {
    for page in pages() {
        let text = read(docs().join(&page));
        for (at, _) in text.match_indices("```rust,no_run") {
            let before = text[..at].trim_end().lines().last().unwrap_or("");
            assert!(
                before.contains("not run"),
                "docs/{page}: say above the block why it is not run, not {before:?}"
            );
        }
        assert!(
            !text.contains("```rust,ignore") && !text.contains("```ignore"),
            "docs/{page}"
        );
    }
}

/// The pictures that the library draws for the pages, by their names in `docs/pictures/`.
#[cfg(all(feature = "show", feature = "cpu"))]
fn drawn() -> anymesh::Result<Vec<(&'static str, Option<String>)>> {
    use anymesh::prelude::*;
    let mesh = Mesh::new("dp=2, tp=4", &device("cpu")?)?;
    let x = Tensor::normal(
        [64, 32],
        0.0,
        1.0,
        DType::F32,
        (&mesh, "[@dp, _]"),
        Rng::new(1),
    )?;
    let up = Tensor::normal(
        [128, 32],
        0.0,
        0.1,
        DType::F32,
        (&mesh, "[@tp, _]"),
        Rng::new(2),
    )?;
    let down = Tensor::normal(
        [32, 128],
        0.0,
        0.1,
        DType::F32,
        (&mesh, "[_, @tp]"),
        Rng::new(3),
    )?;
    let (up, down) = (up.require_grad()?, down.require_grad()?);
    let (grads, step) = Ledger::record(|| {
        let h = x.rms_norm(&NormOptions::new())?.linear(&up, None)?.silu()?;
        let grads = (&x + h.linear(&down, None))?
            .square()?
            .mean_all()?
            .backward()?;
        Ok::<_, Error>((grads.of(&up)?, grads.of(&down)?))
    });
    grads?;
    let cut = Tensor::arange(0, 128, 1, DType::F32, &mesh)?.reshape([8, 16])?;
    Ok(vec![
        ("mesh.svg", mesh.svg()),
        ("tensor.svg", cut.reshard("[@dp, @tp]")?.svg()),
        ("ledger.svg", step.svg()),
    ])
}

#[cfg(all(feature = "show", feature = "cpu"))]
#[test]
fn pictures_are_what_the_library_draws() {
    for (name, picture) in drawn().expect("everything can be drawn") {
        let path = docs().join("pictures").join(name);
        let picture = picture.expect("it has a picture");
        if std::env::var_os("ANYMESH_UPDATE_DOCS").is_some() {
            fs::write(&path, &picture).expect("docs/pictures can be written");
        }
        assert!(
            fs::read_to_string(&path).unwrap_or_default() == picture,
            "docs/pictures/{name} is not what the library draws: ANYMESH_UPDATE_DOCS=1 keeps what it draws now"
        );
    }
}
