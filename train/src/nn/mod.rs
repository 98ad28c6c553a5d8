//! Layers. Each is a struct of parameters with a `forward`; a model of your own names them as it
//! likes. Sharding texts name axes with `?`, so the same layer runs on one device and on any mesh.

mod attention;
mod block;
mod context;
mod conv;
mod dropout;
mod embedding;
pub mod experts;
mod f8;
mod linear;
mod mlp;
mod norm;
mod rope;
mod stream;

pub use attention::{Attend, Attention, AttentionBias, Cache, Heads, attend, same_document};
pub use block::{Block, NormOrder};
pub(crate) use context::is_cut;
pub use context::{Context, ContextAttention};
pub use conv::{Conv2d, ConvBlock};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use f8::linear_f8;
pub use linear::Linear;
pub use mlp::{Activation, GatedMlp, Mlp};
pub use norm::{BatchNorm, GroupNorm, LayerNorm, Norm, RmsNorm};
pub use rope::Rope;
pub use stream::Stream;
