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
//!
//! [`run`] sweeps the registry, [`hold`] any function of tensors.

mod backward;
mod compare;
mod layouts;
mod partial;
mod program;
mod report;

pub use compare::{Precision, compare, values};
pub use layouts::{reductions, shardings};
pub use partial::lay_out;
pub use report::{Coverage, Report};

use crate::registry::{self, Attrs, Entry};
use anymesh_core::{Device, Error, Mesh, Result, Tensor};
use program::{Program, Reference, Sweep};
use std::{
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
    /// The meshes.
    pub meshes: &'static [&'static str],
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
            meshes: &MESHES,
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
    let entries: Vec<&Entry> = registry::entries()
        .iter()
        .filter(|e| e.name.contains(&options.filter))
        .collect();
    let next = AtomicUsize::new(0);
    on_meshes(device, options, |meshes| {
        let mut report = Report::default();
        while let Some(entry) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut sweep = Sweep::new(entry.name, options);
            sweep_op(entry, device, meshes, &mut sweep);
            report.join(sweep.finish());
        }
        report
    })
}

/// Sweeps all ops as one of several processes, each of which calls this with the same options (the
/// seed is one of them) and compares what its own ranks hold. `mesh` makes a mesh over the
/// processes, as this one sees it; `device` is where the process computes what is expected.
///
/// A mesh may have no rank in this process. After an error of communication the sweep ends, because
/// the processes are no longer at the same case.
pub fn over_processes(
    device: &Device,
    mesh: impl Fn(&str) -> Result<Mesh>,
    options: &Options,
) -> Report {
    let start = Instant::now();
    let meshes = options.meshes.iter().map(|axes| mesh(axes));
    let meshes = match meshes.collect::<Result<Vec<_>>>() {
        Ok(meshes) => meshes,
        Err(error) => return Report::failed(options, error.to_string()),
    };
    let mut total = Report {
        seed: options.seed,
        ..Report::default()
    };
    for entry in registry::entries() {
        if !entry.name.contains(&options.filter) {
            continue;
        }
        let mut sweep = Sweep::new(entry.name, options);
        sweep_op(entry, device, &meshes, &mut sweep);
        let lost = sweep.lost;
        total.join(sweep.finish());
        if lost {
            break;
        }
    }
    total.time = start.elapsed();
    total
}

fn sweep_op(entry: &'static Entry, device: &Device, meshes: &[Mesh], sweep: &mut Sweep<'_>) {
    let every = sweep.options.every.max(1);
    for (i, sample) in entry.samples().iter().enumerate().step_by(every) {
        let attrs = Attrs::new(entry, &sample.attrs);
        // What it gives without a mesh is the same for all of them.
        let reference = attrs.as_ref().map_err(Error::clone).and_then(|attrs| {
            let program = Program {
                name: format!("{} {}", entry.name, sample.attrs),
                precision: if sample.exact {
                    Precision::Values
                } else {
                    Precision::ROUNDED
                },
                run: Box::new(move |inputs, place| entry.call(inputs, attrs, place)),
            };
            let inputs = sample.make(1, device)?;
            Reference::new(program, &inputs, device, sweep.options.gradients)
        });
        for mesh in meshes {
            if sweep.lost {
                return;
            }
            let result = match &reference {
                Ok(reference) => sweep.program(reference, mesh, i),
                Err(error) => Err(error.clone()),
            };
            match result {
                Ok(()) => {}
                Err(Error::Unsupported { .. }) => sweep.unsupported(),
                Err(error) => sweep.fail(format!("{} sample {i}: {error}", entry.name)),
            }
        }
    }
}

/// Holds a function of tensors against itself: on each mesh, with operands that lie there in ways
/// that the options pick, it must give on every rank what it gives for the plain operands, or the
/// same error.
///
/// ```
/// # use anymesh_conformance::sweep::{self, Options, Precision};
/// # use anymesh_core::Tensor;
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::from_slice(&[1f32, -2.0, 3.0, 0.5], [2, 2], &device)?;
/// sweep::hold("sum of rows", Precision::Values, &[x], &Options::default(), |x| {
///     Ok(vec![x[0].sum(&[1], false)?])
/// })
/// .assert_right();
/// # Ok::<(), anymesh_core::Error>(())
/// ```
pub fn hold(
    name: &str,
    precision: Precision,
    inputs: &[Tensor],
    options: &Options,
    f: impl Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Report {
    let Some(first) = inputs.first() else {
        return Report::failed(options, "a sweep needs an operand".into());
    };
    let inputs: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    let program = Program {
        name: name.into(),
        precision,
        run: Box::new(|inputs, _| f(&inputs.iter().flatten().cloned().collect::<Vec<_>>())),
    };
    let start = Instant::now();
    let mut sweep = Sweep::new(name, options);
    let reference = Reference::new(program, &inputs, first.device(), options.gradients);
    for mesh in options.meshes {
        let result = Mesh::new(mesh, first.device()).and_then(|mesh| match &reference {
            Ok(reference) => sweep.program(reference, &mesh, 0),
            Err(error) => Err(error.clone()),
        });
        if let Err(error) = result {
            sweep.fail(format!("{name}: {error}"));
        }
    }
    Report {
        seed: options.seed,
        time: start.elapsed(),
        ..sweep.finish()
    }
}

/// Runs `work` on several threads and joins what they found.
fn on_meshes(
    device: &Device,
    options: &Options,
    work: impl Fn(&[Mesh]) -> Report + Sync,
) -> Report {
    let start = Instant::now();
    let meshes = match options
        .meshes
        .iter()
        .map(|axes| Mesh::new(axes, device))
        .collect::<Result<Vec<_>>>()
    {
        Ok(meshes) => meshes,
        Err(error) => return Report::failed(options, error.to_string()),
    };
    let mut total = Report {
        seed: options.seed,
        ..Report::default()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads.max(1))
            .map(|_| scope.spawn(|| work(&meshes)))
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
    total.ops.sort_by(|a, b| a.op.cmp(&b.op));
    total.failures.sort();
    total.time = start.elapsed();
    total
}
