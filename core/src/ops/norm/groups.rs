//! Norms over groups of channels.

use super::{ForBackward, Norm, check_channels, check_eps, empty, given, normalised, run};
use crate::{
    Dims, Error, Result, Shape, Tensor,
    grad::{Back, record1},
    ops::OpInfo,
    spmd::{Call, plain},
};
use smallvec::SmallVec;

/// A norm over each of `groups` runs of channels and all that follows; the rule says which of them
/// may be cut.
#[track_caller]
pub(super) fn channel_groups(
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
