//! Dense copies of views. Elements are moved as bits; transposed views are read in tiles, because
//! walking down a column touches a new cache line for every element.

use crate::{
    memory::{Dense, Memory, bytes_of, typed},
    parallel,
};
use anymesh_kernel::{Dims, Layout, Result, View, backend::MapInput, layout};
use bytemuck::Pod;

/// Rows and columns of a tile.
const TILE: usize = 32;

/// A dense copy in fresh memory.
pub(crate) fn copy(view: &View) -> Result<Memory> {
    fn bits<T: Pod + Send + Sync>(view: &View) -> Result<Memory> {
        let mut memory = Memory::elements::<T>(view.layout.shape.numel())?;
        copy_into(view, memory.typed_mut::<T>())?;
        Ok(memory)
    }
    match view.dtype.size() {
        1 => bits::<u8>(view),
        2 => bits::<u16>(view),
        4 => bits::<u32>(view),
        _ => bits::<u64>(view),
    }
}

/// The elements in row-major order as bits of their size, borrowed where they already lie so.
pub(crate) fn dense_bits<T: Pod + Send + Sync>(view: &View) -> Result<Dense<'_, T>> {
    let len = view.layout.shape.numel();
    if view.layout.is_contiguous() {
        return Ok(Dense::Borrowed(
            &typed(bytes_of(&view.buffer)?)[view.layout.offset..view.layout.offset + len],
        ));
    }
    Ok(Dense::Copied(copy(view)?))
}

/// Operands with large transposed views replaced by dense copies; `None` where there are none.
/// Copying in tiles and reading the copy is faster than reading across the grain block by block.
pub(crate) fn straightened(inputs: &[MapInput]) -> Result<Option<Vec<MapInput>>> {
    let is_crooked = |input: &MapInput| {
        let layout = &input.view.layout;
        let last = layout.shape.rank().saturating_sub(1);
        let fast = |d: usize| layout.strides[d].unsigned_abs() == 1 && layout.shape[d] >= TILE / 4;
        layout.shape.numel() >= parallel::THRESHOLD
            && !layout.strides.contains(&0)
            && layout.strides[last].unsigned_abs() > 1
            && layout.shape[last] >= TILE / 4
            && (0..last).any(fast)
            && input.window.is_none()
    };
    if !inputs.iter().any(is_crooked) {
        return Ok(None);
    }
    let straight = inputs.iter().map(|input| {
        if !is_crooked(input) {
            return Ok(input.clone());
        }
        let layout = Layout::contiguous(input.view.layout.shape.clone());
        Ok(MapInput {
            view: View {
                buffer: copy(&input.view)?.buffer(),
                dtype: input.view.dtype,
                layout,
            },
            window: None,
        })
    });
    straight.collect::<Result<Vec<_>>>().map(Some)
}

fn copy_into<T: Pod + Send + Sync>(view: &View, out: &mut [T]) -> Result<()> {
    let data: &[T] = typed(bytes_of(&view.buffer)?);
    let mut strides = [view.layout.strides.clone()];
    let mut dims: Dims = layout::collapse(&view.layout.shape, &mut strides)
        .dims()
        .into();
    let [mut strides] = strides;
    if dims.is_empty() {
        dims.push(1);
        strides.push(1);
    }
    let space = Space {
        dims,
        strides,
        offset: view.layout.offset as isize,
    };
    // Bands of the outermost dimension, thick enough for whole tiles.
    let slab = out.len() / space.dims[0];
    let rows = parallel::CHUNK.div_ceil(slab).max(TILE);
    if out.len() < parallel::THRESHOLD {
        space.copy_band(0, data, out);
    } else {
        parallel::chunks(out, rows * slab, |start, out| {
            space.copy_band(start / slab, data, out)
        });
    }
    Ok(())
}

/// Merged dimensions of a view.
struct Space {
    dims: Dims<usize>,
    strides: Dims<isize>,
    offset: isize,
}

