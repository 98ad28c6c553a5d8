//! Lines over steps: losses, rates, times.

use crate::{
    Figure, Picture, Show, Table,
    number::{coordinate, cut, ticks, value},
    style::color,
    svg::{line, pixels, rect, text},
    xml::tag,
};

/// Lines that are drawn.
const MOST: usize = 10;
/// Points of a line that are drawn, at most; of more, the lowest and highest of each stretch.
const POINTS: usize = 500;
const SIZE: (f64, f64) = (560.0, 240.0);

/// Lines of points, such as a loss over steps. A point whose value is no number is a gap.
///
/// ```
/// use anymesh_show::{Curve, Show};
/// let loss = |rate: f64| (0..100).map(|i| (i as f64, 4.0 * (-rate * i as f64).exp())).collect();
/// let curve = Curve::new("training loss", "nats")
///     .line("rate 0.01", loss(0.01))
///     .line("rate 0.1", loss(0.1))
///     .log();
/// let svg = curve.svg().unwrap();
/// assert!(svg.contains("training loss") && svg.contains("rate 0.1"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// What it is.
    pub title: String,
    /// Of the values.
    pub unit: String,
    /// What points are counted by; `step` unless told.
    pub x: String,
    /// Whether values are drawn by their logarithm. Those that have none are gaps.
    pub log: bool,
    /// Names and points.
    pub series: Vec<(String, Vec<(f64, f64)>)>,
}

impl Curve {
    /// A curve without lines.
    pub fn new(title: impl Into<String>, unit: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            unit: unit.into(),
            x: "step".into(),
            log: false,
            series: vec![],
        }
    }

    /// With a line of points.
    pub fn line(mut self, name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        self.series.push((name.into(), points));
        self
    }

    /// Drawn by the logarithm of its values.
    pub fn log(mut self) -> Self {
        self.log = true;
        self
    }

    /// A value as it is drawn; `None` for a gap.
    fn y(&self, value: f64) -> Option<f64> {
        let y = if self.log { value.log10() } else { value };
        y.is_finite().then_some(y)
    }

    /// The smallest and the largest of what is drawn.
    fn bounds(&self) -> ((f64, f64), (f64, f64)) {
        let (mut xs, mut ys) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
        for (_, points) in self.series.iter().take(MOST) {
            for (x, y) in points {
                let (Some(y), true) = (self.y(*y), x.is_finite()) else {
                    continue;
                };
                xs = (xs.0.min(*x), xs.1.max(*x));
                ys = (ys.0.min(y), ys.1.max(y));
            }
        }
        let wide = |(low, high): (f64, f64)| match (low > high, high - low) {
            (true, _) => (0.0, 1.0),
            (_, span) if !span.is_finite() => (low / 2.0, high / 2.0),
            (_, span) if span <= low.abs().max(high.abs()) * 1e-12 => {
                let room = (low.abs() * 0.1).max(0.5);
                (low - room, high + room)
            }
            _ => (low, high),
        };
        let (xs, (low, high)) = (wide(xs), wide(ys));
        let room = (high - low) * 0.05;
        // Values above zero are drawn from zero where that costs little.
        let low = match low {
            low if !self.log && low >= 0.0 && low < (high - low) * 0.6 => 0.0,
            low => low - room,
        };
        (xs, (low, high + room))
    }

    /// The marks of the values: where they are drawn, and their text.
    fn marks(&self, (low, high): (f64, f64)) -> Vec<(f64, String)> {
        let marks = |ticks: Vec<f64>| -> Vec<(f64, String)> {
            (ticks.into_iter())
                .map(|t| (t, value(if self.log { 10f64.powf(t) } else { t })))
                .collect()
        };
        let span = high - low;
        if !self.log || span < 0.6 {
            return marks(ticks(low, high, 5));
        }
        // Powers of ten, and with few of them what lies between.
        let every = (span / 6.0).ceil().max(1.0);
        let (first, last) = ((low / every).ceil(), (high / every).floor());
        let count = (last - first).clamp(0.0, 12.0) as usize;
        let between: &[f64] = if span < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let mut out = vec![];
        for i in 0..=count + 1 {
            for factor in between {
                let at = (first - 1.0 + i as f64) * every + factor.log10();
                if at >= low && at <= high {
                    out.push((at, value(10f64.powf(at))));
                }
            }
        }
        out
    }

    /// The lines with axes and marks.
    pub fn picture(&self) -> Picture {
        let (xs, ys) = self.bounds();
        let marks = self.marks(ys);
        let left = marks
            .iter()
            .map(|(_, t)| pixels("soft", t))
            .fold(20.0, f64::max)
            + 12.0;
        let (w, h) = SIZE;
        let mut picture = Picture::new(&*self.title, left + w + 16.0, 0.0);
        let mut top = 16.0;
        let unit = cut(&self.unit, 40.0);
        picture.draw(text("soft", 0.0, 11.0, &unit));
        top = self.legend(&mut picture, left.max(pixels("soft", &unit) + 20.0), top);
        let x_of = |x: f64| left + (x - xs.0) / (xs.1 - xs.0) * w;
        let y_of = |y: f64| top + h - (y - ys.0) / (ys.1 - ys.0) * h;
        for (at, words) in &marks {
            let y = y_of(*at);
            picture.draw(line("grid", (left, y), (left + w, y)));
            picture.draw(text("soft end", left - 6.0, y + 4.0, words));
        }
        let mut free = f64::MIN;
        for at in ticks(xs.0, xs.1, 6) {
            let (x, words) = (x_of(at), value(at));
            let half = pixels("soft", &words) / 2.0;
            picture.draw(line("axis", (x, top + h), (x, top + h + 4.0)));
            if x - half > free {
                picture.draw(text("soft mid", x, top + h + 17.0, &words));
                free = x + half + 6.0;
            }
        }
        picture.draw(line("axis", (left, top + h), (left + w, top + h)));
        let name = cut(&self.x, 40.0);
        picture.draw(text("soft end", left + w, top + h + 32.0, &name));
        for (i, (name, points)) in self.series.iter().enumerate().take(MOST) {
            let class = color(i);
            for run in self.runs(points) {
                let mut path = String::new();
                for (n, (x, y)) in run.iter().enumerate() {
                    let mark = if n == 0 { 'M' } else { 'L' };
                    let (x, y) = (coordinate(x_of(*x)), coordinate(y_of(*y)));
                    path.push_str(&format!("{mark}{x} {y}"));
                }
                picture.draw(match run.as_slice() {
                    [(x, y)] => tag("circle")
                        .set("class", format!("full {class}"))
                        .set("cx", x_of(*x))
                        .set("cy", y_of(*y))
                        .set("r", 2.5)
                        .tip(&**name),
                    _ => tag("path")
                        .set("class", format!("wire {class}"))
                        .set("d", path)
                        .tip(&**name),
                });
            }
            if let Some((x, y)) = points
                .iter()
                .rev()
                .find(|(x, y)| x.is_finite() && self.y(*y).is_some())
            {
                let last = tag("circle")
                    .set("class", format!("full {class}"))
                    .set("cx", x_of(*x))
                    .set("cy", self.y(*y).map_or(0.0, y_of))
                    .set("r", 3.0);
                picture.draw(last.tip(format!(
                    "{name}: {} at {} {}",
                    value(*y),
                    self.x,
                    value(*x)
                )));
            }
        }
        picture.height = top + h + 40.0;
        picture
    }

    /// Which colour is which line; where it ends.
    fn legend(&self, picture: &mut Picture, left: f64, top: f64) -> f64 {
        if self.series.len() < 2 && self.series.iter().all(|(name, _)| name.is_empty()) {
            return top + 4.0;
        }
        let (mut x, mut y) = (left, 0.0);
        for (i, (name, _)) in self.series.iter().enumerate().take(MOST) {
            let words = cut(name, 30.0);
            let width = 20.0 + pixels("soft", &words) + 14.0;
            if x > left && x + width > picture.width {
                (x, y) = (left, y + 17.0);
            }
            picture.draw(rect(&format!("full {}", color(i)), x, y + 4.0, 14.0, 5.0).set("rx", 2.0));
            picture.draw(text("soft", x + 19.0, y + 11.0, &words).tip(&**name));
            x += width;
        }
        top + y + 6.0
    }

    /// The points between gaps, thinned out where there are many.
    fn runs(&self, points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
        let mut runs: Vec<Vec<(f64, f64)>> = vec![vec![]];
        for (x, y) in points {
            match (self.y(*y), x.is_finite()) {
                (Some(y), true) => {
                    if let Some(run) = runs.last_mut() {
                        run.push((*x, y));
                    }
                }
                _ if runs.last().is_some_and(|run| !run.is_empty()) => runs.push(vec![]),
                _ => {}
            }
        }
        runs.retain(|run| !run.is_empty());
        // A line that is mostly gaps has as many points as others.
        let keep = (POINTS / runs.len().max(1)).max(2);
        runs.truncate(POINTS);
        runs.iter().map(|run| thinned(run, keep)).collect()
    }
}

