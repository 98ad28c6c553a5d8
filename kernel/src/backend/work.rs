//! What a launch has to do, whatever device does it.

use super::{AttentionCall, ConvCall, Kernel, View};
use crate::DType;

/// How much a kernel computes and touches: what a model of a device prices.
///
/// ```
/// use anymesh_kernel::{Buffer, DType, Layout, View, backend::{Kernel, MatmulCall}};
/// let view = |dims: [usize; 2]| View {
///     buffer: Buffer::new((), dims.iter().product::<usize>() * 2),
///     dtype: DType::BF16,
///     layout: Layout::contiguous(dims.into()),
/// };
/// let kernel: Kernel = MatmulCall { op: "matmul", a: view([8, 4]), b: view([4, 6]), scales: None, bias: None, addend: None, dtype: DType::F32 }.into();
/// let work = kernel.work();
/// assert_eq!((work.dtype, work.products), (DType::BF16, 2.0 * 8.0 * 4.0 * 6.0));
/// assert_eq!(work.bytes, (8 * 4 + 4 * 6) as f64 * 2.0 + 8.0 * 6.0 * 4.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The dtype of the factors where it multiplies, else of its first operand or output.
    pub dtype: DType,
    /// Additions and multiplications of matrix products, attention and convolutions.
    pub products: f64,
    /// Everything else that is done element by element.
    pub scalars: f64,
    /// Bytes read and written, each element once.
    pub bytes: f64,
}

impl Kernel {
    /// What its launch has to do.
    pub fn work(&self) -> Work {
        let outputs = self.outputs();
        let elements = |view: &View| view.layout.shape.numel() as f64;
        let written: f64 = outputs.iter().map(|(d, s)| bytes_of(*d, s.numel())).sum();
        let read: f64 = self.operands().map(touched).sum();
        let first = self.operands().next().map(|view| view.dtype);
        let dtype = first.or(outputs.first().map(|(dtype, _)| *dtype));
        let (mut products, mut scalars, mut bytes) = (0.0, 0.0, read + written);
        match self {
            Kernel::Map(call) => {
                scalars = call.shape.numel() as f64 * call.program.insts.len() as f64;
            }
            Kernel::Reduce(call) => {
                let each = call.map.program.insts.len() as f64 + 1.0;
                scalars = call.map.shape.numel() as f64 * each;
            }
            Kernel::Matmul(call) => {
                let columns = call.b.layout.shape.dims().last().copied().unwrap_or(1);
                products = 2.0 * elements(&call.a) * columns as f64;
            }
            // As if every row were in a group: who has how many is data.
            Kernel::Grouped(call) => {
                products = 2.0 * call.sizes().iter().map(|&n| n as f64).product::<f64>();
            }
            Kernel::Conv(call) => products = conv(call),
            Kernel::Attention(call) => {
                let (seen, d, dv) = attention(call);
                products = 2.0 * seen * (d + dv);
            }
            // The scores again, then the gradients of scores, v, q and k.
            Kernel::AttentionBackward(call) => {
                let (seen, d, dv) = attention(&call.forward);
                products = 2.0 * seen * (3.0 * d + 2.0 * dv);
            }
            // What is read lies anywhere in the source: as much as is written.
            Kernel::Gather(call) => {
                scalars = elements(&call.src);
                bytes += written - touched(&call.src);
            }
            Kernel::Scatter(call) => scalars = elements(&call.updates),
            Kernel::Scan(call) => scalars = elements(&call.input),
            Kernel::CheckIndex(call) => scalars = elements(&call.indices),
            Kernel::Row(call) => scalars = 4.0 * elements(&call.input),
            Kernel::RowProgram(call) => {
                let each: usize = (call.program.programs())
                    .map(|program| program.insts.len() + 1)
                    .sum();
                scalars = call.shape.numel() as f64 * each as f64;
            }
            Kernel::Search(call) => {
                let row = call.sorted.layout.shape.dims().last().copied();
                scalars = elements(&call.queries) * rounds(row);
            }
            // A comparison sort; radix sorts move as many bytes in as many rounds.
            Kernel::Sort(call) => {
                let rounds = rounds(call.input.layout.shape.dims().last().copied());
                scalars = elements(&call.input) * rounds;
                bytes *= rounds;
            }
        }
        Work {
            dtype: dtype.unwrap_or(DType::F32),
            products,
            scalars,
            bytes,
        }
    }
}

fn bytes_of(dtype: DType, elements: usize) -> f64 {
    elements as f64 * dtype.size() as f64
}

/// Halvings of a row.
fn rounds(row: Option<usize>) -> f64 {
    (row.unwrap_or(1).max(2) as f64).log2().ceil()
}

/// Bytes of the distinct elements that a view shows.
fn touched(view: &View) -> f64 {
    let dims = view.layout.shape.dims().iter().zip(&view.layout.strides);
    let distinct: usize = dims.filter(|(_, s)| **s != 0).map(|(n, _)| *n).product();
    bytes_of(view.dtype, distinct).min(view.buffer.bytes() as f64)
}

/// Pairs of query and key that see each other, and the sizes of keys and values. As if all were of
/// one document: which are is data.
fn attention(call: &AttentionCall) -> (f64, f64, f64) {
    let q: Vec<f64> = (0..4).map(|i| call.q.layout.shape[i] as f64).collect();
    let keys = call.k.layout.shape[2] as f64;
    let seen = if call.causal {
        // Query i sees i + 1 + keys - queries of them, and none where that is negative.
        let queries = q[2];
        let seeing = queries.min(keys);
        seeing * (keys - seeing) + seeing * (seeing + 1.0) / 2.0
    } else {
        q[2] * keys
    };
    (q[0] * q[1] * seen, q[3], call.v.layout.shape[3] as f64)
}

fn conv(call: &ConvCall) -> f64 {
    let (input, weight) = (
        call.input.layout.shape.dims(),
        call.weight.layout.shape.dims(),
    );
    let window: usize = weight[2..].iter().product();
    // Each output (transposed: each input) meets the window, in the channels of its group.
    let visits = if call.transposed {
        input.iter().product::<usize>() as f64
    } else {
        input[0] as f64 * call.channels as f64 * call.out.iter().product::<usize>() as f64
    };
    2.0 * visits * weight[1] as f64 * window as f64
}
