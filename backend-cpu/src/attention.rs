//! Attention and its gradient, over tiles of query rows. Softmax statistics are in `f64`; products
//! are the `gemm` crate's.

use crate::{
    element::Held,
    fold::lanes,
    grid::dense,
    matmul::{Matrix, gemm},
    memory::{Memory, stored, vector},
    scalar::{self, Float},
    simd::vectorized,
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Result,
    backend::{AttentionBackwardCall, AttentionCall},
};
use gemm::Parallelism;
use rayon::prelude::*;
use std::borrow::Cow;

/// Scores that are held at a time by one thread.
const SCORES: usize = 1 << 17;

/// Operands in row-major order, and all sizes.
struct Problem<'a, T: Held> {
    q: Cow<'a, [T]>,
    k: Cow<'a, [T]>,
    v: Cow<'a, [T]>,
    heads: usize,
    /// Query heads that share a key head.
    group: usize,
    s: usize,
    t: usize,
    d: usize,
    dv: usize,
    scale: f64,
    causal: bool,
}

impl<'a, T: Float> Problem<'a, T> {
    fn new(call: &'a AttentionCall) -> Result<Self> {
        let (q, k, v) = (
            &call.q.layout.shape,
            &call.k.layout.shape,
            &call.v.layout.shape,
        );
        Ok(Self {
            q: dense(&call.q)?,
            k: dense(&call.k)?,
            v: dense(&call.v)?,
            heads: q[0] * q[1],
            group: q[1] / k[1],
            s: q[2],
            t: k[2],
            d: q[3],
            dv: v[3],
            scale: call.scale,
            causal: call.causal,
        })
    }

    /// Query rows of a tile.
    fn tile(&self) -> usize {
        (SCORES / self.t).clamp(1, self.s.min(128))
    }

    /// How many keys query `i` sees.
    fn visible(&self, i: usize) -> usize {
        if self.causal {
            (i + 1 + self.t).saturating_sub(self.s).min(self.t)
        } else {
            self.t
        }
    }

    /// Rows `first..first + count` of a head's queries.
    fn queries(&self, head: usize, first: usize) -> Matrix<'_, T> {
        Matrix {
            start: (head * self.s + first) * self.d,
            ..Matrix::dense(&self.q, self.d)
        }
    }

    /// Keys and values that a query head sees.
    fn keys(&self, head: usize) -> Matrix<'_, T> {
        Matrix {
            start: head / self.group * self.t * self.d,
            ..Matrix::dense(&self.k, self.d)
        }
    }

    fn values(&self, head: usize) -> Matrix<'_, T> {
        Matrix {
            start: head / self.group * self.t * self.dv,
            ..Matrix::dense(&self.v, self.dv)
        }
    }

    /// `q k^T` of a tile, for the first `keys` keys.
    fn scores(&self, head: usize, first: usize, count: usize, keys: usize, out: &mut [T]) {
        gemm(
            (&mut out[..count * keys], keys),
            [count, keys, self.d],
            self.queries(head, first),
            self.keys(head).t(),
            false,
            Parallelism::None,
        );
    }
}

/// The backend's attention kernel.
pub(crate) fn attention(call: &AttentionCall) -> Result<(Buffer, Buffer)> {
    match call.q.dtype.kind() {
        Kind::F32 => forward::<f32>(call),
        Kind::F64 => forward::<f64>(call),
        _ => Err(not_a_float(call.q.dtype)),
    }
}

fn not_a_float(dtype: DType) -> Error {
    Error::DType {
        op: "attention",
        dtype,
        expected: "a float",
    }
}

fn forward<T: Float>(call: &AttentionCall) -> Result<(Buffer, Buffer)> {
    let p = Problem::<T>::new(call)?;
    let tile = p.tile();
    let mut lse = Memory::elements::<T>(p.heads * p.s)?;
    let mut result = Ok(());
    let out = stored(call.q.dtype, p.heads * p.s * p.dv, |out: &mut [T]| {
        let heads = out
            .par_chunks_mut(p.s * p.dv)
            .zip(lse.typed_mut::<T>().par_chunks_mut(p.s))
            .enumerate();
        let tiles = heads.flat_map(|(head, (out, lse))| {
            out.par_chunks_mut(tile * p.dv)
                .zip(lse.par_chunks_mut(tile))
                .enumerate()
                .map(move |(i, (out, lse))| (head, i * tile, out, lse))
        });
        result =
            tiles.try_for_each(|(head, first, out, lse)| forward_tile(&p, head, first, out, lse));
    })?;
    result?;
    Ok((out.buffer(), lse.buffer()))
}

