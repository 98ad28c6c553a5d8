//! Tensors, ops, gradients and sharding of anymesh, without any backend.
//!
//! A [`Tensor`] lives on a [`Device`]; a device runs a [`Backend`], which implements a small set of
//! kernel families. Ops are methods of `Tensor`, one file per family under `ops`, each with its
//! shape, dtype and sharding rule, lowered to those families. Use the facade crate `anymesh` to
//! pick devices; this crate knows none.

#![forbid(unsafe_code)]

pub mod compare;
mod context;
pub mod cost;
mod display;
mod fingerprint;
mod forms;
#[cfg(not(target_family = "wasm"))]
mod gathered;
pub mod grad;
pub mod indexing;
mod launch;
mod ledger;
mod mesh;
mod meta;
mod nested;
mod observe;
mod operand;
pub mod ops;
mod overlap;
mod place;
pub mod profile;
mod promotion;
pub mod reshard;
mod scoped;
mod sharding;
mod spec;
pub mod spmd;
mod table;
mod tensor;
pub mod transport;
mod wait;
mod watch;

pub use anymesh_kernel::{
    Alternative, Backend, Buffer, Capabilities, DType, Device, Dims, Dry, Element, Error, F8E4M3,
    F8E5M2, Kind, Layout, MapProgram, MemoryUse, NoGradient, OperandType, Profiling, RankCall,
    Result, Scalar, Shape, Timing, View, Watch, backend, bf16, f16, layout, map,
};
pub use context::Context;
pub use indexing::Index;
pub use mesh::{Machine, Mesh};
pub use meta::meta;
pub use nested::Nested;
pub use ops::elementwise::Arg;
pub use overlap::{Ahead, Moving};
pub use place::{IntoPlace, IntoSharding, Place};
pub use sharding::{MAX_RANK, Placement, Reduction, Region, Sharding, TensorType, split};
pub use spec::{ShardingSpec, TypeSpec};
pub use tensor::Tensor;
