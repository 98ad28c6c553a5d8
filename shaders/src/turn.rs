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
    /// Whether elements of 16 bits move in pairs, a word at a time.
    pairs: bool,
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
        // Every line begins with a word and ends with one, wherever it is read or written.
        let even = |d: usize| shape[d] % 2 == 0;
        let whole = |(d, step): (usize, &isize)| d == read || step % 2 == 0;
        let pairs = size == 2
            && even(read)
            && even(last)
            && layout.offset % 2 == 0
            && strides.iter().enumerate().all(whole);
        let turn = Turn {
            batch,
            tile,
            pitch: tile + 4usize.div_ceil(size),
            pairs,
        };
        Some(Self {
            turn,
            cubes,
            numbers,
        })
    }
}

/// Where the tile of a cube lies.
#[derive(CubeType, Clone, Copy)]
struct Placed {
    /// Extents of the dimension that is read along, and of the one that is written along.
    read: usize,
    written: usize,
    /// From one line to the next.
    step_in: usize,
    step_out: usize,
    /// The first element of the tile's matrix, in the input and in the output.
    from: usize,
    to: usize,
    /// The first element of the tile, along what is read and along what is written.
    below: usize,
    right: usize,
}

#[cube]
impl Placed {
    fn of(numbers: &Sequence<usize>, #[comptime] turn: Interned<Turn>) -> Placed {
        let tile = comptime!(turn.tile);
        let (read, written) = (*numbers.index(0usize), *numbers.index(1usize));
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
        Placed {
            read,
            written,
            step_in: *numbers.index(2usize),
            step_out: *numbers.index(3usize),
            from,
            to,
            below,
            right,
        }
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
        let place = Placed::of(numbers, turn.clone());
        let (x, y) = (UNIT_POS as usize % tile, UNIT_POS as usize / tile);
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / CUBE as usize) {
            let line = y + k * lines;
            let (below, right) = (place.below + x, place.right + line);
            if below < place.read && right < place.written {
                turning[line * pitch + x] = input[place.from + below + right * place.step_in];
            }
        }
        sync_cube();
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / CUBE as usize) {
            let line = y + k * lines;
            let (below, right) = (place.below + line, place.right + x);
            if right < place.written && below < place.read {
                out[place.to + below * place.step_out + right] = turning[x * pitch + line];
            }
        }
    }
}

/// The same for elements of 16 bits in pairs: a thread takes two of two lines each, and what lies
/// below each other in them is what it hands on. Words lie in shared memory in an order in which no
/// two threads of a warp need the same bank.
#[cube(launch_unchecked, address_type = "dynamic")]
fn turn_pairs(
    input: &[u32],
    out: &mut [u32],
    numbers: &Sequence<usize>,
    cubes: usize,
    #[comptime] turn: Interned<Turn>,
) {
    if CUBE_POS < cubes {
        let words = comptime!(turn.tile / 2);
        let lines = comptime!(CUBE as usize / (turn.tile / 2));
        let mut turning = Shared::<[u32]>::new_slice(comptime!(turn.tile * turn.tile / 2));
        let place = Placed::of(numbers, turn.clone());
        let (x, y) = (UNIT_POS as usize % words, UNIT_POS as usize / words);
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / 4 / CUBE as usize) {
            let pair = y + k * lines;
            let (below, right) = (place.below + 2usize * x, place.right + 2usize * pair);
            if below < place.read && right < place.written {
                let at = place.from + below + right * place.step_in;
                let first = input[at / 2usize];
                let second = input[(at + place.step_in) / 2usize];
                let swizzled = pair ^ x;
                turning[2usize * x * words + swizzled] = (first & 0xffffu32) | (second << 16u32);
                turning[(2usize * x + 1usize) * words + swizzled] =
                    (first >> 16u32) | (second & 0xffff_0000u32);
            }
        }
        sync_cube();
        #[unroll]
        for k in 0..comptime!(turn.tile * turn.tile / 2 / CUBE as usize) {
            let line = y + k * lines;
            let (below, right) = (place.below + line, place.right + 2usize * x);
            if right < place.written && below < place.read {
                out[(place.to + below * place.step_out + right) / 2usize] =
                    turning[line * words + (x ^ (line / 2usize))];
            }
        }
    }
}

impl CubeBackend {
    /// A copy by tiles, of a call that is such a copy.
    pub(crate) fn run_turned(&self, call: &MapCall) -> Result<Option<Memory>> {
        let size = call.inputs.first().map_or(0, |i| i.view.dtype.size());
        let Some(turned) = Turned::of(call) else {
            return Ok(None);
        };
        // Shader languages have no small words.
        if size != 4 && !turned.turn.pairs && self.tickets.is_none() {
            return Ok(None);
        }
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
            2 if turned.turn.pairs => turn_pairs::launch_unchecked,
            2 => turn_kernel::launch_unchecked::<u16>,
            4 => turn_kernel::launch_unchecked::<u32>,
            _ => turn_kernel::launch_unchecked::<u64>,
        };
        let step = if turned.turn.pairs { 4 } else { size };
        // SAFETY: threads outside of the two dimensions neither read nor write, and the call's layout
        // lies within its buffer.
        unsafe {
            launch(
                &self.client,
                crate::cubes(turned.cubes, 1),
                CubeDim::new_1d(CUBE),
                address,
                crate::arg(input, step),
                crate::arg(&out, step),
                turned.numbers.into_iter().collect(),
                turned.cubes,
                self.turns.intern(turned.turn),
            );
        }
        Ok(Some(out))
    }
}
