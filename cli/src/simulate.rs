//! `anymesh simulate`: a training step on a cluster that is not there.

use crate::{picture::PictureArgs, request::bad};
use anymesh::{
    Result,
    show::{Figure, Gantt, Lane, Show, Span, Table, Unit},
    simulate::{Case, Estimate, KINDS, estimate, machines, presets, search},
};
use clap::Args;
use serde_json::{Value, json};
use std::{io::Write, path::Path};

/// Arguments of `anymesh simulate`.
#[derive(Args)]
pub(crate) struct SimulateCommand {
    /// A model by its name (--list has them), or a TOML or JSON file with model, machine, layout and
    /// ranks.
    #[arg(value_name = "MODEL", required_unless_present = "list")]
    what: Option<String>,
    /// GPUs.
    #[arg(long)]
    ranks: Option<usize>,
    /// The machine: a100-80, h100, h200 or h800; h100 if nothing is said.
    #[arg(long)]
    machine: Option<String>,
    /// A setting of the layout such as tp=8, or one such as model.layers=4 or
    /// machine.coefficients.products=0.5; may be given several times. What is not set is 1, and dp what
    /// is left of the ranks.
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Look for the best layouts among those that have what is set, and say why they are. So it is
    /// also if no axis is set.
    #[arg(long)]
    search: bool,
    /// How many layouts a search tells.
    #[arg(long, default_value_t = 3)]
    best: usize,
    /// List models and machines with what they are.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn told<T>(result: anymesh::simulate::Result<T>) -> Result<T> {
    result.map_err(|error| bad(error.to_string()))
}

/// A reader that closes early is no error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

impl SimulateCommand {
    pub(crate) fn run(&self) -> Result<()> {
        if self.list {
            print(&format!("{}\n\n{}\n", models().text(), clusters().text()));
            return Ok(());
        }
        let case = self.case()?;
        if !self.search && case.is_laid_out() {
            told(case.layout.check(&case.model, case.ranks))?;
            let step = told(estimate(&case.model, &case.machine, &case.layout))?;
            if self.picture.write(|| vec![figure(&step)])? {
                return Ok(());
            }
            match self.json {
                true => print(&format!("{}\n", told(step.to_json())?)),
                false => print(&step.to_string()),
            }
            return Ok(());
        }
        let mut limits = case.limits();
        limits.best = self.best.max(1);
        let found = told(search(&case.model, &case.machine, case.ranks, &limits))?;
        let figures = || found.ranked.iter().map(|r| figure(&r.estimate)).collect();
        if self.picture.write(figures)? {
            return Ok(());
        }
        match self.json {
            true => print(&format!("{}\n", told(found.to_json())?)),
            false => print(&found.to_string()),
        }
        Ok(())
    }

    /// The file or the preset, with what the options say over it.
    fn case(&self) -> Result<Case> {
        let what = self.what.as_deref().unwrap_or_default();
        let path = Path::new(what);
        let ending = path.extension().and_then(|e| e.to_str());
        let mut file: Value = match ending {
            Some("toml" | "json") => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| bad(format!("cannot read {what}: {error}")))?;
                let read = match ending {
                    Some("json") => serde_json::from_str(&text).map_err(|e| e.to_string()),
                    _ => toml::from_str(&text).map_err(|e| e.to_string()),
                };
                read.map_err(|error| bad(format!("{what}: {error}")))?
            }
            _ => json!({"model": what}),
        };
        if let Value::Object(fields) = &mut file {
            if let Some(ranks) = self.ranks {
                fields.insert("ranks".into(), json!(ranks));
            }
            if let Some(machine) = &self.machine {
                fields.insert("machine".into(), json!(machine));
            }
            if !fields.contains_key("ranks") && !self.set.iter().any(|s| s.starts_with("ranks=")) {
                return Err(bad("--ranks is missing: how many GPUs are there?"));
            }
        }
        told(Case::new(file, &self.set))
    }
}

fn models() -> Table {
    let heads = [
        "model",
        "parameters",
        "active",
        "sequence",
        "batch",
        "source",
    ];
    let mut table = Table::new("", &heads).numbers(&[1, 2, 3, 4]);
    let billions = |n: f64| format!("{:.2}B", n / 1e9);
    for preset in presets() {
        table.row([
            preset.model.name.clone(),
            billions(preset.model.parameters()),
            billions(preset.model.active()),
            preset.sequence.to_string(),
            preset.batch.to_string(),
            preset.source.into(),
        ]);
    }
    table
}

fn clusters() -> Table {
    let heads = [
        "machine",
        "bf16 TFLOP/s",
        "memory GB",
        "GB/s",
        "in a node GB/s",
        "between GB/s",
    ];
    let mut table = Table::new("", &heads).numbers(&[1, 2, 3, 4, 5]);
    for machine in machines() {
        let short = |x: f64, unit: f64| format!("{:.0}", x / unit);
        table.row([
            machine.name.clone(),
            short(machine.bf16, 1e12),
            short(machine.memory, 1e9),
            short(machine.bandwidth, 1e9),
            short(machine.inside.bandwidth, 1e9),
            short(machine.between.bandwidth, 1e9),
        ]);
    }
    table
}

/// The timeline, with the tables of time, bytes and memory.
fn figure(step: &Estimate) -> Figure {
    let lanes = step.lanes().into_iter().map(|lane| Lane {
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
            step.model,
            step.ranks,
            step.machine,
            step.layout.summary()
        ),
        unit: Unit::Seconds,
        kinds: KINDS.map(String::from).to_vec(),
        lanes: lanes.collect(),
    };
    let mut spent = Table::new(
        "where the busiest rank's time goes",
        &["", "seconds", "share"],
    )
    .numbers(&[1, 2]);
    for (name, seconds) in step.spent.parts().into_iter().filter(|p| p.1 > 0.0) {
        let share = format!("{:.1} %", seconds / step.seconds * 100.0);
        spent.row([name.to_string(), format!("{seconds:.4}"), share]);
    }
    let mut bytes = Table::new("bytes that a rank receives", &["axis", "bytes"]).numbers(&[1]);
    for (name, count) in step.bytes.parts().into_iter().filter(|p| p.1 > 0.0) {
        bytes.row([name.to_string(), format!("{count:.0}")]);
    }
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
    let mut memory =
        Table::new("GiB at each rank's peak", &heads).numbers(&[0, 1, 2, 3, 4, 5, 6, 7]);
    for m in &step.memory {
        let gib = |bytes: f64| format!("{:.2}", bytes / (1u64 << 30) as f64);
        memory.row([
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
    chart
        .figure()
        .note(format!(
            "A step takes {:.3} s: MFU {:.1} %, bubble {:.1} %.",
            step.seconds,
            step.mfu * 100.0,
            step.bubble * 100.0
        ))
        .table(spent)
        .table(bytes)
        .table(memory)
}
