//! Normalisation: over trailing dimensions (layer, RMS), over groups of channels (group, instance),
//! over the batch.

mod batch;
mod checks;
mod fused;
mod gradient;
mod groups;
mod residual;

use super::{
    OpInfo,
    expr::{Args, Expr, check_eps, check_float, compute_type},
    op,
    softmax::fused_rows,
};
use crate::{
    Dims, Error, Result, Shape, Tensor,
    backend::{ReduceOp, RowOp},
    grad::{Back, record1},
    map::Val,
    spmd::{Call, plain, without_partials},
};
pub use batch::BatchNorm;
use checks::{check_channels, check_trailing, empty, no_bias};
use gradient::{ForBackward, Statistics};
use groups::channel_groups;
use smallvec::{SmallVec, smallvec};

/// The ops of this file. Where what is normalised over is cut, only means and variances cross.
pub const OPS: &[OpInfo] = &[
    LAYER,
    RMS,
    GROUP,
    INSTANCE,
    OpInfo::composed("batch_norm", &["map", "reshape"]),
    BATCH_TRAIN,
    residual::LAYER,
    residual::RMS,
];

const LAYER: OpInfo = op("layer_norm", "...r, r, r -> ...r ; stats r 2").runs(&["map", "reduce"]);
const RMS: OpInfo = op("rms_norm", "...r, r -> ...r ; stats r 1").runs(&["map", "reduce"]);
const GROUP: OpInfo = op(
    "group_norm",
    "n(gc)..., (gc), (gc) -> n(gc)... ; stats c ... 2",
)
.runs(&["map", "reduce", "reshape"]);
const INSTANCE: OpInfo =
    op("instance_norm", "nc..., c, c -> nc... ; stats ... 2").runs(&["map", "reduce", "reshape"]);
const BATCH_TRAIN: OpInfo = op(
    "batch_norm_train",
    "nc..., c, c -> nc..., c, c ; stats n ... 2",
)
.runs(&["map", "reduce", "reshape"]);

/// How the elements of each row are normalised, and which parameters scale them.
///
/// Row `r`, column `j` of `[rows, channels * inner]` uses parameter
/// `(r % groups) * channels + j / inner`.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Only divides by the root of the mean square.
    pub rms: bool,
    /// Added under the root.
    pub eps: f64,
    /// Factors, `groups * channels` of them, of any float dtype.
    pub weight: Option<&'a Tensor>,
    /// Summands, likewise.
    pub bias: Option<&'a Tensor>,
    /// Rows after which the parameters repeat.
    pub groups: usize,
    /// Parameters per row.
    pub channels: usize,
    /// Neighbouring columns that share a parameter.
    pub inner: usize,
}

/// What a normalisation scales and shifts by, and over what it goes. The parts that are not given
/// are those of [`new`](Self::new).
///
/// ```
/// # use anymesh_core::{DType, Tensor, ops::NormOptions};
/// # let device = anymesh_backend_cpu::device();
/// let x = Tensor::new(&[[3f32, 4.0], [0.0, 2.0]], &device)?;
/// let w = Tensor::full([2], 10, DType::F32, &device)?;
/// let y = x.rms_norm(&NormOptions::new().weight(&w).eps(1e-6))?;
/// assert_eq!(format!("{y:.2}"), "[[ 8.49, 11.31],\n [ 0.00, 14.14]]\nf32[2, 2] on cpu");
/// # Ok::<(), anymesh_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct NormOptions<'a> {
    /// How many of the last dimensions `layer_norm` and `rms_norm` go over. The other norms go over
    /// what their name says.
    pub dims: usize,
    /// Factors.
    pub weight: Option<&'a Tensor>,
    /// Summands; `rms_norm` has none.
    pub bias: Option<&'a Tensor>,
    /// Added under the root.
    pub eps: f64,
}

impl<'a> NormOptions<'a> {
    /// Over the last dimension, without parameters, with an `eps` of 1e-5.
    pub fn new() -> Self {
        Self {
            dims: 1,
            weight: None,
            bias: None,
            eps: 1e-5,
        }
    }

    /// Over the last `dims` dimensions.
    pub fn dims(self, dims: usize) -> Self {
        Self { dims, ..self }
    }

    /// Times these factors.
    pub fn weight(self, weight: &'a Tensor) -> Self {
        let weight = Some(weight);
        Self { weight, ..self }
    }

    /// Plus these summands.
    pub fn bias(self, bias: &'a Tensor) -> Self {
        let bias = Some(bias);
        Self { bias, ..self }
    }

    /// With this number added under the root.
    pub fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    fn parameters(&self) -> [Option<&'a Tensor>; 2] {
        [self.weight, self.bias]
    }

