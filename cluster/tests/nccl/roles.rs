//! What the processes of a cluster of GPUs do.

use crate::model::Training;
use anymesh_cluster::Cluster;
use anymesh_conformance::{
    sweep::{self, Options},
    transport::{self, Sums},
};
use anymesh_core::{DType, Device, Error, Mesh, Reduction, Result, Tensor, transport::Part};
use std::time::{Duration, Instant};

/// How the last process is lost.
pub(crate) const HOW: &str = "ANYMESH_TEST_HOW";
/// Set where every launch is made at once.
pub(crate) const EAGER: &str = "ANYMESH_TEST_EAGER";
/// Seconds that calls wait in the tests of losses.
pub(crate) const DEADLINE: u64 = 6;

/// Plays a role; the exit code.
pub(crate) fn play(role: &str) -> i32 {
    let played = match role {
        "conformance" => conformance(),
        "sweep" => sweep(),
        "order" => order(),
        "trains" => trains(),
        "loses" => loses(),
        "bench" => crate::bench::run(),
        other => Err(wrong(format!("there is no role {other}"))),
    };
    match played {
        Ok(()) => 0,
        Err(e) => {
            println!("{e}");
            1
        }
    }
}

fn wrong(detail: String) -> Error {
    Error::argument("test", "result", detail)
}

/// The GPU, with launches that are put off or made at once.
fn device() -> Result<Device> {
    let number = std::env::var("ANYMESH_TEST_GPU").unwrap_or_else(|_| "0".into());
    let device = anymesh_backend_cuda::device(Some(&number))?;
    match std::env::var_os(EAGER) {
        Some(_) => Ok(device),
        None => Ok(anymesh_engine::deferred(&device)),
    }
}

pub(crate) fn cluster() -> Result<Cluster> {
    let cluster = Cluster::from_env(&[device()?])?;
    match cluster.to_string().ends_with("over nccl") {
        true => Ok(cluster),
        false => Err(wrong(format!("{cluster}"))),
    }
}

fn conformance() -> Result<()> {
    let cluster = cluster()?;
    let sums = match cluster.start().sums {
        anymesh_cluster::Sums::Fixed => Sums::InOrder,
        anymesh_cluster::Sums::Native => Sums::InAnyOrder,
    };
    let dtypes: Vec<DType> = match std::env::var("ANYMESH_TEST_DTYPES") {
        Ok(names) => (DType::ALL.into_iter())
            .filter(|d| names.split(',').any(|name| name == d.name()))
            .collect(),
        Err(_) => DType::ALL.into(),
    };
    let mesh_of = |ranks: usize| Mesh::new(&format!("x={ranks}"), &cluster);
    let report = pollster::block_on(transport::run_with(mesh_of, sums, &dtypes));
    println!("{report}");
    match report.failures.is_empty() {
        true => cluster.barrier(),
        false => Err(wrong(format!("{} failures", report.failures.len()))),
    }
}

fn sweep() -> Result<()> {
    let cluster = cluster()?;
    let options = Options {
        threads: 1,
        ..Options::default().with_env()?
    };
    let report = sweep::over_processes(
        &cluster.devices()[0],
        |axes| Mesh::new(axes, &cluster),
        &options,
    );
    println!("{}\n{report}", report.coverage());
    match report.failures.is_empty() {
        true => cluster.barrier(),
        false => Err(wrong(report.to_string())),
    }
}

