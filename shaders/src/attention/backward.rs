//! The gradients for queries, keys and values, one launch each.

use super::{
    Bound, Goal, How, OUTPUTS, Sizes, THREADS, bring, count,
    documents::{columns_of, first_of},
    documents_of, exp, head, place, products, seen, share, sight, store, tensor, weigh, zeros,
};
use crate::{
    CubeBackend, Memory,
    program::bind,
    tile::address,
    words::{F4, U4},
};
use anymesh_kernel::{
    Buffer, DType, Result, View,
    backend::{
        AttentionBackwardCall, AttentionOrder, Buffers, MapCall, MapInput, ReduceCall, ReduceOp,
    },
    map::Builder,
};
use cubecl::{prelude::*, server::Handle};
use smallvec::{SmallVec, smallvec};

/// Four values of a vector of `len`, from `first` on.
#[cube]
fn four(values: &[u32], base: usize, first: usize, len: usize) -> F4 {
    let mut out = F4::empty();
    #[unroll]
    for l in 0..4usize {
        out.insert(
            l,
            f32::reinterpret(values[base + min(first + l, len - 1usize)]),
        );
    }
    out
}

/// Two buffers of as many words, one behind the other.
#[cube(launch_unchecked, address_type = "dynamic")]
fn join(first: &[u32], second: &[u32], out: &mut [u32], count: usize) {
    let at = ABSOLUTE_POS;
    if at < count {
        out[at] = first[at];
        out[count + at] = second[at];
    }
}

