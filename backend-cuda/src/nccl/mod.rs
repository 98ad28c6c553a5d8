//! NCCL on the memory of CUDA devices, below the level of tensors.
//!
//! [`connect`] meets the other members of a group and gives a [`Communicator`] for each rank that
//! this process has in it. A call is data: a list of [`Work`], each an [`Op`] of a rank, which
//! [`submit`] queues as one group on the devices' communication streams. It does not wait: kernels
//! that use a result wait for it on the device. A [`Watch`] has a deadline for every call; when one
//! passes, or when somebody [aborts](Watch::abort) it, all its communicators end, and every read of
//! their devices gives the error until the failure is [healed](heal).
//!
//! Loaded at run time: NCCL 2.18 or newer. [`native`] tells what it can reduce by itself.

mod communicator;
mod lane;
mod library;
mod native;
mod submit;
mod watch;

pub use communicator::{Communicator, Id, Op, connect, new_id};
pub(crate) use lane::Lane;
pub use lane::Region;
pub use library::{Error, Library, version_text};
pub use native::{Combine, Native, Reduce, native};
pub use submit::{Terms, Work, submit};
pub use watch::{Call, Observer, Watch};

use anymesh_kernel::Device;
use std::sync::Arc;

/// The communication stream of a device.
fn lane_of(device: &Device) -> Result<Arc<Lane>, Error> {
    match crate::opened(device) {
        Some(opened) => opened.lane(),
        None => Err(Error::Device(anymesh_kernel::Error::Unsupported {
            device: device.name().into(),
            what: "NCCL".into(),
            hint: "it moves memory of CUDA devices; take another transport, or the device as `anymesh::device(\"cuda:0\")` gives it".into(),
        })),
    }
}

/// The name that a GPU has in all the world; nothing for a device that NCCL cannot reach.
pub fn identity(device: &Device) -> Option<String> {
    let uuid = crate::opened(device)?.context.uuid().ok()?;
    Some(
        uuid.bytes
            .iter()
            .map(|b| format!("{:02x}", *b as u8))
            .collect(),
    )
}

/// Takes a failure of communication off a device, for a program that goes on without the lost
/// ranks. Tensors from before the failed calls are good again. Those that were made from then to now
/// stay unreadable, since nobody knows what came of data that was never received: load them from a
/// checkpoint.
pub fn heal(device: &Device) {
    if let Some(opened) = crate::opened(device) {
        opened.gate.heal();
    }
}
