//! Indexed writes into a copy of the destination, without atomics and always in the same order.
//!
//! The destination row of every position is computed and the positions are sorted by it (stably),
//! so that the updates of a row are neighbours, in order. A thread then folds a block of neighbours
//! for some elements of the row. Rows that lie within a block are finished there; what belongs to
//! rows that go on beyond it is left as two parts for each block, which are sorted as they are and
//! folded in the same way, until one block is left. A row that takes all updates is as fast as many
//! rows that take one each.

use crate::{
    CubeBackend, Memory,
    gather::{IndexPlan, Indexing, address, locate},
    intern::Interned,
    map::CUBE,
    program::{affine, coordinates, wrap},
    words::{D4, F4, I4, L4, Q4, U4, bits_at, f32_to_small, pack8, pack16, small_to_f32, wide_at},
};
use anymesh_kernel::{
    Buffer, DType, Dims, Error, Kind, Layout, Result, Shape, View,
    backend::{ScatterCall, ScatterOp},
    layout::collapse,
};
use cubecl::prelude::*;

/// Neighbours that a thread folds.
const BLOCK: usize = 32;
/// The row of an update that is left out, and the place of a part that is empty.
const NONE: u32 = u32::MAX;

/// The destination row of every position.
#[cube(launch_unchecked, address_type = "dynamic")]
fn find_rows(
    indices: &Sequence<Box<[u32]>>,
    rows: &mut [u32],
    faults: &mut [u32],
    numbers: &Sequence<usize>,
    count: usize,
    #[comptime] plan: Interned<IndexPlan>,
) {
    let position = ABSOLUTE_POS;
    if position < count {
        let here = coordinates(position, numbers, plan.rank);
        let place = locate(indices, &here, numbers, faults, plan);
        rows[position] = select(place.inside, place.at as u32, NONE);
    }
}

/// How elements lie in a buffer, and what they are held as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Element {
    dtype: DType,
    /// Moved as bits.
    raw: bool,
    /// Four neighbours of a row at a time, else one (on lane 0).
    lanes: usize,
}

/// The elements from `at` on, `step` apart.
#[cube]
fn load<T: Numeric>(
    words: &[u32],
    at: usize,
    step: usize,
    #[comptime] element: Element,
) -> Vector<T, Const<4>> {
    if comptime!(element.dtype.size() == 8) {
        let mut bits = Q4::new(0u64);
        #[unroll]
        for lane in 0..element.lanes {
            bits.insert(lane, wide_at(words, at + lane * step));
        }
        if comptime!(element.raw) {
            Vector::cast_from(bits)
        } else if comptime!(element.dtype == DType::I64) {
            Vector::cast_from(L4::cast_from(bits))
        } else {
            Vector::cast_from(D4::reinterpret(bits))
        }
    } else {
        let mut bits = U4::new(0u32);
        #[unroll]
        for lane in 0..element.lanes {
            bits.insert(lane, bits_at(words, at + lane * step, element.dtype.size()));
        }
        if comptime!(element.raw || matches!(element.dtype.kind(), Kind::U32 | Kind::Bool)) {
            Vector::cast_from(bits)
        } else if comptime!(element.dtype == DType::I32) {
            Vector::cast_from(I4::reinterpret(bits))
        } else {
            Vector::cast_from(small_to_f32(bits, element.dtype))
        }
    }
}

/// Stores as elements `at` on. Fewer than four lanes only of dtypes that do not share words.
#[cube]
fn store<T: Numeric>(
    words: &mut [u32],
    at: usize,
    value: Vector<T, Const<4>>,
    #[comptime] element: Element,
) {
    if comptime!(element.dtype.size() == 8) {
        let bits = if comptime!(element.raw) {
            Q4::cast_from(value)
        } else if comptime!(element.dtype == DType::I64) {
            Q4::cast_from(L4::cast_from(value))
        } else {
            Q4::reinterpret(D4::cast_from(value))
        };
        #[unroll]
        for lane in 0..element.lanes {
            let wide = bits.extract(lane);
            words[(at + lane) * 2usize] = wide as u32;
            words[(at + lane) * 2usize + 1usize] = (wide >> 32u64) as u32;
        }
    } else {
        let bits =
            if comptime!(element.raw || matches!(element.dtype.kind(), Kind::U32 | Kind::Bool)) {
                U4::cast_from(value)
            } else if comptime!(element.dtype == DType::I32) {
                U4::reinterpret(I4::cast_from(value))
            } else {
                f32_to_small(F4::cast_from(value), element.dtype)
            };
        if comptime!(element.dtype.size() == 1) {
            words[at / 4usize] = pack8(bits);
        } else if comptime!(element.dtype.size() == 2) {
            let pair = pack16(bits);
            words[at / 2usize] = pair.extract(0usize);
            words[at / 2usize + 1usize] = pair.extract(1usize);
        } else {
            #[unroll]
            for lane in 0..element.lanes {
                words[at + lane] = bits.extract(lane);
            }
        }
    }
}

