//! What a pipeline holds, by the meters of devices: one for each rank.

use anymesh_core::{DType, Device, Mesh, Tensor, ops::Rng};
use anymesh_schedule::build;
use anymesh_train::{
    Build, Init, Module, Pass, Policy, Result,
    nn::Linear,
    pipeline::{Given, Pipeline, Staged},
};

const RANKS: usize = 4;
const ROWS: usize = 256;
const WIDTH: usize = 8;
const LAYERS: usize = 3;

/// A stage of layers that keep what they read.
#[derive(Module)]
struct Layers {
    layers: Vec<Linear>,
}

#[derive(Module)]
struct Stack {
    stages: Vec<Layers>,
    #[skip]
    meshes: Vec<Mesh>,
}

impl Stack {
    fn new(devices: &[Device], owner: &[usize]) -> Result<Self> {
        let mesh = Mesh::over("pp=4", devices)?;
        let meshes = owner.iter().map(|rank| mesh.at("pp", *rank));
        let meshes: Vec<Mesh> = meshes.collect::<Result<_, _>>()?;
        let stage = |(s, mesh): (usize, &Mesh)| {
            let b = Build::new(mesh, Policy::f32(), 3).at(format!("stages.{s}"));
            let layer = |i: usize| {
                Linear::new(
                    &b.at(format!("layers.{i}")),
                    [WIDTH, WIDTH],
                    "[_, _]",
                    Init::Normal(0.3),
                )
            };
            Ok(Layers {
                layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
            })
        };
        Ok(Self {
            stages: meshes
                .iter()
                .enumerate()
                .map(stage)
                .collect::<Result<_>>()?,
            meshes,
        })
    }
}

impl Staged for Stack {
    type Batch = u64;

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
        batch: &u64,
        _: &Pass,
    ) -> Result<Vec<Tensor>> {
        let mut x = match given.inputs {
            [x] => x.clone(),
            _ => Tensor::normal(
                [ROWS, WIDTH],
                0.0,
                1.0,
                DType::F32,
                &self.meshes[stage],
                Rng::new(*batch),
            )?,
        };
        for layer in &self.stages[stage].layers {
            x = layer.forward(&x)?.relu()?;
        }
        Ok(vec![match stage + 1 == self.stages.len() {
            true => x.square()?.sum_all()?,
            false => x,
        }])
    }
}

/// The most bytes that each rank held above its parameters.
fn peaks(name: &str, micros: usize) -> Result<(Vec<u64>, Vec<usize>)> {
    // A device for each rank, with a meter of its own.
    let device = || anymesh_backend_cpu::device().decorated(|cpu, kernel| cpu.launch(kernel));
    let devices: Vec<Device> = (0..RANKS).map(|_| device()).collect();
    let schedule = build(name, RANKS, 1, micros)?;
    let pipeline = Pipeline::new(&schedule)?;
    let model = Stack::new(&devices, &schedule.owner)?;
    let before: Vec<u64> = devices.iter().map(|d| d.memory().in_use).collect();
    devices.iter().for_each(Device::reset_peak);
    let batches: Vec<u64> = (0..micros as u64).collect();
    let computed = pipeline.run(&model, &batches, 1.0, &|_| Pass::eval())?;
    assert_eq!(computed.losses.len(), micros);
    let peak = |(d, before): (&Device, &u64)| d.memory().peak - before;
    let peaks = devices.iter().zip(&before).map(peak).collect();
    Ok((peaks, pipeline.proof().peak().to_vec()))
}

#[test]
fn a_rank_holds_as_many_activations_as_the_proof_says() -> Result<()> {
    // What one more micro-batch costs a rank that keeps all of them.
    let (four, claimed) = peaks("fthenb", 4)?;
    assert_eq!(claimed, [4; RANKS]);
    let (six, _) = peaks("fthenb", 6)?;
    let each: Vec<u64> = four.iter().zip(&six).map(|(a, b)| (b - a) / 2).collect();
    let one = (ROWS * WIDTH * 4) as u64;
    // Sums of gradients, and losses.
    let sums = (LAYERS * WIDTH * WIDTH * 4 + 8 * 4) as u64;
    for name in ["fthenb", "1f1b", "eager-1f1b", "zbh1"] {
        let (held, claimed) = peaks(name, 8)?;
        for rank in 0..RANKS {
            // What is there beside activations, whatever the schedule.
            let beside = four[rank] - 4 * each[rank];
            let activations = held[rank] - beside;
            let claim = claimed[rank] as u64 * each[rank];
            let more = match name {
                "fthenb" => 0,
                // An input that came before the turn of its forward pass.
                "1f1b" | "eager-1f1b" => one + sums,
                // Between the halves of a backward pass an op also keeps the gradient of its result.
                _ => one + sums + claimed[rank] as u64 * LAYERS as u64 * one,
            };
            let holds = activations >= claim && activations <= claim + more;
            assert!(
                holds,
                "{name}: rank {rank} held {activations} bytes, claimed {claim} and {more}"
            );
        }
    }
    Ok(())
}
