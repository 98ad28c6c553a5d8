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
    /// Axes, sizes or devices that make no mesh.
    #[error("mesh: {detail}")]
    Mesh {
        /// What is wrong and what would be right.
        detail: String,
    },
    /// A sharding that does not fit its mesh or tensor.
    #[error("sharding: {detail}")]
    Sharding {
        /// What is wrong and what would be right.
        detail: String,
    },
    /// Operands on different meshes.
    #[error(
        "{op}: operands lie on {left} and {right}: move one with `to_mesh(&mesh, &sharding)`, or gather it with `full_tensor()`"
    )]
    MeshMismatch {
        /// The op.
        op: &'static str,
        /// Mesh of the first operand.
        left: String,
        /// The other mesh.
        right: String,
    },
    /// An op that would communicate where the policy asks for explicit resharding.
    #[error("{op} at {caller}: would communicate, and the policy is explicit. Choices:\n{choices}")]
    ImplicitCommunication {
        /// The op.
        op: &'static str,
        /// The line that called it.
        caller: String,
        /// What could be done, with the bytes each rank receives.
        choices: String,
    },
    /// No way to reshard within the memory that the cost model allows.
    #[error(
        "reshard {from} to {to}: every plan needs at least {needed} bytes on a rank, the ceiling is {ceiling}: raise `CostModel::memory` or reshard in smaller pieces"
    )]
    Memory {
        /// The type before.
        from: String,
        /// The type after.
        to: String,
        /// The smallest peak of any plan.
        needed: u64,
        /// The ceiling that was set.
        ceiling: u64,
    },
    /// Communication that failed.
    #[error(
        "{op}: communication failed: {detail} (ranks {ranks:?}); the tensors involved are unchanged, retry or rebuild the mesh without those ranks"
    )]
    Transport {
        /// The collective.
        op: &'static str,
        /// What happened.
        detail: String,
        /// The ranks that failed.
        ranks: Vec<usize>,
    },
    /// Ranks that did not answer in time.
    #[error(
        "{op}: ranks {missing:?} did not answer within {seconds} s: check that they are alive and run the same program"
    )]
    Timeout {
        /// The collective.
        op: &'static str,
        /// The deadline.
        seconds: f64,
        /// Who is missing.
        missing: Vec<usize>,
    },
    /// A product of different float dtypes where the policy asks for explicit casts.
    #[error(
        "{op}: {left} and {right} would multiply as {to}, and promotion is explicit: cast one of them, or allow it with `with_promotion(Promotion::Auto, ..)`"
    )]
    Promotion {
        /// The op.
        op: &'static str,
        /// The dtype of the first factor.
        left: DType,
        /// The dtype of one that differs.
        right: DType,
        /// What they would multiply in.
        to: DType,
    },
    /// A gradient that cannot be computed.
    #[error("{op}: no gradient: {detail}")]
    Gradient {
        /// The op.
        op: &'static str,
        /// Why, and what to do.
        detail: String,
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
    #[error(
        "{device}: a buffer of {bytes} bytes is over this device's limit of {limit}: shard the tensor over a mesh or use a smaller dtype"
    )]
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