    /// Refuses `dims` where what an op goes over is fixed.
    fn check_dims(&self, op: &'static str) -> Result<()> {
        if self.dims == 1 {
            return Ok(());
        }
        Err(Error::argument(
            op,
            "dims",
            format!(
                "`dims` is {}: only layer_norm and rms_norm go over the last dimensions",
                self.dims
            ),
        ))
    }
}

impl Default for NormOptions<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl Tensor {
    /// `(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (or several), whose
    /// shape the parameters have.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::NormOptions};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, 3.0, -2.0, 2.0], [2, 2], &device)?;
    /// assert_eq!(x.layer_norm(&NormOptions::new().eps(0.0))?.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn layer_norm(&self, options: &NormOptions<'_>) -> Result<Tensor> {
        let NormOptions { dims, eps, .. } = *options;
        trailing("layer_norm", self, dims, false, eps, options.parameters())
    }

    /// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (or several), whose shape the
    /// weight has.
    #[track_caller]
    pub fn rms_norm(&self, options: &NormOptions<'_>) -> Result<Tensor> {
        let (op, NormOptions { dims, eps, .. }) = ("rms_norm", *options);
        no_bias(op, options)?;
        trailing(op, self, dims, true, eps, options.parameters())
    }

    /// Normalises `[n, c, ...]` over each of `groups` runs of neighbouring channels and all that
    /// follows; parameters are `[c]`.
    #[track_caller]
    pub fn group_norm(&self, groups: usize, options: &NormOptions<'_>) -> Result<Tensor> {
        options.check_dims("group_norm")?;
        channel_groups(&GROUP, self, groups, options.parameters(), options.eps)
    }

    /// Normalises each channel of each sample of `[n, c, ...]`; parameters are `[c]`.
    #[track_caller]
    pub fn instance_norm(&self, options: &NormOptions<'_>) -> Result<Tensor> {
        options.check_dims("instance_norm")?;
        let channels = self.dims().get(1).copied().unwrap_or(0);
        channel_groups(&INSTANCE, self, channels, options.parameters(), options.eps)
    }
}

/// The mean over `axes`, which have `n` elements together and stay with size 1.
#[track_caller]
fn mean(op: &'static str, x: &Tensor, axes: &[usize], n: usize) -> Result<Tensor> {
    without_partials(Expr::new(op, &[x]).reduce(
        axes,
        ReduceOp::Sum,
        Some(1.0 / n as f64),
        compute_type([x]),
        |a| a.x[0],
    )?)
}

/// The mean square, without the mean where there is one.
#[track_caller]
fn variance(
    op: &'static str,
    x: &Tensor,
    mean: Option<&Tensor>,
    axes: &[usize],
    n: usize,
) -> Result<Tensor> {
    let squares = Expr::new(op, &[x]).maybe(&[mean]);
    without_partials(squares.reduce(
        axes,
        ReduceOp::Sum,
        Some(1.0 / n as f64),
        compute_type([x]),
        |a| centered(a) * centered(a),
    )?)
}

/// A norm over `axes` as reductions and a map. Parameters broadcast.
#[track_caller]
fn normalised(
    op: &'static str,
    x: &Tensor,
    axes: &[usize],
    rms: bool,
    eps: f64,
    [weight, bias]: [Option<&Tensor>; 2],
) -> Result<Tensor> {
    let n = axes.iter().map(|d| x.dims()[*d]).product();
    let mean = if rms {
        None
    } else {
        Some(mean(op, x, axes, n)?)
    };
    let var = variance(op, x, mean.as_ref(), axes, n)?;
    let out = Expr::new(op, &[x, &var])
        .maybe(&[mean.as_ref(), weight, bias])
        .params(&[eps]);
    out.map(x.dtype(), |a| {
        scaled(centered(a) / (a.x[1] + a.p[0]).sqrt(), a)
    })
}

/// A norm of `x`, seen as rows of `channels * inner` elements, as reductions and a map.
pub fn decomposed(x: &Tensor, norm: &Norm<'_>) -> Result<Tensor> {
    let op = if norm.rms { "rms_norm" } else { "layer_norm" };
    let sizes = Shape::from([norm.groups, norm.channels, norm.inner]);
    let block = sizes.checked_numel(op)?;
    if block == 0 || !x.numel().is_multiple_of(block) {
        return Err(Error::shape(
            op,
            [x],
            format!(
                "{} does not divide into rows of {sizes} (groups, channels, inner)",
                x.shape()
            ),
        ));
    }
    check_float(op, &[x])?;
    check_eps(op, norm.eps)?;
    if x.numel() == 0 {
        return Ok(x.clone());
    }
    let parameter = |p: Option<&Tensor>| {
        p.map(|p| p.reshape([norm.groups, norm.channels, 1]))
            .transpose()
    };
    let (weight, bias) = (parameter(norm.weight)?, parameter(norm.bias)?);
    let rows = x.reshape([x.numel() / block, norm.groups, norm.channels, norm.inner])?;
    normalised(
        op,
        &rows,
        &[2, 3],
        norm.rms,
        norm.eps,
        [weight.as_ref(), bias.as_ref()],
    )?
    .reshape(x.shape())
}

