//! Normalisation: over trailing dimensions (layer, RMS), over groups of channels (group, instance), over the batch.

use super::{
    OpInfo,
    expr::{Args, Expr, check_eps, check_float, compute_type},
    op, same_device,
    softmax::fused_rows,
};
use crate::{
    Dims, Error, Result, Shape, Tensor,
    backend::{ReduceOp, RowOp},
    map::Val,
};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    op("layer_norm", "...r, r, r -> ...r ; stats r"),
    op("rms_norm", "...r, r -> ...r ; stats r"),
    op("group_norm", "nc..., c, c -> nc... ; replicate c ..."),
    op("instance_norm", "nc..., c, c -> nc... ; stats ..."),
    op("batch_norm", "nc..., c, c, c, c -> nc..."),
    op("batch_norm_train", "nc..., c, c -> nc..., c, c ; stats n ..."),
];

/// How the elements of each row are normalised, and which parameters scale them.
///
/// Row `r`, column `j` of `[rows, channels * inner]` uses parameter `(r % groups) * channels + j / inner`.
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

/// The output of batch normalisation in training, with what the running statistics need.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    /// The normalised input.
    pub out: Tensor,
    /// The mean of each channel.
    pub mean: Tensor,
    /// The variance of each channel, divided by the number of values: the one `out` was normalised with.
    pub var: Tensor,
    /// Values per channel.
    pub count: usize,
}

impl BatchNorm {
    /// Running statistics after this batch: `(1 - momentum) * running + momentum * batch`. The running variance takes the
    /// unbiased variance of the batch, which needs more than one value per channel.
    pub fn update_running(&self, mean: &Tensor, var: &Tensor, momentum: f64) -> Result<(Tensor, Tensor)> {
        let op = "batch_norm_train";
        if self.count < 2 {
            return Err(Error::Argument { op, detail: "an unbiased variance needs more than one value per channel".into() });
        }
        if !(0.0..=1.0).contains(&momentum) {
            return Err(Error::Argument { op, detail: format!("momentum must be in 0..=1, got {momentum}") });
        }
        check_float(op, &[mean, var])?;
        let mix = |running: &Tensor, batch: &Tensor, correction: f64| {
            if running.shape() != batch.shape() {
                return Err(Error::Shape { op, detail: format!("running statistics must have shape {}, got {}", batch.shape(), running.shape()) });
            }
            let weights = [1.0 - momentum, momentum * correction];
            Expr::new(op, &[running, batch]).params(&weights).map(running.dtype(), |a| a.x[0] * a.p[0] + a.x[1] * a.p[1])
        };
        Ok((mix(mean, &self.mean, 1.0)?, mix(var, &self.var, self.count as f64 / (self.count - 1) as f64)?))
    }
}

