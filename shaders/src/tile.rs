//! Pieces of matrices on their way between memory, shared memory and registers: what matmul, conv
//! and attention share.
//!
//! A *panel* is a block of an operand in shared memory, `depth` steps of the summed dimension by
//! some rows, held as vectors of four rows: a thread reads four rows of one step at once.

use crate::{
    Memory,
    words::{self, U4},
};
use anymesh_kernel::{DType, View};
use cubecl::prelude::*;

/// Four values side by side.
pub(crate) type V4<T> = Vector<T, Const<4>>;

/// Element `at` of a buffer, as the type it is computed in. Buffers are words of 32 bits, or
/// elements of 64.
#[cube]
pub(crate) fn element<W: Numeric, T: Numeric>(
    words: &[W],
    at: usize,
    #[comptime] dtype: DType,
) -> T {
    let size = comptime!(dtype.size());
    if comptime!(size == 8) {
        T::cast_from(words[at])
    } else if comptime!(size == 4) {
        T::reinterpret(u32::cast_from(words[at]))
    } else {
        let per_word = comptime!(4 / size);
        let word = u32::cast_from(words[at / per_word]);
        let bits = (word >> ((at % per_word) as u32 * comptime!(8 * size as u32)))
            & comptime!(u32::MAX >> (32 - 8 * size));
        if comptime!(dtype.is_float()) {
            T::cast_from(words::small_to_f32(U4::new(bits), dtype).extract(0usize))
        } else {
            T::cast_from(bits)
        }
    }
}

/// Stores an element of 32 or 64 bits.
#[cube]
pub(crate) fn put<W: Numeric, T: Numeric>(
    out: &mut [W],
    at: usize,
    value: T,
    #[comptime] dtype: DType,
) {
    if comptime!(dtype.size() == 8) {
        out[at] = W::cast_from(value);
    } else {
        out[at] = W::cast_from(u32::reinterpret(value));
    }
}

/// Stores four elements of any dtype from `at` on, which is a multiple of four.
#[cube]
pub(crate) fn put_four<W: Numeric, T: Numeric>(
    out: &mut [W],
    at: usize,
    value: V4<T>,
    #[comptime] dtype: DType,
) {
    if comptime!(dtype.size() >= 4) {
        #[unroll]
        for l in 0..4usize {
            put::<W, T>(out, at + l, value.extract(l), dtype);
        }
    } else {
        let bits = if comptime!(dtype.is_float()) {
            words::f32_to_small(Vector::cast_from(value), dtype)
        } else {
            U4::cast_from(value)
        };
        if comptime!(dtype.size() == 2) {
            let pair = words::pack16(bits);
            out[at / 2usize] = W::cast_from(pair.extract(0usize));
            out[at / 2usize + 1usize] = W::cast_from(pair.extract(1usize));
        } else {
            out[at / 4usize] = W::cast_from(words::pack8(bits));
        }
    }
}

/// Stores the lanes of `value` as elements `at ..` as long as they are fewer than `room`; all at
/// once where `whole` says that rows are multiples of four.
#[cube]
pub(crate) fn put_row<W: Numeric, T: Numeric>(
    out: &mut [W],
    at: usize,
    room: usize,
    value: V4<T>,
    #[comptime] dtype: DType,
    #[comptime] whole: bool,
) {
    if comptime!(whole) {
        if room > 0usize {
            put_four::<W, T>(out, at, value, dtype);
        }
    } else {
        #[unroll]
        for l in 0..4usize {
            if room > l {
                put::<W, T>(out, at + l, value.extract(l), dtype);
            }
        }
    }
}

/// A matrix in memory: where it starts and how it steps, by the summed dimension (`depth`) and the
/// other one (`rows`).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) start: usize,
    pub(crate) rows: usize,
    pub(crate) row_stride: usize,
    pub(crate) depth: usize,
    pub(crate) depth_stride: usize,
}

/// Four rows of one step; zero outside.
#[cube]
pub(crate) fn fetch<W: Numeric, T: Numeric>(
    words: &[W],
    matrix: &Matrix,
    row: usize,
    step: usize,
    #[comptime] dtype: DType,
) -> V4<T> {
    let base = matrix.start + min(step, matrix.depth - 1usize) * matrix.depth_stride;
    let mut out = V4::<T>::empty();
    #[unroll]
    for l in 0..4usize {
        let inside = step < matrix.depth && row + l < matrix.rows;
        let at = base + min(row + l, matrix.rows - 1usize) * matrix.row_stride;
        out.insert(
            l,
            select(inside, element::<W, T>(words, at, dtype), T::from_int(0)),
        );
    }
    out
}