/// One of the three gradients, or those for keys and values together: then there is another output.
/// `stats` are the log-sum-exps of the queries, and for queries and keys `sum(grad * out)`: with
/// documents behind them in one buffer, as WebGPU binds only so many.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient(
    buffers: &Sequence<Box<[u32]>>,
    stats: &Sequence<Box<[u32]>>,
    out: &mut [u32],
    other_out: &mut Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    scale: f32,
    #[comptime] how: How,
) {
    let tile = comptime!(how.tile);
    let (tall, wide, block_rows, columns) =
        comptime!((tile.tall, tile.wide, tile.rows(), tile.columns()));
    let mut panel = Shared::<[F4]>::new_slice(comptime!(tile.panel()));
    let mut weights = Shared::<[F4]>::new_slice(comptime!(tile.weights()));
    let by_query = comptime!(how.goal == Goal::Query);
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 8usize, unit / 8usize);
    let (heads, group, queries, keys) = (
        *numbers.index(0usize),
        *numbers.index(1usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
    );
    let (rows, others) = if comptime!(by_query) {
        (queries, keys)
    } else {
        (keys, queries)
    };
    let blocks = (rows + comptime!(block_rows - 1)) / block_rows;
    // Late queries and early keys have most to do, so their cubes start first, those of all heads.
    // Surplus cubes of the grid repeat an earlier one.
    let lines = *numbers.index(6usize);
    let block = CUBE_POS / lines % blocks;
    let row = if comptime!(by_query) {
        (blocks - 1usize - block) * block_rows
    } else {
        block * block_rows
    };
    let line = CUBE_POS % lines;
    let own_heads = if comptime!(by_query) {
        heads
    } else {
        heads / group
    };
    let (batch, own_head) = (line / own_heads, line % own_heads);
    let key_head = if comptime!(by_query) {
        own_head / group
    } else {
        own_head
    };
    let k = head(numbers, batch, key_head, how.k.first, false, false);
    let v = head(numbers, batch, key_head, how.v.first, false, true);
    let (q_words, k_words) = (buffers.index(how.q.buffer), buffers.index(how.k.buffer));
    let (v_words, grad_words) = (buffers.index(how.v.buffer), buffers.index(how.grad.buffer));
    // A key's gradient gathers from all query heads that share it.
    let mut query_head = if comptime!(by_query) {
        own_head
    } else {
        own_head * group
    };
    let last_head = if comptime!(by_query) {
        own_head + 1usize
    } else {
        own_head * group + group
    };
    if comptime!(tile.held > 0) {
        let at = comptime!(tile.own_at(1));
        if comptime!(by_query) {
            let q = head(numbers, batch, query_head, how.q.first, true, false);
            let grad = head(numbers, batch, query_head, how.grad.first, true, true);
            bring(
                q_words,
                &q,
                row,
                0usize,
                &mut panel,
                0usize,
                block_rows,
                how.q.dtype,
                tile,
            );
            bring(
                grad_words,
                &grad,
                row,
                0usize,
                &mut panel,
                at,
                block_rows,
                how.grad.dtype,
                tile,
            );
        } else {
            bring(
                k_words,
                &k,
                row,
                0usize,
                &mut panel,
                0usize,
                block_rows,
                how.k.dtype,
                tile,
            );
            if comptime!(how.goal == Goal::Key) {
                bring(
                    v_words,
                    &v,
                    row,
                    0usize,
                    &mut panel,
                    at,
                    block_rows,
                    how.v.dtype,
                    tile,
                );
            }
        }
    }
    let mut end = if comptime!(by_query) {
        seen(row + block_rows, queries, keys, how.causal)
    } else {
        queries
    };
    // The first query that sees the first key of the block, down to a whole tile.
    let mut begin = if comptime!(!by_query && how.causal) {
        (max(row + queries, keys) - keys) / columns * columns
    } else {
        0usize.runtime()
    };
    let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
    let mut own_documents = Array::<U4>::new(tall);
    let mut their_documents = 0usize;
    if comptime!(how.documents.is_some()) {
        let at = first_of(batch, queries, keys, by_query);
        their_documents = first_of(batch, queries, keys, comptime!(!by_query));
        #[unroll]
        for i in 0..tall {
            let first = row + y * 4usize + comptime!(64 * i);
            own_documents[i] = documents_of(documents, at, first, rows);
        }
        let sizes = (queries, keys);
        let (first, last) = columns_of(documents, batch, row, sizes, block_rows, by_query);
        begin = max(begin, first / columns * columns);
        end = min(end, last);
    }
    let mut sums = zeros(comptime!(how.sums()));
    let mut value_sums = zeros(comptime!(if how.both { how.sums() } else { 1 }));
    while query_head < last_head {
        let q = head(numbers, batch, query_head, how.q.first, true, false);
        let grad = head(numbers, batch, query_head, how.grad.first, true, true);
        let base = (batch * heads + query_head) * queries;
        let mut column = begin;
        while column < end {
            let mut scores = if comptime!(by_query) {
                products(
                    q_words,
                    &q,
                    row,
                    k_words,
                    &k,
                    column,
                    &mut panel,
                    comptime!((how.q.dtype, how.k.dtype)),
                    0usize,
                    tile,
                )
            } else {
                products(
                    k_words,
                    &k,
                    row,
                    q_words,
                    &q,
                    column,
                    &mut panel,
                    comptime!((how.k.dtype, how.q.dtype)),
                    0usize,
                    tile,
                )
            };
            let mut rises = if comptime!(how.goal == Goal::Query) {
                products(
                    grad_words,
                    &grad,
                    row,
                    v_words,
                    &v,
                    column,
                    &mut panel,
                    comptime!((how.grad.dtype, how.v.dtype)),
                    1usize,
                    tile,
                )
            } else if comptime!(how.goal == Goal::Key) {
                products(
                    v_words,
                    &v,
                    row,
                    grad_words,
                    &grad,
                    column,
                    &mut panel,
                    comptime!((how.v.dtype, how.grad.dtype)),
                    1usize,
                    tile,
                )
            } else {
                zeros(1usize)
            };
            #[unroll]
            for i in 0..tall {
                #[unroll]
                for j in 0..wide {
                    let own = row + y * 4usize + comptime!(64 * i);
                    let other = column + x * 4usize + comptime!(32 * j);
                    let query = if comptime!(by_query) { own } else { other };
                    let lse = four(stats.index(0usize), base, query, queries);
                    let mut mean = F4::new(0.0f32);
                    if comptime!(how.goal != Goal::Value) {
                        let (second, from) = if comptime!(how.documents.is_some()) {
                            let lines = *numbers.index(6usize) / own_heads * heads;
                            (stats.index(0usize), base + lines * queries)
                        } else {
                            (stats.index(1usize), base)
                        };
                        mean = four(second, from, query, queries);
                    }
                    let mut theirs = U4::new(0u32);
                    if comptime!(how.documents.is_some()) {
                        theirs = documents_of(documents, their_documents, other, others);
                    }
                    #[unroll]
                    for c in 0..4usize {
                        let at = comptime!((i * wide + j) * 4 + c);
                        let crossing = U4::new((other + c) as u32);
                        let (lse, mean, visible) = if comptime!(by_query) {
                            (
                                lse,
                                mean,
                                crossing.less_than(&sight(count(own), queries, keys, how.causal)),
                            )
                        } else {
                            (
                                F4::new(lse.extract(c)),
                                F4::new(mean.extract(c)),
                                count(own).less_than(&sight(crossing, queries, keys, how.causal)),
                            )
                        };
                        let weight = exp(scores[at] * F4::new(scale) - lse, how.native);
                        let mut weight = select_many(visible, weight, F4::new(0.0f32));
                        if comptime!(how.documents.is_some()) {
                            let same = own_documents[i].equal(&U4::new(theirs.extract(c)));
                            weight = select_many(same, weight, F4::new(0.0f32));
                        }
                        if comptime!(how.goal != Goal::Value) {
                            rises[at] = weight * (rises[at] - mean) * F4::new(scale);
                        }
                        scores[at] = weight;
                    }
                }
            }
            if comptime!(how.goal == Goal::Value || how.both) {
                share(&mut weights, &scores, tile);
                sync_cube();
                let sums = if comptime!(how.both) {
                    &mut value_sums
                } else {
                    &mut sums
                };
                weigh(
                    &weights,
                    grad_words,
                    &grad,
                    column,
                    &mut panel,
                    sums,
                    how.grad.dtype,
                    how,
                );
            }
            if comptime!(how.goal != Goal::Value) {
                share(&mut weights, &rises, tile);
                sync_cube();
            }
            if comptime!(how.goal == Goal::Query) {
                weigh(
                    &weights,
                    k_words,
                    &k,
                    column,
                    &mut panel,
                    &mut sums,
                    how.k.dtype,
                    how,
                );
            } else if comptime!(how.goal == Goal::Key) {
                weigh(
                    &weights,
                    q_words,
                    &q,
                    column,
                    &mut panel,
                    &mut sums,
                    how.q.dtype,
                    how,
                );
            }
            column += columns;
        }
        query_head += 1usize;
    }
    let features = if comptime!(how.goal == Goal::Value) {
        *numbers.index(5usize)
    } else {
        *numbers.index(4usize)
    };
    let at = place(numbers, batch, own_head, 0usize);
    store(out, &sums, at, row, rows, features, how);
    if comptime!(how.both) {
        let at = place(numbers, batch, own_head, 1usize);
        let features = *numbers.index(5usize);
        if comptime!(how.apart) {
            store(
                other_out.index_mut(0usize),
                &value_sums,
                at,
                row,
                rows,
                features,
                how,
            );
        } else {
            store(out, &value_sums, at, row, rows, features, how);
        }
    }
}

