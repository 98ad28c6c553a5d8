//! Stages in different processes, as threads that each have some ranks of the mesh: the bits of the
//! simulation.

use super::support::{Way, named, run, run_on, tied, untied};
use anymesh_core::{Mesh, transport::Threads};
use anymesh_train::{Result, Zero, models::ModelConfig};
use std::time::Duration;

const STEPS: usize = 3;
const ROWS: [(usize, usize); 4] = [(4, 6), (2, 5), (4, 6), (4, 4)];

fn hold(config: &ModelConfig, way: &Way, processes: usize) -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let simulated = run(&cpu, config, way, &ROWS, STEPS)?;
    let transport = Threads::new(Duration::from_secs(60));
    let mesh = Mesh::new(way.axes, &cpu)?.with_transport(transport);
    let process = |number: usize| {
        let each = mesh.ranks() / processes;
        let ranks: Vec<usize> = (number * each..(number + 1) * each).collect();
        run_on(&mesh.addressing(&ranks)?, config, way, &ROWS, STEPS)
    };
    let outcomes: Vec<Result<_>> = std::thread::scope(|scope| {
        let process = &process;
        let threads = (0..processes).map(|number| scope.spawn(move || process(number)));
        let threads: Vec<_> = threads.collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<_>>| thread.join();
        threads
            .into_iter()
            .map(|t| join(t).expect("no panic"))
            .collect()
    });
    for (number, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome?, simulated, "process {number} of {way:?}");
    }
    Ok(())
}

#[test]
fn stages_in_processes_give_the_bits_of_the_simulation() -> Result<()> {
    hold(&untied(), &named("pp=2", "1f1b", 1), 2)?;
    hold(&untied(), &named("pp=4", "zbh1", 1), 4)?;
    hold(&tied(), &named("pp=4", "1f1b", 1), 4)?;
    hold(&tied(), &named("pp=2", "zbv", 2), 2)?;
    hold(&tied(), &named("pp=2, dp=2", "interleaved", 2), 4)?;
    let zero = Way {
        zero: Zero::Two,
        ..named("dp=2, pp=2, tp=2", "1f1b", 1)
    };
    hold(&tied(), &zero, 4)?;
    hold(&untied(), &zero, 8)
}
