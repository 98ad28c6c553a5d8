//! A sum and its norm: what stands between the branches of a transformer, in one launch where a
//! device has a kernel for it.

use super::{
    ForBackward, Norm, NormOptions, check_trailing, given, no_bias, normalised, row_op, run,
};
use crate::{
    Dims, Error, Result, Tensor,
    grad::{Back, Pulled, record},
    ops::{OpInfo, op, same_device, softmax::fused_rows},
    spmd::{Call, plain},
    tensor::Outputs,
};
use smallvec::{SmallVec, smallvec};

pub(super) const LAYER: OpInfo = op(
    "add_layer_norm",
    "...r, ...r, r, r -> ...r, ...r ; stats r 2",
)
.runs(&["add", "layer_norm", "map", "reduce"]);
pub(super) const RMS: OpInfo = op("add_rms_norm", "...r, ...r, r -> ...r, ...r ; stats r 1")
    .runs(&["add", "rms_norm", "map", "reduce"]);

impl Tensor {
    /// `self + branch` and the [`layer_norm`](Self::layer_norm) of that sum, with the values that
    /// the two ops give: the sum is rounded to its dtype before it is normalised. A GPU reads each
    /// operand once and writes each result once, and adds the sum's own gradient to the norm's in
    /// the launch that computes that.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::NormOptions};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(&[[1f32, 2.0], [0.0, 5.0]], &device)?;
    /// let branch = Tensor::new(&[[0f32, 1.0], [-2.0, -3.0]], &device)?;
    /// let (sum, normed) = x.add_layer_norm(&branch, &NormOptions::new().eps(0.0))?;
    /// assert_eq!(sum.to_vec::<f32>()?, [1.0, 3.0, -2.0, 2.0]);
    /// assert_eq!(normed.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn add_layer_norm(
        &self,
        branch: &Tensor,
        options: &NormOptions<'_>,
    ) -> Result<(Tensor, Tensor)> {
        if !alike(self, branch) {
            let sum = self.add(branch)?;
            let normed = sum.layer_norm(options)?;
            return Ok((sum, normed));
        }
        added(&LAYER, self, branch, false, options)
    }

    /// `self + branch` and the [`rms_norm`](Self::rms_norm) of that sum, as
    /// [`add_layer_norm`](Self::add_layer_norm) is of the layer norm.
    #[track_caller]
    pub fn add_rms_norm(
        &self,
        branch: &Tensor,
        options: &NormOptions<'_>,
    ) -> Result<(Tensor, Tensor)> {
        no_bias("add_rms_norm", options)?;
        if !alike(self, branch) {
            let sum = self.add(branch)?;
            let normed = sum.rms_norm(options)?;
            return Ok((sum, normed));
        }
        added(&RMS, self, branch, true, options)
    }
}

/// Whether the sum has the shape and dtype of both: nothing broadcasts or is promoted.
fn alike(x: &Tensor, branch: &Tensor) -> bool {
    x.shape() == branch.shape() && x.dtype() == branch.dtype()
}

#[track_caller]
fn added(
    info: &'static OpInfo,
    x: &Tensor,
    branch: &Tensor,
    rms: bool,
    options: &NormOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let (op, NormOptions { dims, eps, .. }) = (info.name, *options);
    let parameters = options.parameters();
    same_device(op, &[x, branch])?;
    let channels = check_trailing(op, x, dims, eps, &parameters)?;
    let tensors: SmallVec<[&Tensor; 4]> = [x, branch]
        .into_iter()
        .chain(parameters.into_iter().flatten())
        .collect();
    let axes: Dims = (x.rank() - dims..x.rank()).collect();
    let run = || {
        if plain(op, &tensors)? {
            return values(op, x, branch, over(rms, eps, channels, parameters));
        }
        Call::of(info, &tensors)
            .optional(2, &parameters)
            .bind('r', &axes)
            .run_or(
                |l| {
                    values(op, &l[0], &l[1], {
                        let parameters = given(l.inputs, 2, parameters);
                        over(rms, eps, channels, parameters)
                    })
                },
                |inputs| {
                    let sum = inputs[0].add(&inputs[1])?;
                    let parameters = given(inputs, 2, parameters);
                    let normed = normalised(op, &sum, &axes, rms, eps, parameters)?;
                    Ok(smallvec![sum, normed])
                },
            )
    };
    crate::observe::tell(|| serde_json::json!({ "dims": dims, "eps": eps }));
    let mut out = record(op, &tensors, run, |out| {
        let kept = ForBackward {
            op,
            x: out[0].clone(),
            weight: parameters[0].cloned(),
            bias: parameters[1].cloned(),
            axes: axes.clone(),
            rms,
            eps,
            summands: 2,
        };
        Ok(move |b: &Back<'_>| pull(&kept, b))
    })?
    .into_iter();
    match (out.next(), out.next()) {
        (Some(sum), Some(normed)) => Ok((sum, normed)),
        _ => Err(Error::argument(op, "x", "a launch gave too few results")),
    }
}

/// The norm of rows of so many elements, each with parameters of its own.
fn over(rms: bool, eps: f64, channels: usize, parameters: [Option<&Tensor>; 2]) -> Norm<'_> {
    let [weight, bias] = parameters;
    Norm {
        rms,
        eps,
        weight,
        bias,
        groups: 1,
        channels,
        inner: 1,
    }
}

/// The sum and its norm, of plain tensors.
fn values(op: &'static str, x: &Tensor, branch: &Tensor, norm: Norm<'_>) -> Result<Outputs> {
    if x.numel() > 0 {
        let row = row_op(&norm)?;
        if let Some(out) = fused_rows(op, x, Some(branch), norm.channels, row)? {
            return Ok(out);
        }
    }
    let sum = x.add(branch)?;
    let normed = run(&sum, norm)?;
    Ok(smallvec![sum, normed])
}

/// The gradients of both summands, which are one, and of the parameters.
fn pull(kept: &ForBackward, b: &Back<'_>) -> Result<Pulled> {
    let x = &b.out(0, &kept.x);
    let parameters = [kept.weight.as_ref(), kept.bias.as_ref()];
    let of_sum = b.grad_of(0);
    let mut pulled = match b.grad_of(1) {
        // Nobody used the norm.
        None => {
            let mut pulled: Pulled = smallvec![of_sum.cloned()];
            pulled.extend(parameters.iter().flatten().map(|_| None));
            pulled
        }
        Some(g) => kept.pull(b, x, parameters, g, of_sum)?,
    };
    let both = pulled[0].clone();
    pulled.insert(1, both);
    Ok(pulled)
}
