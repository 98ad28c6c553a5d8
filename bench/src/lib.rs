//! What is measured, as functions of a device: whole training steps and kernels by themselves. The
//! programs in `benches/` and `anymesh bench` are thin around these, so that both measure the same.
//!
//! ```
//! use anymesh_bench::step::Spec;
//! # let device = anymesh_backend_cpu::device();
//! let spec = Spec::parse(&["tiny", "bf16", "2x16"])?;
//! let measured = spec.measure(&device, 1)?;
//! assert_eq!((measured.ms.len(), measured.losses.len()), (1, 4));
//! # Ok::<(), anymesh_bench::Error>(())
//! ```

mod families;
mod idle;
pub mod kernels;
mod noise;
pub mod peers;
pub mod step;

pub use anymesh_train::{Error, Result};
pub use families::{Families, Row};
pub use idle::idle;
