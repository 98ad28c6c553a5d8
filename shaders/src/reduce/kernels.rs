//! The kernels: along rows, down columns, and what combines the parts of either.

use super::acc::*;
use crate::{
    intern::Interned,
    map::CUBE,
    program::{Inputs, MapPlan, eval},
    reg::Reg,
    words::{self, F4, U4},
};
use anymesh_kernel::{DType, Kind, backend::ReduceOp};
use cubecl::prelude::*;

/// The output buffers: values (final ones, or parts), sums of parts, places, and final values that
/// are stored as 16-bit floats.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Results<T: Numeric> {
    pub(super) values: Sequence<Box<[T]>>,
    pub(super) places: Sequence<Box<[u32]>>,
    pub(super) halves: Sequence<Box<[u16]>>,
}

/// What a launch is specialised on besides its program and operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct How {
    /// Threads that share a row, or that lie beside each other on columns.
    pub(super) width: u32,
    /// Elements that a thread loads before it combines them.
    pub(super) unroll: usize,
    /// Whether the results are parts.
    pub(super) parts: bool,
    /// Whether the cube that is the last one to have made its part of a result combines all.
    pub(super) at_once: bool,
    pub(super) kind: Kind,
    /// Whether to multiply the result.
    pub(super) scaled: bool,
    /// The 16-bit float that the result is stored as.
    pub(super) short: Option<DType>,
}

impl How {
    /// Of the step that combines parts.
    fn last(self) -> Self {
        Self {
            parts: false,
            ..self
        }
    }
}

/// Writes lane `l` of a value as result `at`.
#[cube]
fn put<T: Numeric>(
    out: &mut Results<T>,
    value: Vector<T, Const<4>>,
    at: usize,
    #[comptime] l: usize,
    #[comptime] how: How,
) {
    if comptime!(how.short.is_some() && !how.parts) {
        let dtype = comptime!(how.short.unwrap_or(DType::F32));
        let bits = words::f32_to_small(F4::cast_from(value), dtype);
        out.halves.index_mut(0usize)[at] = u16::cast_from(bits.extract(l));
    } else {
        out.values.index_mut(0usize)[at] = value.extract(l);
    }
}

/// Writes lane `l` of an accumulator as result `at`.
#[cube]
fn write<T: Numeric>(
    out: &mut Results<T>,
    acc: &Acc<T>,
    at: usize,
    #[comptime] l: usize,
    scale: T,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    if comptime!(matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)) {
        out.places.index_mut(0usize)[at] = acc.index.extract(l);
        if comptime!(how.parts) {
            out.values.index_mut(0usize)[at] = acc.value.extract(l);
        }
    } else if comptime!(op == ReduceOp::LogSumExp) {
        if comptime!(how.parts) {
            out.values.index_mut(0usize)[at] = acc.value.extract(l);
            out.values.index_mut(1usize)[at] = acc.sum.extract(l);
        } else {
            let result = acc.value + log(acc.sum, how.kind);
            let empty = acc.sum.equal(&Vector::new(T::from_int(0)));
            put(out, select_many(empty, acc.value, result), at, l, how);
        }
    } else if comptime!(how.scaled && !how.parts) {
        put(out, acc.value * Vector::new(scale), at, l, how);
    } else {
        put(out, acc.value, at, l, how);
    }
}

#[cube]
#[allow(unused_variables)]
fn elements<T: Numeric>(
    inputs: &Inputs,
    faults: &mut Sequence<Box<[u32]>>,
    start: usize,
    #[comptime] plan: Interned<MapPlan>,
) -> Vector<T, Const<4>> {
    intrinsic!(|scope| {
        let mut fault = |lanes| crate::fault::divided(scope, faults, lanes);
        match eval(scope, inputs, &plan, start, &mut fault)[0] {
            Reg::U(x) => x.expand.into(),
            Reg::I(x) => x.expand.into(),
            Reg::L(x) => x.expand.into(),
            Reg::F(x) => x.expand.into(),
            Reg::D(x) => x.expand.into(),
            Reg::B(_) => panic!("bools are reduced as integers"),
        }
    })
}

/// Whether this cube is the last one of `cubes` that share the ticket to come here. What the others
/// wrote before is there to be read then, and the ticket is as it was.
#[cube]
fn is_last(tickets: &mut Sequence<Box<[Atomic<u32>]>>, ticket: usize, cubes: usize) -> bool {
    let mut before = Shared::<[u32]>::new_slice(1usize);
    sync_storage();
    if UNIT_POS == 0u32 {
        let count = tickets.index_mut(0usize)[ticket].fetch_add(1u32);
        before[0usize] = count;
        if count + 1u32 == cubes as u32 {
            tickets.index_mut(0usize)[ticket].store(0u32);
        }
    }
    sync_storage();
    before[0usize] + 1u32 == cubes as u32
}