/// The bits of each element in a word of its own.
#[cube(launch_unchecked, address_type = "dynamic")]
fn spread(elements: &[u32], out: &mut [u32], count: usize, #[comptime] size: usize) {
    if ABSOLUTE_POS < count {
        out[ABSOLUTE_POS] = bits_at(elements, ABSOLUTE_POS, size);
    }
}

/// What [`spread`] has spread, packed again. One thread for each word; `count` elements.
#[cube(launch_unchecked, address_type = "dynamic")]
fn pack(bits: &[u32], out: &mut [u32], count: usize, #[comptime] size: usize) {
    let each = comptime!(4 / size);
    let first = ABSOLUTE_POS * each;
    if first < count {
        let mut word = 0u32;
        #[unroll]
        for k in 0..each {
            // What is behind the last element is never read.
            let at = min(first + k, count - 1usize);
            word |= bits[at] << comptime!((k * size * 8) as u32);
        }
        out[ABSOLUTE_POS] = word;
    }
}

/// Where the updates are, in elements: sizes of the iteration space, then offset and steps, at last
/// the step along a row.
#[cube]
fn update_at(
    place: u32,
    element: usize,
    numbers: &Sequence<usize>,
    #[comptime] rank: usize,
) -> usize {
    let here = coordinates(place as usize, numbers, rank);
    affine(&here, numbers, rank, rank) + element * *numbers.index(comptime!(2 * rank + 1))
}

/// What the kernels that touch elements are specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    mode: ScatterOp,
    /// The updates.
    from: Element,
    /// The result.
    to: Element,
    /// What is held between launches.
    part: Element,
    /// Dimensions of the iteration space.
    rank: usize,
    /// Whether rows may go on beyond a block.
    parts: bool,
}

/// The last update of each row. One thread for each sorted position and piece of a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn set_rows<T: Numeric>(
    rows: &[u32],
    places: &[u32],
    updates: &[u32],
    out: &mut [u32],
    numbers: &Sequence<usize>,
    count: usize,
    inner: usize,
    #[comptime] how: How,
) {
    let pieces = inner / comptime!(how.to.lanes);
    let (at, piece) = (ABSOLUTE_POS / pieces, ABSOLUTE_POS % pieces);
    if at < count {
        let row = rows[at];
        let next = rows[min(at + 1usize, count - 1usize)];
        let last = at + 1usize == count || next != row;
        if last && row != NONE {
            let element = piece * comptime!(how.to.lanes);
            let step = *numbers.index(comptime!(2 * how.rank + 1));
            let value = load::<T>(
                updates,
                update_at(places[at], element, numbers, how.rank),
                step,
                how.from,
            );
            store::<T>(out, row as usize * inner + element, value, how.to);
        }
    }
}

#[cube]
fn is_nan<T: Numeric>(
    x: Vector<T, Const<4>>,
    #[comptime] element: Element,
) -> Vector<bool, Const<4>> {
    if comptime!(element.dtype == DType::F64) {
        D4::cast_from(x).is_nan()
    } else {
        F4::cast_from(x).is_nan()
    }
}

#[cube]
fn apply<T: Numeric>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] how: How,
) -> Vector<T, Const<4>> {
    match how.mode {
        ScatterOp::Set => b,
        ScatterOp::Add => a + b,
        ScatterOp::Mul => a * b,
        ScatterOp::Min | ScatterOp::Max => {
            let beyond = if comptime!(how.mode == ScatterOp::Min) {
                b.less_than(&a)
            } else {
                a.less_than(&b)
            };
            if comptime!(how.part.dtype.is_float()) {
                let keep = is_nan::<T>(a, how.part);
                select_many((!keep).vec_and(beyond.or(is_nan::<T>(b, how.part))), b, a)
            } else {
                select_many(beyond, b, a)
            }
        }
    }
}

