//! What every kernel and every backend of anymesh is made of: dtypes, shapes and layouts,
//! elementwise programs as data, devices, and the interface that a backend implements.
//!
//! Nothing here knows of tensors or meshes; those are in `anymesh_kernel`, which re-exports this
//! crate. A backend depends on this crate alone.

#![forbid(unsafe_code)]

pub mod backend;
mod device;
mod dtype;
mod error;
mod float8;
pub mod layout;
pub mod map;
mod mix;
mod shape;

pub use backend::{Backend, Buffer, Capabilities, Kernel, MemoryUse, View};
pub use device::{Device, Dry, Launched, MemoryChange, Profiling, Receiving, Timing, Watch, clock};
pub use dtype::{DType, Element, Kind, Scalar};
pub use error::{Alternative, Error, NoGradient, OperandType, RankCall, Result};
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use layout::Layout;
pub use map::MapProgram;
pub use mix::{Mix, Mixed};
pub use shape::{Dims, Shape};
