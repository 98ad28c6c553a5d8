//! Low-rank adapters: two small matrices trained in place of a large one.
//!
//! ```
//! # use anymesh_core::{DType, Mesh, Tensor};
//! # use anymesh_train::{Build, Init, Lora, Module, Policy, add_lora, merge_lora, nn::GatedMlp};
//! # let device = anymesh_backend_cpu::device();
//! let mesh = Mesh::new("tp=2", &device)?;
//! let b = Build::new(&mesh, Policy::f32(), 1);
//! let mut mlp = GatedMlp::new(&b, [8, 32], false, Init::Normal(0.1), Init::Normal(0.1))?;
//! let lora = Lora { rank: 2, ..Default::default() };
//! assert_eq!(add_lora(&mut mlp, "*.weight", &lora)?, 3);
//! let values = mlp.values();
//! assert_eq!(values["up_proj.lora_A.weight"].type_string(), "f32[2, 8]");
//! assert_eq!(values["up_proj.lora_B.weight"].type_string(), "f32[32@tp, 2]");
//! assert_eq!(values["down_proj.lora_A.weight"].type_string(), "f32[2, 32@tp]");
//! merge_lora(&mut mlp)?;
//! assert_eq!(mlp.names().len(), 3);
//! # Ok::<(), anymesh_train::Error>(())
//! ```

mod files;

use crate::{Error, Init, Module, Param, Pass, Pattern, Result, build::key, join};
use anymesh_core::{DType, Sharding, Tensor, grad::no_grad};
pub use files::{load_lora, lora_values, save_lora};

/// The settings of adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// The rank of the addition.
    pub rank: usize,
    /// The addition is scaled by `alpha / rank`.
    pub alpha: f64,
    /// The share of an adapter's input that is dropped in training: see [`lora_pass`].
    pub dropout: f64,
    /// Where the first values come from.
    pub seed: u64,
}

impl Default for Lora {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            seed: 0,
        }
    }
}

impl Lora {
    fn check(&self) -> Result<()> {
        let Self {
            rank,
            alpha,
            dropout,
            ..
        } = *self;
        if rank == 0 {
            let detail = "an adapter needs a rank of 1 or more";
            return Err(Error::config("lora.rank", detail));
        }
        if !alpha.is_finite() {
            let detail = format!("an adapter cannot be scaled by {alpha}");
            return Err(Error::config("lora.alpha", detail));
        }
        if !(0.0..1.0).contains(&dropout) {
            let detail = format!("{dropout} is no share below 1");
            return Err(Error::config("lora.dropout", detail));
        }
        Ok(())
    }
}

/// What is added to a weight `[out, in]`: `alpha / rank * B A`, never made in full. `A` is
/// `[rank, in]`, `B` is `[out, rank]` and begins at zero, so that an adapted model begins as the
/// model it adapts. Cut as the weight is: the output is cut, or partial, like that of the weight.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub(crate) a: Param,
    pub(crate) b: Param,
    scale: f64,
    dropout: f64,
    /// What its random keys are made of.
    path: String,
    pass: Pass,
}

impl Module for Adapter {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        f(&join(path, A), &self.a);
        f(&join(path, B), &self.b);
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        f(&join(path, A), &mut self.a);
        f(&join(path, B), &mut self.b);
    }
}

const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";

/// Whether a parameter is part of an adapter.
fn is_factor(name: &str) -> bool {
    [A, B].iter().any(|end| {
        let front = name.strip_suffix(end);
        front.is_some_and(|front| front.is_empty() || front.ends_with('.'))
    })
}

/// The layer that a weight is of.
fn layer(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(layer, _)| layer)
}

impl Adapter {
    fn new(name: &str, weight: &Param, lora: &Lora) -> Result<Self> {
        check_adaptable(name, weight)?;
        let &[out, inside] = weight.value().dims() else {
            return Err(Error::parameter(name, "a matrix is needed"));
        };
        let path = layer(name).to_string();
        let (mesh, compute) = (weight.value().mesh(), weight.compute_sharding());
        let side = |suffix: &str, shape: [usize; 2], dim: usize, init: Init| {
            let name = join(&path, suffix);
            let place = (mesh, only(compute, dim));
            let (dtype, compute) = (DType::F32, place.1.clone());
            let value = match init {
                Init::Uniform(bound) => {
                    Tensor::uniform(shape, -bound, bound, dtype, place, key(lora.seed, &name))
                }
                _ => Tensor::zeros(shape, dtype, place),
            }?;
            let value = value.cast(weight.policy().parameter)?;
            Param::new(name, value, compute, weight.policy(), crate::Zero::Off)
        };
        let bound = 1.0 / (inside.max(1) as f64).sqrt();
        Ok(Self {
            a: side(A, [lora.rank, inside], 1, Init::Uniform(bound))?,
            b: side(B, [out, lora.rank], 0, Init::Zeros)?,
            scale: lora.alpha / lora.rank as f64,
            dropout: lora.dropout,
            path,
            pass: Pass::eval(),
        })
    }

