//! `anymesh doctor`: what is here, does it work, and what to do if not.

use anymesh::conformance::{
    cases,
    gradients::{Check, Table},
    indexing, sweep,
};
use anymesh::{DType, Device, FoundDevice, Result, ops};
use clap::Args;
use std::{collections::BTreeMap, process::ExitCode, time::Instant};

/// Arguments of `anymesh doctor`.
#[derive(Args)]
pub(crate) struct Doctor {
    /// Run the whole conformance suite on every device and print the table of ops and devices with
    /// the worst errors.
    #[arg(long)]
    parity: bool,
    /// Run every op under many shardings of its operands on simulated meshes of every device, and
    /// compare with the unsharded results.
    #[arg(long)]
    sharding: bool,
    /// Check every op's gradient against finite differences on the CPU and, on every device,
    /// against the CPU.
    #[arg(long)]
    gradients: bool,
    /// Run this many random index expressions on every device (get, set, accumulate and their
    /// gradients) and compare with a model of NumPy.
    #[arg(long, value_name = "COUNT")]
    indexing: Option<usize>,
    /// With --indexing: also index a tensor of more than 2^31 elements, which needs 12 GiB on the
    /// device.
    #[arg(long, requires = "indexing")]
    large: bool,
    /// With --sharding: the most cases (ways in which the operands lie) of one sample of an op on
    /// one mesh, 40 if nothing is said.
    #[arg(long, requires = "sharding", conflicts_with = "full")]
    limit: Option<usize>,
    /// With --sharding: every case there is. With three operands and three axes these are millions;
    /// --filter helps.
    #[arg(long, requires = "sharding")]
    full: bool,
    /// With --sharding: pick the cases that this number picked before. Every run prints its own.
    #[arg(long, requires = "sharding")]
    seed: Option<u64>,
    /// With --sharding: a table of how many cases ran and how many there are, op by op.
    #[arg(long, requires = "sharding")]
    coverage: bool,
    /// Measure products, memory, launches and the transport within a process, and write the cost model
    /// of this machine to a file (`-` prints it). Of --device, or of the default one.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["parity", "sharding", "gradients", "indexing"])]
    measure: Option<String>,
    /// Only this device (as listed), also a software one.
    #[arg(long)]
    device: Option<String>,
    /// Only ops or families whose name contains this text (with --parity, --sharding or
    /// --gradients).
    #[arg(long)]
    filter: Option<String>,
}

/// Cases of the quick self-test: one small case of each op.
fn self_test_cases() -> Vec<cases::Case> {
    let mut first = BTreeMap::new();
    for case in cases::cases() {
        if case.dtype == DType::F32 || case.dtype == DType::I32 {
            first.entry((case.family, case.op)).or_insert(case);
        }
    }
    first.into_values().collect()
}

fn describe(found: &FoundDevice, device: &Device) {
    let caps = device.backend().capabilities();
    let missing: Vec<&str> = DType::ALL
        .into_iter()
        .filter(|d| !caps.dtypes.contains(d))
        .map(DType::name)
        .collect();
    println!("  {:<10} {}", found.name, found.description);
    if !missing.is_empty() {
        println!("             lacks {}", missing.join(" "));
    }
    if !caps.f64_math && caps.dtypes.contains(&DType::F64) {
        println!("             f64: arithmetic only, no exp, log, sin ...");
    }
    if caps.max_buffer_bytes < 1 << 40 {
        println!(
            "             tensors up to {:.1} GiB",
            caps.max_buffer_bytes as f64 / f64::from(1 << 30)
        );
    }
}

fn self_test(device: &Device, oracle: &Device) -> bool {
    let start = Instant::now();
    let (mut passed, mut failures) = (0, Vec::new());
    for case in self_test_cases() {
        match pollster::block_on(cases::check(&case, device, oracle)) {
            cases::Outcome::Fail(message) => failures.push(format!("{case:?}: {message}")),
            _ => passed += 1,
        }
    }
    println!(
        "             self-test: {passed} ops right, {} wrong, {:.1} s",
        failures.len(),
        start.elapsed().as_secs_f64()
    );
    for failure in &failures {
        println!("             WRONG {failure}");
    }
    failures.is_empty()
}

fn open(found: &FoundDevice) -> Result<Device> {
    match &found.problem {
        Some(problem) => Err(problem.clone()),
        None => anymesh::device(&found.name),
    }
}

