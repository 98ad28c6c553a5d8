//! Reductions, with a map program in front.
//!
//! The iteration space is seen as rows that become one value each. Where the reduced dimensions are
//! innermost in memory, some threads of a cube share a row and meet in a tree in shared memory;
//! where kept dimensions are innermost, a thread walks down four neighbouring columns. Long
//! reductions with few results are split over cubes and finished by a second kernel. The order of
//! every combination is fixed by the shape alone, so results are the same bits every time.

use crate::{
    CubeBackend, Memory,
    intern::Interned,
    map::CUBE,
    program::{Inputs, MapPlan, bind, eval},
    reg::Reg,
    words::{D4, F4, U4},
};
use anymesh_kernel::{
    Buffer, DType, Dims, Error, Kind, MapProgram, Result,
    backend::{ReduceCall, ReduceOp},
    map::{Inst, Program, Unary},
};
use cubecl::{
    ir::{ElemType, FloatKind, IntKind, UIntKind},
    prelude::*,
};

/// Where a launch puts its results: final values, or parts that a second launch finishes.
const PARTS: u32 = 1024;

/// What is known of some elements on each of four lanes.
#[derive(CubeType, Clone, Copy)]
struct Acc<T: Numeric> {
    /// The reduction itself; the running maximum for log-sum-exp.
    value: Vector<T, Const<4>>,
    /// `sum(exp(x - value))`, for log-sum-exp.
    sum: Vector<T, Const<4>>,
    /// Where `value` was found, for arg-reductions.
    index: U4,
}

#[cube]
fn exp<T: Numeric>(x: Vector<T, Const<4>>, #[comptime] wide: bool) -> Vector<T, Const<4>> {
    if comptime!(wide) {
        Vector::cast_from(crate::math::unary_wide(D4::cast_from(x), Unary::Exp))
    } else {
        Vector::cast_from(crate::math::unary(F4::cast_from(x), Unary::Exp))
    }
}

#[cube]
fn log<T: Numeric>(x: Vector<T, Const<4>>, #[comptime] wide: bool) -> Vector<T, Const<4>> {
    if comptime!(wide) {
        Vector::cast_from(crate::math::unary_wide(D4::cast_from(x), Unary::Log))
    } else {
        Vector::cast_from(crate::math::unary(F4::cast_from(x), Unary::Log))
    }
}

/// Lanes where `b` replaces `a` as the extreme; NaN is more extreme than anything.
#[cube]
fn replaces<T: Numeric>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] largest: bool,
) -> Vector<bool, Const<4>> {
    let (a_nan, b_nan) = (!a.equal(&a), !b.equal(&b));
    let beyond = if comptime!(largest) {
        a.less_than(&b)
    } else {
        b.less_than(&a)
    };
    (!a_nan).vec_and(b_nan.or(beyond))
}

#[cube]
fn combine<T: Numeric>(
    a: &Acc<T>,
    b: &Acc<T>,
    #[comptime] op: ReduceOp,
    #[comptime] wide: bool,
) -> Acc<T> {
    let largest = comptime!(matches!(
        op,
        ReduceOp::Max | ReduceOp::ArgMax | ReduceOp::LogSumExp
    ));
    match op {
        ReduceOp::Sum => Acc::<T> {
            value: a.value + b.value,
            sum: a.sum,
            index: a.index,
        },
        ReduceOp::Prod => Acc::<T> {
            value: a.value * b.value,
            sum: a.sum,
            index: a.index,
        },
        ReduceOp::Max | ReduceOp::Min => {
            let take = replaces(a.value, b.value, largest);
            Acc::<T> {
                value: select_many(take, b.value, a.value),
                sum: a.sum,
                index: a.index,
            }
        }
        ReduceOp::ArgMax | ReduceOp::ArgMin => {
            let both_nan = (!a.value.equal(&a.value)).vec_and(!b.value.equal(&b.value));
            let tie = a
                .value
                .equal(&b.value)
                .or(both_nan)
                .vec_and(b.index.less_than(&a.index));
            let take = replaces(a.value, b.value, largest).or(tie);
            Acc::<T> {
                value: select_many(take, b.value, a.value),
                sum: a.sum,
                index: select_many(take, b.index, a.index),
            }
        }
        ReduceOp::LogSumExp => {
            let top = select_many(replaces(a.value, b.value, largest), b.value, a.value);
            let one = Vector::new(T::from_int(1));
            // Equal values need no factor, and infinities must not be subtracted from each other.
            let fa = select_many(a.value.equal(&top), one, exp(a.value - top, wide));
            let fb = select_many(b.value.equal(&top), one, exp(b.value - top, wide));
            Acc::<T> {
                value: top,
                sum: a.sum * fa + b.sum * fb,
                index: a.index,
            }
        }
    }
}