impl CubeBackend {
    pub(crate) fn run_attention_backward(&self, call: &AttentionBackwardCall) -> Result<Buffers> {
        let forward = &call.forward;
        let lse = self.dense(&call.lse, DType::F32)?;
        let dtypes = [call.grad.dtype, call.out.dtype];
        let documents = self.documents(forward)?;
        let (goals, room) = ([Goal::Query, Goal::Key, Goal::Value], self.able().1);
        if let Some(hows) = tensor::how(forward, goals, self.cores, room)
            && dtypes == [forward.q.dtype; 2]
        {
            return self.tensor_gradients(call, hows, crate::memory(&lse)?, documents.as_ref());
        }
        let mean = self.mean_rise(call)?;
        let (lse, mean) = (crate::memory(&lse)?, mean.get::<Memory>()?);
        let joined = match documents {
            Some(_) => Some(self.joined(lse, mean, call.lse.layout.shape.numel())?),
            None => None,
        };
        let stats: SmallVec<[(Handle, usize); 2]> = match &joined {
            Some(both) => smallvec![(both.handle.clone(), both.bytes)],
            None => (&[lse, mean].map(|m| (m.handle.clone(), m.bytes))[..]).into(),
        };
        let goals = [
            (Goal::Query, &forward.q),
            (Goal::Key, &forward.k),
            (Goal::Value, &forward.v),
        ];
        let packed = forward.order == AttentionOrder::Packed;
        let mut made: SmallVec<[(Memory, DType, DType, usize); 3]> = smallvec![];
        for (goal, operand) in goals {
            let mut bound = Bound::new(
                forward,
                [&call.grad, &forward.q],
                goal,
                documents.as_ref(),
                operand.dtype,
                self.able(),
            )?;
            if goal == Goal::Value && made.len() == 3 {
                break;
            }
            bound.how.apart = !packed;
            // Where gradients share a buffer, all write to the first one's.
            let first = if packed { 0 } else { made.len() };
            let outputs = if bound.how.both && !packed { 2 } else { 1 };
            while made.len() < first + outputs {
                let out = self.alloc(bound.how.stored, bound.elements)?;
                made.push((out, bound.how.stored, operand.dtype, bound.elements));
            }
            let others = made[first + 1..].iter().map(|(out, ..)| crate::arg(out, 4));
            let stats = if goal == Goal::Value {
                &stats[..1]
            } else {
                &stats[..]
            };
            // SAFETY: reads are clamped into the operands, writes guarded by the sizes of the
            // result.
            unsafe {
                gradient::launch_unchecked(
                    &self.client,
                    bound.count.clone(),
                    CubeDim::new_1d(THREADS),
                    bound.address,
                    bound.inputs(),
                    bind(stats, 4),
                    crate::arg(&made[first].0, 4),
                    others.collect(),
                    bound.numbers(),
                    forward.scale as f32,
                    bound.how,
                );
            }
            if packed && bound.how.both {
                break;
            }
        }
        made.into_iter()
            .map(|(out, stored, dtype, elements)| self.convert(out, stored, dtype, elements))
            .collect()
    }

