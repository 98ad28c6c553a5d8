//! Gradients of convolutions, which are convolutions: of the input one that goes the other way, of
//! the weight one of the input with the gradient as its window.

use super::{Job, Slide, run_conv};
use crate::{
    DType, Dims, Place, Result, Shape, Tensor,
    backend::ReduceOp,
    grad::{Back, Pulled},
    ops::expr::Expr,
};
use smallvec::smallvec;

/// What the gradients of a convolution need.
pub(super) struct ForBackward {
    input: Operand,
    weight: Operand,
    bias: Option<(Shape, DType)>,
    stride: Dims,
    padding: Dims,
    dilation: Dims,
    groups: usize,
    transposed: bool,
}

/// An operand, with its values where the gradient of the other one needs them.
struct Operand {
    shape: Shape,
    dtype: DType,
    place: Place,
    values: Option<Tensor>,
}

impl Operand {
    fn new(x: &Tensor, other: &Tensor) -> Self {
        Self {
            shape: x.shape().clone(),
            dtype: x.dtype(),
            place: x.into(),
            values: other.requires_grad().then(|| x.kept()),
        }
    }

    fn no_gradient(&self, dtype: DType) -> Result<Tensor> {
        Tensor::zeros(&self.shape, dtype, &self.place)
    }

    /// A gradient without what lies beyond the operand.
    fn cut(&self, gradient: Tensor) -> Result<Tensor> {
        let to = |t: Tensor, d: usize| {
            if t.dims()[d] == self.shape[d] {
                Ok(t)
            } else {
                t.narrow(d as i64, 0, self.shape[d])
            }
        };
        (2..self.shape.rank()).try_fold(gradient, to)
    }
}

/// A convolution over `n` dimensions, or its transpose.
pub(in crate::ops) fn name(n: usize, transposed: bool) -> &'static str {
    match (n, transposed) {
        (1, false) => "conv1d",
        (2, false) => "conv2d",
        (_, false) => "conv3d",
        (1, true) => "conv_transpose1d",
        (2, true) => "conv_transpose2d",
        (_, true) => "conv_transpose3d",
    }
}

impl ForBackward {
    pub(super) fn new(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        job: &Job<'_>,
    ) -> Self {
        Self {
            input: Operand::new(input, weight),
            weight: Operand::new(weight, input),
            bias: bias.map(|b| (b.shape().clone(), b.dtype())),
            stride: job.stride.into(),
            padding: job.padding.into(),
            dilation: job.dilation.into(),
            groups: job.groups,
            transposed: job.transposed.is_some(),
        }
    }

    pub(super) fn pull(self) -> impl Fn(&Back<'_>) -> Result<Pulled> + Send + Sync + 'static {
        move |b: &Back<'_>| {
            let g = b.grad()?;
            let input = match &self.weight.values {
                Some(weight) if b.needs(0) => {
                    Some(self.of_input(g, weight)?.cast(self.input.dtype)?)
                }
                _ => None,
            };
            let weight = match &self.input.values {
                Some(input) if b.needs(1) => Some(
                    self.of_weight(g, &input.cast(g.dtype())?)?
                        .cast(self.weight.dtype)?,
                ),
                _ => None,
            };
            let mut pulled: Pulled = smallvec![input, weight];
            if let Some((shape, dtype)) = &self.bias {
                let others: Dims = (0..g.rank()).filter(|d| *d != 1).collect();
                pulled.push(b.wanted(2, || {
                    Expr::new("sum", &[g])
                        .reduce(&others, ReduceOp::Sum, None, *dtype, |a| a.x[0])?
                        .reshape(shape)
                })?);
            }
            Ok(pulled)
        }
    }

    /// The other convolution, of the gradient.
    fn of_input(&self, g: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let Self {
            stride,
            padding,
            dilation,
            groups,
            ..
        } = self;
        let (n, shape) = (stride.len(), &self.input.shape);
        if shape.numel() == 0 || weight.numel() == 0 {
            return self.input.no_gradient(g.dtype());
        }
        let op = name(n, !self.transposed);
        let job = |transposed| Job {
            op,
            stride,
            padding,
            dilation,
            groups: *groups,
            transposed,
        };
        if self.transposed {
            // Where the result was extended by a step or more, windows fit there that no element
            // spread over.
            return self.input.cut(run_conv(g, weight, None, &job(None))?);
        }
        // What was left of the input when no further step fitted.
        let rest = |d: usize| {
            let slide = Slide {
                size: shape[d + 2],
                kernel: weight.shape()[d + 2],
                stride: stride[d],
                padding: padding[d],
                dilation: dilation[d],
            };
            let (window, padded) = slide.extents(op)?;
            Ok((padded - window) % stride[d])
        };
        let rest = (0..n).map(rest).collect::<Result<Dims>>()?;
        run_conv(g, weight, None, &job(Some(&rest)))
    }

    /// A convolution with the batch as its channels. What the weight made the smaller slides over
    /// the larger, by steps of the dilation, with the stride between its elements.
    fn of_weight(&self, g: &Tensor, input: &Tensor) -> Result<Tensor> {
        let Self {
            stride,
            padding,
            dilation,
            groups,
            ..
        } = self;
        if self.weight.shape.numel() == 0 || g.numel() == 0 || input.numel() == 0 {
            return self.weight.no_gradient(g.dtype());
        }
        let (larger, smaller) = if self.transposed {
            (g, input)
        } else {
            (input, g)
        };
        // [n, (g c), ..] as [c, (g n), ..] and [n, (g o), ..] as [(g o), n, ..]: groups stay apart.
        let grouped = |t: &Tensor, order: [i64; 3]| {
            let (batch, channels, space) = (t.dims()[0], t.dims()[1] / groups, &t.dims()[2..]);
            let apart: Shape = [batch, *groups, channels]
                .iter()
                .chain(space)
                .copied()
                .collect();
            let axes: Vec<i64> = order.into_iter().chain(3..t.rank() as i64 + 1).collect();
            let lead = if order[0] == 2 {
                [channels, groups * batch]
            } else {
                [groups * channels, batch]
            };
            t.reshape(apart)?
                .permute(&axes)?
                .reshape(lead.iter().chain(space).copied().collect::<Shape>())
        };
        let job = Job {
            op: name(stride.len(), false),
            stride: dilation,
            padding,
            dilation: stride,
            groups: *groups,
            transposed: None,
        };
        let found = run_conv(
            &grouped(larger, [2, 1, 0])?,
            &grouped(smaller, [1, 2, 0])?,
            None,
            &job,
        )?;
        self.weight.cut(found)?.transpose(0, 1)
    }
}
