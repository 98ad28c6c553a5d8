//! The result and its log-sum-exps, with the softmax running along.

use super::{
    Bound, Goal, How, LOWEST, Sizes, THREADS, bring, count,
    documents::{columns_of, first_of},
    documents_of, exp, head, place, products, seen, share, sight, store, tensor, weigh, zeros,
};
use crate::{
    CubeBackend, math,
    tile::put,
    words::{F4, U4},
};
use anymesh_kernel::{
    Buffer, DType, Result,
    backend::AttentionCall,
    map::{Binary, Unary},
};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward(
    buffers: &Sequence<Box<[u32]>>,
    out: &mut [u32],
    lse: &mut [u32],
    numbers: &Sequence<usize>,
    scale: f32,
    nothing: f32,
    #[comptime] how: How,
) {
    let tile = comptime!(how.tile);
    let (tall, wide, rows, columns) =
        comptime!((tile.tall, tile.wide, tile.rows(), tile.columns()));
    let free = comptime!(tile.free_at());
    let mut panel = Shared::<[F4]>::new_slice(comptime!(tile.panel()));
    let mut weights = Shared::<[F4]>::new_slice(comptime!(tile.weights()));
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 8usize, unit / 8usize);
    let (heads, queries, keys, features) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(5usize),
    );
    let blocks = (queries + comptime!(rows - 1)) / rows;
    // The last queries see most keys, so their cubes start first, those of all heads. Surplus cubes of
    // the grid repeat an earlier one.
    let lines = *numbers.index(6usize);
    let row = (blocks - 1usize - CUBE_POS / lines % blocks) * rows;
    let line = CUBE_POS % lines;
    let (batch, query_head, key_head) = (
        line / heads,
        line % heads,
        line % heads / *numbers.index(1usize),
    );
    let q = head(numbers, batch, query_head, how.q.first, true, false);
    let k = head(numbers, batch, key_head, how.k.first, false, false);
    let v = head(numbers, batch, key_head, how.v.first, false, true);
    let (q_words, k_words, v_words) = (
        buffers.index(how.q.buffer),
        buffers.index(how.k.buffer),
        buffers.index(how.v.buffer),
    );
    if comptime!(tile.held > 0) {
        bring(
            q_words,
            &q,
            row,
            0usize,
            &mut panel,
            0usize,
            rows,
            how.q.dtype,
            tile,
        );
    }

    let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
    let mut sights = Array::<U4>::new(tall);
    let mut own = Array::<U4>::new(tall);
    let mut top = Array::<F4>::new(tall);
    let mut total = zeros(tall);
    let mut end = seen(row + rows, queries, keys, how.causal);
    let mut column = 0usize;
    let mut of_keys = 0usize;
    #[unroll]
    for i in 0..tall {
        let first = row + y * 4usize + comptime!(64 * i);
        sights[i] = sight(count(first), queries, keys, how.causal);
        top[i] = F4::new(LOWEST);
        if comptime!(how.documents.is_some()) {
            let of_queries = first_of(batch, queries, keys, true);
            own[i] = documents_of(documents, of_queries, first, queries);
        }
    }
    if comptime!(how.documents.is_some()) {
        of_keys = first_of(batch, queries, keys, false);
        let sizes = (queries, keys);
        let (first, last) = columns_of(documents, batch, row, sizes, rows, true);
        column = first / columns * columns;
        end = min(end, last);
    }
    let mut sums = zeros(comptime!(how.sums()));
    while column < end {
        let mut scores = products(
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
        );
        #[unroll]
        for i in 0..tall {
            let mut reached = F4::new(LOWEST);
            #[unroll]
            for j in 0..wide {
                let first = column + x * 4usize + comptime!(32 * j);
                let mut theirs = U4::new(0u32);
                if comptime!(how.documents.is_some()) {
                    theirs = documents_of(documents, of_keys, first, keys);
                }
                #[unroll]
                for c in 0..4usize {
                    let at = comptime!((i * wide + j) * 4 + c);
                    let visible = U4::new((first + c) as u32).less_than(&sights[i]);
                    let mut score =
                        select_many(visible, scores[at] * F4::new(scale), F4::new(LOWEST));
                    if comptime!(how.documents.is_some()) {
                        let same = own[i].equal(&U4::new(theirs.extract(c)));
                        score = select_many(same, score, F4::new(LOWEST));
                    }
                    scores[at] = score;
                    reached = math::binary(reached, score, Binary::Max);
                }
            }
            panel[free + unit * tall + i] = reached;
        }
        sync_cube();
        #[unroll]
        for i in 0..tall {
            let mut new_top = top[i];
            #[unroll]
            for other in 0..8usize {
                let reached = panel[free + (y * 8usize + other) * tall + i];
                new_top = math::binary(new_top, reached, Binary::Max);
            }
            let shrink = exp(top[i] - new_top, how.native);
            top[i] = new_top;
            total[i] *= shrink;
            // Of a query that has seen nothing all scores are the lowest, and weights are nothing.
            let blind = new_top.equal(&F4::new(LOWEST));
            let base = select_many(blind, F4::new(0.0f32), new_top);
            #[unroll]
            for c in 0..comptime!(4 * wide) {
                let at = comptime!(i * wide * 4 + c);
                let weight = exp(scores[at] - base, how.native);
                total[i] += weight;
                scores[at] = weight;
            }
            #[unroll]
            for r in 0..4usize {
                #[unroll]
                for g in 0..how.groups {
                    let at = comptime!((i * 4 + r) * how.groups + g);
                    sums[at] *= F4::new(shrink.extract(r));
                }
            }
        }
        share(&mut weights, &scores, tile);
        sync_cube();
        weigh(
            &weights,
            v_words,
            &v,
            column,
            &mut panel,
            &mut sums,
            how.v.dtype,
            how,
        );
        column += columns;
    }
    // Each thread summed the weights of its own columns.
    #[unroll]
    for i in 0..tall {
        panel[free + unit * tall + i] = total[i];
    }
    sync_cube();
    let mut logs = Array::<F4>::new(tall);
    #[unroll]
    for i in 0..tall {
        let mut total = F4::new(0.0f32);
        #[unroll]
        for other in 0..8usize {
            total += panel[free + (y * 8usize + other) * tall + i];
        }
        let empty = total.equal(&F4::new(0.0f32));
        let divisor = select_many(empty, F4::new(1.0f32), total);
        #[unroll]
        for r in 0..4usize {
            #[unroll]
            for g in 0..how.groups {
                let at = comptime!((i * 4 + r) * how.groups + g);
                sums[at] /= F4::new(divisor.extract(r));
            }
        }
        logs[i] = select_many(
            empty,
            F4::new(nothing),
            top[i] + math::unary(divisor, Unary::Log),
        );
    }
    store(
        out,
        &sums,
        place(numbers, batch, query_head, 0usize),
        row,
        queries,
        features,
        how,
    );
    if x == 0usize {
        #[unroll]
        for r in 0..comptime!(4 * tall) {
            let at = row + y * 4usize + comptime!(r / 4 * 64 + r % 4);
            if at < queries {
                let log = logs[comptime!(r / 4)].extract(comptime!(r % 4));
                put::<u32, f32>(lse, line * queries + at, log, DType::F32);
            }
        }
    }
}

