//! Indexed reads and writes.

use crate::{
    copy::dense_bits,
    element::{Held, is_held_as_stored},
    grid::{Grid, dense},
    memory::{Memory, bytes_of, stored, typed, vector},
    parallel, scalar,
};
use anymesh_kernel::{
    Buffer, DType, Error, Kind, Layout, Result, View,
    backend::{CheckIndexCall, GatherCall, IndexAxis, MapInput, ScatterCall, ScatterOp},
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
        Self::of(op, &axis.indices, axis.len, axis.stride)
    }

    fn of(op: &'static str, view: &'a View, len: usize, stride: isize) -> Result<Self> {
        let bytes = bytes_of(&view.buffer)?;
        let indices = match view.dtype {
            DType::I32 => Indices::I32(typed(bytes)),
            DType::I64 => Indices::I64(typed(bytes)),
            DType::U32 => Indices::U32(typed(bytes)),
            dtype => {
                return Err(Error::DType {
                    op,
                    dtype,
                    expected: "i32, i64 or u32 indices",
                });
            }
        };
        Ok(Self {
            op,
            indices,
            len,
            stride,
        })
    }

    /// The offset that the index at `at` stands for.
    #[inline(always)]
    fn at(&self, at: isize) -> Result<isize> {
        let index = match self.indices {
            Indices::I32(indices) => i64::from(indices[at as usize]),
            Indices::I64(indices) => indices[at as usize],
            Indices::U32(indices) => i64::from(indices[at as usize]),
        };
        let resolved = if index < 0 {
            index.wrapping_add(self.len as i64)
        } else {
            index
        };
        if (0..self.len as i64).contains(&resolved) {
            Ok(resolved as isize * self.stride)
        } else {
            Err(Error::IndexOutOfRange {
                op: self.op,
                index,
                len: self.len,
            })
        }
    }
}

/// The backend's bounds check.
pub(crate) fn check(call: &CheckIndexCall) -> Result<()> {
    let offsets = Offsets::of(call.op, &call.indices, call.len, 0)?;
    let grid = Grid::of_views(call.indices.layout.shape.dims(), &[&call.indices])?;
    let step = grid.step(0);
    // There is nothing to write: the positions alone are shared out.
    let mut positions = vec![(); grid.len];
    parallel::try_chunks(
        &mut positions,
        parallel::CHUNK,
        grid.len,
        |task, positions| {
            let start = task * parallel::CHUNK;
            let mut result = Ok(());
            grid.runs_of(0, start..start + positions.len(), |at, _, len| {
                if result.is_ok() {
                    result =
                        (0..len as isize).try_for_each(|i| offsets.at(at + i * step).map(drop));
                }
            });
            result
        },
    )
}

/// The backend's gather kernel. Elements are moved as bits.
pub(crate) fn gather(call: &GatherCall) -> Result<Buffer> {
    match call.src.dtype.size() {
        1 => gather_bits::<u8>(call),
        2 => gather_bits::<u16>(call),
        4 => gather_bits::<u32>(call),
        _ => gather_bits::<u64>(call),
    }
}

fn gather_bits<T: Pod + Send + Sync>(call: &GatherCall) -> Result<Buffer> {
    let views: Vec<&View> = std::iter::once(&call.src)
        .chain(call.axes.iter().map(|axis| &axis.indices))
        .collect();
    let offsets = call
        .axes
        .iter()
        .map(|axis| Offsets::new(call.op, axis))
        .collect::<Result<Vec<_>>>()?;
    let grid = Grid::of_views(call.src.layout.shape.dims(), &views)?;
    let src: &[T] = typed(bytes_of(&call.src.buffer)?);
    let step = grid.step(0);
    let per_run = (1..=offsets.len()).all(|k| grid.step(k) == 0);
    let mut memory = Memory::elements::<T>(grid.len)?;
    parallel::try_chunks(
        memory.typed_mut::<T>(),
        parallel::CHUNK,
        grid.len,
        |task, out| {
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
                            _ => out.iter_mut().enumerate().for_each(|(i, out)| {
                                *out = src[(from + i as isize * step) as usize]
                            }),
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
        },
    )?;
    Ok(memory.buffer())
}

/// The backend's scatter kernel.
///
/// Numbers are held as their kind while a row collects its updates, in row-major order of the
/// indices, and are rounded once at the end: `acc = dst; acc op= update` for each, then one store.
pub(crate) fn scatter(call: &ScatterCall) -> Result<Buffer> {
    let rows = rows_of(call)?;
    macro_rules! number {
        ($t:ty, $add:expr, $mul:expr) => {
            match call.mode {
                ScatterOp::Set => return set(call, &rows),
                ScatterOp::Add => accumulate::<$t>(call, &rows, $add),
                ScatterOp::Mul => accumulate::<$t>(call, &rows, $mul),
                ScatterOp::Min => accumulate::<$t>(call, &rows, scalar::min),
                ScatterOp::Max => accumulate::<$t>(call, &rows, scalar::max),
            }
        };
    }
    match call.dst.dtype.kind() {
        Kind::F32 => number!(f32, |a, b| a + b, |a, b| a * b),
        Kind::F64 => number!(f64, |a, b| a + b, |a, b| a * b),
        Kind::I32 => number!(i32, i32::wrapping_add, i32::wrapping_mul),
        Kind::I64 => number!(i64, i64::wrapping_add, i64::wrapping_mul),
        Kind::U32 => number!(u32, u32::wrapping_add, u32::wrapping_mul),
        Kind::Bool => number!(u8, |a, b| a | b, |a, b| a & b),
    }
}

