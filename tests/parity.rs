//! The parity gate: one training of 20 steps, in every layout, gives the same losses. On the CPU, or
//! on the device that `ANYMESH_TEST_DEVICE` names.

use anymesh::train::{
    Build, Init, Module, Pass, Policy, Result, Zero,
    nn::{Attend, Block, Embedding, Heads, LayerNorm, NormOrder},
    optim::{AdamW, Clip, Groups, Optimizer, Rule, Schedule},
    trainer::{Feed, Save, Settings, Task, Trainer},
};
use anymesh::{
    DType, Device, Mesh, Tensor,
    ops::{LossReduction, cross_entropy::CrossEntropyOptions},
};
use std::path::PathBuf;

const VOCABULARY: usize = 96;
const WIDTH: usize = 24;
const SEQUENCE: usize = 12;
const BATCH: usize = 12;
const STEPS: u64 = 20;

#[derive(Module)]
struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    h: Vec<Block>,
    ln_f: LayerNorm,
    #[skip]
    mesh: Mesh,
    #[skip]
    stream: &'static str,
    #[skip]
    output: DType,
}

impl Gpt {
    fn new(b: &Build, dropout: f64) -> Result<Self> {
        let init = Init::Normal(0.2);
        let block = |i: usize| {
            let heads = Heads::of(WIDTH, 6)?;
            Block::new(
                &b.at(format!("h.{i}")),
                [WIDTH, 4 * WIDTH],
                heads,
                dropout,
                NormOrder::Pre,
            )
        };
        Ok(Self {
            wte: Embedding::new(&b.at("wte"), [VOCABULARY, WIDTH], "[@tp?, _]", init)?,
            wpe: Embedding::new(&b.at("wpe"), [SEQUENCE, WIDTH], "[_, _]", init)?,
            h: (0..2).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::new(&b.at("ln_f"), WIDTH, 1e-5)?,
            mesh: b.mesh().clone(),
            stream: b.stream(),
            output: b.policy().output,
        })
    }
}

/// Tokens that follow a rule which can be learnt, by their position in the data.
fn token(sample: usize, at: usize) -> i32 {
    let line = sample * 7919 % 1009;
    ((line + at * (1 + line % 3)) % VOCABULARY) as i32
}

struct Batch {
    tokens: Tensor,
}

impl Task for Gpt {
    type Batch = Batch;

    fn model(&self) -> &dyn Module {
        self
    }

    fn model_mut(&mut self) -> &mut dyn Module {
        self
    }

    fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn count(&self, batch: &Batch) -> Result<f64> {
        Ok((batch.tokens.dims()[0] * SEQUENCE) as f64)
    }

    fn loss(&mut self, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let rows = batch.tokens.dims()[0];
        let seen = batch.tokens.narrow(1, 0, SEQUENCE)?;
        let next = batch.tokens.narrow(1, 1, SEQUENCE)?;
        let at = Tensor::arange(0, SEQUENCE as i64, 1, DType::I32, &self.mesh)?;
        let mut x = self.wte.forward(&seen)?.add(&self.wpe.forward(&at)?)?;
        x = x.reshard(self.stream)?;
        let options = Attend {
            causal: true,
            ..Attend::default()
        };
        for block in &self.h {
            x = block.forward(&x, &options, None, pass)?;
        }
        let logits = self.wte.logits(&self.ln_f.forward(&x)?)?;
        let logits = logits.cast(self.output)?;
        let logits = logits.reshape([rows * SEQUENCE, VOCABULARY])?;
        let options = CrossEntropyOptions {
            reduction: LossReduction::Sum,
            ..CrossEntropyOptions::default()
        };
        Ok(logits.cross_entropy(&next.reshape([rows * SEQUENCE])?, &options)?)
    }
}

/// Batches of a fixed size in so many micro-batches.
struct Lines {
    mesh: Mesh,
    micro: usize,
}

impl Feed<Batch> for Lines {
    fn global_batch(&mut self, consumed: u64) -> Result<Option<(Vec<Batch>, u64)>> {
        let rows = BATCH / self.micro;
        let batch = |i: usize| {
            let first = consumed as usize + i * rows;
            let tokens = Tensor::from_fn([rows, SEQUENCE + 1], (&self.mesh, "[@dp?, _]"), |at| {
                token(first + at[0], at[1])
            })?;
            Ok(Batch { tokens })
        };
        let batches = (0..self.micro).map(batch).collect::<Result<_>>()?;
        Ok(Some((batches, BATCH as u64)))
    }
}

