//! **anymesh**: one sharded tensor program, any mesh.
//!
//! You write a tensor program once. It runs on the CPU, on any GPU through wgpu, in a browser and on
//! CUDA, on one device or on a mesh of many ranks, and gives the same numbers everywhere. This crate
//! opens devices; everything else is re-exported from the crates below it.
//!
//! # What is where
//!
//! | | |
//! |---|---|
//! | [`prelude`] | what a program needs, in one `use` |
//! | [`Tensor`] | the one tensor type; ops are its methods, listed by family in [`ops`] |
//! | [`Mesh`], [`Sharding`], [`Place`] | ranks with named axes, how a tensor lies on them, where a new one goes |
//! | [`spmd`] | sharding rules, the ledger of what was sent, policies, own ops on a mesh |
//! | [`reshard`] | plans from one sharding to another, with bytes, memory and time |
//! | [`cost`] | a machine as a model: links, compute, memory; estimates of whole steps |
//! | [`grad`] | gradients, parameters, recompute, own functions |
//! | [`indexing`] | NumPy's indexing with [`i!`] |
//! | [`map`] | elementwise programs as data, for own fused kernels |
//! | [`transport`] | what moves data between ranks |
//! | [`init`], [`cluster`] | the processes of a launcher as one machine to put meshes on |
//! | [`checkpoint`] | any mesh in, any mesh out; Hugging Face, torch, safetensors |
//! | [`schedule`] | pipeline schedules as data: built in, searched, own ones; proofs and timings |
//! | [`simulate`] | what a training step costs on a cluster that is not there, and a search over layouts |
//! | `show` | pictures and tables for notebooks, pages and files |
//! | [`backend`], [`backends`] | what a device is made of, and the ones in this build |
//!
//! # Six short programs
//!
//! **Tensors.** Views are free, numbers broadcast, a tensor prints itself:
//!
//! ```
//! use anymesh::prelude::*;
//! let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &device("cpu")?)?;
//! let y = ((&x - x.mean_all()?)? / 2.0)?.cast(DType::BF16)?;
//! assert_eq!(y.to_string(), "[[-0.75, -0.25],\n [ 0.25,  0.75]]\nbf16[2, 2] on cpu");
//! # Ok::<(), anymesh::Error>(())
//! ```
//!
//! **A mesh.** The same ops on eight simulated ranks, and every byte that crossed:
//!
//! ```
//! use anymesh::prelude::*;
//! let mesh = Mesh::new("dp=2, tp=4", &device("cpu")?)?;
//! let x = Tensor::normal([64, 32], 0.0, 1.0, DType::F32, (&mesh, "[@dp, _]"), Rng::new(1))?;
//! let w = Tensor::normal([32, 16], 0.0, 1.0, DType::F32, (&mesh, "[_, @tp]"), Rng::new(2))?;
//! let (y, ledger) = Ledger::record(|| x.matmul(&w)?.softmax(-1));
//! assert_eq!(y?.type_string(), "f32[64@dp, 16@tp]");
//! assert!(ledger.bytes() > 0, "the largest values and the sums of rows crossed:\n{ledger}");
//! # Ok::<(), anymesh::Error>(())
//! ```
//!
//! **Gradients.** A gradient stays a partial sum until it is asked for:
//!
//! ```
//! use anymesh::prelude::*;
//! let mesh = Mesh::new("dp=4", &device("cpu")?)?;
//! let x = Tensor::normal([64, 8], 0.0, 1.0, DType::F32, (&mesh, "[@dp, _]"), Rng::new(1))?;
//! let mut w = Tensor::zeros([8, 1], DType::F32, &mesh)?.require_grad()?;
//! let mut losses = vec![];
//! for _ in 0..20 {
//!     let loss = (x.matmul(&w)? - x.sum(&[1], true))?.square()?.mean_all()?;
//!     let g = loss.backward()?.of(&w)?;
//!     w.update(|w| w - g * 0.1)?;
//!     losses.push(loss.item()?.to_f64());
//! }
//! assert!(losses[19] < losses[0] / 10.0);
//! # Ok::<(), anymesh::Error>(())
//! ```
//!
//! **Checkpoints.** Saved from one mesh, loaded into another:
//!
//! ```
//! use anymesh::{checkpoint::{Checkpoint, Contents, Load, save}, prelude::*};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = device("cpu")?;
//! let on = |axes, text| Tensor::arange(0, 24, 1, DType::F32, &device)?.reshape([4, 6])?.to_mesh(&Mesh::new(axes, &device)?, text);
//! let rows = Contents::new(7, [("w".to_string(), on("x=4", "[@x, _]")?)].into());
//! let columns = Contents::new(0, [("w".to_string(), on("y=3", "[_, @y]")?)].into());
//! let root = std::env::temp_dir().join(format!("anymesh-doc-facade-{}", std::process::id()));
//! let saved = Checkpoint::open(save(&root, "step-7", &rows)?)?;
//! let loaded = Load::default().replace(&saved, &columns)?;
//! assert_eq!(loaded.tensors["w"].type_string(), "f32[4, 6@y]");
//! # std::fs::remove_dir_all(&root)?;
//! # Ok(()) }
//! ```
//!
//! **A cluster.** The same program in the processes that torchrun, mpirun, srun or `anymesh launch`
//! started, and with simulated ranks where nobody did:
//!
//! ```
//! use anymesh::prelude::*;
//! let cluster = anymesh::init()?;
//! let mesh = Mesh::new("dp=2, tp=2", &cluster)?;
//! let x = Tensor::ones([8, 8], DType::F32, (&mesh, "[@dp, @tp]"))?;
//! let sum = x.sum(&[], false)?.item()?.to_f64();
//! if cluster.is_first() {
//!     println!("{}{sum}", cluster.placement(&mesh));
//! }
//! # Ok::<(), anymesh::Error>(())
//! ```
//!
//! **A plan.** What a layout costs, at a size that no machine here holds:
//!
//! ```
//! use anymesh::prelude::*;
//! let mesh = Mesh::new("dp=64, tp=8", &meta())?;
//! let x = Tensor::zeros([1 << 20, 1 << 14], DType::BF16, (&mesh, "[@dp, _]"))?;
//! let w = Tensor::zeros([1 << 14, 1 << 16], DType::BF16, (&mesh, "[@dp, @tp]"))?;
//! let (y, ledger) = Ledger::record(|| x.matmul(&w));
//! assert_eq!(y?.type_string(), "bf16[1048576@dp, 65536@tp]");
//! println!("{ledger}"); // one all-gather of the weight over dp, with its bytes
//! # Ok::<(), anymesh::Error>(())
//! ```
//!
//! # Features
//!
//! `cpu` and `wgpu` are on by default, `cuda`, `nccl`, `mpi`, `train`, `layout` and `show` are not. Processes talk over TCP
//! without any of them; `mpi` needs a system MPI and libclang to build.
//!
//! Nothing of CUDA is needed to build `cuda`, but CubeCL's CUDA crate depends on an LLVM bundle that its build script downloads and this library
//! never uses. To build without that download, put the stand-in of this repository into the
//! `Cargo.toml` of your workspace:
//!
//! ```toml
//! [patch.crates-io]
//! cubecl-llvm = { git = "https://github.com/anymesh/anymesh" }
//! ```

