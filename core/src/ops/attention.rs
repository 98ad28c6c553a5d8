//! Scaled dot-product attention with grouped heads, and its gradient.

mod blocks;
mod check;
mod heads;
mod long;
mod order;
mod passes;
mod ring;
mod sharded;
mod steps;

pub use long::SequenceOptions;
pub use order::SequenceOrder;

use super::{OpInfo, RuleForm};
use crate::{
    DType, Result, Tensor,
    backend::{AttentionBackwardCall, AttentionCall, AttentionOrder},
    grad::{Back, Pulled, recompute, record},
    launch::launch_fused,
    spmd::{plain, settled},
};
use smallvec::{SmallVec, smallvec};

/// The ops of this file. `g` query heads read each of the `h` key heads; the last operands are the
/// mask and the documents of queries and of keys. Where queries are cut, the gradients of keys and values are partial sums. The second way is
/// for query heads that are cut finer than there are key heads: each rank has all of those, and its
/// queries read the ones that are theirs.
pub const OPS: &[OpInfo] = &[FORWARD, BACKWARD];

const FORWARD: OpInfo = OpInfo::new(
    "attention",
    RuleForm::Variants(&[
        "b(hg)sd, bhtd, bhte, b(hg)st, bs, bt -> b(hg)se, b(hg)s ; replicate t d e",
        "bqsd, bhtd, bhte, bqst, bs, bt -> bqse, bqs ; replicate h t d e",
    ]),
)
.runs(&["expand"]);
const BACKWARD: OpInfo = OpInfo::new(
    "attention_backward",
    RuleForm::Variants(&[
        "b(hg)sd, bhtd, bhte, b(hg)se, b(hg)s, b(hg)se, b(hg)st, bs, bt -> b(hg)sd, bhtd, bhte ; replicate t d e ; reduce s g sum",
        "bqsd, bhtd, bhte, bqse, bqs, bqse, bqst, bs, bt -> bqsd, bhtd, bhte ; replicate h t d e ; reduce s q sum",
    ]),
)
.runs(&["expand"]);

/// How queries look at keys.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// Factor on the scores; `1 / sqrt(d)` where not given.
    pub scale: Option<f64>,
    /// Query `i` of `s` sees keys `0 ..= i + t - s` of `t`: the last query sees all of them.
    pub causal: bool,
    /// Broadcasts to `[b, hq, s, t]`. A bool says which keys are seen; a float is added to the
    /// scores.
    pub mask: Option<Tensor>,
    /// The document of each query `[b, s]` and of each key `[b, t]`, integers of one dtype: a query
    /// sees keys of its own document. Unlike a mask it takes no memory for pairs, and pairs of
    /// different documents cost next to nothing where those of a document lie together.
    ///
    /// Kernels compare 32 bits: documents in `i64` are for attention that is composed of other ops.
    pub documents: Option<[Tensor; 2]>,
}

impl AttentionOptions {
    /// Every query sees the keys up to its own position.
    pub fn causal() -> Self {
        Self {
            causal: true,
            ..Self::default()
        }
    }
}

/// What attention computes.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `[b, hq, s, dv]`, in the dtype of the inputs. A query that sees no key gives zeros.
    pub out: Tensor,
    /// `[b, hq, s]`: the log of the sum of the exponentials of the scores, f32 (f64 for f64
    /// inputs). The gradient needs it.
    pub lse: Tensor,
}

impl Tensor {
    /// `softmax(q k^T * scale) v` of these queries `[b, hq, s, d]`, keys `[b, hk, t, d]` and values
    /// `[b, hk, t, dv]`; query head `h` reads key head `h / (hq / hk)`.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::AttentionOptions};
    /// # let device = anymesh_backend_cpu::device();
    /// let q = Tensor::from_slice(&[0f32, 0.0], [1, 1, 2, 1], &device)?;
    /// let v = Tensor::from_slice(&[2f32, 4.0], [1, 1, 2, 1], &device)?;
    /// assert_eq!(q.attention(&q, &v, &AttentionOptions::causal())?.out.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn attention(
        &self,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Attention> {
        let q = self;
        let sizes = Sizes::check("attention", q, k, v, options)?;
        let inputs = with_sight(&[q, k, v], options);
        let run = || {
            sizes
                .value(&inputs, options)
                .map(|Attention { out, lse }| smallvec![out, lse])
        };
        crate::observe::tell(
            || serde_json::json!({ "scale": options.scale, "causal": options.causal }),
        );
        let mut out = record(sizes.op, &inputs, run, |out| {
            let (q, k, v, options) = (q.kept(), k.kept(), v.kept(), options.clone());
            let (out, lse) = (out[0].clone(), out[1].clone());
            Ok(move |b: &Back<'_>| {
                sizes.pull(
                    b,
                    [&q, &k, &v],
                    &Attention {
                        out: b.out(0, &out),
                        lse: b.out(1, &lse),
                    },
                    &options,
                )
            })
        })?;
        Ok(Attention {
            lse: out.remove(1),
            out: out.remove(0),
        })
    }
}

