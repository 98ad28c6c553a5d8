//! Ranks in different processes, as threads: the bits of the simulation.

use crate::support::{Way, deep, mesh, mixtral, on, run_on};
use anymesh_core::transport::Threads;
use anymesh_train::{Result, models::MoeConfig};
use std::time::Duration;

fn hold(config: &MoeConfig, way: &Way, processes: usize) -> Result<()> {
    let simulated = run_on(&mesh(way.axes)?, config, way, 2)?;
    let transport = Threads::new(Duration::from_secs(60));
    let mesh = mesh(way.axes)?.with_transport(transport);
    let each = mesh.ranks() / processes;
    let process = |number: usize| {
        let ranks: Vec<usize> = (number * each..(number + 1) * each).collect();
        run_on(&mesh.addressing(&ranks)?, config, way, 2)
    };
    let outcomes: Vec<Result<_>> = std::thread::scope(|scope| {
        let process = &process;
        let threads: Vec<_> = (0..processes)
            .map(|number| scope.spawn(move || process(number)))
            .collect();
        let threads = threads.into_iter();
        threads.map(|t| t.join().expect("no panic")).collect()
    });
    for (number, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome?, simulated, "process {number} of {way:?}");
    }
    Ok(())
}

#[test]
fn experts_in_processes_give_the_bits_of_the_simulation() -> Result<()> {
    hold(&mixtral(), &on("ep=2"), 2)?;
    hold(&mixtral(), &on("dp=2, ep=2"), 4)?;
    hold(&deep(), &on("ep=4"), 2)?;
    hold(&deep(), &on("ep=2, tp=2"), 4)
}

#[test]
fn stages_with_experts_in_processes_give_the_bits_of_the_simulation() -> Result<()> {
    hold(&mixtral(), &on("pp=2, ep=2"), 4)?;
    hold(&deep(), &on("pp=2, ep=2"), 2)
}