/// Kernels before and after a collective see what they should: many calls in a row without a read,
/// each of what the one before gave, with kernels in between that do not need it and take memory that
/// was just freed.
fn order() -> Result<()> {
    let cluster = cluster()?;
    let (rank, n) = (cluster.rank(), cluster.size());
    let mesh = Mesh::new(&format!("x={n}"), &cluster)?;
    let Some(transport) = mesh.transport() else {
        return Err(wrong("a cluster's mesh has a transport".into()));
    };
    let (device, size, steps) = (mesh.device(0), 1 << 20, 200);
    let one = Tensor::ones([size], DType::I32, device)?;
    let mut beside = Tensor::ones([size], DType::I32, device)?;
    let mut x = Tensor::from_slice(&vec![rank as i32 + 1; size], [size], device)?;
    for _ in 0..steps {
        let part = |r: usize| match r == rank {
            true => Part::new(r, &x),
            false => Part::elsewhere(r, DType::I32, [size]),
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        let sums = transport.all_reduce(&mesh, &parts, Reduction::Sum)?;
        drop(parts);
        beside = beside.add(&one)?;
        let sum = sums.into_iter().flatten().next();
        x = sum.ok_or_else(|| wrong("no sum".into()))?.add(&one)?;
    }
    let ranks = n as i32;
    let first = (1..=ranks).sum::<i32>() + 1;
    let expected = (1..steps).fold(first, |x, _| x.wrapping_mul(ranks).wrapping_add(1));
    let got = x.to_vec::<i32>()?;
    if let Some(i) = got.iter().position(|v| *v != expected) {
        return Err(wrong(format!("element {i} is {}, not {expected}", got[i])));
    }
    match beside.to_vec::<i32>()?.iter().all(|v| *v == 1 + steps) {
        true => cluster.barrier(),
        false => Err(wrong("kernels beside a collective went wrong".into())),
    }
}

/// A small model trained in every layout has the losses of a simulation on the same GPU, whose
/// launches are made at once: steps that come again, with collectives in them.
fn trains() -> Result<()> {
    let cluster = cluster()?;
    let (n, steps) = (cluster.size(), 25);
    let axes = if n == 4 { "dp=2, tp=2" } else { "dp=2" };
    let losses = |mesh: &Mesh, layout: &str| {
        let mut training = Training::new(mesh, layout)?;
        let step = |_| Ok(training.step()?.to_bits());
        (0..steps).map(step).collect::<Result<Vec<u64>>>()
    };
    let at_once = cluster.devices()[0].innermost().clone();
    for layout in ["plain", "tensor", "sharded", "both"] {
        let ours = losses(&Mesh::new(axes, &cluster)?, layout)?;
        let simulated = losses(&Mesh::new(axes, &at_once)?, layout)?;
        if let Some(step) = (0..steps).find(|i| ours[*i] != simulated[*i]) {
            let [ours, simulated] = [&ours, &simulated].map(|all| f64::from_bits(all[step]));
            return Err(wrong(format!(
                "{layout}: the loss of step {step} is {ours}, simulated {simulated}"
            )));
        }
    }
    cluster.barrier()
}

/// The sum over all ranks, on all of them: a collective, and a read.
fn step(mesh: &Mesh) -> Result<f64> {
    let x = Tensor::ones([mesh.ranks() * 4096], DType::F32, (mesh, "[@x]"))?;
    Ok(x.sum(&[], false)?.item()?.to_f64() / 4096.0)
}

fn loses() -> Result<()> {
    let how = std::env::var(HOW).unwrap_or_default();
    let cluster = cluster()?;
    let (rank, n) = (cluster.rank(), cluster.size());
    let lost = n - 1;
    let mesh = Mesh::new(&format!("x={n}"), &cluster)?;
    let kept = Tensor::from_slice(&[1f32, 2.0, 3.0], [3], mesh.device(0))?;
    for _ in 0..5 {
        let sum = step(&mesh)?;
        if sum != n as f64 {
            return Err(wrong(format!("the sum is {sum}")));
        }
    }
    if rank == lost {
        match how.as_str() {
            "dies" => std::process::abort(),
            "stops" => {
                let own = std::process::id().to_string();
                let stop = std::process::Command::new("kill")
                    .args(["-STOP", &own])
                    .status();
                stop.map_err(|e| wrong(e.to_string()))?;
            }
            _ => {}
        }
        std::thread::sleep(Duration::from_secs(120));
        return Ok(());
    }
    let start = Instant::now();
    // The first call after the loss queues, and its read finds out.
    let failed = match step(&mesh) {
        Ok(sum) => return Err(wrong(format!("there is a sum of the dead: {sum}"))),
        Err(e) => e,
    };
    let after = start.elapsed();
    let named: &[usize] = match &failed {
        Error::Lost { ranks, .. } => ranks,
        Error::Timeout { missing, .. } => missing,
        _ => &[],
    };
    if !named.contains(&lost) {
        return Err(wrong(format!(
            "the error does not name rank {lost}: {failed}"
        )));
    }
    if after > Duration::from_secs(DEADLINE + 2) {
        return Err(wrong(format!("the error came after {after:?}")));
    }
    println!("after {after:.2?}: {failed}");
    // Those who tell of a failure may be a moment ahead of those who shut the device.
    let shut = start + after + Duration::from_secs(2);
    while let Ok(values) = kept.to_vec::<f32>() {
        if Instant::now() > shut {
            return Err(wrong(format!("a device that failed was read: {values:?}")));
        }
    }
    drop(mesh);
    if how != "dies" {
        return Ok(());
    }
    let cluster = cluster.rebuild(Duration::from_secs(10))?;
    let n = cluster.size();
    let mesh = Mesh::new(&format!("x={n}"), &cluster)?;
    if kept.to_vec::<f32>()? != [1.0, 2.0, 3.0] {
        return Err(wrong("what was there before the failure changed".into()));
    }
    for _ in 0..5 {
        let sum = step(&mesh)?;
        if sum != n as f64 {
            return Err(wrong(format!("without the lost rank the sum is {sum}")));
        }
    }
    println!("goes on with {cluster}");
    cluster.barrier()
}