/// The block of a thread: which of its rows are also in other blocks.
#[derive(CubeType)]
struct Block {
    first_row: u32,
    last_row: u32,
    /// The first row goes on from the block before.
    from_before: bool,
    /// The last row goes on in the next block.
    to_after: bool,
}

#[cube]
fn block_of(rows: &[u32], first: usize, count: usize) -> Block {
    let end = min(first + BLOCK, count);
    let (first_row, last_row) = (rows[first], rows[end - 1usize]);
    let before = rows[max(first, 1usize) - 1usize];
    let after = rows[min(end, count - 1usize)];
    Block {
        first_row,
        last_row,
        from_before: first > 0usize && before == first_row,
        to_after: end < count && after == last_row,
    }
}

/// Rows and places of the parts that [`fold_rows`] leaves: two for each block.
#[cube(launch_unchecked, address_type = "dynamic")]
fn find_parts(rows: &[u32], part_rows: &mut [u32], part_places: &mut [u32], count: usize) {
    let block = ABSOLUTE_POS;
    if block * BLOCK < count {
        let it = block_of(rows, block * BLOCK, count);
        let whole = it.first_row == it.last_row && it.from_before;
        let (a, b) = (block * 2usize, block * 2usize + 1usize);
        part_rows[a] = it.first_row;
        part_rows[b] = it.last_row;
        part_places[a] = select(it.from_before, a as u32, NONE);
        part_places[b] = select(it.to_after && !whole, b as u32, NONE);
    }
}

/// Stores what was folded for `row`: to the result, or as a part.
#[cube]
fn flush<T: Numeric>(
    out: &mut [u32],
    parts: &mut Sequence<Box<[u32]>>,
    value: Vector<T, Const<4>>,
    row: u32,
    element: usize,
    inner: usize,
    block: usize,
    it: &Block,
    #[comptime] how: How,
) {
    if comptime!(how.parts) {
        let before = it.from_before && row == it.first_row;
        let after = it.to_after && row == it.last_row;
        if before || after {
            let slot = block * 2usize + select(before, 0usize, 1usize);
            store::<T>(
                parts.index_mut(0usize),
                slot * inner + element,
                value,
                how.part,
            );
        } else {
            store::<T>(out, row as usize * inner + element, value, how.to);
        }
    } else {
        store::<T>(out, row as usize * inner + element, value, how.to);
    }
}

/// Folds the updates of each row. One thread for each block of sorted positions and piece of a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fold_rows<T: Numeric>(
    rows: &[u32],
    places: &[u32],
    updates: &[u32],
    out: &mut [u32],
    parts: &mut Sequence<Box<[u32]>>,
    numbers: &Sequence<usize>,
    count: usize,
    inner: usize,
    #[comptime] how: How,
) {
    let pieces = inner / comptime!(how.to.lanes);
    let (block, element) = (
        ABSOLUTE_POS / pieces,
        ABSOLUTE_POS % pieces * comptime!(how.to.lanes),
    );
    let step = *numbers.index(comptime!(2 * how.rank + 1));
    let first = block * BLOCK;
    if first < count {
        let it = block_of(rows, first, count);
        let end = min(first + BLOCK, count);
        let mut acc = Vector::<T, Const<4>>::new(T::from_int(0));
        let mut current = NONE.runtime();
        let mut filled = false;
        let mut at = first;
        while at < end {
            let row = rows[at];
            let place = places[at];
            if row != current {
                if filled {
                    flush::<T>(out, parts, acc, current, element, inner, block, &it, how);
                }
                current = row;
                filled = false;
            }
            if place != NONE && row != NONE {
                let value = load::<T>(
                    updates,
                    update_at(place, element, numbers, how.rank),
                    step,
                    how.from,
                );
                if filled {
                    acc = apply::<T>(acc, value, how);
                } else {
                    filled = true;
                    let mut shared = false;
                    if comptime!(how.parts) {
                        shared = (it.from_before && row == it.first_row)
                            || (it.to_after && row == it.last_row);
                    }
                    if shared {
                        acc = value;
                    } else {
                        acc = apply::<T>(
                            load::<T>(&*out, row as usize * inner + element, 1usize, how.to),
                            value,
                            how,
                        );
                    }
                }
            }
            at += 1usize;
        }
        if filled {
            flush::<T>(out, parts, acc, current, element, inner, block, &it, how);
        }
    }
}

/// Where updates are; see [`update_at`].
struct Updates {
    memory: Memory,
    element: Element,
    rank: usize,
    numbers: Vec<usize>,
}

