//! `anymesh diff-run`: one program in two places, and the first op at which they part.

mod inject;
mod sample;

use anymesh::{
    Device, Mesh,
    checkpoint::reproduction,
    compare::{Compare, Comparison, Tolerance, Trace},
    train::{
        Error, Result,
        config::{RunConfig, read},
    },
};
use clap::Args;
use inject::Injection;
use serde_json::json;
use std::{path::PathBuf, process::ExitCode};

/// Runs a program in two places and names the first op at which they part.
///
/// The program is a training run, or a step of a small transformer where no configuration is given.
/// Ends with 0 where all values agree, 1 where they do not, 2 where something else is wrong.
#[derive(Args)]
pub(crate) struct DiffRun {
    /// A configuration of `anymesh train`, TOML.
    config: Option<PathBuf>,
    /// A setting over those of the file: optimizer.lr=3e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    set: Vec<String>,
    /// The first place, which says what is right: a device, or a device and the axes of a simulated
    /// mesh, such as cpu:tp=2.
    #[arg(long, default_value = "cpu", value_name = "PLACE")]
    a: String,
    /// The second place.
    #[arg(long, default_value = "cpu:dp=2, tp=2", value_name = "PLACE")]
    b: String,
    /// Steps of training.
    #[arg(long, default_value_t = 1)]
    steps: u32,
    /// How far values may be apart, as a share of the largest in a result; by dtype where it is not
    /// given.
    #[arg(long, value_name = "SHARE")]
    relative: Option<f64>,
    /// How far values may be apart beside that.
    #[arg(long, value_name = "DIFFERENCE")]
    absolute: Option<f64>,
    /// The same bits, and nothing less.
    #[arg(long, conflicts_with_all = ["relative", "absolute"])]
    bits: bool,
    /// Let the second run go its own way instead of on from the first one's values after each op.
    #[arg(long)]
    free: bool,
    /// Find all ops that differ, not the first alone.
    #[arg(long)]
    all: bool,
    /// Write the first op that differs with its operands to this file, for `anymesh replay`.
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,
    /// Run the first place alone, and write hashes of all values to this file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["against", "dump"])]
    record: Option<PathBuf>,
    /// Compare the second place, bit by bit, with a file of hashes.
    #[arg(long, value_name = "FILE", conflicts_with = "dump")]
    against: Option<PathBuf>,
    /// Put a fault into the second run, to see how it is found: element, nan or reduction, and at
    /// which launch or reduction of the run, such as nan:300.
    #[arg(long, value_name = "KIND:NUMBER")]
    inject: Option<Injection>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What is run.
enum Program {
    Training(Box<RunConfig>),
    Sample,
}

impl DiffRun {
    pub(crate) fn run(&self) -> ExitCode {
        match self.outcome() {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                match self.json {
                    true => println!("{}", json!({ "ok": false, "error": error.to_string() })),
                    false => eprintln!("{error}"),
                }
                ExitCode::from(2)
            }
        }
    }

