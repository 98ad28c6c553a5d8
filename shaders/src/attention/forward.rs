//! The result and its log-sum-exps, with the softmax running along.

use super::{
    Bound, COLUMNS, Goal, How, LOWEST, PANEL, ROW_PITCH, ROWS, Sizes, THREADS, count,
    documents::{first_of, span},
    documents_of, exp, head, hopper, place, products, seen, share, sight, store, weigh, zeros,
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
    let mut panel = Shared::<[F4]>::new_slice(PANEL);
    let mut weights = Shared::<[F4]>::new_slice(comptime!(COLUMNS * ROW_PITCH));
    let unit = UNIT_POS as usize;
    let (x, y) = (unit % 8usize, unit / 8usize);
    let (heads, queries, keys, features) = (
        *numbers.index(0usize),
        *numbers.index(2usize),
        *numbers.index(3usize),
        *numbers.index(5usize),
    );
    let blocks = (queries + comptime!(ROWS - 1)) / ROWS;
    // The last queries see most keys, so their cubes start first. Surplus cubes of the grid repeat
    // an earlier one.
    let row = (blocks - 1usize - CUBE_POS % blocks) * ROWS;
    let line = CUBE_POS / blocks % *numbers.index(6usize);
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

    let sight = sight(count(row + y * 4usize), queries, keys, how.causal);
    let mut top = F4::new(LOWEST);
    let mut total = F4::new(0.0f32);
    let mut sums = zeros(comptime!(4 * how.groups));
    let mut end = seen(row + ROWS, queries, keys, how.causal);
    let mut column = 0usize;
    let documents = buffers.index(comptime!(how.documents.unwrap_or(0)));
    let mut own = U4::new(0u32);
    let mut of_keys = 0usize;
    if comptime!(how.documents.is_some()) {
        let of_queries = first_of(batch, queries, keys, true);
        of_keys = first_of(batch, queries, keys, false);
        own = documents_of(documents, of_queries, row + y * 4usize, queries);
        let span = span(documents, batch, row, queries, keys, true);
        column = span.first / COLUMNS * COLUMNS;
        end = min(end, span.end);
    }
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
        );
        let mut reached = F4::new(LOWEST);
        let mut theirs = U4::new(0u32);
        if comptime!(how.documents.is_some()) {
            theirs = documents_of(documents, of_keys, column + x * 4usize, keys);
        }
        #[unroll]
        for c in 0..4usize {
            let visible = U4::new((column + x * 4usize + c) as u32).less_than(&sight);
            scores[c] *= F4::new(scale);
            let mut score = select_many(visible, scores[c], F4::new(LOWEST));
            if comptime!(how.documents.is_some()) {
                let same = own.equal(&U4::new(theirs.extract(c)));
                score = select_many(same, score, F4::new(LOWEST));
            }
            reached = math::binary(reached, score, Binary::Max);
        }
        panel[unit] = reached;
        sync_cube();
        let mut new_top = top;
        #[unroll]
        for other in 0..8usize {
            new_top = math::binary(new_top, panel[y * 8usize + other], Binary::Max);
        }
        let shrink = exp(top - new_top, how.native);
        top = new_top;
        total *= shrink;
        #[unroll]
        for c in 0..4usize {
            let visible = U4::new((column + x * 4usize + c) as u32).less_than(&sight);
            let mut weight =
                select_many(visible, exp(scores[c] - top, how.native), F4::new(0.0f32));
            if comptime!(how.documents.is_some()) {
                let same = own.equal(&U4::new(theirs.extract(c)));
                weight = select_many(same, weight, F4::new(0.0f32));
            }
            total += weight;
            scores[c] = weight;
        }
        share(&mut weights, &scores);
        #[unroll]
        for r in 0..4usize {
            #[unroll]
            for g in 0..how.groups {
                let at = comptime!(r * how.groups + g);
                sums[at] *= F4::new(shrink.extract(r));
            }
        }
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
        column += COLUMNS;
    }
    // Each thread summed the weights of its own columns.
    panel[unit] = total;
    sync_cube();
    let mut total = F4::new(0.0f32);
    #[unroll]
    for other in 0..8usize {
        total += panel[y * 8usize + other];
    }
    let empty = total.equal(&F4::new(0.0f32));
    let divisor = select_many(empty, F4::new(1.0f32), total);
    #[unroll]
    for r in 0..4usize {
        #[unroll]
        for g in 0..how.groups {
            let at = comptime!(r * how.groups + g);
            sums[at] /= F4::new(divisor.extract(r));
        }
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
    let logs = select_many(
        empty,
        F4::new(nothing),
        top + math::unary(divisor, Unary::Log),
    );
    if x == 0usize {
        #[unroll]
        for r in 0..4usize {
            let at = row + y * 4usize + r;
            if at < queries {
                put::<u32, f32>(lse, line * queries + at, logs.extract(r), DType::F32);
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
            self.native,
        )?;
        let out = self.alloc(bound.how.stored, bound.elements)?;
        let lse = self.alloc(DType::F32, sizes.batch * sizes.heads * sizes.queries)?;
        if self.hopper && hopper::fits(call) {
            let how = hopper::How::new(Goal::Result, &bound.how, sizes.size, false);
            let pieces = sizes.queries.div_ceil(how.rows()) * sizes.batch * sizes.heads;
            let hardware = &self.client.properties().hardware;
            let processors = hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
            let cubes = how.launched(pieces, processors);
            // SAFETY: reads are clamped into the operands, whose rows are chunks of 16 bytes, and
            // writes guarded by the sizes of the result.
            unsafe {
                hopper::forward::forward::launch_unchecked(
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
