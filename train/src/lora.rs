//! Low-rank adapters: two small matrices trained in place of a large one.

use crate::{Error, Init, Module, Param, Pattern, Result, build::key, join};
use anymesh_core::{DType, Sharding, Tensor, grad::no_grad};

/// The settings of adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// The rank of the addition.
    pub rank: usize,
    /// The addition is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Where the first values come from.
    pub seed: u64,
}

impl Default for Lora {
    fn default() -> Self {
        Self {
            rank: 16,
            alpha: 32.0,
            seed: 0,
        }
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
}

impl Module for Adapter {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        f(&join(path, "lora_A.weight"), &self.a);
        f(&join(path, "lora_B.weight"), &self.b);
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        f(&join(path, "lora_A.weight"), &mut self.a);
        f(&join(path, "lora_B.weight"), &mut self.b);
    }
}

impl Adapter {
    fn new(name: &str, weight: &Param, lora: &Lora) -> Result<Self> {
        let (&[out, inside], true) = (weight.value().dims(), weight.is_adaptable()) else {
            let detail = "adapters are for the weights of linear layers, which this is not";
            return Err(Error::parameter(name, detail));
        };
        let path = name.rsplit_once('.').map_or("", |(path, _)| path);
        let (mesh, compute) = (weight.value().mesh(), weight.compute_sharding());
        let side = |suffix: &str, shape: [usize; 2], dim: usize, init: Init| {
            let name = join(path, suffix);
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
            a: side(
                "lora_A.weight",
                [lora.rank, inside],
                1,
                Init::Uniform(bound),
            )?,
            b: side("lora_B.weight", [out, lora.rank], 0, Init::Zeros)?,
            scale: lora.alpha / lora.rank as f64,
        })
    }

    /// What is added to the output of the layer for this input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let low = x.linear(&self.a.get()?, None)?;
        Ok(low.linear(&self.b.get()?, None)?.mul(self.scale)?)
    }

    /// The whole addition, as large as the weight.
    fn full(&self) -> Result<Tensor> {
        Ok(self.b.value().matmul(self.a.value())?.mul(self.scale)?)
    }
}

/// The cuts of one dimension of a sharding.
fn only(sharding: &Sharding, dim: usize) -> Sharding {
    (sharding.axes_of(dim)).fold(Sharding::replicated(), |s, axis| s.cut(dim, axis))
}

/// Puts an adapter beside every weight that a [`Pattern`] names and freezes all other parameters of
/// the model. The adapters' names are `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Returns
/// how many there are.
pub fn add_lora<M: Module + ?Sized>(model: &mut M, pattern: &str, lora: &Lora) -> Result<usize> {
    if lora.rank == 0 {
        return Err(Error::config(
            "lora.rank",
            "an adapter needs a rank of 1 or more",
        ));
    }
    let pattern: Pattern = pattern.parse()?;
    pattern.check(&model.names())?;
    let mut count = 0;
    model.try_each(&mut |name, p| {
        if name.contains(".lora_A.") || name.contains(".lora_B.") {
            return Ok(());
        }
        p.train(false)?;
        if pattern.fits(name) {
            count += 1;
            p.adapter = Some(Box::new(Adapter::new(name, p, lora)?));
        }
        Ok(())
    })?;
    Ok(count)
}

/// Adds every adapter to its weight and takes it away: the model computes the same without.
pub fn merge_lora<M: Module + ?Sized>(model: &mut M) -> Result<usize> {
    let mut count = 0;
    model.try_each(&mut |_, p| {
        if let Some(adapter) = p.adapter.take() {
            count += 1;
            let merged = no_grad(|| -> Result<Tensor> {
                let full = adapter.full()?.cast(p.value().dtype())?;
                Ok(p.value().detach().add(&full)?)
            })?;
            p.set(&merged)?;
        }
        Ok(())
    })?;
    Ok(count)
}
