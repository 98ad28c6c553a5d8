//! Indexed reads and writes.

use crate::{
    grid::Grid,
    memory::{Memory, bytes_of, typed},
    parallel,
};
use anymesh_core::{
    Buffer, DType, Error, Result, View,
    backend::{GatherCall, IndexAxis},
};
use bytemuck::Pod;

/// The memory of an index operand.
#[derive(Clone, Copy)]
enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
    U32(&'a [u32]),
}

/// An index operand with what is needed to turn its elements into offsets.
#[derive(Clone, Copy)]
struct Offsets<'a> {
    op: &'static str,
    indices: Indices<'a>,
    len: usize,
    stride: isize,
}

impl<'a> Offsets<'a> {
    fn new(op: &'static str, axis: &'a IndexAxis) -> Result<Self> {
        let bytes = bytes_of(&axis.indices.buffer)?;
        let indices = match axis.indices.dtype {
            DType::I32 => Indices::I32(typed(bytes)),
            DType::I64 => Indices::I64(typed(bytes)),
            DType::U32 => Indices::U32(typed(bytes)),
            dtype => return Err(Error::DType { op, dtype, expected: "i32, i64 or u32 indices" }),
        };
        Ok(Self { op, indices, len: axis.len, stride: axis.stride })
    }

    /// The offset that the index at `at` stands for.
    #[inline(always)]
    fn at(&self, at: isize) -> Result<isize> {
        let index = match self.indices {
            Indices::I32(indices) => i64::from(indices[at as usize]),
            Indices::I64(indices) => indices[at as usize],
            Indices::U32(indices) => i64::from(indices[at as usize]),
        };
        let resolved = if index < 0 { index.wrapping_add(self.len as i64) } else { index };
        if (0..self.len as i64).contains(&resolved) {
            Ok(resolved as isize * self.stride)
        } else {
            Err(Error::IndexOutOfRange { op: self.op, index, len: self.len })
        }
    }
}

/// The backend's gather kernel. Elements are moved as bits.
pub(crate) fn gather(call: &GatherCall<'_>) -> Result<Buffer> {
    match call.src.dtype.size() {
        1 => gather_bits::<u8>(call),
        2 => gather_bits::<u16>(call),
        4 => gather_bits::<u32>(call),
        _ => gather_bits::<u64>(call),
    }
}

fn gather_bits<T: Pod + Send + Sync>(call: &GatherCall<'_>) -> Result<Buffer> {
    let views: Vec<&View> = std::iter::once(call.src).chain(call.axes.iter().map(|axis| &axis.indices)).collect();
    let offsets = call.axes.iter().map(|axis| Offsets::new(call.op, axis)).collect::<Result<Vec<_>>>()?;
    let grid = Grid::of_views(call.src.layout.shape.dims(), &views)?;
    let src: &[T] = typed(bytes_of(&call.src.buffer)?);
    let step = grid.step(0);
    let per_run = (1..=offsets.len()).all(|k| grid.step(k) == 0);
    let mut memory = Memory::elements::<T>(grid.len)?;
    parallel::try_chunks(memory.typed_mut::<T>(), parallel::CHUNK, grid.len, |task, out| {
        let start = task * parallel::CHUNK;
        let mut result = Ok(());
        grid.runs_of_all(start..start + out.len(), |at, position, len| {
            let mut run = || {
                let out = &mut out[position..position + len];
                if per_run {
                    // The index does not change along the run: one lookup, one copy.
                    let mut from = at[0];
                    for (k, offsets) in offsets.iter().enumerate() {
                        from += offsets.at(at[k + 1])?;
                    }
                    match step {
                        1 => out.copy_from_slice(&src[from as usize..from as usize + len]),
                        _ => out.iter_mut().enumerate().for_each(|(i, out)| *out = src[(from + i as isize * step) as usize]),
                    }
                    return Ok(());
                }
                for (i, out) in out.iter_mut().enumerate() {
                    let mut from = at[0] + i as isize * step;
                    for (k, offsets) in offsets.iter().enumerate() {
                        from += offsets.at(at[k + 1] + i as isize * grid.step(k + 1))?;
                    }
                    *out = src[from as usize];
                }
                Ok(())
            };
            if result.is_ok() {
                result = run();
            }
        });
        result
    })?;
    Ok(memory.buffer())
}
