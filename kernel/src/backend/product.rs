//! Calls of the families that multiply and add: matrix products and convolutions.

use super::View;
use crate::{DType, Shape};

/// `a [.., m, k] x b [.., k, n] -> [.., m, n]`. Batch dimensions are already expanded to the same
/// shape; any strides.
#[derive(Clone, Debug)]
pub struct MatmulCall {
    /// The op, for error messages and profiles.
    pub op: &'static str,
    /// Left operand.
    pub a: View,
    /// Right operand, of the same dtype.
    pub b: View,
    /// The stored dtype, of the same kind as the operands. Small floats accumulate in f32, integers
    /// wrap.
    pub dtype: DType,
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
            dtype: self.input.dtype,
        })
    }
}