fn forward_tile<T: Float>(
    p: &Problem<'_, T>,
    head: usize,
    first: usize,
    out: &mut [T],
    lse: &mut [T],
) -> Result<()> {
    let count = lse.len();
    let keys = p.visible(first + count - 1);
    lse.fill(T::LOWEST);
    if keys == 0 {
        out.fill(T::default());
        return Ok(());
    }
    let mut scores = vector::<T>(count * keys)?;
    p.scores(head, first, count, keys, &mut scores);
    for (i, (row, lse)) in scores.chunks_mut(keys).zip(lse).enumerate() {
        let (seen, hidden) = row.split_at_mut(p.visible(first + i));
        hidden.fill(T::default());
        if seen.is_empty() {
            continue;
        }
        let top = lanes(
            seen,
            f64::NEG_INFINITY,
            |top, x| scalar::max(top, x.wide() * p.scale),
            scalar::max,
        );
        vectorized(|| {
            seen.iter_mut()
                .for_each(|x| *x = T::narrow(T::exp_wide(x.wide() * p.scale - top)))
        });
        let sum = lanes(seen, 0.0, |sum, x| sum + x.wide(), |a, b| a + b);
        vectorized(|| seen.iter_mut().for_each(|x| *x = T::narrow(x.wide() / sum)));
        *lse = T::narrow(top + sum.ln());
    }
    gemm(
        (out, p.dv),
        [count, p.dv, keys],
        Matrix::dense(&scores, keys),
        p.values(head),
        false,
        Parallelism::None,
    );
    Ok(())
}

/// The backend's gradient of attention.
pub(crate) fn attention_backward(call: &AttentionBackwardCall) -> Result<[Buffer; 3]> {
    match call.forward.q.dtype.kind() {
        Kind::F32 => backward::<f32>(call),
        Kind::F64 => backward::<f64>(call),
        _ => Err(not_a_float(call.forward.q.dtype)),
    }
}

/// What the forward pass left, and the gradient that comes in.
struct Saved<'a, T: Held> {
    out: Cow<'a, [T]>,
    lse: Cow<'a, [T]>,
    grad: Cow<'a, [T]>,
}

fn backward<T: Float>(call: &AttentionBackwardCall) -> Result<[Buffer; 3]> {
    let p = Problem::<T>::new(&call.forward)?;
    let saved = Saved {
        out: dense(&call.out)?,
        lse: dense(&call.lse)?,
        grad: dense(&call.grad)?,
    };
    let (q_size, k_size, v_size) = (p.group * p.s * p.d, p.t * p.d, p.t * p.dv);
    let key_heads = p.heads / p.group;
    let mut result = Ok(());
    let (mut dk, mut dv) = (
        Err(not_a_float(call.forward.k.dtype)),
        Err(not_a_float(call.forward.v.dtype)),
    );
    let dq = stored(
        call.forward.q.dtype,
        key_heads * q_size,
        |dq: &mut [T]| {
            dk = stored(
                call.forward.k.dtype,
                key_heads * k_size,
                |dk: &mut [T]| {
                    dv = stored(
                        call.forward.v.dtype,
                        key_heads * v_size,
                        |dv: &mut [T]| {
                            // One task per key head: it alone adds to its gradients, in the order
                            // of its query heads.
                            let parts = dq
                                .par_chunks_mut(q_size)
                                .zip(dk.par_chunks_mut(k_size))
                                .zip(dv.par_chunks_mut(v_size))
                                .enumerate();
                            result = parts.try_for_each(|(head, ((dq, dk), dv))| {
                                backward_head(&p, &saved, head, dq, dk, dv)
                            });
                        },
                    );
                },
            );
        },
    )?;
    result?;
    Ok([dq.buffer(), dk?.buffer(), dv?.buffer()])
}

