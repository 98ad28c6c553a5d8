//! `anymesh explain`: where the bytes of a step's plan go and why, and how two plans differ.

use crate::{picture::PictureArgs, request::bad};
use anymesh::{Result, show::Show, spmd::StepPlan};
use clap::Args;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Arguments of `anymesh explain`.
#[derive(Args)]
pub(crate) struct Explain {
    /// A plan as JSON, as `StepPlan::to_json` gives it.
    plan: PathBuf,
    /// Explain the step of this number alone.
    #[arg(long, value_name = "N", conflicts_with = "diff")]
    op: Option<usize>,
    /// The steps that receive most, so many of them.
    #[arg(long, value_name = "K", default_value_t = 10)]
    top: usize,
    /// Another plan, to tell where it differs.
    #[arg(long, value_name = "PLAN")]
    diff: Option<PathBuf>,
    #[command(flatten)]
    picture: PictureArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn read(path: &Path) -> Result<StepPlan> {
    let wrong = |e: &dyn std::fmt::Display| bad(format!("{}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| wrong(&e))?;
    let value: Value = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
    StepPlan::from_json(&value)
}

impl Explain {
    pub(crate) fn run(&self) -> Result<()> {
        let plan = read(&self.plan)?;
        if let Some(other) = &self.diff {
            let other = read(other)?;
            let diff = plan.diff(&other);
            if self.picture.write(|| vec![diff.figure()])? {
                return Ok(());
            }
            match self.json {
                true => println!("{:#}", diff.to_json()),
                false => println!("{diff}"),
            }
            return Ok(());
        }
        let explained = match self.op {
            Some(number) => plan.explain_step(number),
            None => plan.explain(self.top),
        };
        if let (Some(number), []) = (self.op, &explained.steps[..]) {
            return Err(bad(format!(
                "the plan has {} steps, there is no number {number}",
                plan.steps().len()
            )));
        }
        let figures = || match self.op {
            Some(_) => vec![explained.figure()],
            None => vec![explained.figure(), plan.figure()],
        };
        if self.picture.write(figures)? {
            return Ok(());
        }
        match self.json {
            true => println!("{:#}", explained.to_json()),
            false => println!(
                "{explained}\nwith the plan: {}\nwithout:       {}",
                plan.totals(),
                plan.eager()
            ),
        }
        Ok(())
    }
}
