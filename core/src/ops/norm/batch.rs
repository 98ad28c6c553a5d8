//! Batch norm: statistics of a batch, and of a run.

use super::{
    BATCH_TRAIN, ForBackward, NormOptions, Statistics, centered, check_channels, check_eps, column,
    empty, given, mean, scaled, variance,
};
use crate::{
    Dims, Error, Result, Tensor,
    grad::{Back, constant, record},
    ledger::on_behalf_of,
    ops::expr::{Expr, check_float},
    spmd::{Call, plain},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

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
                let further =
                    [b.grad_of(1), b.grad_of(2)].map(|g| g.map(|g| column(x, g)).transpose());
                let [of_mean, of_var] = further;
                let statistics = Statistics {
                    mean: column(x, &b.out(1, &mean))?,
                    var: column(x, &b.out(2, &var))?,
                    gradients: [of_mean?, of_var?],
                };
                let parameters = [weight.as_ref(), bias.as_ref()];
                kept.pull_with(b, x, parameters, &g, statistics)
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