/// Positions sorted by row.
struct Order {
    rows: Memory,
    places: Memory,
    count: usize,
}

impl CubeBackend {
    pub(crate) fn run_scatter(&self, call: &ScatterCall) -> Result<Buffer> {
        let count = call.shape.numel();
        if call.rows >= NONE as usize || count >= NONE as usize {
            let what = format!("{} of {count} updates into {} rows", call.op, call.rows);
            return Err(Error::Unsupported {
                device: self.name.clone(),
                what,
                hint: "split the tensor into pieces of fewer than 2^32 - 1 rows".into(),
            });
        }
        let (dtype, elements) = (call.dst.dtype, call.rows * call.inner);
        let lanes = if call.inner.is_multiple_of(4) { 4 } else { 1 };
        // Single elements that share a word with others are worked on in a wider copy: no two
        // threads may write one word. What is only set moves as bits.
        let wide = lanes == 1 && dtype.size() < 4;
        let raw = call.mode == ScatterOp::Set;
        let kind = if dtype == DType::Bool {
            DType::U32
        } else {
            dtype.kind().dtype()
        };
        let to = match (wide, raw) {
            (true, true) => DType::U32,
            (true, false) => kind,
            (false, _) => dtype,
        };
        let out = if wide && raw {
            self.spread(&call.dst, elements)?
        } else if wide {
            self.copy_as(&call.dst, to)?
        } else {
            let words = Shape::from([(elements * dtype.size()).div_ceil(4)]);
            self.copy_as(
                &View {
                    buffer: call.dst.buffer.clone(),
                    dtype: DType::U32,
                    layout: Layout::contiguous(words),
                },
                DType::U32,
            )?
        };
        let out: &Memory = out.get()?;
        let updates = crate::memory(&call.updates)?;
        let address = address(
            (count * call.inner)
                .max(elements)
                .max(out.bytes / 4)
                .max(updates.bytes / dtype.size().min(4)),
        );
        let order = self.scatter_order(call, count, address)?;
        let layout = &call.updates.layout;
        let (steps, inner_step) = layout.strides.split_at(call.shape.rank());
        let mut strides = [Dims::from_slice(steps)];
        let shape = collapse(&call.shape, &mut strides);
        let numbers = shape.dims().iter().copied().chain([layout.offset]).chain(
            strides[0]
                .iter()
                .chain(inner_step)
                .map(|&s| wrap(s as i64, address)),
        );
        let updates = Updates {
            memory: updates.clone(),
            element: Element { dtype, raw, lanes },
            rank: shape.rank(),
            numbers: numbers.collect(),
        };
        let (to, part) = (
            Element {
                dtype: to,
                raw,
                lanes,
            },
            Element {
                dtype: kind,
                raw: false,
                lanes,
            },
        );
        let how = How {
            mode: call.mode,
            from: updates.element,
            to,
            part,
            rank: updates.rank,
            parts: false,
        };
        match (raw, dtype.size(), kind) {
            (true, 8, _) => {
                self.scatter_as::<u64>(call.inner, order, updates, out, address, how)?
            }
            (true, ..) | (_, _, DType::U32) => {
                self.scatter_as::<u32>(call.inner, order, updates, out, address, how)?
            }
            (_, _, DType::I32) => {
                self.scatter_as::<i32>(call.inner, order, updates, out, address, how)?
            }
            (_, _, DType::I64) => {
                self.scatter_as::<i64>(call.inner, order, updates, out, address, how)?
            }
            (_, _, DType::F64) => {
                self.scatter_as::<f64>(call.inner, order, updates, out, address, how)?
            }
            _ => self.scatter_as::<f32>(call.inner, order, updates, out, address, how)?,
        }
        if wide && raw {
            return self.packed(out, dtype, elements);
        }
        self.convert(out.clone(), to.dtype, dtype, elements)
    }

    /// The bits of each element of a dense view, in words.
    fn spread(&self, view: &View, elements: usize) -> Result<Buffer> {
        let (from, out) = (crate::memory(view)?, self.alloc(DType::U32, elements)?);
        // SAFETY: threads past the last element do nothing.
        unsafe {
            spread::launch_unchecked(
                &self.client,
                crate::cubes(elements, CUBE),
                CubeDim::new_1d(CUBE),
                address(out.bytes / 4),
                crate::arg(from, 4),
                crate::arg(&out, 4),
                elements,
                view.dtype.size(),
            );
        }
        Ok(out.buffer())
    }

