//! Normalisations.

use crate::{Build, Init, Module, Param, Pass, Result};
use anymesh_core::{Tensor, grad::no_grad, ops::NormOptions};

/// Layer normalisation over the last dimension.
#[derive(Clone, Debug, Module)]
pub struct LayerNorm {
    /// Factors.
    pub weight: Param,
    /// Summands.
    pub bias: Option<Param>,
    #[skip]
    eps: f64,
}

impl LayerNorm {
    /// For vectors of `size` values.
    pub fn new(b: &Build, size: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: b.param("weight", [size], "[_]", Init::Ones)?,
            bias: Some(b.param("bias", [size], "[_]", Init::Zeros)?),
            eps,
        })
    }

    /// The normalised input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = pair(&self.weight, self.bias.as_ref())?;
        Ok(x.layer_norm(&options(&weight, bias.as_ref(), self.eps))?)
    }

    /// The input with what a branch adds to it, if there is one, and its norm: in one kernel where
    /// the device has such, with the values of an addition and [`forward`](Self::forward).
    #[track_caller]
    pub fn after(&self, x: &Tensor, branch: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let Some(branch) = branch else {
            return Ok((x.clone(), self.forward(x)?));
        };
        let (weight, bias) = pair(&self.weight, self.bias.as_ref())?;
        Ok(x.add_layer_norm(branch, &options(&weight, bias.as_ref(), self.eps))?)
    }
}

/// Root-mean-square normalisation over the last dimension.
#[derive(Clone, Debug, Module)]
pub struct RmsNorm {
    /// Factors.
    pub weight: Param,
    #[skip]
    eps: f64,
}

impl RmsNorm {
    /// For vectors of `size` values.
    pub fn new(b: &Build, size: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: b.param("weight", [size], "[_]", Init::Ones)?,
            eps,
        })
    }

    /// The normalised input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.rms_norm(&options(&self.weight.get()?, None, self.eps))?)
    }

    /// The input with what a branch adds to it, if there is one, and its norm; see
    /// [`LayerNorm::after`].
    #[track_caller]
    pub fn after(&self, x: &Tensor, branch: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let Some(branch) = branch else {
            return Ok((x.clone(), self.forward(x)?));
        };
        Ok(x.add_rms_norm(branch, &options(&self.weight.get()?, None, self.eps))?)
    }
}

/// Normalisation of groups of channels of `[n, c, ...]`, each sample on its own.
#[derive(Clone, Debug, Module)]
pub struct GroupNorm {
    /// Factors of the channels.
    pub weight: Param,
    /// Summands of the channels.
    pub bias: Param,
    #[skip]
    groups: usize,
    #[skip]
    eps: f64,
}

impl GroupNorm {
    /// For `channels` in `groups`.
    pub fn new(b: &Build, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: b.param("weight", [channels], "[_]", Init::Ones)?,
            bias: b.param("bias", [channels], "[_]", Init::Zeros)?,
            groups,
            eps,
        })
    }

    /// The normalised input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = pair(&self.weight, Some(&self.bias))?;
        Ok(x.group_norm(self.groups, &options(&weight, bias.as_ref(), self.eps))?)
    }
}

/// Normalisation of each channel of `[n, c, ...]` over the whole global batch, with running
/// statistics for evaluation.
#[derive(Clone, Debug, Module)]
pub struct BatchNorm {
    /// Factors of the channels.
    pub weight: Param,
    /// Summands of the channels.
    pub bias: Param,
    /// Running mean; no gradient, but part of the model.
    pub running_mean: Param,
    /// Running variance.
    pub running_var: Param,
    #[skip]
    momentum: f64,
    #[skip]
    eps: f64,
}

impl BatchNorm {
    /// For `channels`; each batch moves the running statistics by `momentum`.
    pub fn new(b: &Build, channels: usize, momentum: f64, eps: f64) -> Result<Self> {
        let param = |name, init| b.param(name, [channels], "[_]", init);
        let mut norm = Self {
            weight: param("weight", Init::Ones)?,
            bias: param("bias", Init::Zeros)?,
            running_mean: param("running_mean", Init::Zeros)?,
            running_var: param("running_var", Init::Ones)?,
            momentum,
            eps,
        };
        norm.running_mean.train(false)?;
        norm.running_var.train(false)?;
        Ok(norm)
    }

    /// The normalised input: with its own statistics in training, which also moves the running
    /// ones, and with the running ones in evaluation.
    #[track_caller]
    pub fn forward(&mut self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        let (weight, bias) = pair(&self.weight, Some(&self.bias))?;
        let options = options(&weight, bias.as_ref(), self.eps);
        let (mean, var) = (self.running_mean.get()?, self.running_var.get()?);
        if !pass.is_training() {
            return Ok(x.batch_norm(&mean, &var, &options)?);
        }
        let batch = x.batch_norm_train(&options)?;
        let (mean, var) = (self.running_mean.value(), self.running_var.value());
        let (mean, var) = no_grad(|| batch.update_running(mean, var, self.momentum))?;
        self.running_mean.set(&mean)?;
        self.running_var.set(&var)?;
        Ok(batch.out)
    }
}

/// Either of the two norms that transformers use.
#[derive(Clone, Debug)]
pub enum Norm {
    /// Layer normalisation.
    Layer(LayerNorm),
    /// Root-mean-square normalisation.
    Rms(RmsNorm),
}

impl Norm {
    /// The normalised input.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Layer(norm) => norm.forward(x),
            Self::Rms(norm) => norm.forward(x),
        }
    }

    /// The input with what a branch adds to it, if there is one, and its norm; see
    /// [`LayerNorm::after`].
    #[track_caller]
    pub fn after(&self, x: &Tensor, branch: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Layer(norm) => norm.after(x, branch),
            Self::Rms(norm) => norm.after(x, branch),
        }
    }
}

impl Module for Norm {
    fn visit(&self, path: &str, f: &mut dyn FnMut(&str, &Param)) {
        match self {
            Self::Layer(norm) => norm.visit(path, f),
            Self::Rms(norm) => norm.visit(path, f),
        }
    }

    fn visit_mut(&mut self, path: &str, f: &mut dyn FnMut(&str, &mut Param)) {
        match self {
            Self::Layer(norm) => norm.visit_mut(path, f),
            Self::Rms(norm) => norm.visit_mut(path, f),
        }
    }
}

fn pair(weight: &Param, bias: Option<&Param>) -> Result<(Tensor, Option<Tensor>)> {
    Ok((weight.get()?, bias.map(Param::get).transpose()?))
}

fn options<'a>(weight: &'a Tensor, bias: Option<&'a Tensor>, eps: f64) -> NormOptions<'a> {
    let options = NormOptions::new().weight(weight).eps(eps);
    match bias {
        Some(bias) => options.bias(bias),
        None => options,
    }
}
