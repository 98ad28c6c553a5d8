//! Sums of columns: parts of cubes, and the launch that adds them.

use super::RowPlan;
use crate::{
    CubeBackend, Memory,
    intern::Interned,
    map::{Outputs, nth_of_width, store},
    program::bind,
    reg::Reg,
    words::F4,
};
use anymesh_kernel::{DType, Result};
use cubecl::prelude::*;

/// Chunks of columns that a cube of the second launch adds, and threads that share each.
const CHUNKS: u32 = 8;
const SHARE: u32 = 32;

/// Adds the sums of the rows of a cube in their order, and writes them as the cube's part. Called by
/// every thread of the cube.
#[cube]
pub(super) fn write_parts(
    parts: &mut Sequence<Box<[F4]>>,
    sums: &Array<F4>,
    length: usize,
    count: usize,
    #[comptime] plan: Interned<RowPlan>,
) {
    let width = comptime!(plan.width as usize);
    let lines = comptime!((plan.threads / plan.width) as usize);
    let lane = UNIT_POS as usize % width;
    let quarter = (length + 3usize) / 4usize;
    let mut shared = Shared::<[F4]>::new_slice(comptime!(if lines > 1 {
        plan.threads as usize
    } else {
        1usize
    }));
    #[unroll]
    for o in 0..comptime!(plan.column_outputs()) {
        #[unroll]
        for k in 0..comptime!(plan.chunks) {
            let mut sum = sums[comptime!(o * plan.chunks + k)];
            if comptime!(lines > 1) {
                shared[UNIT_POS as usize] = sum;
                sync_cube();
                #[unroll]
                for line in 1..lines {
                    sum += shared[line * width + lane];
                }
                sync_cube();
            }
            let chunk = lane + k * width;
            if UNIT_POS < comptime!(plan.width) && chunk < quarter && CUBE_POS < count {
                parts.index_mut(o)[CUBE_POS * quarter + chunk] = sum;
            }
        }
    }
}

#[cube]
#[allow(unused_variables)]
fn put(
    out: &mut Outputs,
    chunk: usize,
    value: F4,
    #[comptime] dtypes: Interned<Vec<DType>>,
    #[comptime] o: usize,
) {
    intrinsic!(|scope| {
        let raw = Reg::F(value).to_raw(scope, dtypes[o]);
        store(scope, out, nth_of_width(&dtypes, o), chunk, raw, dtypes[o])
    })
}

/// Adds parts `[count, quarter]` of each sum: some threads share a chunk of columns, each takes
/// every so many parts in order, and a tree adds theirs.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_parts(
    parts: &Sequence<Box<[F4]>>,
    out: &mut Outputs,
    quarter: usize,
    count: usize,
    #[comptime] dtypes: Interned<Vec<DType>>,
) {
    let chunk = CUBE_POS * comptime!(CHUNKS as usize) + (UNIT_POS % CHUNKS) as usize;
    let share = UNIT_POS / CHUNKS;
    let safe = min(chunk, quarter - 1usize);
    let mut shared = Shared::<[F4]>::new_slice(comptime!((CHUNKS * SHARE) as usize));
    let me = UNIT_POS as usize;
    #[unroll]
    for o in 0..comptime!(dtypes.len()) {
        let mut sum = F4::new(0.0f32);
        let mut part = share as usize;
        while part < count {
            sum += parts.index(o)[part * quarter + safe];
            part += comptime!(SHARE as usize);
        }
        let mut half = comptime!(SHARE / 2).runtime();
        while half > 0u32 {
            shared[me] = sum;
            sync_cube();
            if share < half {
                sum += shared[me + (half * CHUNKS) as usize];
            }
            sync_cube();
            half /= 2u32;
        }
        if share == 0u32 && chunk < quarter {
            put(out, chunk, sum, dtypes.clone(), o);
        }
    }
}

impl CubeBackend {
    /// The sums of columns from their parts.
    pub(super) fn add_column_parts(
        &self,
        parts: &[Memory],
        dtypes: &[DType],
        length: usize,
        count: usize,
    ) -> Result<Vec<Memory>> {
        let quarter = length.div_ceil(4);
        let outputs = (dtypes.iter())
            .map(|dtype| Ok((self.alloc(*dtype, length)?, *dtype)))
            .collect::<Result<Vec<_>>>()?;
        let list: Vec<_> = (parts.iter())
            .map(|part| (part.handle.clone(), part.bytes))
            .collect();
        // SAFETY: chunks past the end write nothing; the outputs are padded to whole chunks.
        unsafe {
            add_parts::launch_unchecked(
                &self.client,
                crate::cubes(quarter, CHUNKS),
                CubeDim::new_1d(CHUNKS * SHARE),
                if count * quarter * 4 < i32::MAX as usize {
                    AddressType::U32
                } else {
                    AddressType::U64
                },
                bind(&list, 16),
                Outputs::bound(&outputs),
                quarter,
                count,
                self.dtype_lists.intern(dtypes.to_vec()),
            );
        }
        Ok(outputs.into_iter().map(|(memory, _)| memory).collect())
    }
}
