//! A launch as a value.

use super::{
    AttentionBackwardCall, AttentionCall, CheckIndexCall, ConvCall, GatherCall, GroupedCall,
    GroupedOp, MapCall, MatmulCall, Over, ReduceCall, RowCall, RowOp, RowProgramCall, ScanCall,
    ScatterCall, SearchCall, SortCall, View,
};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

/// One launch of one kernel family, with everything it needs. It owns its operands: cloning one
/// shares their memory, and it may be kept and launched later.
///
/// ```
/// use anymesh_kernel::{Buffer, DType, Layout, View, backend::{Kernel, MatmulCall}};
/// let view = |dims: [usize; 2]| View {
///     buffer: Buffer::new((), dims.iter().product::<usize>() * 2),
///     dtype: DType::BF16,
///     layout: Layout::contiguous(dims.into()),
/// };
/// let kernel: Kernel = MatmulCall {
///     op: "matmul",
///     a: view([8, 4]),
///     b: view([4, 6]),
///     scales: None,
///     bias: None,
///     addend: None,
///     dtype: DType::F32,
/// }
/// .into();
/// assert_eq!(kernel.outputs()[..], [(DType::F32, [8, 6].into())]);
/// assert_eq!(kernel.operands().map(|view| view.buffer.bytes()).sum::<u64>(), 64 + 48);
/// assert!(kernel.effects().is_pure());
/// ```
// A map is the launch that must cost nothing, so it is not behind a pointer.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub enum Kernel {
    /// Elementwise program.
    Map(MapCall),
    /// Reduction with a map program in front.
    Reduce(ReduceCall),
    /// Running reduction: values, and positions where asked for.
    Scan(ScanCall),
    /// Batched matrix product.
    Matmul(MatmulCall),
    /// A matrix product for each group of rows.
    Grouped(Box<GroupedCall>),
    /// Indexed read.
    Gather(GatherCall),
    /// Bounds check of indices. It has no outputs.
    CheckIndex(CheckIndexCall),
    /// Indexed write into a copy.
    Scatter(ScatterCall),
    /// Binary search.
    Search(SearchCall),
    /// Argsort.
    Sort(SortCall),
    /// Convolution; the output `[n, channels, out..]` has the input's dtype.
    Conv(ConvCall),
    /// Fused row op; the output has the shape and dtype of the input.
    Row(RowCall),
    /// Fused reductions of rows and what is made of them: elements, rows, sums of columns.
    RowProgram(Box<RowProgramCall>),
    /// Fused attention: result, in the call's order, and log-sum-exp (`[b, hq, s]`, f32 or f64).
    Attention(AttentionCall),
    /// Gradients for q, k and v of fused attention, in the call's order.
    AttentionBackward(Box<AttentionBackwardCall>),
}

/// What each output of a kernel is.
pub type OutputTypes = SmallVec<[(DType, Shape); 1]>;

/// What a launch does besides writing its outputs. A kernel with an effect must run even if nobody
/// reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Effects {
    /// It may meet an index that is out of range.
    pub index_fault: bool,
    /// It may divide an integer by zero.
    pub division_fault: bool,
}

impl Effects {
    /// Whether there are none: only the outputs matter.
    pub fn is_pure(self) -> bool {
        self == Self::default()
    }
}

