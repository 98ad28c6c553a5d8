//! What is known of some elements, and how two such become one.

use crate::{
    nvidia,
    words::{D4, F4, U4},
};
use anymesh_kernel::{Kind, backend::ReduceOp, map::Unary};
use cubecl::prelude::*;

/// What is known of some elements on each of four lanes.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Acc<T: Numeric> {
    /// The reduction itself; the running maximum for log-sum-exp.
    pub(super) value: Vector<T, Const<4>>,
    /// `sum(exp(x - value))`, for log-sum-exp.
    pub(super) sum: Vector<T, Const<4>>,
    /// Where `value` was found, for arg-reductions.
    pub(super) index: U4,
}

#[cube]
fn exp<T: Numeric>(x: Vector<T, Const<4>>, #[comptime] kind: Kind) -> Vector<T, Const<4>> {
    if comptime!(kind == Kind::F64) {
        Vector::cast_from(crate::math::unary_wide(D4::cast_from(x), Unary::Exp))
    } else {
        Vector::cast_from(crate::math::unary(F4::cast_from(x), Unary::Exp))
    }
}

#[cube]
pub(super) fn log<T: Numeric>(
    x: Vector<T, Const<4>>,
    #[comptime] kind: Kind,
) -> Vector<T, Const<4>> {
    if comptime!(kind == Kind::F64) {
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
fn more_extreme<T: Numeric>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] largest: bool,
) -> Vector<T, Const<4>> {
    select_many(replaces(a, b, largest), b, a)
}

#[cube]
#[allow(unused_variables)]
fn extreme_float(a: F4, b: F4, #[comptime] largest: bool) -> F4 {
    intrinsic!(|scope| match nvidia::is_target(scope) {
        true => nvidia::extreme::expand(scope, a, b, largest),
        false => more_extreme::expand::<f32>(scope, a, b, largest),
    })
}

/// The more extreme one of each lane.
#[cube]
fn extreme<T: Numeric>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] largest: bool,
    #[comptime] kind: Kind,
) -> Vector<T, Const<4>> {
    if comptime!(kind == Kind::F32) {
        Vector::cast_from(extreme_float(F4::cast_from(a), F4::cast_from(b), largest))
    } else {
        more_extreme(a, b, largest)
    }
}

