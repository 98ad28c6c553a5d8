//! Calls of the families that go by positions found in data: gathers, scatters, searches, sorts.

use super::{Affine, View};
use crate::Shape;
use smallvec::SmallVec;

/// One indexed dimension of a gather or scatter.
#[derive(Clone, Debug)]
pub struct IndexAxis {
    /// Indices (i32, i64 or u32), as a view of the iteration shape. Negative ones count from the
    /// end.
    pub indices: View,
    /// The size of the dimension that is indexed; anything outside `-len..len` is a fault.
    pub len: usize,
    /// Elements (gather) or rows (scatter) per step of the index.
    pub stride: isize,
}

/// `out[c] = src[layout(c) + sum(index_k[c] * stride_k)]`. Covers take, take-along-axis, gather-nd,
/// embedding and any mix of index tensors: dimensions that are indexed have stride 0 in
/// `src.layout`.
#[derive(Clone, Debug)]
pub struct GatherCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// Where from; its layout's shape is the output's shape.
    pub src: View,
    /// At least one, at most four.
    pub axes: SmallVec<[IndexAxis; 1]>,
}

/// Checks indices as a gather would, and reads nothing else: all it does is fault.
#[derive(Clone, Debug)]
pub struct CheckIndexCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// Indices (i32, i64 or u32).
    pub indices: View,
    /// Anything outside `-len..len` is a fault.
    pub len: usize,
}

/// What a scatter does where a value meets the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScatterOp {
    /// The last one (in row-major order of the indices) wins, every time.
    Set,
    /// Adds, in row-major order of the indices; a device may first add up runs of neighbours, the
    /// same ones every time.
    Add,
    /// Multiplies, in that order.
    Mul,
    /// Smallest; NaN wins.
    Min,
    /// Largest; NaN wins.
    Max,
}

/// `out = dst; out[row(c), :] op= updates[c, :]` for every position `c` of the iteration shape,
/// where `row(c) = base(c) + sum(index_k[c] * stride_k)`.
#[derive(Clone, Debug)]
pub struct ScatterCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// The destination, dense from offset 0, seen as `[rows, inner]`. It is not changed; the result
    /// is a new buffer.
    pub dst: View,
    /// Rows of the destination.
    pub rows: usize,
    /// Elements of a row.
    pub inner: usize,
    /// The iteration shape.
    pub shape: Shape,
    /// The part of the row that does not depend on an index tensor.
    pub base: Affine,
    /// Up to four; views of the iteration shape.
    pub axes: SmallVec<[IndexAxis; 1]>,
    /// A view of shape `[shape.., inner]`, of the destination's dtype.
    pub updates: View,
    /// What to do.
    pub mode: ScatterOp,
}

/// Binary search: positions (i32) where `queries` would go in the ascending rows of `sorted`.
#[derive(Clone, Debug)]
pub struct SearchCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[rows, n]`.
    pub sorted: View,
    /// `[rows, m]`, of the same dtype.
    pub queries: View,
    /// After equal values instead of before them.
    pub right: bool,
}

/// Stable argsort (i32) along the last axis. NaN sorts as the largest value; -0 equals 0.
#[derive(Clone, Debug)]
pub struct SortCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// The input, any layout, rank at least 1.
    pub input: View,
    /// Largest first; equal values still keep their order.
    pub descending: bool,
}
