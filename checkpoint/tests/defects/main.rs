//! Defects that checkpoints of other systems are known to have, each named with the test that shows
//! that ours has it not. Those that have their own test elsewhere are named here:
//!
//! - Metadata before data, no sync, no rename, no sums (Paddle); a crash between the removal of the
//!   old metadata and the rename (torch DCP): `kill`, `crash`, `damage`.
//! - A folder that was not completed is resumed from because its number is the highest (PaddleNLP):
//!   `kill::damage`, `round_trip`.
//! - A lock that is the presence of a file, and outlives its process (Paddle): `kill`.
//! - Tensors that changed during an asynchronous save are stored changed (torch #144657); a shape
//!   that changes crashes the helper, averages begin at zero (PaddleNLP): `background`.
//! - Pickles that run code (Paddle, torch): `dcp`. Element types without an entry in a table, 8-bit
//!   floats above all (Paddle, PaddleNLP): `round_trip`, `hugging_face`.
//! - A save that is joined for 60 seconds at exit and then lost (Paddle): `background`.
//! - Dimensions that do not divide (jax #27808), other numbers of devices (orbax #648):
//!   `round_trip`.
//! - An index that is missing after files were joined (torchtitan #2137), a total size that still
//!   counts removed tensors (PaddleNLP #10693): `hugging_face`.
//! - Old states that only a dummy run can convert (Megatron): `damage`, with a stored sample of
//!   each version.

#[path = "../common/mod.rs"]
mod common;
mod manifests;
mod names;
mod resume;
mod saving;

use anymesh_checkpoint::{Checkpoint, Contents, Result, save};
use anymesh_core::{Device, Tensor};
use common::Temporary;
use std::{collections::BTreeMap, path::Path};

/// A device, and a folder for checkpoints.
#[track_caller]
fn start() -> (Device, Temporary) {
    (anymesh_backend_cpu::device(), Temporary::here())
}

/// Saves tensors and opens what was saved.
fn saved(
    root: &Path,
    name: &str,
    step: u64,
    tensors: BTreeMap<String, Tensor>,
) -> Result<Checkpoint> {
    Checkpoint::open(save(root, name, &Contents::new(step, tensors))?)
}
