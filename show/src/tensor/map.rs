//! Matrices as maps of colours.

use super::{
    color::{ABOVE, BELOW, LEVELS, NAN, Scale},
    draw::Matrix,
    read::Sample,
};
use crate::{
    Picture,
    number::coordinate,
    svg::{line, moved, pixels, rect, text},
    value,
    xml::{Element, tag},
};

/// Rows and columns of a map.
const CELLS: (usize, usize) = (64, 96);
/// Cells of which each has its value where a pointer rests.
const TIPS: usize = 600;

/// What a cell of a map is.
#[derive(Clone, Copy)]
pub(super) enum Mark {
    Number(f64),
    Nan,
    Above,
    Below,
    Missing,
}

impl Mark {
    pub(super) fn number(&self) -> Option<f64> {
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
pub(super) struct Map {
    rows: usize,
    columns: usize,
    pub(super) cells: Vec<Mark>,
}

impl Map {
    pub(super) fn of(matrix: &Matrix<'_>) -> Self {
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

    pub(super) fn draw(&self, matrix: &Matrix<'_>, scale: &Scale, many: bool) -> Picture {
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
        let cells = match self.cells.len() <= TIPS {
            true => self.with_tips(matrix, scale, (cw, ch)),
            false => self.by_color(scale, (cw, ch)),
        };
        picture.draw(moved(0.0, 0.0, cells).set("class", "map"));
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
    fn with_tips(&self, matrix: &Matrix<'_>, scale: &Scale, (cw, ch): (f64, f64)) -> Vec<Element> {
        let mut cells = vec![];
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
            cells.push(cell.tip(format!("{place:?}: {what}")));
        }
        cells
    }

    /// One path for each colour: a map of thousands of cells stays small.
    fn by_color(&self, scale: &Scale, (cw, ch): (f64, f64)) -> Vec<Element> {
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
        let drawn = |(i, path): (usize, String)| {
            let color = match i {
                LEVELS => NAN.to_string(),
                i if i == LEVELS + 1 => ABOVE.into(),
                i if i == LEVELS + 2 => BELOW.into(),
                i => scale.color(i),
            };
            (!path.is_empty()).then(|| tag("path").set("d", path).set("fill", color))
        };
        paths.into_iter().enumerate().filter_map(drawn).collect()
    }
}

/// The scale of colours, and what is outside of it.
pub(super) fn colors(scale: &Scale, maps: &[Map]) -> Picture {
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
