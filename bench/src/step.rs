//! A whole training step: loss, gradients, update.

use crate::{
    Error, Families, Result,
    noise::{noise, stream},
};
use anymesh_core::{Device, Mesh, Tensor};
use anymesh_train::{
    Build, Module, Pass, Policy,
    models::{Gpt2Config, LlamaConfig, Model, ModelConfig, Tokens},
    objective::{Language, language, normalised},
    optim::{Accumulator, AdamW, Groups, Optimizer, Rule},
};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Steps before the clock runs.
pub const WARM_UP: usize = 3;

/// Which step is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The name of the model.
    pub name: String,
    /// The model.
    pub model: ModelConfig,
    /// The dtypes.
    pub policy: Policy,
    /// Texts in a batch, and tokens in a text.
    pub batch: [usize; 2],
    /// The axes of the mesh of simulated ranks; none is a single device.
    pub mesh: Option<String>,
}

/// What [`Spec::measure`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The model.
    pub name: String,
    /// Its dtype of products.
    pub dtype: String,
    /// Texts in a batch, and tokens in a text.
    pub batch: [usize; 2],
    /// The model's parameters.
    pub parameters: usize,
    /// The loss of each step, of those before the clock ran too.
    pub losses: Vec<f64>,
    /// How long each step took until the device was done, in ms.
    pub ms: Vec<f64>,
    /// How long it was until the host had launched everything, in ms.
    pub host_ms: Vec<f64>,
    /// The most bytes that tensors held at a time while the clock ran.
    pub peak: u64,
}

/// Where the time of steps goes, with the device waited for after each kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// How many steps were looked at.
    pub steps: usize,
    /// How long they took together.
    pub whole: Duration,
    /// The kernels.
    pub rows: Vec<crate::Row>,
}

impl Spec {
    /// The models that have a name, each with the batch it is measured with.
    pub const MODELS: [&'static str; 4] = ["gpt2", "llama", "small", "tiny"];

    /// A model by its name: `gpt2` is GPT-2 of 124M parameters with 16x1024 tokens, `llama` one layer
    /// of Llama 3 8B with 4x2048, `small` a GPT of 3.3M for CPUs with 16x128, `tiny` one for tests.
    pub fn named(name: &str) -> Result<Self> {
        let gpt = |vocab_size, n_positions, n_embd, n_layer, n_head| {
            ModelConfig::Gpt2(Gpt2Config {
                vocab_size,
                n_positions,
                n_embd,
                n_layer,
                n_head,
                resid_pdrop: 0.0,
                embd_pdrop: 0.0,
                attn_pdrop: 0.0,
                ..Gpt2Config::default()
            })
        };
        let (model, batch) = match name {
            "gpt2" => (gpt(50_304, 1024, 768, 12, 12), [16, 1024]),
            // A small vocabulary: what counts is the layer.
            "llama" => {
                let layer = LlamaConfig {
                    vocab_size: 512,
                    intermediate_size: 14_336,
                    num_hidden_layers: 1,
                    num_key_value_heads: Some(8),
                    max_position_embeddings: 8192,
                    rope_theta: 500_000.0,
                    rms_norm_eps: 1e-5,
                    ..LlamaConfig::default()
                };
                (ModelConfig::Llama(layer), [4, 2048])
            }
            "small" => (gpt(512, 128, 256, 4, 8), [16, 128]),
            "tiny" => (gpt(64, 16, 32, 2, 4), [2, 16]),
            _ => {
                let known = Self::MODELS.join(", ");
                return Err(Error::config(
                    "model",
                    format!("'{name}' is none of {known}"),
                ));
            }
        };
        Ok(Self {
            name: name.into(),
            model,
            policy: Policy::f32(),
            batch,
            mesh: None,
        })
    }

    /// From words in any order: a model, `bf16`, `f16` or `f32`, texts and tokens such as `16x1024`,
    /// and the axes of a mesh such as `dp=2,tp=4`. What is not said is as [`named`](Self::named)
    /// has it, of `gpt2`, in f32.
    pub fn parse(words: &[&str]) -> Result<Self> {
        let of_model = |word: &&&str| Self::MODELS.contains(word);
        let mut spec = Self::named(words.iter().find(of_model).copied().unwrap_or(&"gpt2"))?;
        for word in words {
            if Self::MODELS.contains(word) {
                continue;
            }
            if word.contains('=') {
                spec.mesh = Some((*word).into());
            } else if let Some((texts, tokens)) = word.split_once('x') {
                let size = |text: &str| match text.parse() {
                    Ok(size) if size > 0 => Ok(size),
                    _ => Err(Error::config(
                        "batch",
                        format!("'{word}' is not texts x tokens, such as 16x1024"),
                    )),
                };
                spec.batch = [size(texts)?, size(tokens)?];
            } else {
                spec.policy = Policy::named(word)?;
                // Losses widen small floats as they read them: logits may stay small.
                spec.policy.output = spec.policy.compute;
            }
        }
        let longest = spec.model.longest();
        match spec.batch[1] > longest {
            true => Err(Error::config(
                "batch",
                format!("texts of {} have at most {longest} tokens", spec.name),
            )),
            false => Ok(spec),
        }
    }

    /// The step on a device: `steps` of them after [`WARM_UP`] more.
    pub fn measure(&self, device: &Device, steps: usize) -> Result<Measured> {
        let mut training = Training::new(self, device)?;
        let (mut losses, mut ms, mut host_ms) = (vec![], vec![], vec![]);
        for i in 0..WARM_UP + steps {
            let batch = training.batch()?;
            device.sync()?;
            if i == WARM_UP {
                device.reset_peak();
            }
            let start = Instant::now();
            let loss = training.step(&batch)?;
            let host = start.elapsed();
            device.sync()?;
            let done = start.elapsed();
            losses.push(loss.item()?.to_f64());
            if i >= WARM_UP {
                ms.push(done.as_secs_f64() * 1e3);
                host_ms.push(host.as_secs_f64() * 1e3);
            }
        }
        Ok(Measured {
            name: self.name.clone(),
            dtype: self.policy.compute.name().into(),
            batch: self.batch,
            parameters: training.model.count(),
            losses,
            ms,
            host_ms,
            peak: device.memory().peak,
        })
    }

    /// Where the time of `steps` steps goes.
    pub fn profile(&self, device: &Device, steps: usize) -> Result<Profile> {
        let mut training = Training::new(self, device)?;
        for _ in 0..WARM_UP {
            let batch = training.batch()?;
            training.step(&batch)?;
        }
        let batches = (0..steps)
            .map(|_| training.batch())
            .collect::<Result<Vec<_>>>()?;
        device.sync()?;
        let families = Families::of(device);
        let start = Instant::now();
        for batch in &batches {
            training.step(batch)?;
        }
        device.sync()?;
        Ok(Profile {
            steps,
            whole: start.elapsed(),
            rows: families.rows(),
        })
    }
}

/// One JSON object.
impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Numbers and texts always have a form in JSON.
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3 / self.steps.max(1) as f64;
        let (all, best) = self.rows.iter().fold((0.0, 0.0), |(all, best), row| {
            (all + ms(row.all), best + ms(row.at_best()))
        });
        writeln!(
            f,
            "a step {:.1} ms, kernels {all:.1} ms, at their fastest {best:.1} ms; each is waited for",
            ms(self.whole)
        )?;
        let mut groups: Vec<(String, f64, usize)> = vec![];
        for row in &self.rows {
            let name = format!("{} ({})", row.op, row.family);
            match groups.iter_mut().find(|group| group.0 == name) {
                Some(group) => {
                    group.1 += ms(row.all);
                    group.2 += row.count;
                }
                None => groups.push((name, ms(row.all), row.count)),
            }
        }
        groups.sort_by(|a, b| b.1.total_cmp(&a.1));
        writeln!(f, "\nby op (kernel family), ms a step:")?;
        for (name, time, count) in &groups {
            writeln!(f, "{time:10.3} {:6} x {name}", count / self.steps.max(1))?;
        }
        writeln!(f, "\nby kernel, ms a step at the fastest, as it was:")?;
        for row in &self.rows {
            let (best, all) = (ms(row.at_best()), ms(row.all));
            let (count, name) = (row.count / self.steps.max(1), row.op);
            let (family, outputs) = (row.family, &row.outputs);
            writeln!(
                f,
                "{best:10.3} {all:10.3} {count:6} x {name} ({family}) {outputs}"
            )?;
        }
        Ok(())
    }
}

