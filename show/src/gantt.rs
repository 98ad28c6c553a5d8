//! Who does what when: lanes with intervals, such as the schedule of a pipeline.

use crate::{
    Figure, Picture, Show, Table, Unit,
    number::{count, cut, ticks},
    style::color,
    svg::{fitted, line, pixels, rect, text},
};

/// Lanes that are drawn.
const LANES: usize = 48;
/// Intervals that are drawn, over all lanes.
const SPANS: usize = 2000;
const WIDTH: f64 = 620.0;
const ROW: f64 = 26.0;
/// What is free above and below the boxes of a lane.
const GAP: f64 = 3.0;

/// Lanes with what happens in them, over time.
///
/// ```
/// use anymesh_show::{Gantt, Lane, Show, Span, Unit};
/// // Two stages, two micro-batches: forward, then backward.
/// let lane = |name: &str, spans: &[(f64, f64, &str, usize)]| Lane {
///     name: name.into(),
///     spans: spans.iter().map(|(start, end, label, kind)| Span { start: *start, end: *end, label: (*label).into(), kind: *kind }).collect(),
/// };
/// let schedule = Gantt {
///     title: "two stages".into(),
///     unit: Unit::Seconds,
///     kinds: vec!["forward".into(), "backward".into()],
///     lanes: vec![
///         lane("stage 0", &[(0.0, 1.0, "0", 0), (1.0, 2.0, "1", 0), (4.0, 6.0, "0", 1), (6.0, 8.0, "1", 1)]),
///         lane("stage 1", &[(1.0, 2.0, "0", 0), (2.0, 4.0, "0", 1), (4.0, 5.0, "1", 0), (5.0, 7.0, "1", 1)]),
///     ],
/// };
/// assert!(schedule.svg().unwrap().contains("75% busy"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gantt {
    /// What it is.
    pub title: String,
    /// Of times.
    pub unit: Unit,
    /// Names of the kinds of intervals, each with a colour.
    pub kinds: Vec<String>,
    /// From the top.
    pub lanes: Vec<Lane>,
}

/// A rank, a stage, a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// What happens, in any order.
    pub spans: Vec<Span>,
}

/// Something that takes from one time to another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Span {
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// What it is, in a word.
    pub label: String,
    /// Which of the chart's kinds it is.
    pub kind: usize,
}

impl Span {
    /// Its times, if they are such.
    fn times(&self) -> Option<(f64, f64)> {
        let good = self.start.is_finite() && self.end.is_finite() && self.end >= self.start;
        good.then_some((self.start, self.end))
    }
}

impl Lane {
    /// How long something happens, where what overlaps counts once.
    fn busy(&self) -> f64 {
        let mut times: Vec<(f64, f64)> = self.spans.iter().filter_map(Span::times).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut busy, mut until) = (0.0, f64::MIN);
        for (start, end) in times {
            busy += (end - start.max(until)).max(0.0);
            until = until.max(end);
        }
        busy
    }
}

impl Gantt {
    /// When the first interval begins and the last one ends.
    fn bounds(&self) -> (f64, f64) {
        let times = || {
            self.lanes
                .iter()
                .flat_map(|l| &l.spans)
                .filter_map(Span::times)
        };
        let low = times().map(|t| t.0).reduce(f64::min).unwrap_or(0.0);
        let high = times().map(|t| t.1).reduce(f64::max).unwrap_or(1.0);
        match high - low {
            span if span.is_finite() && span > 0.0 => (low, high),
            _ => (low, low + 1.0),
        }
    }

    /// How much of the time a lane is busy.
    fn share(&self, lane: &Lane) -> String {
        let (low, high) = self.bounds();
        format!("{}% busy", (100.0 * lane.busy() / (high - low)).round())
    }

