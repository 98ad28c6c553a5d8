//! A small language model that learns a text letter by letter: what the page trains.
//!
//! Nothing in it knows of meshes or devices, so the tests run the same file natively and hold the
//! browser's losses against that.

use anymesh_core::{
    DType, Error, Mesh, Result, Tensor,
    grad::no_grad,
    i,
    ops::{AttentionOptions, CrossEntropyOptions, Expr, NormOptions, Rng, RopeOptions, RopeStyle},
};

/// What may be chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub context: usize,
    pub batch: usize,
    pub rate: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            layers: 1,
            width: 64,
            heads: 4,
            context: 32,
            batch: 8,
            rate: 3e-3,
        }
    }
}

/// The letters of a text, numbered in their order.
pub struct Text {
    letters: Vec<char>,
    tokens: Vec<i32>,
}

impl Text {
    /// A text to learn: longer than a row of `context` letters and the one after it.
    pub fn new(text: &str, context: usize) -> Result<Self> {
        let mut letters: Vec<char> = text.chars().collect();
        let count = letters.len();
        letters.sort_unstable();
        letters.dedup();
        let wrong = |reason: String| Err(Error::argument("train", "text", reason));
        if count < context + 2 {
            return wrong(format!(
                "a text of {count} letters: at least {} are needed for rows of {context}",
                context + 2
            ));
        }
        if letters.len() > 512 {
            return wrong(format!("{} different letters: at most 512", letters.len()));
        }
        let number = |c| letters.partition_point(|l| *l < c) as i32;
        let tokens = text.chars().map(number).collect();
        Ok(Self { letters, tokens })
    }

    /// How many different letters there are.
    pub fn vocabulary(&self) -> usize {
        self.letters.len()
    }

    /// The letter with this number.
    pub fn letter(&self, token: usize) -> char {
        self.letters.get(token).copied().unwrap_or(' ')
    }

    /// Rows of `length` tokens from places that the step decides.
    fn rows(&self, step: u64, rows: usize, length: usize, mesh: &Mesh) -> Result<Tensor> {
        let starts = self.tokens.len() - length + 1;
        Tensor::from_fn([rows, length], (mesh, "[@dp?, _]"), |at| {
            let x = (step * rows as u64 + at[0] as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            self.tokens[((x >> 33) as usize % starts) + at[1]]
        })
    }

    /// The end of the text that a row of the model has room for.
    fn last(&self, said: &[i32], context: usize, mesh: &Mesh) -> Result<Tensor> {
        let all: Vec<i32> = self.tokens.iter().chain(said).copied().collect();
        let row = &all[all.len() - context..];
        Tensor::from_fn([1, context], (mesh, "[@dp?, _]"), |at| row[at[1]])
    }
}

struct Parameter {
    value: Tensor,
    moments: [Tensor; 2],
}

/// The model, on a mesh.
pub struct Model {
    options: Options,
    mesh: Mesh,
    parameters: Vec<(String, Parameter)>,
    rope: (Tensor, Tensor),
    steps: u64,
}

/// The matrices of a layer and where each lies: `tp` cuts heads and the inner width, where there is
/// such an axis.
const LAYER: [(&str, &str); 7] = [
    ("queries", "[@tp?, _]"),
    ("keys", "[@tp?, _]"),
    ("values", "[@tp?, _]"),
    ("output", "[_, @tp?]"),
    ("gate", "[@tp?, _]"),
    ("up", "[@tp?, _]"),
    ("down", "[_, @tp?]"),
];

impl Model {
    /// A model with weights drawn from a fixed seed: the same on every mesh.
    pub fn new(options: Options, vocabulary: usize, mesh: &Mesh) -> Result<Self> {
        let (c, inner) = (options.width, 2 * options.width);
        if options.heads == 0 || c % (2 * options.heads) != 0 {
            return Err(Error::argument(
                "train",
                "heads",
                format!(
                    "{} heads do not divide a width of {c} into even parts",
                    options.heads
                ),
            ));
        }
        let mut rng = Rng::new(42);
        let mut parameters = vec![];
        let mut draw = |name: String, shape: [usize; 2], lies: &str| -> Result<()> {
            let scale = 0.5 / (shape[1] as f64).sqrt();
            let value = Tensor::normal(shape, 0.0, scale, DType::F32, (mesh, lies), rng.split())?;
            let value = value.require_grad()?;
            let zeros = || value.detach().zeros_like();
            let moments = [zeros()?, zeros()?];
            parameters.push((name, Parameter { value, moments }));
            Ok(())
        };
        draw("embedding".into(), [vocabulary, c], "[@tp?, _]")?;
        for layer in 0..options.layers {
            for (name, lies) in LAYER {
                let shape = match name {
                    "gate" | "up" => [inner, c],
                    "down" => [c, inner],
                    _ => [c, c],
                };
                draw(format!("{layer}.{name}"), shape, lies)?;
            }
        }
        draw("head".into(), [vocabulary, c], "[@tp?, _]")?;
        let rope = Tensor::rope_tables(
            options.context,
            c / options.heads,
            &RopeOptions::default(),
            mesh,
        )?;
        Ok(Self {
            options,
            mesh: mesh.clone(),
            parameters,
            rope,
            steps: 0,
        })
    }