/// The first input without the mean, where there is one.
fn centered<'b>(a: &Args<'b>) -> Val<'b> {
    a.maybe[0].map_or(a.x[0], |mean| a.x[0] - mean)
}

/// With the weight and bias, where there are any.
fn scaled<'b>(y: Val<'b>, a: &Args<'b>) -> Val<'b> {
    let y = a.maybe[1].map_or(y, |weight| y * weight);
    a.maybe[2].map_or(y, |bias| y + bias)
}

/// Runs the fused kernel or the decomposition on a plain tensor.
fn run(x: &Tensor, norm: Norm<'_>) -> Result<Tensor> {
    if x.numel() > 0 {
        let op = if norm.rms { "rms_norm" } else { "layer_norm" };
        let length = norm.channels * norm.inner;
        if let Some(mut out) = fused_rows(op, x, None, length, row_op(&norm)?)? {
            return Ok(out.remove(0));
        }
    }
    decomposed(x, &norm)
}

/// What a kernel along rows computes.
fn row_op(norm: &Norm<'_>) -> Result<RowOp> {
    let dense = |p: Option<&Tensor>| {
        p.map(|p| p.reshape([p.numel()])?.contiguous()?.view())
            .transpose()
    };
    let (weight, bias) = (dense(norm.weight)?, dense(norm.bias)?);
    let Norm {
        rms,
        eps,
        groups,
        channels,
        inner,
        ..
    } = *norm;
    Ok(RowOp::Norm {
        rms,
        eps,
        weight,
        bias,
        groups,
        channels,
        inner,
    })
}

/// The parameters that there are, from operand `first` on.
fn given<'t, const N: usize>(
    inputs: &'t [Tensor],
    first: usize,
    parameters: [Option<&Tensor>; N],
) -> [Option<&'t Tensor>; N] {
    let mut there = inputs[first..].iter();
    parameters.map(|p| p.and_then(|_| there.next()))
}

/// A norm over the last `dims` dimensions, whose shape the parameters have.
#[track_caller]
fn trailing(
    op: &'static str,
    x: &Tensor,
    dims: usize,
    rms: bool,
    eps: f64,
    parameters: [Option<&Tensor>; 2],
) -> Result<Tensor> {
    let channels = check_trailing(op, x, dims, eps, &parameters)?;
    let tensors: SmallVec<[&Tensor; 3]> = [x]
        .into_iter()
        .chain(parameters.into_iter().flatten())
        .collect();
    let run = || trailing_values(op, x, dims, rms, eps, parameters, channels, &tensors);
    crate::observe::tell(|| serde_json::json!({ "dims": dims, "eps": eps }));
    record1(op, &tensors, run, |_| {
        let kept = ForBackward::new(
            op,
            x,
            parameters,
            (x.rank() - dims..x.rank()).collect(),
            rms,
            eps,
        );
        Ok(move |b: &Back<'_>| {
            kept.pull(
                b,
                &kept.x,
                [kept.weight.as_ref(), kept.bias.as_ref()],
                b.grad()?,
                None,
            )
        })
    })
}

/// [`trailing`], checked: there are `channels` elements in each row.
#[track_caller]
#[allow(clippy::too_many_arguments)]
fn trailing_values(
    op: &'static str,
    x: &Tensor,
    dims: usize,
    rms: bool,
    eps: f64,
    parameters: [Option<&Tensor>; 2],
    channels: usize,
    tensors: &[&Tensor],
) -> Result<Tensor> {
    let [weight, bias] = parameters;
    if plain(op, tensors)? {
        return run(
            x,
            Norm {
                rms,
                eps,
                weight,
                bias,
                groups: 1,
                channels,
                inner: 1,
            },
        );
    }
    let axes: Dims = (x.rank() - dims..x.rank()).collect();
    Call::of(if rms { &RMS } else { &LAYER }, tensors)
        .optional(1, &parameters)
        .bind('r', &axes)
        .run1_or(
            |l| trailing(op, &l[0], dims, rms, eps, given(l.inputs, 1, parameters)),
            |inputs| {
                let parameters = given(inputs, 1, parameters);
                normalised(op, &inputs[0], &axes, rms, eps, parameters)
            },
        )
}

/// A parameter `[c]` as one that broadcasts to `x`, which is `[n, c, ...]`.
#[track_caller]
fn column(x: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let mut shape: Dims = smallvec![1; x.rank() - 1];
    shape[0] = x.dims()[1];
    parameter.reshape(shape)
}