impl Space {
    /// Copies rows of the outermost dimension, from `first` on, into their place.
    fn copy_band<T: Copy>(&self, first: usize, data: &[T], out: &mut [T]) {
        let last = self.dims.len() - 1;
        let mut dims = self.dims.clone();
        dims[0] = out.len() / (self.dims[1..].iter().product::<usize>());
        // The dimension that is contiguous in memory; tiles lie between it and the innermost one.
        let fast = (0..last)
            .filter(|d| dims[*d] >= TILE / 4)
            .min_by_key(|d| self.strides[*d].unsigned_abs());
        let fast = fast.filter(|d| {
            self.strides[*d].unsigned_abs() < self.strides[last].unsigned_abs()
                && dims[last] >= TILE / 4
        });
        let (rows, row_step) = fast.map_or((1, 0), |d| (dims[d], self.strides[d]));
        let out_step = fast.map_or(0, |d| dims[d + 1..].iter().product());
        let (columns, column_step) = (dims[last], self.strides[last]);
        let others: Dims = (0..last).filter(|d| Some(*d) != fast).collect();
        let out_strides: Dims = (0..last).map(|d| dims[d + 1..].iter().product()).collect();
        let mut coords: Dims = Dims::from_elem(0, others.len());
        loop {
            let position = |steps: &dyn Fn(usize) -> isize| {
                others
                    .iter()
                    .zip(&coords)
                    .map(|(d, c)| *c as isize * steps(*d))
                    .sum::<isize>()
            };
            let from =
                self.offset + first as isize * self.strides[0] + position(&|d| self.strides[d]);
            let to = position(&|d| out_strides[d] as isize) as usize;
            plane(
                data,
                from,
                [row_step, column_step],
                &mut out[to..],
                out_step,
                [rows, columns],
            );
            let Some(next) = (0..others.len())
                .rev()
                .find(|i| coords[*i] + 1 < dims[others[*i]])
            else {
                return;
            };
            coords[next] += 1;
            coords[next + 1..].fill(0);
        }
    }
}

/// Copies a plane of `rows` by `columns`, tile by tile where it has several rows.
fn plane<T: Copy>(
    data: &[T],
    from: isize,
    [row_step, column_step]: [isize; 2],
    out: &mut [T],
    out_step: usize,
    [rows, columns]: [usize; 2],
) {
    if rows == 1 {
        let (first, out) = (from as usize, &mut out[..columns]);
        match column_step {
            0 => out.fill(data[first]),
            1 => out.copy_from_slice(&data[first..first + columns]),
            2.. => out
                .iter_mut()
                .zip(data[first..].iter().step_by(column_step as usize))
                .for_each(|(to, from)| *to = *from),
            _ => out
                .iter_mut()
                .zip(
                    data[..=first]
                        .iter()
                        .rev()
                        .step_by(column_step.unsigned_abs()),
                )
                .for_each(|(to, from)| *to = *from),
        }
        return;
    }
    for top in (0..rows).step_by(TILE) {
        for left in (0..columns).step_by(TILE) {
            for row in top..rows.min(top + TILE) {
                let start = from + row as isize * row_step + left as isize * column_step;
                let to = &mut out[row * out_step + left..row * out_step + columns.min(left + TILE)];
                to.iter_mut()
                    .enumerate()
                    .for_each(|(i, to)| *to = data[(start + i as isize * column_step) as usize]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{read, values, views};
    use anymesh_kernel::DType;

    #[test]
    fn copies_of_every_layout_hold_the_same_elements() {
        for shape in [
            vec![],
            vec![5],
            vec![40, 70],
            vec![3, 33, 50],
            vec![33, 2, 9, 20],
            vec![300, 290],
            vec![8, 100, 101],
        ] {
            for dtype in [DType::U8, DType::F16, DType::F32, DType::I64] {
                for view in views(&shape, dtype, 5, true) {
                    assert_eq!(
                        read(&copy(&view).expect("small").buffer(), dtype),
                        values(&view),
                        "{:?}",
                        view.layout
                    );
                }
            }
        }
    }
}
