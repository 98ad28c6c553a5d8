//! What a backend does: hold buffers, and run a small set of kernel families on them.
//!
//! Calls arrive validated: shapes fit, dtypes are among [`Capabilities`], no operand is empty. A
//! backend never sees a zero-element tensor and never allocates on behalf of the caller's mistake.
//! Every output is a fresh dense buffer in row-major order, so kernels write without looking at
//! strides. An element that is only moved keeps its bits, also those of a NaN: through a map program
//! that computes nothing with it ([`MapProgram::moved`]), a gather, a scatter that sets.
//! Data-dependent faults (an index out of range, an integer divided by zero) may be found only later
//! by a GPU; they are returned by the next `download` or `sync`.

use crate::{DType, Error, Layout, Result, Scalar, Shape, map::MapProgram, shape::Dims};
use std::{any::Any, fmt::Debug, future::Future, ops::Range, pin::Pin, sync::Arc};

/// A future that a backend returns. It can change threads where there are threads.
#[cfg(not(target_family = "wasm"))]
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
/// A future that a backend returns.
#[cfg(target_family = "wasm")]
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A backend's memory. Shared, never written after the kernel that fills it was queued.
#[derive(Clone)]
pub struct Buffer(Arc<dyn Any + Send + Sync>);

impl Buffer {
    /// Wraps the backend's own type.
    pub fn new<T: Any + Send + Sync>(data: T) -> Self {
        Self(Arc::new(data))
    }

    /// The backend's own type again; an error where the buffer belongs to another backend.
    pub fn get<T: Any>(&self) -> Result<&T> {
        self.0.downcast_ref().ok_or_else(|| Error::Argument {
            op: "buffer",
            detail: "a buffer of another backend was passed in".into(),
        })
    }

    /// Whether two handles share the same memory.
    pub fn same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:p})", Arc::as_ptr(&self.0))
    }
}

/// A buffer read through a layout.
#[derive(Clone, Debug)]
pub struct View {
    /// The memory.
    pub buffer: Buffer,
    /// What the elements are.
    pub dtype: DType,
    /// Where they are.
    pub layout: Layout,
}

/// What a device can do. Asked before any launch, so that what is missing is a typed error and not
/// a driver's.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Dtypes that can be stored and computed with.
    pub dtypes: Vec<DType>,
    /// Whether transcendental functions exist for `f64`.
    pub f64_math: bool,
    /// The largest buffer one kernel can address, in bytes.
    pub max_buffer_bytes: u64,
    /// Whether this is a CPU pretending to be a GPU.
    pub software: bool,
    /// Hardware, driver and API in words.
    pub description: String,
}

/// `offset + sum(coordinate[d] * strides[d])`: an index computed from the position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affine {
    /// Value at the origin.
    pub offset: i64,
    /// Step for each dimension of the iteration shape.
    pub strides: Dims<i64>,
}

/// An input of a map program.
#[derive(Clone, Debug)]
pub struct MapInput {
    /// The elements. Without a window the layout's shape is the iteration shape.
    pub view: View,
    /// Where the view's origin lies in the iteration space. Positions outside
    /// `start .. start + shape` load zero, and `Inside` is false there. This is how padding and
    /// concatenation read.
    pub window: Option<Dims<isize>>,
}

/// Runs a map program over every position of `shape`.
#[derive(Clone, Debug)]
pub struct MapCall<'a> {
    /// The op, for error messages.
    pub op: &'static str,
    /// The program.
    pub program: &'a MapProgram,
    /// The iteration space, which is the shape of every output.
    pub shape: &'a Shape,
    /// One for each of the program's inputs.
    pub inputs: &'a [MapInput],
    /// One for each of the program's indices.
    pub indices: &'a [Affine],
    /// One for each of the program's params.
    pub params: &'a [Scalar],
}

/// How many values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Prod,
    /// Largest; NaN wins. `any` on bool.
    Max,
    /// Smallest; NaN wins. `all` on bool.
    Min,
    /// Position (i32) of the first largest value; the first NaN counts as largest.
    ArgMax,
    /// Position (i32) of the first smallest value; the first NaN counts as smallest.
    ArgMin,
    /// `log(sum(exp(x)))` without overflow. Floats only.
    LogSumExp,
}

/// Reduces the (single) output of a map program over some axes. Positions are counted in row-major
/// order of the reduced axes.
#[derive(Clone, Debug)]
pub struct ReduceCall<'a> {
    /// The values to reduce. The program has one output; it is stored only after the reduction.
    pub map: MapCall<'a>,
    /// Sorted axes of the map's shape that disappear.
    pub axes: &'a [usize],
    /// The reduction.
    pub op: ReduceOp,
    /// Multiplies a float result before it is rounded to the output dtype (a mean is a sum with a
    /// scale).
    pub scale: Option<f64>,
    /// The stored dtype: of the program's output kind, or i32 for arg-reductions.
    pub dtype: DType,
}

