//! Normalisation: over trailing dimensions (layer, RMS), over groups of channels (group, instance),
//! over the batch.

mod gradient;

use super::{
    OpInfo,
    expr::{Args, Expr, check_eps, check_float, compute_type},
    op, same_device,
    softmax::fused_rows,
};
use crate::{
    Dims, Error, Result, Shape, Tensor,
    backend::{ReduceOp, RowOp},
    grad::{Back, constant, record, record1},
    ledger::on_behalf_of,
    map::Val,
    spmd::{Call, plain, without_partials},
    tensor::Outputs,
};
use gradient::ForBackward;
use smallvec::{SmallVec, smallvec};

/// The ops of this file. Where what is normalised over is cut, only means and variances cross.
pub const OPS: &[OpInfo] = &[
    LAYER,
    RMS,
    GROUP,
    INSTANCE,
    OpInfo::composed("batch_norm", &["map", "reshape"]),
    BATCH_TRAIN,
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

/// The output of batch normalisation in training, with what the running statistics need.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    /// The normalised input.
    pub out: Tensor,
    /// The mean of each channel.
    pub mean: Tensor,
    /// The variance of each channel, divided by the number of values: the one `out` was normalised
    /// with.
    pub var: Tensor,
    /// Values per channel.
    pub count: usize,
}

impl BatchNorm {
    /// Running statistics after this batch: `(1 - momentum) * running + momentum * batch`. The
    /// running variance takes the unbiased variance of the batch, which needs more than one value
    /// per channel. They have no gradient.
    #[track_caller]
    pub fn update_running(
        &self,
        mean: &Tensor,
        var: &Tensor,
        momentum: f64,
    ) -> Result<(Tensor, Tensor)> {
        let op = "batch_norm_train";
        if self.count < 2 {
            return Err(Error::argument(
                op,
                "self",
                "an unbiased variance needs more than one value per channel",
            )
            .of([&self.out]));
        }
        if !(0.0..=1.0).contains(&momentum) {
            return Err(Error::argument(
                op,
                "momentum",
                format!("momentum must be in 0..=1, got {momentum}"),
            ));
        }
        check_float(op, &[mean, var])?;
        let _scope = on_behalf_of(op, mean);
        let mix = |running: &Tensor, batch: &Tensor, correction: f64| {
            if running.shape() != batch.shape() {
                return Err(Error::shape(
                    op,
                    [running, batch],
                    format!(
                        "running statistics must have shape {}, got {}",
                        batch.shape(),
                        running.shape()
                    ),
                ));
            }
            let weights = [1.0 - momentum, momentum * correction];
            Expr::new(op, &[running, batch])
                .params(&weights)
                .map(running.dtype(), |a| a.x[0] * a.p[0] + a.x[1] * a.p[1])
        };
        constant(op, &[mean, var, &self.mean, &self.var], || {
            Ok((
                mix(mean, &self.mean, 1.0)?,
                mix(var, &self.var, self.count as f64 / (self.count - 1) as f64)?,
            ))
        })
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
        if options.bias.is_some() {
            return Err(Error::argument(
                op,
                "bias",
                "takes no bias: it centres nothing; add one to the result",
            ));
        }
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

    /// Normalises `[n, c, ...]` with given statistics of each channel; all parameters are `[c]`.
    #[track_caller]
    pub fn batch_norm(
        &self,
        mean: &Tensor,
        var: &Tensor,
        options: &NormOptions<'_>,
    ) -> Result<Tensor> {
        let (
            op,
            NormOptions {
                weight, bias, eps, ..
            },
        ) = ("batch_norm", *options);
        options.check_dims(op)?;
        check_channels(op, self, &[Some(mean), Some(var), weight, bias])?;
        check_eps(op, eps)?;
        let (mean, var) = (column(self, mean)?, column(self, var)?);
        scale_channels(op, self, &mean, &var, [weight, bias], eps)
    }

    /// Normalises each channel of `[n, c, ...]` over the batch and all that follows the channel;
    /// parameters are `[c]`.
    #[track_caller]
    pub fn batch_norm_train(&self, options: &NormOptions<'_>) -> Result<BatchNorm> {
        let (
            op,
            NormOptions {
                weight, bias, eps, ..
            },
        ) = ("batch_norm_train", *options);
        options.check_dims(op)?;
        check_channels(op, self, &[weight, bias])?;
        check_eps(op, eps)?;
        let channels = self.dims()[1];
        let count = self.numel().checked_div(channels).unwrap_or(0);
        if count == 0 && channels != 0 {
            return Err(empty(op, self));
        }
        let tensors: SmallVec<[&Tensor; 3]> =
            [self].into_iter().chain(weight).chain(bias).collect();
        let run = || {
            if plain(op, &tensors)? {
                return train(op, self, count, [weight, bias], eps);
            }
            let part = |inputs: &[Tensor]| {
                train(op, &inputs[0], count, given(inputs, 1, [weight, bias]), eps)
            };
            Call::of(&BATCH_TRAIN, &tensors)
                .optional(1, &[weight, bias])
                .run_or(|l| part(l.inputs), part)
        };
        let pull = |out: &Outputs| {
            let axes: Dims = (0..self.rank()).filter(|d| *d != 1).collect();
            let kept = ForBackward::new(op, self, [weight, bias], axes, false, eps);
            let (mean, var) = (out[1].clone(), out[2].clone());
            Ok(move |b: &Back<'_>| {
                let x = &kept.x;
                let [weight, bias] = [&kept.weight, &kept.bias]
                    .map(|p| p.as_ref().map(|p| column(x, p)).transpose());
                let (weight, bias) = (weight?, bias?);
                let g = b
                    .grad_of(0)
                    .map_or_else(|| x.zeros_like(), |g| Ok(g.clone()))?;
                let statistics = [column(x, &b.out(1, &mean))?, column(x, &b.out(2, &var))?];
                let further =
                    [b.grad_of(1), b.grad_of(2)].map(|g| g.map(|g| column(x, g)).transpose());
                let [of_mean, of_var] = further;
                kept.pull(
                    b,
                    x,
                    [weight.as_ref(), bias.as_ref()],
                    &g,
                    Some(statistics),
                    [of_mean?, of_var?],
                )
            })
        };
        let mut out = record(op, &tensors, run, pull)?.into_iter();
        match (out.next(), out.next(), out.next()) {
            (Some(out), Some(mean), Some(var)) => Ok(BatchNorm {
                out,
                mean,
                var,
                count,
            }),
            _ => Err(empty(op, self)),
        }
    }
}

