//! Convolution over one, two or three dimensions, and its transpose.
//!
//! "Convolution" is the sliding dot product of deep learning: the window is not flipped. Depthwise
//! convolution is `groups == channels`. Zeros are added on both sides alike; for anything else pad
//! first. The result has the dtype that input and weight promote to; a bias does not widen it.
//!
//! ```
//! # use anymesh_core::{Tensor, ops::Conv};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 2., 3., 4.], [1, 1, 4], &device)?;
//! let w = Tensor::from_slice(&[1f32, 10.], [1, 1, 2], &device)?;
//! assert_eq!(x.conv1d(&w, None, &Conv::default())?.to_vec::<f32>()?, [21., 32., 43.]);
//! let wide = Conv { padding: [1], stride: [2], ..Conv::default() };
//! assert_eq!(x.conv1d(&w, None, &wide)?.to_vec::<f32>()?, [10., 32., 4.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

mod gradient;

use super::{OpInfo, matmul::biased, op, same_device};
use crate::{
    DType, Dims, Error, OperandType, Result, Shape, Tensor,
    backend::ConvCall,
    grad::record1,
    launch::launch_as,
    promotion,
    spmd::{Call, Local, plain},
};
use gradient::ForBackward;
pub(super) use gradient::name;
use smallvec::SmallVec;

/// The ops of this file. `n` is the batch, `g` are the groups, `c` and `o` their channels in and
/// out, `...` the spatial dimensions, which stay whole.
pub const OPS: &[OpInfo] = &[
    CONV,
    CONV.named("conv2d"),
    CONV.named("conv3d"),
    TRANSPOSED,
    TRANSPOSED.named("conv_transpose2d"),
    TRANSPOSED.named("conv_transpose3d"),
];

const CONV: OpInfo = op(
    "conv1d",
    "n(gc)..., (go)c..., (go) -> n(go)... ; replicate ... ; reduce c sum ; linear 0 2 ; linear 1 2",
)
.runs(&["cast"]);
const TRANSPOSED: OpInfo = op(
    "conv_transpose1d",
    "n(gc)..., (gc)o..., (go) -> n(go)... ; replicate ... ; reduce c sum ; linear 0 2 ; linear 1 2",
)
.runs(&["cast"]);

/// How the window of a convolution over `N` dimensions moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv<const N: usize> {
    /// Step of the window.
    pub stride: [usize; N],
    /// Zeros before and after each dimension.
    pub padding: [usize; N],
    /// Step between the elements of the window.
    pub dilation: [usize; N],
    /// Channels are cut into this many groups that do not see each other.
    pub groups: usize,
}

impl<const N: usize> Default for Conv<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            dilation: [1; N],
            groups: 1,
        }
    }
}

/// The convolution of which this is the transpose (each input element spreads over a window), with
/// the size it leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTranspose<const N: usize> {
    /// Step of the window in the output.
    pub stride: [usize; N],
    /// Elements cut off before and after each dimension of the output.
    pub padding: [usize; N],
    /// Elements more at the end of each dimension; less than the stride or the dilation.
    pub output_padding: [usize; N],
    /// Step between the elements of the window.
    pub dilation: [usize; N],
    /// Channels are cut into this many groups that do not see each other.
    pub groups: usize,
}

impl<const N: usize> Default for ConvTranspose<N> {
    fn default() -> Self {
        Self {
            stride: [1; N],
            padding: [0; N],
            output_padding: [0; N],
            dilation: [1; N],
            groups: 1,
        }
    }
}

/// One spatial dimension of a window that slides over padded data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slide {
    pub(super) size: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

