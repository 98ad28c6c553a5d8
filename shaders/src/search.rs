//! Binary search in sorted rows.

use crate::{CubeBackend, gather::address, map::CUBE, program::wrap, sort::key};
use anymesh_kernel::{Buffer, DType, Result, View, backend::SearchCall};
use cubecl::prelude::*;

/// A matrix in memory.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Matrix {
    offset: usize,
    row: usize,
    column: usize,
}

/// One thread for each query.
#[cube(launch_unchecked, address_type = "dynamic")]
fn search_kernel<K: Int>(
    sorted: &[u32],
    queries: &[u32],
    out: &mut [i32],
    sorted_at: Matrix,
    queries_at: Matrix,
    n: usize,
    m: usize,
    all: usize,
    #[comptime] dtype: DType,
    #[comptime] right: bool,
) {
    let query = ABSOLUTE_POS;
    if query < all {
        let row = query / m;
        let wanted = key::<K>(
            queries,
            queries_at.offset + row * queries_at.row + query % m * queries_at.column,
            dtype,
        );
        let first = sorted_at.offset + row * sorted_at.row;
        let mut low = 0usize;
        let mut high = n;
        while low < high {
            let middle = (low + high) / 2usize;
            let found = key::<K>(sorted, first + middle * sorted_at.column, dtype);
            let before = if comptime!(right) {
                found <= wanted
            } else {
                found < wanted
            };
            if before {
                low = middle + 1usize;
            } else {
                high = middle;
            }
        }
        out[query] = low as i32;
    }
}

impl CubeBackend {
    pub(crate) fn run_search(&self, call: &SearchCall) -> Result<Buffer> {
        match call.sorted.dtype.size() {
            8 => self.search_as::<u64>(call),
            _ => self.search_as::<u32>(call),
        }
    }

    fn search_as<K: Int>(&self, call: &SearchCall) -> Result<Buffer> {
        let dtype = call.sorted.dtype;
        // Searching a tensor for its own elements: a buffer is bound once.
        let queries = if call.queries.buffer.same(&call.sorted.buffer) {
            View {
                buffer: self.copy_as(&call.queries, dtype)?,
                dtype,
                layout: anymesh_kernel::Layout::contiguous(call.queries.layout.shape.clone()),
            }
        } else {
            call.queries.clone()
        };
        let (a, b) = (crate::memory(&call.sorted)?, crate::memory(&queries)?);
        let all = queries.layout.shape.numel();
        let address = address(all.max(a.bytes.max(b.bytes) / dtype.size().min(4)));
        let matrix = |view: &View| {
            let layout = &view.layout;
            MatrixLaunch::new(
                layout.offset,
                wrap(layout.strides[0] as i64, address),
                wrap(layout.strides[1] as i64, address),
            )
        };
        let out = self.alloc(DType::I32, all)?;
        // SAFETY: threads past the last query do nothing; the search stays inside its row.
        unsafe {
            search_kernel::launch_unchecked::<K>(
                &self.client,
                crate::cubes(all, CUBE),
                CubeDim::new_1d(CUBE),
                address,
                crate::arg(a, 4),
                crate::arg(b, 4),
                crate::arg(&out, 4),
                matrix(&call.sorted),
                matrix(&queries),
                call.sorted.layout.shape[1],
                queries.layout.shape[1],
                all,
                dtype,
                call.right,
            );
        }
        Ok(out.buffer())
    }
}