impl Doctor {
    pub(crate) fn run(&self) -> ExitCode {
        if let Some(file) = &self.measure {
            return crate::finish(self.measure(file));
        }
        println!(
            "anymesh {}: {} ops",
            env!("CARGO_PKG_VERSION"),
            ops::catalog().len()
        );
        let found: Vec<FoundDevice> = match &self.device {
            None => anymesh::found(),
            Some(name) => vec![FoundDevice {
                name: name.clone(),
                description: String::new(),
                software: false,
                problem: None,
            }],
        };
        let oracle = match anymesh::device("cpu") {
            Ok(oracle) => oracle,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        };
        let mut healthy = true;
        let mut devices = Vec::new();
        for item in &found {
            match open(item) {
                Ok(device) => {
                    describe(item, &device);
                    if self.sharding {
                        healthy &= self.sweep(&device);
                    } else if let Some(count) = self.indexing {
                        healthy &= self.index(&device, count);
                    } else if !self.parity && !self.gradients {
                        healthy &= self_test(&device, &oracle);
                    }
                    devices.push(device);
                }
                Err(error) => {
                    println!("  {:<10} {error}", item.name);
                    healthy &= self.device.is_none();
                }
            }
        }
        if self.gradients {
            healthy &= self.gradient_table(&devices, &oracle);
        } else if self.parity {
            healthy &= self.parity_table(&devices, &oracle);
        } else if let Ok(device) = anymesh::default_device() {
            println!("default device: {device}");
            healthy &= crate::processes::report();
        }
        if healthy {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }

    /// Writes the cost model of a device to a file.
    fn measure(&self, file: &str) -> Result<()> {
        let device = match &self.device {
            Some(name) => anymesh::device(name)?,
            None => anymesh::default_device()?,
        };
        let text = crate::measure::measure(&device)?.to_text();
        let text = format!("# Measured on {device}.\n{text}");
        if file == "-" {
            print!("{text}");
            return Ok(());
        }
        std::fs::write(file, text)
            .map_err(|error| crate::request::bad(format!("cannot write {file}: {error}")))
    }

    /// The sharding sweep on one device.
    fn sweep(&self, device: &Device) -> bool {
        let mut options = match sweep::Options::default().with_env() {
            Ok(options) => options,
            Err(error) => {
                println!("             sharding: {error}");
                return false;
            }
        };
        if let Some(filter) = &self.filter {
            options.filter = filter.clone();
        }
        if self.full {
            options.limit = None;
        } else if self.limit.is_some() {
            options.limit = self.limit;
        }
        options.seed = self.seed.unwrap_or(options.seed);
        if device.name() != "cpu" {
            // A GPU takes its work from one queue.
            options.threads = 1;
        }
        let report = sweep::run(device, &options);
        if self.coverage {
            println!("\n{}", report.coverage());
        }
        println!(
            "             sharding: {}",
            report.to_string().replace('\n', "\n             WRONG ")
        );
        report.failed == 0
    }

    /// Random index expressions on one device.
    fn index(&self, device: &Device, count: usize) -> bool {
        let start = Instant::now();
        let report = pollster::block_on(indexing::run(device, count, 1));
        println!(
            "             indexing: {report}, {:.1} s",
            start.elapsed().as_secs_f64()
        );
        let mut healthy = report.failures.is_empty();
        if self.large {
            let result = pollster::block_on(indexing::large(device));
            println!(
                "             more than 2^31 elements: {}",
                result
                    .as_ref()
                    .map_or_else(|e| format!("WRONG {e}"), |()| "right".into())
            );
            healthy &= result.is_ok();
        }
        healthy
    }

    /// Ops by devices, with the worst relative errors.
    fn gradient_table(&self, devices: &[Device], oracle: &Device) -> bool {
        let rows = Check {
            host: oracle,
            differences: true,
            devices,
            samples: usize::MAX,
        }
        .run(self.filter.as_deref().unwrap_or(""));
        println!(
            "\n{}",
            Table {
                rows: &rows,
                devices
            }
        );
        rows.iter().all(|r| r.failures.is_empty())
    }

    /// Ops by devices; each cell is the worst error in units of the op's tolerance (0 exact, 1 just
    /// allowed), `-` unsupported.
    fn parity_table(&self, devices: &[Device], oracle: &Device) -> bool {
        let wanted = |case: &cases::Case| {
            self.filter
                .as_ref()
                .is_none_or(|f| case.op.contains(f.as_str()) || case.family.contains(f.as_str()))
        };
        let tell = |case: &cases::Case, outcome: &cases::Outcome| {
            if let cases::Outcome::Fail(message) = outcome {
                eprintln!("WRONG {case:?}: {message}");
            }
        };
        let reports: Vec<cases::Report> = devices
            .iter()
            .map(|device| pollster::block_on(cases::run(device, oracle, wanted, tell)))
            .collect();
        print!("\n{:<24}", "op");
        devices
            .iter()
            .for_each(|d| print!(" {:>24}", d.name().chars().take(24).collect::<String>()));
        println!();
        let ops: std::collections::BTreeSet<&str> =
            reports.iter().flat_map(|r| r.ops.keys().copied()).collect();
        for op in ops {
            print!("{op:<24}");
            for report in &reports {
                let cell = match report.ops.get(op) {
                    Some(Some(error)) if error.is_finite() => format!("{error:.3}"),
                    Some(Some(_)) => "WRONG".into(),
                    _ => "-".into(),
                };
                print!(" {cell:>24}");
            }
            println!();
        }
        for (device, report) in devices.iter().zip(&reports) {
            println!("\n{device}\n{report}");
        }
        reports.iter().all(|r| r.failures.is_empty())
    }
}
