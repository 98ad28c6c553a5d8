//! What an exchange and an all-reduce between processes cost; one line for each size, which
//! `benches/peers/mpi.py` puts beside a loop in C.
//!
//! In an exchange every process sends to the next and receives from the one before. Times are
//! those of the first process: medians over rounds of several calls, after one that is not counted.

use anymesh_cluster::Cluster;
use anymesh_core::{
    DType, Mesh, Reduction, Result, Tensor,
    transport::{Message, Part, Transport},
};
use std::time::Instant;

const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let cluster = Cluster::from_env(&[anymesh_backend_cpu::device()])?;
    let (me, n) = (cluster.rank(), cluster.size());
    if n < 2 {
        println!("start it with mpirun or anymesh launch, in two or more processes");
        return Ok(());
    }
    let mesh = Mesh::new(&format!("x={n}"), &cluster)?;
    let Some(transport) = mesh.transport().cloned() else {
        return Ok(());
    };
    for bytes in sizes() {
        let calls = (64 << 20) / (bytes + (64 << 10)) + 1;
        let shape = [bytes / 4];
        let tensor = Tensor::full(shape, 1.0 + me as f64, DType::F32, mesh.device(0))?;
        let part = |rank| match rank == me {
            true => Part::new(rank, &tensor),
            false => Part::elsewhere(rank, DType::F32, shape),
        };
        let exchange = || {
            let message = |from: usize| Message {
                part: part(from),
                to: (from + 1) % n,
            };
            let messages = vec![message(me), message((me + n - 1) % n)];
            transport.exchange(&mesh, messages).map(drop)
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        let all_reduce = || {
            transport
                .all_reduce(&mesh, &parts, Reduction::Sum)
                .map(drop)
        };
        for (name, seconds) in [
            ("exchange", time(&*transport, &mesh, calls, exchange)?),
            ("all_reduce", time(&*transport, &mesh, calls, all_reduce)?),
        ] {
            if me == 0 {
                println!("{name} {bytes} {:.3}", seconds * 1e6);
            }
        }
    }
    Ok(())
}

/// 8 bytes to 64 MiB.
fn sizes() -> impl Iterator<Item = usize> {
    [
        8,
        1 << 10,
        16 << 10,
        256 << 10,
        1 << 20,
        4 << 20,
        16 << 20,
        64 << 20,
    ]
    .into_iter()
}

/// The seconds of a call.
fn time(
    transport: &dyn Transport,
    mesh: &Mesh,
    calls: usize,
    call: impl Fn() -> Result<()>,
) -> Result<f64> {
    let all: Vec<usize> = (0..mesh.ranks()).collect();
    let mut times = vec![];
    for round in 0..=ROUNDS {
        transport.barrier(mesh, &all)?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        if round > 0 {
            times.push(start.elapsed().as_secs_f64() / calls as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
