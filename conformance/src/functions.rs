//! What is known about each float function of one tensor apart from its code: where it is called,
//! what it must give, and how far a device may be from that.
//!
//! Formulas are written independently of the ones that are tested: with `libm`, or by definition.

use std::f64::consts::{PI, SQRT_2};

/// Values at which functions turn, end or overflow. Subnormal numbers are left out: GPUs may read
/// them as zero, and then `log`, `rsqrt` and comparisons legitimately give something else.
pub const TURNS: &[f64] = &[
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    1e-30,
    -1e-30,
    3e4,
    -3e4,
    1e30,
    -1e30,
];

/// For periodic functions: hardware reduces only small arguments precisely, and what it makes of
/// infinity is unspecified.
const NEAR_ZERO: &[f64] = &[f64::NAN, 0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30];

/// For the gamma function's relatives, which have poles at zero and all negative integers where
/// even libraries disagree.
const POSITIVE: &[f64] = &[f64::NAN, f64::INFINITY, 1.0, 2.0, 0.5, 1.5, 1e-3, 3e4];

/// A function of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// The op.
    pub name: &'static str,
    /// The range where a last-bit change of `x` changes the result by few last bits.
    pub domain: (f64, f64),
    /// What the op must give.
    pub formula: fn(f64) -> f64,
    /// Arguments after the first, as the formula has them.
    pub params: &'static [f64],
    /// Special values.
    pub turns: &'static [f64],
    /// How far a device may be from the host in f32.
    pub error: Allowed,
}

/// An allowed error in f32, and why.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// Units in the last place of the expected value.
    pub ulps: f64,
    /// Units in the last place of the largest value.
    pub scale: f64,
    /// What makes it.
    pub reason: &'static str,
}

const fn allowed(ulps: f64, scale: f64, reason: &'static str) -> Allowed {
    Allowed {
        ulps,
        scale,
        reason,
    }
}

const EXACT: Allowed = allowed(0.0, 0.0, "arithmetic and rounding are the same everywhere");
/// Of division, also in [`super::cases`]'s table of other ops.
const DIVISION: Allowed = allowed(
    4.0,
    0.0,
    "GPU division may be 2.5 ulp off, and the division is the last or last but one step",
);
const ROOT: Allowed = allowed(
    4.0,
    0.0,
    "GPU inverse roots may be 2 ulp off, and roots are made of them",
);
const EXPONENT: Allowed = allowed(
    16.0,
    0.0,
    "2^(x log2 e): the rounding of the exponent grows with it; WGSL allows 3 + 2|x| ulp, and |x| is at most 8 in the cases",
);
const LOGISTIC: Allowed = allowed(
    16.0,
    0.0,
    "an exponential that is a few ulp off for any argument, and a division",
);
const SMALL_EXPONENT: Allowed = allowed(
    8.0,
    0.0,
    "made of short polynomials and one exponential, and relative at zero",
);
const SOFT: Allowed = allowed(
    16.0,
    1.0,
    "an exponential whose error passes through; the sum of both terms of logsigmoid is absolute in the larger",
);
const LOGARITHM: Allowed = allowed(
    4.0,
    4.0,
    "WGSL gives logarithms an absolute error of 2^-21 near their zero, and 3 ulp elsewhere",
);
const PERIODIC: Allowed = allowed(
    4.0,
    16.0,
    "absolute precision: hardware scales the argument to a fraction of a turn, which rounds in units of up to 8 radians",
);
const ARC: Allowed = allowed(
    8.0,
    4.0,
    "polynomials on a part of the range; the other parts are differences from a multiple of pi / 2, which are absolute",
);
const AREA: Allowed = allowed(
    8.0,
    2.0,
    "logarithms of a rounded argument near 1, where they are absolute",
);
const GAMMA: Allowed = allowed(
    16.0,
    2.0,
    "differences of logarithms and series around the zeros at 1, 1.46 and 2",
);
const CANCELS: Allowed = allowed(
    8.0,
    4.0,
    "1 + erf at negative x and x - tanh at small x cancel: what is left is absolute",
);

const fn function(name: &'static str, domain: (f64, f64), formula: fn(f64) -> f64) -> Function {
    Function {
        name,
        domain,
        formula,
        params: &[],
        turns: TURNS,
        error: EXACT,
    }
}

