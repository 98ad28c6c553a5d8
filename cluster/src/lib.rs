//! One sharded program over several processes: what the launcher said, how processes meet, what
//! carries tensors between them, and what happens when one dies.
//!
//! ```no_run
//! use anymesh_cluster::Cluster;
//! use anymesh_core::{DType, Mesh, Tensor};
//! let cluster = Cluster::from_env(&[anymesh_backend_cpu::device()])?;
//! let mesh = Mesh::new("dp=2, tp=2", &cluster)?;
//! let x = Tensor::ones([1024, 1024], DType::F32, (&mesh, "[@dp, @tp]"))?;
//! let sum = x.sum(&[], false)?.item()?.to_f64();
//! if cluster.is_first() {
//!     println!("{}\n{sum}", cluster.placement(&mesh));
//! }
//! # Ok::<(), anymesh_core::Error>(())
//! ```

#![deny(unsafe_code)]

mod carried;
mod cluster;
mod control;
mod door;
mod frame;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod meet;
mod meeting;
#[cfg(feature = "nccl")]
mod nccl;
mod posted;
mod recorder;
mod start;
pub mod stop;
mod torch_store;
mod wire;

pub use cluster::Cluster;
pub use start::{Launcher, Meeting, Over, Problem, Start, StartError, Sums};
pub use torch_store::{StoreError, TorchStore};

/// What may carry tensors between processes in this build.
pub const TRANSPORTS: &[&str] = &[
    "tcp",
    #[cfg(feature = "mpi")]
    "mpi",
    #[cfg(feature = "nccl")]
    "nccl",
];
