//! Calls of the families that multiply and add: matrix products and convolutions.

use super::{Buffers, Kernel, MapCall, MapInput, View};
use crate::{DType, Layout, MapProgram, Result, Shape, map::Builder};
use smallvec::smallvec;
use std::ops::Range;

/// `a [.., m, k] x b [.., k, n] -> [.., m, n]`. Batch dimensions are already expanded to the same
/// shape; any strides.
#[derive(Clone, Debug)]
pub struct MatmulCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// Left operand.
    pub a: View,
    /// Right operand, of the same dtype; with `scales` it may be another float of 8 bits.
    pub b: View,
    /// One f32 for each operand, for operands of 8-bit floats: the sums are multiplied by both before
    /// they are rounded. A product with them is [fused](super::Kernel::is_fused).
    pub scales: Option<Box<[View; 2]>>,
    /// `[n]` floats that are added to every row before it is rounded. A product with one is
    /// [fused](super::Kernel::is_fused): a device need not have it.
    pub bias: Option<View>,
    /// What it is added to before it is rounded. A product with one is
    /// [fused](super::Kernel::is_fused).
    pub addend: Option<Box<Addend>>,
    /// The stored dtype, of the same kind as the operands. Small floats accumulate in f32, integers
    /// wrap.
    pub dtype: DType,
}

/// What a product is added to.
#[derive(Clone, Debug)]
pub struct Addend {
    /// Dense, with the shape and the dtype of the result.
    pub view: View,
    /// Nobody reads it after this launch: the result may take its memory.
    pub over: bool,
}

impl MatmulCall {
    /// Whether it is more than a product, so that a device need not have it.
    pub fn is_fused(&self) -> bool {
        self.bias.is_some() || self.scales.is_some() || self.addend.is_some()
    }

    /// What a [fused](Self::is_fused) product gives, by several launches, for operands that a device
    /// has no kernel for: the product kept wide, then a map that scales, adds and rounds.
    pub fn by_steps(mut self, launch: impl Fn(Kernel) -> Result<Buffers>) -> Result<Buffers> {
        if !self.is_fused() {
            return launch(self.into());
        }
        let (op, dtype, wide) = (self.op, self.dtype, self.dtype.kind().dtype());
        let (scales, bias, addend) = (self.scales.take(), self.bias.take(), self.addend.take());
        if scales.is_some() {
            for operand in [&mut self.a, &mut self.b] {
                *operand = half(op, operand, &launch)?;
            }
        }
        self.dtype = wide;
        let kernel = Kernel::from(self);
        let (_, shape) = kernel.outputs().swap_remove(0);
        let product = View {
            buffer: launch(kernel)?.swap_remove(0),
            dtype: wide,
            layout: Layout::contiguous(shape.clone()),
        };
        let input = |view| MapInput { view, window: None };
        let mut inputs = smallvec![input(product)];
        let b = Builder::new();
        let mut value = b.load(wide);
        let mut load = |view: View| {
            let loaded = b.load(view.dtype).cast(wide);
            inputs.push(input(View {
                layout: view.layout.expand(&shape),
                ..view
            }));
            loaded
        };
        for scale in scales.into_iter().flat_map(|scales| *scales) {
            value = value * load(scale);
        }
        for added in bias.into_iter().chain(addend.map(|addend| addend.view)) {
            value = value + load(added);
        }
        launch(Kernel::Map(MapCall {
            op,
            program: b.finish(&[(value, dtype)])?,
            shape,
            inputs,
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        }))
    }
}

/// An operand of 8-bit floats in f16, which has all of their values.
fn half(op: &'static str, view: &View, launch: impl Fn(Kernel) -> Result<Buffers>) -> Result<View> {
    let shape = view.layout.shape.clone();
    let call = MapCall {
        op,
        program: MapProgram::cast(view.dtype, DType::F16),
        shape: shape.clone(),
        inputs: smallvec![MapInput {
            view: view.clone(),
            window: None,
        }],
        indices: smallvec![],
        params: smallvec![],
        over: Default::default(),
    };
    Ok(View {
        buffer: launch(call.into())?.swap_remove(0),
        dtype: DType::F16,
        layout: Layout::contiguous(shape),
    })
}

