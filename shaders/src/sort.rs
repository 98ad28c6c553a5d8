//! Stable argsort: tiles are sorted in shared memory, then merged pairwise until a row is one run.
//!
//! Elements are compared through unsigned keys of the same order. Each cube of a merge makes one
//! tile of the result; where its part begins in the two runs is found by a binary search beforehand
//! (the "merge path"), so that all cubes work alike whatever the data.

use crate::{
    CubeBackend, Memory,
    gather::address,
    map::CUBE,
    program::bind,
    words::{bits_at, wide_at},
};
use anymesh_kernel::{Buffer, DType, Result, backend::SortCall};
use cubecl::prelude::*;

/// Elements that a cube sorts or merges: four for each thread.
const TILE: usize = 4 * CUBE as usize;

/// Bits of an element of at most 32 bits as a number that orders the same: NaN largest, -0 equal to
/// 0.
#[cube]
fn narrow_key(bits: u32, #[comptime] dtype: DType) -> u32 {
    let top = comptime!(1u32 << (8 * dtype.size() as u32 - 1));
    if comptime!(dtype.is_float()) {
        let infinity = comptime!(match dtype {
            // No infinity: the largest number has all but the last bit set.
            DType::F8E4M3 => 0x7e,
            DType::F8E5M2 => 0x7c,
            DType::F16 => 0x7c00,
            DType::BF16 => 0x7f80,
            _ => 0x7f80_0000u32,
        });
        let magnitude = bits & comptime!(top - 1);
        let ordered = select(bits == magnitude, top + magnitude, top - magnitude);
        select(magnitude > infinity, 0xffff_ffffu32, ordered)
    } else if comptime!(dtype == DType::I32) {
        bits ^ top
    } else if comptime!(dtype == DType::Bool) {
        min(bits, 1u32)
    } else {
        bits
    }
}

/// The same for elements of 64 bits.
#[cube]
fn wide_key(bits: u64, #[comptime] dtype: DType) -> u64 {
    let top = 1u64 << 63u64;
    if comptime!(dtype == DType::F64) {
        let magnitude = bits & (top - 1u64);
        let ordered = select(bits == magnitude, top + magnitude, top - magnitude);
        select(
            magnitude > 0x7ff0_0000_0000_0000u64,
            u64::max_value(),
            ordered,
        )
    } else {
        bits ^ top
    }
}

/// The key of element `at`. `K` is `u64` for dtypes of 64 bits, else `u32`.
#[cube]
pub(crate) fn key<K: Int>(words: &[u32], at: usize, #[comptime] dtype: DType) -> K {
    if comptime!(dtype.size() == 8) {
        K::cast_from(wide_key(wide_at(words, at), dtype))
    } else {
        K::cast_from(narrow_key(bits_at(words, at, dtype.size()), dtype))
    }
}

/// What the first kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tiles {
    dtype: DType,
    descending: bool,
    /// Elements that are sorted together, a power of two; short rows share a cube.
    slots: u32,
    /// Whether anybody needs the keys afterwards.
    keep: bool,
}

/// Sorts pieces of `slots` elements by a bitonic network. Places break ties, which makes it stable.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sort_tiles<K: Int>(
    input: &[u32],
    keys: &mut Sequence<Box<[K]>>,
    places: &mut [u32],
    rows: usize,
    n: usize,
    tiles: usize,
    #[comptime] how: Tiles,
) {
    let slots = comptime!(how.slots as usize);
    let mut shared_keys = Shared::<[K]>::new_slice(TILE);
    let mut shared_places = Shared::<[u32]>::new_slice(TILE);
    #[unroll]
    for j in 0..4usize {
        let slot = UNIT_POS as usize + comptime!(j * CUBE as usize);
        let tile = CUBE_POS * comptime!(TILE / slots) + slot / slots;
        let (row, at) = (tile / tiles, tile % tiles * slots + slot % slots);
        let mut here = K::max_value();
        let mut place = 0xffff_ffffu32;
        if row < rows && at < n {
            here = key::<K>(input, row * n + at, how.dtype);
            if comptime!(how.descending) {
                here = K::max_value() - here;
            }
            place = at as u32;
        }
        shared_keys[slot] = here;
        shared_places[slot] = place;
    }
    sync_cube();
    let mut size = 2u32;
    while size <= how.slots {
        let mut stride = size / 2u32;
        while stride > 0u32 {
            #[unroll]
            for j in 0..2usize {
                let pair = UNIT_POS + comptime!(j as u32 * CUBE);
                let low = (pair / stride * (stride * 2u32) + pair % stride) as usize;
                let high = low + stride as usize;
                // Runs of `size` alternate in direction; the last one, of all slots, ascends.
                let ascending = (low as u32 % how.slots) & size == 0u32;
                let (a, b) = (shared_keys[low], shared_keys[high]);
                let (p, q) = (shared_places[low], shared_places[high]);
                let more = a > b || (a == b && p > q);
                // Spelled out: CUDA's dialect cannot compare bools.
                if (more && ascending) || (!more && !ascending) {
                    shared_keys[low] = b;
                    shared_keys[high] = a;
                    shared_places[low] = q;
                    shared_places[high] = p;
                }
            }
            sync_cube();
            stride /= 2u32;
        }
        size *= 2u32;
    }
    #[unroll]
    for j in 0..4usize {
        let slot = UNIT_POS as usize + comptime!(j * CUBE as usize);
        let tile = CUBE_POS * comptime!(TILE / slots) + slot / slots;
        let (row, at) = (tile / tiles, tile % tiles * slots + slot % slots);
        if row < rows && at < n {
            places[row * n + at] = shared_places[slot];
            if comptime!(how.keep) {
                keys.index_mut(0usize)[row * n + at] = shared_keys[slot];
            }
        }
    }
}