/// Running reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ScanOp {
    Sum,
    Prod,
    /// NaN wins and stays.
    Max,
    /// NaN wins and stays.
    Min,
    LogSumExp,
}

/// Inclusive scan along one axis.
#[derive(Clone, Debug)]
pub struct ScanCall<'a> {
    /// The input.
    pub input: &'a View,
    /// The axis.
    pub axis: usize,
    /// The operation.
    pub op: ScanOp,
    /// Whether to also give the position (i32) of the running extreme (the latest among equals; Max
    /// and Min only).
    pub positions: bool,
}

/// `a [.., m, k] x b [.., k, n] -> [.., m, n]`. Batch dimensions are already expanded to the same
/// shape; any strides.
#[derive(Clone, Debug)]
pub struct MatmulCall<'a> {
    /// Left operand.
    pub a: &'a View,
    /// Right operand, of the same dtype.
    pub b: &'a View,
    /// The stored dtype, of the same kind as the operands. Small floats accumulate in f32, integers
    /// wrap.
    pub dtype: DType,
}

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
pub struct GatherCall<'a> {
    /// The op, for error messages.
    pub op: &'static str,
    /// Where from; its layout's shape is the output's shape.
    pub src: &'a View,
    /// At least one, at most four.
    pub axes: &'a [IndexAxis],
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
pub struct ScatterCall<'a> {
    /// The op, for error messages.
    pub op: &'static str,
    /// The destination, dense from offset 0, seen as `[rows, inner]`. It is not changed; the result
    /// is a new buffer.
    pub dst: &'a View,
    /// Rows of the destination.
    pub rows: usize,
    /// Elements of a row.
    pub inner: usize,
    /// The iteration shape.
    pub shape: &'a Shape,
    /// The part of the row that does not depend on an index tensor.
    pub base: &'a Affine,
    /// Up to four; views of the iteration shape.
    pub axes: &'a [IndexAxis],
    /// A view of shape `[shape.., inner]`, of the destination's dtype.
    pub updates: &'a View,
    /// What to do.
    pub mode: ScatterOp,
}

/// Binary search: positions (i32) where `queries` would go in the ascending rows of `sorted`.
#[derive(Clone, Debug)]
pub struct SearchCall<'a> {
    /// `[rows, n]`.
    pub sorted: &'a View,
    /// `[rows, m]`, of the same dtype.
    pub queries: &'a View,
    /// After equal values instead of before them.
    pub right: bool,
}

/// Stable argsort (i32) along the last axis. NaN sorts as the largest value; -0 equals 0.
#[derive(Clone, Debug)]
pub struct SortCall<'a> {
    /// The input, any layout, rank at least 1.
    pub input: &'a View,
    /// Largest first; equal values still keep their order.
    pub descending: bool,
}

/// Convolution over three spatial dimensions (fewer are padded with 1 in front).
#[derive(Clone, Debug)]
pub struct ConvCall<'a> {
    /// `[n, c, d, h, w]`.
    pub input: &'a View,
    /// `[o, c / groups, kd, kh, kw]`; transposed: `[c, o / groups, kd, kh, kw]`.
    pub weight: &'a View,
    /// Output channels.
    pub channels: usize,
    /// Output sizes.
    pub out: [usize; 3],
    /// Step of the window.
    pub stride: [usize; 3],
    /// Zeros in front of each spatial dimension (what is behind follows from `out`).
    pub padding: [usize; 3],
    /// Step inside the window.
    pub dilation: [usize; 3],
    /// Independent groups of channels.
    pub groups: usize,
    /// Transposed: each input element spreads over a window of the output.
    pub transposed: bool,
}

/// Fused ops over rows: softmax and the norms.
#[derive(Clone, Debug)]
pub struct RowCall<'a> {
    /// `[rows, n]`, dense.
    pub input: &'a View,
    /// What to compute; the output has the shape and dtype of the input.
    pub op: RowOp<'a>,
}

