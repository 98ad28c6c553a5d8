//! Random pipelines against one device: schedules, stages, micro-batches and meshes that nobody chose.

use super::support::{Way, run, run_on, tied, untied};
use anymesh_core::{
    Mesh,
    transport::{Background, Threads, Transport},
};
use anymesh_schedule::{Name, Placement};
use anymesh_train::{
    Result, Zero,
    models::ModelConfig,
    pipeline::{ScheduleChoice, Stages},
};
use std::{sync::Arc, time::Duration};

const CASES: u64 = 28;
const STEPS: usize = 2;

/// Numbers from a seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }
}

struct Case {
    config: ModelConfig,
    way: Way,
    rows: Vec<(usize, usize)>,
    /// How many processes share the ranks; 1 is the simulation.
    processes: usize,
}

impl Case {
    /// None where no schedule of the drawn name is for the drawn numbers.
    fn draw(seed: u64) -> Option<Self> {
        let mut n = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let config = n.of(&[tied(), untied()]);
        let ranks = 1 + n.below(4);
        let micros = 1 + n.below(6);
        let name = n.of(&Name::ALL);
        // Among them micro-batches with fewer rows than ranks of dp, and with none.
        let rows = (0..micros).map(|_| (n.of(&[4, 4, 3, 1, 0]), 3 + n.below(3)));
        let mut rows: Vec<(usize, usize)> = rows.collect();
        rows[0].0 = 4;
        let axes = n.of(&[
            format!("pp={ranks}"),
            format!("dp=1, pp={ranks}, tp=1"),
            format!("dp=2, pp={ranks}"),
            format!("pp={ranks}, dp=2"),
            format!("pp={ranks}, tp=2"),
            format!("tp=2, pp={ranks}, dp=2"),
        ]);
        let chunks = match name.chunks() {
            1 => 1,
            few => few.max(n.of(&[few, few + 1])),
        };
        let chunks = match name.placement() {
            Placement::V => 2,
            Placement::Loop => chunks,
        };
        let schedule = match name {
            Name::Searched => ScheduleChoice::Searched(1 + n.below(4) + chunks),
            name => ScheduleChoice::Named(name.to_string()),
        };
        let owners = name.placement().owners(ranks, chunks);
        schedule.pipeline(&owners, micros).ok()?;
        let way = Way {
            axes: axes.leak(),
            stages: Stages {
                chunks,
                placement: name.placement(),
                ..Stages::default()
            },
            schedule,
            zero: n.of(&[Zero::Off, Zero::One, Zero::Two, Zero::Three]),
            recompute: n.below(3) == 0,
            lora: false,
        };
        Some(Self {
            config,
            way,
            rows,
            processes: n.of(&[1, 1, ranks]),
        })
    }

    fn run(&self) -> Result<Vec<(f64, f64)>> {
        let cpu = anymesh_backend_cpu::device();
        if self.processes == 1 {
            return run(&cpu, &self.config, &self.way, &self.rows, STEPS);
        }
        let mesh = Mesh::new(self.way.axes, &cpu)?;
        let post = Threads::new(Duration::from_secs(60));
        let process = |number: usize| {
            let each = mesh.ranks() / self.processes;
            let ranks: Vec<usize> = (number * each..(number + 1) * each).collect();
            // Each process has a line of its own, as in a cluster.
            let line: Arc<dyn Transport> = Background::new(post.clone());
            let mesh = mesh.clone().with_transport(line).addressing(&ranks)?;
            run_on(&mesh, &self.config, &self.way, &self.rows, STEPS)
        };
        let outcomes: Vec<Result<_>> = std::thread::scope(|scope| {
            let process = &process;
            let threads = (0..self.processes).map(|number| scope.spawn(move || process(number)));
            let threads: Vec<_> = threads.collect();
            let join = |t: std::thread::ScopedJoinHandle<'_, Result<_>>| t.join();
            let outcomes = threads.into_iter().map(|t| join(t).expect("no panic"));
            outcomes.collect()
        });
        let outcomes = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
        assert!(outcomes.windows(2).all(|pair| pair[0] == pair[1]));
        Ok(outcomes[0].clone())
    }
}

#[test]
fn random_pipelines_give_the_losses_of_one_device() -> Result<()> {
    let seeds = match std::env::var("ANYMESH_TEST_SEED").map(|seed| seed.parse::<u64>()) {
        Ok(Ok(seed)) => seed..seed + 1,
        _ => 0..CASES,
    };
    let mut seen = 0;
    for seed in seeds {
        let Some(case) = Case::draw(seed) else {
            continue;
        };
        seen += 1;
        let told = || {
            let (way, rows, processes) = (&case.way, &case.rows, case.processes);
            format!("seed {seed}: {way:?}, rows {rows:?}, {processes} processes")
        };
        let cpu = anymesh_backend_cpu::device();
        let alone = run(&cpu, &case.config, &Way::default(), &case.rows, STEPS)?;
        let there = case.run().unwrap_or_else(|e| panic!("{}: {e}", told()));
        for (a, b) in alone.iter().zip(&there) {
            let apart = ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs());
            assert!(apart <= 1e-12, "{}: {b:?} instead of {a:?}", told());
        }
    }
    assert!(seen > 0, "no schedule was drawn");
    Ok(())
}
