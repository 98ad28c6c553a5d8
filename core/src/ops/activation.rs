//! Activation functions. NaN stays NaN in all of them.

use super::elementwise::{Arg, elementwise};
use crate::{
    Error, Kind, Result,
    map::{
        Val,
        formulas::{below, gelu, gelu_slope, gelu_tanh, gelu_tanh_slope, sigmoid, silu},
    },
};

/// `log(1 + e^x)`.
pub(super) fn softplus(x: Val<'_>) -> Val<'_> {
    x.gt(0.0).select(x, x.lit(0.0)) + below(x).exp().log1p()
}

fn clip<'b>(x: Val<'b>, low: Val<'b>, high: Val<'b>) -> Val<'b> {
    x.max(low).min(high)
}

/// `x` between 0 and 6, with a slope of 0 at both.
fn relu6(x: Val<'_>) -> Val<'_> {
    let (low, high) = (x.lit(0), x.lit(6));
    let held = x.le(low).select(low, x.ge(high).select(high, x));
    // Some shader compilers turn a comparison around, which is another one for NaN.
    if x.kind().is_float() {
        x.is_nan().select(x, held)
    } else {
        held
    }
}

/// `x - tanh(x)`. Near 0, where the difference would have no digits, by the series of the tangent.
fn tanhshrink(x: Val<'_>) -> Val<'_> {
    const TERMS: [f64; 10] = [
        1.0 / 3.0,
        -2.0 / 15.0,
        17.0 / 315.0,
        -62.0 / 2835.0,
        1382.0 / 155_925.0,
        -21_844.0 / 6_081_075.0,
        929_569.0 / 638_512_875.0,
        -6_404_582.0 / 10_854_718_875.0,
        443_861_162.0 / 1_856_156_927_625.0,
        -18_888_466_084.0 / 194_896_477_400_625.0,
    ];
    let terms = if x.kind() == Kind::F64 {
        &TERMS[..]
    } else {
        &TERMS[..5]
    };
    let square = x * x;
    let series = terms
        .iter()
        .rev()
        .fold(x.lit(0.0), |sum, term| sum * square + *term);
    x.abs().lt(0.25).select(series * square * x, x - x.tanh())
}

// Fixed-point constants of self-normalizing networks (Klambauer et al., 2017).
const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

elementwise! {
    /// The larger of `x` and 0.
    ///
    /// ```
    /// # let device = anymesh_backend_cpu::device();
    /// let x = anymesh_core::Tensor::from_slice(&[-2f32, 3.0], [2], &device)?;
    /// assert_eq!(x.relu()?.to_vec::<f32>()?, [0.0, 3.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    relu(x) Number "... -> ... ; monotone 0" = x.max(x.lit(0)) => |y| y.gt(0.0).select(y.lit(1.0), y.lit(0.0));
    /// `x` held between 0 and 6.
    relu6(x) Number "... -> ... ; monotone 0" = relu6(x);
    /// `x` where positive, else `slope * x`.
    leaky_relu(x, slope: f64) Float "... -> ..." = x.gt(0.0).select(x, x * slope);
    /// `x` where positive, else `alpha * (e^x - 1)`.
    elu(x, alpha: f64) Float "... -> ..." = x.gt(0.0).select(x, x.expm1() * alpha);
    /// `elu` with the constants that keep mean 0 and variance 1.
    selu(x) Float "... -> ... ; monotone 0" = x.gt(0.0).select(x, x.expm1() * SELU_ALPHA) * SELU_SCALE;
    /// The logistic function `1 / (1 + e^-x)`.
    sigmoid(x) Float "... -> ... ; monotone 0" = sigmoid(x) => |y| y * (y.lit(1.0) - y);
    /// `log(sigmoid(x))` without underflow.
    logsigmoid(x) Float "... -> ... ; monotone 0" = -softplus(-x);
    /// `x * Phi(x)` with the normal distribution function, `x / 2 * (1 + erf(x / sqrt(2)))`.
    gelu(x) Float "... -> ..." = gelu(x), slope |x| gelu_slope(x);
    /// The approximation of `gelu` by a hyperbolic tangent. It is evaluated as a logistic function,
    /// which is the same without the cancellation at negative `x`.
    gelu_tanh(x) Float "... -> ..." = gelu_tanh(x), slope |x| gelu_tanh_slope(x);
    /// `x * sigmoid(x)`, also known as swish.
    silu(x) Float "... -> ..." = silu(x);
    /// `x * tanh(softplus(x))`. With `e = exp(x)` that is `x * e (e + 2) / (e (e + 2) + 2)`, which
    /// loses no digits.
    mish(x) Float "... -> ..." = {
        let e = x.exp();
        let n = (e + 2.0) * e;
        // Beyond 20 the factor rounds to 1 in every dtype, and `e * e` would overflow later.
        x.gt(20.0).select(x, x * (n / (n + 2.0)))
    };
    /// `x / (1 + |x|)`.
    softsign(x) Float "... -> ..." = {
        // Far from 0 as what is missing from 1, whose slope does not cancel.
        let (size, sign) = (x.abs() + 1.0, x.sign());
        x.abs().lt(1.0).select(x / size, sign - sign / size)
    };
    /// `x` moved towards 0 by `lambda`, 0 where it is nearer than that.
    softshrink(x, lambda: f64) Float "... -> ..." = x - clip(x, -lambda, lambda);
    /// `x`, but 0 where its absolute value is at most `lambda`.
    hardshrink(x, lambda: f64) Float "... -> ..." = x.abs().le(lambda).select(x.lit(0.0), x);
    /// `relu6(x + 3) / 6`.
    hardsigmoid(x) Float "... -> ... ; monotone 0" = relu6(x + 3.0) / 6.0;
    /// `x * relu6(x + 3) / 6`.
    hardswish(x) Float "... -> ..." = x * relu6(x + 3.0) / 6.0;
    /// `x` held between `low` and `high`; `clip` under the name that neural networks use.
    hardtanh(x, low: impl Into<Arg<'a>>, high: impl Into<Arg<'a>>) Number "..., ..., ... -> ... ; monotone 0" = clip(x, low, high);
    /// `x - tanh(x)`.
    tanhshrink(x) Float "... -> ..." = tanhshrink(x);
    /// `x` where above `limit`, else `value`.
    threshold(x, limit: impl Into<Arg<'a>>, value: impl Into<Arg<'a>>) Number "..., ..., ... -> ..." = x.le(limit).select(value, x);
    /// `max(0, x) + min(0, alpha * (e^(x / alpha) - 1))`, smooth for every `alpha` but 0, which is
    /// an error.
    celu(x, alpha: f64 as nonzero("celu", "alpha", alpha)?) Float "... -> ..." = x.max(0.0) + ((x / alpha).expm1() * alpha).min(0.0);
    /// `log(1 + e^(beta x)) / beta`; `x` itself where `beta x` is above `threshold`. The usual
    /// values are 1 and 20.
    softplus(x, beta: f64 as nonzero("softplus", "beta", beta)?, threshold: f64) Float "... -> ..." = {
        (x * beta).gt(threshold).select(x, softplus(x * beta) / beta)
    };
    /// `log(x / (1 - x))`, the inverse of `sigmoid`. With `eps`, `x` is first held between `eps`
    /// and `1 - eps`.
    logit(x, eps: Option<f64> as logit_bound(eps)?) Float "... -> ..." = {
        let x = clip(x, eps, x.lit(1.0) - eps);
        (x / (x.lit(1.0) - x)).log()
    };
}

fn nonzero(op: &'static str, name: &'static str, value: f64) -> Result<f64> {
    if value == 0.0 || value.is_nan() {
        Err(Error::argument(
            op,
            name,
            format!("{name} is {value}, it must be a number other than 0"),
        ))
    } else {
        Ok(value)
    }
}

/// No bound is a bound at minus infinity.
fn logit_bound(eps: Option<f64>) -> Result<f64> {
    match eps {
        None => Ok(f64::NEG_INFINITY),
        Some(eps) if (0.0..=0.5).contains(&eps) => Ok(eps),
        Some(eps) => Err(Error::argument(
            "logit",
            "eps",
            format!("eps is {eps}, it must lie in 0..=0.5"),
        )),
    }
}
