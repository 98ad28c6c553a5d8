//! Stages in different processes, as threads that each have some ranks of the mesh: the bits of the
//! simulation.

use super::support::{LENGTH, Texts, Way, named, run, run_on, tied, untied};
use anymesh_core::{Mesh, Tensor, transport::Threads};
use anymesh_schedule::build;
use anymesh_train::{
    Build, Module, Pass, Policy, Result, Zero,
    data::Batch,
    models::ModelConfig,
    objective::Language,
    pipeline::{Borrowed, Given, Pipeline, Staged},
    trainer::{Feed, LanguageModel},
};
use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

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

/// Counts the forward passes of stages that other processes have.
struct Counted<'a> {
    task: &'a LanguageModel,
    elsewhere: AtomicUsize,
}

impl Staged for Counted<'_> {
    type Batch = Batch;

    fn model(&self) -> &dyn Module {
        Staged::model(self.task)
    }

    fn stages(&self) -> usize {
        self.task.stages()
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        self.task.mesh_of(stage)
    }

    fn kind_of(&self, batch: &Batch) -> Option<String> {
        self.task.kind_of(batch)
    }

    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Vec<Tensor>> {
        if self.mesh_of(stage).addressable().len() == 0 {
            self.elsewhere.fetch_add(1, Ordering::Relaxed);
        }
        Staged::forward(self.task, stage, given, batch, pass)
    }

    fn borrows(&self, stage: usize) -> Result<Vec<Borrowed>> {
        self.task.borrows(stage)
    }
}

#[test]
fn stages_of_others_are_worked_out_once_for_each_kind_of_micro_batch() -> Result<()> {
    let cpu = anymesh_backend_cpu::device();
    // Two kinds, and many of them.
    let rows: Vec<(usize, usize)> = (0..24).map(|i| (2, 4 + i % 2)).collect();
    for (name, most) in [("1f1b", 8), ("zbh1", 10)] {
        let mesh = Mesh::new("pp=2", &cpu)?;
        let mesh = mesh.with_transport(Threads::new(Duration::from_secs(60)));
        let process = |rank: usize| -> Result<(usize, Vec<String>)> {
            let mesh = mesh.addressing(&[rank])?;
            let model = tied().build(&Build::new(&mesh, Policy::f32(), 1))?;
            let task = LanguageModel::new(model, Language::default(), LENGTH);
            let counted = Counted {
                task: &task,
                elsewhere: AtomicUsize::new(0),
            };
            let mut feed = Texts {
                mesh: mesh.clone(),
                rows: rows.clone(),
            };
            let (batches, _) = feed.global_batch(0)?.expect("there is data");
            let pipeline = Pipeline::new(&build(name, 2, 1, batches.len())?)?;
            let computed = pipeline.run(&counted, &batches, 1.0, &|_| Pass::eval())?;
            assert_eq!(computed.losses.len(), 24);
            // The types of sums are the same in both processes.
            let sums = computed.gradients.sums().iter();
            let sums = sums.map(|(name, g)| format!("{name} {}", g.type_string()));
            let sums = sums.collect();
            Ok((counted.elsewhere.into_inner(), sums))
        };
        let told = std::thread::scope(|scope| {
            let process = &process;
            let threads = [0, 1].map(|rank| scope.spawn(move || process(rank)));
            threads.map(|thread| thread.join().expect("no panic"))
        });
        let [first, second] = told;
        let (first, second) = (first?, second?);
        assert_eq!(first.1, second.1, "{name}");
        for (passes, _) in [first, second] {
            assert!((2..=most).contains(&passes), "{name}: {passes} of 24");
        }
    }
    Ok(())
}