/// Combines `b` into `a` in place.
#[cube]
fn absorb<T: Numeric>(
    a: &mut Acc<T>,
    b: &Acc<T>,
    #[comptime] op: ReduceOp,
    #[comptime] wide: bool,
) {
    let before = Acc::<T> {
        value: a.value,
        sum: a.sum,
        index: a.index,
    };
    let both = combine(&before, b, op, wide);
    a.value = both.value;
    a.sum = both.sum;
    a.index = both.index;
}

/// Four elements as accumulators; lanes from `valid` on are left out.
#[cube]
fn enter<T: Numeric>(x: Vector<T, Const<4>>, position: usize, valid: usize, identity: T) -> Acc<T> {
    let mut lane = U4::empty();
    #[unroll]
    for l in 0..4usize {
        lane.insert(l, comptime!(l as u32));
    }
    let inside = lane.less_than(&U4::new(valid as u32));
    let none = Vector::new(identity);
    let zero = Vector::new(T::from_int(0));
    Acc::<T> {
        value: select_many(inside, x, none),
        sum: select_many(inside, Vector::new(T::from_int(1)), zero),
        index: select_many(
            inside,
            lane + U4::new(position as u32),
            U4::new(0xffff_ffffu32),
        ),
    }
}

#[cube]
fn nothing<T: Numeric>(identity: T) -> Acc<T> {
    Acc::<T> {
        value: Vector::new(identity),
        sum: Vector::new(T::from_int(0)),
        index: U4::new(0xffff_ffffu32),
    }
}

#[cube]
fn turn<T: Numeric>(x: Vector<T, Const<4>>, #[comptime] by: usize) -> Vector<T, Const<4>> {
    let mut out = Vector::<T, Const<4>>::empty();
    #[unroll]
    for l in 0..4usize {
        out.insert(l, x.extract(comptime!((l + by) % 4)));
    }
    out
}

/// All four lanes combined; the result is in every lane.
#[cube]
fn fold_lanes<T: Numeric>(a: Acc<T>, #[comptime] op: ReduceOp, #[comptime] wide: bool) -> Acc<T> {
    let b = Acc::<T> {
        value: turn(a.value, 2usize),
        sum: turn(a.sum, 2usize),
        index: turn(a.index, 2usize),
    };
    let a = combine(&a, &b, op, wide);
    let b = Acc::<T> {
        value: turn(a.value, 1usize),
        sum: turn(a.sum, 1usize),
        index: turn(a.index, 1usize),
    };
    combine(&a, &b, op, wide)
}

