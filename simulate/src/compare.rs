//! Two estimates of one step beside each other: by closed forms, and of the step that was run.

use crate::{Estimate, Stage, bytes_text, seconds_text};
use serde::Serialize;
use std::fmt;

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Parts of 1.
    Share,
}

/// A number by closed forms and of the real step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What it is.
    pub what: String,
    /// What it counts.
    pub measure: Measure,
    /// By closed forms.
    pub closed: f64,
    /// Of the real step.
    pub real: f64,
    /// How much more the real step has, in percent of the closed form; none where that is 0.
    pub percent: Option<f64>,
}

impl Row {
    fn new(what: impl Into<String>, measure: Measure, closed: f64, real: f64) -> Row {
        let percent = match (closed, real) {
            (closed, real) if closed == real => Some(0.0),
            (0.0, _) => None,
            _ => Some((real / closed - 1.0) * 100.0),
        };
        Row {
            what: what.into(),
            measure,
            closed,
            real,
            percent,
        }
    }
}

/// Two estimates of one step beside each other: a table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Time, where it goes, bytes by axis, and of the first, the last and the fullest rank of the
    /// pipeline what it holds, keeps of a micro-batch, and has at its peak. What both do not have is
    /// left out.
    pub rows: Vec<Row>,
}

impl Comparison {
    /// A row by its name.
    pub fn row(&self, what: &str) -> Option<&Row> {
        self.rows.iter().find(|r| r.what == what)
    }
}

/// What closed forms say of a step beside what its real run says.
///
/// ```
/// use anymesh_simulate::{Layout, compare, estimate, machine, preset};
/// let (model, machine) = (preset("llama-3-8b")?.model, machine("h100")?);
/// let layout = |zero| Layout { dp: 8, zero, batch: 8, ..Layout::default() };
/// // Both by closed forms here: ZeRO 1 and 0 send as many bytes of gradients in bf16, not in f32.
/// let table = compare(&estimate(&model, &machine, &layout(1))?, &estimate(&model, &machine, &layout(0))?);
/// let dp = table.row("dp bytes").unwrap();
/// assert!((dp.percent.unwrap() - 100.0 / 3.0).abs() < 1e-9);
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
pub fn compare(closed: &Estimate, real: &Estimate) -> Comparison {
    let mut rows = vec![
        Row::new("step", Measure::Seconds, closed.seconds, real.seconds),
        Row::new("MFU", Measure::Share, closed.mfu, real.mfu),
        Row::new("bubble", Measure::Share, closed.bubble, real.bubble),
        Row::new(
            "exposed communication",
            Measure::Seconds,
            closed.exposed,
            real.exposed,
        ),
    ];
    let spent = closed.spent.parts().into_iter().zip(real.spent.parts());
    rows.extend(spent.map(|(a, b)| Row::new(a.0, Measure::Seconds, a.1, b.1)));
    let bytes = closed.bytes.parts().into_iter().zip(real.bytes.parts());
    rows.extend(bytes.map(|(a, b)| Row::new(format!("{} bytes", a.0), Measure::Bytes, a.1, b.1)));
    for (a, b) in closed.memory.iter().zip(&real.memory) {
        // The first, the last, and what is fullest of either are what one asks for.
        let fullest = |e: &Estimate| {
            let most = e.memory.iter().max_by(|a, b| a.total.total_cmp(&b.total));
            most.map(|m| m.rank)
        };
        let told = [
            Some(0),
            Some(closed.memory.len() - 1),
            fullest(closed),
            fullest(real),
        ];
        if !told.contains(&Some(a.rank)) {
            continue;
        }
        let of = |e: &Estimate, of: &dyn Fn(&Stage) -> f64| -> f64 {
            e.stages.iter().filter(|s| s.rank == a.rank).map(of).sum()
        };
        let mut row = |what: &str, each: &dyn Fn(&Stage) -> f64| {
            let what = format!("rank {} {what}", a.rank);
            let numbers = (of(closed, each), of(real, each));
            rows.push(Row::new(what, Measure::Bytes, numbers.0, numbers.1));
        };
        row("parameters", &|s| s.state[0]);
        row("gradients", &|s| s.state[1]);
        row("optimizer", &|s| s.state[2]);
        row("kept by layers", &|s| s.kept);
        row("kept by ends", &|s| s.ends);
        let what = format!("rank {} at its peak", a.rank);
        rows.push(Row::new(what, Measure::Bytes, a.total, b.total));
    }
    rows.retain(|r| r.closed != 0.0 || r.real != 0.0);
    Comparison { rows }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "  {:<22} {:>13} {:>13}  difference",
            "", "closed forms", "the real step"
        )?;
        for row in &self.rows {
            let text = |x: f64| match row.measure {
                Measure::Seconds => seconds_text(x),
                Measure::Bytes => bytes_text(x),
                Measure::Share => format!("{:.1} %", x * 100.0),
            };
            let percent = match row.percent {
                Some(p) if p == 0.0 => "none".into(),
                Some(p) => format!("{p:+.1} %"),
                None => "only there".into(),
            };
            writeln!(
                f,
                "  {:<22} {:>13} {:>13}  {percent:>10}",
                row.what,
                text(row.closed),
                text(row.real)
            )?;
        }
        Ok(())
    }
}
