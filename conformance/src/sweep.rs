//! The sweep: every op, under every sharding of its operands, held against its unsharded result.
//!
//! For each sample of each op of the [registry] and each mesh, operands are laid out in all ways
//! (every axis replicates, cuts any dimension at any position among the cuts it has, or is
//! partial), the op runs on the mesh, and what *every rank* holds of every result is compared.
//! Where there are more combinations than [`Options::limit`], that many are taken, spread evenly
//! and always the same.

use crate::registry::{self, Attrs, Entry, Sample};
use anymesh_core::{
    DType, Device, Error, Kind, Mesh, Place, Reduction, Region, Result, Sharding, Tensor,
    TensorType,
    grad::{GradOptions, grad},
};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

/// The meshes of the sweep.
pub const MESHES: [&str; 6] = ["a=2", "a=3", "a=4", "a=2, b=2", "a=2, b=3", "a=2, b=2, c=2"];

/// How much to sweep.
#[derive(Clone, Debug)]
pub struct Options {
    /// The most combinations for one sample on one mesh.
    pub limit: usize,
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
        Self {
            limit: 40,
            filter: String::new(),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            every: 1,
            gradients: true,
        }
    }
}

/// What a sweep found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Ops that ran.
    pub ops: usize,
    /// Combinations that ran.
    pub cases: usize,
    /// Those of them whose gradients were compared too.
    pub gradients: usize,
    /// How many of them went wrong.
    pub failed: usize,
    /// What went wrong, the first few of each op.
    pub failures: Vec<String>,
    /// Samples that the device says it cannot run.
    pub unsupported: usize,
    /// From beginning to end.
    pub time: Duration,
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rate = self.cases as f64 / self.time.as_secs_f64().max(1e-9);
        let Report {
            ops,
            cases,
            gradients,
            failed,
            ..
        } = self;
        write!(
            f,
            "{ops} ops, {cases} cases, {gradients} of them with gradients, {failed} wrong, {:.1} s, {rate:.0} cases/s",
            self.time.as_secs_f64()
        )?;
        self.failures
            .iter()
            .try_for_each(|failure| write!(f, "\n{failure}"))
    }
}

/// Sweeps all ops on a device.
pub fn run(device: &Device, options: &Options) -> Report {
    let start = Instant::now();
    let entries: Vec<&Entry> = registry::entries()
        .iter()
        .filter(|e| e.name.contains(&options.filter))
        .collect();
    let meshes = match MESHES
        .iter()
        .map(|axes| Mesh::new(axes, device))
        .collect::<Result<Vec<_>>>()
    {
        Ok(meshes) => meshes,
        Err(error) => {
            return Report {
                failed: 1,
                failures: vec![error.to_string()],
                ..Report::default()
            };
        }
    };
    let next = AtomicUsize::new(0);
    let work = || {
        let mut report = Report::default();
        while let Some(entry) = entries.get(next.fetch_add(1, Ordering::Relaxed)) {
            sweep_op(entry, &meshes, options, &mut report);
            report.ops += 1;
        }
        report
    };
    let mut total = Report::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..options.threads.max(1))
            .map(|_| scope.spawn(work))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(r) => {
                    total.ops += r.ops;
                    total.cases += r.cases;
                    total.gradients += r.gradients;
                    total.failed += r.failed;
                    total.unsupported += r.unsupported;
                    total.failures.extend(r.failures);
                }
                Err(_) => {
                    total.failed += 1;
                    total.failures.push("a thread of the sweep panicked".into());
                }
            }
        }
    });
    total.failures.sort();
    total.time = start.elapsed();
    total
}

/// Failures of one op that are written out.
const SHOWN: usize = 3;

fn sweep_op(entry: &'static Entry, meshes: &[Mesh], options: &Options, report: &mut Report) {
    let before = report.failed;
    for (i, sample) in entry
        .samples()
        .iter()
        .enumerate()
        .filter(|(i, _)| i % options.every == 0)
    {
        for mesh in meshes {
            match sweep_sample(entry, sample, mesh, options, report, before) {
                Ok(()) => {}
                Err(Error::Unsupported { .. }) => report.unsupported += 1,
                Err(error) => fail(
                    report,
                    before,
                    format!("{} sample {i}: {error}", entry.name),
                ),
            }
        }
    }
}

fn fail(report: &mut Report, before: usize, failure: String) {
    report.failed += 1;
    if report.failed - before <= SHOWN {
        report.failures.push(failure);
    }
}