/// At most about so many points: of each stretch the lowest and the highest.
fn thinned(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most {
        return points.to_vec();
    }
    let stretches = (most / 2).max(1);
    let mut out = vec![points[0]];
    for i in 0..stretches {
        let part = &points[i * points.len() / stretches..(i + 1) * points.len() / stretches];
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let low = part.iter().enumerate().min_by(|a, b| by(&a.1, &b.1));
        let high = part.iter().enumerate().max_by(|a, b| by(&a.1, &b.1));
        if let (Some(low), Some(high)) = (low, high) {
            let (first, second) = if low.0 < high.0 {
                (low, high)
            } else {
                (high, low)
            };
            out.push(*first.1);
            if first.0 != second.0 {
                out.push(*second.1);
            }
        }
    }
    out.push(points[points.len() - 1]);
    out
}

impl Show for Curve {
    fn figure(&self) -> Figure {
        let mut figure = Figure::new(&*self.title).picture(self.picture());
        let gaps: usize = (self.series.iter())
            .map(|(_, points)| points.iter().filter(|(_, y)| self.y(*y).is_none()).count())
            .sum();
        if gaps > 0 {
            let what = match self.log {
                true => "not above 0 or no number",
                false => "no number",
            };
            figure = figure.note(match gaps {
                1 => format!("One value is {what}: there the line has a gap."),
                n => format!("{n} values are {what}: there the line has gaps."),
            });
        }
        if self.series.len() > MOST {
            let all = self.series.len();
            figure = figure.note(format!("Drawn are the first {MOST} of {all} lines."));
        }
        figure
    }

    fn text(&self) -> String {
        let title = format!("{} ({})", self.title, self.unit);
        let mut table = Table::new(title, &["", "points", "first", "last", "lowest", "highest"]);
        table = table.numbers(&[1, 2, 3, 4, 5]);
        for (name, points) in &self.series {
            let ys = || points.iter().map(|(_, y)| *y).filter(|y| !y.is_nan());
            let text = |y: Option<f64>| y.map_or("-".into(), value);
            table.row([
                name.clone(),
                points.len().to_string(),
                text(points.first().map(|p| p.1)),
                text(points.last().map(|p| p.1)),
                text(ys().reduce(f64::min)),
                text(ys().reduce(f64::max)),
            ]);
        }
        table.lines().join("\n")
    }
}
