//! Values as a table or as a map of colours, with the cuts of the tensor.

use super::{
    color::{ABOVE, BELOW, NAN, Scale},
    map::{Map, Mark, colors},
    read::Sample,
};
use crate::{
    Parts, Picture,
    grid::digits,
    style,
    svg::{fitted, line, pixels, rect, text},
    value,
};
use anymesh_core::Scalar;

/// Rows and columns that are shown as values.
const TABLE: (usize, usize) = (16, 12);
/// Matrices beside each other take at most this.
const WIDTH: f64 = 700.0;

/// One matrix of a sample.
pub(super) struct Matrix<'s> {
    pub(super) sample: &'s Sample,
    /// Where it begins.
    offset: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The place of its first element in the tensor.
    pub(super) at: Vec<usize>,
    parts: &'s Parts,
}

impl Matrix<'_> {
    pub(super) fn value(&self, row: usize, column: usize) -> Option<Scalar> {
        self.sample.values[self.offset + row * self.columns + column]
    }

    /// The place of an element in the tensor.
    pub(super) fn place(&self, row: usize, column: usize) -> Vec<usize> {
        let (mut at, n) = (self.at.clone(), self.at.len());
        if n > 1 {
            at[n - 2] = row * self.sample.chosen[n - 2].1;
        }
        if n > 0 {
            at[n - 1] = column * self.sample.chosen[n - 1].1;
        }
        at
    }

    /// The number of the part that holds an element, along each dimension.
    fn part(&self, row: usize, column: usize) -> Vec<usize> {
        let place = self.place(row, column);
        (0..place.len())
            .map(|d| self.parts.part_at(d, place[d]))
            .collect()
    }

    /// Where rows are cut, as parts of its height, and columns.
    pub(super) fn cuts(&self, rows: bool) -> Vec<f64> {
        let n = self.at.len();
        let dim = match (rows, n) {
            (true, 2..) => n - 2,
            (false, 1..) => n - 1,
            _ => return vec![],
        };
        let (parts, size) = (self.parts.parts_of(dim), self.sample.dims[dim]);
        // Lines that nobody can tell apart are not drawn.
        if parts > 128 {
            return vec![];
        }
        let mut bounds: Vec<usize> = (1..parts).map(|p| self.parts.range(dim, p).start).collect();
        bounds.dedup();
        bounds.retain(|b| *b > 0 && *b < size);
        bounds.iter().map(|b| *b as f64 / size as f64).collect()
    }

    /// `[1, 0, :, :]`.
    fn name(&self) -> String {
        let outer = self.at.len().saturating_sub(2);
        let mut places: Vec<String> = self.at[..outer].iter().map(usize::to_string).collect();
        places.extend(self.at[outer..].iter().map(|_| ":".to_string()));
        format!("[{}]", places.join(", "))
    }
}

/// All matrices of a sample, what the colours mean, and who holds which part.
pub(super) fn picture(
    label: &str,
    sample: &Sample,
    parts: &Parts,
    legend: Option<&Parts>,
) -> Picture {
    let (count, rows, columns) = sample.matrices();
    let whole = sample.chosen[sample.chosen.len().saturating_sub(2)..]
        .iter()
        .all(|c| c.1 == 1);
    let outer: Vec<usize> = sample.chosen[..sample.dims.len().saturating_sub(2)]
        .iter()
        .map(|c| c.0)
        .collect();
    let matrices: Vec<Matrix<'_>> = (0..count)
        .map(|i| {
            let mut at = digits(i, &outer);
            at.resize(sample.dims.len(), 0);
            Matrix {
                sample,
                offset: i * rows * columns,
                rows,
                columns,
                at,
                parts,
            }
        })
        .collect();
    let mut picture = Picture::new(label, 0.0, 0.0);
    let cell = match whole && rows <= TABLE.0 && columns <= TABLE.1 {
        true => cell(sample, columns),
        false => None,
    };
    let maps: Vec<Map> = match cell {
        Some(_) => vec![],
        None => matrices.iter().map(Map::of).collect(),
    };
    let scale = Scale::of(
        maps.iter()
            .flat_map(|m| m.cells.iter().filter_map(Mark::number)),
    );
    let (mut x, mut y, mut tallest) = (0.0, 0.0, 0.0f64);
    for (i, matrix) in matrices.iter().enumerate() {
        let mut drawn = match (cell, maps.get(i)) {
            (Some(cell), _) => table(matrix, cell, legend.is_some()),
            (None, Some(map)) => map.draw(matrix, &scale, count > 1),
            (None, None) => continue,
        };
        if count > 1 {
            let mut named = Picture::new("", drawn.width, drawn.height + 16.0);
            named.draw(text("soft mono", 0.0, 11.0, &matrix.name()));
            named.place(0.0, 16.0, drawn);
            drawn = named;
        }
        if x > 0.0 && x + drawn.width > WIDTH {
            (x, y) = (0.0, y + tallest + 12.0);
            tallest = 0.0;
        }
        let (width, height) = (drawn.width, drawn.height);
        picture.place(x, y, drawn);
        x += width + 16.0;
        tallest = tallest.max(height);
    }
    if cell.is_none() {
        let below = picture.height + 8.0;
        picture.place(0.0, below, colors(&scale, &maps));
    }
    if let Some(parts) = legend {
        let held = parts.picture((64.0, 26.0));
        let (x, y) = match picture.width + 24.0 + held.width <= 760.0 {
            true => (picture.width + 24.0, 0.0),
            false => (0.0, picture.height + 10.0),
        };
        picture.place(x, y, held);
    }
    picture
}

