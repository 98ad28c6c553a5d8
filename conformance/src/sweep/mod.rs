//! The sweep: every op, under shardings of its operands, held against its unsharded result.
//!
//! For each sample of each op of the [registry] and each of [`MESHES`], a *case* is one way in which
//! the operands can lie on the mesh: every axis replicates, cuts any dimension at any position among
//! the cuts it has, or is partial with any reduction that the dtype has. The op runs on the mesh, what
//! *every rank* holds of every result is compared, and so are the gradients, from a gradient of the
//! result that lies in one of its own ways.
//!
//! There are far more cases than a test has time for. Of each sample on each mesh at most
//! [`Options::limit`] run. [`Options::seed`] picks them, so that every run looks at others, and the
//! [`Report`] says how many there are. With `limit: None` all of them run.

mod backward;
mod compare;
mod layouts;
mod partial;
mod report;

pub use compare::values;
pub use partial::lay_out;
pub use report::{Coverage, Report};

use crate::registry::{self, Attrs, Entry, Sample};
use anymesh_core::{Device, Error, Mesh, Place, Result, Tensor};
use backward::Backward;
use compare::{Expected, compare};
use layouts::{Layouts, picked, shardings};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Instant, SystemTime},
};

/// The meshes of the sweep.
pub const MESHES: [&str; 6] = ["a=2", "a=3", "a=4", "a=2, b=2", "a=2, b=3", "a=2, b=2, c=2"];

/// How much to sweep.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most cases of one sample on one mesh; `None` for all there are.
    pub limit: Option<usize>,
    /// Picks the cases where there are more than `limit`. The default is another one in each run;
    /// the report says which, and giving it again runs the same cases again.
    pub seed: u64,
    /// Only ops whose name contains this.
    pub filter: String,
    /// Threads that work at the same time.
    pub threads: usize,
    /// Only every n-th sample.
    pub every: usize,
    /// Whether to go back through every case and compare gradients.
    pub gradients: bool,
}

impl Default for Options {
    fn default() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            limit: Some(40),
            // Short enough to be typed again.
            seed: now.map_or(0, |t| t.as_millis() as u64 % 1_000_000_000),
            filter: String::new(),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            every: 1,
            gradients: true,
        }
    }
}

impl Options {
    /// These options with what the environment says: `ANYMESH_SWEEP_SEED`, `ANYMESH_SWEEP_LIMIT` (a
    /// number, or `all`), `ANYMESH_SWEEP_OPS` (a part of their names) and `ANYMESH_SWEEP_EVERY`.
    pub fn with_env(mut self) -> Result<Self> {
        if let Some(seed) = from_env("ANYMESH_SWEEP_SEED", "a number", |t| t.parse().ok())? {
            self.seed = seed;
        }
        let limit = |text: &str| match text {
            "all" => Some(None),
            _ => text.parse().ok().map(Some),
        };
        if let Some(limit) = from_env("ANYMESH_SWEEP_LIMIT", "a number or `all`", limit)? {
            self.limit = limit;
        }
        if let Some(every) = from_env("ANYMESH_SWEEP_EVERY", "a number above 0", |t| {
            t.parse().ok().filter(|n| *n > 0)
        })? {
            self.every = every;
        }
        if let Ok(filter) = std::env::var("ANYMESH_SWEEP_OPS") {
            self.filter = filter;
        }
        Ok(self)
    }
}

/// A variable of the environment, where it is set; text that is not what it should be is an error.
fn from_env<T>(
    name: &'static str,
    expected: &str,
    read: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>> {
    let Some(text) = std::env::var_os(name) else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    match read(text.trim()) {
        Some(value) => Ok(Some(value)),
        None => Err(Error::Parse {
            what: name,
            text: text.into(),
            expected: expected.into(),
        }),
    }
}

/// Sweeps all ops on a device.
pub fn run(device: &Device, options: &Options) -> Report {
    let start = Instant::now();
    let entries: Vec<&Entry> = registry::entries()
        .iter()
        .filter(|e| e.name.contains(&options.filter))
        .collect();
    let mut total = Report {
        seed: options.seed,
        ..Report::default()
    };
    let meshes = match MESHES
        .iter()
        .map(|axes| Mesh::new(axes, device))
        .collect::<Result<Vec<_>>>()
    {
        Ok(meshes) => meshes,
        Err(error) => {
            total.failed = 1;
            total.failures.push(error.to_string());
            return total;
        }
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let mut report = Report::default();
        while let Some(entry) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut op = Op::new(entry, options, &mut report);
            op.sweep(&meshes);
            let coverage = op.coverage;
            report.ops.push(coverage);
        }
        report
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads.max(1))
            .map(|_| scope.spawn(work))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(report) => total.join(report),
                Err(_) => {
                    total.failed += 1;
                    total.failures.push("a thread of the sweep panicked".into());
                }
            }
        }
    });
    total.ops.sort_by_key(|op| op.op);
    total.failures.sort();
    total.time = start.elapsed();
    total
}

/// Failures of one op that are written out.
const SHOWN: u64 = 3;

/// The sweep of one op.
struct Op<'a> {
    entry: &'static Entry,
    options: &'a Options,
    report: &'a mut Report,
    coverage: Coverage,
    failed: u64,
}