impl Tensor {
    /// `(x - mean) / sqrt(var + eps) * weight + bias` over the last `dims` dimensions, whose shape the parameters have.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, 3.0, -2.0, 2.0], [2, 2], &device)?;
    /// assert_eq!(x.layer_norm(1, None, None, 0.0)?.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn layer_norm(&self, dims: usize, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let channels = trailing("layer_norm", self, dims, [weight, bias])?;
        run("layer_norm", self, Norm { rms: false, eps, weight, bias, groups: 1, channels, inner: 1 })
    }

    /// `x / sqrt(mean(x^2) + eps) * weight` over the last `dims` dimensions, whose shape the weight has.
    pub fn rms_norm(&self, dims: usize, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let channels = trailing("rms_norm", self, dims, [weight, None])?;
        run("rms_norm", self, Norm { rms: true, eps, weight, bias: None, groups: 1, channels, inner: 1 })
    }

    /// Normalises `[n, c, ...]` over each of `groups` runs of neighbouring channels and all that follows; parameters are `[c]`.
    pub fn group_norm(&self, groups: usize, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        channel_groups("group_norm", self, groups, weight, bias, eps)
    }

    /// Normalises each channel of each sample of `[n, c, ...]`; parameters are `[c]`.
    pub fn instance_norm(&self, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let channels = self.dims().get(1).copied().unwrap_or(0);
        channel_groups("instance_norm", self, channels, weight, bias, eps)
    }

    /// Normalises `[n, c, ...]` with given statistics of each channel; all parameters are `[c]`.
    pub fn batch_norm(&self, mean: &Tensor, var: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let op = "batch_norm";
        check_channels(op, self, &[Some(mean), Some(var), weight, bias])?;
        check_eps(op, eps)?;
        scale_channels(op, self, mean, var, weight, bias, eps)
    }

    /// Normalises each channel of `[n, c, ...]` over the batch and all that follows the channel; parameters are `[c]`.
    pub fn batch_norm_train(&self, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<BatchNorm> {
        let op = "batch_norm_train";
        check_channels(op, self, &[weight, bias])?;
        check_eps(op, eps)?;
        let channels = self.dims()[1];
        let count = self.numel().checked_div(channels).unwrap_or(0);
        if count == 0 && channels != 0 {
            return Err(empty(op, self));
        }
        let axes: Dims = (0..self.rank()).filter(|d| *d != 1).collect();
        let (kind, scale) = (compute_type([self]), Some(1.0 / count as f64));
        let mean = Expr::new(op, &[self]).reduce(&axes, ReduceOp::Sum, scale, kind, |a| a.x[0])?;
        let var = Expr::new(op, &[self, &mean]).reduce(&axes, ReduceOp::Sum, scale, kind, |a| (a.x[0] - a.x[1]) * (a.x[0] - a.x[1]))?;
        let (mean, var) = (mean.reshape([channels])?, var.reshape([channels])?);
        let out = scale_channels(op, self, &mean, &var, weight, bias, eps)?;
        Ok(BatchNorm { out, mean, var, count })
    }
}

