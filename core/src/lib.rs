//! Tensors, ops, sharding and checkpoints of anymesh, without any backend.
//!
//! A [`Tensor`] lives on a [`Device`]; a device runs a [`Backend`], which implements a small set of
//! kernel families. Ops are methods of `Tensor`, one file per family under `ops`, each with its
//! shape, dtype and sharding rule, lowered to those families. Use the facade crate `anymesh` to
//! pick devices; this crate knows none.

#![forbid(unsafe_code)]

pub mod backend;
mod device;
mod dtype;
mod error;
mod float8;
pub mod grad;
pub mod indexing;
pub mod layout;
pub mod map;
mod mesh;
mod meta;
pub mod ops;
mod place;
pub mod registry;
pub mod reshard;
mod shape;
mod sharding;
pub mod spmd;
mod tensor;
pub mod transport;

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(all(feature = "conformance", not(target_family = "wasm")))]
pub mod sweep;

pub use backend::{Backend, Buffer, Capabilities, View};
pub use device::Device;
pub use dtype::{DType, Element, Kind, Scalar};
pub use error::{Error, Result};
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use indexing::Index;
pub use layout::Layout;
pub use map::MapProgram;
pub use mesh::Mesh;
pub use meta::meta;
pub use ops::elementwise::Arg;
pub use place::{IntoSharding, Place};
pub use shape::{Dims, Shape};
pub use sharding::{Placement, Reduction, Region, Sharding, TensorType, split};
pub use tensor::Tensor;