/// Combines the accumulators of `width` neighbouring threads in shared memory; the first of them
/// gets the result.
#[cube]
fn tree<T: Numeric>(
    acc: Acc<T>,
    #[comptime] width: u32,
    #[comptime] op: ReduceOp,
    #[comptime] wide: bool,
) -> Acc<T> {
    let mut values = Shared::<[T]>::new_slice(256usize);
    let mut sums = Shared::<[T]>::new_slice(comptime!(if op == ReduceOp::LogSumExp {
        256usize
    } else {
        1usize
    }));
    let mut places = Shared::<[u32]>::new_slice(comptime!(if matches!(
        op,
        ReduceOp::ArgMax | ReduceOp::ArgMin
    ) {
        256usize
    } else {
        1usize
    }));
    let me = UNIT_POS as usize;
    let lane = UNIT_POS % width;
    let mut acc = fold_lanes(acc, op, wide);
    let mut half = comptime!(width / 2).runtime();
    while half > 0u32 {
        values[me] = acc.value.extract(0usize);
        if comptime!(op == ReduceOp::LogSumExp) {
            sums[me] = acc.sum.extract(0usize);
        }
        if comptime!(matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)) {
            places[me] = acc.index.extract(0usize);
        }
        sync_cube();
        if lane < half {
            let other = me + half as usize;
            let mut b = Acc::<T> {
                value: Vector::new(values[other]),
                sum: acc.sum,
                index: acc.index,
            };
            if comptime!(op == ReduceOp::LogSumExp) {
                b.sum = Vector::new(sums[other]);
            }
            if comptime!(matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)) {
                b.index = U4::new(places[other]);
            }
            absorb(&mut acc, &b, op, wide);
        }
        sync_cube();
        half /= 2u32;
    }
    acc
}

/// The output buffers: values (final ones, or parts), sums of parts, and places.
#[derive(CubeType, CubeLaunch)]
struct Results<T: Numeric> {
    values: Sequence<Box<[T]>>,
    places: Sequence<Box<[u32]>>,
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
            let result = acc.value + log(acc.sum, how.wide);
            let empty = acc.sum.equal(&Vector::new(T::from_int(0)));
            out.values.index_mut(0usize)[at] = select_many(empty, acc.value, result).extract(l);
        }
    } else if comptime!(how.scaled && !how.parts) {
        out.values.index_mut(0usize)[at] = acc.value.extract(l) * scale;
    } else {
        out.values.index_mut(0usize)[at] = acc.value.extract(l);
    }
}

/// What a launch is specialised on besides its program and operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct How {
    /// Threads that share a row (row kernel).
    width: u32,
    /// Elements that a thread loads before it combines them.
    unroll: usize,
    /// Whether the results are parts.
    parts: bool,
    /// Whether the element type is f64.
    wide: bool,
    /// Whether to multiply the result.
    scaled: bool,
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

/// `width` threads of a cube share a row; `256 / width` rows to a cube; `splits` cubes to a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn reduce_rows<T: Numeric>(
    inputs: &Inputs,
    out: &mut Results<T>,
    faults: &mut Sequence<Box<[u32]>>,
    rows: usize,
    length: usize,
    chunks_per_split: usize,
    identity: InputScalar,
    scale: InputScalar,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let (identity, scale) = (identity.get::<T>(), scale.get::<T>());
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
        #[unroll]
        for u in 0..how.unroll {
            let at = (chunk + u * width) * 4usize;
            let valid = select(chunk + u * width < end, length - at, 0usize);
            absorb(
                &mut acc,
                &enter(*loaded.index(u), at, valid, identity),
                op,
                how.wide,
            );
        }
        chunk += how.unroll * width;
    }
    let acc = tree(acc, how.width, op, how.wide);
    if lane == 0usize && first < chunks {
        write(out, &acc, line, 0usize, scale, op, how);
    }
}

