//! The one error type.

use crate::{DType, Shape};
use std::fmt;

/// What an error tells of an operand: as much of its type as is known.
///
/// ```
/// # use anymesh_kernel::{DType, OperandType, Shape};
/// let mut x = OperandType::from((DType::F32, &Shape::from([8, 4])));
/// assert_eq!(x.to_string(), "f32[8, 4]");
/// x.sharding = "[@dp, _]{sum:tp}".into();
/// assert_eq!(x.to_string(), "f32[8@dp, 4]{sum:tp}");
/// assert_eq!(OperandType::from(&Shape::from([8, 4])).to_string(), "[8, 4]");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OperandType {
    /// Its dtype; none for a shape alone, such as one that was asked for.
    pub dtype: Option<DType>,
    /// Its global shape.
    pub shape: Shape,
    /// The sharding by the names of mesh axes, such as `[@dp, _]{sum:tp}`; empty for a tensor that
    /// lies on a single device.
    pub sharding: String,
    /// The rank of the mesh that holds it, for the part of one rank.
    pub mesh_rank: Option<usize>,
}

impl OperandType {
    /// The same as what one rank of a mesh holds.
    pub fn on_rank(self, rank: usize) -> Self {
        Self {
            mesh_rank: Some(rank),
            ..self
        }
    }
}

impl From<&Shape> for OperandType {
    fn from(shape: &Shape) -> Self {
        Self {
            dtype: None,
            shape: shape.clone(),
            sharding: String::new(),
            mesh_rank: None,
        }
    }
}

impl From<(DType, &Shape)> for OperandType {
    fn from((dtype, shape): (DType, &Shape)) -> Self {
        Self {
            dtype: Some(dtype),
            ..shape.into()
        }
    }
}

/// A call that one rank of several made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RankCall {
    /// Who.
    pub rank: usize,
    /// The op or collective, with what tells it from others of its kind.
    pub op: String,
    /// The line that called it.
    pub caller: String,
}

/// The type as text: `f32[8@dp, 4]{sum:tp}`.
impl fmt::Display for OperandType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dtype) = self.dtype {
            write!(f, "{dtype}")?;
        }
        let (cuts, partial) = self.sharding.split_once(']').unwrap_or_default();
        let mut cuts = cuts.trim_start_matches('[').split(", ");
        let dims: Vec<String> = (self.shape.dims().iter())
            .map(|size| match cuts.next() {
                None | Some("" | "_") => size.to_string(),
                Some(axes) => format!("{size}{axes}"),
            })
            .collect();
        write!(f, "[{}]{partial}", dims.join(", "))
    }
}

/// One way to do what [`Error::ImplicitCommunication`] refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alternative {
    /// What a program would write, or what the op would do.
    pub description: String,
    /// The bytes that each rank receives.
    pub bytes: u64,
}

impl Alternative {
    fn lines(choices: &[Alternative]) -> String {
        choices
            .iter()
            .map(|c| format!("  {}: {} bytes a rank\n", c.description, c.bytes))
            .collect()
    }
}

/// Why there is no gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NoGradient {
    /// Nothing that the tensor was computed from requires a gradient.
    Untracked,
    /// The result does not depend on the tensor.
    Unused,
    /// An earlier pass released what the op had kept.
    Released,
    /// The gradient was taken out already.
    Taken,
    /// The tensor is the result of an op, and passes keep the gradients of leaves alone.
    NotRetained,
    /// A change in place that would cut the tensor off from what it was computed from.
    Detached,
    /// The op has no gradient where it was called.
    NotDifferentiable,
    /// A gradient whose type is not that of its tensor, or as many as there are not tensors.
    Mismatch,
}