/// The output, mean and variance of batch normalisation in training.
#[track_caller]
fn train(
    op: &'static str,
    x: &Tensor,
    count: usize,
    parameters: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<Outputs> {
    let axes: Dims = (0..x.rank()).filter(|d| *d != 1).collect();
    let mean = mean(op, x, &axes, count)?;
    let var = variance(op, x, Some(&mean), &axes, count)?;
    let out = scale_channels(op, x, &mean, &var, parameters, eps)?;
    Ok(smallvec![
        out,
        mean.reshape([x.dims()[1]])?,
        var.reshape([x.dims()[1]])?
    ])
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
    let dense = |p: Option<&Tensor>| {
        p.map(|p| p.reshape([p.numel()])?.contiguous()?.view())
            .transpose()
    };
    if x.numel() > 0 {
        let (weight, bias) = (dense(norm.weight)?, dense(norm.bias)?);
        let Norm {
            rms,
            eps,
            groups,
            channels,
            inner,
            ..
        } = norm;
        let row = RowOp::Norm {
            rms,
            eps,
            weight,
            bias,
            groups,
            channels,
            inner,
        };
        let op = if rms { "rms_norm" } else { "layer_norm" };
        if let Some(out) = fused_rows(op, x, channels * inner, row)? {
            return Ok(out);
        }
    }
    decomposed(x, &norm)
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
    if dims == 0 || dims > x.rank() {
        return Err(Error::argument(op, "dims", format!(
                "cannot normalise over {dims} dimensions of {}: between 1 and its rank are possible",
                x.shape()
            )).of([x]));
    }
    check_float(op, &[x])?;
    let shape = Shape::from(&x.dims()[x.rank() - dims..]);
    check_parameters(op, x, &shape, &parameters)?;
    let channels = shape.checked_numel(op)?;
    if channels == 0 {
        return Err(empty(op, x));
    }
    check_eps(op, eps)?;
    let tensors: SmallVec<[&Tensor; 3]> = [x]
        .into_iter()
        .chain(parameters.into_iter().flatten())
        .collect();
    let run = || trailing_values(op, x, dims, rms, eps, parameters, channels, &tensors);
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
                [None, None],
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

fn empty(op: &'static str, x: &Tensor) -> Error {
    Error::shape(
        op,
        [x],
        format!("{} has no elements to take a mean of", x.shape()),
    )
}

fn check_parameters(
    op: &'static str,
    x: &Tensor,
    shape: &Shape,
    parameters: &[Option<&Tensor>],
) -> Result<()> {
    for parameter in parameters.iter().copied().flatten() {
        check_float(op, &[parameter])?;
        same_device(op, &[x, parameter])?;
        if parameter.shape() != shape {
            return Err(Error::shape(
                op,
                [x, parameter],
                format!(
                    "parameters for {} must have shape {shape}, got {}",
                    x.shape(),
                    parameter.shape()
                ),
            ));
        }
    }
    Ok(())
}

/// Checks an input `[n, c, ...]` and parameters `[c]`.
fn check_channels(op: &'static str, x: &Tensor, parameters: &[Option<&Tensor>]) -> Result<()> {
    check_float(op, &[x])?;
    match x.dims() {
        [_, channels, ..] => check_parameters(op, x, &[*channels].into(), parameters),
        _ => Err(Error::shape(
            op,
            [x],
            format!("the input is [n, c, ...], got {}", x.shape()),
        )),
    }
}

/// A norm over each of `groups` runs of channels and all that follows; the rule says which of them
/// may be cut.
#[track_caller]
fn channel_groups(
    info: &'static OpInfo,
    x: &Tensor,
    groups: usize,
    parameters: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<Tensor> {
    let op = info.name;
    check_channels(op, x, &parameters)?;
    let channels = x.dims()[1];
    let per_sample = Shape::from(&x.dims()[1..]).checked_numel(op)?;
    if per_sample == 0 {
        return Err(empty(op, x));
    }
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(Error::argument(
            op,
            "groups",
            format!(
                "{groups} groups do not divide the {channels} channels of {}",
                x.shape()
            ),
        )
        .of([x]));
    }
    check_eps(op, eps)?;
    let tensors: SmallVec<[&Tensor; 3]> = [x]
        .into_iter()
        .chain(parameters.into_iter().flatten())
        .collect();
    let run = || group_values(info, x, groups, parameters, eps, &tensors);
    record1(op, &tensors, run, |_| {
        let kept = ForBackward::new(op, x, parameters, (2..=x.rank()).collect(), false, eps);
        Ok(move |b: &Back<'_>| {
            let (apart, beside) = apart(&kept.x, groups);
            let [weight, bias] = [&kept.weight, &kept.bias]
                .map(|p| p.as_ref().map(|p| p.reshape(&beside)).transpose());
            let (weight, bias) = (weight?, bias?);
            kept.pull(
                b,
                &kept.x.reshape(&apart)?,
                [weight.as_ref(), bias.as_ref()],
                b.grad()?,
                None,
                [None, None],
            )
        })
    })
}

/// The shapes of an input `[n, c, ...]` whose channels are taken apart into groups, and of
/// parameters beside it.
fn apart(x: &Tensor, groups: usize) -> (Shape, Shape) {
    let (channels, rest) = (x.dims()[1], &x.dims()[2..]);
    let each = channels / groups;
    (
        [x.dims()[0], groups, each]
            .iter()
            .chain(rest)
            .copied()
            .collect(),
        [groups, each]
            .into_iter()
            .chain(rest.iter().map(|_| 1))
            .collect(),
    )
}

/// [`channel_groups`], checked.
#[track_caller]
fn group_values(
    info: &'static OpInfo,
    x: &Tensor,
    groups: usize,
    parameters: [Option<&Tensor>; 2],
    eps: f64,
    tensors: &[&Tensor],
) -> Result<Tensor> {
    let (op, [weight, bias]) = (info.name, parameters);
    let channels = x.dims()[1];
    if plain(op, tensors)? {
        let inner = x.dims()[2..].iter().product();
        return run(
            x,
            Norm {
                rms: false,
                eps,
                weight,
                bias,
                groups,
                channels: channels / groups,
                inner,
            },
        );
    }
    let local = |x: &Tensor, inputs: &[Tensor]| {
        if x.numel() == 0 {
            return Ok(x.clone());
        }
        // Every rank has whole groups.
        let groups = x.dims()[1] / (channels / groups);
        channel_groups(info, x, groups, given(inputs, 1, parameters), eps)
    };
    let cut = |inputs: &[Tensor]| {
        let (apart, beside) = apart(x, groups);
        let [weight, bias] =
            given(inputs, 1, parameters).map(|p| p.map(|p| p.reshape(&beside)).transpose());
        let (weight, bias) = (weight?, bias?);
        let axes: Dims = (2..=x.rank()).collect();
        let out = normalised(
            op,
            &inputs[0].reshape(apart)?,
            &axes,
            false,
            eps,
            [weight.as_ref(), bias.as_ref()],
        )?;
        out.reshape(x.shape())
    };
    Call::of(info, tensors)
        .optional(1, &parameters)
        .size('g', groups)
        .run1_or(|l| local(&l[0], l.inputs), cut)
}

/// A parameter `[c]` as one that broadcasts to `x`, which is `[n, c, ...]`.
#[track_caller]
fn column(x: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let mut shape: Dims = smallvec![1; x.rank() - 1];
    shape[0] = x.dims()[1];
    parameter.reshape(shape)
}

/// `(x - mean) / sqrt(var + eps) * weight + bias` with statistics that broadcast and parameters
/// `[c]` of an input `[n, c, ...]`.
#[track_caller]
fn scale_channels(
    op: &'static str,
    x: &Tensor,
    mean: &Tensor,
    var: &Tensor,
    parameters: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<Tensor> {
    // Not in a closure, which would not know who called.
    let mut columns = [None, None];
    for (column_of, parameter) in columns.iter_mut().zip(parameters) {
        if let Some(parameter) = parameter {
            *column_of = Some(column(x, parameter)?);
        }
    }
    let [weight, bias] = columns;
    let out = Expr::new(op, &[x, var])
        .maybe(&[Some(mean), weight.as_ref(), bias.as_ref()])
        .params(&[eps]);
    out.map(x.dtype(), |a| {
        scaled(centered(a) / (a.x[1] + a.p[0]).sqrt(), a)
    })
}