fn backward_head<T: Float>(
    p: &Problem<'_, T>,
    saved: &Saved<'_, T>,
    key_head: usize,
    dq: &mut [T],
    dk: &mut [T],
    dv: &mut [T],
) -> Result<()> {
    let tile = p.tile();
    dk.fill(T::default());
    dv.fill(T::default());
    let (mut weights, mut grads) = (vector::<T>(tile * p.t)?, vector::<T>(tile * p.t)?);
    for (j, dq) in dq.chunks_mut(p.s * p.d).enumerate() {
        let head = key_head * p.group + j;
        for (first, dq) in (0..p.s).step_by(tile).zip(dq.chunks_mut(tile * p.d)) {
            let count = dq.len() / p.d;
            let keys = p.visible(first + count - 1);
            if keys == 0 {
                dq.fill(T::default());
                continue;
            }
            let grad = Matrix {
                start: (head * p.s + first) * p.dv,
                ..Matrix::dense(&saved.grad[..], p.dv)
            };
            let (weights, grads) = (&mut weights[..count * keys], &mut grads[..count * keys]);
            p.scores(head, first, count, keys, weights);
            gemm(
                (grads, keys),
                [count, keys, p.dv],
                grad,
                p.values(head).t(),
                false,
                Parallelism::None,
            );
            for (i, (weights, grads)) in weights
                .chunks_mut(keys)
                .zip(grads.chunks_mut(keys))
                .enumerate()
            {
                let row = head * p.s + first + i;
                let both = saved.out[row * p.dv..(row + 1) * p.dv]
                    .iter()
                    .zip(&saved.grad[row * p.dv..(row + 1) * p.dv]);
                let shared: f64 = both.map(|(o, g)| o.wide() * g.wide()).sum();
                let (seen, lse) = (p.visible(first + i), saved.lse[row].wide());
                vectorized(|| {
                    for (w, g) in weights[..seen].iter_mut().zip(&mut grads[..seen]) {
                        let weight = T::exp_wide(w.wide() * p.scale - lse);
                        *w = T::narrow(weight);
                        *g = T::narrow(weight * (g.wide() - shared) * p.scale);
                    }
                });
                weights[seen..].fill(T::default());
                grads[seen..].fill(T::default());
            }
            let (weights, grads) = (Matrix::dense(&*weights, keys), Matrix::dense(&*grads, keys));
            gemm(
                (&mut dv[..keys * p.dv], p.dv),
                [keys, p.dv, count],
                weights.t(),
                grad,
                true,
                Parallelism::None,
            );
            gemm(
                (&mut dk[..keys * p.d], p.d),
                [keys, p.d, count],
                grads.t(),
                p.queries(head, first),
                true,
                Parallelism::None,
            );
            gemm(
                (dq, p.d),
                [count, p.d, keys],
                grads,
                p.keys(head),
                false,
                Parallelism::None,
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, dense_view, random, read, values, views};
    use anymesh_kernel::View;

    struct Naive {
        out: Vec<f64>,
        lse: Vec<f64>,
    }

    fn naive(call: &AttentionCall, [q, k, v]: [&[f64]; 3]) -> Naive {
        let (qs, ks, dv) = (
            call.q.layout.shape.dims(),
            call.k.layout.shape.dims(),
            call.v.layout.shape[3],
        );
        let (s, t, d, group) = (qs[2], ks[2], qs[3], qs[1] / ks[1]);
        let mut result = Naive {
            out: vec![],
            lse: vec![],
        };
        for head in 0..qs[0] * qs[1] {
            for i in 0..s {
                let seen = if call.causal {
                    (i + 1 + t).saturating_sub(s).min(t)
                } else {
                    t
                };
                let score = |j: usize| {
                    call.scale
                        * (0..d)
                            .map(|e| q[(head * s + i) * d + e] * k[(head / group * t + j) * d + e])
                            .sum::<f64>()
                };
                let exps: Vec<f64> = (0..seen).map(|j| score(j).exp()).collect();
                let sum: f64 = exps.iter().sum();
                result.lse.push(sum.ln());
                for e in 0..dv {
                    let mix: f64 = exps
                        .iter()
                        .enumerate()
                        .map(|(j, w)| w / sum * v[(head / group * t + j) * dv + e])
                        .sum();
                    result.out.push(if seen == 0 { 0.0 } else { mix });
                }
            }
        }
        result
    }

    const SHAPES: [(usize, usize, usize, usize, usize, usize, usize); 5] = [
        (1, 1, 1, 3, 4, 2, 2),
        (2, 4, 2, 5, 5, 3, 4),
        (1, 3, 1, 6, 4, 5, 2),
        (1, 2, 2, 1, 7, 4, 4),
        (1, 1, 1, 150, 1000, 8, 8),
    ];

    #[test]
    fn attention_equals_its_definition() {
        for (b, hq, hk, s, t, d, dv) in SHAPES {
            for causal in [false, true] {
                for dtype in [DType::F64, DType::F32, DType::BF16] {
                    let (qs, ks, vs) = (
                        views(&[b, hq, s, d], dtype, 1, false),
                        views(&[b, hk, t, d], dtype, 2, false),
                        views(&[b, hk, t, dv], dtype, 3, false),
                    );
                    for i in 0..if s > 100 { 1 } else { 4 } {
                        let call = AttentionCall {
                            op: "test",
                            q: qs[i].clone(),
                            k: ks[(i + 1) % 4].clone(),
                            v: vs[(i + 2) % 4].clone(),
                            scale: 0.3,
                            causal,
                        };
                        let (out, lse) = attention(&call).expect("runs");
                        let expected = naive(
                            &call,
                            [&values(&call.q), &values(&call.k), &values(&call.v)],
                        );
                        let (tolerance, held) = match dtype {
                            DType::F64 => (1e-13, DType::F64),
                            DType::F32 => (1e-5, DType::F32),
                            _ => (8e-3, DType::F32),
                        };
                        assert_close(&read(&out, dtype), &expected.out, tolerance, "out");
                        assert_close(
                            &read(&lse, held),
                            &expected.lse,
                            tolerance.min(1e-5),
                            "log-sum-exp",
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_equal_differences() {
        for (b, hq, hk, s, t, d, dv) in SHAPES.into_iter().filter(|shape| shape.3 < 100) {
            for causal in [false, true] {
                let sizes = [[b, hq, s, d], [b, hk, t, d], [b, hk, t, dv]];
                let data: Vec<Vec<f64>> = sizes
                    .iter()
                    .zip(4..)
                    .map(|(shape, seed)| random(shape.iter().product(), seed, false))
                    .collect();
                let view = |i: usize| dense_view(&data[i], DType::F64, sizes[i]);
                let (q, k, v) = (view(0), view(1), view(2));
                let forward = AttentionCall {
                    op: "test",
                    q,
                    k,
                    v,
                    scale: 0.3,
                    causal,
                };
                let (out, lse) = attention(&forward).expect("runs");
                let wrap = |buffer, shape: Vec<usize>| View {
                    buffer,
                    dtype: DType::F64,
                    layout: anymesh_kernel::Layout::contiguous(shape.into()),
                };
                let (out, lse) = (wrap(out, vec![b, hq, s, dv]), wrap(lse, vec![b, hq, s]));
                let seeds = random(b * hq * s * dv, 9, false);
                let grad = dense_view(&seeds, DType::F64, [b, hq, s, dv]);
                let got = attention_backward(&AttentionBackwardCall {
                    forward: forward.clone(),
                    out,
                    lse,
                    grad,
                })
                .expect("runs");
                let loss = |data: &[Vec<f64>]| -> f64 {
                    naive(&forward, [&data[0], &data[1], &data[2]])
                        .out
                        .iter()
                        .zip(&seeds)
                        .map(|(o, g)| o * g)
                        .sum()
                };
                for i in 0..3 {
                    let step = 1e-5;
                    let expected: Vec<f64> = (0..data[i].len())
                        .map(|at| {
                            let mut moved = data.clone();
                            moved[i][at] += step;
                            let up = loss(&moved);
                            moved[i][at] -= 2.0 * step;
                            (up - loss(&moved)) / (2.0 * step)
                        })
                        .collect();
                    assert_close(
                        &read(&got[i], DType::F64),
                        &expected,
                        1e-7,
                        &format!("gradient {i} of {sizes:?}, causal {causal}"),
                    );
                }
            }
        }
    }
}
