//! **anymesh**: one sharded tensor program, any mesh.
//!
//! The same tensors and kernels on the CPU, on any GPU through wgpu, in a browser, and on CUDA.
//! This crate picks devices; tensors and ops are those of [`anymesh_core`], re-exported here.
//!
//! ```
//! use anymesh::prelude::*;
//! let device = device("cpu")?;
//! let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &device)?;
//! let y = ((&x - x.mean_all()?)? / 2.0)?.cast(DType::BF16)?;
//! assert_eq!(y.to_string(), "[[-0.75, -0.25],\n [ 0.25,  0.75]]\nbf16[2, 2] on cpu");
//! # Ok::<(), anymesh::Error>(())
//! ```

#![forbid(unsafe_code)]

mod devices;
pub mod prelude;

/// Checkpoints: any mesh in, any mesh out.
#[cfg(not(target_family = "wasm"))]
pub use anymesh_checkpoint as checkpoint;
/// The suites that hold backends, transports and rules to what they promise, and ops by name.
#[cfg(feature = "conformance")]
pub use anymesh_conformance as conformance;
pub use anymesh_core::*;
#[cfg(not(target_family = "wasm"))]
pub use devices::{Found, default_device, device, found};

/// The backends that this build has.
pub mod backends {
    #[cfg(feature = "cpu")]
    pub use anymesh_backend_cpu as cpu;
    #[cfg(feature = "cuda")]
    pub use anymesh_backend_cuda as cuda;
    #[cfg(feature = "wgpu")]
    pub use anymesh_backend_wgpu as wgpu;
}