    /// Whether the runs agree.
    fn outcome(&self) -> Result<bool> {
        let compare = self.settings()?;
        if let Some(path) = &self.record {
            let mesh = place(&self.a)?;
            let program = self.program(&mesh)?;
            let trace = compare.record(|mesh: &Mesh| self.step(&program, mesh), &mesh)?;
            std::fs::write(path, trace.to_text())
                .map_err(|error| Error::io(path, "write", &error))?;
            match self.json {
                true => println!(
                    "{}",
                    json!({ "ok": true, "values": trace.len(), "hash": format!("{:016x}", trace.hash()) })
                ),
                false => println!(
                    "{} values of {} in {}, hash {:016x}",
                    trace.len(),
                    trace.place,
                    path.display(),
                    trace.hash()
                ),
            }
            return Ok(true);
        }
        let (b, fault) = match &self.inject {
            Some(injection) => {
                let (device, axes) = device_and_axes(&self.b)?;
                let (mesh, fault) = injection.put(&device, axes)?;
                (mesh, Some(fault))
            }
            None => (place(&self.b)?, None),
        };
        let program = self.program(&b)?;
        let step = |mesh: &Mesh| self.step(&program, mesh);
        let found = match &self.against {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|error| Error::io(path, "read", &error))?;
                compare.against(&Trace::parse(&text)?, step, &b)?
            }
            None => compare.run(step, &place(&self.a)?, &b)?,
        };
        let dumped = self.dump(&found)?;
        let injected = fault.map(|fault| fault.told());
        if self.json {
            let mut out = found.to_json();
            out["ok"] = true.into();
            if let Some(injected) = injected {
                out["injected"] = injected.into();
            }
            if self.dump.is_some() {
                out["dumped"] = dumped.is_some().into();
            }
            println!("{out}");
        } else {
            if let Some(injected) = injected {
                println!("{injected}");
            }
            println!("{found}");
            if let Some(dumped) = dumped {
                println!("  {dumped}");
            } else if self.dump.is_some() && !found.is_same() {
                println!("  no file was written: what differs is not a call of one op");
            }
        }
        Ok(found.is_same())
    }

    fn settings(&self) -> Result<Compare> {
        let not_a_share = |x: f64| !(x.is_finite() && x >= 0.0);
        if [self.relative, self.absolute]
            .into_iter()
            .flatten()
            .any(not_a_share)
        {
            let detail = "a tolerance is a number that is not negative";
            return Err(Error::config("--relative, --absolute", detail));
        }
        let tolerance = match (self.bits, self.relative, self.absolute) {
            (true, ..) => Some(Tolerance::BITS),
            (_, None, None) => None,
            (_, relative, absolute) => Some(Tolerance {
                relative: relative.unwrap_or(0.0),
                absolute: absolute.unwrap_or(0.0),
            }),
        };
        Ok(Compare {
            tolerance,
            in_step: !self.free,
            all: self.all,
            reproduce: self.dump.is_some(),
            ..Compare::default()
        })
    }

    /// The program, with batches that are the same in both places.
    fn program(&self, mesh: &Mesh) -> Result<Program> {
        let Some(path) = &self.config else {
            return Ok(Program::Sample);
        };
        let mut config = read::<RunConfig>(path, &self.set)?;
        // Nothing is left behind by a comparison, and nothing is done beside the steps.
        config.run.save.folder = None;
        config.run.evaluate.every = 0;
        config.evaluation = vec![];
        let dp = mesh.axis("dp").map_or(1, |axis| mesh.size(axis)) as u64;
        let batch = config.batch.spec(dp).solve()?;
        config.batch.global = Some(batch.global);
        config.batch.accumulation = Some(batch.accumulation);
        config.batch.micro = None;
        Ok(Program::Training(Box::new(config)))
    }

    fn step(&self, program: &Program, mesh: &Mesh) -> Result<()> {
        match program {
            Program::Sample => Ok(sample::train(mesh, self.steps)?),
            Program::Training(config) => {
                let mut prepared = config.prepare(mesh)?;
                for _ in 0..self.steps {
                    if prepared.trainer.step(&mut prepared.feed)?.is_none() {
                        break;
                    }
                }
                Ok(())
            }
        }
    }

    /// Writes the first finding to a file; what to do with it.
    fn dump(&self, found: &Comparison) -> Result<Option<String>> {
        let (Some(path), Some(alone)) = (&self.dump, &found.reproduction) else {
            return Ok(None);
        };
        reproduction::save(path, alone)?;
        let path = path.display();
        let cpu = anymesh::device("cpu")?;
        Ok(Some(
            match anymesh::conformance::replay::check(alone, &cpu) {
                Ok(()) => format!("`anymesh replay {path}` calls it alone"),
                Err(error) => format!(
                    "its operands and results are in {path}, but it cannot be called alone: {error}"
                ),
            },
        ))
    }
}

/// A device, and the axes of a mesh on it: `cpu`, `cpu:tp=2`, `cuda:0:dp=2, tp=2`.
pub(crate) fn device_and_axes(text: &str) -> anymesh::Result<(Device, Option<&str>)> {
    match text.rsplit_once(':') {
        Some((device, axes)) if axes.contains('=') => Ok((anymesh::device(device)?, Some(axes))),
        _ => Ok((anymesh::device(text)?, None)),
    }
}

/// The mesh that a text names.
pub(crate) fn place(text: &str) -> anymesh::Result<Mesh> {
    match device_and_axes(text)? {
        (device, Some(axes)) => Mesh::new(axes, &device),
        (device, None) => Ok(Mesh::single(&device)),
    }
}
