//! Activation functions. NaN stays NaN in all of them.

use super::elementwise::{Arg, elementwise};
use crate::{Error, Result, map::Val};

/// `1 / (1 + e^-x)`: both ends are accurate, and the overflow of the exponential gives the limit 0.
fn sigmoid(x: Val<'_>) -> Val<'_> {
    x.lit(1.0) / ((-x).exp() + 1.0)
}

fn clip<'b>(x: Val<'b>, low: Val<'b>, high: Val<'b>) -> Val<'b> {
    x.max(low).min(high)
}

fn relu6(x: Val<'_>) -> Val<'_> {
    clip(x, x.lit(0), x.lit(6))
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
    logsigmoid(x) Float "... -> ... ; monotone 0" = x.min(0.0) - (-x.abs()).exp().log1p();
    /// `x * Phi(x)` with the normal distribution function, `x / 2 * (1 + erf(x / sqrt(2)))`.
    gelu(x) Float "... -> ..." = x * 0.5 * ((x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0);
    /// The approximation of `gelu` by a hyperbolic tangent. It is evaluated as a logistic function, which is the same
    /// without the cancellation at negative `x`.
    gelu_tanh(x) Float "... -> ..." = {
        // sqrt(8 / pi), since (1 + tanh(u)) / 2 = sigmoid(2 u).
        let u = (x * x * 0.044715 + 1.0) * x * 1.595_769_121_605_730_8;
        x / ((-u).exp() + 1.0)
    };
    /// `x * sigmoid(x)`, also known as swish.
    silu(x) Float "... -> ..." = x / ((-x).exp() + 1.0);
    /// `x * tanh(softplus(x))`. With `e = exp(x)` that is `x * e (e + 2) / (e (e + 2) + 2)`, which loses no digits.
    mish(x) Float "... -> ..." = {
        let e = x.exp();
        let n = (e + 2.0) * e;
        // Beyond 20 the factor rounds to 1 in every dtype, and `e * e` would overflow later.
        x.gt(20.0).select(x, x * (n / (n + 2.0)))
    };
    /// `x / (1 + |x|)`.
    softsign(x) Float "... -> ..." = x / (x.abs() + 1.0);
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
    tanhshrink(x) Float "... -> ..." = x - x.tanh();
    /// `x` where above `limit`, else `value`.
    threshold(x, limit: impl Into<Arg<'a>>, value: impl Into<Arg<'a>>) Number "..., ..., ... -> ..." = x.le(limit).select(value, x);
    /// `max(0, x) + min(0, alpha * (e^(x / alpha) - 1))`, smooth for every `alpha` but 0, which is an error.
    celu(x, alpha: f64 as nonzero("celu", "alpha", alpha)?) Float "... -> ..." = x.max(0.0) + ((x / alpha).expm1() * alpha).min(0.0);
    /// `log(1 + e^(beta x)) / beta`; `x` itself where `beta x` is above `threshold`. The usual values are 1 and 20.
    softplus(x, beta: f64 as nonzero("softplus", "beta", beta)?, threshold: f64) Float "... -> ..." = {
        (x * beta).gt(threshold).select(x, (x * beta).exp().log1p() / beta)
    };
    /// `log(x / (1 - x))`, the inverse of `sigmoid`. With `eps`, `x` is first held between `eps` and `1 - eps`.
    logit(x, eps: Option<f64> as logit_bound(eps)?) Float "... -> ..." = {
        let x = clip(x, eps, x.lit(1.0) - eps);
        (x / (x.lit(1.0) - x)).log()
    };
}

fn nonzero(op: &'static str, name: &str, value: f64) -> Result<f64> {
    if value == 0.0 || value.is_nan() { Err(Error::Argument { op, detail: format!("{name} is {value}, it must be a number other than 0") }) } else { Ok(value) }
}

/// No bound is a bound at minus infinity.
fn logit_bound(eps: Option<f64>) -> Result<f64> {
    match eps {
        None => Ok(f64::NEG_INFINITY),
        Some(eps) if (0.0..=0.5).contains(&eps) => Ok(eps),
        Some(eps) => Err(Error::Argument { op: "logit", detail: format!("eps is {eps}, it must lie in 0..=0.5") }),
    }
}