/// The destination row of every position, in row-major order.
fn rows_of(call: &ScatterCall) -> Result<Vec<usize>> {
    let views: Vec<MapInput> = call
        .axes
        .iter()
        .map(|axis| MapInput {
            view: axis.indices.clone(),
            window: None,
        })
        .collect();
    let offsets = call
        .axes
        .iter()
        .map(|axis| Offsets::new(call.op, axis))
        .collect::<Result<Vec<_>>>()?;
    let grid = Grid::new(
        call.shape.dims(),
        &views,
        std::slice::from_ref(&call.base),
        None,
    )?;
    let mut rows = vector::<isize>(grid.len)?;
    parallel::try_chunks(&mut rows, parallel::CHUNK, grid.len, |task, rows| {
        let range = task * parallel::CHUNK..task * parallel::CHUNK + rows.len();
        grid.form(0, range.clone(), rows, |v| v as isize);
        for (k, offsets) in offsets.iter().enumerate() {
            let mut result = Ok(());
            let step = grid.step(k);
            grid.runs_of(k, range.clone(), |at, position, len| {
                for (i, row) in rows[position..position + len].iter_mut().enumerate() {
                    match offsets.at(at + i as isize * step) {
                        Ok(offset) => *row += offset,
                        Err(error) if result.is_ok() => result = Err(error),
                        Err(_) => {}
                    }
                }
            });
            result?;
        }
        Ok(())
    })?;
    Ok(rows.into_iter().map(|row| row as usize).collect())
}

/// Cuts the destination into bands of rows. Every band looks through all updates in order and takes
/// its own, so that no two threads write one row and the order of the updates of a row is kept.
fn bands<T: Send>(
    call: &ScatterCall,
    rows: &[usize],
    out: &mut [T],
    apply: impl Fn(&mut [T], usize) + Sync,
) {
    let inner = call.inner;
    let small = rows.len() * inner < parallel::THRESHOLD;
    let count = if small {
        1
    } else {
        rayon::current_num_threads()
    };
    let band = call.rows.div_ceil(count);
    let work = |i: usize, out: &mut [T]| {
        let first = i * band;
        let here = first..first + out.len() / inner;
        for (position, row) in rows.iter().enumerate() {
            if here.contains(row) {
                apply(&mut out[(row - first) * inner..][..inner], position);
            }
        }
    };
    parallel::each(rows.len() * inner, out.chunks_mut(band * inner), work);
}

fn set(call: &ScatterCall, rows: &[usize]) -> Result<Buffer> {
    fn bits<T: Pod + Send + Sync>(call: &ScatterCall, rows: &[usize]) -> Result<Buffer> {
        let updates = dense_bits::<T>(&call.updates)?;
        let mut memory = Memory::copy_of(
            &bytes_of(&call.dst.buffer)?[..call.rows * call.inner * size_of::<T>()],
        )?;
        bands(call, rows, memory.typed_mut::<T>(), |row, position| {
            row.copy_from_slice(&updates[position * call.inner..][..call.inner])
        });
        Ok(memory.buffer())
    }
    match call.dst.dtype.size() {
        1 => bits::<u8>(call, rows),
        2 => bits::<u16>(call, rows),
        4 => bits::<u32>(call, rows),
        _ => bits::<u64>(call, rows),
    }
}

/// Combines updates with the rows they name. Where elements are widened meanwhile, only the rows
/// that are named are: the others keep their bytes.
fn accumulate<T: Held>(
    call: &ScatterCall,
    rows: &[usize],
    op: impl Fn(T, T) -> T + Sync,
) -> Result<Buffer> {
    if is_held_as_stored(call.dst.dtype) || rows.len() > call.rows / 2 {
        return combined(call, rows, op);
    }
    let mut named = rows.to_vec();
    named.sort_unstable();
    named.dedup();
    let bytes = call.inner * call.dst.dtype.size();
    let mut memory = Memory::copy_of(&bytes_of(&call.dst.buffer)?[..call.rows * bytes])?;
    let picked: Vec<u8> = named
        .iter()
        .flat_map(|row| &memory.bytes()[row * bytes..(row + 1) * bytes])
        .copied()
        .collect();
    let layout = Layout::contiguous([named.len(), call.inner].into());
    let dst = View {
        buffer: Memory::copy_of(&picked)?.buffer(),
        dtype: call.dst.dtype,
        layout,
    };
    let places: Vec<usize> = rows
        .iter()
        .map(|row| named.partition_point(|n| n < row))
        .collect();
    let out = combined(
        &ScatterCall {
            dst,
            rows: named.len(),
            ..call.clone()
        },
        &places,
        op,
    )?;
    for (row, new) in named.iter().zip(bytes_of(&out)?.chunks_exact(bytes)) {
        memory.bytes_mut()[row * bytes..(row + 1) * bytes].copy_from_slice(new);
    }
    Ok(memory.buffer())
}

/// Combines updates with rows, all of them held as `T`.
fn combined<T: Held>(
    call: &ScatterCall,
    rows: &[usize],
    op: impl Fn(T, T) -> T + Sync,
) -> Result<Buffer> {
    let (dst, updates) = (dense::<T>(&call.dst)?, dense::<T>(&call.updates)?);
    let out = stored(call.dst.dtype, call.rows * call.inner, |out: &mut [T]| {
        out.copy_from_slice(&dst[..call.rows * call.inner]);
        bands(call, rows, out, |row, position| {
            row.iter_mut()
                .zip(&updates[position * call.inner..])
                .for_each(|(value, update)| *value = op(*value, *update));
        });
    })?;
    Ok(out.buffer())
}

#[cfg(test)]
mod tests;