/// A result as plain numbers.
struct Expected {
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<f64>,
}

fn sweep_sample(
    entry: &'static Entry,
    sample: &Sample,
    mesh: &Mesh,
    options: &Options,
    report: &mut Report,
    before: usize,
) -> Result<()> {
    let device = mesh.device(0);
    let attrs = Attrs::new(entry, &sample.attrs)?;
    let inputs = sample.make(1, device)?;
    let expected = entry.call(&inputs, &attrs, device)?;
    let expected = expected
        .iter()
        .map(|t| {
            Ok(Expected {
                shape: t.dims().into(),
                dtype: t.dtype(),
                values: values(t)?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    if sample.inputs.iter().all(Option::is_none) {
        // Nothing to lay out but the result itself.
        let rank = expected[0].shape.len();
        for sharding in shardings(mesh, rank, DType::Bool, false)
            .into_iter()
            .take(options.limit)
        {
            report.cases += 1;
            let place = Place {
                mesh: mesh.clone(),
                sharding,
            };
            check(
                entry,
                sample,
                &[],
                call(entry, &[], &attrs, &place),
                &expected,
                report,
                before,
            );
        }
        return Ok(());
    }
    let mut laid_out = inputs
        .iter()
        .map(|x| Layouts::new(x.as_ref(), mesh))
        .collect::<Result<Vec<_>>>()?;
    let total: usize = laid_out.iter().map(Layouts::len).product();
    let place = Place::from(mesh);
    let backward = if options.gradients {
        Backward::new(entry, &inputs, &attrs, mesh)?
    } else {
        None
    };
    for case in 0..total.min(options.limit) {
        // A stride that shares no factor with any number of shardings visits all of them in the
        // end.
        let mut at = if total <= options.limit {
            case
        } else {
            case * 7919 % total
        };
        let mut operands = Vec::with_capacity(laid_out.len());
        for list in &mut laid_out {
            operands.push(list.get(at % list.len())?);
            at /= list.len();
        }
        report.cases += 1;
        check(
            entry,
            sample,
            &operands,
            call(entry, &operands, &attrs, &place),
            &expected,
            report,
            before,
        );
        if let Some(backward) = &backward {
            report.gradients += 1;
            let run = std::panic::AssertUnwindSafe(|| {
                backward.check(entry, &operands, &attrs, &place, case)
            });
            if let Err(why) =
                std::panic::catch_unwind(run).unwrap_or_else(|_| Err("panicked".into()))
            {
                let types = operands
                    .iter()
                    .flatten()
                    .map(Tensor::type_string)
                    .collect::<Vec<_>>()
                    .join(", ");
                fail(
                    report,
                    before,
                    format!(
                        "gradient of {}({types}) {}: {why}",
                        entry.name, sample.attrs
                    ),
                );
            }
        }
    }
    Ok(())
}

/// What the gradients of a sample must be, however its operands lie.
struct Backward {
    /// The seeds of each result that has a gradient.
    seeds: Vec<Option<Seed>>,
    /// The gradients of each operand that has one.
    expected: Vec<Option<Expected>>,
}

/// The gradient that a pass begins with: plain, its values, and ways to lie on the mesh.
type Seed = (Tensor, Vec<f64>, Vec<Sharding>);

impl Backward {
    /// The gradients without a mesh; `None` where there are none.
    fn new(
        entry: &'static Entry,
        inputs: &[Option<Tensor>],
        attrs: &Attrs,
        mesh: &Mesh,
    ) -> Result<Option<Self>> {
        let device = mesh.device(0);
        let leaves = leaves(inputs)?;
        let out = call(entry, &leaves, attrs, &device.into())?;
        let mut seeds = vec![];
        for t in &out {
            let numbers: Vec<f32> = (0..t.numel()).map(|i| (i * 5 % 7) as f32 - 3.0).collect();
            let seed = if t.requires_grad() {
                Some(Tensor::from_slice(&numbers, t.shape(), device)?.cast(t.dtype())?)
            } else {
                None
            };
            let plain: Vec<f64> = numbers.iter().map(|v| f64::from(*v)).collect();
            seeds.push(seed.map(|seed| (seed, plain, shardings(mesh, t.rank(), t.dtype(), true))));
        }
        if seeds.iter().all(Option::is_none) {
            return Ok(None);
        }
        let found = pull(
            &out,
            &leaves,
            seeds
                .iter()
                .map(|s| s.as_ref().map(|(seed, ..)| seed.clone())),
        )?;
        let expected = found.into_iter().map(|g| {
            g.map(|g| {
                Ok(Expected {
                    shape: g.dims().into(),
                    dtype: g.dtype(),
                    values: values(&g)?,
                })
            })
            .transpose()
        });
        Ok(Some(Self {
            seeds,
            expected: expected.collect::<Result<_>>()?,
        }))
    }

    /// Whether the gradients are right for operands on the mesh, from seeds that lie in the
    /// `case`-th way.
    fn check(
        &self,
        entry: &'static Entry,
        operands: &[Option<Tensor>],
        attrs: &Attrs,
        place: &Place,
        case: usize,
    ) -> Result<(), String> {
        let run = || -> Result<Vec<Option<Tensor>>> {
            let leaves = leaves(operands)?;
            let out = entry.call(&leaves, attrs, place)?;
            let mut seeds = vec![];
            for seed in &self.seeds {
                let Some((seed, plain, ways)) = seed else {
                    seeds.push(None);
                    continue;
                };
                seeds.push(Some(lay_out(
                    seed,
                    plain,
                    &place.mesh,
                    ways[case * 31 % ways.len()].clone(),
                )?));
            }
            pull(&out, &leaves, seeds.into_iter())
        };
        let found = run().map_err(|e| e.to_string())?;
        for (i, (actual, expected)) in found.iter().zip(&self.expected).enumerate() {
            let (Some(actual), Some(expected)) = (actual, expected) else {
                if actual.is_some() != expected.is_some() {
                    return Err(format!("operand {i} has a gradient in one case only"));
                }
                continue;
            };
            let whole = operands[i]
                .as_ref()
                .map(|x| x.sharding().whole())
                .unwrap_or_default();
            if *actual.sharding() != whole {
                return Err(format!(
                    "operand {i}: its gradient {} does not lie as the operand does",
                    actual.type_string()
                ));
            }
            compare(
                false,
                std::slice::from_ref(actual),
                std::slice::from_ref(expected),
            )
            .map_err(|e| format!("operand {i}: {e}"))?;
        }
        Ok(())
    }
}

/// Operands that gradients are wanted for, where they can have one.
fn leaves(inputs: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let leaf = |x: &Option<Tensor>| {
        x.as_ref()
            .map(|x| {
                if x.dtype().is_float() {
                    x.require_grad()
                } else {
                    Ok(x.clone())
                }
            })
            .transpose()
    };
    inputs.iter().map(leaf).collect()
}

/// The gradient of each leaf, in its sharding.
fn pull(
    out: &[Tensor],
    leaves: &[Option<Tensor>],
    seeds: impl Iterator<Item = Option<Tensor>>,
) -> Result<Vec<Option<Tensor>>> {
    let pairs: Vec<(&Tensor, Tensor)> = out
        .iter()
        .zip(seeds)
        .filter_map(|(t, seed)| seed.map(|s| (t, s)))
        .collect();
    let (outputs, seeds): (Vec<&Tensor>, Vec<Tensor>) = pairs.into_iter().unzip();
    let inputs: Vec<&Tensor> = leaves
        .iter()
        .flatten()
        .filter(|x| x.requires_grad())
        .collect();
    let options = GradOptions {
        seeds: Some(seeds),
        allow_unused: true,
        ..GradOptions::default()
    };
    let mut found = grad(&outputs, &inputs, &options)?.into_iter();
    Ok(leaves
        .iter()
        .map(|x| {
            x.as_ref()
                .filter(|x| x.requires_grad())
                .and_then(|_| found.next())
        })
        .collect())
}

/// The ways in which an operand can lie on a mesh, each made when it is first wanted.
struct Layouts<'a> {
    mesh: &'a Mesh,
    operand: Option<(&'a Tensor, Vec<f64>)>,
    made: Vec<(Sharding, Option<Tensor>)>,
}

impl<'a> Layouts<'a> {
    fn new(x: Option<&'a Tensor>, mesh: &'a Mesh) -> Result<Self> {
        let Some(x) = x else {
            return Ok(Self {
                mesh,
                operand: None,
                made: vec![],
            });
        };
        let made = shardings(mesh, x.rank(), x.dtype(), true)
            .into_iter()
            .map(|s| (s, None))
            .collect();
        Ok(Self {
            mesh,
            operand: Some((x, values(x)?)),
            made,
        })
    }

    /// How many there are; leaving an operand out is one way.
    fn len(&self) -> usize {
        self.made.len().max(1)
    }

    fn get(&mut self, i: usize) -> Result<Option<Tensor>> {
        let (Some((x, plain)), Some((sharding, made))) = (&self.operand, self.made.get_mut(i))
        else {
            return Ok(None);
        };
        if made.is_none() {
            *made = Some(lay_out(x, plain, self.mesh, sharding.clone())?);
        }
        Ok(made.clone())
    }
}

/// Runs an op; a panic is one wrong case and not the end of the sweep.
fn call(
    entry: &Entry,
    operands: &[Option<Tensor>],
    attrs: &Attrs,
    place: &Place,
) -> Result<Vec<Tensor>> {
    let run = std::panic::AssertUnwindSafe(|| entry.call(operands, attrs, place));
    std::panic::catch_unwind(run).unwrap_or_else(|_| {
        Err(Error::Argument {
            op: entry.name,
            detail: "panicked".into(),
        })
    })
}

/// All ways to lie on a mesh. Partial values come with the reductions that a dtype has.
fn shardings(mesh: &Mesh, rank: usize, dtype: DType, partial: bool) -> Vec<Sharding> {
    let reductions: &[Reduction] = match dtype {
        _ if !partial => &[],
        DType::Bool => &[Reduction::Or],
        DType::F32 | DType::F64 | DType::I32 | DType::I64 => &[Reduction::Sum, Reduction::Max],
        _ => &[],
    };
    let mut all: Vec<(Vec<(usize, usize)>, Vec<usize>, Option<Reduction>)> =
        vec![(vec![], vec![], None)];
    for axis in 0..mesh.axes().len() {
        let mut next = all.clone();
        for (cuts, over, reduction) in &all {
            for dim in 0..rank {
                // At every position among the cuts of this dimension.
                let places: Vec<usize> = (0..=cuts.len())
                    .filter(|p| *p == cuts.len() || cuts[*p].0 == dim)
                    .collect();
                for place in places {
                    let mut cuts = cuts.clone();
                    cuts.insert(place, (dim, axis));
                    next.push((cuts, over.clone(), *reduction));
                }
            }
            for r in reductions
                .iter()
                .filter(|r| reduction.is_none_or(|other| other == **r))
            {
                next.push((cuts.clone(), [&over[..], &[axis]].concat(), Some(*r)));
            }
        }
        all = next;
    }
    let build = |(cuts, over, reduction): (Vec<(usize, usize)>, Vec<usize>, Option<Reduction>)| {
        let cut = cuts
            .iter()
            .fold(Sharding::replicated(), |s, (dim, axis)| s.cut(*dim, *axis));
        over.iter().fold(cut, |s, axis| {
            reduction.map_or(s.clone(), |r| s.partial_over(*axis, r))
        })
    };
    let mut out: Vec<Sharding> = vec![];
    for sharding in all.into_iter().map(build) {
        if !out.contains(&sharding) {
            out.push(sharding);
        }
    }
    out
}

/// A tensor on a mesh; parts of a partial value differ on every rank and are never the value itself
/// where that can be helped.
pub fn lay_out(x: &Tensor, plain: &[f64], mesh: &Mesh, sharding: Sharding) -> Result<Tensor> {
    sharding.check(mesh, x.rank())?;
    let Some((_, reduction)) = sharding.partial().next() else {
        return x.to_mesh(mesh, sharding);
    };
    let axes: Vec<usize> = sharding.partial().map(|(axis, _)| axis).collect();
    let members: usize = axes.iter().map(|a| mesh.size(*a)).product();
    let parts = (0..mesh.ranks()).map(|rank| {
        let region = sharding.region(mesh, rank, x.shape());
        let member = axes
            .iter()
            .fold(0, |m, a| m * mesh.size(*a) + mesh.coordinate(rank, *a));
        let noise = |at: usize, member: usize| ((at * 5 + member * 3 + at / 7) % 5) as f64 - 2.0;
        let part: Vec<f32> = positions(&region, x.dims())
            .map(|at| {
                let (value, owner) = (plain[at], at % members);
                (match reduction {
                    Reduction::Sum if member == owner => {
                        value
                            - (0..members)
                                .filter(|m| *m != owner)
                                .map(|m| noise(at, m))
                                .sum::<f64>()
                    }
                    Reduction::Sum => noise(at, member),
                    Reduction::Max if member == owner => value,
                    Reduction::Max => value - 1.0 - noise(at, member).abs(),
                    _ if member == owner => value,
                    _ => 0.0,
                }) as f32
            })
            .collect();
        Tensor::from_slice(
            &part,
            anymesh_core::Shape::from(region.shape),
            mesh.device(rank),
        )?
        .cast(x.dtype())
    });
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let ty = TensorType {
        dtype: x.dtype(),
        shape: x.shape().clone(),
        sharding,
    };
    Tensor::from_shards(&ty, mesh, &parts)
}

/// Row-major positions of a box in a tensor with these dimensions.
fn positions<'a>(region: &'a Region, dims: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    (0..region.numel()).map(move |mut i| {
        let (mut at, mut stride) = (0, 1);
        for d in (0..dims.len()).rev() {
            at += (region.start[d] + i % region.shape[d]) * stride;
            i /= region.shape[d];
            stride *= dims[d];
        }
        at
    })
}

/// The elements as `f64`.
pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    Ok(match t.dtype().kind() {
        Kind::F32 if t.dtype() == DType::F32 => {
            t.to_vec::<f32>()?.into_iter().map(f64::from).collect()
        }
        Kind::I32 => t.to_vec::<i32>()?.into_iter().map(f64::from).collect(),
        Kind::Bool => t
            .to_vec::<bool>()?
            .into_iter()
            .map(|v| f64::from(u8::from(v)))
            .collect(),
        Kind::F64 => t.to_vec::<f64>()?,
        Kind::I64 => t.to_vec::<i64>()?.into_iter().map(|v| v as f64).collect(),
        Kind::U32 => t
            .cast(DType::U32)?
            .to_vec::<u32>()?
            .into_iter()
            .map(f64::from)
            .collect(),
        Kind::F32 => t
            .cast(DType::F32)?
            .to_vec::<f32>()?
            .into_iter()
            .map(f64::from)
            .collect(),
    })
}

/// Reordered sums of a few rounded `f32`, relative to values of about one or the value itself.
const ROUNDING: f64 = 1e-5;

fn check(
    entry: &Entry,
    sample: &Sample,
    operands: &[Option<Tensor>],
    actual: Result<Vec<Tensor>>,
    expected: &[Expected],
    report: &mut Report,
    before: usize,
) {
    let describe = || {
        operands
            .iter()
            .flatten()
            .map(Tensor::type_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let result = actual
        .map_err(|e| e.to_string())
        .and_then(|actual| compare(sample.exact, &actual, expected));
    if let Err(why) = result {
        fail(
            report,
            before,
            format!("{}({}) {}: {why}", entry.name, describe(), sample.attrs),
        );
    }
}

/// The tensor with nothing partial.
fn settled(x: &Tensor) -> Result<Tensor> {
    x.detach().reshard(x.sharding().whole())
}

/// Compares results to the last bit, or but for rounding.
fn compare(exact: bool, actual: &[Tensor], expected: &[Expected]) -> Result<(), String> {
    if actual.len() != expected.len() {
        return Err(format!(
            "{} results, expected {}",
            actual.len(),
            expected.len()
        ));
    }
    for (o, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        if actual.dims() != &expected.shape[..] || actual.dtype() != expected.dtype {
            return Err(format!(
                "result {o} is {}, expected {}{:?}",
                actual.type_string(),
                expected.dtype,
                expected.shape
            ));
        }
        let whole = settled(actual).map_err(|e| e.to_string())?;
        let mut seen: Vec<(Region, Tensor)> = vec![];
        for (rank, part) in whole.shards() {
            let region = whole.sharding().region(whole.mesh(), rank, whole.shape());
            if part.dims() != &region.shape[..] {
                return Err(format!(
                    "result {o} ({}): rank {rank} holds {}",
                    actual.type_string(),
                    part.type_string()
                ));
            }
            // Ranks that share memory need one look.
            if seen
                .iter()
                .any(|(r, p)| *r == region && p.shares_memory(&part))
            {
                continue;
            }
            seen.push((region.clone(), part.clone()));
            let part = values(&part).map_err(|e| e.to_string())?;
            for (a, at) in part.iter().zip(positions(&region, &expected.shape)) {
                let e = expected.values[at];
                let close = || !exact && (a - e).abs() <= ROUNDING * e.abs().max(1.0);
                if *a != e && !(a.is_nan() && e.is_nan()) && !close() {
                    return Err(format!(
                        "result {o} ({}): rank {rank} has {a} at {at}, expected {e}",
                        actual.type_string()
                    ));
                }
            }
        }
    }
    Ok(())
}