#![forbid(unsafe_code)]

#[cfg(doctest)]
mod book;
mod devices;
mod init;
pub mod prelude;

/// Checkpoints: any mesh in, any mesh out.
#[cfg(not(target_family = "wasm"))]
pub use anymesh_checkpoint as checkpoint;
/// One program over several processes: who started them, who has which rank, what happens when one
/// dies.
#[cfg(not(target_family = "wasm"))]
pub use anymesh_cluster as cluster;
/// The suites that hold backends, transports and rules to what they promise, and ops by name.
#[cfg(feature = "conformance")]
pub use anymesh_conformance as conformance;
pub use anymesh_core::*;
/// The search for how to lay a model out on a mesh.
#[cfg(feature = "layout")]
pub use anymesh_layout as layout;
/// Pipeline schedules as data: built-in ones, a search, the proof that one runs, and when everything
/// happens.
pub use anymesh_schedule as schedule;
/// Pictures and tables: what notebooks, pages and `--svg` show.
#[cfg(feature = "show")]
pub use anymesh_show as show;
/// What a training step of a transformer costs on a cluster that is not there, and a search over its
/// layouts.
pub use anymesh_simulate as simulate;
#[cfg(all(feature = "train", not(target_family = "wasm")))]
pub use anymesh_train as train;
#[cfg(not(target_family = "wasm"))]
pub use devices::{FoundDevice, default_device, device, found};
#[cfg(not(target_family = "wasm"))]
pub use init::init;

/// The backends that this build has.
pub mod backends {
    #[cfg(feature = "cpu")]
    pub use anymesh_backend_cpu as cpu;
    #[cfg(feature = "cuda")]
    pub use anymesh_backend_cuda as cuda;
    #[cfg(feature = "wgpu")]
    pub use anymesh_backend_wgpu as wgpu;
}