impl Slide {
    /// Elements from the first to the last one of a window, and the padded size; both without
    /// overflow.
    pub(super) fn extents(&self, op: &'static str) -> Result<(usize, usize)> {
        let Slide {
            size,
            kernel,
            stride,
            padding,
            dilation,
        } = *self;
        if stride == 0 || dilation == 0 || kernel == 0 {
            let detail = format!(
                "kernel {kernel}, stride {stride} and dilation {dilation} must all be at least 1"
            );
            let argument = match (kernel, stride) {
                (0, _) => "kernel",
                (_, 0) => "stride",
                _ => "dilation",
            };
            return Err(Error::argument(op, argument, detail));
        }
        let window = dilation
            .checked_mul(kernel - 1)
            .and_then(|n| n.checked_add(1));
        let padded = padding.checked_mul(2).and_then(|n| n.checked_add(size));
        match (window, padded) {
            // Kernels count positions in signed numbers.
            (Some(w), Some(p)) if w.max(p) <= isize::MAX as usize / 4 => Ok((w, p)),
            _ => {
                let (argument, given) = match window {
                    Some(w) if w <= isize::MAX as usize / 4 => ("padding", padding),
                    _ => ("dilation", dilation),
                };
                let detail = format!(
                    "a {argument} of {given} reaches further than can be addressed: give a smaller one"
                );
                Err(Error::argument(op, argument, detail))
            }
        }
    }

    /// The same windows, with a step of 1 where no step is taken: it may be too large to multiply.
    pub(super) fn normal(self, steps: bool) -> Slide {
        Slide {
            stride: if steps { self.stride } else { 1 },
            dilation: if self.kernel > 1 { self.dilation } else { 1 },
            ..self
        }
    }

    /// The number of places a window fits.
    pub(super) fn out(&self, op: &'static str) -> Result<usize> {
        let (window, padded) = self.extents(op)?;
        match padded.checked_sub(window) {
            Some(room) => Ok(room / self.stride + 1),
            None => Err(Error::shape(
                op,
                None::<OperandType>,
                format!(
                    "a window that spans {window} does not fit a dimension of size {} padded to {padded}",
                    self.size
                ),
            )),
        }
    }

    /// The size of which [`out`](Slide::out) would be `size`, with `extra` elements.
    fn transposed_out(&self, op: &'static str, extra: usize) -> Result<usize> {
        let (window, _) = self.extents(op)?;
        if extra >= self.stride.max(self.dilation) {
            let detail = format!(
                "output padding {extra} must be less than the stride {} or the dilation {}",
                self.stride, self.dilation
            );
            return Err(Error::argument(op, "output_padding", detail));
        }
        let spread = self
            .size
            .checked_sub(1)
            .and_then(|n| n.checked_mul(self.stride))
            .and_then(|n| n.checked_add(window))
            .and_then(|n| n.checked_add(extra));
        match spread.and_then(|n| n.checked_sub(self.padding.saturating_mul(2))) {
            Some(out) if out > 0 && out <= isize::MAX as usize / 4 => Ok(out),
            _ => Err(Error::shape(
                op,
                None::<OperandType>,
                format!(
                    "a dimension of size {} with padding {} leaves no output of a usable size",
                    self.size, self.padding
                ),
            )),
        }
    }
}

/// What all six have in common, with the sizes per spatial dimension in vectors.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) op: &'static str,
    pub(super) stride: &'a [usize],
    pub(super) padding: &'a [usize],
    pub(super) dilation: &'a [usize],
    pub(super) groups: usize,
    /// Output padding of a transposed convolution.
    pub(super) transposed: Option<&'a [usize]>,
}

/// The last three entries, with `fill` in front of fewer.
fn lift(values: &[usize], fill: usize) -> [usize; 3] {
    let mut out = [fill; 3];
    out[3 - values.len()..].copy_from_slice(values);
    out
}

