//! A whole training step of a small GPT: forward, backward and AdamW in f32, on one device and on
//! eight simulated ranks.
//!
//! Prints one JSON object: `{"name": .., "parameters": .., "losses": [..], "ms": [..]}`, the losses
//! of all steps and the times of those after the first few. `benches/peers/step.py` runs this and
//! the same step in JAX and PyTorch in turns and prints the ratios; `profile` instead of a number of
//! steps prints where the time goes, kernel by kernel.
//!
//! ```text
//! cargo bench --bench step --no-default-features --features cpu -- one 20
//! cargo bench --bench step --no-default-features --features cpu -- ranks profile
//! ```

use anymesh::{Timing, ops::Expr, prelude::*};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const LAYERS: usize = 4;
const WIDTH: usize = 256;
const HEADS: usize = 8;
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

/// The parameters by name, and for each its first and second moment.
struct Training {
    mesh: Mesh,
    step: u64,
    parameters: BTreeMap<String, [Tensor; 3]>,
}

impl Training {
    fn new(mesh: &Mesh) -> Result<Self> {
        let mut names = vec![];
        let mut add = |name: String, shape: &[usize], sharding: &'static str, start: f64| {
            names.push((name, shape.to_vec(), sharding, start));
        };
        let (c, wide) = (WIDTH, 4 * WIDTH);
        add("tokens".into(), &[VOCABULARY, c], "[@tp?, _]", 0.0);
        add("positions".into(), &[CONTEXT, c], "[_, _]", 0.0);
        for layer in 0..LAYERS {
            let mut add = |name: &str, shape: &[usize], sharding, start| {
                add(format!("{layer}.{name}"), shape, sharding, start)
            };
            for norm in ["norm1", "norm2"] {
                add(&format!("{norm}.weight"), &[c], "[_]", 1.0);
                add(&format!("{norm}.bias"), &[c], "[_]", 0.0);
            }
            for name in ["q", "k", "v"] {
                add(&format!("{name}.weight"), &[c, c], "[@tp?, _]", 0.0);
                add(&format!("{name}.bias"), &[c], "[@tp?]", 0.0);
            }
            add("out.weight", &[c, c], "[_, @tp?]", 0.0);
            add("out.bias", &[c], "[_]", 0.0);
            add("up.weight", &[wide, c], "[@tp?, _]", 0.0);
            add("up.bias", &[wide], "[@tp?]", 0.0);
            add("down.weight", &[c, wide], "[_, @tp?]", 0.0);
            add("down.bias", &[c], "[_]", 0.0);
        }
        add("norm.weight".into(), &[c], "[_]", 1.0);
        add("norm.bias".into(), &[c], "[_]", 0.0);
        let mut parameters = BTreeMap::new();
        for (stream, (name, shape, sharding, start)) in names.into_iter().enumerate() {
            let columns = *shape.last().unwrap_or(&1);
            let w = Tensor::from_fn(shape, (mesh, sharding), |at| {
                let i = at.iter().fold(0, |sum, i| sum * columns + i);
                (start + 0.035 * noise(stream as u64, i as u64)) as f32
            })?;
            let moments = [w.zeros_like()?, w.zeros_like()?];
            let [m, v] = moments;
            parameters.insert(name, [w.require_grad()?, m, v]);
        }
        Ok(Self {
            mesh: mesh.clone(),
            step: 0,
            parameters,
        })
    }

    fn w(&self, name: &str) -> &Tensor {
        &self.parameters[name][0]
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|kind| self.w(&format!("{name}.{kind}")));
        x.layer_norm(&NormOptions::new().weight(weight).bias(bias))
    }

    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|kind| self.w(&format!("{name}.{kind}")));
        x.linear(weight, Some(bias))
    }

    fn block(&self, layer: usize, x: &Tensor) -> Result<Tensor> {
        let name = |part: &str| format!("{layer}.{part}");
        let h = self.norm(&name("norm1"), x)?;
        let heads = ["q", "k", "v"].map(|part| {
            let [weight, bias] =
                ["weight", "bias"].map(|kind| self.w(&format!("{layer}.{part}.{kind}")));
            (weight, Some(bias))
        });
        let heads = (h.linear_each(&heads)?.iter())
            .map(|x| {
                x.reshape([BATCH, CONTEXT, HEADS, WIDTH / HEADS])?
                    .transpose(1, 2)
            })
            .collect::<Result<Vec<_>>>()?;
        let seen = heads[0].attention(&heads[1], &heads[2], &AttentionOptions::causal())?;
        let seen = seen.out.transpose(1, 2)?.reshape([BATCH, CONTEXT, WIDTH])?;
        let x = x.add(&self.linear(&name("out"), &seen)?)?;
        let h = self.norm(&name("norm2"), &x)?;
        let h = self.linear(&name("up"), &h)?.gelu_tanh()?;
        x.add(&self.linear(&name("down"), &h)?)
    }

    fn loss(&self) -> Result<Tensor> {
        let line = |shift: usize| {
            let step = self.step << 16;
            Tensor::from_fn([BATCH, CONTEXT], (&self.mesh, "[@dp?, _]"), move |at| {
                let at = (at[0] * (CONTEXT + 1) + at[1] + shift) as u64;
                ((noise(1 << 20, step + at) + 1.0) / 2.0 * VOCABULARY as f64) as i32
            })
        };
        let x = self.w("tokens").embedding(&line(0)?)?;
        let mut x = x.add(self.w("positions"))?;
        for layer in 0..LAYERS {
            x = self.block(layer, &x)?;
        }
        let logits = self.norm("norm", &x)?.linear(self.w("tokens"), None)?;
        let logits = logits.reshape([BATCH * CONTEXT, VOCABULARY])?;
        let targets = line(1)?.reshape([BATCH * CONTEXT])?;
        logits.cross_entropy(&targets, &CrossEntropyOptions::default())
    }

    /// One step with AdamW. Every gradient ends where its parameter lies.
    fn step(&mut self) -> Result<f64> {
        let loss = self.loss()?;
        let gradients = loss.backward()?;
        self.step += 1;
        let unbias = [0.9, 0.95].map(|beta| 1.0 - f64::powi(beta, self.step as i32));
        for [w, m, v] in self.parameters.values_mut() {
            let next = no_grad(|| {
                Expr::new("adamw", &[&*w, &gradients.of(w)?, &*m, &*v])
                    .params(&unbias)
                    .maps([DType::F32; 3], |a| {
                        let (w, g) = (a.x[0], a.x[1]);
                        let m = a.x[2] * 0.9 + g * 0.1;
                        let v = a.x[3] * 0.95 + g * g * 0.05;
                        let step = m / a.p[0] / ((v / a.p[1]).sqrt() + 1e-8);
                        [w - (step + w * 0.1) * 3e-4, m, v]
                    })
            })?;
            let [next, next_m, next_v] = next;
            (*w, *m, *v) = (w.with_values(&next)?, next_m, next_v);
        }
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
        println!("{:8.2} ms {:8.2} ms {count:5} x {name}", ms(fastest), ms(all));
    }
    Ok(())
}

fn main() -> Result<()> {
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
    let parameters = training.parameters.values().map(|[w, ..]| w.numel());
    println!(
        "{{\"name\": \"{name}\", \"parameters\": {}, \"losses\": {losses:?}, \"ms\": {times:.2?}}}",
        parameters.sum::<usize>()
    );
    Ok(())
}