/// A thread walks down four neighbouring columns of its split.
#[cube(launch_unchecked, address_type = "dynamic")]
fn reduce_columns<T: Numeric>(
    inputs: &Inputs,
    out: &mut Results<T>,
    faults: &mut Sequence<Box<[u32]>>,
    columns: usize,
    length: usize,
    rows_per_split: usize,
    identity: InputScalar,
    scale: InputScalar,
    #[comptime] plan: Interned<MapPlan>,
    #[comptime] op: ReduceOp,
    #[comptime] how: How,
) {
    let (identity, scale) = (identity.get::<T>(), scale.get::<T>());
    let groups = (columns + 3usize) / 4usize;
    let (group, split) = (ABSOLUTE_POS % groups, ABSOLUTE_POS / groups);
    let first = split * rows_per_split;
    let end = min(first + rows_per_split, length);
    if first < end {
        let mut acc = nothing::<T>(identity);
        let mut row = first;
        while row < end {
            let mut loaded = Sequence::<Vector<T, Const<4>>>::new();
            #[unroll]
            for u in 0..how.unroll {
                let at = min(row + u, end - 1usize) * columns + group * 4usize;
                loaded.push(elements::<T>(inputs, faults, at, plan.clone()));
            }
            #[unroll]
            for u in 0..how.unroll {
                let inside = row + u < end;
                let mut entered = enter(
                    *loaded.index(u),
                    0usize,
                    select(inside, 4usize, 0usize),
                    identity,
                );
                entered.index = U4::new(select(inside, (row + u) as u32, 0xffff_ffffu32));
                absorb(&mut acc, &entered, op, how.wide);
            }
            row += how.unroll;
        }
        #[unroll]
        for l in 0..4usize {
            let column = group * 4usize + l;
            if column < columns {
                write(out, &acc, split * columns + column, l, scale, op, how);
            }
        }
    }
}

/// Combines the parts `[splits, results]` of an earlier launch: one cube for each result.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish<T: Numeric>(
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
        absorb(&mut acc, &first_lane(part, identity), op, how.wide);
        split += comptime!(how.width as usize);
    }
    let acc = tree(acc, how.width, op, how.wide);
    if UNIT_POS == 0u32 {
        write(out, &acc, result, 0usize, scale, op, how);
    }
}

/// A part on lane 0 only: its copies on the other lanes must not count again.
#[cube]
fn first_lane<T: Numeric>(part: Acc<T>, identity: T) -> Acc<T> {
    let mut lane = U4::new(1u32);
    lane.insert(0usize, 0u32);
    let first = lane.equal(&U4::new(0u32));
    let none = nothing::<T>(identity);
    Acc::<T> {
        value: select_many(first, part.value, none.value),
        sum: select_many(first, part.sum, none.sum),
        index: select_many(first, part.index, none.index),
    }
}

/// How a reduction runs: which kernel, and how it is cut.
struct Cut {
    rows: bool,
    /// Results.
    kept: usize,
    /// Elements of each.
    length: usize,
    width: u32,
    splits: usize,
}

impl Cut {
    fn new(call: &ReduceCall) -> (Self, Dims) {
        let shape = &call.map.shape;
        let reduced = |d: usize| call.axes.contains(&d);
        let length: usize = call.axes.iter().map(|&d| shape[d]).product();
        let kept = shape.numel() / length;
        // The dimension that memory runs along: the one the first input steps through by ones, else
        // the last.
        let strides = call.map.inputs.first().map(|i| &i.view.layout.strides);
        let runs = (0..shape.rank())
            .rev()
            .find(|&d| shape[d] > 1 && strides.is_some_and(|s| s[d].abs() == 1));
        let runs = runs.or_else(|| (0..shape.rank()).rev().find(|&d| shape[d] > 1));
        let rows = kept == 1 || runs.is_none_or(reduced);
        let (kept_dims, axes): (Dims, Dims) = (
            (0..shape.rank()).filter(|&d| !reduced(d)).collect(),
            call.axes.clone(),
        );
        let order: Dims = if rows {
            kept_dims.into_iter().chain(axes).collect()
        } else {
            axes.into_iter().chain(kept_dims).collect()
        };
        // Enough threads to fill a large GPU, and no split so short that starting it costs more
        // than its work.
        let (width, splits) = if rows {
            let width = (length.div_ceil(4).next_power_of_two() as u32).clamp(1, CUBE);
            let lines = kept.div_ceil((CUBE / width) as usize);
            (
                width,
                (1024 / lines.max(1))
                    .min(length.div_ceil(4 * CUBE as usize * 4))
                    .max(1),
            )
        } else {
            let threads = kept.div_ceil(4);
            (
                1,
                (131_072 / threads.max(1))
                    .min(length.div_ceil(16))
                    .clamp(1, PARTS as usize),
            )
        };
        (
            Cut {
                rows,
                kept,
                length,
                width,
                splits,
            },
            order,
        )
    }
}

