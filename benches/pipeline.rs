//! What transfers between the stages of a pipeline cost a step: real processes over TCP, with stages
//! that wait for what they send and receive, and with transfers that go on beside them.
//!
//! ```sh
//! cargo bench --features train --bench pipeline              # 2 processes
//! cargo bench --features train --bench pipeline -- 4 64      # 4 processes, a link of 64 MB/s
//! ```
//!
//! A slow link is one over which what a process receives takes its size divided by the speed: it
//! sleeps so long. Without a speed the link is that of the machine. Times are medians of steps.

use anymesh::{
    Error, Mesh, Result, Tensor,
    prelude::*,
    schedule::build,
    spmd::Ledger,
    train::{
        Build, Init, Module, Pass, Policy,
        nn::Linear,
        pipeline::{Given, Pipeline, Staged},
    },
    transport::{Background, Message, Transport},
};
use std::{
    net::TcpListener,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

const MICROS: usize = 8;
const WIDTH: usize = 256;
const LAYERS: usize = 2;
const STEPS: usize = 7;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let processes = numbers.first().copied().unwrap_or(2);
    if std::env::var("RANK").is_ok() {
        let speed = numbers.get(1).map(|mb| *mb as f64 * 1e6);
        return Ok(measure(speed)?);
    }
    // A port that is free now.
    let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", processes.to_string())
            .envs([("MASTER_ADDR", "127.0.0.1"), ("ANYMESH_TOKEN", "bench")])
            .env("MASTER_PORT", port.to_string())
            .env("RAYON_NUM_THREADS", "1")
            .spawn()
    };
    let children = (0..processes)
        .map(start)
        .collect::<std::io::Result<Vec<_>>>()?;
    for mut child in children {
        child.wait()?;
    }
    Ok(())
}

/// A stage that keeps the size of the stream.
#[derive(Module)]
struct Stage {
    layers: Vec<Linear>,
}

#[derive(Module)]
struct Stack {
    stages: Vec<Stage>,
    #[skip]
    meshes: Vec<Mesh>,
}

impl Stack {
    fn new(mesh: &Mesh) -> anymesh::train::Result<Self> {
        let ranks = 0..mesh.ranks();
        let meshes: Vec<Mesh> = ranks.map(|r| mesh.at("pp", r)).collect::<Result<_>>()?;
        let stage = |(s, mesh): (usize, &Mesh)| {
            let layer = |i: usize| {
                let b = Build::new(mesh, Policy::f32(), 1).at(format!("stages.{s}.layers.{i}"));
                Linear::new(&b, [WIDTH, WIDTH], "[_, _]", Init::Normal(0.1))
            };
            let layers = (0..LAYERS)
                .map(layer)
                .collect::<anymesh::train::Result<_>>()?;
            Ok(Stage { layers })
        };
        let stages = meshes.iter().enumerate().map(stage);
        let stages = stages.collect::<anymesh::train::Result<_>>()?;
        Ok(Self { stages, meshes })
    }
}

impl Staged for Stack {
    type Batch = Tensor;

    fn model(&self) -> &dyn Module {
        self
    }

    fn stages(&self) -> usize {
        self.stages.len()
    }

    fn mesh_of(&self, stage: usize) -> &Mesh {
        &self.meshes[stage]
    }

    fn forward(
        &self,
        stage: usize,
        given: &Given<'_>,
        batch: &Tensor,
        _: &Pass,
    ) -> anymesh::train::Result<Vec<Tensor>> {
        let mut x = given.inputs.first().unwrap_or(batch).clone();
        for layer in &self.stages[stage].layers {
            x = layer.forward(&x)?.relu()?;
        }
        Ok(vec![match stage + 1 == self.stages() {
            true => x.square()?.sum_all()?,
            false => x,
        }])
    }
}

/// The same ranks over another transport.
#[derive(Debug)]
struct Link {
    inner: Arc<dyn Transport>,
    /// Bytes a second.
    speed: Option<f64>,
}

impl Transport for Link {
    fn name(&self) -> &str {
        "link"
    }

    fn deadline(&self) -> Option<Duration> {
        self.inner.deadline()
    }

    fn exchange(&self, mesh: &Mesh, messages: Vec<Message>) -> Result<Vec<Option<Tensor>>> {
        let comes = |m: &&Message| m.part.data.is_none() && mesh.position_of(m.to).is_some();
        let bytes = |m: &Message| (m.part.shape.numel() * m.part.dtype.size()) as f64;
        let bytes: f64 = messages.iter().filter(comes).map(bytes).sum();
        let got = self.inner.exchange(mesh, messages)?;
        if let Some(speed) = self.speed {
            std::thread::sleep(Duration::from_secs_f64(bytes / speed));
        }
        Ok(got)
    }

    fn barrier(&self, mesh: &Mesh, group: &[usize]) -> Result<()> {
        self.inner.barrier(mesh, group)
    }
}

fn measure(speed: Option<f64>) -> anymesh::train::Result<()> {
    let cluster = anymesh::init()?;
    let n = cluster.size();
    let mesh = Mesh::new(&format!("pp={n}"), &cluster)?;
    let Some(wires) = mesh.transport().cloned() else {
        return Err(Error::argument("bench", "processes", "start at least 2").into());
    };
    let link = || {
        let inner = wires.clone();
        Arc::new(Link { inner, speed })
    };
    let line = Background::new(link());
    let overlaps: Arc<dyn Transport> = match speed {
        None => wires.clone(),
        Some(_) => line.clone(),
    };
    let ways: [(&str, Arc<dyn Transport>); 2] = [("waits", link()), ("overlaps", overlaps)];
    if cluster.is_first() {
        println!(
            "{n} processes, {MICROS} micro-batches, {LAYERS} layers of width {WIDTH} in a stage"
        );
        println!("rows  MB   schedule    transfers  ms a step  first rank waits ms");
    }
    for rows in [512, 2048] {
        for name in ["1f1b", "eager-1f1b"] {
            for (how, transport) in &ways {
                let mesh = mesh.clone().with_transport(transport.clone());
                let model = Stack::new(&mesh)?;
                let pipeline = Pipeline::new(&build(name, n, 1, MICROS)?)?;
                let place = &model.meshes[0];
                let x = Tensor::ones([rows, WIDTH], DType::F32, place)?;
                let batches = vec![x; MICROS];
                let mut times = vec![];
                for step in 0..=STEPS {
                    cluster.barrier()?;
                    let start = Instant::now();
                    let (found, ledger) =
                        Ledger::record(|| pipeline.run(&model, &batches, 1.0, &|_| Pass::eval()));
                    found?;
                    // The barrier goes by another line.
                    line.settle()?;
                    cluster.barrier()?;
                    let waited: Duration = ledger.entries.iter().map(|e| e.time).sum();
                    if step > 0 {
                        times.push((start.elapsed(), waited));
                    }
                }
                times.sort();
                let (time, waited) = times[times.len() / 2];
                if cluster.is_first() {
                    let mb = (rows * WIDTH * 4) as f64 / 1e6;
                    let (time, waited) = (time.as_secs_f64() * 1e3, waited.as_secs_f64() * 1e3);
                    println!("{rows:<5} {mb:<4.1} {name:<11} {how:<10} {time:9.1}  {waited:9.1}");
                }
            }
        }
    }
    Ok(())
}
