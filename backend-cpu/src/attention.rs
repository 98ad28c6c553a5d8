//! Attention and its gradient, over tiles of query rows. Softmax statistics are in `f64`; products
//! are those of `matmul`.

mod backward;
mod documents;
mod rows;

pub(crate) use backward::attention_backward;

use crate::{
    fold::lanes,
    matmul::{Matrix, gemm},
    memory::{Memory, stored, typed},
    parallel,
    scalar::{self, Float},
    simd::{Kernel, dispatch, fused_or_not, vectorized},
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Result,
    backend::{AttentionCall, AttentionOrder},
};
use documents::{Documents, Seen};
use gemm::Parallelism;
use rows::{Rows, in_positions};
use std::ops::Range;

/// Scores that are held at a time by one thread.
const SCORES: usize = 1 << 17;

/// From one row of scores to the next: rows that are a power of two apart push each other out of
/// the cache.
fn padded(keys: usize) -> usize {
    keys.next_multiple_of(16) + 16
}

/// Operands and all sizes.
struct Problem<'a, T> {
    q: Rows<'a, T>,
    k: Rows<'a, T>,
    v: Rows<'a, T>,
    heads: usize,
    /// Query heads that share a key head.
    group: usize,
    s: usize,
    t: usize,
    d: usize,
    dv: usize,
    scale: f64,
    causal: bool,
    documents: Option<Documents<'a>>,
}

impl<'a, T: Float> Problem<'a, T> {
    fn new(call: &'a AttentionCall) -> Result<Self> {
        let (q, k, v) = (
            &call.q.layout.shape,
            &call.k.layout.shape,
            &call.v.layout.shape,
        );
        Ok(Self {
            q: Rows::new(&call.q)?,
            k: Rows::new(&call.k)?,
            v: Rows::new(&call.v)?,
            heads: q[0] * q[1],
            group: q[1] / k[1],
            s: q[2],
            t: k[2],
            d: q[3],
            dv: v[3],
            scale: call.scale,
            causal: call.causal,
            documents: Documents::new(call)?,
        })
    }

    /// Query rows of a tile. A short one computes fewer scores that nobody sees, a tall one packs
    /// keys less often.
    fn tile(&self) -> usize {
        let most = if self.causal && self.t <= 512 {
            64
        } else {
            128
        };
        (SCORES / self.t).clamp(1, self.s.min(most))
    }

    /// Multiplications of one of the products, which is what everything costs in elements.
    fn work(&self) -> usize {
        self.heads * self.s * self.t * self.d
    }

    /// How many keys query `i` sees.
    fn visible(&self, i: usize) -> usize {
        if self.causal {
            (i + 1 + self.t).saturating_sub(self.s).min(self.t)
        } else {
            self.t
        }
    }

    /// The batch of a query head.
    fn batch(&self, head: usize) -> usize {
        head / self.q.heads
    }

    /// The keys that a tile of queries has to do with.
    fn keys_of(&self, head: usize, queries: Range<usize>) -> Range<usize> {
        let end = self.visible(queries.end - 1);
        match &self.documents {
            Some(documents) => documents.keys_of(self.batch(head), queries, end),
            None => 0..end,
        }
    }

    /// Which of some keys query `i` sees.
    fn seen(&self, head: usize, i: usize, keys: &Range<usize>) -> Seen {
        let keys = keys.start..self.visible(i).clamp(keys.start, keys.end);
        match &self.documents {
            Some(documents) => documents.seen(self.batch(head), i, keys),
            None => Seen::Run(0..keys.len()),
        }
    }