    /// How many numbers it learns.
    pub fn size(&self) -> usize {
        self.parameters.iter().map(|(_, p)| p.value.numel()).sum()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    fn parameter(&self, name: &str) -> Result<&Tensor> {
        let found = self.parameters.iter().find(|(n, _)| n == name);
        found
            .map(|(_, p)| &p.value)
            .ok_or_else(|| Error::argument("train", "name", format!("no parameter {name}")))
    }

    /// Scores of the letter after each of `tokens`.
    fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let Options {
            layers,
            width,
            heads,
            ..
        } = self.options;
        let &[rows, length] = tokens.dims() else {
            return Err(Error::argument("train", "tokens", "rows of letters"));
        };
        let norm = |x: &Tensor| x.rms_norm(&NormOptions::new());
        let mut x = self.parameter("embedding")?.embedding(tokens)?;
        for layer in 0..layers {
            let linear = |x: &Tensor, name: &str| {
                x.linear(self.parameter(&format!("{layer}.{name}"))?, None)
            };
            let h = norm(&x)?;
            let split = |name: &str| {
                let y = linear(&h, name)?;
                y.reshape([rows, length, heads, width / heads])?
                    .transpose(1, 2)
            };
            let turned =
                |name: &str| split(name)?.rope(&self.rope.0, &self.rope.1, RopeStyle::Half);
            let causal = AttentionOptions::causal();
            let seen =
                turned("queries")?.attention(&turned("keys")?, &split("values")?, &causal)?;
            let seen = seen.out.transpose(1, 2)?.reshape([rows, length, width])?;
            x = (x + linear(&seen, "output"))?;
            let h = norm(&x)?;
            x = (&x + linear(&linear(&h, "gate")?.swiglu2(&linear(&h, "up")?)?, "down"))?;
        }
        norm(&x)?.linear(self.parameter("head")?, None)
    }

    /// One step of Adam; the loss before it, still on the device.
    pub fn step(&mut self, text: &Text) -> Result<Tensor> {
        let Options {
            batch,
            context,
            rate,
            ..
        } = self.options;
        let tokens = text.rows(self.steps, batch, context + 1, &self.mesh)?;
        let logits = self.logits(&tokens.get(i![.., ..-1])?)?.transpose(1, 2)?;
        let wanted = tokens.get(i![.., 1..])?;
        let loss = logits.cross_entropy(&wanted, &CrossEntropyOptions::default())?;
        let gradients = loss.backward()?;
        self.steps += 1;
        let unbias = |beta: f64| 1.0 - beta.powi(self.steps.min(10_000) as i32);
        let numbers = [rate, unbias(0.9), unbias(0.99)];
        for (_, Parameter { value, moments }) in &mut self.parameters {
            let gradient = gradients.of(value)?;
            let [next, m, v] = no_grad(|| {
                Expr::new("adam", &[value, &gradient, &moments[0], &moments[1]])
                    .params(&numbers)
                    .maps([DType::F32; 3], |a| {
                        let [w, g, m, v] = [a.x[0], a.x[1], a.x[2], a.x[3]];
                        let m = m + (g - m) * 0.1;
                        let v = v + (g * g - v) * 0.01;
                        let root = (v / a.p[2]).sqrt() + 1e-8;
                        [w - a.p[0] * (m / a.p[1]) / root, m, v]
                    })
            })?;
            *value = value.with_values(&next)?;
            *moments = [m, v];
        }
        loss.detach().reshard("[]")
    }

    /// The scores of the letter that follows the text and what was `said` after it.
    pub fn next(&self, text: &Text, said: &[i32]) -> Result<Tensor> {
        let context = self.options.context;
        let logits = no_grad(|| self.logits(&text.last(said, context, &self.mesh)?))?;
        logits.get(i![0, -1])?.reshard("[_]")
    }
}