/// Attention as matrix products, a reduction and maps.
#[track_caller]
pub fn decomposed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &AttentionOptions,
) -> Result<Attention> {
    Sizes::check("attention", q, k, v, options)?.forward(q, k, v, options)
}

/// The gradients for `q`, `k` and `v` from the inputs, results and the gradient `grad` of the
/// output of [`Tensor::attention`].
#[track_caller]
pub fn attention_backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    forward: &Attention,
    grad: &Tensor,
    options: &AttentionOptions,
) -> Result<(Tensor, Tensor, Tensor)> {
    let sizes = Sizes::check_backward(q, k, v, forward, grad, options)?;
    let inputs = with_sight(&[q, k, v, &forward.out, &forward.lse, grad], options);
    let run = || {
        sizes
            .backward_value(&inputs, options)
            .map(|(dq, dk, dv)| smallvec![dq, dk, dv])
    };
    let AttentionOptions { scale, causal, .. } = *options;
    let has = Sight::of(options);
    // The gradient of the gradient is that of its steps.
    let mut out = recompute(sizes.op, &inputs, run, move |inputs| {
        let (mask, documents) = has.split(&inputs[6..]);
        let options = AttentionOptions {
            scale,
            causal,
            mask: mask.cloned(),
            documents,
        };
        let forward = Attention {
            out: inputs[3].clone(),
            lse: inputs[4].clone(),
        };
        let (dq, dk, dv) = sizes.backward(
            &inputs[0], &inputs[1], &inputs[2], &forward, &inputs[5], &options,
        )?;
        Ok(smallvec![dq, dk, dv])
    })?;
    Ok((out.remove(0), out.remove(0), out.remove(0)))
}

/// The gradients as matrix products, a reduction and maps.
#[track_caller]
pub fn backward_decomposed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    forward: &Attention,
    grad: &Tensor,
    options: &AttentionOptions,
) -> Result<(Tensor, Tensor, Tensor)> {
    Sizes::check_backward(q, k, v, forward, grad, options)?
        .backward(q, k, v, forward, grad, options)
}

/// What a kernel gave in this order, as `[batch, heads, length, size]`. It lies as the operands do:
/// what the caller does to get back from heads to positions is a view.
fn by_head(made: &Tensor, order: AttentionOrder) -> Tensor {
    match order {
        AttentionOrder::Heads => made.clone(),
        AttentionOrder::Positions | AttentionOrder::Packed => {
            made.with_layout(made.layout().permute(&[0, 2, 1, 3]))
        }
    }
}

/// The operands, with those that say what is seen.
fn with_sight<'t>(
    tensors: &[&'t Tensor],
    options: &'t AttentionOptions,
) -> SmallVec<[&'t Tensor; 9]> {
    (tensors.iter().copied())
        .chain(&options.mask)
        .chain(options.documents.iter().flatten())
        .collect()
}

/// The mask and the documents as operands that may be missing.
fn optional(options: &AttentionOptions) -> [Option<&Tensor>; 3] {
    let [queries, keys] = match &options.documents {
        Some([queries, keys]) => [Some(queries), Some(keys)],
        None => [None, None],
    };
    [options.mask.as_ref(), queries, keys]
}

/// Which operands there are that say what is seen.
#[derive(Clone, Copy)]
struct Sight {
    mask: bool,
    documents: bool,
}

impl Sight {
    fn of(options: &AttentionOptions) -> Self {
        Self {
            mask: options.mask.is_some(),
            documents: options.documents.is_some(),
        }
    }

    /// The mask and the documents, which are the last operands.
    fn split<'t>(&self, operands: &'t [Tensor]) -> (Option<&'t Tensor>, Option<[Tensor; 2]>) {
        let (mask, documents) = operands.split_at(usize::from(self.mask));
        let documents = match documents {
            [queries, keys] if self.documents => Some([queries.clone(), keys.clone()]),
            _ => None,
        };
        (mask.first(), documents)
    }

    /// Documents of fewer keys.
    fn first_keys(documents: [Tensor; 2], count: usize) -> Result<[Tensor; 2]> {
        let [queries, keys] = documents;
        Ok([queries, keys.narrow(1, 0, count)?])
    }
}

/// The checked sizes of a problem.
#[derive(Clone, Copy)]
struct Sizes {
    op: &'static str,
    batch: usize,
    heads: usize,
    key_heads: usize,
    s: usize,
    t: usize,
    d: usize,
    dv: usize,
    scale: f64,
}