fn device() -> Result<Device> {
    let name = std::env::var("ANYMESH_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    Ok(anymesh::device(&name)?)
}

/// One way to run the training.
#[derive(Clone, Copy)]
struct Layout {
    axes: &'static str,
    zero: Zero,
    sequence_parallel: bool,
    micro: usize,
}

impl Layout {
    /// What is dropped is drawn for each micro-batch, so that those who have several can only be
    /// compared without.
    fn dropout(&self) -> f64 {
        if self.micro == 1 { 0.1 } else { 0.0 }
    }
}

const ALONE: Layout = Layout {
    axes: "",
    zero: Zero::Off,
    sequence_parallel: false,
    micro: 1,
};

fn trainer(
    device: &Device,
    dtype: DType,
    layout: Layout,
    dropout: f64,
    save: Save,
) -> Result<Trainer<Gpt>> {
    let mesh = match layout.axes {
        "" => Mesh::single(device),
        axes => Mesh::new(axes, device)?,
    };
    let b = Build::new(&mesh, Policy::all(dtype), 11)
        .zero(layout.zero, &["dp"])
        .sequence_parallel(layout.sequence_parallel);
    let model = Gpt::new(&b, dropout)?;
    let rule = Rule::AdamW(AdamW {
        lr: 3e-3,
        ..AdamW::default()
    });
    let mut optimizer = Optimizer::new(&model, &Groups::all(rule))?;
    optimizer.clip = Some(Clip::to(1.0));
    let settings = Settings {
        steps: STEPS,
        save,
        ..Settings::default()
    };
    let schedule = Schedule::Constant {
        warmup: 0,
        warmup_from: 0.0,
    };
    Trainer::new(model, optimizer, schedule, settings)
}

/// The losses of all steps that are left.
fn losses(trainer: &mut Trainer<Gpt>, micro: usize, steps: u64) -> Result<Vec<f64>> {
    let mesh = trainer.task.mesh.clone();
    let mut feed = Lines { mesh, micro };
    let mut losses = vec![];
    for _ in 0..steps {
        let report = trainer.step(&mut feed)?.expect("the data never ends");
        assert!(!report.skipped);
        losses.push(report.loss);
    }
    Ok(losses)
}

fn run(device: &Device, dtype: DType, layout: Layout) -> Result<Vec<f64>> {
    run_with(device, dtype, layout, layout.dropout())
}

fn run_with(device: &Device, dtype: DType, layout: Layout, dropout: f64) -> Result<Vec<f64>> {
    let mut trainer = trainer(device, dtype, layout, dropout, Save::default())?;
    losses(&mut trainer, layout.micro, STEPS)
}

fn layouts() -> Vec<(&'static str, Layout)> {
    let on = |axes| Layout { axes, ..ALONE };
    let zero = |axes, zero| Layout {
        axes,
        zero,
        ..ALONE
    };
    vec![
        ("accumulation", Layout { micro: 4, ..ALONE }),
        ("dp", on("dp=4")),
        ("uneven dp", on("dp=5")),
        ("tp", on("tp=2")),
        ("uneven tp", on("tp=4")),
        (
            "sequence parallel",
            Layout {
                sequence_parallel: true,
                ..on("tp=4")
            },
        ),
        ("zero 1", zero("dp=4", Zero::One)),
        ("zero 2", zero("dp=4", Zero::Two)),
        ("zero 3", zero("dp=4", Zero::Three)),
        ("uneven zero 3", zero("dp=5", Zero::Three)),
        (
            "zero 2 with accumulation",
            Layout {
                micro: 3,
                ..zero("dp=2", Zero::Two)
            },
        ),
        (
            "everything",
            Layout {
                axes: "dp=2, tp=2",
                zero: Zero::Three,
                sequence_parallel: true,
                micro: 3,
            },
        ),
        ("mix", zero("dp=3, tp=2", Zero::One)),
    ]
}

fn gate(dtype: DType, tolerance: f64) -> Result<()> {
    let device = device()?;
    let alone = run(&device, dtype, ALONE)?;
    assert!(
        alone[STEPS as usize - 1] < alone[0] * 0.9,
        "it learns: {alone:?}"
    );
    // One micro-batch, but without dropout: that of a batch in parts.
    let undropped = run_with(&device, dtype, ALONE, 0.0)?;
    for (name, layout) in layouts() {
        let alone = if layout.micro == 1 {
            &alone
        } else {
            &undropped
        };
        let there = run(&device, dtype, layout)?;
        for (step, (a, b)) in alone.iter().zip(&there).enumerate() {
            let apart = (a - b).abs() / a.abs();
            assert!(
                apart <= tolerance,
                "{name}, step {}: {b} instead of {a}, {apart:e} apart",
                step + 1
            );
        }
    }
    Ok(())
}

#[test]
fn losses_in_f64_are_the_same_in_every_layout() -> Result<()> {
    // Shader languages have no functions of f64.
    if !device()?.backend().capabilities().f64_math {
        return Ok(());
    }
    gate(DType::F64, 1e-12)
}

#[test]
fn losses_in_f32_are_the_same_in_every_layout() -> Result<()> {
    gate(DType::F32, 1e-5)
}

/// A folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("anymesh-parity-{name}-{}", std::process::id()));
    std::fs::remove_dir_all(&folder).ok();
    folder
}

#[test]
fn a_run_that_stopped_in_the_middle_goes_on_with_the_same_bits() -> Result<()> {
    let device = device()?;
    let layout = Layout {
        axes: "dp=2, tp=2",
        zero: Zero::One,
        ..ALONE
    };
    let whole = run(&device, DType::F32, layout)?;
    let save = Save {
        folder: Some(folder("resume")),
        ..Save::default()
    };
    let mut first = trainer(&device, DType::F32, layout, 0.1, save.clone())?;
    let mut seen = losses(&mut first, 1, STEPS / 2)?;
    let root = save.folder.clone().expect("given");
    anymesh::checkpoint::save(&root, "step-10", &first.contents())?;
    drop(first);

    let mut second = trainer(&device, DType::F32, layout, 0.1, save.clone())?;
    assert!(second.resume()?.is_some());
    assert_eq!(second.steps_done(), STEPS / 2);
    seen.extend(losses(&mut second, 1, STEPS / 2)?);
    let bits = |losses: &[f64]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&whole), bits(&seen));

    // Another mesh, another stage of ZeRO.
    for other in [
        ALONE,
        Layout {
            axes: "dp=3",
            zero: Zero::Three,
            ..ALONE
        },
    ] {
        let mut third = trainer(&device, DType::F32, other, 0.1, save.clone())?;
        assert!(third.resume()?.is_some());
        for (a, b) in whole[10..].iter().zip(losses(&mut third, other.micro, 10)?) {
            assert!((a - b).abs() / a <= 1e-5, "{b} instead of {a}");
        }
    }
    std::fs::remove_dir_all(&root).ok();
    Ok(())
}