/// A product for each group of rows. Group `g` has the rows from `ends[first + g - 1]` (0 for the
/// first of all) to `ends[first + g]` of an operand `a [n, k]`.
///
/// Ends are ascending; what they leave out at either side is in no group. One that lies below those
/// before it ends an empty group, and all are taken between 0 and `n`: wrong ones give wrong groups,
/// never a row in two of them or outside the operand.
#[derive(Clone, Debug)]
pub struct GroupedCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[n, k]`, any strides.
    pub a: View,
    /// What its rows are multiplied with, of the same float dtype, any strides.
    pub b: View,
    /// i32, one for each group that there is, `first` before these among them.
    pub ends: View,
    /// Which of the ends is that of the first group.
    pub first: usize,
    /// What the product is.
    pub mode: GroupedOp,
    /// The stored dtype, of the same kind as the operands. Small floats accumulate in f32.
    pub dtype: DType,
}

/// See [`GroupedCall`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupedOp {
    /// `b [groups, k, m]` has a matrix for each group: `out [n, m]`, zeros for rows of no group.
    Rows,
    /// `b [n, m]` has rows of the same groups: `out [groups, k, m]`, for each group the sum of the
    /// outer products of its rows; zeros for one without rows.
    Sums {
        /// How many groups there are.
        groups: usize,
    },
}

impl GroupedCall {
    /// How many groups there are.
    pub fn groups(&self) -> usize {
        match self.mode {
            GroupedOp::Rows => self.b.layout.shape[0],
            GroupedOp::Sums { groups } => groups,
        }
    }

    /// The sizes n, k and m.
    pub fn sizes(&self) -> [usize; 3] {
        let (a, b) = (self.a.layout.shape.dims(), self.b.layout.shape.dims());
        [a[0], a[1], b[b.len() - 1]]
    }

    /// The rows of each group, from ends that were read.
    ///
    /// ```
    /// use anymesh_kernel::backend::GroupedCall;
    /// assert_eq!(GroupedCall::rows(&[2, 1, 9], 1, 2, 6), [2..2, 2..6]);
    /// ```
    pub fn rows(ends: &[i32], first: usize, groups: usize, n: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let all = ends.iter().map(|&end| {
            let end = usize::try_from(end).unwrap_or(0).clamp(start, n.max(start));
            std::mem::replace(&mut start, end)..end
        });
        all.skip(first).take(groups).collect()
    }
}

/// Convolution over three spatial dimensions (fewer are padded with 1 in front).
#[derive(Clone, Debug)]
pub struct ConvCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// `[n, c, d, h, w]`.
    pub input: View,
    /// `[o, c / groups, kd, kh, kw]`; transposed: `[c, o / groups, kd, kh, kw]`.
    pub weight: View,
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

impl ConvCall {
    /// The matrix product that it is, if its window is one element that visits every position: then
    /// the positions are columns. The product has the elements of the output in their order.
    pub fn as_product(&self) -> Option<MatmulCall> {
        let (input, weight) = (&self.input.layout, &self.weight.layout);
        let points = weight.shape.dims()[2..] == [1, 1, 1]
            && input.shape.dims()[2..] == self.out
            && self.stride == [1; 3]
            && self.padding == [0; 3];
        if !points || self.groups != 1 || self.input.dtype != self.weight.dtype {
            return None;
        }
        let (images, channels) = (input.shape[0], input.shape[1]);
        let right = input.reshape(&Shape::from([images, channels, self.out.iter().product()]))?;
        let matrix = weight.reshape(&Shape::from([weight.shape[0], weight.shape[1]]))?;
        let left = if self.transposed {
            matrix.permute(&[1, 0])
        } else {
            matrix
        };
        let view = |view: &View, layout| View {
            layout,
            ..view.clone()
        };
        Some(MatmulCall {
            op: self.op,
            a: view(
                &self.weight,
                left.expand(&Shape::from([images, self.channels, channels])),
            ),
            b: view(&self.input, right),
            scales: None,
            bias: None,
            addend: None,
            dtype: self.input.dtype,
        })
    }
}