/// How many of the first `d` merged elements come from run `a`, which goes first among equals.
#[cube]
fn split<K: Int>(keys: &[K], a: usize, a_len: usize, b: usize, b_len: usize, d: usize) -> usize {
    let mut low = select(d > b_len, d - b_len, 0usize);
    let mut high = min(d, a_len);
    while low < high {
        let middle = (low + high) / 2usize;
        if keys[a + middle] <= keys[b + d - 1usize - middle] {
            low = middle + 1usize;
        } else {
            high = middle;
        }
    }
    low
}

/// Where a tile of the result lies: in the pair of runs that begins at `start` of its row.
#[derive(CubeType)]
struct Pair {
    /// Position of run `a` in the buffer; run `b` follows it.
    first: usize,
    a_len: usize,
    b_len: usize,
    /// Merged elements before the tile.
    before: usize,
}

#[cube]
fn pair_of(tile: usize, n: usize, tiles: usize, width: usize) -> Pair {
    let (row, at) = (tile / tiles, tile % tiles * TILE);
    let before = at % (2usize * width);
    let start = at - before;
    let a_len = min(width, n - start);
    let b_len = min(width, n - start - a_len);
    Pair {
        first: row * n + start,
        a_len,
        b_len,
        before,
    }
}

/// Finds for each tile how much of run `a` was used up before it.
#[cube(launch_unchecked, address_type = "dynamic")]
fn find_splits<K: Int>(
    keys: &[K],
    splits: &mut [u32],
    all: usize,
    n: usize,
    tiles: usize,
    width: usize,
) {
    let tile = ABSOLUTE_POS;
    if tile < all {
        let pair = pair_of(tile, n, tiles, width);
        splits[tile] = split(
            keys,
            pair.first,
            pair.a_len,
            pair.first + pair.a_len,
            pair.b_len,
            pair.before,
        ) as u32;
    }
}

/// Merges runs of `width` elements; a cube makes one tile.
#[cube(launch_unchecked, address_type = "dynamic")]
fn merge<K: Int>(
    keys: &[K],
    places: &[u32],
    splits: &[u32],
    out_keys: &mut Sequence<Box<[K]>>,
    out_places: &mut [u32],
    all: usize,
    n: usize,
    tiles: usize,
    width: usize,
    #[comptime] keep: bool,
) {
    let mut shared_keys = Shared::<[K]>::new_slice(TILE);
    let mut shared_places = Shared::<[u32]>::new_slice(TILE);
    // Surplus cubes repeat an earlier tile.
    let tile = CUBE_POS % all;
    let pair = pair_of(tile, n, tiles, width);
    let len = pair.a_len + pair.b_len;
    let count = min(TILE, len - pair.before);
    let a_from = splits[tile] as usize;
    let mut a_to = pair.a_len;
    if pair.before + count < len {
        a_to = splits[tile + 1usize] as usize;
    }
    let a = a_to - a_from;
    let b_from = pair.a_len + pair.before - a_from;
    #[unroll]
    for j in 0..4usize {
        let slot = UNIT_POS as usize + comptime!(j * CUBE as usize);
        if slot < count {
            let from = pair.first + select(slot < a, a_from + slot, b_from + slot - a);
            shared_keys[slot] = keys[from];
            shared_places[slot] = places[from];
        }
    }
    sync_cube();
    let start = min(UNIT_POS as usize * 4usize, count);
    let mut i = split(&shared_keys, 0usize, a, a, count - a, start);
    let mut j = a + start - i;
    let to = pair.first + pair.before;
    #[unroll]
    for q in 0..4usize {
        let at = start + q;
        if at < count {
            let (left, right) = (
                shared_keys[min(i, comptime!(TILE - 1))],
                shared_keys[min(j, comptime!(TILE - 1))],
            );
            let take_a = j >= count || (i < a && left <= right);
            let from = select(take_a, i, j);
            out_places[to + at] = shared_places[from];
            if comptime!(keep) {
                out_keys.index_mut(0usize)[to + at] = select(take_a, left, right);
            }
            i += select(take_a, 1usize, 0usize);
            j += select(take_a, 0usize, 1usize);
        }
    }
}