    /// The keys and the values that a query head sees, from `first` on.
    fn keys(&self, head: usize, first: usize) -> Matrix<'_, T> {
        self.k.matrix(head / self.group, first)
    }

    fn values(&self, head: usize, first: usize) -> Matrix<'_, T> {
        self.v.matrix(head / self.group, first)
    }

    /// `q k^T` of a tile, for some keys.
    fn scores(
        &self,
        head: usize,
        first: usize,
        count: usize,
        keys: &Range<usize>,
        out: &mut [T],
    ) -> Result<()> {
        gemm(
            (out, padded(keys.len())),
            [count, keys.len(), self.d],
            self.q.matrix(head, first),
            self.keys(head, keys.start).t(),
            false,
            Parallelism::None,
        )
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

/// Whether tasks that have all heads of a part of a batch are enough for all threads. Where they are
/// not, tasks have one head each, and results are brought into another order afterwards.
fn enough(tasks: usize) -> bool {
    tasks >= 4 * rayon::current_num_threads()
}

fn forward<T: Float>(call: &AttentionCall) -> Result<(Buffer, Buffer)> {
    let p = Problem::<T>::new(call)?;
    let tiles = p.s.div_ceil(p.tile());
    let by_position = call.order != AttentionOrder::Heads;
    let direct = by_position && enough(p.heads / p.q.heads * tiles);
    let mut lse = Memory::elements::<T>(p.heads * p.s)?;
    let mut result = Ok(());
    let out = stored(call.q.dtype, p.heads * p.s * p.dv, |out: &mut [T]| {
        let lse = lse.typed_mut();
        result = if direct {
            forward_by_position(&p, out, lse)
        } else {
            forward_by_head(&p, out, lse)
        };
    })?;
    result?;
    let out = match by_position && !direct {
        true => in_positions(&[(out, &call.q)], call.q.dtype.size() * p.dv)?,
        false => out,
    };
    Ok((out.buffer(), lse.buffer()))
}

/// Tasks are tiles of one head.
fn forward_by_head<T: Float>(p: &Problem<'_, T>, out: &mut [T], lse: &mut [T]) -> Result<()> {
    let (tile, size) = (p.tile(), p.dv);
    let heads = out.chunks_mut(p.s * size).zip(lse.chunks_mut(p.s));
    let tiles = heads.enumerate().flat_map(|(head, (out, lse))| {
        (out.chunks_mut(tile * size).zip(lse.chunks_mut(tile)))
            .enumerate()
            .map(move |(i, (out, lse))| (head, i * tile, out, lse))
    });
    parallel::try_each(p.work(), tiles, |_, (head, first, out, lse)| {
        forward_tile(p, head, first, (out, size), lse)
    })
}

/// Tasks are tiles of all heads of a text, whose results are neighbours.
fn forward_by_position<T: Float>(p: &Problem<'_, T>, out: &mut [T], lse: &mut [T]) -> Result<()> {
    let (tile, heads) = (p.tile(), p.q.heads);
    let row = heads * p.dv;
    // In the order of tasks at first: of each tile one head after the other.
    let mut sums = Memory::elements::<T>(lse.len())?;
    let texts = (out.chunks_mut(p.s * row)).zip(sums.typed_mut::<T>().chunks_mut(heads * p.s));
    let tiles = texts.enumerate().flat_map(|(text, (out, sums))| {
        (out.chunks_mut(tile * row)
            .zip(sums.chunks_mut(tile * heads)))
        .enumerate()
        .map(move |(i, (out, sums))| (text, i * tile, out, sums))
    });
    parallel::try_each(p.work(), tiles, |_, (text, first, out, sums)| {
        let count = sums.len() / heads;
        for (head, sums) in sums.chunks_mut(count).enumerate() {
            let out = &mut out[head * p.dv..];
            forward_tile(p, text * heads + head, first, (out, row), sums)?;
        }
        Ok(())
    })?;
    let sums: &[T] = typed(sums.bytes());
    for (lse, sums) in lse.chunks_mut(heads * p.s).zip(sums.chunks(heads * p.s)) {
        for (i, sums) in sums.chunks(tile * heads).enumerate() {
            let count = sums.len() / heads;
            for (head, sums) in sums.chunks(count).enumerate() {
                lse[head * p.s + i * tile..][..count].copy_from_slice(sums);
            }
        }
    }
    Ok(())
}

/// `exp(x * scale - top)` in place, and their sum.
struct Exps<'a, T>(&'a mut [T], f64, f64);

impl<T: Float> Kernel for Exps<'_, T> {
    fused_or_not!(f64);
}

impl<T: Float> Exps<'_, T> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) -> f64 {
        let Exps(values, scale, top) = self;
        let mut sums = [0.0; LANES];
        let (blocks, rest) = values.as_chunks_mut::<LANES>();
        for block in blocks {
            for (x, sum) in block.iter_mut().zip(&mut sums) {
                *x = T::narrow(T::exp_wide::<FUSED>(x.wide() * scale - top));
                *sum += x.wide();
            }
        }
        for (x, sum) in rest.iter_mut().zip(&mut sums) {
            *x = T::narrow(T::exp_wide::<FUSED>(x.wide() * scale - top));
            *sum += x.wide();
        }
        total(sums)
    }
}

/// Sums and products that are made side by side.
const LANES: usize = 16;

/// The sum of all lanes.
#[inline(always)]
fn total(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest score of a row, scaled; NaN if there is one.
fn top<T: Float>(scores: &[T], scale: f64) -> f64 {
    if scale > 0.0 {
        // Scaling keeps the order, so that only the largest needs it.
        return lanes(scores, T::LOWEST, scalar::max, scalar::max).wide() * scale;
    }
    lanes(
        scores,
        f64::NEG_INFINITY,
        |top, x| scalar::max(top, x.wide() * scale),
        scalar::max,
    )
}

fn forward_tile<T: Float>(
    p: &Problem<'_, T>,
    head: usize,
    first: usize,
    (out, out_step): (&mut [T], usize),
    lse: &mut [T],
) -> Result<()> {
    let count = lse.len();
    let keys = p.keys_of(head, first..first + count);
    lse.fill(T::LOWEST);
    if keys.is_empty() {
        for row in out.chunks_mut(out_step).take(count) {
            row[..p.dv].fill(T::default());
        }
        return Ok(());
    }
    let step = padded(keys.len());
    let mut memory = Memory::elements::<T>(count * step)?;
    let scores: &mut [T] = memory.typed_mut();
    p.scores(head, first, count, &keys, scores)?;
    for (i, (row, lse)) in scores.chunks_mut(step).zip(lse).enumerate() {
        let seen = p.seen(head, first + i, &keys);
        seen.of([&mut row[..keys.len()]], |[seen]| {
            *lse = softened(seen, p.scale);
        });
    }
    gemm(
        (out, out_step),
        [count, p.dv, keys.len()],
        Matrix::dense(&*scores, step),
        p.values(head, keys.start),
        false,
        Parallelism::None,
    )
}

/// The weights of scores in their place, and the log-sum-exp.
fn softened<T: Float>(seen: &mut [T], scale: f64) -> T {
    let top = top(seen, scale);
    let sum = dispatch(Exps(&mut *seen, scale, top));
    let factor = 1.0 / sum;
    vectorized(|| {
        seen.iter_mut()
            .for_each(|x| *x = T::narrow(x.wide() * factor))
    });
    T::narrow(top + sum.ln())
}

#[cfg(test)]
mod tests;