impl CubeBackend {
    pub(crate) fn run_reduce(&self, call: &ReduceCall) -> Result<Buffer> {
        let program = without_bools(&call.map.program);
        let kind = program.kinds[program.outputs[0].0 as usize];
        let transcendental = call.mode == ReduceOp::LogSumExp && kind == Kind::F64;
        if transcendental && !self.capabilities.f64_math {
            return Err(Error::Unsupported {
                device: self.name.clone(),
                what: "logsumexp in f64".into(),
                hint: "cast to f32".into(),
            });
        }
        // Infinities saturate to the ends of an integer type.
        let identity = match call.mode {
            ReduceOp::Sum => 0.0,
            ReduceOp::Prod => 1.0,
            ReduceOp::Max | ReduceOp::ArgMax | ReduceOp::LogSumExp => f64::NEG_INFINITY,
            ReduceOp::Min | ReduceOp::ArgMin => f64::INFINITY,
        };
        let result = match kind {
            Kind::F32 => self.reduce_as::<f32>(call, &program, identity as f32)?,
            Kind::F64 => self.reduce_as::<f64>(call, &program, identity)?,
            Kind::I32 => self.reduce_as::<i32>(call, &program, identity as i32)?,
            Kind::I64 => self.reduce_as::<i64>(call, &program, identity as i64)?,
            Kind::U32 | Kind::Bool => self.reduce_as::<u32>(call, &program, identity as u32)?,
        };
        let arg = matches!(call.mode, ReduceOp::ArgMax | ReduceOp::ArgMin);
        let stored = if arg { DType::I32 } else { kind.dtype() };
        self.convert(
            result,
            stored,
            call.dtype,
            call.map.shape.numel()
                / call
                    .axes
                    .iter()
                    .map(|&d| call.map.shape[d])
                    .product::<usize>(),
        )
    }