impl Kernel {
    /// The op it is launched for.
    pub fn op(&self) -> &'static str {
        match self {
            Kernel::Map(call) => call.op,
            Kernel::Reduce(call) => call.map.op,
            Kernel::Scan(call) => call.op,
            Kernel::Matmul(call) => call.op,
            Kernel::Grouped(call) => call.op,
            Kernel::Gather(call) => call.op,
            Kernel::CheckIndex(call) => call.op,
            Kernel::Scatter(call) => call.op,
            Kernel::Search(call) => call.op,
            Kernel::Sort(call) => call.op,
            Kernel::Conv(call) => call.op,
            Kernel::Row(call) => call.op,
            Kernel::RowProgram(call) => call.op,
            Kernel::Attention(call) => call.op,
            Kernel::AttentionBackward(call) => call.forward.op,
        }
    }

    /// The name of its family.
    pub fn family(&self) -> &'static str {
        match self {
            Kernel::Map(_) => "map",
            Kernel::Reduce(_) => "reduce",
            Kernel::Scan(_) => "scan",
            Kernel::Matmul(_) => "matmul",
            Kernel::Grouped(_) => "grouped",
            Kernel::Gather(_) => "gather",
            Kernel::CheckIndex(_) => "check_index",
            Kernel::Scatter(_) => "scatter",
            Kernel::Search(_) => "search",
            Kernel::Sort(_) => "sort",
            Kernel::Conv(_) => "conv",
            Kernel::Row(_) => "row",
            Kernel::RowProgram(_) => "row_program",
            Kernel::Attention(_) => "attention",
            Kernel::AttentionBackward(_) => "attention_backward",
        }
    }

    /// Whether it can be composed of kernels of other families, so that a backend need not have it.
    pub fn is_fused(&self) -> bool {
        let more = matches!(self, Kernel::Matmul(call) if call.is_fused());
        more || matches!(
            self,
            Kernel::Row(_)
                | Kernel::RowProgram(_)
                | Kernel::Attention(_)
                | Kernel::AttentionBackward(_)
        )
    }

    /// What it reads, in the order of its fields.
    pub fn operands(&self) -> impl Iterator<Item = &View> {
        let views: SmallVec<[&View; 6]> = match self {
            Kernel::Map(call) => call.views().collect(),
            Kernel::Reduce(call) => call.map.views().collect(),
            Kernel::Scan(call) => smallvec![&call.input],
            Kernel::Matmul(call) => {
                let scales = call.scales.iter().flat_map(|scales| scales.iter());
                let product = [&call.a, &call.b].into_iter();
                let addend = call.addend.iter().map(|addend| &addend.view);
                product
                    .chain(scales)
                    .chain(&call.bias)
                    .chain(addend)
                    .collect()
            }
            Kernel::Grouped(call) => smallvec![&call.a, &call.b, &call.ends],
            Kernel::Gather(call) => std::iter::once(&call.src)
                .chain(call.axes.iter().map(|axis| &axis.indices))
                .collect(),
            Kernel::CheckIndex(call) => smallvec![&call.indices],
            Kernel::Scatter(call) => std::iter::once(&call.dst)
                .chain(call.axes.iter().map(|axis| &axis.indices))
                .chain([&call.updates])
                .collect(),
            Kernel::Search(call) => smallvec![&call.sorted, &call.queries],
            Kernel::Sort(call) => smallvec![&call.input],
            Kernel::Conv(call) => smallvec![&call.input, &call.weight],
            Kernel::Row(call) => {
                let added = std::iter::once(&call.input).chain(&call.residual);
                match &call.mode {
                    RowOp::Softmax | RowOp::LogSoftmax => added.collect(),
                    RowOp::Norm { weight, bias, .. } => added.chain(weight).chain(bias).collect(),
                }
            }
            Kernel::RowProgram(call) => call.inputs.iter().collect(),
            Kernel::Attention(call) => call.views().collect(),
            Kernel::AttentionBackward(call) => (call.forward.views())
                .chain([&call.out, &call.lse, &call.grad])
                .collect(),
        };
        views.into_iter()
    }

    /// What it reads, to be changed: the same views in the same order.
    pub fn operands_mut(&mut self) -> impl Iterator<Item = &mut View> {
        let views: SmallVec<[&mut View; 6]> = match self {
            Kernel::Map(call) => call.views_mut().collect(),
            Kernel::Reduce(call) => call.map.views_mut().collect(),
            Kernel::Scan(call) => smallvec![&mut call.input],
            Kernel::Matmul(call) => {
                let scales = call.scales.iter_mut().flat_map(|scales| scales.iter_mut());
                let product = [&mut call.a, &mut call.b].into_iter();
                let addend = call.addend.iter_mut().map(|addend| &mut addend.view);
                product
                    .chain(scales)
                    .chain(&mut call.bias)
                    .chain(addend)
                    .collect()
            }
            Kernel::Grouped(call) => {
                let call = &mut **call;
                smallvec![&mut call.a, &mut call.b, &mut call.ends]
            }
            Kernel::Gather(call) => std::iter::once(&mut call.src)
                .chain(call.axes.iter_mut().map(|axis| &mut axis.indices))
                .collect(),
            Kernel::CheckIndex(call) => smallvec![&mut call.indices],
            Kernel::Scatter(call) => std::iter::once(&mut call.dst)
                .chain(call.axes.iter_mut().map(|axis| &mut axis.indices))
                .chain([&mut call.updates])
                .collect(),
            Kernel::Search(call) => smallvec![&mut call.sorted, &mut call.queries],
            Kernel::Sort(call) => smallvec![&mut call.input],
            Kernel::Conv(call) => smallvec![&mut call.input, &mut call.weight],
            Kernel::Row(call) => {
                let added = std::iter::once(&mut call.input).chain(&mut call.residual);
                match &mut call.mode {
                    RowOp::Softmax | RowOp::LogSoftmax => added.collect(),
                    RowOp::Norm { weight, bias, .. } => added.chain(weight).chain(bias).collect(),
                }
            }
            Kernel::RowProgram(call) => call.inputs.iter_mut().collect(),
            Kernel::Attention(call) => call.views_mut().collect(),
            Kernel::AttentionBackward(call) => {
                let call = &mut **call;
                (call.forward.views_mut())
                    .chain([&mut call.out, &mut call.lse, &mut call.grad])
                    .collect()
            }
        };
        views.into_iter()
    }

    /// The dtype and shape of each buffer that its launch gives.
    pub fn outputs(&self) -> OutputTypes {
        let like = |view: &View| (view.dtype, view.layout.shape.clone());
        match self {
            Kernel::Map(call) => {
                let mut outputs = OutputTypes::with_capacity(call.program.outputs.len());
                for (_, dtype) in &call.program.outputs {
                    outputs.push((*dtype, call.shape.clone()));
                }
                outputs
            }
            Kernel::Reduce(call) => {
                let kept = (0..call.map.shape.rank()).filter(|d| !call.axes.contains(d));
                smallvec![(call.dtype, kept.map(|d| call.map.shape[d]).collect())]
            }
            Kernel::Scan(call) => {
                let (dtype, shape) = like(&call.input);
                if call.positions {
                    smallvec![(dtype, shape.clone()), (DType::I32, shape)]
                } else {
                    smallvec![(dtype, shape)]
                }
            }
            Kernel::Matmul(call) => {
                let (a, b) = (call.a.layout.shape.dims(), call.b.layout.shape.dims());
                let (rows, columns) = (&a[..a.len() - 1], b[b.len() - 1]);
                smallvec![(call.dtype, rows.iter().copied().chain([columns]).collect())]
            }
            Kernel::Grouped(call) => {
                let [n, k, m] = call.sizes();
                smallvec![match call.mode {
                    GroupedOp::Rows => (call.dtype, [n, m].into()),
                    GroupedOp::Sums { groups } => (call.dtype, [groups, k, m].into()),
                }]
            }
            Kernel::Gather(call) => smallvec![like(&call.src)],
            Kernel::CheckIndex(_) => smallvec![],
            Kernel::Scatter(call) => smallvec![like(&call.dst)],
            Kernel::Search(call) => {
                smallvec![(DType::I32, call.queries.layout.shape.clone())]
            }
            Kernel::Sort(call) => smallvec![(DType::I32, call.input.layout.shape.clone())],
            Kernel::Conv(call) => {
                let [d, h, w] = call.out;
                let images = call.input.layout.shape[0];
                smallvec![(call.input.dtype, [images, call.channels, d, h, w].into())]
            }
            Kernel::Row(call) => call.outputs(),
            Kernel::RowProgram(call) => call.outputs(),
            Kernel::Attention(call) => call.outputs(),
            Kernel::AttentionBackward(call) => call.outputs(),
        }
    }

    /// Results that may take the memory of an operand: which, and which operand.
    pub fn over(&self) -> SmallVec<[(usize, usize); 1]> {
        let taken = match self {
            Kernel::Map(call) => return call.over.pairs().collect(),
            Kernel::RowProgram(call) => call.over.then_some(0),
            // What is added is the last operand.
            Kernel::Matmul(call) => (call.addend.as_ref())
                .filter(|addend| addend.over)
                .map(|_| self.operands().count() - 1),
            _ => None,
        };
        taken.map(|operand| (0, operand)).into_iter().collect()
    }

    /// Says which results may take the memory of an operand: of those that [`over`](Self::over) names,
    /// or of a map any.
    pub fn set_over(&mut self, pairs: &[(usize, usize)]) {
        match self {
            Kernel::Map(call) => {
                call.over = Over::default();
                for (output, input) in pairs {
                    call.over.set(*output, *input);
                }
            }
            Kernel::RowProgram(call) => call.over = !pairs.is_empty(),
            Kernel::Matmul(call) => {
                if let Some(addend) = &mut call.addend {
                    addend.over = !pairs.is_empty();
                }
            }
            _ => {}
        }
    }

    /// What its launch does besides writing its outputs.
    pub fn effects(&self) -> Effects {
        match self {
            Kernel::Map(call) => call.effects(),
            Kernel::Reduce(call) => call.map.effects(),
            Kernel::Gather(_) | Kernel::CheckIndex(_) | Kernel::Scatter(_) => Effects {
                index_fault: true,
                ..Effects::default()
            },
            _ => Effects::default(),
        }
    }
}