/// Combines the parts of one of `results` results, with all threads of a cube of `width`.
#[cube]
fn finish_row<T: Numeric>(
    parts: &mut Results<T>,
    out: &mut Results<T>,
    result: usize,
    results: usize,
    splits: usize,
    identity: T,
    scale: T,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let mut acc = nothing::<T>(identity);
    let mut split = UNIT_POS as usize;
    while split < splits {
        let at = split * results + result;
        let mut part = nothing::<T>(identity);
        part.value = Vector::new(parts.values.index(0usize)[at]);
        if comptime!(op == ReduceOp::LogSumExp) {
            part.sum = Vector::new(parts.values.index(1usize)[at]);
        }
        if comptime!(matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)) {
            part.index = U4::new(parts.places.index(0usize)[at]);
        }
        absorb(&mut acc, &first_lane(part, identity), op, how.kind);
        split += comptime!(how.width as usize);
    }
    let acc = tree(acc, how.width, op, how.kind);
    if UNIT_POS == 0u32 {
        write(out, &acc, result, 0usize, scale, op, how);
    }
}

/// `width` threads of a cube share a row; `256 / width` rows to a cube; `splits` cubes to a row. A
/// cube has one row where there are several splits.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn reduce_rows<T: Numeric>(
    inputs: &Inputs,
    out: &mut Results<T>,
    done: &mut Results<T>,
    tickets: &mut Sequence<Box<[Atomic<u32>]>>,
    faults: &mut Sequence<Box<[u32]>>,
    rows: usize,
    length: usize,
    chunks_per_split: usize,
    splits: usize,
    identity: InputScalar,
    scale: InputScalar,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let (identity, scale) = (identity.get::<T>(), scale.get::<T>());
    let native = comptime!(plan.native());
    let width = comptime!(how.width as usize);
    let line = CUBE_POS * comptime!(CUBE as usize / how.width as usize) + UNIT_POS as usize / width;
    let (row, split) = (line % rows, line / rows);
    let lane = UNIT_POS as usize % width;
    let chunks = (length + 3usize) / 4usize;
    let first = split * chunks_per_split;
    let end = min(first + chunks_per_split, chunks);
    let mut acc = nothing::<T>(identity);
    let mut chunk = first + lane;
    while chunk < end {
        let mut loaded = Sequence::<Vector<T, Const<4>>>::new();
        #[unroll]
        for u in 0..how.unroll {
            let at = min(chunk + u * width, end - 1usize) * 4usize;
            loaded.push(elements::<T>(
                inputs,
                faults,
                row * length + at,
                plan.clone(),
            ));
        }
        let mut entered = Sequence::<Acc<T>>::new();
        #[unroll]
        for u in 0..how.unroll {
            let at = (chunk + u * width) * 4usize;
            let valid = select(chunk + u * width < end, length - at, 0usize);
            entered.push(enter(*loaded.index(u), at, valid, identity));
        }
        absorb_all(&mut acc, &entered, how.unroll, op, how.kind, native);
        chunk += how.unroll * width;
    }
    let acc = tree(acc, how.width, op, how.kind);
    if lane == 0usize && split < splits {
        write(out, &acc, line, 0usize, scale, op, how);
    }
    if comptime!(how.at_once) {
        if split < splits {
            if is_last(tickets, row, splits) {
                let how = comptime!(how.last());
                finish_row(out, done, row, rows, splits, identity, scale, op, how);
            }
        }
    }
}

/// The parts of four columns, as the split `split` left them.
#[cube]
fn column_parts<T: Numeric>(
    parts: &mut Results<T>,
    split: usize,
    first: usize,
    columns: usize,
    identity: T,
    #[comptime] op: ReduceOp,
) -> Acc<T> {
    let mut value = Vector::<T, Const<4>>::empty();
    let mut sum = Vector::<T, Const<4>>::new(identity);
    let mut index = U4::new(0u32);
    #[unroll]
    for l in 0..4usize {
        let at = split * columns + min(first + l, columns - 1usize);
        value.insert(l, parts.values.index(0usize)[at]);
        if comptime!(op == ReduceOp::LogSumExp) {
            sum.insert(l, parts.values.index(1usize)[at]);
        }
        if comptime!(matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)) {
            index.insert(l, parts.places.index(0usize)[at]);
        }
    }
    Acc::<T> { value, sum, index }
}

