//! Values as a table or as a map of colours, with the cuts of the tensor.

use super::{
    color::{ABOVE, BELOW, LEVELS, NAN, Scale},
    read::Sample,
};
use crate::{
    Parts, Picture,
    grid::digits,
    number::coordinate,
    style,
    svg::{fitted, line, pixels, rect, text},
    value,
    xml::tag,
};
use anymesh_core::Scalar;

/// Rows and columns that are shown as values.
const TABLE: (usize, usize) = (16, 12);
/// Rows and columns of a map.
const CELLS: (usize, usize) = (64, 96);
/// Cells of which each has its value where a pointer rests.
const TIPS: usize = 600;
/// Matrices beside each other take at most this.
const WIDTH: f64 = 700.0;

/// One matrix of a sample.
struct Matrix<'s> {
    sample: &'s Sample,
    /// Where it begins.
    offset: usize,
    rows: usize,
    columns: usize,
    /// The place of its first element in the tensor.
    at: Vec<usize>,
    parts: &'s Parts,
}

impl Matrix<'_> {
    fn value(&self, row: usize, column: usize) -> Option<Scalar> {
        self.sample.values[self.offset + row * self.columns + column]
    }

    /// The place of an element in the tensor.
    fn place(&self, row: usize, column: usize) -> Vec<usize> {
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
    fn cuts(&self, rows: bool) -> Vec<f64> {
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

/// What a cell of a map is.
#[derive(Clone, Copy)]
enum Mark {
    Number(f64),
    Nan,
    Above,
    Below,
    Missing,
}

impl Mark {
    fn number(&self) -> Option<f64> {
        match self {
            Mark::Number(x) => Some(*x),
            _ => None,
        }
    }

    fn color(&self, scale: &Scale) -> Option<String> {
        match self {
            Mark::Number(x) => Some(scale.color(scale.level(*x))),
            Mark::Nan => Some(NAN.into()),
            Mark::Above => Some(ABOVE.into()),
            Mark::Below => Some(BELOW.into()),
            Mark::Missing => None,
        }
    }
}

/// A matrix with few enough cells to draw, each the mean of a block of values.
struct Map {
    rows: usize,
    columns: usize,
    cells: Vec<Mark>,
}

impl Map {
    fn of(matrix: &Matrix<'_>) -> Self {
        let (rows, columns) = (matrix.rows.min(CELLS.0), matrix.columns.min(CELLS.1));
        let block = |i: usize, n: usize, of: usize| i * n / of..(i + 1) * n / of;
        let mut cells = Vec::with_capacity(rows * columns);
        for r in 0..rows {
            for c in 0..columns {
                let (mut sum, mut count, mut mark) = (0.0, 0usize, Mark::Missing);
                for row in block(r, matrix.rows, rows) {
                    for column in block(c, matrix.columns, columns) {
                        let Some(value) = matrix.value(row, column) else {
                            continue;
                        };
                        mark = match (value.to_f64(), mark) {
                            (_, Mark::Nan) => Mark::Nan,
                            (x, _) if x.is_nan() => Mark::Nan,
                            (_, Mark::Above | Mark::Below) => mark,
                            (f64::INFINITY, _) => Mark::Above,
                            (f64::NEG_INFINITY, _) => Mark::Below,
                            (x, _) => {
                                count += 1;
                                sum += (x - sum) / count as f64;
                                Mark::Number(sum)
                            }
                        };
                    }
                }
                cells.push(mark);
            }
        }
        Self {
            rows,
            columns,
            cells,
        }
    }

    fn draw(&self, matrix: &Matrix<'_>, scale: &Scale, many: bool) -> Picture {
        let (most_w, most_h) = if many { (212.0, 140.0) } else { (440.0, 290.0) };
        let (rows, columns) = (self.rows as f64, self.columns as f64);
        let side = (most_w / columns).min(most_h / rows);
        // Thin shapes get cells that are not square rather than too small to see.
        let cw = side
            .clamp((60.0 / columns).min(24.0), 24.0)
            .min(most_w / columns);
        let ch = side.clamp((28.0 / rows).min(24.0), 24.0).min(most_h / rows);
        let (w, h) = (cw * columns, ch * rows);
        // A map by itself has the numbers of its first and last rows and columns at its sides.
        let rank = matrix.at.len();
        let side = |dim: usize| matrix.sample.dims[dim].saturating_sub(1).to_string();
        let mut picture = Picture::new("", w + 4.0, h + 4.0);
        let missing = self.cells.iter().any(|m| matches!(m, Mark::Missing));
        if missing {
            picture.draw(rect("none", 2.0, 2.0, w, h));
        }
        match self.cells.len() <= TIPS {
            true => self.with_tips(&mut picture, matrix, scale, (cw, ch)),
            false => self.by_color(&mut picture, scale, (cw, ch)),
        }
        picture.draw(rect("axis", 2.0, 2.0, w, h));
        if !many && rank > 0 {
            let last = side(rank - 1);
            picture.draw(text("tiny", 2.0, h + 13.0, "0"));
            if w > pixels("tiny", &last) + 12.0 {
                picture.draw(text("tiny end", w + 2.0, h + 13.0, &last));
            }
            picture.height += 12.0;
        }
        if !many && rank > 1 {
            let last = side(rank - 2);
            picture.draw(text("tiny", w + 7.0, 10.0, "0"));
            if h > 24.0 {
                picture.draw(text("tiny", w + 7.0, h + 2.0, &last));
            }
            picture.width += 5.0 + pixels("tiny", &last);
        }
        for class in ["halo", "over"] {
            for at in matrix.cuts(true) {
                let y = 2.0 + at * h;
                picture.draw(line(class, (2.0, y), (2.0 + w, y)));
            }
            for at in matrix.cuts(false) {
                let x = 2.0 + at * w;
                picture.draw(line(class, (x, 2.0), (x, 2.0 + h)));
            }
        }
        picture
    }

    /// Each cell by itself, with its place and its value.
    fn with_tips(
        &self,
        picture: &mut Picture,
        matrix: &Matrix<'_>,
        scale: &Scale,
        (cw, ch): (f64, f64),
    ) {
        for (i, mark) in self.cells.iter().enumerate() {
            let (r, c) = (i / self.columns, i % self.columns);
            let Some(color) = mark.color(scale) else {
                continue;
            };
            // A cell reaches under its neighbour, so that no seam shows.
            let cell = tag("rect")
                .set("x", 2.0 + c as f64 * cw)
                .set("y", 2.0 + r as f64 * ch)
                .set("width", cw + 0.4)
                .set("height", ch + 0.4)
                .set("fill", color);
            let place = matrix.place(
                r * matrix.rows / self.rows,
                c * matrix.columns / self.columns,
            );
            let what = match mark {
                Mark::Number(x) => value(*x),
                Mark::Nan => "NaN".into(),
                Mark::Above => "inf".into(),
                Mark::Below => "-inf".into(),
                Mark::Missing => continue,
            };
            picture.draw(cell.tip(format!("{place:?}: {what}")));
        }
    }

    /// One path for each colour: a map of thousands of cells stays small.
    fn by_color(&self, picture: &mut Picture, scale: &Scale, (cw, ch): (f64, f64)) {
        let level = |mark: &Mark| match mark {
            Mark::Number(x) => Some(scale.level(*x)),
            Mark::Nan => Some(LEVELS),
            Mark::Above => Some(LEVELS + 1),
            Mark::Below => Some(LEVELS + 2),
            Mark::Missing => None,
        };
        let mut paths = vec![String::new(); LEVELS + 3];
        for r in 0..self.rows {
            let row = &self.cells[r * self.columns..(r + 1) * self.columns];
            let mut c = 0;
            while c < row.len() {
                let this = level(&row[c]);
                let end = (c..row.len())
                    .find(|i| level(&row[*i]) != this)
                    .unwrap_or(row.len());
                if let Some(this) = this {
                    let (x, y) = (2.0 + c as f64 * cw, 2.0 + r as f64 * ch);
                    let width = coordinate((end - c) as f64 * cw + 0.4);
                    paths[this].push_str(&format!(
                        "M{} {}h{width}v{}h-{width}z",
                        coordinate(x),
                        coordinate(y),
                        coordinate(ch + 0.4)
                    ));
                }
                c = end;
            }
        }
        for (i, path) in paths.into_iter().enumerate() {
            if path.is_empty() {
                continue;
            }
            let color = match i {
                LEVELS => NAN.to_string(),
                i if i == LEVELS + 1 => ABOVE.into(),
                i if i == LEVELS + 2 => BELOW.into(),
                i => scale.color(i),
            };
            picture.draw(tag("path").set("d", path).set("fill", color));
        }
    }
}

/// The scale of colours, and what is outside of it.
fn colors(scale: &Scale, maps: &[Map]) -> Picture {
    const STEPS: usize = 48;
    let (low, high) = (value(scale.low), value(scale.high));
    let left = pixels("soft", &low) + 6.0;
    let mut picture = Picture::new("", 0.0, 18.0);
    picture.draw(text("soft end", left - 4.0, 12.5, &low));
    let width = 168.0 / STEPS as f64;
    for i in 0..STEPS {
        let color = scale.color(i * (LEVELS - 1) / (STEPS - 1));
        let step = rect("", left + i as f64 * width, 2.0, width + 0.4, 13.0);
        picture.draw(step.set("fill", color));
    }
    let mut x = left + 168.0 + 5.0;
    picture.draw(text("soft", x, 12.5, &high));
    x += pixels("soft", &high) + 16.0;
    let has = |f: fn(&Mark) -> bool| maps.iter().any(|m| m.cells.iter().any(f));
    let others = [
        (has(|m| matches!(m, Mark::Nan)), NAN, "NaN"),
        (has(|m| matches!(m, Mark::Above)), ABOVE, "inf"),
        (has(|m| matches!(m, Mark::Below)), BELOW, "-inf"),
    ];
    for (there, color, name) in others {
        if there {
            picture.draw(rect("", x, 2.0, 13.0, 13.0).set("fill", color));
            picture.draw(text("soft", x + 17.0, 12.5, name));
            x += 17.0 + pixels("soft", name) + 14.0;
        }
    }
    picture.width = x;
    picture
}

/// How many values a cell of a map is the mean of: rows and columns, where these are more than one.
pub(super) fn averaged(sample: &Sample) -> Option<(usize, usize)> {
    let (_, rows, columns) = sample.matrices();
    let per = (rows.div_ceil(CELLS.0), columns.div_ceil(CELLS.1));
    (per != (1, 1)).then_some(per)
}
