//! What attention may be given.

use super::{Attention, AttentionOptions, Sizes};
use crate::{
    DType, Error, Result, Tensor,
    ops::{
        expr::{check_float, compute_type},
        same_device,
    },
};

/// An error unless these are numbers of documents in this shape.
pub(super) fn check_documents(
    op: &'static str,
    documents: &Tensor,
    shape: [usize; 2],
) -> Result<()> {
    if documents.dtype().is_float() {
        return Err(Error::DType {
            op,
            dtype: documents.dtype(),
            expected: "documents by number",
        });
    }
    if documents.dims() != shape {
        let detail = format!(
            "there is a document for each of {shape:?} positions, got {}",
            documents.shape()
        );
        return Err(Error::shape(op, [documents], detail));
    }
    Ok(())
}

impl Sizes {
    pub(super) fn check(
        op: &'static str,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Self> {
        check_float(op, &[q, k, v])?;
        same_device(op, &[q, k, v])?;
        if let Some(other) = [k, v].into_iter().find(|x| x.dtype() != q.dtype()) {
            return Err(Error::DType {
                op,
                dtype: other.dtype(),
                expected: "the dtype of the queries",
            });
        }
        let (&[batch, heads, s, d], &[kb, key_heads, t, kd], &[vb, vh, vt, dv]) =
            (q.dims(), k.dims(), v.dims())
        else {
            let detail = format!(
                "q, k and v are [batch, heads, length, size], got {}, {} and {}",
                q.shape(),
                k.shape(),
                v.shape()
            );
            return Err(Error::shape(op, [q, k, v], detail));
        };
        if (batch, d, kb, key_heads, t) != (kb, kd, vb, vh, vt) {
            let detail = format!(
                "q [b, hq, s, d], k [b, hk, t, d] and v [b, hk, t, dv] must agree, got {}, {} and {}",
                q.shape(),
                k.shape(),
                v.shape()
            );
            return Err(Error::shape(op, [q, k, v], detail));
        }
        if heads.checked_rem(key_heads).unwrap_or(heads) != 0 {
            return Err(Error::shape(
                op,
                [q, k, v],
                format!("{key_heads} key heads do not divide {heads} query heads"),
            ));
        }
        let scale = options.scale.unwrap_or(1.0 / (d.max(1) as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::argument(
                op,
                "scale",
                format!("the scale must be finite, got {scale}"),
            ));
        }
        if let Some(mask) = &options.mask {
            same_device(op, &[q, mask])?;
            if mask.dtype() != DType::Bool && !mask.dtype().is_float() {
                return Err(Error::DType {
                    op,
                    dtype: mask.dtype(),
                    expected: "a bool mask, or a float one that is added",
                });
            }
            let scores = crate::Shape::from([batch, heads, s, t]);
            if mask.shape().broadcast(op, &scores)? != scores {
                return Err(Error::shape(
                    op,
                    [q, k, v, mask],
                    format!("the mask {} does not broadcast to {scores}", mask.shape()),
                ));
            }
        }
        if let Some([queries, keys]) = &options.documents {
            same_device(op, &[q, queries, keys])?;
            check_documents(op, queries, [batch, s])?;
            check_documents(op, keys, [batch, t])?;
            if keys.dtype() != queries.dtype() {
                return Err(Error::DType {
                    op,
                    dtype: keys.dtype(),
                    expected: "the dtype of the documents of queries",
                });
            }
        }
        Ok(Self {
            op,
            batch,
            heads,
            key_heads,
            s,
            t,
            d,
            dv,
            scale,
        })
    }

    pub(super) fn check_backward(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        forward: &Attention,
        grad: &Tensor,
        options: &AttentionOptions,
    ) -> Result<Self> {
        let op = "attention_backward";
        let sizes = Self::check(op, q, k, v, options)?;
        let Attention { out, lse } = forward;
        check_float(op, &[grad])?;
        same_device(op, &[q, out, lse, grad])?;
        if let Some(other) = [(out, q.dtype()), (lse, compute_type([q]))]
            .iter()
            .find(|(x, dtype)| x.dtype() != *dtype)
        {
            return Err(Error::DType {
                op,
                dtype: other.0.dtype(),
                expected: "the dtypes that `attention` returned",
            });
        }
        let result = [sizes.batch, sizes.heads, sizes.s, sizes.dv];
        if out.dims() != result || grad.dims() != result || lse.dims() != &result[..3] {
            let detail = format!(
                "out and grad must be {result:?} and lse {:?}, got {}, {} and {}",
                &result[..3],
                out.shape(),
                grad.shape(),
                lse.shape()
            );
            return Err(Error::shape(op, [out, grad, lse], detail));
        }
        Ok(sizes)
    }
}
