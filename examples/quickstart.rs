//! A tour in one run: a small language model written once and trained on one device and on a mesh
//! of eight ranks, with the same losses and every byte that crossed; a checkpoint saved while
//! training goes on, and gone on with on other meshes; what a reshard costs; indexing as in NumPy;
//! and the same program on every device of this machine.
//!
//! `cargo run --release --example quickstart`

use anymesh::{
    DType, Device, Mesh, Result, Tensor, TensorType, TypeSpec,
    checkpoint::{self, Background, Checkpoint, Contents, Load, Training},
    i,
    ops::{AttentionOptions, CrossEntropyOptions, NormOptions, Rng, RopeOptions, RopeStyle},
    reshard::{Objective, plan},
    spmd::Ledger,
};
use std::{collections::BTreeMap, error::Error, time::Instant};

const BATCH: usize = 8;
const LENGTH: usize = 32;
const HEADS: usize = 8;
const SIZE: usize = 8;
const WIDTH: usize = HEADS * SIZE;
const VOCABULARY: usize = 60;
const NAMES: [&str; 9] = [
    "embedding",
    "queries",
    "keys",
    "values",
    "output",
    "gate",
    "up",
    "down",
    "head",
];

/// A transformer block between an embedding and a head. Nothing in its code knows of meshes: the
/// batch is cut over `dp` and heads and vocabulary over `tp` because these tensors are, where a mesh
/// has these axes: the `?` says that it may lack them, as a single device does.
struct Model {
    parameters: Vec<Tensor>,
    tokens: Tensor,
    cos: Tensor,
    sin: Tensor,
}

impl Model {
    fn new(mesh: &Mesh) -> Result<Self> {
        let mut rng = Rng::new(42);
        let mut draw = |ty: &str| {
            let ty: TypeSpec = ty.parse()?;
            Tensor::normal(&ty.shape, 0.0, 0.15, ty.dtype, (mesh, &ty), rng.split())?.require_grad()
        };
        let parameters = vec![
            draw("f32[60@tp?, 64]")?,  // embedding
            draw("f32[64@tp?, 64]")?,  // queries
            draw("f32[64@tp?, 64]")?,  // keys
            draw("f32[64@tp?, 64]")?,  // values
            draw("f32[64, 64@tp?]")?,  // output of attention
            draw("f32[128@tp?, 64]")?, // gate
            draw("f32[128@tp?, 64]")?, // up
            draw("f32[64, 128@tp?]")?, // down
            draw("f32[60@tp?, 64]")?,  // head
        ];
        // A text to learn: each line counts up in steps of its own.
        let tokens = Tensor::from_fn([BATCH, LENGTH + 1], (mesh, "[@dp?, _]"), |at| {
            ((at[0] * 7 + at[1] * (at[0] + 1)) % VOCABULARY) as i32
        })?;
        let (cos, sin) = Tensor::rope_tables(LENGTH, SIZE, &RopeOptions::default(), mesh)?;
        Ok(Self {
            parameters,
            tokens,
            cos,
            sin,
        })
    }

    fn loss(&self) -> Result<Tensor> {
        let [embedding, wq, wk, wv, wo, gate, up, down, head] = &self.parameters[..] else {
            unreachable!("nine parameters")
        };
        let x = embedding.embedding(&self.tokens.get(i![.., ..-1])?)?;
        let h = x.rms_norm(&NormOptions::new().eps(1e-6))?;
        let heads = |w: &Tensor| {
            h.linear(w, None)?
                .reshape([BATCH, LENGTH, HEADS, SIZE])?
                .transpose(1, 2)
        };
        let (q, k) = (
            heads(wq)?.rope(&self.cos, &self.sin, RopeStyle::Half)?,
            heads(wk)?.rope(&self.cos, &self.sin, RopeStyle::Half)?,
        );
        let seen = q
            .attention(
                &k,
                &heads(wv)?,
                &AttentionOptions {
                    causal: true,
                    ..Default::default()
                },
            )?
            .out;
        let x = x.add(
            &seen
                .transpose(1, 2)?
                .reshape([BATCH, LENGTH, WIDTH])?
                .linear(wo, None)?,
        )?;
        let h = x.rms_norm(&NormOptions::new().eps(1e-6))?;
        let x = x.add(
            &h.linear(gate, None)?
                .swiglu2(&h.linear(up, None)?)?
                .linear(down, None)?,
        )?;
        let logits = x
            .rms_norm(&NormOptions::new().eps(1e-6))?
            .linear(head, None)?
            .transpose(1, 2)?;
        logits.cross_entropy(
            &self.tokens.get(i![.., 1..])?,
            &CrossEntropyOptions::default(),
        )
    }

    fn named(&self) -> BTreeMap<String, Tensor> {
        NAMES
            .iter()
            .map(|name| name.to_string())
            .zip(self.parameters.iter().cloned())
            .collect()
    }

    /// Takes its parameters from a checkpoint of any layout.
    fn load(&mut self, checkpoint: &Checkpoint) -> checkpoint::Result<()> {
        let loaded = Load::default()
            .replace(checkpoint, &Contents::new(0, self.named()))?
            .tensors;
        for (name, w) in NAMES.iter().zip(&mut self.parameters) {
            *w = loaded[*name].require_grad()?;
        }
        Ok(())
    }

    /// One step of gradient descent. Every gradient ends where its parameter lies.
    fn step(&mut self) -> Result<f64> {
        let loss = self.loss()?;
        let grads = loss.backward()?;
        for w in &mut self.parameters {
            w.update(|w| w.sub(&grads.of(w)?.mul(0.4)?))?;
        }
        Ok(loss.item()?.to_f64())
    }
}