impl<'a> Op<'a> {
    fn new(entry: &'static Entry, options: &'a Options, report: &'a mut Report) -> Self {
        let coverage = Coverage {
            op: entry.name,
            cases: 0,
            possible: 0,
        };
        Self {
            entry,
            options,
            report,
            coverage,
            failed: 0,
        }
    }

    fn sweep(&mut self, meshes: &[Mesh]) {
        let (entry, every) = (self.entry, self.options.every.max(1));
        for (i, sample) in entry.samples().iter().enumerate().step_by(every) {
            for (m, mesh) in meshes.iter().enumerate() {
                // Samples and meshes do not all look at the same corner.
                let mut hasher = DefaultHasher::new();
                (self.options.seed, entry.name, i, m).hash(&mut hasher);
                match self.sample(sample, mesh, hasher.finish()) {
                    Ok(()) => {}
                    Err(Error::Unsupported { .. }) => self.report.unsupported += 1,
                    Err(error) => self.fail(format!("{} sample {i}: {error}", entry.name)),
                }
            }
        }
    }

    fn fail(&mut self, failure: String) {
        self.report.failed += 1;
        self.failed += 1;
        if self.failed <= SHOWN {
            self.report.failures.push(failure);
        }
    }

    /// Notes that there are `possible` cases, and picks some.
    fn pick(&mut self, possible: u64, seed: u64) -> impl ExactSizeIterator<Item = u64> + use<> {
        let picked = picked(possible, self.options.limit, seed);
        self.coverage.possible = self.coverage.possible.saturating_add(possible);
        self.coverage.cases += picked.len() as u64;
        picked
    }

    fn sample(&mut self, sample: &Sample, mesh: &Mesh, seed: u64) -> Result<()> {
        let (entry, device) = (self.entry, mesh.device(0));
        let attrs = Attrs::new(entry, &sample.attrs)?;
        let inputs = sample.make(1, device)?;
        let expected = entry
            .call(&inputs, &attrs, device)?
            .iter()
            .map(Expected::new)
            .collect::<Result<Vec<_>>>()?;
        if sample.inputs.iter().all(Option::is_none) {
            // Nothing to lay out but the result itself.
            let rank = expected.first().map_or(0, |e| e.shape.len());
            let ways = shardings(mesh, rank, &[]);
            for case in self.pick(ways.len() as u64, seed) {
                let place = Place {
                    mesh: mesh.clone(),
                    sharding: ways[case as usize].clone(),
                };
                let actual = call(entry, &[], &attrs, &place);
                self.check(sample, &[], actual, &expected);
            }
            return Ok(());
        }
        let mut layouts = inputs
            .iter()
            .map(|x| Layouts::new(x.as_ref(), mesh))
            .collect::<Result<Vec<_>>>()?;
        let possible = layouts
            .iter()
            .fold(1u64, |n, list| n.saturating_mul(list.len() as u64));
        let place = Place::from(mesh);
        let backward = if self.options.gradients {
            Backward::new(entry, &inputs, &attrs, mesh)?
        } else {
            None
        };
        for case in self.pick(possible, seed) {
            let mut at = case;
            let mut operands = Vec::with_capacity(layouts.len());
            for list in &mut layouts {
                operands.push(list.get((at % list.len() as u64) as usize)?);
                at /= list.len() as u64;
            }
            let actual = call(entry, &operands, &attrs, &place);
            self.check(sample, &operands, actual, &expected);
            if let Some(backward) = &backward {
                self.report.gradients += 1;
                let run = std::panic::AssertUnwindSafe(|| {
                    backward.check(entry, &operands, &attrs, &place, case)
                });
                let result =
                    std::panic::catch_unwind(run).unwrap_or_else(|_| Err("panicked".into()));
                if let Err(why) = result {
                    let types = types(&operands);
                    self.fail(format!(
                        "gradient of {}({types}) {}: {why}",
                        entry.name, sample.attrs
                    ));
                }
            }
        }
        Ok(())
    }

    fn check(
        &mut self,
        sample: &Sample,
        operands: &[Option<Tensor>],
        actual: Result<Vec<Tensor>>,
        expected: &[Expected],
    ) {
        let result = actual
            .map_err(|e| e.to_string())
            .and_then(|actual| compare(sample.exact, &actual, expected));
        if let Err(why) = result {
            self.fail(format!(
                "{}({}) {}: {why}",
                self.entry.name,
                types(operands),
                sample.attrs
            ));
        }
    }
}

fn types(operands: &[Option<Tensor>]) -> String {
    operands
        .iter()
        .flatten()
        .map(Tensor::type_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Runs an op; a panic is one wrong case and not the end of the sweep.
fn call(
    entry: &Entry,
    operands: &[Option<Tensor>],
    attrs: &Attrs,
    place: &Place,
) -> Result<Vec<Tensor>> {
    let run = std::panic::AssertUnwindSafe(|| entry.call(operands, attrs, place));
    std::panic::catch_unwind(run)
        .unwrap_or_else(|_| Err(Error::argument(entry.name, "inputs", "panicked")))
}