fn written(value: Option<Scalar>) -> String {
    match value {
        None => "·".into(),
        Some(Scalar::Bool(b)) => b.to_string(),
        Some(Scalar::Int(i)) => i.to_string(),
        Some(Scalar::Float(x)) => value_text(x),
    }
}

fn value_text(x: f64) -> String {
    match x {
        x if x == f64::INFINITY => "inf".into(),
        x => value(x),
    }
}

/// The width of the cells of a table and the class of their texts; nothing where a table would be
/// too wide.
fn cell(sample: &Sample, columns: usize) -> Option<(f64, &'static str)> {
    ["mono end", "tiny mono end"].into_iter().find_map(|class| {
        let texts = sample.values.iter().map(|v| pixels(class, &written(*v)));
        let width = texts.fold(14.0, f64::max) + 12.0;
        (width * columns as f64 <= WIDTH).then_some((width, class))
    })
}

/// Every value in a cell, in the colour of who holds it.
fn table(matrix: &Matrix<'_>, (width, class): (f64, &str), held: bool) -> Picture {
    const HEIGHT: f64 = 24.0;
    let texts: Vec<Vec<String>> = (0..matrix.rows)
        .map(|r| {
            (0..matrix.columns)
                .map(|c| written(matrix.value(r, c)))
                .collect()
        })
        .collect();
    let (left, top) = (24.0, 14.0);
    let (w, h) = (matrix.columns as f64 * width, matrix.rows as f64 * HEIGHT);
    let mut picture = Picture::new("", left + w + 3.0, top + h + 3.0);
    for c in 0..matrix.columns {
        let x = left + (c as f64 + 0.5) * width;
        if !matrix.at.is_empty() {
            picture.draw(text("tiny mid", x, top - 4.0, &c.to_string()));
        }
    }
    for (r, row) in texts.iter().enumerate() {
        let y = top + r as f64 * HEIGHT;
        if matrix.at.len() > 1 {
            picture.draw(text("tiny end", left - 5.0, y + 15.5, &r.to_string()));
        }
        for (c, words) in row.iter().enumerate() {
            let x = left + c as f64 * width;
            let holder = match held {
                true => format!(
                    "fill {}",
                    style::color(matrix.parts.color_of(&matrix.part(r, c)))
                ),
                false => "grid".into(),
            };
            picture.draw(rect(&holder, x + 0.5, y + 0.5, width - 1.0, HEIGHT - 1.0));
            let strange = match matrix.value(r, c) {
                Some(Scalar::Float(x)) if x.is_nan() => Some(NAN),
                Some(Scalar::Float(x)) if x == f64::INFINITY => Some(ABOVE),
                Some(Scalar::Float(x)) if x == f64::NEG_INFINITY => Some(BELOW),
                _ => None,
            };
            if let Some(color) = strange {
                let mark = rect("", x + 3.0, y + HEIGHT - 5.0, width - 6.0, 3.0);
                picture.draw(mark.set("fill", color));
            }
            let label = fitted(class, x + width - 6.0, y + 16.0, width - 6.0, words);
            picture.draw(label);
        }
    }
    for at in matrix.cuts(true) {
        let y = top + at * h;
        picture.draw(line("cut", (left, y), (left + w, y)));
    }
    for at in matrix.cuts(false) {
        let x = left + at * w;
        picture.draw(line("cut", (x, top), (x, top + h)));
    }
    picture
}
