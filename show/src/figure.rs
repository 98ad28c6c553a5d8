//! What a thing shows: a title, pictures, tables and notes, as data. Everything that shows itself
//! makes one of these, and HTML, SVG and text are made from it here.

use crate::{
    Picture, Show, Table,
    number::{cut, grouped},
    style::STYLE,
    svg::{moved, pixels, text, wrapped},
    xml::{Element, tag, visible},
};

/// Letters of a title that are shown.
const TITLE: f64 = 110.0;
/// Letters of a note that are shown.
const NOTE: f64 = 1200.0;
/// Space around a picture in a file of its own.
const MARGIN: f64 = 12.0;

/// A title and what is below it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figure {
    /// One line.
    pub title: String,
    /// In order.
    pub blocks: Vec<Block>,
}

/// A part of a figure.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// Shapes.
    Picture(Picture),
    /// Rows and columns.
    Table(Table),
    /// Some sentences.
    Note(String),
}

impl Figure {
    /// A figure with nothing below its title.
    pub fn new(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            blocks: vec![],
        }
    }

    /// With a picture.
    pub fn picture(mut self, picture: Picture) -> Self {
        self.blocks.push(Block::Picture(picture));
        self
    }

    /// With a table.
    pub fn table(mut self, table: Table) -> Self {
        self.blocks.push(Block::Table(table));
        self
    }

    /// With a note.
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.blocks.push(Block::Note(note.into()));
        self
    }

    /// With what another figure has, under its title.
    pub fn append(mut self, other: Figure) -> Self {
        if !other.title.is_empty() {
            self.blocks.push(Block::Note(other.title));
        }
        self.blocks.extend(other.blocks);
        self
    }

    fn element(&self) -> Element {
        let mut figure = tag("figure").set("class", "anymesh");
        if !self.title.is_empty() {
            figure = figure.with(tag("figcaption").text(cut(&self.title, TITLE)));
        }
        for block in &self.blocks {
            figure = match block {
                Block::Picture(picture) => {
                    figure.with(tag("div").set("class", "wide").with(picture.element()))
                }
                Block::Table(table) => {
                    let figure = figure.with(table.element());
                    match table.left_out() {
                        0 => figure,
                        n => figure.with(note(&format!("… and {} more", grouped(n as u64)))),
                    }
                }
                Block::Note(words) => figure.with(note(&cut(words, NOTE))),
            };
        }
        figure
    }

    /// As HTML to put into a page: well-formed XML too, with the style sheet, without scripts.
    pub fn html(&self) -> String {
        let style = tag("style").style(STYLE).to_string();
        format!("<div>\n{style}\n{}\n</div>\n", self.element())
    }

    /// As an SVG file: the title, the pictures below each other, and the notes. Tables are left to
    /// [`html`](Self::html). Nothing where there is no picture.
    pub fn svg(&self) -> Option<String> {
        let pictures = || {
            self.blocks.iter().filter_map(|block| match block {
                Block::Picture(picture) => Some(picture),
                _ => None,
            })
        };
        let width = pictures().map(|p| p.width).reduce(f64::max)?;
        let title = cut(&self.title, TITLE);
        let label = match (title.is_empty(), pictures().next()) {
            (true, Some(first)) => cut(&first.label, TITLE),
            _ => title.clone(),
        };
        // Notes are lines that one can read, however narrow the pictures.
        let inner = width.max(pixels("head", &title).min(640.0)).max(440.0);
        let mut whole = Picture::new(label, inner + 2.0 * MARGIN, 0.0);
        let mut y = MARGIN;
        for words in wrapped("head", inner, &title) {
            y += 14.0;
            whole.draw(text("head", MARGIN, y, &words));
            y += 5.0;
        }
        y += 5.0;
        for block in &self.blocks {
            match block {
                Block::Picture(picture) => {
                    whole.draw(moved(MARGIN, y, picture.shapes.clone()));
                    y += picture.height + 10.0;
                }
                Block::Note(words) => {
                    for words in wrapped("soft", inner, &cut(words, NOTE)) {
                        y += 11.0;
                        whole.draw(text("soft", MARGIN, y, &words));
                        y += 4.0;
                    }
                }
                Block::Table(_) => {}
            }
        }
        whole.height = y + MARGIN;
        Some(whole.file())
    }

    /// The title, the tables and the notes, for terminals.
    pub fn text(&self) -> String {
        let clean = |text: &str| text.chars().map(visible).collect::<String>();
        let mut lines = vec![];
        if !self.title.is_empty() {
            lines.push(clean(&self.title));
        }
        for block in &self.blocks {
            match block {
                Block::Table(table) => lines.extend(table.lines()),
                Block::Note(words) => lines.push(clean(words)),
                Block::Picture(_) => {}
            }
        }
        lines.join("\n")
    }
}

fn note(words: &str) -> Element {
    tag("p").set("class", "note").text(words)
}

impl Show for Figure {
    fn figure(&self) -> Figure {
        self.clone()
    }
}

/// Figures as a file that a browser opens: light or dark as the system prefers, no scripts, nothing
/// from elsewhere.
///
/// ```
/// use anymesh_show::{Show, Table, page};
/// let html = page("two tables", &[Table::new("a", &["x"]).figure(), Table::new("b", &["y"]).figure()]);
/// assert!(html.starts_with("<!DOCTYPE html>\n<html") && html.contains("<title>two tables</title>"));
/// ```
pub fn page(title: &str, figures: &[Figure]) -> String {
    let head = tag("head")
        .with(tag("meta").set("charset", "utf-8"))
        .with(
            tag("meta")
                .set("name", "viewport")
                .set("content", "width=device-width, initial-scale=1"),
        )
        .with(tag("title").text(cut(title, TITLE)))
        .with(tag("style").style(STYLE));
    let body = tag("body")
        .set("class", "anymesh")
        .with(tag("main").with_all(figures.iter().map(Figure::element)));
    let html = tag("html")
        .set("xmlns", "http://www.w3.org/1999/xhtml")
        .set("lang", "en")
        .with(head)
        .with(body);
    format!("<!DOCTYPE html>\n{html}\n")
}