    /// The lanes with a scale of time below them.
    pub fn picture(&self) -> Picture {
        let (low, high) = self.bounds();
        let lanes = &self.lanes[..self.lanes.len().min(LANES)];
        let names = lanes
            .iter()
            .map(|l| pixels("", &l.name))
            .fold(20.0, f64::max);
        let left = names.min(150.0) + 10.0;
        let mut picture = Picture::new(&*self.title, left + WIDTH + 80.0, 0.0);
        let mut top = 4.0;
        let mut x = left;
        for (i, kind) in self.kinds.iter().enumerate().take(10) {
            let words = cut(kind, 24.0);
            picture.draw(rect(&format!("full {}", color(i)), x, 2.0, 11.0, 11.0).set("rx", 2.0));
            picture.draw(text("soft", x + 16.0, 11.5, &words));
            x += 34.0 + pixels("soft", &words);
            top = 22.0;
        }
        picture.width = picture.width.max(x);
        let at = |t: f64| left + (t - low) / (high - low) * WIDTH;
        let bottom = top + lanes.len() as f64 * ROW;
        let mut free = f64::MIN;
        for t in ticks(0.0, high - low, 6) {
            let x = at(low + t);
            // Between the lanes only: through a lane it would strike labels out.
            let dashes = format!("{} {}", 2.0 * GAP, ROW - 2.0 * GAP);
            let grid = line("grid", (x, top), (x, bottom + 4.0));
            picture.draw(
                grid.set("stroke-dasharray", dashes)
                    .set("stroke-dashoffset", GAP),
            );
            let words = self.unit.text(t);
            let half = pixels("soft", &words) / 2.0;
            if x - half > free {
                picture.draw(text("soft mid", x, bottom + 17.0, &words));
                free = x + half + 6.0;
            }
        }
        let mut room = SPANS;
        for (i, lane) in lanes.iter().enumerate() {
            let y = top + i as f64 * ROW;
            picture.draw(fitted("end", left - 8.0, y + 17.0, left - 8.0, &lane.name));
            for span in lane.spans.iter().take(room) {
                let Some((start, end)) = span.times() else {
                    continue;
                };
                let (x, width) = (at(start), (at(end) - at(start)).max(0.75));
                let kind = self.kinds.get(span.kind).map_or("", String::as_str);
                let tip = format!(
                    "{}, {kind} {}: {} to {} ({})",
                    lane.name,
                    span.label,
                    self.unit.text(start - low),
                    self.unit.text(end - low),
                    self.unit.text(end - start)
                );
                let class = format!("fill {}", color(span.kind));
                let shape = rect(&class, x + 0.5, y + GAP, width - 1.0, ROW - 2.0 * GAP);
                picture.draw(shape.set("rx", 2.0).tip(tip));
                if pixels("tiny", &span.label) <= width - 4.0 {
                    let middle = x + width / 2.0;
                    picture.draw(text("tiny mid", middle, y + 16.5, &span.label));
                }
            }
            room = room.saturating_sub(lane.spans.len());
            picture.draw(text(
                "soft",
                left + WIDTH + 8.0,
                y + 17.0,
                &self.share(lane),
            ));
        }
        picture.height = bottom + 24.0;
        picture
    }
}

impl Show for Gantt {
    fn figure(&self) -> Figure {
        let (low, high) = self.bounds();
        let all: usize = self.lanes.iter().map(|l| l.spans.len()).sum();
        let busy: f64 = self.lanes.iter().map(Lane::busy).sum();
        let share = busy / (self.lanes.len().max(1) as f64 * (high - low));
        let mut figure = Figure::new(&*self.title)
            .picture(self.picture())
            .note(format!(
                "{} in all, {}% of it idle over {}.",
                self.unit.text(high - low),
                (100.0 * (1.0 - share)).round(),
                count(self.lanes.len(), "lane")
            ));
        if self.lanes.len() > LANES || all > SPANS {
            figure = figure.note(format!(
                "Drawn are at most {LANES} of {} and {SPANS} of {}.",
                count(self.lanes.len(), "lane"),
                count(all, "interval")
            ));
        }
        figure
    }

    fn text(&self) -> String {
        let mut table = Table::new(&*self.title, &["lane", "intervals", "busy"]).numbers(&[1, 2]);
        for lane in &self.lanes {
            table.row([
                lane.name.clone(),
                lane.spans.len().to_string(),
                self.share(lane),
            ]);
        }
        table.lines().join("\n")
    }
}
