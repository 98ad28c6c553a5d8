//! Copies of which memory is read along one dimension and written along another: tiles that turn in
//! shared memory, so that both go along their runs.

use crate::{CubeBackend, Memory, intern::Interned};
use anymesh_kernel::{Dims, Result, Shape, backend::MapCall, layout::collapse};
use cubecl::prelude::*;

/// Threads of a cube.
const CUBE: u32 = 256;

/// Dimensions shorter than this are not worth a tile.
const LEAST: usize = 16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Turn {
    /// Dimensions beside the two that turn.
    batch: usize,
    /// Elements along a side of a tile.
    tile: usize,
    /// Elements from one line of it to the next, so that both ways use all banks of shared memory.
    pitch: usize,
}

/// A copy with tiles.
struct Turned {
    turn: Turn,
    cubes: usize,
    /// Extents of the dimension that is read along, and of the last one; the step of the input
    /// along the last one, the step of the output along the first; the offset; then extent, step of
    /// the input and step of the output of each other dimension, innermost first.
    numbers: Vec<usize>,
}

impl Turned {
    /// The copy that a call is, if it is one for tiles.
    fn of(call: &MapCall) -> Option<Self> {
        let [input] = &call.inputs[..] else {
            return None;
        };
        let [(reg, dtype)] = call.program.outputs[..] else {
            return None;
        };
        // Most calls run along memory as they are.
        let layout = &input.view.layout;
        if layout.strides.last() == Some(&1) && layout.shape.dims().last() != Some(&1) {
            return None;
        }
        let copies = input.window.is_none()
            && input.view.dtype == dtype
            && call.program.moved(dtype)[usize::from(reg)]
            && !call.program.computed().contains(&true);
        if !copies {
            return None;
        }
        let mut strides = [Dims::<isize>::from_slice(&input.view.layout.strides)];
        let shape: Shape = collapse(&call.shape, &mut strides);
        let strides = &strides[0];
        let last = shape.rank().checked_sub(1)?;
        if strides.iter().any(|s| *s < 0) || strides[last] == 1 || shape[last] < LEAST {
            return None;
        }
        let read = (0..last).find(|&d| strides[d] == 1 && shape[d] >= LEAST)?;
        let steps = |d: usize| shape.dims()[d + 1..].iter().product::<usize>();
        let size = dtype.size();
        let tile = if size < 4 { 64 } else { 32 };
        let mut numbers = vec![
            shape[read],
            shape[last],
            strides[last] as usize,
            steps(read),
            input.view.layout.offset,
        ];
        let mut cubes = shape[read].div_ceil(tile) * shape[last].div_ceil(tile);
        let others = (0..last).rev().filter(|&d| d != read);
        let mut batch = 0;
        for d in others {
            numbers.extend([shape[d], strides[d] as usize, steps(d)]);
            cubes *= shape[d];
            batch += 1;
        }
        let turn = Turn {
            batch,
            tile,
            pitch: tile + 4usize.div_ceil(size),
        };
        Some(Self {
            turn,
            cubes,
            numbers,
        })
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn turn_kernel<T: Numeric>(
    input: &[T],
    out: &mut [T],
    numbers: &Sequence<usize>,
    cubes: usize,
    #[comptime] turn: Interned<Turn>,
) {
    if CUBE_POS < cubes {
        let (tile, pitch) = comptime!((turn.tile, turn.pitch));
        let lines = comptime!(CUBE as usize / turn.tile);
        let mut turning = Shared::<[T]>::new_slice(comptime!(turn.tile * turn.pitch));
        let (read, written) = (*numbers.index(0usize), *numbers.index(1usize));
        let (step_in, step_out) = (*numbers.index(2usize), *numbers.index(3usize));
        let across = (written + comptime!(turn.tile - 1)) / tile;
        let down = (read + comptime!(turn.tile - 1)) / tile;
        let mut rest = CUBE_POS;
        let right = rest % across * tile;
        rest /= across;
        let below = rest % down * tile;
        rest /= down;
        let mut from = *numbers.index(4usize);
        let mut to = 0usize;
        #[unroll]
        for d in 0..turn.batch {
            let extent = *numbers.index(comptime!(5 + 3 * d));
            let at = rest % extent;
            rest /= extent;
            from += at * *numbers.index(comptime!(6 + 3 * d));
            to += at * *numbers.index(comptime!(7 + 3 * d));
        }
        let (x, y) = (UNIT_POS as usize % tile, UNIT_POS as usize / tile);
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / CUBE as usize) {
            let line = y + k * lines;
            if below + x < read && right + line < written {
                turning[line * pitch + x] = input[from + below + x + (right + line) * step_in];
            }
        }
        sync_cube();
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / CUBE as usize) {
            let line = y + k * lines;
            if right + x < written && below + line < read {
                out[to + (below + line) * step_out + right + x] = turning[x * pitch + line];
            }
        }
    }
}

impl CubeBackend {
    /// A copy by tiles, of a call that is such a copy.
    pub(crate) fn run_turned(&self, call: &MapCall) -> Result<Option<Memory>> {
        let size = call.inputs.first().map_or(0, |i| i.view.dtype.size());
        // Shader languages have no small words.
        if size != 4 && self.tickets.is_none() {
            return Ok(None);
        }
        let Some(turned) = Turned::of(call) else {
            return Ok(None);
        };
        let input = crate::memory(&call.inputs[0].view)?;
        let elements = call.shape.numel();
        let out = self.alloc(call.inputs[0].view.dtype, elements)?;
        let largest = (input.bytes / size).max(elements);
        let address = match largest < i32::MAX as usize {
            true => AddressType::U32,
            false => AddressType::U64,
        };
        let launch = match size {
            1 => turn_kernel::launch_unchecked::<u8>,
            2 => turn_kernel::launch_unchecked::<u16>,
            4 => turn_kernel::launch_unchecked::<u32>,
            _ => turn_kernel::launch_unchecked::<u64>,
        };
        // SAFETY: threads outside of the two dimensions neither read nor write, and the call's layout
        // lies within its buffer.
        unsafe {
            launch(
                &self.client,
                crate::cubes(turned.cubes, 1),
                CubeDim::new_1d(CUBE),
                address,
                crate::arg(input, size),
                crate::arg(&out, size),
                turned.numbers.into_iter().collect(),
                turned.cubes,
                self.turns.intern(turned.turn),
            );
        }
        Ok(Some(out))
    }
}
