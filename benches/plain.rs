//! A training step of GPT-2 124M as a program of its own would have it: tensors, ops and a loop,
//! nothing of `anymesh_train`.
//!
//! `ops` takes the ops that stand for a layer (norms, attention, cross-entropy); `composed` has
//! nothing but elementwise ops, reductions and products, and what may become one kernel is for the
//! device to find. Prints one JSON object, as `benches/step.rs` does;
//! `benches/peers/torch_plain.py` runs this and the same programs in PyTorch.
//!
//! ```text
//! cargo bench --bench plain --features cuda -- eager:cuda:0 ops 16x1024 20
//! cargo bench --bench plain --features cuda -- cuda:0 composed 16x1024 20
//! cargo bench --bench plain -- deferred:idle composed 16x1024 launches
//! ```
//!
//! `launches` instead of a number of steps shows what a step launches, how long each takes if the device
//! is waited for, and how many bytes it reads and writes; `idle` has every kernel and makes none.

use anymesh::{Profiling, Timing, prelude::*};
use std::{
    collections::BTreeMap,
    error::Error as StdError,
    f64::consts::PI,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

const LAYERS: usize = 12;
const WIDTH: usize = 768;
const HEADS: usize = 12;
const VOCABULARY: usize = 50_304;
const CONTEXT: usize = 1024;
const WARM_UP: usize = 3;

/// A parameter and the moments that AdamW keeps of it.
struct Parameter {
    value: Tensor,
    moments: [Tensor; 2],
}

struct Model {
    parameters: BTreeMap<String, Parameter>,
    composed: bool,
    mask: Tensor,
}

impl Model {
    fn new(composed: bool, tokens: usize, device: &Device) -> Result<Self> {
        let mut shapes = vec![
            ("wte".to_string(), vec![VOCABULARY, WIDTH]),
            ("wpe".into(), vec![CONTEXT, WIDTH]),
            ("ln.weight".into(), vec![WIDTH]),
            ("ln.bias".into(), vec![WIDTH]),
        ];
        for layer in 0..LAYERS {
            let mut add = |name: &str, dims: &[usize]| {
                shapes.push((format!("{layer}.{name}"), dims.to_vec()));
            };
            for norm in ["ln1", "ln2"] {
                add(&format!("{norm}.weight"), &[WIDTH]);
                add(&format!("{norm}.bias"), &[WIDTH]);
            }
            for (name, rows, columns) in [
                ("qkv", 3 * WIDTH, WIDTH),
                ("out", WIDTH, WIDTH),
                ("up", 4 * WIDTH, WIDTH),
                ("down", WIDTH, 4 * WIDTH),
            ] {
                add(&format!("{name}.weight"), &[rows, columns]);
                add(&format!("{name}.bias"), &[rows]);
            }
        }
        let mut rng = Rng::new(1);
        let mut parameters = BTreeMap::new();
        for (name, dims) in shapes {
            let value = match name.as_str() {
                name if name.contains("ln") && name.ends_with("weight") => {
                    Tensor::ones(dims, DType::F32, device)?
                }
                name if name.ends_with("bias") => Tensor::zeros(dims, DType::F32, device)?,
                _ => Tensor::normal(dims, 0.0, 0.02, DType::F32, device, rng.split())?,
            };
            let moments = [value.zeros_like()?, value.zeros_like()?];
            let value = value.require_grad()?;
            parameters.insert(name, Parameter { value, moments });
        }
        Ok(Self {
            parameters,
            composed,
            mask: Tensor::tril_mask(tokens, tokens, 0, device)?,
        })
    }

    fn of(&self, name: &str) -> &Tensor {
        &self.parameters[name].value
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let (weight, bias) = (
            self.of(&format!("{name}.weight")),
            self.of(&format!("{name}.bias")),
        );
        if !self.composed {
            let options = NormOptions::new().weight(weight).bias(bias);
            return x.layer_norm(&options)?.cast(DType::BF16);
        }
        let off = (x - x.mean(&[-1], true)?)?;
        let deviation = (off.square()?.mean(&[-1], true)? + 1e-5)?.sqrt()?;
        (off / deviation * weight + bias)?.cast(DType::BF16)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let part = |part: &str| self.of(&format!("{name}.{part}")).cast(DType::BF16);
        let (weight, bias) = (part("weight")?, part("bias")?);
        match self.composed {
            true => x.matmul(&weight.transpose(0, 1)?)? + bias,
            false => x.linear(&weight, Some(&bias)),
        }
    }

    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if !self.composed {
            return Ok(q.attention(k, v, &AttentionOptions::causal())?.out);
        }
        let scale = 1.0 / ((WIDTH / HEADS) as f64).sqrt();
        let scores = (q.matmul(&k.transpose(-2, -1)?)?.cast(DType::F32)? * scale)?;
        let seen = self.mask.where_(&scores, f32::NEG_INFINITY)?;
        let e = (&seen - seen.amax(&[-1], true)?)?.exp()?;
        let weights = (&e / e.sum(&[-1], true)?)?;
        weights.cast(DType::BF16)?.matmul(v)
    }

    fn gelu(&self, x: &Tensor) -> Result<Tensor> {
        if !self.composed {
            return x.gelu_tanh();
        }
        let x = x.cast(DType::F32)?;
        let inner = ((&x + (x.square()? * 0.044715)? * &x)? * (2.0 / PI).sqrt())?;
        ((x * 0.5)? * (inner.tanh()? + 1.0))?.cast(DType::BF16)
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (texts, tokens) = (ids.dims()[0], ids.dims()[1]);
        let places = self.of("wpe").get(i![..tokens])?;
        let mut x = (self.of("wte").embedding(ids)? + places)?;
        for layer in 0..LAYERS {
            let name = |part: &str| format!("{layer}.{part}");
            let h = self.norm(&x, &name("ln1"))?;
            let qkv = self.linear(&h, &name("qkv"))?;
            let heads = |part: usize| {
                let part = qkv.get(i![.., .., part * WIDTH..(part + 1) * WIDTH])?;
                part.reshape([texts, tokens, HEADS, WIDTH / HEADS])?
                    .transpose(1, 2)
            };
            let seen = self.attention(&heads(0)?, &heads(1)?, &heads(2)?)?;
            let seen = seen.transpose(1, 2)?.reshape([texts, tokens, WIDTH])?;
            x = (&x + self.linear(&seen, &name("out"))?)?;
            let h = self.norm(&x, &name("ln2"))?;
            let up = self.gelu(&self.linear(&h, &name("up"))?)?;
            x = (&x + self.linear(&up, &name("down"))?)?;
        }
        let head = self.of("wte").cast(DType::BF16)?.transpose(0, 1)?;
        let logits = self.norm(&x, "ln")?.matmul(&head)?;
        let logits = logits.reshape([texts * tokens, VOCABULARY])?;
        let targets = targets.reshape([texts * tokens])?;
        if !self.composed {
            let options = CrossEntropyOptions::default();
            return logits.cast(DType::F32)?.cross_entropy(&targets, &options);
        }
        let logits = logits.cast(DType::F32)?;
        let chosen = logits.gather(-1, &targets.reshape([texts * tokens, 1])?)?;
        (logits.logsumexp(&[-1], true)? - chosen)?.mean_all()
    }

    fn step(&mut self, ids: &Tensor, targets: &Tensor, number: i32) -> Result<Tensor> {
        let loss = self.loss(ids, targets)?;
        let gradients = loss.backward()?;
        let (rate, decay, betas) = (3e-4, 0.1, [0.9f64, 0.95]);
        let unbias = betas.map(|beta| 1.0 - beta.powi(number));
        for parameter in self.parameters.values_mut() {
            let g = gradients.of(&parameter.value)?;
            let [m, v] = &parameter.moments;
            let m = ((m * betas[0])? + &g * (1.0 - betas[0]))?;
            let v = ((v * betas[1])? + g.square()? * (1.0 - betas[1]))?;
            let step = ((&m / unbias[0])? / ((&v / unbias[1])?.sqrt()? + 1e-8))?;
            parameter
                .value
                .update(|w| (w * (1.0 - rate * decay))? - step * rate)?;
            parameter.moments = [m, v];
        }
        Ok(loss.detach())
    }
}

