//! The gradients of attention.

use super::{
    LANES, Problem, enough, not_a_float, padded,
    rows::{Places, Rows, in_positions},
    total,
};
use crate::{
    fastmath::Shifted,
    grid::dense,
    matmul::{Matrix, gemm},
    memory::{Dense, Memory, stored},
    parallel,
    product::Packed,
    scalar::Float,
    simd::{Kernel, dispatch, fused_or_not},
};
use anymesh_kernel::{
    DType, Kind, Result, View,
    backend::{AttentionBackwardCall, AttentionCall, AttentionOrder, Buffers},
};
use gemm::Parallelism;
use smallvec::smallvec;

/// The backend's gradient of attention.
pub(crate) fn attention_backward(call: &AttentionBackwardCall) -> Result<Buffers> {
    match call.forward.q.dtype.kind() {
        Kind::F32 => backward::<f32>(call),
        Kind::F64 => backward::<f64>(call),
        _ => Err(not_a_float(call.forward.q.dtype)),
    }
}

/// What the forward pass left, and the gradient that comes in.
struct Saved<'a, T> {
    out: Rows<'a, T>,
    lse: Dense<'a, T>,
    grad: Rows<'a, T>,
}

fn backward<T: Float>(call: &AttentionBackwardCall) -> Result<Buffers> {
    let p = Problem::<T>::new(&call.forward)?;
    let saved = Saved {
        out: Rows::new(&call.out)?,
        lse: dense(&call.lse)?,
        grad: Rows::new(&call.grad)?,
    };
    let (q_size, k_size, v_size) = (p.group * p.s * p.d, p.t * p.d, p.t * p.dv);
    let key_heads = p.heads / p.group;
    // Tasks are key heads, or texts with all their heads.
    let direct = call.forward.order != AttentionOrder::Heads && enough(key_heads / p.k.heads);
    if direct && call.forward.order == AttentionOrder::Packed {
        return backward_packed(&p, &saved, call.forward.q.dtype);
    }
    let together = if direct { p.k.heads } else { 1 };
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
                            // A key head belongs to one task, which alone adds to its gradients,
                            // in the order of its query heads.
                            let parts = (dq.chunks_mut(together * q_size))
                                .zip(dk.chunks_mut(together * k_size))
                                .zip(dv.chunks_mut(together * v_size));
                            result = parallel::try_each(p.work(), parts, |i, ((dq, dk), dv)| {
                                (0..together).try_for_each(|head| {
                                    let places = gradient_places(&p, head, direct);
                                    let mut out = [&mut *dq, &mut *dk, &mut *dv];
                                    backward_head(&p, &saved, i * together + head, &mut out, places)
                                })
                            });
                        },
                    );
                },
            );
        },
    )?;
    result?;
    let AttentionCall { q, k, v, order, .. } = &call.forward;
    let made = [(dq, q), (dk?, k), (dv?, v)];
    let row = |of: &View| of.layout.shape[3] * of.dtype.size();
    Ok(match order {
        AttentionOrder::Heads => made.into_iter().map(|(m, _)| m.buffer()).collect(),
        AttentionOrder::Positions if direct => made.into_iter().map(|(m, _)| m.buffer()).collect(),
        AttentionOrder::Positions => made
            .into_iter()
            .map(|(m, of)| in_positions(&[(m, of)], row(of)).map(Memory::buffer))
            .collect::<Result<_>>()?,
        AttentionOrder::Packed => smallvec![in_positions(&made, row(q))?.buffer()],
    })
}

/// All gradients in one memory, where at each position the heads of queries, keys and values are
/// neighbours. Tasks are texts.
fn backward_packed<T: Float>(
    p: &Problem<'_, T>,
    saved: &Saved<'_, T>,
    dtype: DType,
) -> Result<Buffers> {
    let (hq, hk) = (p.q.heads, p.k.heads);
    let heads = hq + 2 * hk;
    let text = p.s * heads * p.d;
    let mut result = Ok(());
    let out = stored(dtype, p.heads / hq * text, |out: &mut [T]| {
        result = parallel::try_each(p.work(), out.chunks_mut(text), |i, out| {
            (0..hk).try_for_each(|head| {
                let places = [head * p.group, hq + head, hq + hk + head]
                    .map(|first| (0, Places::by_position(first, heads, p.d)));
                backward_head(p, saved, i * hk + head, &mut [&mut *out], places)
            })
        });
    })?;
    result?;
    Ok(smallvec![out.buffer()])
}

/// The products of two rows, added up.
#[inline(always)]
fn dot<T: Float>(a: &[T], b: &[T]) -> f64 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks(), b.as_chunks());
    for (a, b) in a.iter().zip(b) {
        let a: &[T; LANES] = a;
        let b: &[T; LANES] = b;
        for i in 0..LANES {
            sums[i] += a[i].wide() * b[i].wide();
        }
    }
    for ((a, b), sum) in a_rest.iter().zip(b_rest).zip(&mut sums) {
        *sum += a.wide() * b.wide();
    }
    total(sums)
}

/// Of a row: the softmax weights in place of the scores, and the gradients of the scores in place
/// of those of the weights.
struct WeightsAndGradients<'a, T> {
    weights: &'a mut [T],
    grads: &'a mut [T],
    scale: f64,
    lse: f64,
    /// The output, and its gradient.
    out: &'a [T],
    out_grad: &'a [T],
}

