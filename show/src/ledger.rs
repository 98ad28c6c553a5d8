//! Ledgers: what was sent, by op and by mesh axis.

use crate::{Bar, Bars, Cell, Figure, Show, Table, Unit, number::count, seconds};
use anymesh_core::spmd::{Entry, Ledger};

/// The line that called an op; nothing where that line is in a file that a notebook made of a cell,
/// which nobody can open.
pub(crate) fn caller(caller: &str) -> &str {
    match caller.strip_prefix("src/lib.rs:") {
        Some(_) => "",
        None => caller,
    }
}

/// The axes of an entry as one name.
fn axes(entry: &Entry) -> String {
    match entry.axes.is_empty() {
        true => "between meshes".into(),
        false => entry.axes.join(", "),
    }
}

/// Names in the order in which they came, each with its number.
fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut out: Vec<String> = vec![];
    for name in names {
        if !out.contains(&name) {
            out.push(name);
        }
    }
    out
}

/// Bytes by op, most first, each bar with a part for each mesh axis.
fn by_op(ledger: &Ledger) -> Bars {
    let along = distinct(ledger.entries.iter().map(axes));
    let mut bars: Vec<Bar> = vec![];
    for entry in &ledger.entries {
        let at = match bars.iter().position(|b| b.name == entry.op) {
            Some(at) => at,
            None => {
                bars.push(Bar::new(entry.op, vec![0.0; along.len()]));
                bars.len() - 1
            }
        };
        if let Some(i) = along.iter().position(|a| *a == axes(entry)) {
            bars[at].parts[i] += entry.bytes as f64;
        }
    }
    // The sort is stable: what is equal stays as it came.
    bars.sort_by(|a, b| b.total().total_cmp(&a.total()));
    Bars {
        title: "bytes that the worst rank received, by op and mesh axis".into(),
        unit: Unit::Bytes,
        parts: along,
        totals: true,
        bars,
    }
}

/// Bars of bytes by op, in the colours of mesh axes, and a table of every step.
///
/// ```
/// use anymesh_core::{DType, Mesh, Tensor, meta, spmd::Ledger};
/// use anymesh_show::Show;
/// let mesh = Mesh::new("dp=2, tp=4", &meta())?;
/// let x = Tensor::zeros([64, 32], DType::F32, (&mesh, "[@dp, _]"))?;
/// let w = Tensor::zeros([32, 16], DType::F32, (&mesh, "[_, @tp]"))?;
/// let (y, ledger) = Ledger::record(|| x.matmul(&w)?.softmax(-1));
/// assert!(ledger.svg().unwrap().contains(">softmax</text>"));
/// # y?; Ok::<(), anymesh_core::Error>(())
/// ```
impl Show for Ledger {
    fn figure(&self) -> Figure {
        let title = format!(
            "{}, {} received by the worst rank",
            count(self.entries.len(), "step"),
            crate::bytes(self.bytes() as f64)
        );
        let mut figure = Figure::new(title);
        for note in self.notes.iter().take(20) {
            figure = figure.note(format!("note: {note}"));
        }
        if self.entries.is_empty() {
            return figure.note("Nothing was communicated.");
        }
        let lines = self.entries.iter().any(|e| !caller(&e.caller).is_empty());
        let mut heads = vec![
            "op", "kind", "axes", "from", "to", "bytes", "time", "modelled",
        ];
        if lines {
            heads.push("line");
        }
        let mut table = Table::new("", &heads).numbers(&[5, 6, 7]).code(&[3, 4]);
        for e in &self.entries {
            let mut row: Vec<Cell> = vec![
                e.op.into(),
                e.kind.into(),
                axes(e).into(),
                e.from.clone().into(),
                e.to.clone().into(),
                Cell::bytes(e.bytes),
                seconds(e.time.as_secs_f64()).into(),
                seconds(e.modelled).into(),
            ];
            if lines {
                row.push(caller(&e.caller).into());
            }
            table.row(row);
        }
        figure = figure.picture(by_op(self).picture()).table(table);
        let (hidden, ran) = (self.hidden().as_secs_f64(), self.ran().as_secs_f64());
        if hidden > 0.0 {
            let share = (100.0 * hidden / ran).floor();
            figure = figure.note(format!(
                "{share}% of {} of communication ran while the program computed.",
                seconds(ran)
            ));
        }
        figure
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