/// Launches that are alike.
#[derive(Default)]
struct Alike {
    count: usize,
    bytes: f64,
    took: Duration,
}

type Seen = BTreeMap<String, Alike>;

fn watch(device: &Device, seen: Arc<Mutex<Seen>>) -> Profiling {
    device
        .innermost()
        .profile(Timing::Done, move |kernel, took| {
            let text = |(dtype, shape): &(DType, Shape)| format!("{dtype}{shape}");
            let read = kernel
                .operands()
                .map(|view| text(&(view.dtype, view.layout.shape.clone())));
            let read = read.collect::<Vec<_>>().join(" ");
            let written = kernel
                .outputs()
                .iter()
                .map(text)
                .collect::<Vec<_>>()
                .join(" ");
            let what = format!("{} ({}) {read} -> {written}", kernel.op(), kernel.family());
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            let row = seen.entry(what).or_default();
            row.count += 1;
            row.bytes += kernel.work().bytes;
            row.took += took;
        })
}

fn main() -> std::result::Result<(), Box<dyn StdError>> {
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let word = |k: usize, or: &str| words.get(k).map_or(or.to_string(), String::clone);
    let device = match word(0, "cpu").as_str() {
        "idle" => anymesh_bench::idle(),
        "deferred:idle" => anymesh_engine::deferred(&anymesh_bench::idle()),
        name => anymesh::device(name)?,
    };
    let composed = match word(1, "ops").as_str() {
        "ops" => false,
        "composed" => true,
        other => return Err(format!("'{other}' is neither ops nor composed").into()),
    };
    let batch = word(2, "16x1024");
    let (texts, tokens) = batch.split_once('x').ok_or("a batch is such as 16x1024")?;
    let (texts, tokens): (usize, usize) = (texts.parse()?, tokens.parse()?);
    let launches = word(3, "20") == "launches";
    let steps: usize = match launches {
        true => 1,
        false => word(3, "20").parse()?,
    };

    let seen = Arc::<Mutex<Seen>>::default();
    let mut watched = None;
    let mut model = Model::new(composed, tokens, &device)?;
    let (mut losses, mut ms, mut host_ms) = (vec![], vec![], vec![]);
    for number in 0..WARM_UP + steps {
        let token = |shift: usize| {
            Tensor::from_fn([texts, tokens], &device, |at| {
                let at = (number * texts + at[0]) * (tokens + 1) + at[1] + shift;
                ((at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as i32 % 5000
            })
        };
        let (ids, targets) = (token(0)?, token(1)?);
        device.sync()?;
        if number == WARM_UP {
            device.reset_peak();
            watched = launches.then(|| watch(&device, seen.clone()));
        }
        let start = Instant::now();
        let loss = model.step(&ids, &targets, number as i32 + 1)?;
        let host = start.elapsed();
        device.sync()?;
        let done = start.elapsed();
        losses.push(loss.item()?.to_f64());
        if number >= WARM_UP {
            ms.push(done.as_secs_f64() * 1e3);
            host_ms.push(host.as_secs_f64() * 1e3);
        }
    }
    if watched.take().is_some() {
        let seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<_> = seen.iter().collect();
        rows.sort_by(|a, b| b.1.bytes.total_cmp(&a.1.bytes));
        for (what, row) in rows {
            let (count, gb, ms) = (row.count, row.bytes / 1e9, row.took.as_secs_f64() * 1e3);
            println!("{count:6} x {gb:9.3} GB {ms:9.3} ms {what}");
        }
        return Ok(());
    }
    let peak = device.memory().peak;
    let found = serde_json::json!({ "losses": losses, "ms": ms, "host_ms": host_ms, "peak": peak });
    println!("{found}");
    Ok(())
}