/// Rows in order: where each element was, and the keys where they were asked for.
pub(crate) struct Sorted {
    pub(crate) places: Memory,
    pub(crate) keys: Option<Memory>,
}

impl CubeBackend {
    pub(crate) fn run_sort(&self, call: &SortCall) -> Result<Buffer> {
        let shape = &call.input.layout.shape;
        let n = shape[shape.rank() - 1];
        let view = self.dense(&call.input, call.input.dtype)?;
        let (input, rows) = (crate::memory(&view)?, shape.numel() / n);
        let sorted = match view.dtype.size() {
            8 => self.argsort::<u64>(input, view.dtype, rows, n, call.descending, false)?,
            _ => self.argsort::<u32>(input, view.dtype, rows, n, call.descending, false)?,
        };
        Ok(sorted.places.buffer())
    }

    /// Sorts the dense rows of `input`. `K` is the type of the keys.
    pub(crate) fn argsort<K: Int>(
        &self,
        input: &Memory,
        dtype: DType,
        rows: usize,
        n: usize,
        descending: bool,
        keys: bool,
    ) -> Result<Sorted> {
        let slots = n.next_power_of_two().min(TILE);
        let tiles = n.div_ceil(slots);
        let all = rows * tiles;
        let address = address((rows * n).max(input.bytes / 4));
        let keep = keys || tiles > 1;
        let key_dtype = if size_of::<K>() == 8 {
            DType::I64
        } else {
            DType::U32
        };
        let fresh = |keep: bool| -> Result<(Memory, Vec<Memory>)> {
            let keys = (0..usize::from(keep))
                .map(|_| self.alloc(key_dtype, rows * n))
                .collect::<Result<_>>()?;
            Ok((self.alloc(DType::I32, rows * n)?, keys))
        };
        let bound = |keys: &[Memory]| {
            bind::<K>(
                &keys
                    .iter()
                    .map(|m| (m.handle.clone(), m.bytes))
                    .collect::<Vec<_>>(),
                size_of::<K>(),
            )
        };
        let (mut places, mut kept) = fresh(keep)?;
        let how = Tiles {
            dtype,
            descending,
            slots: slots as u32,
            keep,
        };
        // SAFETY: slots beyond the rows and elements are not read or written.
        unsafe {
            sort_tiles::launch_unchecked::<K>(
                &self.client,
                crate::cubes(all * slots, TILE as u32),
                CubeDim::new_1d(CUBE),
                address,
                crate::arg(input, 4),
                bound(&kept),
                crate::arg(&places, 4),
                rows,
                n,
                tiles,
                how,
            );
        }
        let splits = if tiles > 1 {
            Some(self.alloc(DType::U32, all)?)
        } else {
            None
        };
        let mut width = slots;
        while let Some(splits) = splits.as_ref().filter(|_| width < n) {
            let keep = keys || width * 2 < n;
            let (next_places, next_keys) = fresh(keep)?;
            // SAFETY: threads past the last tile do nothing, surplus cubes repeat a tile; positions
            // stay inside the runs.
            unsafe {
                find_splits::launch_unchecked::<K>(
                    &self.client,
                    crate::cubes(all, CUBE),
                    CubeDim::new_1d(CUBE),
                    address,
                    crate::arg(&kept[0], size_of::<K>()),
                    crate::arg(splits, 4),
                    all,
                    n,
                    tiles,
                    width,
                );
                merge::launch_unchecked::<K>(
                    &self.client,
                    crate::cubes(all, 1),
                    CubeDim::new_1d(CUBE),
                    address,
                    crate::arg(&kept[0], size_of::<K>()),
                    crate::arg(&places, 4),
                    crate::arg(splits, 4),
                    bound(&next_keys),
                    crate::arg(&next_places, 4),
                    all,
                    n,
                    tiles,
                    width,
                    keep,
                );
            }
            (places, kept) = (next_places, next_keys);
            width *= 2;
        }
        Ok(Sorted {
            places,
            keys: kept.pop(),
        })
    }
}
