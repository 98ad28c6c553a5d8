//! Attention and its gradient, over tiles of query rows. Softmax statistics are in `f64`; products
//! are those of `matmul`.

mod documents;

use crate::{
    element::is_held_as_stored,
    fold::lanes,
    grid::dense,
    matmul::{Matrix, gemm},
    memory::{Dense, Memory, bytes_of, stored, typed},
    parallel,
    scalar::{self, Float},
    simd::{Kernel, dispatch, fused_or_not, vectorized},
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Result, View,
    backend::{AttentionBackwardCall, AttentionCall, AttentionOrder, Buffers},
};
use documents::{Documents, Seen};
use gemm::Parallelism;
use smallvec::smallvec;
use std::ops::Range;

/// Scores that are held at a time by one thread.
const SCORES: usize = 1 << 17;

/// From one row of scores to the next: rows that are a power of two apart push each other out of
/// the cache.
fn padded(keys: usize) -> usize {
    keys.next_multiple_of(16) + 16
}

/// Some `[batch, heads, rows, columns]` of which each row is a slice.
struct Rows<'a, T> {
    data: Dense<'a, T>,
    start: usize,
    heads: usize,
    /// From one to the next of a batch, a head, a row.
    strides: [usize; 3],
    columns: usize,
}

impl<'a, T: Float> Rows<'a, T> {
    /// Read where they lie, unless rows are not slices there: heads next to each other in each
    /// position are the rule.
    fn new(view: &'a View) -> Result<Self> {
        let dims = view.layout.shape.dims();
        let (heads, rows, columns) = (dims[1], dims[2], dims[3]);
        let strides = &view.layout.strides;
        let in_place = is_held_as_stored(view.dtype)
            && (strides[3] == 1 && columns > 1)
            && strides[..3].iter().all(|s| *s > 0);
        if in_place {
            return Ok(Self {
                data: Dense::Borrowed(typed(bytes_of(&view.buffer)?)),
                start: view.layout.offset,
                heads,
                strides: [0, 1, 2].map(|d| strides[d].unsigned_abs()),
                columns,
            });
        }
        Ok(Self {
            data: dense(view)?,
            start: 0,
            heads,
            strides: [heads * rows * columns, rows * columns, columns],
            columns,
        })
    }

    /// Where a row begins; heads count through all batches.
    fn at(&self, head: usize, row: usize) -> usize {
        let [batch, own, down] = self.strides;
        self.start + head / self.heads * batch + head % self.heads * own + row * down
    }

    fn row(&self, head: usize, row: usize) -> &[T] {
        let at = self.at(head, row);
        &self.data[at..at + self.columns]
    }

    /// The rows of a head from `first` on.
    fn matrix(&self, head: usize, first: usize) -> Matrix<'_, T> {
        Matrix {
            data: &self.data,
            start: self.at(head, first),
            rows: self.strides[2] as isize,
            cols: 1,
        }
    }
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

/// Where rows of heads go: row `i` of head `j` begins at `start + j * head + i * row`.
#[derive(Clone, Copy)]
struct Places {
    start: usize,
    head: usize,
    row: usize,
}

impl Places {
    /// Rows of `size` elements of heads that lie one after the other.
    fn by_head(rows: usize, size: usize) -> Self {
        Self {
            start: 0,
            head: rows * size,
            row: size,
        }
    }

    /// Rows of `size` elements from head `first` of `heads` on, which are neighbours in every
    /// position.
    fn by_position(first: usize, heads: usize, size: usize) -> Self {
        Self {
            start: first * size,
            head: size,
            row: heads * size,
        }
    }

    fn at(&self, head: usize, row: usize) -> usize {
        self.start + head * self.head + row * self.row
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

/// What is made for the heads of these operands, `[batch, heads, length, size]` each, as
/// `[batch, length, all their heads, size]`; `row` is the bytes of one head at one position.
fn in_positions(parts: &[(Memory, &View)], row: usize) -> Result<Memory> {
    let shape = &parts[0].1.layout.shape;
    let (batch, length) = (shape[0], shape[2]);
    let heads: usize = parts.iter().map(|(_, of)| of.layout.shape[1]).sum();
    let mut out = Memory::new(batch * length * heads * row)?;
    let group = (parallel::CHUNK / (heads * row)).max(1);
    parallel::chunks(out.bytes_mut(), group * heads * row, |start, out| {
        for (i, out) in out.chunks_mut(heads * row).enumerate() {
            let (at, mut rows) = (start / (heads * row) + i, out.chunks_mut(row));
            for (part, of) in parts {
                let heads = of.layout.shape[1];
                for (head, to) in (0..heads).zip(rows.by_ref()) {
                    let from = ((at / length * heads + head) * length + at % length) * row;
                    to.copy_from_slice(&part.bytes()[from..from + row]);
                }
            }
        }
    });
    Ok(out)
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

#[cfg(test)]
mod tests;