impl CubeBackend {
    pub(crate) fn run_attention(&self, call: &AttentionCall) -> Result<[Buffer; 2]> {
        let sizes = Sizes::new(call);
        let documents = self.documents(call)?;
        let bound = Bound::new(
            call,
            [&call.q; 2],
            Goal::Result,
            documents.as_ref(),
            call.q.dtype,
            self.able(),
        )?;
        let out = self.alloc(bound.how.stored, bound.elements)?;
        let lse = self.alloc(DType::F32, sizes.batch * sizes.heads * sizes.queries)?;
        let room = self.able().1;
        if let Some([how]) = tensor::how(call, [Goal::Result], self.cores, room) {
            let how = how.placed(&bound.how, false);
            let pieces = sizes.queries.div_ceil(how.rows()) * sizes.batch * sizes.heads;
            let hardware = &self.client.properties().hardware;
            let processors = hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
            let cubes = how.launched(pieces, processors);
            // SAFETY: reads are clamped into the operands, whose rows are chunks of 16 bytes, and
            // writes guarded by the sizes of the result.
            unsafe {
                tensor::forward::forward::launch_unchecked(
                    &self.client,
                    crate::cubes(cubes, 1),
                    CubeDim::new_1d(how.threads() as u32),
                    bound.address,
                    bound.inputs(),
                    crate::arg(&out, 4),
                    crate::arg(&lse, 4),
                    bound.numbers(),
                    call.scale as f32,
                    f32::NEG_INFINITY,
                    how,
                );
            }
            return Ok([out.buffer(), lse.buffer()]);
        }
        // SAFETY: reads are clamped into the operands, writes guarded by the sizes of the result.
        unsafe {
            forward::launch_unchecked(
                &self.client,
                bound.count.clone(),
                CubeDim::new_1d(THREADS),
                bound.address,
                bound.inputs(),
                crate::arg(&out, 4),
                crate::arg(&lse, 4),
                bound.numbers(),
                call.scale as f32,
                f32::NEG_INFINITY,
                bound.how,
            );
        }
        Ok([
            self.convert(out, bound.how.stored, call.q.dtype, bound.elements)?,
            lse.buffer(),
        ])
    }
}