/// See [`RowCall`].
#[derive(Clone, Debug)]
pub enum RowOp<'a> {
    /// `exp(x - max) / sum`.
    Softmax,
    /// `x - max - log(sum)`.
    LogSoftmax,
    /// `(x - mean) / sqrt(var + eps) * weight + bias`, or without the mean for RMS norm.
    Norm {
        /// Leave the mean alone.
        rms: bool,
        /// Added under the root.
        eps: f64,
        /// Dense vectors of `groups * channels` elements, of any float dtype.
        weight: Option<&'a View>,
        /// Likewise.
        bias: Option<&'a View>,
        /// Row `r`, column `j` uses parameter `(r % groups) * channels + j / inner`.
        groups: usize,
        /// Parameters per row.
        channels: usize,
        /// Neighbouring columns that share a parameter.
        inner: usize,
    },
}

/// `softmax(q k^T * scale) v` with grouped heads: query head `h` reads key head `h / (hq / hk)`.
/// All views `[batch, heads, length, size]`, any strides. A query that sees no key gives zeros,
/// with a log-sum-exp of minus infinity.
#[derive(Clone, Debug)]
pub struct AttentionCall<'a> {
    /// `[b, hq, s, d]`.
    pub q: &'a View,
    /// `[b, hk, t, d]` where `hk` divides `hq`.
    pub k: &'a View,
    /// `[b, hk, t, dv]`.
    pub v: &'a View,
    /// Factor on the scores.
    pub scale: f64,
    /// Query `i` sees keys `0 ..= i + t - s`.
    pub causal: bool,
}

/// Gradients of attention from what the forward pass left.
#[derive(Clone, Debug)]
pub struct AttentionBackwardCall<'a> {
    /// The forward call.
    pub forward: AttentionCall<'a>,
    /// Its result.
    pub out: &'a View,
    /// Its log-sum-exp `[b, hq, s]`, f32 (f64 for f64 inputs).
    pub lse: &'a View,
    /// Gradient of the result.
    pub grad: &'a View,
}

/// A device that runs kernels. See the module's text for what it may rely on.
pub trait Backend: Debug + Send + Sync {
    /// A short name a user can select the device by, such as `cpu` or `wgpu:llvmpipe`.
    fn name(&self) -> &str;

    /// What the device can do.
    fn capabilities(&self) -> &Capabilities;

    /// A buffer with these bytes.
    fn upload(&self, bytes: &[u8]) -> Result<Buffer>;

    /// The bytes of a buffer, and any fault of earlier kernels.
    fn download<'a>(
        &'a self,
        buffer: &'a Buffer,
        bytes: Range<usize>,
    ) -> BoxFuture<'a, Result<Vec<u8>>>;

    /// The bytes of a buffer where they are, on devices whose memory the host can read at any time.
    fn in_place<'b>(&self, _buffer: &'b Buffer) -> Option<&'b [u8]> {
        None
    }

    /// Waits until everything queued is done; returns any fault.
    fn sync(&self) -> BoxFuture<'_, Result<()>>;

    /// Elementwise program; one buffer for each output.
    fn map(&self, call: &MapCall<'_>) -> Result<Vec<Buffer>>;

    /// Reduction with a map program in front.
    fn reduce(&self, call: &ReduceCall<'_>) -> Result<Buffer>;

    /// Running reduction: values, and positions where asked for.
    fn scan(&self, call: &ScanCall<'_>) -> Result<(Buffer, Option<Buffer>)>;

    /// Batched matrix product.
    fn matmul(&self, call: &MatmulCall<'_>) -> Result<Buffer>;

    /// Indexed read.
    fn gather(&self, call: &GatherCall<'_>) -> Result<Buffer>;

    /// Indexed write into a copy.
    fn scatter(&self, call: &ScatterCall<'_>) -> Result<Buffer>;

    /// Binary search.
    fn search(&self, call: &SearchCall<'_>) -> Result<Buffer>;

    /// Argsort.
    fn sort(&self, call: &SortCall<'_>) -> Result<Buffer>;

    /// Convolution; the output `[n, channels, out..]` has the input's dtype.
    fn conv(&self, call: &ConvCall<'_>) -> Result<Buffer>;

    /// Fused row op, or `None` to have it decomposed.
    fn row(&self, _call: &RowCall<'_>) -> Result<Option<Buffer>> {
        Ok(None)
    }

    /// Fused attention: result (dense `[b, hq, s, dv]`) and log-sum-exp (`[b, hq, s]`, f32 or f64),
    /// or `None` to have it decomposed.
    fn attention(&self, _call: &AttentionCall<'_>) -> Result<Option<(Buffer, Buffer)>> {
        Ok(None)
    }

    /// Gradients for q, k and v (each dense, in its operand's shape and dtype), or `None` to have
    /// them decomposed.
    fn attention_backward(&self, _call: &AttentionBackwardCall<'_>) -> Result<Option<[Buffer; 3]>> {
        Ok(None)
    }
}
