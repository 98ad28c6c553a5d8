//! Bars beside names, each of one part or of several.

use crate::{
    Figure, Picture, Show, Table,
    number::{bytes, count, cut, seconds, value},
    style::color,
    svg::{fitted, pixels, rect, text},
};

/// Bars that are drawn; what the others come to is one more.
const MOST: usize = 20;
/// Names of parts that a legend has.
const LEGEND: usize = 9;
/// Pixels of the longest bar.
const LENGTH: f64 = 360.0;
/// Pixels that names get at most.
const NAMES: f64 = 190.0;
const ROW: f64 = 22.0;

/// What numbers count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown in KiB, MiB and so on.
    Bytes,
    /// Seconds, shown in ms, µs and so on.
    Seconds,
    /// Anything else.
    #[default]
    Count,
}

impl Unit {
    /// A number with its unit.
    pub fn text(self, n: f64) -> String {
        match self {
            Unit::Bytes => bytes(n),
            Unit::Seconds => seconds(n),
            Unit::Count => value(n),
        }
    }
}

/// Horizontal bars, longest as they come.
///
/// ```
/// use anymesh_show::{Bar, Bars, Show, Unit};
/// let bars = Bars {
///     title: "bytes received".into(),
///     unit: Unit::Bytes,
///     parts: vec!["dp".into(), "tp".into()],
///     totals: true,
///     bars: vec![Bar::new("matmul", [4096.0, 1024.0]), Bar::new("sum", [0.0, 64.0])],
/// };
/// assert!(bars.svg().unwrap().contains("<title>matmul, dp: 4 KiB</title>"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bars {
    /// What they are about, with the unit.
    pub title: String,
    /// What the numbers count.
    pub unit: Unit,
    /// Names of the parts that every bar has; one without a name, or none, for plain bars.
    pub parts: Vec<String>,
    /// Whether it is told what each part comes to in all bars.
    pub totals: bool,
    /// In order.
    pub bars: Vec<Bar>,
}

/// A bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// Its name.
    pub name: String,
    /// The length of each part. What is negative or no number has none.
    pub parts: Vec<f64>,
}

impl Bar {
    /// A bar of these parts.
    pub fn new(name: impl Into<String>, parts: impl IntoIterator<Item = f64>) -> Self {
        Self {
            name: name.into(),
            parts: parts.into_iter().collect(),
        }
    }

    fn sizes(&self) -> impl Iterator<Item = f64> + '_ {
        let size = |n: &f64| if n.is_finite() { n.max(0.0) } else { 0.0 };
        self.parts.iter().map(size)
    }

    /// All parts together.
    pub fn total(&self) -> f64 {
        self.sizes().sum()
    }
}

impl Bars {
    /// The bars that are drawn: the last may stand for many.
    fn drawn(&self) -> Vec<Bar> {
        if self.bars.len() <= MOST {
            return self.bars.clone();
        }
        let mut bars = self.bars[..MOST - 1].to_vec();
        let rest = &self.bars[MOST - 1..];
        let mut sums: Vec<f64> = vec![];
        for bar in rest {
            for (i, n) in bar.sizes().enumerate() {
                match sums.get_mut(i) {
                    Some(sum) => *sum += n,
                    None => sums.push(n),
                }
            }
        }
        bars.push(Bar::new(count(rest.len(), "other"), sums));
        bars
    }

    /// The bars with their names and numbers.
    pub fn picture(&self) -> Picture {
        let bars = self.drawn();
        let longest = bars.iter().map(Bar::total).fold(0.0, f64::max);
        let scale = if longest > 0.0 { LENGTH / longest } else { 0.0 };
        let names = (bars.iter().map(|b| pixels("mono", &b.name))).fold(30.0, f64::max);
        let left = names.min(NAMES) + 10.0;
        let named = self.parts.iter().filter(|p| !p.is_empty()).count() > 1;
        let mut picture = Picture::new(&*self.title, left + LENGTH + 90.0, 0.0);
        let mut y = 0.0;
        if !self.title.is_empty() {
            picture.draw(fitted("soft", 0.0, 11.0, picture.width, &self.title));
            y += 20.0;
        }
        if named {
            y = self.legend(&mut picture, y);
        }
        for bar in &bars {
            picture.draw(fitted(
                "mono end",
                left - 8.0,
                y + 15.0,
                left - 8.0,
                &bar.name,
            ));
            let mut x = left;
            for (i, n) in bar.sizes().enumerate() {
                let width = n * scale;
                if width <= 0.0 {
                    continue;
                }
                let part = self.parts.get(i).filter(|_| named);
                let tip = match part {
                    Some(part) => format!("{}, {part}: {}", bar.name, self.unit.text(n)),
                    None => format!("{}: {}", bar.name, self.unit.text(n)),
                };
                let class = format!("full {}", color(i));
                let shape = rect(&class, x, y + 3.0, width.max(1.0), ROW - 6.0);
                picture.draw(shape.tip(tip));
                x += width;
            }
            let number = self.unit.text(bar.total());
            picture.draw(text("soft", x + 6.0, y + 15.0, &number));
            y += ROW;
        }
        if bars.is_empty() {
            picture.draw(text("soft", 0.0, y + 12.0, "nothing"));
            y += 18.0;
        }
        picture.height = y + 4.0;
        picture
    }

    /// Names of parts in a row, each with its colour and its sum; where it ends.
    fn legend(&self, picture: &mut Picture, mut y: f64) -> f64 {
        let mut x = 0.0;
        for (i, part) in self.parts.iter().enumerate().take(LEGEND) {
            let total: f64 = self.bars.iter().filter_map(|b| b.sizes().nth(i)).sum();
            let words = match self.totals {
                true => format!("{} {}", cut(part, 24.0), self.unit.text(total)),
                false => cut(part, 24.0),
            };
            let width = 18.0 + pixels("soft", &words) + 16.0;
            if x > 0.0 && x + width > picture.width {
                (x, y) = (0.0, y + 18.0);
            }
            picture
                .draw(rect(&format!("full {}", color(i)), x, y + 2.0, 11.0, 11.0).set("rx", 2.0));
            picture.draw(text("soft", x + 16.0, y + 11.5, &words).tip(&**part));
            x += width;
        }
        y + 22.0
    }
}

impl Show for Bars {
    fn figure(&self) -> Figure {
        let picture = self.picture();
        let title = self.title.clone();
        let plain = Bars {
            title: String::new(),
            ..self.clone()
        };
        Figure::new(title).picture(Picture {
            label: picture.label,
            ..plain.picture()
        })
    }

    fn text(&self) -> String {
        let mut table = Table::new(&*self.title, &["", "all"]).numbers(&[1]);
        if self.parts.len() > 1 {
            for part in &self.parts {
                table.columns.push(crate::Column {
                    name: part.clone(),
                    right: true,
                    mono: false,
                });
            }
        }
        for bar in &self.bars {
            let mut row = vec![bar.name.clone(), self.unit.text(bar.total())];
            row.extend(bar.sizes().map(|n| self.unit.text(n)));
            row.truncate(table.columns.len());
            table.row(row);
        }
        table.lines().join("\n")
    }
}