impl Function {
    const fn within(self, error: Allowed) -> Self {
        Self { error, ..self }
    }

    const fn with(self, params: &'static [f64]) -> Self {
        Self { params, ..self }
    }

    const fn turning(self, turns: &'static [f64]) -> Self {
        Self { turns, ..self }
    }
}

/// Every function of one tensor that gives floats: the ops of `unary.rs` and `activation.rs`.
pub const TABLE: &[Function] = &[
    function("abs", (-4.0, 4.0), |x| if x < 0.0 { -x } else { x }),
    function("neg", (-4.0, 4.0), |x| 0.0 - x),
    function("sign", (-4.0, 4.0), |x| if x > 0.0 { 1.0 } else { -1.0 }),
    function("square", (-4.0, 4.0), |x| x.powi(2)),
    function("reciprocal", (0.1, 8.0), |x| x.powi(-1)).within(DIVISION),
    function("exp", (-8.0, 8.0), libm::exp).within(EXPONENT),
    function("exp2", (-8.0, 8.0), libm::exp2).within(EXPONENT),
    function("expm1", (-8.0, 8.0), libm::expm1).within(SMALL_EXPONENT),
    function("log", (0.01, 20.0), libm::log).within(LOGARITHM),
    function("log2", (0.01, 20.0), libm::log2).within(LOGARITHM),
    function("log10", (0.01, 20.0), libm::log10).within(LOGARITHM),
    function("log1p", (-0.9, 20.0), libm::log1p).within(LOGARITHM),
    function("sqrt", (0.01, 50.0), libm::sqrt).within(ROOT),
    function("rsqrt", (0.01, 50.0), |x| 1.0 / libm::sqrt(x)).within(ROOT),
    function("sin", (-8.0, 8.0), libm::sin)
        .turning(NEAR_ZERO)
        .within(PERIODIC),
    function("cos", (-8.0, 8.0), libm::cos)
        .turning(NEAR_ZERO)
        .within(PERIODIC),
    function("tan", (-1.4, 1.4), libm::tan)
        .turning(NEAR_ZERO)
        .within(allowed(16.0, 4.0, "the quotient of sine and cosine")),
    function("asin", (-0.99, 0.99), libm::asin).within(ARC),
    function("acos", (-0.99, 0.99), libm::acos).within(ARC),
    function("atan", (-9.0, 9.0), libm::atan).within(ARC),
    function("sinh", (-8.0, 8.0), libm::sinh).within(EXPONENT),
    function("cosh", (-8.0, 8.0), libm::cosh).within(EXPONENT),
    function("tanh", (-5.0, 5.0), libm::tanh).within(SMALL_EXPONENT),
    function("asinh", (-9.0, 9.0), libm::asinh).within(AREA),
    function("acosh", (1.01, 20.0), libm::acosh).within(AREA),
    function("atanh", (-0.99, 0.99), libm::atanh).within(AREA),
    function("erf", (-4.0, 4.0), libm::erf).within(SMALL_EXPONENT),
    function("erfinv", (-0.99, 0.99), erfinv).within(allowed(
        16.0,
        0.0,
        "a polynomial in a rounded logarithm",
    )),
    function("lgamma", (0.1, 20.0), libm::lgamma)
        .turning(POSITIVE)
        .within(GAMMA),
    function("digamma", (0.1, 20.0), digamma)
        .turning(POSITIVE)
        .within(GAMMA),
    function("floor", (-9.5, 9.5), |x| (x + 100.0) as i64 as f64 - 100.0),
    function("ceil", (-9.5, 9.5), |x| 100.0 - (100.0 - x) as i64 as f64),
    function("round", (-9.5, 9.5), round_even),
    function("trunc", (-9.5, 9.5), |x| x as i64 as f64),
    function("frac", (-9.5, 9.5), |x| x - x as i64 as f64),
    function("relu", (-4.0, 4.0), |x| if x > 0.0 { x } else { 0.0 }),
    function("relu6", (-9.5, 9.5), |x| x.clamp(0.0, 6.0)),
    function(
        "leaky_relu",
        (-4.0, 4.0),
        |x| {
            if x < 0.0 { x * 0.1 } else { x }
        },
    )
    .with(&[0.1]),
    function("elu", (-4.0, 4.0), |x| {
        if x < 0.0 { 1.5 * libm::expm1(x) } else { x }
    })
    .with(&[1.5])
    .within(SMALL_EXPONENT),
    function("selu", (-4.0, 4.0), |x| {
        1.0507009873554805
            * if x < 0.0 {
                1.6732632423543772 * libm::expm1(x)
            } else {
                x
            }
    })
    .within(SMALL_EXPONENT),
    function("celu", (-4.0, 4.0), |x| {
        if x < 0.0 {
            0.5 * libm::expm1(x / 0.5)
        } else {
            x
        }
    })
    .with(&[0.5])
    .within(SMALL_EXPONENT),
    function("sigmoid", (-30.0, 30.0), logistic).within(LOGISTIC),
    function("logsigmoid", (-30.0, 30.0), |x| -softplus(-x)).within(SOFT),
    function("logit", (0.02, 0.98), |x| {
        libm::log(x.clamp(0.125, 0.875)) - libm::log1p(-x.clamp(0.125, 0.875))
    })
    .with(&[0.125])
    .within(LOGARITHM),
    function("gelu", (-4.0, 6.0), |x| x * 0.5 * libm::erfc(-x / SQRT_2)).within(CANCELS),
    function("gelu_tanh", (-4.0, 6.0), |x| {
        0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
    })
    .within(allowed(
        32.0,
        0.0,
        "as exp, with an exponent of up to 11 where it does not saturate",
    )),
    function("silu", (-9.0, 9.0), |x| x * logistic(x)).within(LOGISTIC),
    function("mish", (-9.0, 30.0), |x| x * libm::tanh(softplus(x))).within(SOFT),
    function("softplus", (-9.0, 9.0), |x| {
        if 2.0 * x > 5.0 {
            x
        } else {
            softplus(2.0 * x) / 2.0
        }
    })
    .with(&[2.0, 5.0])
    .within(SOFT),
    function("softsign", (-9.0, 9.0), |x| x / (1.0 + x.abs())).within(DIVISION),
    function("softshrink", (-4.0, 4.0), |x| {
        x.signum() * (x.abs() - 0.5).max(0.0)
    })
    .with(&[0.5]),
    function("hardshrink", (-4.0, 4.0), |x| {
        if x.abs() > 0.5 { x } else { 0.0 }
    })
    .with(&[0.5]),
    function("hardsigmoid", (-5.0, 5.0), |x| {
        (x / 6.0 + 0.5).clamp(0.0, 1.0)
    })
    .within(DIVISION),
    function("hardswish", (-5.0, 5.0), |x| {
        x * (x / 6.0 + 0.5).clamp(0.0, 1.0)
    })
    .within(DIVISION),
    function("hardtanh", (-5.0, 5.0), |x| x.clamp(-1.5, 2.0)).with(&[-1.5, 2.0]),
    function("tanhshrink", (-5.0, 5.0), |x| x - libm::tanh(x)).within(CANCELS),
    function("threshold", (-4.0, 4.0), |x| if x > 0.5 { x } else { -7.0 }).with(&[0.5, -7.0]),
];

/// The row of an op.
pub fn find(op: &str) -> Option<&'static Function> {
    TABLE.iter().find(|function| function.name == op)
}

fn digamma(x: f64) -> f64 {
    let (x, sum) = (0..30).fold((x, 0.0), |(x, sum), _| (x + 1.0, sum - 1.0 / x));
    let x2 = x * x;
    sum + x.ln() - 0.5 / x - 1.0 / (12.0 * x2) + 1.0 / (120.0 * x2 * x2)
        - 1.0 / (252.0 * x2 * x2 * x2)
}

/// Bisection, which needs nothing but `erf`.
fn erfinv(y: f64) -> f64 {
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..80 {
        let middle = 0.5 * (low + high);
        if libm::erf(middle) < y {
            low = middle
        } else {
            high = middle
        }
    }
    low
}

fn round_even(x: f64) -> f64 {
    let floor = x.floor();
    match x - floor {
        d if d < 0.5 => floor,
        d if d > 0.5 => floor + 1.0,
        _ if floor % 2.0 == 0.0 => floor,
        _ => floor + 1.0,
    }
}

fn logistic(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        x.exp() / (1.0 + x.exp())
    }
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + libm::log1p((-x.abs()).exp())
}
