//! The one error type.

use crate::{DType, Shape};

/// Everything that can go wrong. Each variant is one way, and says what to do about it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not fit together.
    #[error("{op}: shapes do not fit: {detail}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The shapes and what was expected of them.
        detail: String,
    },
    /// An axis that the tensor does not have, or that is named twice.
    #[error("{op}: axis {axis} is not valid for a tensor of rank {rank}: use each of {low}..={high} at most once", low = -(*rank as i64), high = *rank as i64 - 1)]
    Axis {
        /// The op.
        op: &'static str,
        /// The axis as given.
        axis: i64,
        /// The tensor's rank.
        rank: usize,
    },
    /// A dtype the op has no meaning for.
    #[error("{op}: has no meaning for {dtype}; expected {expected}")]
    DType {
        /// The op.
        op: &'static str,
        /// What was given.
        dtype: DType,
        /// What would do.
        expected: &'static str,
    },
    /// An argument outside its domain.
    #[error("{op}: {detail}")]
    Argument {
        /// The op.
        op: &'static str,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// Operands on different devices.
    #[error("{op}: operands are on {left} and {right}: move one with `to_device`")]
    DeviceMismatch {
        /// The op.
        op: &'static str,
        /// Device of the first operand.
        left: String,
        /// The other device.
        right: String,
    },
    /// An index outside its dimension.
    #[error("{op}: index {index} is out of range for a dimension of size {len}")]
    IndexOutOfRange {
        /// The op, where it is known.
        op: &'static str,
        /// The offending index.
        index: i64,
        /// The size of the dimension.
        len: usize,
    },
    /// An integer divided by zero.
    #[error("{op}: integer division by zero")]
    DivisionByZero {
        /// The op.
        op: &'static str,
    },
    /// A size whose element or byte count does not fit the address space.
    #[error("{op}: a tensor of shape {shape} has more elements than can be addressed")]
    SizeOverflow {
        /// The op.
        op: &'static str,
        /// The shape.
        shape: Shape,
    },
    /// A tensor beyond what the device can bind or allocate.
    #[error("{device}: a buffer of {bytes} bytes is over this device's limit of {limit}: shard the tensor over a mesh or use a smaller dtype")]
    TooLarge {
        /// The device.
        device: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes possible.
        limit: u64,
    },
    /// Something this device cannot do.
    #[error("{device}: {what} is not supported: {hint}")]
    Unsupported {
        /// The device.
        device: String,
        /// The missing ability.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// No such device, or its driver is missing.
    #[error("device '{device}' is not available: {reason}; {hint}")]
    DeviceUnavailable {
        /// The device asked for.
        device: String,
        /// Why.
        reason: String,
        /// What to install or choose.
        hint: String,
    },
    /// The device failed or disappeared while working.
    #[error(
        "{device}: the device or a kernel on it failed: {detail}; results that depend on it are lost, and if the device itself is gone the process must restart from a checkpoint"
    )]
    DeviceFailed {
        /// The device.
        device: String,
        /// The driver's words.
        detail: String,
    },
    /// Text that could not be parsed.
    #[error("cannot read '{text}' as a {what}: expected {expected}")]
    Parse {
        /// What was being read.
        what: &'static str,
        /// The text.
        text: String,
        /// What would be accepted.
        expected: String,
    },
}

/// Shorthand used by every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
