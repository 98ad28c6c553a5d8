//! Tensors, ops, sharding and checkpoints of anymesh, without any backend.
//!
//! A [`Tensor`] lives on a [`Device`]; a device runs a [`Backend`], which implements a small set of
//! kernel families. Ops are methods of `Tensor`, one file per family under `ops`, each with its
//! shape, dtype and sharding rule, lowered to those families. Use the facade crate `anymesh` to
//! pick devices; this crate knows none.

#![forbid(unsafe_code)]

mod cost;
pub mod grad;
pub mod indexing;
mod ledger;
mod mesh;
mod meta;
pub mod ops;
mod place;
pub mod reshard;
mod sharding;
pub mod spmd;
mod table;
mod tensor;
pub mod transport;

pub use anymesh_kernel::{
    Backend, Buffer, Capabilities, DType, Device, Dims, Element, Error, F8E4M3, F8E5M2, Kind,
    Layout, MapProgram, MemoryUse, Profiling, Result, Scalar, Shape, Timing, View, backend, bf16,
    f16, layout, map,
};
pub use indexing::Index;
pub use mesh::Mesh;
pub use meta::meta;
pub use ops::elementwise::Arg;
pub use place::{IntoSharding, Place};
pub use sharding::{Placement, Reduction, Region, Sharding, TensorType, split};
pub use tensor::Tensor;
