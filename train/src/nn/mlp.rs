//! Feed-forward layers.

use crate::{Build, Init, Module, Result, nn::Linear};
use anymesh_core::Tensor;

/// What stands between two linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// GELU by the error function.
    #[default]
    Gelu,
    /// GELU by its approximation with tanh.
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `tanh(x)`.
    Tanh,
}

impl Activation {
    /// By the name that Hugging Face's configurations have for it.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "gelu" => Self::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Self::GeluTanh,
            "silu" | "swish" => Self::Silu,
            "relu" => Self::Relu,
            "tanh" => Self::Tanh,
            _ => return None,
        })
    }

    /// Its values.
    #[track_caller]
    pub fn apply(self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Gelu => x.gelu(),
            Self::GeluTanh => x.gelu_tanh(),
            Self::Silu => x.silu(),
            Self::Relu => x.relu(),
            Self::Tanh => x.tanh(),
        }?)
    }
}

/// Two linear layers with an activation between them.
#[derive(Clone, Debug, Module)]
pub struct Mlp {
    /// To the inner width; its outputs are cut over `tp`.
    pub up_proj: Linear,
    /// Back; its inputs are cut over `tp`.
    pub down_proj: Linear,
    #[skip]
    activation: Activation,
}

impl Mlp {
    /// From `width` to `inner` and back; the layer back begins as `down` says.
    pub fn new(
        b: &Build,
        [width, inner]: [usize; 2],
        bias: bool,
        activation: Activation,
        init: Init,
        down: Init,
    ) -> Result<Self> {
        let (wide, narrow) = (b.at("up_proj"), b.at("down_proj"));
        let mut up_proj = Linear::new(&wide, [width, inner], "[@tp?, _]", init)?;
        let mut down_proj = Linear::new(&narrow, [inner, width], "[_, @tp?]", down)?;
        if bias {
            up_proj = up_proj.with_bias(&wide)?;
            down_proj = down_proj.with_bias(&narrow)?;
        }
        Ok(Self {
            up_proj,
            down_proj,
            activation,
        })
    }

    /// The layer's output, a partial sum where the layer is cut.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = self.activation.apply(&self.up_proj.forward(x)?)?;
        self.down_proj.forward(&inner)
    }
}

/// An MLP whose inner values are gated: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug, Module)]
pub struct GatedMlp {
    /// What is activated.
    pub gate_proj: Linear,
    /// What it is multiplied with.
    pub up_proj: Linear,
    /// Back to the width.
    pub down_proj: Linear,
}

impl GatedMlp {
    /// From `width` to `inner` and back; the layer back begins as `down` says.
    pub fn new(
        b: &Build,
        [width, inner]: [usize; 2],
        bias: bool,
        init: Init,
        down: Init,
    ) -> Result<Self> {
        let linear = |name: &str, sizes, sharding, init| {
            let at = b.at(name);
            let linear = Linear::new(&at, sizes, sharding, init)?;
            match bias {
                true => linear.with_bias(&at),
                false => Ok(linear),
            }
        };
        Ok(Self {
            gate_proj: linear("gate_proj", [width, inner], "[@tp?, _]", init)?,
            up_proj: linear("up_proj", [width, inner], "[@tp?, _]", init)?,
            down_proj: linear("down_proj", [inner, width], "[_, @tp?]", down)?,
        })
    }

    /// The layer's output, a partial sum where the layer is cut.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let both = Linear::forward_each(x, &[&self.gate_proj, &self.up_proj])?;
        self.down_proj.forward(&both[0].swiglu2(&both[1])?)
    }
}