/// A norm of `x`, seen as rows of `channels * inner` elements, as reductions and a map.
pub fn decomposed(x: &Tensor, norm: &Norm<'_>) -> Result<Tensor> {
    let op = if norm.rms { "rms_norm" } else { "layer_norm" };
    let sizes = Shape::from([norm.groups, norm.channels, norm.inner]);
    let block = sizes.checked_numel(op)?;
    if block == 0 || !x.numel().is_multiple_of(block) {
        return Err(Error::Shape { op, detail: format!("{} does not divide into rows of {sizes} (groups, channels, inner)", x.shape()) });
    }
    let n = block / norm.groups;
    check_float(op, &[x])?;
    check_eps(op, norm.eps)?;
    if x.numel() == 0 {
        return Ok(x.result(None, x.dtype(), x.shape().clone()));
    }
    let parameter = |p: Option<&Tensor>| p.map(|p| p.reshape([norm.groups, norm.channels, 1])).transpose();
    let (weight, bias) = (parameter(norm.weight)?, parameter(norm.bias)?);
    let rows = x.reshape([x.numel() / block, norm.groups, norm.channels, norm.inner])?;
    let (kind, scale) = (compute_type([x]), Some(1.0 / n as f64));
    let mean = if norm.rms { None } else { Some(Expr::new(op, &[&rows]).reduce(&[2, 3], ReduceOp::Sum, scale, kind, |a| a.x[0])?) };
    let var = Expr::new(op, &[&rows]).maybe(&[mean.as_ref()]).reduce(&[2, 3], ReduceOp::Sum, scale, kind, |a| centered(a) * centered(a))?;
    let out = Expr::new(op, &[&rows, &var]).maybe(&[mean.as_ref(), weight.as_ref(), bias.as_ref()]).params(&[norm.eps]);
    out.map(x.dtype(), |a| scaled(centered(a) / (a.x[1] + a.p[0]).sqrt(), a))?.reshape(x.shape())
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

/// Runs the fused kernel or the decomposition.
fn run(op: &'static str, x: &Tensor, norm: Norm<'_>) -> Result<Tensor> {
    check_eps(op, norm.eps)?;
    let dense = |p: Option<&Tensor>| p.map(|p| p.reshape([p.numel()])?.contiguous()?.view()).transpose();
    if x.numel() > 0 {
        let (weight, bias) = (dense(norm.weight)?, dense(norm.bias)?);
        let Norm { rms, eps, groups, channels, inner, .. } = norm;
        let row = RowOp::Norm { rms, eps, weight: weight.as_ref(), bias: bias.as_ref(), groups, channels, inner };
        if let Some(out) = fused_rows(x, channels * inner, row)? {
            return Ok(out);
        }
    }
    decomposed(x, &norm)
}

/// The number of elements in the last `dims` dimensions, which the parameters must have too.
fn trailing(op: &'static str, x: &Tensor, dims: usize, parameters: [Option<&Tensor>; 2]) -> Result<usize> {
    if dims == 0 || dims > x.rank() {
        return Err(Error::Argument { op, detail: format!("cannot normalise over {dims} dimensions of {}: between 1 and its rank are possible", x.shape()) });
    }
    check_float(op, &[x])?;
    let shape = Shape::from(&x.dims()[x.rank() - dims..]);
    check_parameters(op, x, &shape, &parameters)?;
    match shape.checked_numel(op)? {
        0 => Err(empty(op, x)),
        n => Ok(n),
    }
}

fn empty(op: &'static str, x: &Tensor) -> Error {
    Error::Shape { op, detail: format!("{} has no elements to take a mean of", x.shape()) }
}

fn check_parameters(op: &'static str, x: &Tensor, shape: &Shape, parameters: &[Option<&Tensor>]) -> Result<()> {
    for parameter in parameters.iter().copied().flatten() {
        check_float(op, &[parameter])?;
        same_device(op, &[x, parameter])?;
        if parameter.shape() != shape {
            return Err(Error::Shape { op, detail: format!("parameters for {} must have shape {shape}, got {}", x.shape(), parameter.shape()) });
        }
    }
    Ok(())
}

/// Checks an input `[n, c, ...]` and parameters `[c]`.
fn check_channels(op: &'static str, x: &Tensor, parameters: &[Option<&Tensor>]) -> Result<()> {
    check_float(op, &[x])?;
    match x.dims() {
        [_, channels, ..] => check_parameters(op, x, &[*channels].into(), parameters),
        _ => Err(Error::Shape { op, detail: format!("the input is [n, c, ...], got {}", x.shape()) }),
    }
}

fn channel_groups(op: &'static str, x: &Tensor, groups: usize, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    check_channels(op, x, &[weight, bias])?;
    let channels = x.dims()[1];
    let per_sample = Shape::from(&x.dims()[1..]).checked_numel(op)?;
    if per_sample == 0 {
        return Err(empty(op, x));
    }
    if groups == 0 || !channels.is_multiple_of(groups) {
        return Err(Error::Argument { op, detail: format!("{groups} groups do not divide the {channels} channels of {}", x.shape()) });
    }
    let inner = per_sample / channels;
    run(op, x, Norm { rms: false, eps, weight, bias, groups, channels: channels / groups, inner })
}

/// `(x - mean) / sqrt(var + eps) * weight + bias` with parameters `[c]` of an input `[n, c, ...]`.
fn scale_channels(op: &'static str, x: &Tensor, mean: &Tensor, var: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let mut shape: Dims = smallvec::smallvec![1; x.rank() - 1];
    shape[0] = x.dims()[1];
    let column = |p: &Tensor| p.reshape(shape.clone());
    let (mean, var) = (column(mean)?, column(var)?);
    let (weight, bias) = (weight.map(column).transpose()?, bias.map(column).transpose()?);
    let out = Expr::new(op, &[x, &var]).maybe(&[Some(&mean), weight.as_ref(), bias.as_ref()]).params(&[eps]);
    out.map(x.dtype(), |a| scaled(centered(a) / (a.x[1] + a.p[0]).sqrt(), a))
}
