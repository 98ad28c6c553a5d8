//! `--svg` and `--html`: what a command found as a picture or a page.

use crate::request::bad;
use anymesh::{
    Result,
    show::{Block, Figure, page},
};
use clap::Args;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Where pictures go.
#[derive(Args)]
pub(crate) struct PictureArgs {
    /// Also draw it into this SVG file; `-` prints the picture and nothing else.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Also write it into this HTML file; `-` prints the page and nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

impl PictureArgs {
    /// Writes what was asked for. Whether it went to the standard output, to which nothing else may
    /// go then.
    pub(crate) fn write(&self, figures: impl FnOnce() -> Vec<Figure>) -> Result<bool> {
        if self.svg.is_none() && self.html.is_none() {
            return Ok(false);
        }
        let prints = |file: &Option<PathBuf>| file.as_deref() == Some(Path::new("-"));
        if prints(&self.svg) && prints(&self.html) {
            return Err(bad(
                "--svg - and --html - would mix on the standard output: give one of them a file",
            ));
        }
        let figures = figures();
        let title = figures.first().map_or(String::new(), |f| f.title.clone());
        if let Some(file) = &self.svg {
            let svg = one(&figures)
                .svg()
                .ok_or_else(|| bad("there is nothing to draw here: --html has the tables"))?;
            put(file, &svg)?;
        }
        if let Some(file) = &self.html {
            put(file, &page(&title, &figures))?;
        }
        Ok(prints(&self.svg) || prints(&self.html))
    }
}

/// Figures below each other, with their titles.
fn one(figures: &[Figure]) -> Figure {
    let mut all = Figure::default();
    for (i, figure) in figures.iter().enumerate() {
        match i {
            0 => all.title.clone_from(&figure.title),
            _ => all.blocks.push(Block::Note(figure.title.clone())),
        }
        all.blocks.extend(figure.blocks.iter().cloned());
    }
    all
}

fn put(file: &Path, text: &str) -> Result<()> {
    if file == Path::new("-") {
        // A reader that closes early is no error.
        let _ = std::io::stdout().write_all(text.as_bytes());
        return Ok(());
    }
    std::fs::write(file, text).map_err(|e| bad(format!("cannot write {}: {e}", file.display())))
}
