//! The gradients of attention.

use super::{
    LANES, Problem, enough, not_a_float, padded,
    rows::{Places, Rows, in_positions},
    total,
};
use crate::{
    grid::dense,
    matmul::{Matrix, gemm},
    memory::{Dense, Memory, stored},
    parallel,
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
struct Dot<'a, T>(&'a [T], &'a [T]);

impl<T: Float> Kernel for Dot<'_, T> {
    type Out = f64;
    #[inline(always)]
    fn run(self) -> f64 {
        let mut sums = [0.0; LANES];
        let ((a, a_rest), (b, b_rest)) = (self.0.as_chunks(), self.1.as_chunks());
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
}

/// Of a row: the softmax weights in place of the scores, and the gradients of the scores in place
/// of those of the weights.
struct WeightsAndGradients<'a, T> {
    weights: &'a mut [T],
    grads: &'a mut [T],
    scale: f64,
    lse: f64,
    /// The output times its gradient.
    shared: f64,
}

impl<T: Float> Kernel for WeightsAndGradients<'_, T> {
    fused_or_not!(());
}

impl<T: Float> WeightsAndGradients<'_, T> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) {
        for (w, g) in self.weights.iter_mut().zip(self.grads) {
            let weight = T::exp_wide::<FUSED>(w.wide() * self.scale - self.lse);
            *w = T::narrow(weight);
            *g = T::narrow(weight * (g.wide() - self.shared) * self.scale);
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
    for i in 0..p.t {
        out[dk][dk_at.at(0, i)..][..p.d].fill(T::default());
        out[dv][dv_at.at(0, i)..][..p.dv].fill(T::default());
    }
    let mut memory = [
        Memory::elements::<T>(tile * padded(p.t))?,
        Memory::elements::<T>(tile * padded(p.t))?,
    ];
    let [weights, grads] = memory.each_mut().map(|memory| memory.typed_mut::<T>());
    for j in 0..p.group {
        let head = key_head * p.group + j;
        for first in (0..p.s).step_by(tile) {
            let count = tile.min(p.s - first);
            let keys = p.keys_of(head, first..first + count);
            let dq_first = dq_at.at(j, first);
            if keys.is_empty() {
                for row in out[dq][dq_first..].chunks_mut(dq_at.row).take(count) {
                    row[..p.d].fill(T::default());
                }
                continue;
            }
            let grad = saved.grad.matrix(head, first);
            let (from, len) = (keys.start, keys.len());
            let step = padded(len);
            let (weights, grads) = (&mut weights[..count * step], &mut grads[..count * step]);
            p.scores(head, first, count, &keys, weights)?;
            gemm(
                (&mut *grads, step),
                [count, len, p.dv],
                grad,
                p.values(head, from).t(),
                false,
                Parallelism::None,
            )?;
            for (i, (weights, grads)) in weights
                .chunks_mut(step)
                .zip(grads.chunks_mut(step))
                .enumerate()
            {
                let row = first + i;
                let (weights, grads) = (&mut weights[..len], &mut grads[..len]);
                let shared = dispatch(Dot(saved.out.row(head, row), saved.grad.row(head, row)));
                let seen = p.seen(head, row, &keys);
                seen.of([weights, grads], |[weights, grads]| {
                    dispatch(WeightsAndGradients {
                        weights,
                        grads,
                        scale: p.scale,
                        lse: saved.lse[head * p.s + row].wide(),
                        shared,
                    });
                });
            }
            let (weights, grads) = (Matrix::dense(&*weights, step), Matrix::dense(&*grads, step));
            gemm(
                (&mut out[dv][dv_at.at(0, from)..], dv_at.row),
                [len, p.dv, count],
                weights.t(),
                grad,
                true,
                Parallelism::None,
            )?;
            gemm(
                (&mut out[dk][dk_at.at(0, from)..], dk_at.row),
                [len, p.d, count],
                grads.t(),
                p.q.matrix(head, first),
                true,
                Parallelism::None,
            )?;
            gemm(
                (&mut out[dq][dq_first..], dq_at.row),
                [count, p.d, len],
                grads,
                p.keys(head, from),
                false,
                Parallelism::None,
            )?;
        }
    }
    Ok(())
}