    /// The reduction of what `program` gives, which stands for the call's own.
    fn reduce_as<T: Numeric>(
        &self,
        call: &ReduceCall,
        program: &MapProgram,
        identity: T,
    ) -> Result<Memory> {
        let kind = program.kinds[program.outputs[0].0 as usize];
        let elem = elem_of(kind);
        let (identity, scale) = (
            InputScalar::new(identity, elem),
            InputScalar::new(call.scale.unwrap_or(1.0), elem),
        );
        let (cut, order) = Cut::new(call);
        let run = if cut.rows { cut.length } else { cut.kept };
        let mut bound = self.bind_program(&call.map, Some(&order), Some(run))?;
        bound.plan.program = program.clone();
        let arg = matches!(call.mode, ReduceOp::ArgMax | ReduceOp::ArgMin);
        let dtype = if size_of::<T>() == 8 {
            DType::F64
        } else {
            DType::F32
        };
        let allocate = |parts: bool, n: usize| -> Result<(Vec<Memory>, Vec<Memory>)> {
            let values = if parts && call.mode == ReduceOp::LogSumExp {
                2
            } else {
                usize::from(parts || !arg)
            };
            Ok((
                (0..values)
                    .map(|_| self.alloc(dtype, n))
                    .collect::<Result<_>>()?,
                (0..usize::from(arg))
                    .map(|_| self.alloc(DType::I32, n))
                    .collect::<Result<_>>()?,
            ))
        };
        let launch = |(values, places): &(Vec<Memory>, Vec<Memory>)| {
            let list = |m: &[Memory]| -> Vec<_> {
                m.iter().map(|m| (m.handle.clone(), m.bytes)).collect()
            };
            ResultsLaunch::<T>::new(bind(&list(values), size_of::<T>()), bind(&list(places), 4))
        };
        let parts = cut.splits > 1;
        let how = How {
            width: cut.width,
            unroll: cut.unroll(),
            parts,
            wide: kind == Kind::F64,
            scaled: call.scale.is_some(),
        };
        let out = allocate(parts, cut.kept * cut.splits)?;
        let (client, dim) = (&self.client, CubeDim::new_1d(CUBE));
        let faults = self.fault_if(program.can_fault());
        let (inputs, address) = (bound.launch(), bound.address);
        let plan = self.programs.intern(bound.plan);
        // SAFETY: kernels guard rows, columns and chunks; buffers are as long as what is written.
        unsafe {
            if cut.rows {
                let chunks = cut.length.div_ceil(4).div_ceil(cut.splits);
                let count = crate::cubes(cut.kept * cut.splits * cut.width as usize, CUBE);
                reduce_rows::launch_unchecked::<T>(
                    client,
                    count,
                    dim,
                    address,
                    inputs,
                    launch(&out),
                    faults,
                    cut.kept,
                    cut.length,
                    chunks,
                    identity,
                    scale,
                    plan,
                    call.mode,
                    how,
                );
            } else {
                let rows = cut.length.div_ceil(cut.splits);
                let count = crate::cubes(cut.kept.div_ceil(4) * cut.splits, CUBE);
                reduce_columns::launch_unchecked::<T>(
                    client,
                    count,
                    dim,
                    address,
                    inputs,
                    launch(&out),
                    faults,
                    cut.kept,
                    cut.length,
                    rows,
                    identity,
                    scale,
                    plan,
                    call.mode,
                    how,
                );
            }
        }
        let (values, places) = if parts {
            let final_out = allocate(false, cut.kept)?;
            let splits = cut.used_splits();
            let width = splits.next_power_of_two().clamp(32, CUBE as usize) as u32;
            let how = How {
                width,
                parts: false,
                ..how
            };
            // SAFETY: one cube for each result, surplus cubes repeat an earlier one.
            unsafe {
                finish::launch_unchecked::<T>(
                    client,
                    crate::cubes(cut.kept, 1),
                    CubeDim::new_1d(width),
                    AddressType::U32,
                    launch(&out),
                    launch(&final_out),
                    cut.kept,
                    splits,
                    identity,
                    scale,
                    call.mode,
                    how,
                );
            }
            final_out
        } else {
            out
        };
        let mut results = if arg { places } else { values };
        Ok(results.swap_remove(0))
    }
}

impl Cut {
    /// Four where a thread has that many loads to make.
    fn unroll(&self) -> usize {
        let loads = if self.rows {
            self.length.div_ceil(4 * self.width as usize)
        } else {
            self.length
        } / self.splits;
        if loads >= 4 { 4 } else { 1 }
    }

    /// Splits that hold anything: rounding up the size of a split may leave the last ones empty.
    fn used_splits(&self) -> usize {
        let units = if self.rows {
            self.length.div_ceil(4)
        } else {
            self.length
        };
        units.div_ceil(units.div_ceil(self.splits))
    }
}

/// The CubeCL type of a kind.
pub(crate) fn elem_of(kind: Kind) -> ElemType {
    match kind {
        Kind::F32 => ElemType::Float(FloatKind::F32),
        Kind::F64 => ElemType::Float(FloatKind::F64),
        Kind::I32 => ElemType::Int(IntKind::I32),
        Kind::I64 => ElemType::Int(IntKind::I64),
        Kind::U32 | Kind::Bool => ElemType::UInt(UIntKind::U32),
    }
}

/// Bools are reduced as 0 and 1.
fn without_bools(program: &MapProgram) -> MapProgram {
    let (reg, _) = program.outputs[0];
    if program.kinds[reg as usize] != Kind::Bool {
        return program.clone();
    }
    let mut program = Program::clone(program);
    program.insts.push(Inst::Cast(reg, DType::U32));
    program.kinds.push(Kind::U32);
    program.outputs[0] = ((program.insts.len() - 1) as u16, DType::U32);
    program.into()
}
