//! What calls cost: of the host, and until the data is there.

use crate::{common, roles, run};
use anymesh_core::{
    DType, Error, Mesh, Reduction, Result, Tensor,
    transport::{Part, Transport},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes that each rank gives to an all-reduce and a reduce-scatter, and gets of an all-gather.
const SIZES: [usize; 4] = [4 << 10, 1 << 20, 16 << 20, 64 << 20];

/// Starts the processes and prints what the first one measured.
pub(crate) fn start(n: usize) -> i32 {
    let now = Instant::now();
    let ended = run::start("bench", n, &common(false)).and_then(|mut processes| {
        let until = now + Duration::from_secs(120);
        let ends = processes.iter_mut().map(|p| p.end(until));
        ends.collect::<std::result::Result<Vec<_>, _>>()
    });
    match ended {
        Ok(ended) => {
            print!("{}", ended[0].output);
            i32::from(ended.iter().any(|e| e.code != Some(0)))
        }
        Err(e) => {
            eprintln!("{e:?}");
            1
        }
    }
}

/// One process's part.
pub(crate) fn run() -> Result<()> {
    let cluster = roles::cluster()?;
    let n = cluster.size();
    let mesh = Mesh::new(&format!("x={n}"), &cluster)?;
    let transport = mesh.transport().cloned();
    let transport =
        transport.ok_or_else(|| Error::mesh(mesh.axes(), "a cluster's mesh has a transport"))?;
    for bytes in SIZES {
        for op in ["all_reduce", "all_gather", "reduce_scatter"] {
            cluster.barrier()?;
            let (host, total) = measure(op, bytes / 4, &mesh, &transport)?;
            if cluster.is_first() {
                let line = serde_json::json!({
                    "op": op, "bytes": bytes, "ranks": n, "host_us": host, "us": total,
                });
                println!("{line}");
            }
        }
    }
    cluster.barrier()
}

/// Microseconds of the host for a call, and until it is done, each the median of some rounds.
fn measure(
    op: &str,
    elements: usize,
    mesh: &Mesh,
    transport: &Arc<dyn Transport>,
) -> Result<(f64, f64)> {
    let n = mesh.ranks();
    let given = if op == "all_gather" {
        elements / n
    } else {
        elements
    };
    let part = |rank: usize| match mesh.position_of(rank) {
        Some(at) => Ok(Part::new(
            rank,
            &Tensor::ones([given], DType::F32, mesh.device(at))?,
        )),
        None => Ok(Part::elsewhere(rank, DType::F32, [given])),
    };
    let parts = (0..n).map(part).collect::<Result<Vec<_>>>()?;
    let call = || match op {
        "all_reduce" => transport.all_reduce(mesh, &parts, Reduction::Sum),
        "all_gather" => transport.all_gather(mesh, &parts, 0),
        _ => transport.reduce_scatter(mesh, &parts, Reduction::Sum, 0),
    };
    let device = mesh.device(0);
    let calls = 10;
    let (mut host, mut total) = (vec![], vec![]);
    for round in 0..6 {
        device.sync()?;
        let start = Instant::now();
        let results = (0..calls).map(|_| call()).collect::<Result<Vec<_>>>()?;
        let issued = start.elapsed();
        device.sync()?;
        let done = start.elapsed();
        drop(results);
        // The first rounds connect and allocate.
        if round > 1 {
            host.push(issued.as_secs_f64() * 1e6 / f64::from(calls));
            total.push(done.as_secs_f64() * 1e6 / f64::from(calls));
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    Ok((median(host), median(total)))
}