#[cube]
pub(super) fn combine<T: Numeric>(
    a: &Acc<T>,
    b: &Acc<T>,
    #[comptime] op: ReduceOp,
    #[comptime] kind: Kind,
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
        ReduceOp::Max | ReduceOp::Min => Acc::<T> {
            value: extreme(a.value, b.value, largest, kind),
            sum: a.sum,
            index: a.index,
        },
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
            let fa = select_many(a.value.equal(&top), one, exp(a.value - top, kind));
            let fb = select_many(b.value.equal(&top), one, exp(b.value - top, kind));
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
pub(super) fn absorb<T: Numeric>(
    a: &mut Acc<T>,
    b: &Acc<T>,
    #[comptime] op: ReduceOp,
    #[comptime] kind: Kind,
) {
    let before = Acc::<T> {
        value: a.value,
        sum: a.sum,
        index: a.index,
    };
    let both = combine(&before, b, op, kind);
    a.value = both.value;
    a.sum = both.sum;
    a.index = both.index;
}

/// `exp(x - top)` where nothing is larger than the top; one where they are equal, as infinities must
/// not be subtracted from each other.
#[cube]
fn share<T: Numeric>(
    x: Vector<T, Const<4>>,
    top: Vector<T, Const<4>>,
    #[comptime] kind: Kind,
    #[comptime] native: bool,
) -> Vector<T, Const<4>> {
    let power = if comptime!(native && kind == Kind::F32) {
        // An error in the units of the largest term, which is one, is all that matters.
        Vector::cast_from(nvidia::coarse_exp(F4::cast_from(x - top)))
    } else {
        exp(x - top, kind)
    };
    select_many(x.equal(&top), Vector::new(T::from_int(1)), power)
}

/// Combines several values at once into `a`: for log-sum-exp what was there is made less once for all
/// of them.
#[cube]
pub(super) fn absorb_all<T: Numeric>(
    a: &mut Acc<T>,
    values: &Sequence<Acc<T>>,
    #[comptime] count: usize,
    #[comptime] op: ReduceOp,
    #[comptime] kind: Kind,
    #[comptime] native: bool,
) {
    if comptime!(op == ReduceOp::LogSumExp) {
        let mut top = a.value;
        #[unroll]
        for k in 0..count {
            top = extreme(top, values.index(k).value, true, kind);
        }
        let mut sum = a.sum * share(a.value, top, kind, native);
        #[unroll]
        for k in 0..count {
            let value = values.index(k);
            sum += value.sum * share(value.value, top, kind, native);
        }
        a.value = top;
        a.sum = sum;
    } else {
        #[unroll]
        for k in 0..count {
            absorb(a, values.index(k), op, kind);
        }
    }
}

/// Four elements as accumulators; lanes from `valid` on are left out.
#[cube]
pub(super) fn enter<T: Numeric>(
    x: Vector<T, Const<4>>,
    position: usize,
    valid: usize,
    identity: T,
) -> Acc<T> {
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
pub(super) fn nothing<T: Numeric>(identity: T) -> Acc<T> {
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
fn fold_lanes<T: Numeric>(a: Acc<T>, #[comptime] op: ReduceOp, #[comptime] kind: Kind) -> Acc<T> {
    let b = Acc::<T> {
        value: turn(a.value, 2usize),
        sum: turn(a.sum, 2usize),
        index: turn(a.index, 2usize),
    };
    let a = combine(&a, &b, op, kind);
    let b = Acc::<T> {
        value: turn(a.value, 1usize),
        sum: turn(a.sum, 1usize),
        index: turn(a.index, 1usize),
    };
    combine(&a, &b, op, kind)
}

/// Combines the accumulators of `width` neighbouring threads in shared memory; the first of them
/// gets the result.
#[cube]
pub(super) fn tree<T: Numeric>(
    acc: Acc<T>,
    #[comptime] width: u32,
    #[comptime] op: ReduceOp,
    #[comptime] kind: Kind,
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
    let mut acc = fold_lanes(acc, op, kind);
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
            absorb(&mut acc, &b, op, kind);
        }
        sync_cube();
        half /= 2u32;
    }
    acc
}

/// A part on lane 0 only: its copies on the other lanes must not count again.
#[cube]
pub(super) fn first_lane<T: Numeric>(part: Acc<T>, identity: T) -> Acc<T> {
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

/// Combines lane by lane the accumulators of threads that are `width` apart, `256 / width` of them;
/// the first ones get the result.
#[cube]
pub(super) fn tree_across<T: Numeric>(
    acc: Acc<T>,
    #[comptime] width: u32,
    #[comptime] op: ReduceOp,
    #[comptime] kind: Kind,
) -> Acc<T> {
    let (sums_kept, places_kept) = comptime!((
        op == ReduceOp::LogSumExp,
        matches!(op, ReduceOp::ArgMax | ReduceOp::ArgMin)
    ));
    let mut values = Shared::<[Vector<T, Const<4>>]>::new_slice(256usize);
    let mut sums = Shared::<[Vector<T, Const<4>>]>::new_slice(comptime!(if sums_kept {
        256usize
    } else {
        1usize
    }));
    let mut places =
        Shared::<[U4]>::new_slice(comptime!(if places_kept { 256usize } else { 1usize }));
    let me = UNIT_POS as usize;
    let mut acc = acc;
    let mut half = comptime!(128 / width).runtime();
    while half > 0u32 {
        values[me] = acc.value;
        if comptime!(sums_kept) {
            sums[me] = acc.sum;
        }
        if comptime!(places_kept) {
            places[me] = acc.index;
        }
        sync_cube();
        if UNIT_POS < half * width {
            let other = me + (half * width) as usize;
            let mut b = Acc::<T> {
                value: values[other],
                sum: acc.sum,
                index: acc.index,
            };
            if comptime!(sums_kept) {
                b.sum = sums[other];
            }
            if comptime!(places_kept) {
                b.index = places[other];
            }
            absorb(&mut acc, &b, op, kind);
        }
        sync_cube();
        half /= 2u32;
    }
    acc
}
