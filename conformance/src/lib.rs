//! What every backend, transport and sharding rule of anymesh is held to.
//!
//! - [`processes`]: programs as several processes run them, here in threads.
//! - [`registry`]: every op by name, with JSON attributes and small sample calls.
//! - [`replay`]: an op at which two runs parted, called alone.
//! - [`cases`]: every op, dtype and memory layout on a device, held against the CPU.
//! - [`functions`]: what each float function of one tensor must give, and where it is called.
//! - [`bits`]: what is only moved keeps its bits.
//! - [`gradients`]: gradients against finite differences, and on a device against the CPU.
//! - [`indexing`]: random index expressions against a model on the host.
//! - [`sweep`]: every op under shardings of its operands, held against its unsharded result.
//! - [`transport`]: what every transport promises.
//!
//! Programs do not need this crate; tests and the `anymesh` command do.

#![forbid(unsafe_code)]

pub mod bits;
pub mod cases;
pub mod functions;
#[cfg(not(target_family = "wasm"))]
pub mod gradients;
pub mod indexing;
#[cfg(not(target_family = "wasm"))]
pub mod processes;
pub mod registry;
#[cfg(not(target_family = "wasm"))]
pub mod replay;
#[cfg(not(target_family = "wasm"))]
pub mod sweep;
pub mod transport;
