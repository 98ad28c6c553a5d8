//! Steps on clusters that are not there.

use crate::{Curve, Figure, Gantt, Lane, Show, Span, Table, Unit, bytes, seconds};
use anymesh_simulate::{Comparison, Estimate, KINDS, Measure};

/// Lines of memory that are drawn.
const LINES: usize = 6;

/// The timeline of a step, what ranks hold over time, and tables of time, bytes and memory.
///
/// ```
/// use anymesh_show::Show;
/// use anymesh_simulate::{Layout, estimate, machine, preset};
/// let layout = Layout { dp: 2, tp: 8, pp: 4, batch: 32, ..Layout::default() };
/// let step = estimate(&preset("llama-3-70b")?.model, &machine("h100")?, &layout)?;
/// assert!(step.html().contains("GiB at each rank"));
/// # Ok::<(), anymesh_simulate::Error>(())
/// ```
impl Show for Estimate {
    fn figure(&self) -> Figure {
        let lanes = self.lanes().into_iter().map(|lane| Lane {
            name: lane.name,
            spans: (lane.spans.into_iter())
                .map(|event| Span {
                    start: event.start,
                    end: event.end,
                    label: event.label,
                    kind: event.kind,
                })
                .collect(),
        });
        let chart = Gantt {
            title: format!(
                "{} on {} {}: {}",
                self.model,
                self.ranks,
                self.machine,
                self.layout.summary()
            ),
            unit: Unit::Seconds,
            kinds: KINDS.map(String::from).to_vec(),
            lanes: lanes.collect(),
        };
        let figure = chart.figure().note(format!(
            "By {} a step takes {:.3} s: MFU {:.1} %, bubble {:.1} %, communication that nothing hides {:.1} %.",
            self.source,
            self.seconds,
            self.mfu * 100.0,
            self.bubble * 100.0,
            self.exposed / self.seconds * 100.0
        ));
        let figure = match self.memory.is_empty() {
            true => figure,
            false => figure.picture(held(self).picture()),
        };
        figure
            .table(spent(self))
            .table(received(self))
            .table(stages(self))
            .table(memory(self))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// What ranks hold over time; of many ranks some.
fn held(step: &Estimate) -> Curve {
    let gib = (1u64 << 30) as f64;
    let mut curve = Curve::new("what a rank of the pipeline holds", "GiB");
    curve.x = "seconds".into();
    let every = step.memory.len().div_ceil(LINES).max(1);
    for m in step.memory.iter().step_by(every) {
        let points = m.curve.iter().map(|(at, bytes)| (*at, bytes / gib));
        curve = curve.line(format!("rank {}", m.rank), points.collect());
    }
    curve
}

fn spent(step: &Estimate) -> Table {
    let heads = ["", "seconds", "share"];
    let mut table = Table::new("where the busiest rank's time goes", &heads).numbers(&[1, 2]);
    for (name, seconds) in step.spent.parts().into_iter().filter(|p| p.1 > 0.0) {
        let share = format!("{:.1} %", seconds / step.seconds * 100.0);
        table.row([name.to_string(), format!("{seconds:.4}"), share]);
    }
    table
}

fn received(step: &Estimate) -> Table {
    let mut table = Table::new("bytes that a rank receives", &["axis", "bytes"]).numbers(&[1]);
    for (name, count) in step.bytes.parts().into_iter().filter(|p| p.1 > 0.0) {
        table.row([name.to_string(), format!("{count:.0}")]);
    }
    table
}

fn stages(step: &Estimate) -> Table {
    let heads = [
        "stages",
        "layers",
        "forward",
        "backward",
        "kept",
        "needs forward",
        "needs backward",
        "received",
    ];
    let mut table =
        Table::new("stages, with one micro-batch", &heads).numbers(&[1, 2, 3, 4, 5, 6, 7]);
    for (from, to, stage) in step.classes() {
        table.row([
            if from == to {
                from.to_string()
            } else {
                format!("{from} to {to}")
            },
            stage.layers.to_string(),
            seconds(stage.passes.f.total()),
            seconds(stage.passes.backward()),
            bytes(stage.kept + stage.ends),
            bytes(stage.forward),
            bytes(stage.backward),
            bytes(stage.bytes.total()),
        ]);
    }
    table
}

fn memory(step: &Estimate) -> Table {
    let heads = [
        "rank",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "ends",
        "working",
        "total",
        "at",
    ];
    let mut table =
        Table::new("GiB at each rank's peak", &heads).numbers(&[0, 1, 2, 3, 4, 5, 6, 7]);
    for m in &step.memory {
        let gib = |bytes: f64| format!("{:.2}", bytes / (1u64 << 30) as f64);
        table.row([
            m.rank.to_string(),
            gib(m.parameters),
            gib(m.gradients),
            gib(m.optimizer),
            gib(m.activations),
            gib(m.ends),
            gib(m.working),
            gib(m.total),
            format!("{:.3} s ({})", m.at, m.during),
        ]);
    }
    table
}

/// Closed forms and the real step beside each other.
impl Show for Comparison {
    fn figure(&self) -> Figure {
        let heads = ["", "closed forms", "the real step", "difference"];
        let mut table = Table::new("", &heads).numbers(&[1, 2, 3]);
        for row in &self.rows {
            let text = |x: f64| match row.measure {
                Measure::Seconds => seconds(x),
                Measure::Bytes => bytes(x),
                Measure::Share => format!("{:.1} %", x * 100.0),
            };
            let percent = row
                .percent
                .map_or("only there".into(), |p| format!("{p:+.1} %"));
            table.row([row.what.clone(), text(row.closed), text(row.real), percent]);
        }
        Figure::new("closed forms and the real step").table(table)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
