//! Convolutions of images.

use crate::{
    Build, Init, Module, Param, Pass, Result,
    nn::{Activation, BatchNorm},
};
use anymesh_core::{Tensor, ops::Conv};

/// A convolution of `[n, channels, height, width]`.
#[derive(Clone, Debug, Module)]
pub struct Conv2d {
    /// `[out, in / groups, height, width]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
    #[skip]
    options: Conv<2>,
}

impl Conv2d {
    /// From `channels[0]` to `channels[1]` channels with windows of `kernel`.
    pub fn new(
        b: &Build,
        channels: [usize; 2],
        kernel: [usize; 2],
        options: Conv<2>,
        bias: bool,
    ) -> Result<Self> {
        let [from, to] = channels;
        let inside = from / options.groups.max(1) * kernel[0] * kernel[1];
        let bound = 1.0 / (inside.max(1) as f64).sqrt();
        let shape = [to, from / options.groups.max(1), kernel[0], kernel[1]];
        let bias = match bias {
            true => Some(b.param("bias", [to], "[@tp?]", Init::Uniform(bound))?),
            false => None,
        };
        Ok(Self {
            weight: b.param("weight", shape, "[@tp?, _, _, _]", Init::Uniform(bound))?,
            bias,
            options,
        })
    }

    /// The layer's output.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias.as_ref().map(Param::get).transpose()?;
        Ok(x.conv2d(&self.weight.get()?, bias.as_ref(), &self.options)?)
    }
}

/// A convolution, batch normalisation and an activation.
#[derive(Clone, Debug, Module)]
pub struct ConvBlock {
    /// Without a bias: the norm has one.
    pub conv: Conv2d,
    /// Over the whole global batch.
    pub norm: BatchNorm,
    #[skip]
    activation: Option<Activation>,
}

impl ConvBlock {
    /// From `channels[0]` to `channels[1]` channels.
    pub fn new(
        b: &Build,
        channels: [usize; 2],
        kernel: [usize; 2],
        options: Conv<2>,
        activation: Option<Activation>,
    ) -> Result<Self> {
        Ok(Self {
            conv: Conv2d::new(&b.at("conv"), channels, kernel, options, false)?,
            norm: BatchNorm::new(&b.at("norm"), channels[1], 0.1, 1e-5)?,
            activation,
        })
    }

    /// The layer's output.
    #[track_caller]
    pub fn forward(&mut self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let y = self.conv.forward(x)?;
        let y = self.norm.forward(&y, pass)?;
        match self.activation {
            Some(activation) => activation.apply(&y),
            None => Ok(y),
        }
    }
}
