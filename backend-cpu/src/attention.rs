//! Attention and its gradient, over tiles of query rows. Sums of weights are in `f64`; products are
//! those of `matmul`, with keys and values packed once for all tiles of a head.

mod backward;
mod documents;
mod rows;

pub(crate) use backward::attention_backward;

use crate::{
    element::Held,
    fastmath::Shifted,
    matmul::Matrix,
    memory::{Memory, stored},
    parallel,
    product::{Packed, whole},
    scalar::{self, Float},
    simd::{Kernel, dispatch, fused_or_not},
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Result,
    backend::{AttentionCall, AttentionOrder},
};
use documents::{Documents, Seen};
use rows::{Places, Rows, in_positions};
use std::ops::Range;

/// Scores that are held at a time by one thread.
const SCORES: usize = 1 << 17;

/// Query rows of the tallest tile.
const TALLEST: usize = 128;

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

    /// Query rows of a tile. A short one computes fewer scores that nobody sees.
    fn tile(&self) -> usize {
        let most = if self.causal && self.t <= 512 {
            TALLEST / 2
        } else {
            TALLEST
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

    /// The keys that a tile of queries has to do with, from one on with which products may begin.
    fn keys_of(&self, head: usize, queries: Range<usize>) -> Range<usize> {
        let end = self.visible(queries.end - 1);
        match &self.documents {
            Some(documents) => {
                let keys = documents.keys_of(self.batch(head), queries, end);
                whole(keys.start)..keys.end
            }
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

    /// The keys and the values that a query head sees.
    fn keys(&self, head: usize) -> Matrix<'_, T> {
        self.k.matrix(head / self.group, 0)
    }

    fn values(&self, head: usize) -> Matrix<'_, T> {
        self.v.matrix(head / self.group, 0)
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

/// Whether so many tasks are enough for all threads.
fn enough(tasks: usize) -> bool {
    tasks >= 4 * rayon::current_num_threads()
}

fn forward<T: Float>(call: &AttentionCall) -> Result<(Buffer, Buffer)> {
    let p = Problem::<T>::new(call)?;
    let by_position = call.order != AttentionOrder::Heads;
    // Tasks are texts with all their heads, whose results are neighbours. Where these are not enough,
    // they have one head each, or some tiles of it, and results are brought into order afterwards.
    let direct = by_position && enough(p.heads / p.q.heads);
    let together = if direct { p.q.heads } else { 1 };
    let parts = (8 * rayon::current_num_threads()).div_ceil(p.heads);
    let rows = match enough(p.heads) {
        true => p.s,
        false => p.s.div_ceil(parts).next_multiple_of(p.tile()),
    };
    let mut lse = Memory::elements::<T>(p.heads * p.s)?;
    let mut result = Ok(());
    let out = stored(call.q.dtype, p.heads * p.s * p.dv, |out: &mut [T]| {
        let size = together * p.dv;
        let texts = (out.chunks_mut(p.s * size)).zip(lse.typed_mut().chunks_mut(together * p.s));
        let tasks = texts.enumerate().flat_map(|(text, (out, lse))| {
            let heads = text * together..(text + 1) * together;
            (out.chunks_mut(rows * size)
                .zip(lse.chunks_mut(rows * together)))
            .enumerate()
            .map(move |(i, (out, lse))| (heads.clone(), i * rows, out, lse))
        });
        result = parallel::try_each(p.work(), tasks, |_, (heads, first, out, lse)| {
            let places = Places::by_position(0, together, p.dv);
            forward_heads(&p, heads, first, (out, places), lse)
        });
    })?;
    result?;
    let out = match by_position && !direct {
        true => in_positions(&[(out, &call.q)], call.q.dtype.size() * p.dv)?,
        false => out,
    };
    Ok((out.buffer(), lse.buffer()))
}

/// Some queries, from `first` on, of some heads.
fn forward_heads<T: Float>(
    p: &Problem<'_, T>,
    heads: Range<usize>,
    first: usize,
    (out, places): (&mut [T], Places),
    lse: &mut [T],
) -> Result<()> {
    let count = lse.len() / heads.len();
    let (end, tile) = (p.visible(first + count - 1), p.tile());
    let mut keys = Packed::new(p.d, end, count)?;
    let mut values = Packed::new(end, p.dv, count)?;
    let mut memory = Memory::elements::<T>(tile.min(count) * padded(end))?;
    for (j, (head, lse)) in heads.zip(lse.chunks_mut(count)).enumerate() {
        keys.pack(p.keys(head).t());
        values.pack(p.values(head));
        if head + 1 < p.heads {
            p.k.fetch((head + 1) / p.group, end);
            p.v.fetch((head + 1) / p.group, end);
            p.q.fetch(head + 1, p.s);
        }
        for (i, lse) in lse.chunks_mut(tile).enumerate() {
            let out = (&mut out[places.at(j, i * tile)..], places.row);
            let scores = memory.typed_mut();
            forward_tile(
                p,
                head,
                first + i * tile,
                [&keys, &values],
                scores,
                out,
                lse,
            )?;
        }
    }
    Ok(())
}

fn forward_tile<T: Float>(
    p: &Problem<'_, T>,
    head: usize,
    first: usize,
    [keys, values]: [&Packed<T>; 2],
    scores: &mut [T],
    (out, out_step): (&mut [T], usize),
    lse: &mut [T],
) -> Result<()> {
    let count = lse.len();
    let seen = p.keys_of(head, first..first + count);
    lse.fill(T::LOWEST);
    if seen.is_empty() {
        for row in out.chunks_mut(out_step).take(count) {
            row[..p.dv].fill(T::default());
        }
        return Ok(());
    }
    let (len, step) = (seen.len(), padded(seen.len()));
    let scores = &mut scores[..count * step];
    keys.product(
        (scores, step),
        count,
        p.q.matrix(head, first),
        p.keys(head).t(),
        (0..p.d, seen.clone()),
        false,
    )?;
    let mut factors = [T::default(); TALLEST];
    for (i, ((row, lse), factor)) in (scores.chunks_mut(step).zip(lse))
        .zip(&mut factors)
        .enumerate()
    {
        p.seen(head, first + i, &seen)
            .of([&mut row[..len]], |[row]| {
                let (top, sum) = dispatch(Weights(row, p.scale));
                *factor = T::narrow(1.0 / sum);
                *lse = T::narrow(top + sum.ln());
            });
    }
    values.product(
        (out, out_step),
        count,
        Matrix::dense(scores, step),
        p.values(head),
        (seen, 0..p.dv),
        false,
    )?;
    let factors = &factors[..count];
    dispatch(Scaled(out, out_step, p.dv, factors));
    Ok(())
}

/// Sums and products that are made side by side.
const LANES: usize = 16;

/// All lanes as one, by halves.
#[inline(always)]
fn joined<T: Copy>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = join(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of all lanes.
#[inline(always)]
fn total(lanes: [f64; LANES]) -> f64 {
    joined(lanes, |a, b| a + b)
}

/// Scores of a row become weights, of which the largest is one: the largest score, scaled, and the sum
/// of all weights.
struct Weights<'a, T>(&'a mut [T], f64);

impl<T: Float> Kernel for Weights<'_, T> {
    fused_or_not!((f64, f64));
}

impl<T: Float> Weights<'_, T> {
    #[inline(always)]
    fn body<const FUSED: bool>(self) -> (f64, f64) {
        let Weights(row, scale) = self;
        let (blocks, rest) = row.as_chunks_mut::<LANES>();
        // Scaling keeps the order of scores, or turns it.
        let top = if scale > 0.0 {
            largest(&*blocks, rest, |x| x).wide() * scale
        } else {
            largest(&*blocks, rest, |x| x.wide() * scale)
        };
        let by = Shifted::new(scale, top);
        let mut sums = [0.0; LANES];
        for block in blocks {
            for (x, sum) in block.iter_mut().zip(&mut sums) {
                *x = x.exp_shifted::<FUSED>(by);
                *sum += x.wide();
            }
        }
        for (x, sum) in rest.iter_mut().zip(&mut sums) {
            *x = x.exp_shifted::<FUSED>(by);
            *sum += x.wide();
        }
        (top, total(sums))
    }
}

/// The largest of what is made of a row; NaN if there is one.
#[inline(always)]
fn largest<T: Copy, U: Held>(blocks: &[[T; LANES]], rest: &[T], of: impl Fn(T) -> U) -> U {
    let mut tops = [U::LOWEST; LANES];
    for block in blocks {
        for (top, x) in tops.iter_mut().zip(block) {
            *top = scalar::max(*top, of(*x));
        }
    }
    for (top, x) in tops.iter_mut().zip(rest) {
        *top = scalar::max(*top, of(*x));
    }
    joined(tops, scalar::max)
}

/// Rows of so many elements, so far apart, each times its factor.
struct Scaled<'a, T>(&'a mut [T], usize, usize, &'a [T]);

impl<T: Float> Kernel for Scaled<'_, T> {
    type Out = ();
    #[inline(always)]
    fn run(self) {
        let Scaled(data, step, size, factors) = self;
        for (row, factor) in data.chunks_mut(step).zip(factors) {
            row[..size].iter_mut().for_each(|x| *x = *x * *factor);
        }
    }
}

#[cfg(test)]
mod tests;
