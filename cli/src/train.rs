//! `anymesh train`: a run from a configuration file.

use anymesh::{
    Mesh,
    cluster::Cluster,
    train::{
        Error, Result, Summary,
        config::{Prepared, RunConfig, print, read},
        log::{Logger, Progress, Status},
        trainer::{Event, Finished, Task},
    },
};
use clap::Args;
use std::{path::PathBuf, process::ExitCode, time::Duration};

/// Trains a language model as a configuration says, alone or as one of many processes.
#[derive(Args)]
pub(crate) struct Train {
    /// The configuration, TOML.
    config: PathBuf,
    /// A setting over those of the file: optimizer.lr=3e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print the whole configuration with its defaults, and do nothing else.
    #[arg(long)]
    print_config: bool,
    /// Print the parameters with their layouts before the first step.
    #[arg(long)]
    summary: bool,
    /// Peak operations a second of all devices together, for the share that is reached of it.
    #[arg(long, value_name = "FLOPS")]
    peak: Option<f64>,
}

impl Train {
    pub(crate) fn run(&self) -> ExitCode {
        let config = match read::<RunConfig>(&self.config, &self.set) {
            Ok(config) => config,
            Err(error) => return failed(&error.to_string()),
        };
        if self.print_config {
            return match print(&config) {
                Ok(text) => {
                    print!("{text}");
                    ExitCode::SUCCESS
                }
                Err(error) => failed(&error.to_string()),
            };
        }
        let cluster = match anymesh::init() {
            Ok(cluster) => cluster,
            Err(error) => return failed(&error.to_string()),
        };
        // An error of one process ends all.
        let outcome = cluster.run(|cluster| self.train(&config, cluster));
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failed(&error.to_string()),
        }
    }

    fn train(&self, config: &RunConfig, cluster: &Cluster) -> Result<()> {
        let mesh = mesh(&config.mesh.axes, cluster)?;
        let Prepared {
            trainer,
            mut feed,
            mut evaluation,
            batch,
            samples,
            ..
        } = config.prepare(&mesh)?;
        let stopped = anymesh::cluster::stop::stop_requested;
        let mut trainer = trainer.stop_when(stopped);
        let resumed = trainer.resume()?;

        let first = mesh.is_first();
        let steps = config.run.steps;
        let progress = first.then(|| Progress::new(trainer.steps_done(), steps));
        let say = |text: String| {
            if let Some(progress) = &progress {
                progress.say(&text);
            }
        };
        let model = trainer.task.model();
        if self.summary {
            say(Summary::of(model).to_string());
        }
        say(format!(
            "{} parameters on {mesh}, {samples} samples, {} sequences a step ({} x {} x {})",
            model.count(),
            batch.global,
            batch.micro,
            batch.dp,
            batch.accumulation
        ));
        let split = trainer.task.model.split();
        if split.stages() > 1 {
            let layers = (0..split.stages()).map(|s| split.layers(s).len().to_string());
            let layers = layers.collect::<Vec<_>>().join(", ");
            say(format!("{} stages of {layers} layers", split.stages()));
        }
        if let Some(path) = resumed {
            say(format!(
                "goes on from {} with sample {}",
                path.display(),
                trainer.consumed()
            ));
        }
        let logs = config.logs.clone();
        let logs = logs.or_else(|| Some(config.run.save.folder.as_ref()?.join("logs")));
        let mut logger = match logs.filter(|_| first) {
            Some(folder) => Some(Logger::new(folder)?),
            None => None,
        };
        let mut watch = Watch {
            operations: trainer.task.operations(),
            peak: self.peak,
            log_every: config.run.log_every.max(1),
            steps,
            mesh: &mesh,
            progress,
            failure: None,
            rate: config.optimizer.lr(),
        };
        let evaluation = evaluation.as_mut().map(|e| e as _);
        let outcome = trainer.run(&mut feed, evaluation, &mut |event| {
            watch.event(event, logger.as_mut());
        });
        let finished = outcome?;
        if let Some(progress) = &watch.progress {
            progress.finish();
            progress.say(&match finished {
                Finished::Done => format!("done after {} steps", trainer.steps_done()),
                Finished::NoMoreData => format!(
                    "the data ended after {} steps and {} samples",
                    trainer.steps_done(),
                    trainer.consumed()
                ),
                Finished::Stopped => format!(
                    "stopped after step {}; the same command goes on from there",
                    trainer.steps_done()
                ),
            });
        }
        match watch.failure {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// What is shown and logged of a run.
struct Watch<'m> {
    operations: Option<f64>,
    peak: Option<f64>,
    log_every: u64,
    steps: u64,
    mesh: &'m Mesh,
    progress: Option<Progress>,
    /// The first log that could not be written. A run is worth more than its log.
    failure: Option<Error>,
    rate: f64,
}

impl Watch<'_> {
    fn event(&mut self, event: &Event<'_>, logger: Option<&mut Logger>) {
        let (step, scalars): (u64, Vec<(&str, f64)>) = match event {
            Event::Step { report, time } => {
                let status = self.status(report.loss, report.count, *time);
                if let Some(progress) = &mut self.progress {
                    progress.step(report.step, &status);
                    if report.skipped {
                        progress.say(&format!(
                            "step {} was skipped: loss {}, norm {}, samples {}..{}",
                            report.step,
                            report.loss,
                            report.norm,
                            report.samples.start,
                            report.samples.end
                        ));
                    }
                }
                let due = report.step.is_multiple_of(self.log_every);
                if !due && !report.skipped && report.step != self.steps {
                    return;
                }
                let mut scalars = vec![
                    ("loss", report.loss),
                    ("gradient_norm", report.norm),
                    ("learning_rate", self.rate * report.rate),
                    ("tokens_per_second", status.tokens_per_second),
                    ("step_seconds", time.as_secs_f64()),
                    ("samples", report.samples.end as f64),
                ];
                scalars.extend(status.mfu.map(|mfu| ("mfu", mfu)));
                scalars.extend(status.memory.map(|bytes| ("memory_bytes", bytes as f64)));
                scalars.extend(&report.more);
                if report.skipped {
                    scalars.push(("skipped_from_sample", report.samples.start as f64));
                }
                (report.step, scalars)
            }
            Event::Evaluated { step, loss, best } => {
                self.say(&format!(
                    "step {step}: evaluation loss {loss:.4}{}",
                    if *best { ", the lowest so far" } else { "" }
                ));
                (*step, vec![("evaluation_loss", *loss)])
            }
            Event::SaveFailed { step, error } => {
                self.say(&format!(
                    "step {step}: the checkpoint was not written, the run goes on: {error}"
                ));
                return;
            }
            _ => return,
        };
        if let Some(Err(error)) = logger.map(|logger| logger.scalars(step, &scalars))
            && self.failure.is_none()
        {
            self.say(&format!(
                "the log was not written, the run goes on: {error}"
            ));
            self.failure = Some(error);
        }
    }

    fn say(&self, text: &str) {
        if let Some(progress) = &self.progress {
            progress.say(text);
        }
    }

    fn status(&self, loss: f64, count: f64, time: Duration) -> Status {
        let tokens_per_second = count / time.as_secs_f64().max(1e-9);
        let peak = self.peak.filter(|peak| *peak > 0.0);
        let used = self.operations.zip(peak);
        Status {
            loss,
            tokens_per_second,
            mfu: used.map(|(each, peak)| tokens_per_second * each / peak),
            memory: (0..self.mesh.addressable().len())
                .map(|i| self.mesh.device(i).memory().in_use)
                .max(),
        }
    }
}

/// The mesh of a run: as told, or a rank for each process.
fn mesh(axes: &str, cluster: &Cluster) -> Result<Mesh> {
    match (axes, cluster.size()) {
        ("", 1) => Ok(Mesh::single(&cluster.devices()[0])),
        ("", processes) => Ok(Mesh::new(&format!("dp={processes}"), cluster)?),
        (axes, _) => Ok(Mesh::new(axes, cluster)?),
    }
}

fn failed(error: &str) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}
