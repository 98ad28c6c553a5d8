//! Plans of whole steps: where their bytes go, what a rank holds along the way, and how two plans
//! differ.

use crate::{
    Bar, Bars, Cell, Curve, Figure, Show, Table, Unit, bytes, ledger::caller, number::count,
    seconds,
};
use anymesh_core::spmd::plan::{Explanation, PlanDiff, PlannedStep, StepPlan, Totals};

/// Steps whose bytes are drawn.
const MOST: usize = 15;

/// Operands, each with where it goes if it goes anywhere.
fn operands(step: &PlannedStep) -> String {
    let one = |(from, to): (&String, &String)| match from == to {
        true => from.clone(),
        false => format!("{from} → {to}"),
    };
    let all: Vec<String> = step.operands.iter().zip(&step.targets).map(one).collect();
    all.join(", ")
}

fn bars(title: String, steps: &[(usize, &PlannedStep)]) -> Bars {
    let bar = |(n, s): &(usize, &PlannedStep)| Bar::new(format!("{n} {}", s.op), [s.bytes as f64]);
    Bars {
        title,
        unit: Unit::Bytes,
        parts: vec![],
        totals: false,
        bars: steps.iter().take(MOST).map(bar).collect(),
    }
}

fn table<'p>(steps: impl IntoIterator<Item = (usize, &'p PlannedStep)>) -> Table {
    let heads = [
        "step", "op", "operands", "results", "choice", "received", "time", "held", "line",
    ];
    let mut table = Table::new("", &heads).numbers(&[0, 5, 6, 7]).code(&[2, 3]);
    for (number, s) in steps {
        table.row::<Cell>([
            number.to_string().into(),
            s.op.clone().into(),
            operands(s).into(),
            s.results.join(", ").into(),
            s.choice.clone().into(),
            Cell::bytes(s.bytes),
            seconds(s.seconds).into(),
            Cell::bytes(s.memory),
            caller(&s.caller).into(),
        ]);
    }
    table
}

fn compared(rows: &[(&str, Totals)]) -> Table {
    let heads = ["", "received by the worst rank", "time", "held at most"];
    let mut table = Table::new("", &heads).numbers(&[1, 2, 3]);
    for (name, t) in rows {
        table.row::<Cell>([
            (*name).into(),
            Cell::bytes(t.bytes),
            seconds(t.seconds).into(),
            Cell::bytes(t.memory),
        ]);
    }
    table
}

/// The steps that receive most, what a rank holds along the way, and a table of all steps.
///
/// ```
/// use anymesh_core::{DType, Mesh, Tensor, meta, spmd::{PlanOptions, plan}};
/// use anymesh_show::Show;
/// let mesh = Mesh::new("tp=2", &meta())?;
/// let plan = plan(&PlanOptions::default(), || {
///     let x = Tensor::ones([64, 4], DType::F32, (&mesh, "[@tp, _]"))?;
///     let w = Tensor::ones([4, 8], DType::F32, (&mesh, "[_, @tp]"))?;
///     x.matmul(&w)?.sum(&[], false)
/// })?;
/// assert!(plan.html().contains("without a plan") && plan.svg().is_some());
/// # Ok::<(), anymesh_core::Error>(())
/// ```
impl Show for StepPlan {
    fn figure(&self) -> Figure {
        let title = format!(
            "plan of {}: {} received by the worst rank",
            count(self.steps().len(), "step"),
            bytes(self.bytes() as f64)
        );
        let most = self.explain(MOST).steps;
        let mut figure = Figure::new(title).table(compared(&[
            ("with the plan", self.totals()),
            ("without a plan", self.eager()),
        ]));
        if !most.is_empty() {
            let title = "bytes that the worst rank receives, by step, most first".to_string();
            figure = figure.picture(bars(title, &most).picture());
        }
        let most = self.steps().iter().map(|s| s.memory).max().unwrap_or(0);
        let (scale, unit) = match most {
            0..=0xf_ffff => (1024.0, "KiB"),
            0x10_0000..=0x3fff_ffff => (1048576.0, "MiB"),
            _ => (1073741824.0, "GiB"),
        };
        let held: Vec<(f64, f64)> = (self.steps().iter().enumerate())
            .map(|(i, s)| (i as f64, s.memory as f64 / scale))
            .collect();
        if held.len() > 1 {
            let unit = format!("{unit} held by a rank after each step");
            let curve = Curve::new("what a rank holds", unit);
            figure = figure.picture(curve.line("", held).picture());
        }
        figure.table(table(self.steps().iter().enumerate()))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// Steps with what else could have been chosen.
impl Show for Explanation<'_> {
    fn figure(&self) -> Figure {
        let told: u64 = self.steps.iter().map(|(_, s)| s.bytes).sum();
        let title = format!(
            "{}, {} received by the worst rank",
            count(self.steps.len(), "step"),
            bytes(told as f64)
        );
        let head = "bytes that the worst rank receives, by step".to_string();
        let mut figure = Figure::new(title).picture(bars(head, &self.steps).picture());
        figure = figure.table(table(self.steps.iter().copied()));
        let heads = ["step", "op", "", "received", "choice"];
        let mut others = Table::new("what could be chosen", &heads)
            .numbers(&[0, 3])
            .code(&[4]);
        for (number, step) in &self.steps {
            for choice in &step.alternatives {
                let chosen = choice.description.ends_with(&step.targets.join(", "));
                others.row::<Cell>([
                    number.to_string().into(),
                    step.op.clone().into(),
                    if chosen { "chosen" } else { "or" }.into(),
                    Cell::bytes(choice.bytes),
                    choice.description.clone().into(),
                ]);
            }
        }
        match others.rows.is_empty() {
            true => figure,
            false => figure.table(others),
        }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// The steps that differ, and the totals of both.
impl Show for PlanDiff<'_> {
    fn figure(&self) -> Figure {
        let (first, second) = self.totals;
        let title = format!("{} differ", count(self.changes.len(), "step"));
        let bar = |name: &str, t: Totals| Bar::new(name, [t.bytes as f64]);
        let bars = Bars {
            title: "bytes that the worst rank receives".into(),
            unit: Unit::Bytes,
            parts: vec![],
            totals: false,
            bars: vec![bar("first", first), bar("second", second)],
        };
        let heads = ["", "step", "op", "operands", "choice", "received", "line"];
        let mut table = Table::new("", &heads).numbers(&[1, 5]).code(&[3]);
        for change in &self.changes {
            for (sign, step) in [("−", change.first), ("+", change.second)] {
                let Some((number, s)) = step else { continue };
                table.row::<Cell>([
                    sign.into(),
                    number.to_string().into(),
                    s.op.clone().into(),
                    operands(s).into(),
                    s.choice.clone().into(),
                    Cell::bytes(s.bytes),
                    caller(&s.caller).into(),
                ]);
            }
        }
        Figure::new(title)
            .picture(bars.picture())
            .table(compared(&[("first", first), ("second", second)]))
            .table(table)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
