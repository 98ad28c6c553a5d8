//! Elements as data and the one place where they become text: SVG, HTML and XML read the same
//! bytes.
//!
//! Whatever text comes in, what goes out is well-formed: the five characters that XML gives a
//! meaning are escaped, and characters that XML does not have are replaced.

use crate::number::coordinate;

/// An element with attributes and what is inside of it.
///
/// ```
/// use anymesh_show::xml::tag;
/// let cell = tag("rect").set("x", 1.5).set("class", "grid").with(tag("title").text("a < b"));
/// assert_eq!(cell.to_string(), r#"<rect x="1.5" class="grid"><title>a &lt; b</title></rect>"#);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Element {
    name: &'static str,
    attributes: Vec<(&'static str, String)>,
    inside: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Element(Element),
    Text(String),
    /// A style sheet, which HTML reads without escapes: it has none of the characters that need
    /// them.
    Style(&'static str),
}

/// What an attribute may be.
pub trait Attribute {
    /// As text, before it is escaped.
    fn into_text(self) -> String;
}

impl Attribute for &str {
    fn into_text(self) -> String {
        self.into()
    }
}

impl Attribute for String {
    fn into_text(self) -> String {
        self
    }
}

impl Attribute for f64 {
    fn into_text(self) -> String {
        coordinate(self)
    }
}

impl Attribute for usize {
    fn into_text(self) -> String {
        self.to_string()
    }
}

/// An element without anything.
pub fn tag(name: &'static str) -> Element {
    Element {
        name,
        attributes: vec![],
        inside: vec![],
    }
}

impl Element {
    /// With an attribute.
    pub fn set(mut self, name: &'static str, value: impl Attribute) -> Self {
        self.attributes.push((name, value.into_text()));
        self
    }

    /// With another element inside, after what there is.
    pub fn with(mut self, inside: Element) -> Self {
        self.inside.push(Node::Element(inside));
        self
    }

    /// With several elements inside.
    pub fn with_all(mut self, inside: impl IntoIterator<Item = Element>) -> Self {
        self.inside.extend(inside.into_iter().map(Node::Element));
        self
    }

    /// With text inside.
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.inside.push(Node::Text(text.into()));
        self
    }

    /// With a text that appears where a pointer rests on it.
    pub fn tip(self, text: impl Into<String>) -> Self {
        self.with(tag("title").text(text))
    }

    /// With a style sheet of our own.
    pub(crate) fn style(mut self, sheet: &'static str) -> Self {
        self.inside.push(Node::Style(sheet));
        self
    }

    /// Whether each of its elements gets a line.
    fn is_long(&self) -> bool {
        let long = [
            "svg", "g", "div", "figure", "table", "thead", "tbody", "tr", "html", "head", "body",
            "main",
        ];
        long.contains(&self.name) && !self.inside.iter().any(|n| matches!(n, Node::Text(_)))
    }

    /// Whether it is closed at once where nothing is inside. HTML would take others for open.
    fn closes_itself(&self) -> bool {
        let names = ["rect", "line", "path", "circle", "polyline", "meta"];
        names.contains(&self.name)
    }

    fn write(&self, out: &mut String) {
        out.push('<');
        out.push_str(self.name);
        for (name, value) in &self.attributes {
            out.push(' ');
            out.push_str(name);
            out.push_str("=\"");
            escape(value, out);
            out.push('"');
        }
        if self.inside.is_empty() && self.closes_itself() {
            out.push_str("/>");
            return;
        }
        out.push('>');
        let line = if self.is_long() { "\n" } else { "" };
        if !self.inside.is_empty() {
            out.push_str(line);
        }
        for node in &self.inside {
            match node {
                Node::Element(element) => element.write(out),
                Node::Text(text) => escape(text, out),
                Node::Style(sheet) => out.push_str(sheet),
            }
            out.push_str(line);
        }
        out.push_str("</");
        out.push_str(self.name);
        out.push('>');
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = String::new();
        self.write(&mut out);
        f.write_str(&out)
    }
}

/// Adds text in which nothing has a meaning.
fn escape(text: &str, out: &mut String) {
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(visible(c)),
        }
    }
}

/// The character, or what stands for one that XML does not have or that would turn the text around
/// it: line ends are spaces, the others a mark.
pub(crate) fn visible(c: char) -> char {
    match c {
        '\t' | '\n' | '\r' | '\u{85}' | '\u{2028}' | '\u{2029}' => ' ',
        '\u{0}'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}' => '\u{fffd}',
        // Marks that set the direction of what follows.
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_has_a_meaning() {
        let hostile = "</text><script>alert('x')</script> & \"\u{0}\u{8}\u{202e}\u{ffff}\nend";
        let out = tag("text").set("id", hostile).text(hostile).to_string();
        assert_eq!(out.matches('<').count(), 2, "{out}");
        assert!(!out.contains(['\u{0}', '\u{8}', '\u{202e}', '\u{ffff}', '\n']));
        assert!(out.contains("&lt;script&gt;") && out.contains("&quot;"));
    }

    #[test]
    fn what_is_empty_is_closed_as_html_and_xml_read_it() {
        assert_eq!(tag("td").to_string(), "<td></td>");
        assert_eq!(tag("rect").set("x", 0.0).to_string(), "<rect x=\"0\"/>");
    }
}
