//! Ranks in different processes, as threads that each have some ranks of the mesh: the bits of the
//! simulation, also where the ring turns beside the program.

use super::support::{WAYS, Way, llama, on, run, run_on};
use anymesh_core::{
    Mesh,
    transport::{Background, Threads, Transport},
};
use anymesh_train::{Result, models::ModelConfig, nn::ContextAttention};
use std::{sync::Arc, time::Duration};

const STEPS: usize = 2;
const ROWS: [usize; 2] = [4, 2];

fn hold(config: &ModelConfig, way: &Way, processes: usize, beside: bool) -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    let simulated = run(&cpu, config, way, &ROWS, STEPS)?;
    let threads = Threads::new(Duration::from_secs(60));
    let process = |number: usize| {
        // Each process has a line of its own for what it sends.
        let transport: Arc<dyn Transport> = match beside {
            true => Background::new(threads.clone()),
            false => threads.clone(),
        };
        let mesh = Mesh::new(way.axes, &cpu)?.with_transport(transport);
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
fn ranks_in_processes_give_the_bits_of_the_simulation() -> Result<()> {
    for attention in WAYS {
        let way = Way {
            documents: true,
            ..on("dp=2, cp=2", attention, true)
        };
        hold(&llama(4), &way, 4, false)?;
    }
    hold(
        &llama(4),
        &on("cp=4", ContextAttention::Ring, true),
        2,
        false,
    )?;
    hold(
        &llama(2),
        &on("cp=4", ContextAttention::Ring, false),
        4,
        false,
    )?;
    let recompute = Way {
        recompute: true,
        ..on("cp=2, tp=2", ContextAttention::Ring, true)
    };
    hold(&llama(4), &recompute, 4, false)
}

#[test]
fn a_ring_that_turns_beside_the_program_gives_the_same_bits() -> Result<()> {
    hold(
        &llama(4),
        &on("cp=4", ContextAttention::Ring, true),
        4,
        true,
    )?;
    let uneven = Way {
        length: 10,
        ..on("cp=4", ContextAttention::Ring, false)
    };
    hold(&llama(4), &uneven, 2, true)
}

#[test]
fn stages_in_processes_cut_sequences_too() -> Result<()> {
    let way = Way {
        documents: true,
        ..on("pp=2, cp=2", ContextAttention::Ring, true)
    };
    hold(&llama(4), &way, 2, false)?;
    hold(&llama(4), &way, 4, false)
}
