//! A transformer block for models of your own.

use crate::{
    Build, Init, Module, Pass, Result,
    nn::{
        Activation, Attend, Attention, AttentionBias, Cache, Dropout, Heads, LayerNorm, Mlp, Norm,
        Stream,
    },
};
use anymesh_core::Tensor;

/// Where the norms of a block stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormOrder {
    /// Before attention and MLP, inside of the residual branch: `x + f(norm(x))`.
    #[default]
    Pre,
    /// After the residual was added: `norm(x + f(x))`.
    Post,
}

/// Attention and an MLP, each with a norm, dropout and a residual.
#[derive(Clone, Debug, Module)]
pub struct Block {
    /// The norm of attention.
    pub norm1: Norm,
    /// Attention.
    pub attention: Attention,
    /// The norm of the MLP.
    pub norm2: Norm,
    /// The MLP.
    pub mlp: Mlp,
    /// On the output of attention.
    pub dropout1: Dropout,
    /// On the output of the MLP.
    pub dropout2: Dropout,
    #[skip]
    order: NormOrder,
    #[skip]
    stream: Stream,
}

impl Block {
    /// For vectors of `sizes[0]` values and an MLP that is `sizes[1]` wide, with layer norms,
    /// biases and gelu.
    pub fn new(
        b: &Build,
        sizes: [usize; 2],
        heads: Heads,
        dropout: f64,
        order: NormOrder,
    ) -> Result<Self> {
        let (width, init) = (sizes[0], Init::Normal(0.02));
        let norm = |name: &str| LayerNorm::new(&b.at(name), width, 1e-5).map(Norm::Layer);
        Ok(Self {
            norm1: norm("norm1")?,
            attention: Attention::new(
                &b.at("attention"),
                width,
                heads,
                AttentionBias::All,
                init,
                init,
            )?,
            norm2: norm("norm2")?,
            mlp: Mlp::new(&b.at("mlp"), sizes, true, Activation::GeluTanh, init, init)?,
            dropout1: Dropout::new(&b.at("dropout1"), dropout),
            dropout2: Dropout::new(&b.at("dropout2"), dropout),
            order,
            stream: Stream::of(b),
        })
    }

    /// The block's output for `[b, s, width]`.
    #[track_caller]
    pub fn forward(
        &self,
        x: &Tensor,
        options: &Attend,
        cache: Option<&mut Cache>,
        pass: &Pass,
    ) -> Result<Tensor> {
        let stream = &self.stream;
        let attention = |x: &Tensor, cache| {
            let y = self.attention.forward(&stream.enter(x)?, options, cache)?;
            stream.settle(&y)
        };
        let mlp = |x: &Tensor| stream.settle(&self.mlp.forward(&stream.enter(x)?)?);
        match self.order {
            NormOrder::Pre => {
                let y = attention(&self.norm1.forward(x)?, cache)?;
                let (x, y) = self.dropout1.branch(y, x, pass)?;
                let (x, h) = self.norm2.after(&x, y.as_ref())?;
                self.dropout2.add(&mlp(&h)?, &x, pass)
            }
            NormOrder::Post => {
                let y = attention(x, cache)?;
                let (x, y) = self.dropout1.branch(y, x, pass)?;
                let (_, x) = self.norm1.after(&x, y.as_ref())?;
                let (x, y) = self.dropout2.branch(mlp(&x)?, &x, pass)?;
                Ok(self.norm2.after(&x, y.as_ref())?.1)
            }
        }
    }
}
