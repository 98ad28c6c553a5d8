//! Tables as plain data: for notebooks as HTML, for terminals as text.

use crate::{
    Figure, Show,
    figure::Block,
    number::{cut, grouped, width},
    xml::{Element, tag, visible},
};

/// Rows that are shown; of more, the others are counted.
const ROWS: usize = 400;
/// Letters of a cell that are shown.
const LETTERS: f64 = 90.0;

/// A table with a title. Whatever has rows can become one:
///
/// ```
/// use anymesh_show::{Show, Table};
/// let mut table = Table::new("GPT-2, small", &["layer", "parameters"]).numbers(&[1]);
/// table.row(["wte", "38,597,376"]);
/// table.row(["h.0.attn.c_attn", "1,771,776"]);
/// assert_eq!(table.text(), "\
/// GPT-2, small
/// layer            parameters
/// wte              38,597,376
/// h.0.attn.c_attn   1,771,776");
/// assert!(table.html().contains("<td class=\"right\">38,597,376</td>"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// What it is about; may be empty.
    pub title: String,
    /// The heads of the columns.
    pub columns: Vec<Column>,
    /// Each with as many cells as there are columns; those that are missing are empty.
    pub rows: Vec<Vec<Cell>>,
}

/// The head of a column.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Column {
    /// Its name, with the unit where it has one.
    pub name: String,
    /// Whether cells end at the right, as numbers do.
    pub right: bool,
    /// Whether cells are types or names, in which all letters are equally wide.
    pub mono: bool,
}

/// A cell: a text, and what a pointer finds there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cell {
    /// What is shown.
    pub text: String,
    /// More of it, or its exact value; may be empty.
    pub tip: String,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self {
            text: text.into(),
            tip: String::new(),
        }
    }
}

impl Cell {
    /// A number of bytes, exact where a pointer rests.
    pub fn bytes(n: u64) -> Self {
        let short = crate::bytes(n as f64);
        Self {
            tip: match n {
                0..=1023 => String::new(),
                n => format!("{} bytes", grouped(n)),
            },
            text: short,
        }
    }
}

impl Table {
    /// A table without rows.
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Self {
        let column = |name: &&str| Column {
            name: (*name).into(),
            ..Column::default()
        };
        Self {
            title: title.into(),
            columns: columns.iter().map(column).collect(),
            rows: vec![],
        }
    }

    /// With numbers in these columns, counted from 0.
    pub fn numbers(mut self, columns: &[usize]) -> Self {
        for (i, column) in self.columns.iter_mut().enumerate() {
            column.right |= columns.contains(&i);
        }
        self
    }

    /// With types or names of code in these columns.
    pub fn code(mut self, columns: &[usize]) -> Self {
        for (i, column) in self.columns.iter_mut().enumerate() {
            column.mono |= columns.contains(&i);
        }
        self
    }

    /// Adds a row.
    pub fn row<C: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// How many rows are left out.
    pub(crate) fn left_out(&self) -> usize {
        self.rows.len().saturating_sub(ROWS)
    }

    /// As an HTML element.
    pub(crate) fn element(&self) -> Element {
        let mut table = tag("table");
        if !self.title.is_empty() {
            table = table.with(tag("caption").text(cut(&self.title, LETTERS)));
        }
        let head = self.columns.iter().map(|c| {
            let cell = tag("th").set("scope", "col");
            let cell = if c.right {
                cell.set("class", "right")
            } else {
                cell
            };
            cell.text(cut(&c.name, LETTERS))
        });
        let rows = self.rows.iter().take(ROWS).map(|row| {
            let cell = |(i, column): (usize, &Column)| {
                let class = match (column.right, column.mono) {
                    (true, true) => "right mono",
                    (true, false) => "right",
                    (false, true) => "mono",
                    (false, false) => "",
                };
                let td = match class {
                    "" => tag("td"),
                    class => tag("td").set("class", class),
                };
                let Some(cell) = row.get(i) else { return td };
                let short = cut(&cell.text, LETTERS);
                let tip = match (cell.tip.is_empty(), short == cell.text) {
                    (false, _) => &cell.tip,
                    (true, false) => &cell.text,
                    (true, true) => return td.text(short),
                };
                td.set("title", &**tip).text(short)
            };
            tag("tr").with_all(self.columns.iter().enumerate().map(cell))
        });
        let table = table
            .with(tag("thead").with(tag("tr").with_all(head)))
            .with(tag("tbody").with_all(rows));
        // Wide tables scroll; a reader with a keyboard can reach them.
        let label = match self.title.is_empty() {
            true => "table".into(),
            false => cut(&self.title, LETTERS),
        };
        tag("div")
            .set("class", "wide")
            .set("role", "region")
            .set("tabindex", "0")
            .set("aria-label", label)
            .with(table)
    }

    /// As lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        let shown = |text: &str| cut(&text.chars().map(visible).collect::<String>(), LETTERS);
        let cell = |row: &Vec<Cell>, i: usize| row.get(i).map_or(String::new(), |c| shown(&c.text));
        let rows = &self.rows[..self.rows.len().min(ROWS)];
        let widths: Vec<usize> = (self.columns.iter().enumerate())
            .map(|(i, column)| {
                let cells = rows.iter().map(|row| width(&cell(row, i)));
                cells.fold(width(&shown(&column.name)), f64::max).ceil() as usize
            })
            .collect();
        let line = |cells: Vec<String>| {
            let mut out = String::new();
            for ((text, column), room) in cells.iter().zip(&self.columns).zip(&widths) {
                let space = " ".repeat(room.saturating_sub(width(text).round() as usize));
                out += &match column.right {
                    true => format!("{space}{text}  "),
                    false => format!("{text}{space}  "),
                };
            }
            out.trim_end().to_string()
        };
        let mut lines = vec![];
        if !self.title.is_empty() {
            lines.push(shown(&self.title));
        }
        lines.push(line(self.columns.iter().map(|c| shown(&c.name)).collect()));
        for row in rows {
            lines.push(line(
                (0..self.columns.len()).map(|i| cell(row, i)).collect(),
            ));
        }
        if self.left_out() > 0 {
            lines.push(format!("… and {} more", grouped(self.left_out() as u64)));
        }
        lines
    }
}

impl Show for Table {
    fn figure(&self) -> Figure {
        let mut figure = Figure::new(self.title.clone());
        figure.blocks.push(Block::Table(Table {
            title: String::new(),
            ..self.clone()
        }));
        figure
    }

    fn text(&self) -> String {
        self.lines().join("\n")
    }
}