#[track_caller]
pub(super) fn run_conv(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    job: &Job<'_>,
) -> Result<Tensor> {
    let (op, n) = (job.op, job.stride.len());
    same_device(op, &[input, weight])?;
    promotion::check(op, &[input, weight])?;
    let dtype = input.dtype().promote(weight.dtype());
    if !input.dtype().is_float() || !weight.dtype().is_float() {
        let dtype = if input.dtype().is_float() {
            weight.dtype()
        } else {
            input.dtype()
        };
        return Err(Error::DType {
            op,
            dtype,
            expected: "floats",
        });
    }
    if input.rank() != n + 2 || weight.rank() != n + 2 {
        let detail = format!(
            "{} and a weight of shape {}: both need {} dimensions, batch and channels in front",
            input.type_string(),
            weight.shape(),
            n + 2
        );
        return Err(Error::shape(op, [input, weight], detail));
    }
    let (channels_in, [w0, w1]) = (input.shape()[1], [weight.shape()[0], weight.shape()[1]]);
    let groups = job.groups;
    let divides = groups > 0
        && channels_in.is_multiple_of(groups)
        && (job.transposed.is_some() || w0.is_multiple_of(groups));
    if !divides {
        let detail = format!(
            "{groups} groups do not divide {channels_in} input channels and a weight of shape {}",
            weight.shape()
        );
        return Err(Error::argument(op, "groups", detail).of([input, weight]));
    }
    let expected = if job.transposed.is_some() {
        w0
    } else {
        w1.saturating_mul(groups)
    };
    if expected != channels_in {
        let detail = format!(
            "{} has {channels_in} channels, a weight of shape {} with {groups} groups takes {expected}",
            input.type_string(),
            weight.shape()
        );
        return Err(Error::shape(op, [input, weight], detail));
    }
    let channels = if job.transposed.is_some() {
        w1.saturating_mul(groups)
    } else {
        w0
    };
    if let Some(bias) = bias.filter(|b| b.dims() != [channels]) {
        return Err(Error::shape(
            op,
            [input, weight, bias],
            format!(
                "a bias of [{channels}] is needed, got {}",
                bias.type_string()
            ),
        ));
    }
    let mut out = Dims::new();
    let (mut stride, mut dilation) = ([1; 3], [1; 3]);
    for d in 0..n {
        let slide = Slide {
            size: input.shape()[d + 2],
            kernel: weight.shape()[d + 2],
            stride: job.stride[d],
            padding: job.padding[d],
            dilation: job.dilation[d],
        };
        let size = match job.transposed {
            Some(extra) => slide.transposed_out(op, extra[d]),
            None => slide.out(op),
        }
        .map_err(|e| e.of([input, weight]))?;
        let slide = slide.normal(if job.transposed.is_some() {
            slide.size > 1
        } else {
            size > 1
        });
        (stride[3 - n + d], dilation[3 - n + d]) = (slide.stride, slide.dilation);
        out.push(size);
    }
    let shape: Shape = [input.shape()[0], channels]
        .into_iter()
        .chain(out.iter().copied())
        .collect();
    let tensors: SmallVec<[&Tensor; 3]> = [input, weight].into_iter().chain(bias).collect();
    let steps = Steps { stride, dilation };
    record1(
        op,
        &tensors,
        || compute(&tensors, job, dtype, &shape, &steps),
        |_| Ok(ForBackward::new(input, weight, bias, job).pull()),
    )
}

/// The steps of a window over three dimensions, normal where they are not taken.
struct Steps {
    stride: [usize; 3],
    dilation: [usize; 3],
}

