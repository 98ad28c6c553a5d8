//! `anymesh simulate`: a training step on a cluster that is not there.

mod file;
mod run;

use crate::{picture::PictureArgs, request::bad};
use anymesh::{
    Result,
    show::{Figure, Show, Table},
    simulate::{Case, Comparison, Found, compare, estimate, machines, presets, search},
};
use clap::Args;
use serde_json::{Value, json};
use std::io::Write;

/// Arguments of `anymesh simulate`.
#[derive(Args)]
pub(crate) struct SimulateCommand {
    /// A model by its name (--list has them), a training run as `anymesh train` reads it, whose real
    /// step then runs without values, or a TOML or JSON file with model, machine, layout and ranks.
    #[arg(value_name = "MODEL", required_unless_present = "list")]
    what: Option<String>,
    /// GPUs; of a training run as many as its mesh has, if nothing is said. Its dp is what is left.
    #[arg(long)]
    ranks: Option<usize>,
    /// The machine: a100-80, h100, h200 or h800; h100 if nothing is said.
    #[arg(long)]
    machine: Option<String>,
    /// A setting of the layout such as tp=8, or one such as model.layers=4 or
    /// machine.coefficients.products=0.5; may be given several times. What is not set is 1, and dp what
    /// is left of the ranks. Of a training run its own settings, such as mesh.zero=1.
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Look for the best layouts among those that have what is set, and say why they are. So it is
    /// also if no axis is set. Each is then run without values, and compared.
    #[arg(long)]
    search: bool,
    /// How many layouts a search tells.
    #[arg(long, default_value_t = 3)]
    best: usize,
    /// Run the real step of the layout without values, and compare it with closed forms.
    #[arg(long)]
    real: bool,
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
        let what = self.what.as_deref().unwrap_or_default();
        let file = match file::read(what)? {
            Some(file::Read::Run(run)) => return self.training(what, &run),
            Some(file::Read::Case(file)) => file,
            None => json!({"model": what}),
        };
        let case = self.case(file)?;
        if self.search || !case.is_laid_out() {
            let mut limits = case.limits();
            limits.best = self.best.max(1);
            let mut found = told(search(&case.model, &case.machine, case.ranks, &limits))?;
            for ranked in &mut found.ranked {
                let layout = &ranked.estimate.layout;
                let real = run::of_numbers(&case.model, &case.machine, layout);
                ranked.real = Some(real.map(|r| r.estimate).map_err(|e| e.to_string()));
            }
            return self.tell_found(&found);
        }
        told(case.layout.check(&case.model, case.ranks))?;
        let step = told(estimate(&case.model, &case.machine, &case.layout))?;
        if self.real {
            let real = run::of_numbers(&case.model, &case.machine, &case.layout)?;
            return self.tell_real(&real, Some(compare(&step, &real.estimate)));
        }
        if self.picture.write(|| vec![step.figure()])? {
            return Ok(());
        }
        match self.json {
            true => print(&format!("{}\n", told(step.to_json())?)),
            false => print(&step.to_string()),
        }
        Ok(())
    }

    fn tell_found(&self, found: &Found) -> Result<()> {
        let figures = || {
            let each = found.ranked.iter().map(|ranked| {
                let real = match &ranked.real {
                    Some(Ok(real)) => vec![compare(&ranked.estimate, real).figure()],
                    _ => vec![],
                };
                [vec![ranked.estimate.figure()], real].concat()
            });
            each.flatten().collect()
        };
        if self.picture.write(figures)? {
            return Ok(());
        }
        match self.json {
            true => print(&format!("{}\n", told(found.to_json())?)),
            false => print(&found.to_string()),
        }
        Ok(())
    }

    /// A step that was run, and closed forms beside it where there are any.
    fn tell_real(&self, step: &run::Step, beside: Option<Comparison>) -> Result<()> {
        let figures = || {
            let mut all: Vec<Figure> = vec![run::figure(step)];
            all.extend(beside.as_ref().map(Show::figure));
            all
        };
        if self.picture.write(figures)? {
            return Ok(());
        }
        if self.json {
            let mut json: Value = step.to_json().map_err(|e| bad(e.to_string()))?;
            if let Some(beside) = beside {
                json["comparison"] = json!(beside.rows);
            }
            print(&format!("{json}\n"));
            return Ok(());
        }
        print(&step.to_string());
        if let Some(beside) = beside {
            print(&format!("\nbeside closed forms\n{beside}"));
        }
        Ok(())
    }

    /// The file or the preset, with what the options say over it.
    fn case(&self, mut file: Value) -> Result<Case> {
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
