//! `anymesh bench`: kernels and training steps of this machine, beside the peers that are installed.

mod peers;
mod table;

use anymesh::Device;
use anymesh_bench::{
    kernels::{self, Row, Sizes},
    step::{Measured, Spec},
};
use clap::Args;
use peers::Installed;
use serde::Serialize;
use std::{collections::BTreeMap, process::ExitCode};

/// Arguments of `anymesh bench`.
#[derive(Args)]
#[command(
    after_help = "Peers run on the CPU, or on CUDA if the device is a CUDA one; PyTorch also for `wgpu`, if it finds a GPU. Steps begin with the same weights and see the same tokens everywhere, so their losses can be compared."
)]
pub(crate) struct Bench {
    /// The device: `cpu`, `wgpu`, `cuda:0`, as `anymesh doctor` lists them; the default one if not
    /// given.
    #[arg(long)]
    device: Option<String>,
    /// Only rows whose name contains this text, such as `attention`, `bf16` or `step`.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// The training step: a model (gpt2, llama, small, tiny), then `bf16` or `f32`, and texts x tokens. On
    /// a CPU `small f32` if not given, else `gpt2 bf16`.
    #[arg(long, value_name = "WORDS")]
    step: Option<String>,
    /// How many steps are measured.
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: usize,
    /// The Python that has the peers.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,
    /// Measure no peers.
    #[arg(long)]
    alone: bool,
    /// Everything once at tiny sizes, to see that it runs. Times mean nothing.
    #[arg(long)]
    tiny: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A kernel, and how long it takes elsewhere.
#[derive(Serialize)]
struct KernelRow {
    #[serde(flatten)]
    row: Row,
    /// Microseconds, by the peer.
    peers: BTreeMap<String, f64>,
}

/// A step, and the same elsewhere.
#[derive(Serialize)]
struct StepRow {
    title: String,
    ours: Measured,
    peers: BTreeMap<String, Result<Measured, String>>,
}

/// All of it.
#[derive(Serialize)]
struct Report {
    device: String,
    description: String,
    /// GB/s.
    copy_rate: f64,
    installed: Installed,
    kernels: Vec<KernelRow>,
    steps: Vec<StepRow>,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Bench {
    pub(crate) fn run(&self) -> ExitCode {
        match self.report() {
            Ok(report) => {
                match self.json {
                    true => println!("{}", serde_json::json!(report)),
                    false => print!("{}", table::text(&report)),
                }
                ExitCode::SUCCESS
            }
            Err(message) => {
                eprintln!("{message}");
                ExitCode::FAILURE
            }
        }
    }

    fn report(&self) -> Result<Report, String> {
        let device = match &self.device {
            Some(name) => anymesh::device(name),
            None => anymesh::default_device(),
        };
        let device = device.map_err(text)?;
        let sizes = match self.tiny {
            true => Sizes::Tiny,
            false => Sizes::of(&device),
        };
        let words = match (&self.step, sizes) {
            (Some(words), _) => words.as_str(),
            (None, Sizes::Tiny) => "tiny f32",
            (None, Sizes::Cpu) => "small f32",
            (None, Sizes::Gpu) => "gpt2 bf16",
        };
        let words: Vec<&str> = words.split_whitespace().collect();
        let spec = Spec::parse(&words).map_err(text)?;
        let title = format!("step {spec}");
        self.check(&device, sizes, &title)?;
        let installed = match self.alone {
            true => Installed::nothing(),
            false => Installed::find(&self.python),
        };
        let copy_rate = kernels::copy_rate(&device, sizes).map_err(text)?;
        let mut rows = vec![];
        let filter = self.filter.as_deref();
        kernels::measure(&device, sizes, filter, &mut |row| {
            self.tell(&row.name);
            rows.push(row);
        })
        .map_err(text)?;
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        let mut times = BTreeMap::new();
        for peer in installed.of_kernels(device.name()) {
            if names.is_empty() {
                continue;
            }
            self.tell(peer.name());
            match peers::kernels(peer, &self.python, device.name(), &names) {
                Ok(of) => {
                    times.insert(peer.name(), of);
                }
                // What was measured here is told all the same.
                Err(error) => eprintln!("{error}"),
            }
        }
        let kernels = rows
            .into_iter()
            .map(|row| KernelRow {
                peers: (times.iter())
                    .filter_map(|(peer, of)| Some((peer.to_string(), *of.get(&row.name)?)))
                    .collect(),
                row,
            })
            .collect();
        let mut steps = vec![];
        if filter.is_none_or(|text| title.contains(text)) {
            self.tell(&title);
            let ours = spec.measure(&device, self.steps).map_err(text)?;
            let mut peers = BTreeMap::new();
            for (name, peer) in installed.of_steps(device.name(), &spec) {
                self.tell(&name);
                let of = peers::step(peer, &self.python, device.name(), &words, self.steps);
                peers.insert(name, of);
            }
            steps.push(StepRow { title, ours, peers });
        }
        Ok(Report {
            device: device.name().into(),
            description: device.backend().capabilities().description.clone(),
            copy_rate,
            installed,
            kernels,
            steps,
        })
    }

    /// That the filter leaves something.
    fn check(&self, device: &Device, sizes: Sizes, step: &str) -> Result<(), String> {
        let Some(filter) = &self.filter else {
            return Ok(());
        };
        let mut names = kernels::names(device, sizes).map_err(text)?;
        names.push(step.into());
        match names.iter().any(|name| name.contains(filter.as_str())) {
            true => Ok(()),
            false => Err(format!(
                "no row has '{filter}' in its name. The rows are:\n  {}",
                names.join("\n  ")
            )),
        }
    }

    /// Says what goes on to who waits.
    fn tell(&self, what: &str) {
        if !self.json && !self.tiny {
            eprintln!("{what}");
        }
    }
}