#[cube]
fn write_columns<T: Numeric>(
    out: &mut Results<T>,
    acc: &Acc<T>,
    first: usize,
    columns: usize,
    split: usize,
    scale: T,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    #[unroll]
    for l in 0..4usize {
        let column = first + l;
        if column < columns {
            write(out, acc, split * columns + column, l, scale, op, how);
        }
    }
}

/// `width` threads of a cube lie beside each other, each on four columns; the others of the cube go
/// down the same columns, each on rows of its own. `splits` cubes share the rows.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn reduce_columns<T: Numeric>(
    inputs: &Inputs,
    out: &mut Results<T>,
    done: &mut Results<T>,
    tickets: &mut Sequence<Box<[Atomic<u32>]>>,
    faults: &mut Sequence<Box<[u32]>>,
    columns: usize,
    length: usize,
    rows_per_split: usize,
    splits: usize,
    identity: InputScalar,
    scale: InputScalar,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let (identity, scale) = (identity.get::<T>(), scale.get::<T>());
    let native = comptime!(plan.native());
    let width = comptime!(how.width as usize);
    let lines = comptime!(CUBE as usize / how.width as usize);
    let groups = (columns + 3usize) / 4usize;
    let blocks = (groups + comptime!(how.width as usize - 1)) / width;
    let (block, split) = (CUBE_POS % blocks, CUBE_POS / blocks);
    if split < splits {
        let line = UNIT_POS as usize / width;
        let own = block * width + UNIT_POS as usize % width;
        // Threads past the last column do as the last one does, and write nothing.
        let group = min(own, groups - 1usize);
        let first = split * rows_per_split;
        let end = min(first + rows_per_split, length);
        let mut acc = nothing::<T>(identity);
        let mut row = first + line;
        while row < end {
            let mut loaded = Sequence::<Vector<T, Const<4>>>::new();
            #[unroll]
            for u in 0..how.unroll {
                let at = min(row + u * lines, end - 1usize) * columns + group * 4usize;
                loaded.push(elements::<T>(inputs, faults, at, plan.clone()));
            }
            let mut all = Sequence::<Acc<T>>::new();
            #[unroll]
            for u in 0..how.unroll {
                let inside = row + u * lines < end;
                let mut entered = enter(
                    *loaded.index(u),
                    0usize,
                    select(inside, 4usize, 0usize),
                    identity,
                );
                entered.index = U4::new(select(inside, (row + u * lines) as u32, 0xffff_ffffu32));
                all.push(entered);
            }
            absorb_all(&mut acc, &all, how.unroll, op, how.kind, native);
            row += how.unroll * lines;
        }
        let acc = tree_across(acc, how.width, op, how.kind);
        let writes = line == 0usize && own < groups;
        if writes {
            write_columns(out, &acc, group * 4usize, columns, split, scale, op, how);
        }
        if comptime!(how.at_once) {
            if is_last(tickets, block, splits) {
                let how = comptime!(how.last());
                let mut acc = nothing::<T>(identity);
                let mut split = line;
                while split < splits {
                    let mut loaded = Sequence::<Acc<T>>::new();
                    #[unroll]
                    for u in 0..4usize {
                        let split = min(split + u * lines, splits - 1usize);
                        loaded.push(column_parts(
                            out,
                            split,
                            group * 4usize,
                            columns,
                            identity,
                            op,
                        ));
                    }
                    #[unroll]
                    for u in 0..4usize {
                        if split + u * lines < splits {
                            absorb(&mut acc, loaded.index(u), op, how.kind);
                        }
                    }
                    split += 4usize * lines;
                }
                let acc = tree_across(acc, how.width, op, how.kind);
                if writes {
                    write_columns(done, &acc, group * 4usize, columns, 0usize, scale, op, how);
                }
            }
        }
    }
}

/// Combines the parts `[splits, results]` of an earlier launch: one cube for each result.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn finish<T: Numeric>(
    parts: &mut Results<T>,
    out: &mut Results<T>,
    results: usize,
    splits: usize,
    identity: InputScalar,
    scale: InputScalar,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let (identity, scale) = (identity.get::<T>(), scale.get::<T>());
    let result = CUBE_POS % results;
    finish_row(
        parts, out, result, results, splits, identity, scale, op, how,
    );
}