impl<T: Float> Kernel for WeightsAndGradients<'_, T> {
    fused_or_not!(());
}

impl<T: Float> WeightsAndGradients<'_, T> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) {
        let shared = T::narrow(dot(self.out, self.out_grad));
        let (by, scale) = (Shifted::new(self.scale, self.lse), T::narrow(self.scale));
        for (w, g) in self.weights.iter_mut().zip(self.grads) {
            let weight = w.exp_shifted::<FUSED>(by);
            *w = weight;
            *g = weight * (*g - shared) * scale;
        }
    }
}

/// Where the gradients of queries, keys and values go, each in a slice of its own: of one key head
/// alone, or of key head `head` among all of its text.
fn gradient_places<T>(p: &Problem<'_, T>, head: usize, among_all: bool) -> [(usize, Places); 3] {
    if !among_all {
        return [(0, p.s, p.d), (1, p.t, p.d), (2, p.t, p.dv)]
            .map(|(i, rows, size)| (i, Places::by_head(rows, size)));
    }
    let (group, heads) = (p.group, p.k.heads);
    [
        (0, Places::by_position(head * group, heads * group, p.d)),
        (1, Places::by_position(head, heads, p.d)),
        (2, Places::by_position(head, heads, p.dv)),
    ]
}

/// The gradients of a key head and of the query heads that read it: of queries, keys and values, each
/// in one of the slices and at these places there.
fn backward_head<T: Float>(
    p: &Problem<'_, T>,
    saved: &Saved<'_, T>,
    key_head: usize,
    out: &mut [&mut [T]],
    [(dq, dq_at), (dk, dk_at), (dv, dv_at)]: [(usize, Places); 3],
) -> Result<()> {
    let tile = p.tile();
    let all = p.group * p.s;
    let mut keys_turned = Packed::new(p.d, p.t, all)?;
    let mut values_turned = Packed::new(p.dv, p.t, all)?;
    let mut keys = Packed::new(p.t, p.d, all)?;
    let first_head = key_head * p.group;
    keys_turned.pack(p.keys(first_head).t());
    values_turned.pack(p.values(first_head).t());
    keys.pack(p.keys(first_head));
    let mut memory = [
        Memory::elements::<T>(tile * padded(p.t))?,
        Memory::elements::<T>(tile * padded(p.t))?,
    ];
    let [weights, grads] = memory.each_mut().map(|memory| memory.typed_mut::<T>());
    // Whether gradients of keys and values have something to be added to. The last queries come first,
    // because they see all keys if there are no documents.
    let mut begun = false;
    for head in first_head..first_head + p.group {
        for first in (0..p.s).step_by(tile).rev() {
            let count = tile.min(p.s - first);
            let seen = p.keys_of(head, first..first + count);
            let dq_first = dq_at.at(head - first_head, first);
            if !begun && seen != (0..p.t) {
                for i in 0..p.t {
                    out[dk][dk_at.at(0, i)..][..p.d].fill(T::default());
                    out[dv][dv_at.at(0, i)..][..p.dv].fill(T::default());
                }
                begun = true;
            }
            if seen.is_empty() {
                for row in out[dq][dq_first..].chunks_mut(dq_at.row).take(count) {
                    row[..p.d].fill(T::default());
                }
                continue;
            }
            let (q, grad) = (p.q.matrix(head, first), saved.grad.matrix(head, first));
            let (from, len) = (seen.start, seen.len());
            let step = padded(len);
            let (weights, grads) = (&mut weights[..count * step], &mut grads[..count * step]);
            let of = (0..p.d, seen.clone());
            keys_turned.product((weights, step), count, q, p.keys(head).t(), of, false)?;
            let of = (0..p.dv, seen.clone());
            values_turned.product((grads, step), count, grad, p.values(head).t(), of, false)?;
            for (i, (weights, grads)) in weights
                .chunks_mut(step)
                .zip(grads.chunks_mut(step))
                .enumerate()
            {
                let row = first + i;
                let rows = [&mut weights[..len], &mut grads[..len]];
                p.seen(head, row, &seen).of(rows, |[weights, grads]| {
                    dispatch(WeightsAndGradients {
                        weights,
                        grads,
                        scale: p.scale,
                        lse: saved.lse[head * p.s + row].wide(),
                        out: saved.out.row(head, row),
                        out_grad: saved.grad.row(head, row),
                    });
                });
            }
            let (weights, grads) = (Matrix::dense(&*weights, step), Matrix::dense(&*grads, step));
            gemm(
                (&mut out[dv][dv_at.at(0, from)..], dv_at.row),
                [len, p.dv, count],
                weights.t(),
                grad,
                begun,
                Parallelism::None,
            )?;
            gemm(
                (&mut out[dk][dk_at.at(0, from)..], dk_at.row),
                [len, p.d, count],
                grads.t(),
                q,
                begun,
                Parallelism::None,
            )?;
            begun = true;
            let to = (&mut out[dq][dq_first..], dq_at.row);
            keys.product(to, count, grads, p.keys(head), (seen, 0..p.d), false)?;
        }
    }
    Ok(())
}
