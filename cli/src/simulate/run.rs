//! Steps of training runs that are run without values.

use super::{SimulateCommand, file::Run, print, told};
use crate::request::bad;
use anymesh::{
    Result,
    show::{Figure, Show, Table, bytes, seconds},
    simulate::{Case, Layout, Machine, Model, compare, estimate, machine_with, search},
    train::{
        config::{self, ModelChoice, RunConfig},
        measure::{self, Measured, laid_out, measure, numbers, run_of},
        models::ModelFiles,
    },
};
use serde_json::json;

pub(super) use anymesh::train::measure::Measured as Step;

fn said<T>(result: anymesh::train::Result<T>) -> Result<T> {
    result.map_err(|error| bad(error.to_string()))
}

/// The real step of a model that is numbers, if it can be built.
pub(super) fn of_numbers(model: &Model, machine: &Machine, layout: &Layout) -> Result<Measured> {
    let run = said(run_of(model, layout))?;
    let mut step = said(measure(&run, None, machine))?;
    step.estimate.model.clone_from(&model.name);
    Ok(step)
}

/// Settings of the layout, of the machine, and of the run.
struct Sets {
    layout: Vec<String>,
    machine: Vec<String>,
    run: Vec<String>,
}

impl SimulateCommand {
    /// A training run: its own layout, or a search over others.
    pub(super) fn training(&self, what: &str, file: &Run) -> Result<()> {
        let sets = self.sets()?;
        let name = self.machine.as_deref().unwrap_or("h100");
        let machine = told(machine_with(name, &sets.machine))?;
        let mut own = sets.run.clone();
        if !file.has_data {
            own.push("data=[]".into());
        }
        let wrong = |error: anymesh::train::Error| bad(format!("{what}: {error}"));
        let run: RunConfig = config::parse(&file.text, &own).map_err(wrong)?;
        if self.search {
            return self.search_run(&run, &machine, &sets.layout);
        }
        if let Some(set) = sets.layout.first() {
            return Err(bad(format!(
                "{set} is of a layout: a training run says it as mesh.axes, mesh.zero, batch.micro and so on; --search takes it as something to keep to"
            )));
        }
        let step = measure(&run, self.ranks, &machine).map_err(wrong)?;
        let closed = said(model_of(&run))
            .ok()
            .and_then(|model| estimate(&model, &machine, &step.estimate.layout).ok());
        let beside = match self.real || self.json {
            true => closed.map(|closed| compare(&closed, &step.estimate)),
            false => None,
        };
        self.tell_real(&step, beside)
    }

    fn sets(&self) -> Result<Sets> {
        let mut sets = Sets {
            layout: vec![],
            machine: vec![],
            run: vec![],
        };
        let fields = json!(Layout::default());
        for set in &self.set {
            let name = set.split('=').next().unwrap_or_default().trim();
            let known = fields.get(name.strip_prefix("layout.").unwrap_or(name));
            if let Some(rest) = set.strip_prefix("machine.") {
                sets.machine.push(rest.into());
            } else if known.is_some() && name != "schedule" || name.starts_with("layout.") {
                sets.layout.push(set.clone());
            } else {
                sets.run.push(set.clone());
            }
        }
        Ok(sets)
    }

    fn search_run(&self, run: &RunConfig, machine: &Machine, pins: &[String]) -> Result<()> {
        let model = said(model_of(run))?;
        let (axes, notes) = said(measure::for_ranks(&run.mesh.axes, self.ranks))?;
        let ranks: usize = axes.iter().map(|a| a.1).product();
        let layout = said(measure::layout_of(run, &axes, &run.pipeline.schedule))?;
        let file = json!({
            "model": model, "machine": machine, "ranks": ranks,
            "layout": {"sequence": layout.sequence, "batch": layout.batch, "regather": false},
        });
        let case = told(Case::new(file, pins))?;
        let mut limits = case.limits();
        limits.best = self.best.max(1);
        let mut found = told(search(&case.model, machine, ranks, &limits))?;
        for ranked in &mut found.ranked {
            let there = laid_out(run, &model, &ranked.estimate.layout);
            let real = there.and_then(|run| measure(&run, None, machine));
            ranked.real = Some(real.map(|r| r.estimate).map_err(|e| e.to_string()));
        }
        if !self.json && !notes.is_empty() && axes.len() > 1 {
            print("the axes of the file are not kept: a search takes others\n");
        }
        self.tell_found(&found)
    }
}

/// The model of a run as numbers.
fn model_of(run: &RunConfig) -> anymesh::train::Result<Model> {
    match run.model_choice()? {
        ModelChoice::New(config) => numbers(&config),
        ModelChoice::Trained(path) => numbers(&ModelFiles::open(&path)?.config()?),
    }
}

/// The timeline, and who does what.
pub(super) fn figure(step: &Measured) -> Figure {
    let heads = ["op", "", "axes", "times", "TFLOP", "bytes", "seconds"];
    let mut table = Table::new(
        "what the busiest rank does, before anything is hidden",
        &heads,
    )
    .numbers(&[3, 4, 5, 6]);
    for (item, amount) in step.longest() {
        table.row([
            item.op.clone(),
            item.kind.clone(),
            item.axes.clone(),
            format!("{:.0}", amount.count),
            format!("{:.1}", amount.operations / 1e12),
            bytes(amount.bytes),
            seconds(amount.seconds),
        ]);
    }
    let mut figure = step.estimate.figure().table(table);
    for note in &step.notes {
        figure = figure.note(note.clone());
    }
    figure
}
