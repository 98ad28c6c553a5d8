//! Functions of one tensor, element by element. Activations are in `activation.rs`.

use super::elementwise::elementwise;
use crate::map::Unary;

elementwise! {
    /// Absolute value. The smallest signed integer stays itself.
    abs(x) Number "... -> ..." = x.abs();
    /// Negation; integers wrap.
    neg(x) Number "... -> ... ; linear 0" = -x;
    /// -1, 0 or 1; NaN stays NaN.
    sign(x) Number "... -> ... ; monotone 0" = x.sign();
    /// The square; integers wrap.
    square(x) Number "... -> ..." = x * x;
    /// `1 / x`.
    reciprocal(x) Float "... -> ..." = x.lit(1.0) / x => |y| -(y * y);
    /// `e^x`.
    ///
    /// ```
    /// # let device = anymesh_backend_cpu::device();
    /// let x = anymesh_core::Tensor::from_slice(&[0i32, 1], [2], &device)?;
    /// assert_eq!(x.exp()?.to_vec::<f32>()?, [1.0, std::f32::consts::E]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    exp(x) Float "... -> ... ; monotone 0" = x.exp() => |y| y;
    /// `2^x`.
    exp2(x) Float "... -> ... ; monotone 0" = x.unary(Unary::Exp2);
    /// `e^x - 1`, accurate near 0.
    expm1(x) Float "... -> ... ; monotone 0" = x.expm1();
    /// Natural logarithm: -inf at 0, NaN below.
    log(x) Float "... -> ..." = x.log();
    /// Logarithm to base 2.
    log2(x) Float "... -> ..." = x.unary(Unary::Log2);
    /// Logarithm to base 10.
    log10(x) Float "... -> ..." = x.unary(Unary::Log10);
    /// `log(1 + x)`, accurate near 0.
    log1p(x) Float "... -> ..." = x.log1p();
    /// Square root; NaN below 0.
    sqrt(x) Float "... -> ..." = x.sqrt() => |y| y.lit(0.5) / y;
    /// `1 / sqrt(x)`.
    rsqrt(x) Float "... -> ..." = x.rsqrt();
    /// Sine of radians.
    sin(x) Float "... -> ..." = x.sin();
    /// Cosine of radians.
    cos(x) Float "... -> ..." = x.cos();
    /// Tangent of radians.
    tan(x) Float "... -> ..." = x.unary(Unary::Tan);
    /// Inverse sine; NaN outside `-1..=1`.
    asin(x) Float "... -> ..." = x.unary(Unary::Asin);
    /// Inverse cosine; NaN outside `-1..=1`.
    acos(x) Float "... -> ..." = x.unary(Unary::Acos);
    /// Inverse tangent.
    atan(x) Float "... -> ... ; monotone 0" = x.unary(Unary::Atan);
    /// Hyperbolic sine.
    sinh(x) Float "... -> ... ; monotone 0" = x.unary(Unary::Sinh);
    /// Hyperbolic cosine.
    cosh(x) Float "... -> ..." = x.unary(Unary::Cosh);
    /// Hyperbolic tangent.
    tanh(x) Float "... -> ... ; monotone 0" = x.tanh() => |y| (y.lit(1.0) - y) * (y + 1.0);
    /// Inverse hyperbolic sine.
    asinh(x) Float "... -> ... ; monotone 0" = x.unary(Unary::Asinh);
    /// Inverse hyperbolic cosine; NaN below 1.
    acosh(x) Float "... -> ..." = x.unary(Unary::Acosh);
    /// Inverse hyperbolic tangent; infinite at ±1, NaN beyond.
    atanh(x) Float "... -> ..." = x.unary(Unary::Atanh);
    /// The error function.
    erf(x) Float "... -> ... ; monotone 0" = x.erf();
    /// Inverse of the error function; infinite at ±1, NaN beyond.
    erfinv(x) Float "... -> ..." = x.unary(Unary::Erfinv);
    /// Logarithm of the absolute value of the gamma function.
    lgamma(x) Float "... -> ..." = x.unary(Unary::Lgamma);
    /// Derivative of `lgamma`.
    digamma(x) Float "... -> ..." = x.unary(Unary::Digamma);
    /// The largest integer not above. Integers stay as they are, here and for `ceil`, `round` and
    /// `trunc`.
    floor(x) Number "... -> ... ; monotone 0" = if x.kind().is_float() { x.floor() } else { x };
    /// The smallest integer not below.
    ceil(x) Number "... -> ... ; monotone 0" = if x.kind().is_float() { x.unary(Unary::Ceil) } else { x };
    /// The nearest integer; halves go to the even one.
    round(x) Number "... -> ... ; monotone 0" = if x.kind().is_float() { x.unary(Unary::Round) } else { x };
    /// The integer part.
    trunc(x) Number "... -> ... ; monotone 0" = if x.kind().is_float() { x.trunc() } else { x };
    /// What `trunc` cuts off; it has the sign of `x`.
    frac(x) Float "... -> ..." = x - x.trunc();
    /// Whether the value is NaN. Never for integers and bools.
    isnan(x) Compare "... -> ..." = if x.kind().is_float() { x.is_nan() } else { x.ne(x) };
    /// Whether the value is infinite. Never for integers and bools.
    isinf(x) Compare "... -> ..." = if x.kind().is_float() { x.is_inf() } else { x.ne(x) };
    /// Whether the value is neither infinite nor NaN. Always for integers and bools.
    isfinite(x) Compare "... -> ..." = if x.kind().is_float() { !x.is_nan().or(x.is_inf()) } else { x.eq(x) };
    /// Whether the value is zero (or false).
    logical_not(x) Logic "... -> ..." = !x;
    /// All bits flipped; logical on bools.
    bitwise_not(x) Bits "... -> ..." = !x;
}
