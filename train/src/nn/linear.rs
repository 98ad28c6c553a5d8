//! Linear layers.

use super::linear_f8;
use crate::{Build, Init, Module, Param, Result};
use anymesh_core::{Sharding, Tensor};

/// `x W^T + b` with a weight `[out, in]`; by [`linear_f8`] where the [policy](crate::Policy) of the
/// weight says so.
#[derive(Clone, Debug, Module)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
}

impl Linear {
    /// Without a bias, for vectors of `sizes[0]` values, giving `sizes[1]`. The sharding is the
    /// weight's: `[@tp?, _]` cuts the outputs, `[_, @tp?]` the inputs, so that the result is a
    /// partial sum.
    pub fn new(b: &Build, sizes: [usize; 2], sharding: &str, init: Init) -> Result<Self> {
        let [inside, out] = sizes;
        let weight = b.param("weight", [out, inside], sharding, init)?;
        Ok(Self {
            weight: weight.adaptable(),
            bias: None,
        })
    }

    /// With a bias that begins at zero and is cut as the outputs are.
    pub fn with_bias(mut self, b: &Build) -> Result<Self> {
        let weight = self.weight.compute_sharding();
        let rows = (weight.axes_of(0)).fold(Sharding::replicated(), |s, axis| s.cut(0, axis));
        let out = self.weight.value().dims()[0];
        self.bias = Some(b.param("bias", [out], rows, Init::Zeros)?);
        Ok(self)
    }

    /// The layer's output.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(Self::forward_each(x, &[self])?.remove(0))
    }

    /// The outputs of several layers for one input, which is brought once to where it costs least
    /// for all of them: queries, keys and values.
    #[track_caller]
    pub fn forward_each(x: &Tensor, layers: &[&Linear]) -> Result<Vec<Tensor>> {
        let mut weights: Vec<(Tensor, Option<Tensor>)> = Vec::with_capacity(layers.len());
        for layer in layers {
            let bias = layer.bias.as_ref().map(Param::get).transpose()?;
            weights.push((layer.weight.get()?, bias));
        }
        let refs: Vec<(&Tensor, Option<&Tensor>)> =
            weights.iter().map(|(w, b)| (w, b.as_ref())).collect();
        let f8 = |layer: &&Linear| layer.weight.policy().f8_products;
        let products = match refs[..] {
            _ if layers.iter().any(f8) => linear_f8(x, &refs)?,
            [(weight, bias)] => vec![x.linear(weight, bias)?],
            _ => x.linear_each(&refs)?,
        };
        let mut out = Vec::with_capacity(layers.len());
        for (layer, y) in layers.iter().zip(products) {
            out.push(layer.adapted(x, y)?);
        }
        Ok(out)
    }

    #[track_caller]
    fn adapted(&self, x: &Tensor, y: Tensor) -> Result<Tensor> {
        match &self.weight.adapter {
            None => Ok(y),
            Some(adapter) => Ok(y.add(&adapter.forward(x)?)?),
        }
    }
}