    /// Elements of `dtype` from their bits in words.
    fn packed(&self, bits: &Memory, dtype: DType, elements: usize) -> Result<Buffer> {
        let out = self.alloc(dtype, elements)?;
        // SAFETY: threads past the last word do nothing.
        unsafe {
            pack::launch_unchecked(
                &self.client,
                crate::cubes((elements * dtype.size()).div_ceil(4), CUBE),
                CubeDim::new_1d(CUBE),
                address(bits.bytes / 4),
                crate::arg(bits, 4),
                crate::arg(&out, 4),
                elements,
                dtype.size(),
            );
        }
        Ok(out.buffer())
    }

    /// The positions of the iteration space, sorted by the row they go to.
    fn scatter_order(
        &self,
        call: &ScatterCall,
        count: usize,
        address: AddressType,
    ) -> Result<Order> {
        let strides: Dims<isize> = call.base.strides.iter().map(|&s| s as isize).collect();
        let indexing = Indexing::new(&call.shape, call.base.offset, &strides, &call.axes, address)?;
        let rows = self.alloc(DType::U32, count)?;
        // SAFETY: threads past the last position do nothing.
        unsafe {
            find_rows::launch_unchecked(
                &self.client,
                crate::cubes(count, CUBE),
                CubeDim::new_1d(CUBE),
                address,
                indexing.buffers(),
                crate::arg(&rows, 4),
                self.fault_arg(),
                indexing.numbers(),
                count,
                self.indexings.intern(indexing.plan),
            );
        }
        let sorted = self.argsort::<u32>(&rows, DType::U32, 1, count, false, true)?;
        Ok(Order {
            rows: sorted.keys.unwrap_or(rows),
            places: sorted.places,
            count,
        })
    }

    fn scatter_as<T: Numeric>(
        &self,
        inner: usize,
        mut order: Order,
        mut updates: Updates,
        out: &Memory,
        address: AddressType,
        mut how: How,
    ) -> Result<()> {
        let (client, dim) = (&self.client, CubeDim::new_1d(CUBE));
        let pieces = inner / how.to.lanes;
        if how.mode == ScatterOp::Set {
            // SAFETY: threads past the last position do nothing; rows were checked against the
            // destination.
            unsafe {
                set_rows::launch_unchecked::<T>(
                    client,
                    crate::cubes(order.count * pieces, CUBE),
                    dim,
                    address,
                    crate::arg(&order.rows, 4),
                    crate::arg(&order.places, 4),
                    crate::arg(&updates.memory, 4),
                    crate::arg(out, 4),
                    updates.numbers.iter().copied().collect(),
                    order.count,
                    inner,
                    how,
                );
            }
            return Ok(());
        }
        loop {
            let blocks = order.count.div_ceil(BLOCK);
            (how.from, how.rank, how.parts) = (updates.element, updates.rank, blocks > 1);
            let parts = if how.parts {
                Some(self.alloc(how.part.dtype, blocks * 2 * inner)?)
            } else {
                None
            };
            // SAFETY: threads past the last block do nothing; rows were checked against the
            // destination.
            unsafe {
                fold_rows::launch_unchecked::<T>(
                    client,
                    crate::cubes(blocks * pieces, CUBE),
                    dim,
                    address,
                    crate::arg(&order.rows, 4),
                    crate::arg(&order.places, 4),
                    crate::arg(&updates.memory, 4),
                    crate::arg(out, 4),
                    parts.iter().map(|m| crate::arg(m, 4)).collect(),
                    updates.numbers.iter().copied().collect(),
                    order.count,
                    inner,
                    how,
                );
            }
            let Some(memory) = parts else { return Ok(()) };
            let next = Order {
                rows: self.alloc(DType::U32, blocks * 2)?,
                places: self.alloc(DType::U32, blocks * 2)?,
                count: blocks * 2,
            };
            // SAFETY: as above.
            unsafe {
                find_parts::launch_unchecked(
                    client,
                    crate::cubes(blocks, CUBE),
                    dim,
                    address,
                    crate::arg(&order.rows, 4),
                    crate::arg(&next.rows, 4),
                    crate::arg(&next.places, 4),
                    order.count,
                );
            }
            updates = Updates {
                memory,
                element: how.part,
                rank: 1,
                numbers: vec![blocks * 2, 0, inner, 1],
            };
            order = next;
        }
    }
}
