//! Launches kernels on devices whose memory is ours to hand out, with CubeCL as the compiler.
//!
//! A backend gives a [`Compiler`], a [`Queue`] and [`Slabs`] and gets an [`Engine`]: what a
//! [`CubeBackend`](anymesh_shaders::CubeBackend) needs to run. What CUDA and wgpu share of that is here,
//! and neither of them is known here.
//!
//! `server` receives launches from CubeCL's client, on a thread of its own; `again` makes those that came
//! before without CubeCL, `lists` whole lists of them (`trace` writes down what they come to, `order` says
//! what waits for what); `memory` hands out memory by the arithmetic of `pool`; `failures` keeps what a
//! failed launch should have written from being read; `engine` ties them together.

mod again;
mod engine;
mod failures;
mod lists;
pub mod log;
mod memory;
mod order;
mod pool;
mod queue;
mod replay;
mod server;
mod trace;

pub use again::Repeated;
pub use engine::Engine;
pub use memory::{GpuArena, NoSlabs, Slabs, place};
pub use pool::{MemoryUse, Pieces};
pub use queue::{Compiler, Function, Graph, Image, Launch, Nothing, Queue, Stream};
pub use replay::Library;
pub use server::Launcher;
