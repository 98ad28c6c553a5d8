//! Functions of two operands, element by element, with broadcasting. The right side is a tensor or
//! a number.
//!
//! ```
//! # use anymesh_core::Tensor;
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1f32, 2.0, 3.0], [3], &device)?;
//! let column = Tensor::from_slice(&[10f32, 20.0], [2, 1], &device)?;
//! assert_eq!((&x + &column)?.to_vec::<f32>()?, [11.0, 12.0, 13.0, 21.0, 22.0, 23.0]);
//! assert_eq!((1.0 - &x)?.to_vec::<f32>()?, [0.0, -1.0, -2.0]);
//! assert_eq!(x.ge(2)?.to_vec::<bool>()?, [false, true, true]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::elementwise::{Arg, elementwise};
use crate::map::{Binary, Val};

/// `op` on floats, which know NaN, and `other` on the rest.
fn float_or<'b>(x: Val<'b>, y: Val<'b>, op: Binary, other: Binary) -> Val<'b> {
    x.binary(if x.kind().is_float() { op } else { other }, y)
}

elementwise! {
    /// Sum; integers wrap. Bools are refused: use `logical_or`, or cast.
    add(x, y: impl Into<Arg<'a>>) Number "..., ... -> ... ; linear 0 1" = x + y;
    /// Difference; integers wrap.
    sub(x, y: impl Into<Arg<'a>>) Number "..., ... -> ... ; linear 0 1" = x - y;
    /// Product; integers wrap.
    mul(x, y: impl Into<Arg<'a>>) Number "..., ... -> ... ; linear 0 ; linear 1" = x * y;
    /// True division: integers give `f32`. Partial sums are added before a tensor divides them: it
    /// may hold zeros, at which `2 / 0 + -1 / 0` is not `(2 - 1) / 0`.
    div(x, y: impl Into<Arg<'a>>) Float "..., ... -> ... ; linear 0" = x / y;
    /// The quotient rounded towards minus infinity. An integer divided by zero is an error.
    floor_div(x, y: impl Into<Arg<'a>>) Number "..., ... -> ..." = x.floor_div(y);
    /// The quotient rounded towards zero. An integer divided by zero is an error.
    trunc_div(x, y: impl Into<Arg<'a>>) Number "..., ... -> ..." = x.binary(Binary::TruncDiv, y);
    /// What `floor_div` leaves: it has the sign of the divisor, as in Python. An integer zero
    /// divisor is an error.
    remainder(x, y: impl Into<Arg<'a>>) Number "..., ... -> ..." = x.rem(y);
    /// `x^y`. Integers wrap; a negative integer exponent gives the truncated value: 0, or ±1 for
    /// bases ±1.
    pow(x, y: impl Into<Arg<'a>>) Number "..., ... -> ..." = x.pow(y);
    /// The larger; NaN if either is NaN.
    maximum(x, y: impl Into<Arg<'a>>) Any "..., ... -> ... ; monotone 0 ; monotone 1" = x.max(y);
    /// The smaller; NaN if either is NaN.
    minimum(x, y: impl Into<Arg<'a>>) Any "..., ... -> ... ; monotone 0 ; monotone 1" = x.min(y);
    /// The larger; NaN only if both are NaN.
    fmax(x, y: impl Into<Arg<'a>>) Any "..., ... -> ..." = float_or(x, y, Binary::Fmax, Binary::Max);
    /// The smaller; NaN only if both are NaN.
    fmin(x, y: impl Into<Arg<'a>>) Any "..., ... -> ..." = float_or(x, y, Binary::Fmin, Binary::Min);
    /// The angle of the point with ordinate `x` and abscissa `y`, in `-pi..=pi`.
    atan2(x, y: impl Into<Arg<'a>>) Float "..., ... -> ..." = x.binary(Binary::Atan2, y);
    /// `sqrt(x^2 + y^2)` without overflow on the way.
    hypot(x, y: impl Into<Arg<'a>>) Float "..., ... -> ..." = x.binary(Binary::Hypot, y);
    /// 0 where `x` is negative, 1 where positive, `y` where zero, NaN where `x` is NaN.
    heaviside(x, y: impl Into<Arg<'a>>) Number "..., ... -> ..." = x.eq(x.lit(0)).select(y, x.sign().max(x.lit(0)));
    /// The magnitude of `x` with the sign of `y`, also that of -0.
    copysign(x, y: impl Into<Arg<'a>>) Float "..., ... -> ..." = x.binary(Binary::Copysign, y);
    /// Whether equal. NaN equals nothing.
    eq(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.eq(y);
    /// Whether different. NaN differs from everything.
    ne(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.ne(y);
    /// Whether less.
    lt(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.lt(y);
    /// Whether less or equal.
    le(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.le(y);
    /// Whether greater.
    gt(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.gt(y);
    /// Whether greater or equal.
    ge(x, y: impl Into<Arg<'a>>) Compare "..., ... -> ..." = x.ge(y);
    /// Whether both are true. Anything but zero is true, NaN too, here and for `logical_or` and
    /// `logical_xor`.
    logical_and(x, y: impl Into<Arg<'a>>) Logic "..., ... -> ..." = x.and(y);
    /// Whether at least one is true.
    logical_or(x, y: impl Into<Arg<'a>>) Logic "..., ... -> ..." = x.or(y);
    /// Whether exactly one is true.
    logical_xor(x, y: impl Into<Arg<'a>>) Logic "..., ... -> ..." = x.xor(y);
    /// Bits set in both.
    bitwise_and(x, y: impl Into<Arg<'a>>) Bits "..., ... -> ..." = x.and(y);
    /// Bits set in at least one.
    bitwise_or(x, y: impl Into<Arg<'a>>) Bits "..., ... -> ..." = x.or(y);
    /// Bits set in exactly one.
    bitwise_xor(x, y: impl Into<Arg<'a>>) Bits "..., ... -> ..." = x.xor(y);
    /// Bits moved up. Counts outside `0..width` give 0.
    shl(x, y: impl Into<Arg<'a>>) Integer "..., ... -> ..." = x.binary(Binary::Shl, y);
    /// Bits moved down, with the sign. Counts outside `0..width` give 0, or -1 for negative values.
    shr(x, y: impl Into<Arg<'a>>) Integer "..., ... -> ..." = x.binary(Binary::Shr, y);
}
