//! Integer functions on four lanes. All arithmetic wraps; division by zero is flagged elsewhere and
//! gives any value here.

use crate::words::{I4, L4, U4};
use anymesh_kernel::map::{Binary, Unary};
use cubecl::prelude::*;

#[cube]
pub(crate) fn unary_u32(x: U4, #[comptime] op: Unary) -> U4 {
    match op {
        Unary::Neg => U4::new(0u32) - x,
        Unary::Sign => min(x, U4::new(1u32)),
        Unary::Not => !x,
        _ => x,
    }
}

#[cube]
pub(crate) fn unary_signed<T: Int>(
    x: Vector<T, Const<4>>,
    #[comptime] op: Unary,
) -> Vector<T, Const<4>> {
    let zero = Vector::new(T::from_int(0));
    let one = Vector::new(T::from_int(1));
    let minus = Vector::new(T::from_int(-1));
    match op {
        Unary::Neg => zero - x,
        Unary::Abs => select_many(x.less_than(&zero), zero - x, x),
        Unary::Sign => select_many(
            x.less_than(&zero),
            minus,
            select_many(x.greater_than(&zero), one, zero),
        ),
        _ => x ^ minus,
    }
}

/// What is the same for all integers.
#[cube]
fn common<T: Int>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] op: Binary,
) -> Vector<T, Const<4>> {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Max => select_many(a.less_than(&b), b, a),
        Binary::Min => select_many(b.less_than(&a), b, a),
        Binary::And => a & b,
        Binary::Or => a | b,
        _ => a ^ b,
    }
}

/// `a` to the power of `b >= 0` by squaring, over all `bits` of the exponent.
#[cube]
fn power<T: Int>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] bits: u32,
) -> Vector<T, Const<4>> {
    let one = Vector::new(T::from_int(1));
    let zero = Vector::new(T::from_int(0));
    let mut result = one;
    let mut base = a;
    let mut exponent = b;
    for _ in 0..bits {
        result = select_many((exponent & one).equal(&zero), result, result * base);
        base = base * base;
        exponent = exponent >> one;
    }
    result
}

/// A negative exponent leaves what is left of the true value after truncation: 1 or -1 for those
/// bases, else 0.
#[cube]
fn signed_power<T: Int>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] bits: u32,
) -> Vector<T, Const<4>> {
    let one = Vector::new(T::from_int(1));
    let zero = Vector::new(T::from_int(0));
    let minus = Vector::new(T::from_int(-1));
    let odd = (b & one).equal(&one);
    let of_minus = select_many(odd, minus, one);
    let inverse = select_many(
        a.equal(&one),
        one,
        select_many(a.equal(&minus), of_minus, zero),
    );
    select_many(b.less_than(&zero), inverse, power(a, b, bits))
}

/// A divisor without the two cases that trap or that drivers disagree on: 0, and the smallest
/// number by -1.
#[cube]
fn safe<T: Int>(b: Vector<T, Const<4>>, #[comptime] signed: bool) -> Vector<T, Const<4>> {
    let one = Vector::new(T::from_int(1));
    let zero = b.equal(&Vector::new(T::from_int(0)));
    if comptime!(signed) {
        select_many(
            zero,
            one,
            select_many(b.equal(&Vector::new(T::from_int(-1))), one, b),
        )
    } else {
        select_many(zero, one, b)
    }
}

#[cube]
fn signed_division<T: Int>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] op: Binary,
) -> Vector<T, Const<4>> {
    let zero = Vector::new(T::from_int(0));
    let one = Vector::new(T::from_int(1));
    let minus_one = b.equal(&Vector::new(T::from_int(-1)));
    let d = safe(b, true);
    let quotient = a / d;
    let remainder = a - quotient * d;
    // The quotient was cut towards zero; it is one too high where the signs differ and something is
    // left.
    let uneven = (!remainder.equal(&zero))
        .vec_and(((remainder ^ d) & Vector::new(T::min_value())).not_equal(&zero));
    match op {
        Binary::TruncDiv => select_many(minus_one, zero - a, quotient),
        Binary::FloorDiv => select_many(
            minus_one,
            zero - a,
            select_many(uneven, quotient - one, quotient),
        ),
        _ => select_many(
            minus_one,
            zero,
            select_many(uneven, remainder + d, remainder),
        ),
    }
}

#[cube]
pub(crate) fn binary_u32(a: U4, b: U4, #[comptime] op: Binary) -> U4 {
    match op {
        Binary::FloorDiv | Binary::TruncDiv => a / safe(b, false),
        Binary::Rem => {
            let d = safe(b, false);
            a - (a / d) * d
        }
        Binary::Pow => power(a, b, 32u32),
        Binary::Shl => select_many(
            b.less_than(&U4::new(32u32)),
            a << (b & U4::new(31u32)),
            U4::new(0u32),
        ),
        Binary::Shr => select_many(
            b.less_than(&U4::new(32u32)),
            a >> (b & U4::new(31u32)),
            U4::new(0u32),
        ),
        _ => common(a, b, op),
    }
}

#[cube]
pub(crate) fn binary_i32(a: I4, b: I4, #[comptime] op: Binary) -> I4 {
    match op {
        Binary::FloorDiv | Binary::TruncDiv | Binary::Rem => signed_division(a, b, op),
        Binary::Pow => signed_power(a, b, 32u32),
        Binary::Shl | Binary::Shr => shift(a, b, 32i64, op),
        _ => common(a, b, op),
    }
}

#[cube]
pub(crate) fn binary_i64(a: L4, b: L4, #[comptime] op: Binary) -> L4 {
    match op {
        Binary::FloorDiv | Binary::TruncDiv | Binary::Rem => signed_division(a, b, op),
        Binary::Pow => signed_power(a, b, 64u32),
        Binary::Shl | Binary::Shr => shift(a, b, 64i64, op),
        _ => common(a, b, op),
    }
}

#[cube]
fn shift<T: Int>(
    a: Vector<T, Const<4>>,
    b: Vector<T, Const<4>>,
    #[comptime] width: i64,
    #[comptime] op: Binary,
) -> Vector<T, Const<4>> {
    let zero = Vector::new(T::from_int(0));
    let count = b & Vector::new(T::from_int(comptime!(width - 1)));
    let inside = b.equal(&count);
    match op {
        Binary::Shl => select_many(inside, a << count, zero),
        _ => select_many(
            inside,
            a >> count,
            select_many(a.less_than(&zero), Vector::new(T::from_int(-1)), zero),
        ),
    }
}
