//! What is checked of every picture.

use anymesh_show::{Show, page};
use roxmltree::{Document, Node, ParsingOptions};

/// No picture and no page is larger than this, whatever it shows.
const MOST: usize = 400_000;

/// Inspects the text, the HTML and the SVG of a thing, and gives the SVG.
#[track_caller]
pub(crate) fn check(thing: &impl Show) -> Option<String> {
    let (html, svg) = (thing.html(), thing.svg());
    assert_eq!(
        (&html, &svg),
        (&thing.html(), &thing.svg()),
        "the same bytes twice"
    );
    let page = page("a page", &[thing.figure()]);
    for text in [&html, &page].into_iter().chain(&svg) {
        assert!(text.len() < MOST, "{} bytes", text.len());
        well_formed(text);
    }
    if let Some(svg) = &svg {
        drawn(svg);
    }
    assert!(!thing.text().is_empty());
    svg
}

/// Parses XML and looks for what must not be in it.
#[track_caller]
pub(crate) fn well_formed(text: &str) {
    let options = ParsingOptions {
        allow_dtd: true,
        nodes_limit: u32::MAX,
    };
    let document = match Document::parse_with_options(text, options) {
        Ok(document) => document,
        Err(error) => panic!("{error}\n{text}"),
    };
    for node in document.descendants().filter(Node::is_element) {
        let name = node.tag_name().name();
        assert!(
            !["script", "foreignObject", "iframe", "image", "a", "b"].contains(&name),
            "{name}"
        );
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(
                !name.starts_with("on") && name != "style" && name != "href",
                "{name}"
            );
            assert!(
                !value.contains("NaN") || ["title", "aria-label"].contains(&name),
                "{name}={value}"
            );
        }
        if name == "svg" {
            assert_eq!(node.attribute("role"), Some("img"));
            assert!(
                node.attribute("aria-label")
                    .is_some_and(|l| !l.trim().is_empty()),
                "{text}"
            );
        }
    }
}

/// A box: left, top, right, bottom.
type Frame = (f64, f64, f64, f64);

/// Whether everything is inside of the picture, and no texts lie on each other.
#[track_caller]
fn drawn(svg: &str) {
    let document = Document::parse(svg).unwrap();
    let root = document.root_element();
    let size = |name: &str| root.attribute(name).unwrap().parse::<f64>().unwrap();
    let (width, height) = (size("width"), size("height"));
    assert!(width <= 1000.0 && height <= 4000.0, "{width} x {height}");
    let mut texts: Vec<(String, Frame)> = vec![];
    walk(root, (0.0, 0.0), &mut |node, frame| {
        let inside =
            frame.0 >= -1.0 && frame.1 >= -1.0 && frame.2 <= width + 1.0 && frame.3 <= height + 1.0;
        assert!(
            inside,
            "{frame:?} is outside of {width} x {height}: {}",
            name(node)
        );
        if node.has_tag_name("text") || node.tag_name().name() == "text" {
            texts.push((name(node), frame));
        }
    });
    texts.sort_by(|a, b| a.1.1.total_cmp(&b.1.1));
    for (i, (a, frame)) in texts.iter().enumerate() {
        for (b, other) in &texts[i + 1..] {
            if other.1 >= frame.3 {
                break;
            }
            let apart = other.0 >= frame.2 || other.2 <= frame.0;
            assert!(
                apart,
                "'{a}' at {frame:?} lies on '{b}' at {other:?}\n{svg}"
            );
        }
    }
}

fn name(node: Node<'_, '_>) -> String {
    let text: String = node
        .children()
        .filter(|n| n.is_text())
        .filter_map(|n| n.text())
        .collect();
    format!("{} {text}", node.tag_name().name())
}

/// The frames of boxes, lines and texts, with the moves of what is around them.
fn walk<'a, 'i>(node: Node<'a, 'i>, (x, y): (f64, f64), f: &mut impl FnMut(Node<'a, 'i>, Frame)) {
    for child in node.children().filter(Node::is_element) {
        let number = |name: &str| {
            child
                .attribute(name)
                .map_or(0.0, |v| v.parse::<f64>().unwrap())
        };
        let class = child.attribute("class").unwrap_or("");
        match child.tag_name().name() {
            "g" => {
                let moved = child.attribute("transform").unwrap();
                let inner = moved.trim_start_matches("translate(").trim_end_matches(')');
                let (dx, dy) = inner.split_once(' ').unwrap();
                walk(
                    child,
                    (
                        x + dx.parse::<f64>().unwrap(),
                        y + dy.parse::<f64>().unwrap(),
                    ),
                    f,
                );
            }
            "rect" => {
                let (left, top) = (x + number("x"), y + number("y"));
                f(
                    child,
                    (left, top, left + number("width"), top + number("height")),
                );
            }
            "line" => {
                let (x1, x2) = (number("x1"), number("x2"));
                let (y1, y2) = (number("y1"), number("y2"));
                f(
                    child,
                    (
                        x + x1.min(x2),
                        y + y1.min(y2),
                        x + x1.max(x2),
                        y + y1.max(y2),
                    ),
                );
            }
            "text" => {
                let size = match class {
                    c if c.contains("head") => 14.0,
                    c if c.contains("soft") => 11.0,
                    c if c.contains("tiny") => 9.5,
                    _ => 12.0,
                };
                let letters: f64 = (child.children().filter(|n| n.is_text()))
                    .flat_map(|n| n.text().unwrap_or("").chars())
                    .map(|c| match c {
                        c if c.is_ascii() || "…–·".contains(c) => 1.0,
                        // Marks on other letters: a browser gives them no room of their own.
                        '\u{300}'..='\u{36f}' => 0.0,
                        c if c < '\u{2e80}' => 1.2,
                        _ => 1.9,
                    })
                    .sum();
                // As wide as letters are on average.
                let width = letters * size * if class.contains("mono") { 0.6 } else { 0.5 };
                let left = match class {
                    c if c.contains("mid") => x + number("x") - width / 2.0,
                    c if c.contains("end") => x + number("x") - width,
                    _ => x + number("x"),
                };
                let base = y + number("y");
                f(child, (left, base - size * 0.7, left + width, base + 1.0));
            }
            _ => {}
        }
    }
}
