//! A whole training step of a small GPT: forward, backward and AdamW in f32, on one device and on
//! eight simulated ranks.
//!
//! Prints one JSON object: `{"name": .., "parameters": .., "losses": [..], "ms": [..]}`, the losses
//! of all steps and the times of those after the first few. `benches/peers/step.py` runs this and
//! the same step in JAX and PyTorch in turns and prints the ratios; `profile` instead of a number of
//! steps prints where the time goes, kernel by kernel.
//!
//! ```text
//! cargo bench --bench step --no-default-features --features cpu,train -- one 20
//! cargo bench --bench step --no-default-features --features cpu,train -- ranks profile
//! ```

use anymesh::{
    Device, Mesh, Tensor, Timing,
    ops::CrossEntropyOptions,
    train::{
        Build, Error, Module, Pass, Policy, Result,
        models::{Gpt2, Gpt2Config, Tokens},
        optim::{Accumulator, AdamW, Groups, Optimizer, Rule},
    },
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const CONTEXT: usize = 128;
const BATCH: usize = 16;
const VOCABULARY: usize = 512;
/// Steps before the clock runs.
const WARM_UP: usize = 3;

/// A number from -1 to 1 for each position of each stream: simple enough to be the same in any
/// language.
fn noise(stream: u64, at: u64) -> f64 {
    let x = (stream << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 29)) >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

/// The stream of a parameter.
fn stream(name: &str) -> u64 {
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    name.bytes().fold(0x811c_9dc5, hash).into()
}

struct Training {
    mesh: Mesh,
    step: u64,
    model: Gpt2,
    optimizer: Optimizer,
}

impl Training {
    fn new(mesh: &Mesh) -> Result<Self> {
        let config = Gpt2Config {
            vocab_size: VOCABULARY,
            n_positions: CONTEXT,
            n_embd: 256,
            n_layer: 4,
            n_head: 8,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            ..Gpt2Config::default()
        };
        let mut model = Gpt2::new(&Build::new(mesh, Policy::f32(), 1), &config)?;
        model.try_each(&mut |name, parameter| {
            let (value, stream) = (parameter.value().clone(), stream(name));
            let norm = name.contains("ln_") && name.ends_with("weight");
            let (start, columns) = (f64::from(norm), value.dims()[value.rank() - 1]);
            let place = (mesh, value.sharding().clone());
            parameter.set(&Tensor::from_fn(value.shape().clone(), place, |at| {
                let i = at.iter().fold(0, |sum, i| sum * columns + i);
                (start + 0.035 * noise(stream, i as u64)) as f32
            })?)
        })?;
        let adamw = Rule::AdamW(AdamW {
            lr: 3e-4,
            betas: [0.9, 0.95],
            decay: 0.1,
            ..AdamW::default()
        });
        let mut optimizer = Optimizer::new(&model, &Groups::all(adamw))?;
        optimizer.clip = None;
        Ok(Self {
            mesh: mesh.clone(),
            step: 0,
            model,
            optimizer,
        })
    }

    /// The tokens of a step from place `shift` of each line on.
    fn tokens(&self, shift: usize) -> Result<Tensor> {
        let step = self.step << 16;
        let token = move |at: &[usize]| {
            let at = (at[0] * (CONTEXT + 1) + at[1] + shift) as u64;
            ((noise(1 << 20, step + at) + 1.0) / 2.0 * VOCABULARY as f64) as i32
        };
        let place = (&self.mesh, "[@dp?, _]");
        Ok(Tensor::from_fn([BATCH, CONTEXT], place, token)?)
    }

    /// One step, and its loss.
    fn step(&mut self) -> Result<f64> {
        let (inputs, targets) = (self.tokens(0)?, self.tokens(1)?);
        let logits = (self.model).logits(&Tokens::new(inputs), &Pass::eval(), None)?;
        let logits = logits.reshape([BATCH * CONTEXT, VOCABULARY])?;
        let targets = targets.reshape([BATCH * CONTEXT])?;
        let loss = logits.cross_entropy(&targets, &CrossEntropyOptions::default())?;
        let mut sums = Accumulator::default();
        sums.add(&self.model, &loss.backward()?)?;
        let sums = sums.finish(&self.model)?;
        self.optimizer.step(&mut self.model, sums, 1.0)?;
        self.step += 1;
        Ok(loss.item()?.to_f64())
    }
}

/// Kernels that are alike: how long each took.
type Timed = Arc<Mutex<BTreeMap<String, Vec<Duration>>>>;

/// Where the time of some steps goes, in ms a step: all of it, and as it were if kernels always
/// took as long as the fastest of their kind, which says more where other programs run too.
fn profile(device: &Device, training: &mut Training, steps: usize) -> Result<()> {
    let timed = Timed::default();
    let seen = timed.clone();
    let profiling = device.profile(Timing::Done, move |kernel, took| {
        let sizes: Vec<String> = (kernel.outputs().iter())
            .map(|(dtype, shape)| format!("{dtype}{shape}"))
            .collect();
        let name = format!("{} ({}) {}", kernel.op(), kernel.family(), sizes.join(" "));
        if let Ok(mut seen) = seen.lock() {
            seen.entry(name).or_default().push(took);
        }
    });
    let start = Instant::now();
    for _ in 0..steps {
        training.step()?;
    }
    let whole = start.elapsed();
    drop(profiling);
    let ms = |time: Duration| time.as_secs_f64() * 1e3 / steps as f64;
    let timed = timed.lock().map(|all| all.clone()).unwrap_or_default();
    let mut rows: Vec<_> = (timed.into_iter())
        .map(|(name, times)| {
            let fastest = times.iter().min().copied().unwrap_or_default();
            let (all, count) = (times.iter().sum::<Duration>(), times.len());
            (fastest * count as u32, all, count, name)
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.0));
    let fastest: Duration = rows.iter().map(|row| row.0).sum();
    let all: Duration = rows.iter().map(|row| row.1).sum();
    println!(
        "a step {:.1} ms, kernels {:.1} ms, at their fastest {:.1} ms",
        ms(whole),
        ms(all),
        ms(fastest)
    );
    for (fastest, all, count, name) in rows {
        let count = count / steps;
        println!(
            "{:8.2} ms {:8.2} ms {count:5} x {name}",
            ms(fastest),
            ms(all)
        );
    }
    Ok(())
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let name = arguments.first().map_or("one", String::as_str);
    let device = anymesh::device("cpu")?;
    let mesh = match name {
        "ranks" => Mesh::new("dp=2, tp=4", &device)?,
        _ => Mesh::single(&device),
    };
    let mut training = Training::new(&mesh)?;
    let mut losses = vec![];
    for _ in 0..WARM_UP {
        losses.push(training.step()?);
    }
    if arguments.get(1).is_some_and(|text| text == "profile") {
        return profile(&device, &mut training, 10);
    }
    let steps = arguments.get(1).and_then(|text| text.parse().ok());
    let mut times = vec![];
    for _ in 0..steps.unwrap_or(20) {
        let start = Instant::now();
        losses.push(training.step()?);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let parameters = training.model.count();
    println!(
        "{{\"name\": \"{name}\", \"parameters\": {parameters}, \"losses\": {losses:?}, \"ms\": {times:.2?}}}"
    );
    Ok(())
}