fn train(mesh: &Mesh, steps: usize) -> Result<Vec<f64>> {
    let mut model = Model::new(mesh)?;
    (0..steps).map(|_| model.step()).collect()
}

/// Trains on a mesh, saves in the background halfway while training goes on, and goes on from that
/// checkpoint on other meshes.
fn resume(mesh: &Mesh, device: &Device, losses: &[f64]) -> Result<(), Box<dyn Error>> {
    let root = std::env::temp_dir().join(format!("anymesh-quickstart-{}", std::process::id()));
    let half = losses.len() / 2;
    let mut model = Model::new(mesh)?;
    let mut saver = Background::new(&root);
    let mut longest = 0.0f64;
    for step in 0..losses.len() {
        let start = Instant::now();
        if step == half {
            let state = Training {
                consumed_samples: (step * BATCH) as u64,
                ..Training::default()
            }
            .to_state();
            saver.begin(
                "halfway",
                &Contents {
                    step: step as u64,
                    tensors: model.named(),
                    state,
                    ..Contents::default()
                },
            )?;
        }
        saver.advance(16 << 10)?;
        longest = longest.max(start.elapsed().as_secs_f64() * 1e3);
        model.step()?;
    }
    saver.finish()?;
    let found = checkpoint::latest(&root)?.ok_or("nothing was saved")?;
    let bytes: u64 = found.manifest().files.values().sum();
    println!(
        "\nSaved from {mesh} while it trained ({} files, {bytes} bytes, at most {longest:.1} ms of a step), and gone on with:",
        found.manifest().files.len()
    );
    for axes in ["dp=1, tp=1", "dp=8, tp=1", "dp=1, tp=2", "dp=3, tp=5"] {
        let other = Mesh::new(axes, device)?;
        let mut model = Model::new(&other)?;
        model.load(&found)?;
        let rest = (half..losses.len())
            .map(|_| model.step())
            .collect::<Result<Vec<_>>>()?;
        println!(
            "  {:<18} {:<18} largest difference of the losses {:.1e}",
            other.to_string(),
            model.parameters[1].type_string(),
            difference(&losses[half..], &rest)
        );
    }
    std::fs::remove_dir_all(&root)?;
    Ok(())
}

/// Numbers as bars, the highest for the largest.
fn picture(row: &[f64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let top = row.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    row.iter()
        .map(|v| BARS[(v / top * 7.0).round().clamp(0.0, 7.0) as usize])
        .collect()
}

fn difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = anymesh::default_device()?;
    println!(
        "anymesh on {device}: {}\n",
        device.backend().capabilities().description
    );

    let steps = 60;
    let losses = train(&Mesh::single(&device), steps)?;
    println!(
        "A transformer learns to count, loss {:.3} to {:.3} in {steps} steps:\n  {}",
        losses[0],
        losses[steps - 1],
        picture(&losses)
    );

    let mesh = Mesh::new("dp=2, tp=4", &device)?;
    let sharded = train(&mesh, steps)?;
    println!(
        "\nThe same program on {mesh}: largest difference of all losses {:.1e}. What one step sends:",
        difference(&losses, &sharded)
    );
    let mut model = Model::new(&mesh)?;
    let (result, ledger) = Ledger::record(|| model.step());
    result?;
    let lines: Vec<String> = ledger.to_string().lines().map(str::to_string).collect();
    let (shown, total) = (9.min(lines.len() - 1), &lines[lines.len() - 1]);
    lines[..shown].iter().for_each(|line| println!("  {line}"));
    println!("  ... {total}");

    resume(&mesh, &device, &losses)?;

    let (from, to) = (
        TensorType::parse("f32[4096@dp, 4096@tp]", &mesh)?,
        TensorType::parse("f32[4096@tp@dp, 4096]", &mesh)?,
    );
    println!(
        "\n{}",
        plan(
            &mesh,
            &from.shape,
            from.dtype,
            &from.sharding,
            &to.sharding,
            Objective::Time
        )?
    );

    let table = Tensor::arange(0, 24, 1, DType::I32, &device)?.reshape([4, 6])?;
    let even = table.remainder(2)?.eq(0)?;
    println!(
        "\nIndexing as in NumPy: x[1:3, ::-2] is {:?},",
        table.get(i![1..3, ..;-2])?.to_vec::<i32>()?
    );
    println!(
        "  and x[x % 2 == 0] = -1 makes row 1 {:?}",
        table.set(i![&even], -1)?.get(i![1])?.to_vec::<i32>()?
    );

    println!("\nThe same training on every device here (difference from the first):");
    for found in anymesh::found() {
        let on = match anymesh::device(&found.name) {
            Ok(device) => Mesh::single(&device),
            Err(error) => {
                println!("  {:<8} {error}", found.name);
                continue;
            }
        };
        train(&on, 2)?;
        let start = Instant::now();
        let theirs = train(&on, steps)?;
        let ms = start.elapsed().as_secs_f64() * 1e3 / steps as f64;
        println!(
            "  {:<8} {ms:>8.2} ms a step  largest difference {:.1e}  {}",
            found.name,
            difference(&losses, &theirs),
            found.description
        );
    }

    println!("\nBad input is an error that says what to do:");
    println!(
        "  {}",
        model.parameters[0]
            .add(&table)
            .expect_err("one lies on a mesh, the other does not")
    );
    println!("  {}", table.get(i![9]).expect_err("there are four rows"));
    println!(
        "  {}",
        table
            .cast(DType::F32)?
            .backward()
            .expect_err("nothing was tracked")
    );
    Ok(())
}