/// A model that is being trained.
#[derive(Debug)]
struct Training {
    mesh: Mesh,
    model: Model,
    optimizer: Optimizer,
    batch: [usize; 2],
    vocabulary: usize,
    /// Batches that were made.
    made: u64,
}

/// The inputs and the labels of a step.
type Batch = [Tensor; 2];

impl Training {
    fn new(spec: &Spec, device: &Device) -> Result<Self> {
        let mesh = match &spec.mesh {
            Some(axes) => Mesh::new(axes, device)?,
            None => Mesh::single(device),
        };
        let mut model = spec.model.build(&Build::new(&mesh, spec.policy, 1))?;
        model.try_each(&mut |name, parameter| {
            let (value, stream) = (parameter.value().clone(), stream(name));
            let is_norm = name.contains("ln_") || name.contains("norm");
            let start = f64::from(is_norm && name.ends_with("weight"));
            let columns = value.dims()[value.rank() - 1];
            let place = (&mesh, value.sharding().clone());
            let values = Tensor::from_fn(value.shape().clone(), place, |at| {
                let i = at.iter().fold(0, |sum, i| sum * columns + i);
                (start + 0.035 * noise(stream, i as u64)) as f32
            })?;
            parameter.set(&values)
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
            mesh,
            model,
            optimizer,
            batch: spec.batch,
            vocabulary: spec.model.vocabulary(),
            made: 0,
        })
    }

    /// The next batch.
    fn batch(&mut self) -> Result<Batch> {
        let ([_, tokens], vocabulary, step) = (self.batch, self.vocabulary, self.made << 16);
        let from = |shift: usize| {
            let token = |at: &[usize]| {
                let at = (at[0] * (tokens + 1) + at[1] + shift) as u64;
                ((noise(1 << 20, step + at) + 1.0) / 2.0 * vocabulary as f64) as i32
            };
            Tensor::from_fn(self.batch, (&self.mesh, "[@dp?, _]"), token)
        };
        let batch = [from(0)?, from(1)?];
        self.made += 1;
        Ok(batch)
    }

    /// One step, and its loss, which is not waited for.
    fn step(&mut self, [inputs, labels]: &Batch) -> Result<Tensor> {
        let tokens = Tokens::new(inputs.clone());
        let logits = self.model.logits(&tokens, &Pass::eval(), None)?;
        let sum = language(&logits, labels, &Language::default())?;
        drop(logits);
        let loss = normalised(&sum, labels.numel() as f64)?;
        let gradients = loss.backward()?;
        let mut sums = Accumulator::default();
        sums.add(&self.model, &gradients)?;
        drop(gradients);
        let sums = sums.finish(&self.model)?;
        self.optimizer.step(&mut self.model, sums, 1.0)?;
        Ok(loss.detach())
    }
}