impl Sizes {
    /// The results from operands that may lie on a mesh, by the fused kernel where there is one.
    #[track_caller]
    fn value(&self, inputs: &[&Tensor], options: &AttentionOptions) -> Result<Attention> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        if !plain(self.op, inputs)? {
            return self.sharded(q, k, v, options);
        }
        if self.can_fuse(q, k, v, options) {
            let call = self.call(q, k, v, options)?;
            let order = call.order;
            if let Some(mut made) = launch_fused(q.mesh(), call)? {
                let lse = made.remove(1);
                return Ok(Attention {
                    out: by_head(&made[0], order),
                    lse,
                });
            }
        }
        self.forward(q, k, v, options)
    }

    /// The gradients from operands that may lie on a mesh, by the fused kernel where there is one.
    #[track_caller]
    fn backward_value(
        &self,
        inputs: &[&Tensor],
        options: &AttentionOptions,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        let (forward, grad) = (
            &Attention {
                out: inputs[3].clone(),
                lse: inputs[4].clone(),
            },
            inputs[5],
        );
        if !plain(self.op, inputs)? {
            return self.sharded_backward(q, k, v, forward, grad, options);
        }
        if self.can_fuse(q, k, v, options) {
            let call = AttentionBackwardCall {
                forward: self.call(q, k, v, options)?,
                out: forward.out.view()?,
                lse: forward.lse.view()?,
                grad: grad.cast(q.dtype())?.view()?,
            };
            let order = call.forward.order;
            if let Some(made) = launch_fused(q.mesh(), call)? {
                return Ok(match &made[..] {
                    [dq, dk, dv] => (by_head(dq, order), by_head(dk, order), by_head(dv, order)),
                    _ => {
                        let all = by_head(&made[0], order);
                        let part =
                            |first, heads| all.with_layout(all.layout().slice(1, first, 1, heads));
                        let (heads, key_heads) = (self.heads, self.key_heads);
                        (
                            part(0, heads),
                            part(heads, key_heads),
                            part(heads + key_heads, key_heads),
                        )
                    }
                });
            }
        }
        self.backward(q, k, v, forward, grad, options)
    }

    /// Whether a fused kernel may be asked for: it takes no masks, no empty operands and no
    /// documents whose numbers may not fit in 32 bits.
    fn can_fuse(&self, q: &Tensor, k: &Tensor, v: &Tensor, options: &AttentionOptions) -> bool {
        let documents = options.documents.iter().flatten();
        options.mask.is_none()
            && [q, k, v].iter().all(|x| x.numel() > 0)
            && documents.into_iter().all(|d| d.dtype() != DType::I64)
    }

    /// The call of the fused kernel.
    fn call(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions,
    ) -> Result<AttentionCall> {
        let (q, k, v) = (q.view()?, k.view()?, v.view()?);
        let documents = match &options.documents {
            // Only equal ones matter: as `i32`, those of `u32` are still equal or not.
            Some([queries, keys]) => Some([
                queries.cast(DType::I32)?.view()?,
                keys.cast(DType::I32)?.view()?,
            ]),
            None => None,
        };
        Ok(AttentionCall {
            op: self.op,
            order: AttentionOrder::of(&q, &k, &v),
            q,
            k,
            v,
            scale: self.scale,
            causal: options.causal,
            documents,
        })
    }

    /// Query heads per key head.
    fn group(&self) -> usize {
        self.heads.checked_div(self.key_heads).unwrap_or(1)
    }

    /// The gradients of all operands of attention. What needs more than the kernel computes (a
    /// learned mask, a use of the log-sum-exp) goes step by step.
    #[track_caller]
    fn pull(
        &self,
        b: &Back<'_>,
        [q, k, v]: [&Tensor; 3],
        forward: &Attention,
        options: &AttentionOptions,
    ) -> Result<Pulled> {
        let grad = b.grad_of(0).map_or_else(
            || forward.out.zeros_like(),
            |g| settled(self.op, g, &forward.out, &[2, 3]),
        )?;
        let of_lse = b.grad_of(1);
        let mask = options
            .mask
            .as_ref()
            .filter(|mask| mask.requires_grad() && b.needs(3));
        if mask.is_none() && of_lse.is_none() {
            let (dq, dk, dv) = attention_backward(q, k, v, forward, &grad, options)?;
            return Ok(smallvec![Some(dq), Some(dk), Some(dv), None]);
        }
        let ((dq, dk, dv), of_mask) =
            self.gradients([q, k, v], forward, &grad, of_lse, options, mask)?;
        Ok(smallvec![Some(dq), Some(dk), Some(dv), of_mask])
    }
}