/// The convolution of operands (input, weight and perhaps bias) that fit.
#[track_caller]
fn compute(
    tensors: &[&Tensor],
    job: &Job<'_>,
    dtype: DType,
    shape: &Shape,
    steps: &Steps,
) -> Result<Tensor> {
    let (op, n, input, weight, bias) = (
        job.op,
        job.stride.len(),
        tensors[0],
        tensors[1],
        tensors.get(2).copied(),
    );
    let (device, channels, out) = (input.device(), shape[1], &shape.dims()[2..]);
    if !plain(op, tensors)? {
        return sharded(&input.cast(dtype)?, &weight.cast(dtype)?, bias, job, shape);
    }
    let result = if shape.checked_numel(op)? == 0 {
        input.no_elements(dtype, shape.clone())?
    } else if input.numel() == 0 || weight.numel() == 0 {
        // No channels, or nothing but padding.
        Tensor::zeros(shape, dtype, device)?
    } else {
        let deep = |t: &Tensor| -> Result<_> {
            let mut view = t.cast(dtype)?.view()?;
            view.layout = (n..3).fold(view.layout, |l, _| l.unsqueeze(2));
            Ok(view)
        };
        let call = ConvCall {
            op,
            input: deep(input)?,
            weight: deep(weight)?,
            channels,
            out: lift(out, 1),
            stride: steps.stride,
            padding: lift(job.padding, 0),
            dilation: steps.dilation,
            groups: job.groups,
            transposed: job.transposed.is_some(),
        };
        launch_as(input.mesh(), shape, call)?
    };
    match bias {
        Some(bias) => {
            let column = [channels].into_iter().chain(out.iter().map(|_| 1));
            biased(
                op,
                &result,
                &bias.reshape(column.collect::<Shape>())?,
                dtype,
            )
        }
        None => Ok(result),
    }
}

/// A convolution on a mesh, of operands that fit. Groups are cut as a whole; a cut of the channels
/// within a group leaves partial sums.
#[track_caller]
fn sharded(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    job: &Job<'_>,
    out: &Shape,
) -> Result<Tensor> {
    let groups = job.groups;
    let bias = bias
        .map(|b| b.cast(input.dtype().promote(b.dtype())))
        .transpose()?;
    let tensors: SmallVec<[&Tensor; 3]> = [input, weight].into_iter().chain(&bias).collect();
    let (info, within) = if job.transposed.is_some() {
        (&TRANSPOSED, weight.dims()[1])
    } else {
        (&CONV, weight.dims()[0] / groups)
    };
    let local = |l: &Local<'_>| {
        let groups = l.part('g').map_or(groups, |(range, _)| range.len());
        if groups == 0 {
            // There are fewer groups than ranks.
            let none: Shape = [l[0].dims()[0], 0]
                .iter()
                .chain(&out.dims()[2..])
                .copied()
                .collect();
            return l[0].no_elements(l[0].dtype(), none);
        }
        run_conv(&l[0], &l[1], l.inputs.get(2), &Job { groups, ..*job })
    };
    Call::of(info, &tensors)
        .on_behalf_of(job.op)
        .optional(2, &[bias.as_ref()])
        .size('g', groups)
        .size('o', within)
        .run1(local)
}

macro_rules! convolutions {
    ($($n:literal $conv:ident $transposed:ident),*) => {
        impl Tensor {$(
            #[doc = concat!("Slides windows over the last ", $n, " dimension(s) of this tensor `[n, c, ..]`: a weight `[o, c / groups, ..]` and a bias `[o]` give `[n, o, ..]`.")]
            #[track_caller]
            pub fn $conv(&self, weight: &Tensor, bias: Option<&Tensor>, options: &Conv<$n>) -> Result<Tensor> {
                let Conv { stride, padding, dilation, groups } = options;
                run_conv(self, weight, bias, &Job { op: stringify!($conv), stride, padding, dilation, groups: *groups, transposed: None })
            }

            #[doc = concat!("The transpose (gradient) of the convolution over ", $n, " dimension(s): a weight `[c, o / groups, ..]` and a bias `[o]` give `[n, o, ..]` of size `(size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1`.")]
            #[track_caller]
            pub fn $transposed(&self, weight: &Tensor, bias: Option<&Tensor>, options: &ConvTranspose<$n>) -> Result<Tensor> {
                let ConvTranspose { stride, padding, output_padding, dilation, groups } = options;
                run_conv(self, weight, bias, &Job { op: stringify!($transposed), stride, padding, dilation, groups: *groups, transposed: Some(output_padding) })
            }
        )*}
    };
}
convolutions!(1 conv1d conv_transpose1d, 2 conv2d conv_transpose2d, 3 conv3d conv_transpose3d);