    /// What is added to the output of the layer for this input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let low = match self.pass.rng(&self.path) {
            Some(rng) if self.dropout > 0.0 => x.dropout(self.dropout, rng)?,
            _ => x.clone(),
        };
        let low = low.linear(&self.a.get()?, None)?;
        // The smaller of the two that could be scaled.
        Ok(low.mul(self.scale)?.linear(&self.b.get()?, None)?)
    }

    /// The rank of the addition.
    pub fn rank(&self) -> usize {
        self.a.value().dims()[0]
    }

    /// What the addition is scaled by, times the rank.
    pub fn alpha(&self) -> f64 {
        self.scale * self.rank() as f64
    }

    /// A weight with the whole addition, in f32 at least.
    fn added_to(&self, weight: &Tensor) -> Result<Tensor> {
        let wide = |x: &Tensor| match x.dtype() {
            DType::F64 => Ok(x.detach()),
            _ => x.detach().cast(DType::F32),
        };
        let full = wide(self.b.value())?.matmul(&wide(self.a.value())?)?;
        Ok(wide(weight)?.add(&full.mul(self.scale)?)?)
    }
}

/// The cuts of one dimension of a sharding.
fn only(sharding: &Sharding, dim: usize) -> Sharding {
    (sharding.axes_of(dim)).fold(Sharding::replicated(), |s, axis| s.cut(dim, axis))
}

fn check_adaptable(name: &str, weight: &Param) -> Result<()> {
    if !weight.is_adaptable() {
        let detail = "adapters are for the weights of linear layers, which this is not";
        return Err(Error::parameter(name, detail));
    }
    if weight.adapter.is_some() {
        let detail = "it has an adapter already: merge that first";
        return Err(Error::parameter(name, detail));
    }
    Ok(())
}

/// Puts an adapter beside every weight that a [`Pattern`] names and freezes all other parameters of
/// the model but the adapters that it has. The adapters' names are `<layer>.lora_A.weight` and
/// `<layer>.lora_B.weight`. Returns how many there are. A name that is not the weight of a linear
/// layer is an error, and then nothing is changed.
pub fn add_lora<M: Module + ?Sized>(model: &mut M, pattern: &str, lora: &Lora) -> Result<usize> {
    lora.check()?;
    let pattern: Pattern = pattern.parse()?;
    pattern.check(&model.names())?;
    let mut outcome = Ok(());
    let mut count = 0;
    model.visit("", &mut |name, p| {
        if outcome.is_ok() && pattern.fits(name) {
            outcome = check_adaptable(name, p);
            count += 1;
        }
    });
    outcome?;
    model.try_each(&mut |name, p| {
        if is_factor(name) {
            return Ok(());
        }
        p.train(false)?;
        if pattern.fits(name) {
            p.adapter = Some(Box::new(Adapter::new(name, p, lora)?));
        }
        Ok(())
    })?;
    Ok(count)
}

/// Says what the next passes are for, where adapters have dropout: in training they drop by the
/// random keys of this micro-batch. It stays so until it is said otherwise; adapters begin with
/// evaluation.
///
/// Layers do not pass it on, because all but adapters do without. What is recomputed in a backward
/// pass remembers what was said when it ran first.
pub fn lora_pass<M: Module + ?Sized>(model: &mut M, pass: &Pass) {
    model.visit_mut("", &mut |_, p| {
        if let Some(adapter) = &mut p.adapter {
            adapter.pass = *pass;
        }
    });
}

/// Whether what a model computes depends on its pass because adapters have dropout.
pub(crate) fn drops(model: &(impl Module + ?Sized)) -> bool {
    let mut drops = false;
    model.visit("", &mut |_, p| {
        drops |= p.adapter.as_ref().is_some_and(|a| a.dropout > 0.0);
    });
    drops
}

/// Adds every adapter to its weight, rounding once, and takes it away: the model computes the same
/// without. Weights stay frozen. Returns how many there were.
pub fn merge_lora<M: Module + ?Sized>(model: &mut M) -> Result<usize> {
    let mut count = 0;
    model.try_each(&mut |_, p| {
        if let Some(adapter) = p.adapter.take() {
            count += 1;
            let merged = no_grad(|| adapter.added_to(p.value()))?;
            p.set(&merged)?;
        }
        Ok(())
    })?;
    Ok(count)
}