/// Everything that can go wrong. Each variant is one way, and says what to do about it.
///
/// What is wrong is in the fields, so that a program can match on it; `detail` says it in words.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not fit together.
    #[error("{op}: shapes do not fit: {detail}")]
    Shape {
        /// The op.
        op: &'static str,
        /// The operands that do not fit, in the order of the call, and the shapes asked of them.
        operands: Box<[OperandType]>,
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
        /// The argument, by its name in the signature or in the options.
        argument: &'static str,
        /// The operands that the argument does not suit, where it depends on them.
        operands: Box<[OperandType]>,
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
        /// The axes and their sizes.
        axes: Box<[(String, usize)]>,
        /// The ranks that are wrong, where it is about some.
        ranks: Box<[usize]>,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// An axis that the mesh does not have.
    #[error(
        "mesh: there is no axis '{axis}' in {mesh}; where a program may run without it, write @{axis}?"
    )]
    NoSuchAxis {
        /// The name as given.
        axis: String,
        /// The mesh with its axes.
        mesh: String,
    },
    /// A sharding that does not fit its mesh or tensor.
    #[error("sharding: {detail}")]
    Sharding {
        /// The sharding by the names of mesh axes, such as `[@dp, _]{sum:tp}`; empty where it
        /// is not about a single one.
        sharding: String,
        /// What is wrong and what would be right.
        detail: String,
    },
    /// A sharding rule that does not suit its op.
    #[error("{op}: the sharding rule '{rule}' does not hold: {detail}")]
    Rule {
        /// The op.
        op: &'static str,
        /// The rule as text.
        rule: String,
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
    #[error(
        "{op} at {caller}: would communicate, and the policy is explicit. Choices:\n{}  or allow it with `with_policy(Policy::Auto, ..)`",
        Alternative::lines(choices)
    )]
    ImplicitCommunication {
        /// The op.
        op: &'static str,
        /// The line that called it.
        caller: String,
        /// What could be done, cheapest first.
        choices: Box<[Alternative]>,
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
        "{op}: ranks {missing:?} did not answer within {seconds} s: check that they are alive and run the same program{detail}"
    )]
    Timeout {
        /// The collective.
        op: &'static str,
        /// The deadline.
        seconds: f64,
        /// Who is missing.
        missing: Box<[usize]>,
        /// What else is known, such as the last call that each of them finished; empty, or a text
        /// that goes on from the message.
        detail: String,
    },
    /// Processes that are gone: they died, or left while others still waited for them.
    #[error(
        "{op}: {detail}: what was not saved on ranks {ranks:?} is lost; rebuild the mesh without them, or start again from the last checkpoint"
    )]
    Lost {
        /// The collective.
        op: &'static str,
        /// Their ranks.
        ranks: Box<[usize]>,
        /// Which processes, and how it was noticed.
        detail: String,
    },
    /// An error that a process at the other end had, and this one had not.
    #[error("{op}: rank {rank} failed and the others stop with it: {error}")]
    Elsewhere {
        /// What this process was doing.
        op: &'static str,
        /// Who failed.
        rank: usize,
        /// Its error.
        error: String,
    },
    /// Processes that were to make the same call and made different ones.
    #[error(
        "the programs of ranks {} and {} differ: {} is called by rank {} at {} and {} by rank {} at {}: every process must run the same ops in the same order",
        .calls[0].rank, .calls[1].rank, .calls[0].op, .calls[0].rank, .calls[0].caller, .calls[1].op, .calls[1].rank, .calls[1].caller
    )]
    Diverged {
        /// The first call that differs, as two ranks made it.
        calls: Box<[RankCall; 2]>,
    },
    /// Processes that should decide alike and did not.
    #[error(
        "ranks {ranks:?} decided otherwise than the others (after {calls:?} decisions, the others after {usual}): every process must run the same program; a trace of each tells the first op that differs"
    )]
    Disagreement {
        /// The ranks that differ.
        ranks: Vec<usize>,
        /// How many decisions each of them made.
        calls: Vec<u64>,
        /// How many the others made.
        usual: u64,
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
        /// Why.
        reason: NoGradient,
        /// The tensors it is about.
        operands: Box<[OperandType]>,
        /// Why, in words, and what to do.
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
        shape: Box<Shape>,
    },
    /// Elements that are too many for their positions to be numbered in `i32`.
    #[error(
        "{op}: positions among {count} elements do not fit i32: take fewer axes at once, or smaller pieces"
    )]
    Positions {
        /// The op.
        op: &'static str,
        /// How many there are.
        count: usize,
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
    /// Memory that the device could hold, but does not have now.
    #[error(
        "{device}: there is no memory for a buffer of {bytes} bytes: free some, shard the tensor over a mesh or use a smaller dtype"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        bytes: u64,
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
    /// A program that does something else than its plan.
    #[error(
        "step {number} of the plan is {planned}, the program has {found}: {detail}; plan the step anew, or let ops decide by themselves from there on with `OnDifference::Auto`"
    )]
    PlanDiffers {
        /// The number of the step.
        number: usize,
        /// The op that was planned, and its line.
        planned: String,
        /// The op that the program has there, and its line.
        found: String,
        /// What differs.
        detail: String,
    },
    /// A step that cannot be planned within a bound on memory.
    #[error(
        "the step needs {needed} bytes on a rank, the bound is {bound} ({eager} without a plan): raise it, cut more of the step's tensors, or recompute some with `checkpoint`"
    )]
    PlanMemory {
        /// The least that was reached.
        needed: u64,
        /// The bound.
        bound: u64,
        /// What the step needs where ops decide by themselves.
        eager: u64,
    },
    /// Values that were asked for while a step was planned, or of what was computed in its plan.
    #[error(
        "{what} of a step that is planned: planning computes nothing, so there are no values; run the step to get them, and leave what needs values out of the function that is planned"
    )]
    Planned {
        /// What was to be done.
        what: &'static str,
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

impl Error {
    /// Operands that do not fit together, or not the shapes asked of them.
    ///
    /// ```
    /// # use anymesh_kernel::{Error, Shape};
    /// let (a, b) = (Shape::from([2, 3]), Shape::from([4]));
    /// let error = Error::shape("add", [&a, &b], "[2, 3] and [4] do not broadcast");
    /// assert!(matches!(&error, Error::Shape { operands, .. } if operands[1].shape == b));
    /// ```
    pub fn shape<T: Into<OperandType>>(
        op: &'static str,
        operands: impl IntoIterator<Item = T>,
        detail: impl Into<String>,
    ) -> Self {
        Self::Shape {
            op,
            operands: operands.into_iter().map(Into::into).collect(),
            detail: detail.into(),
        }
    }

    /// An argument outside its domain, by its name in the signature or in the options. Where that
    /// depends on operands, add them with [`of`](Self::of).
    pub fn argument(op: &'static str, argument: &'static str, detail: impl Into<String>) -> Self {
        Self::Argument {
            op,
            argument,
            operands: [].into(),
            detail: detail.into(),
        }
    }

    /// A gradient that cannot be computed. Add the tensors it is about with [`of`](Self::of).
    pub fn gradient(op: &'static str, reason: NoGradient, detail: impl Into<String>) -> Self {
        Self::Gradient {
            op,
            reason,
            operands: [].into(),
            detail: detail.into(),
        }
    }

    /// The same error with the operands it is about: of [`Shape`](Self::Shape),
    /// [`Argument`](Self::Argument) and [`Gradient`](Self::Gradient), where it does not tell them
    /// yet.
    ///
    /// ```
    /// # use anymesh_kernel::{DType, Error, Shape};
    /// let x = (DType::F32, &Shape::from([5]));
    /// let error = Error::argument("topk", "k", "9 values were asked for, there are 5").of([x]);
    /// assert!(matches!(&error, Error::Argument { argument: "k", operands, .. } if operands[0].shape == *x.1));
    /// ```
    pub fn of<T: Into<OperandType>>(mut self, types: impl IntoIterator<Item = T>) -> Self {
        if let Self::Shape { operands, .. }
        | Self::Argument { operands, .. }
        | Self::Gradient { operands, .. } = &mut self
            && operands.is_empty()
        {
            *operands = types.into_iter().map(Into::into).collect();
        }
        self
    }

    /// Whether it may be an error of this process alone: of the values or of the device it has. All
    /// processes of a program have the other errors together.
    pub fn only_here(&self) -> bool {
        matches!(
            self,
            Self::IndexOutOfRange { .. }
                | Self::DivisionByZero { .. }
                | Self::OutOfMemory { .. }
                | Self::DeviceFailed { .. }
        )
    }

    /// Axes, sizes or devices that make no mesh.
    pub fn mesh(axes: &[(String, usize)], detail: impl Into<String>) -> Self {
        Self::Mesh {
            axes: axes.into(),
            ranks: [].into(),
            detail: detail.into(),
        }
    }
}

/// Shorthand used by every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests;