/// Which step and which four rows of a panel thread `unit` brings: neighbours walk along the summed
/// dimension or along rows.
#[cube]
pub(crate) fn duty(
    unit: usize,
    #[comptime] fours: usize,
    #[comptime] depth: usize,
    #[comptime] along_depth: bool,
) -> (usize, usize) {
    if comptime!(along_depth) {
        (unit % depth, unit / depth)
    } else {
        (unit / fours, unit % fours)
    }
}

/// How a cube of 256 threads computes a square of an output: each thread has `fours` by `fours`
/// blocks of 4 by 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Square {
    pub(crate) fours: usize,
    /// Whether elements have 64 bits.
    pub(crate) wide: bool,
}

impl Square {
    /// The larger square where it leaves enough of them to fill a large GPU.
    pub(crate) fn fitting(rows: usize, columns: usize, products: usize, wide: bool) -> Self {
        let large = Self { fours: 2, wide };
        if !wide && rows.min(columns) > 64 && large.count(rows, columns) * products >= 128 {
            large
        } else {
            Self { fours: 1, wide }
        }
    }

    /// Squares in an output.
    pub(crate) fn count(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(self.side()) * columns.div_ceil(self.side())
    }

    /// Rows and columns.
    pub(crate) fn side(self) -> usize {
        64 * self.fours
    }

    /// Steps of the summed dimension in a panel, so that every thread brings one vector of each
    /// operand.
    pub(crate) fn depth(self) -> usize {
        16 / self.fours
    }

    /// Vectors from one step of a panel to the next; one more than needed keeps threads that walk
    /// along the depth off the same banks.
    pub(crate) fn pitch(self) -> usize {
        self.side() / 4 + usize::from(!self.wide)
    }

    /// Vectors of a thread's share of the square.
    pub(crate) fn share(self) -> usize {
        4 * self.fours * self.fours
    }
}

/// Adds the product of two panels to the thread's share of the square, `x` from the left and `y`
/// from the top.
#[cube]
pub(crate) fn multiply<T: Numeric>(
    left: &[V4<T>],
    right: &[V4<T>],
    sums: &mut Array<V4<T>>,
    x: usize,
    y: usize,
    #[comptime] square: Square,
) {
    let (depth, pitch, fours) = comptime!((square.depth(), square.pitch(), square.fours));
    #[unroll]
    for s in 0..depth {
        #[unroll]
        for i in 0..fours {
            let rows = left[y + comptime!(s * pitch + 16 * i)];
            #[unroll]
            for j in 0..fours {
                let columns = right[x + comptime!(s * pitch + 16 * j)];
                #[unroll]
                for r in 0..4usize {
                    sums[comptime!((i * 4 + r) * fours + j)] += V4::new(rows.extract(r)) * columns;
                }
            }
        }
    }
}

/// Into how many parts to cut a sum of `depth` steps: enough cubes to fill a large GPU, and no part
/// shorter than `shortest`.
pub(crate) fn splits(cubes: usize, depth: usize, shortest: usize) -> usize {
    (256 / cubes.max(1)).min(depth / shortest).max(1)
}

/// Binds each of some views' buffers once: shader languages refuse aliases. Gives the buffers and
/// each view's place among them.
pub(crate) fn distinct<const N: usize>(
    views: [&View; N],
) -> crate::Result<(Vec<&Memory>, [usize; N])> {
    let mut buffers: Vec<&View> = vec![];
    let mut places = [0; N];
    for (view, place) in views.into_iter().zip(&mut places) {
        *place = buffers
            .iter()
            .position(|other| other.buffer.same(&view.buffer))
            .unwrap_or(buffers.len());
        if *place == buffers.len() {
            buffers.push(view);
        }
    }
    Ok((
        buffers
            .into_iter()
            .map(crate::memory)
            .collect::<crate::Result<_>>()?,
        places,
    ))
}

/// The address width in which every position in these buffers and every one of `counts` fits.
pub(crate) fn address(buffers: &[&Memory], smallest: DType, counts: &[usize]) -> AddressType {
    let elements = buffers
        .iter()
        .map(|m| m.bytes / smallest.size())
        .chain(counts.iter().copied())
        .max();
    if elements.unwrap_or(0) < i32::MAX as usize {
        AddressType::U32
    } else {
        AddressType::U64
    }
}
