//! Shapes, and pictures made of them.

use crate::{
    number::{coordinate, cut, width},
    style::STYLE,
    xml::{Element, tag, visible},
};

/// The width of a letter where all are equally wide, as a part of the size of the font.
const MONO: f64 = 0.605;

/// Shapes in a box of so many pixels.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// What it shows, for readers who do not see it.
    pub label: String,
    /// In pixels.
    pub width: f64,
    /// In pixels.
    pub height: f64,
    /// In the order in which they are drawn.
    pub shapes: Vec<Element>,
}

impl Picture {
    /// A picture without shapes.
    pub fn new(label: impl Into<String>, width: f64, height: f64) -> Self {
        Self {
            label: label.into(),
            width,
            height,
            shapes: vec![],
        }
    }

    /// Draws a shape over those that there are.
    pub fn draw(&mut self, shape: Element) {
        self.shapes.push(shape);
    }

    /// Draws another picture at a place, and grows where it does not fit.
    pub fn place(&mut self, x: f64, y: f64, other: Picture) {
        self.width = self.width.max(x + other.width);
        self.height = self.height.max(y + other.height);
        self.draw(moved(x, y, other.shapes));
    }

    /// As an `svg` element for a page that has the [style sheet](STYLE).
    pub fn element(&self) -> Element {
        self.root().with_all(self.shapes.iter().cloned())
    }

    /// As a file of its own.
    pub fn file(&self) -> String {
        let root = self.root().with(tag("style").style(STYLE));
        let mut text = root.with_all(self.shapes.iter().cloned()).to_string();
        text.push('\n');
        text
    }

    fn root(&self) -> Element {
        let (w, h) = (self.width.ceil(), self.height.ceil());
        let named = self.label.chars().any(|c| !visible(c).is_whitespace());
        let label = if named { &*self.label } else { "picture" };
        let view = format!("0 0 {} {}", coordinate(w), coordinate(h));
        tag("svg")
            .set("xmlns", "http://www.w3.org/2000/svg")
            .set("class", "anymesh")
            .set("role", "img")
            .set("aria-label", label)
            .set("width", w)
            .set("height", h)
            .set("viewBox", view)
    }
}

/// Shapes at another place.
pub(crate) fn moved(x: f64, y: f64, shapes: Vec<Element>) -> Element {
    let to = format!("translate({} {})", coordinate(x), coordinate(y));
    tag("g").set("transform", to).with_all(shapes)
}

/// A box with a class.
pub(crate) fn rect(class: &str, x: f64, y: f64, width: f64, height: f64) -> Element {
    let shape = match class {
        "" => tag("rect"),
        class => tag("rect").set("class", class),
    };
    shape
        .set("x", x)
        .set("y", y)
        .set("width", width.max(0.0))
        .set("height", height.max(0.0))
}

/// A line with a class.
pub(crate) fn line(class: &str, from: (f64, f64), to: (f64, f64)) -> Element {
    tag("line")
        .set("class", class)
        .set("x1", from.0)
        .set("y1", from.1)
        .set("x2", to.0)
        .set("y2", to.1)
}

/// A text with a class.
pub(crate) fn text(class: &str, x: f64, y: f64, text: &str) -> Element {
    let base = tag("text").set("x", x).set("y", y);
    match class {
        "" => base.text(text),
        class => base.set("class", class).text(text),
    }
}

/// The size of the font that a class has.
fn size(class: &str) -> f64 {
    let mut names = class.split(' ');
    match names.find(|c| ["head", "soft", "tiny"].contains(c)) {
        Some("head") => 14.0,
        Some("soft") => 11.0,
        Some("tiny") => 9.5,
        _ => 12.0,
    }
}

/// How many pixels a text of a class takes at most.
pub(crate) fn pixels(class: &str, text: &str) -> f64 {
    width(text) * size(class) * MONO
}

/// A text with as many letters as have room in so many pixels; where these are not all, the whole
/// is what a pointer finds.
pub(crate) fn fitted(class: &str, x: f64, y: f64, room: f64, whole: &str) -> Element {
    let short = cut(whole, (room / (size(class) * MONO)).max(1.0));
    match short == whole {
        true => text(class, x, y, whole),
        false => text(class, x, y, &short).tip(whole),
    }
}

/// Words in lines of at most so many pixels. A word that is longer is cut.
pub(crate) fn wrapped(class: &str, room: f64, words: &str) -> Vec<String> {
    let letters = (room / (size(class) * MONO)).max(8.0);
    let mut lines: Vec<String> = vec![];
    for word in words.split_whitespace() {
        let word = cut(word, letters);
        match lines.last_mut() {
            Some(line) if width(line) + 1.0 + width(&word) <= letters => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}