impl MapCall {
    fn views(&self) -> impl Iterator<Item = &View> {
        self.inputs.iter().map(|input| &input.view)
    }

    fn views_mut(&mut self) -> impl Iterator<Item = &mut View> {
        self.inputs.iter_mut().map(|input| &mut input.view)
    }

    fn effects(&self) -> Effects {
        Effects {
            division_fault: self.program.can_fault(),
            ..Effects::default()
        }
    }
}

impl From<AttentionBackwardCall> for Kernel {
    fn from(call: AttentionBackwardCall) -> Self {
        Kernel::AttentionBackward(Box::new(call))
    }
}

impl From<RowProgramCall> for Kernel {
    fn from(call: RowProgramCall) -> Self {
        Kernel::RowProgram(Box::new(call))
    }
}

impl From<GroupedCall> for Kernel {
    fn from(call: GroupedCall) -> Self {
        Kernel::Grouped(Box::new(call))
    }
}

macro_rules! from {
    ($($family:ident $call:ident),*) => {$(
        impl From<$call> for Kernel {
            fn from(call: $call) -> Self {
                Kernel::$family(call)
            }
        }
    )*};
}
from!(
    Map MapCall, Reduce ReduceCall, Scan ScanCall, Matmul MatmulCall, Gather GatherCall,
    CheckIndex CheckIndexCall, Scatter ScatterCall, Search SearchCall, Sort SortCall,
    Conv ConvCall, Row RowCall, Attention AttentionCall
);