    /// Two buffers of `count` floats as one.
    fn joined(&self, first: &Memory, second: &Memory, count: usize) -> Result<Memory> {
        let both = self.alloc(DType::F32, 2 * count)?;
        // SAFETY: guarded by the count, which both have.
        unsafe {
            join::launch_unchecked(
                &self.client,
                crate::cubes(count, 256),
                CubeDim::new_1d(256),
                address(&[&both], DType::F32, &[]),
                crate::arg(first, 4),
                crate::arg(second, 4),
                crate::arg(&both, 4),
                count,
            );
        }
        Ok(both)
    }

    /// The gradients on tensor cores: that for queries, and those for keys and values in one launch, or
    /// in one each where heads are wide.
    fn tensor_gradients(
        &self,
        call: &AttentionBackwardCall,
        hows: [tensor::How; 3],
        lse: &Memory,
        documents: Option<&Memory>,
    ) -> Result<Buffers> {
        let (forward, dtype) = (&call.forward, call.forward.q.dtype);
        let sizes = Sizes::new(forward);
        let packed = forward.order == AttentionOrder::Packed;
        let chunked = |view: &View| match tensor::in_chunks(view) {
            true => Ok(view.clone()),
            false => self.dense(view, dtype),
        };
        let (grad, out) = (chunked(&call.grad)?, chunked(&call.out)?);
        // The launch for queries makes these for the others.
        let means = self.alloc(DType::F32, sizes.batch * sizes.heads * sizes.queries)?;
        let stats = [lse, &means].map(|m| (m.handle.clone(), m.bytes));
        let hardware = &self.client.properties().hardware;
        let processors = hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
        let mut outs: Vec<Memory> = vec![];
        for how in hows {
            let goal = how.goal();
            if outs.len() == 3 {
                break;
            }
            // Values are bound even where they are not read, so that places are the same.
            let laid = if goal == Goal::Value { Goal::Key } else { goal };
            let (read, able) = ([&grad, &out], self.able());
            let mut bound = Bound::new(forward, read, laid, documents, dtype, able)?;
            let how = how.placed(&bound.how, packed);
            if goal == Goal::Value {
                bound.numbers.drain(OUTPUTS..OUTPUTS + 4);
            }
            let first = if packed { 0 } else { outs.len() };
            while outs.len() < first + how.outputs() {
                outs.push(self.alloc(dtype, bound.elements)?);
            }
            let (rows, lines, _) = sizes.of(goal);
            let (others, stats) = if goal == Goal::Query {
                (vec![&means], &stats[..1])
            } else {
                (outs[first + 1..].iter().collect(), &stats[..])
            };
            let others = others.into_iter().map(|m| crate::arg(m, 4)).collect();
            let cubes = how.launched(rows.div_ceil(how.rows()) * lines, processors);
            // SAFETY: reads are clamped into the operands, whose rows are chunks of 16 bytes, and
            // writes guarded by the sizes of the result.
            unsafe {
                tensor::backward::gradient::launch_unchecked(
                    &self.client,
                    crate::cubes(cubes, 1),
                    CubeDim::new_1d(how.threads() as u32),
                    bound.address,
                    bound.inputs(),
                    bind(stats, 4),
                    crate::arg(&outs[first], 4),
                    others,
                    bound.numbers(),
                    forward.scale as f32,
                    how,
                );
            }
            if packed && how.gives_both() {
                break;
            }
        }
        Ok(outs.into_iter().map(Memory::buffer).collect())
    }

    /// `sum(grad * out)` of each query: the mean, under its weights, of what each key's value adds
    /// to the loss.
    fn mean_rise(&self, call: &AttentionBackwardCall) -> Result<Buffer> {
        let builder = Builder::new();
        let product = builder.load(call.grad.dtype) * builder.load(call.out.dtype);
        let inputs = [&call.grad, &call.out].map(|view| MapInput {
            view: view.clone(),
            window: None,
        });
        let map = MapCall {
            op: call.forward.op,
            program: builder.finish(&[(product, DType::F32)])?,
            shape: call.out.layout.shape.clone(),
            inputs: inputs.into(),
            indices: smallvec![],
            params: smallvec![],
            over: Default::default(),
        };
        self.run_reduce(&ReduceCall {
            map,
            axes: smallvec![3],
            mode: ReduceOp::Sum,
            scale: None,
            dtype: DType::F32,
        })
    }
}
