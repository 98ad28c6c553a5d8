//! Every float function of one value, by instruction, and those among them that are more than
//! elementary: the error function, the gamma function and their kin. `elementary.rs` has the rules
//! for `f32`, `wide.rs` those for `f64`.

use cubecl::prelude::*;

use super::{elementary, elementary::*, wide};
use crate::words::{D4, F4, U4};
use anymesh_kernel::map::Unary;

/// A function of one value while a kernel is compiled.
type Code<T> = fn(&Scope, NativeExpand<T>) -> NativeExpand<T>;

/// The code of a function in `f32`, and in `f64` (only where the device has `f64` functions, but
/// for arithmetic and rounding).
pub(super) fn of(op: Unary) -> (Code<F4>, Code<D4>) {
    match op {
        Unary::Neg => (elementary::neg::expand, wide::neg::expand),
        Unary::Abs => (elementary::abs::expand, wide::abs::expand),
        Unary::Sign => (elementary::sign::expand, wide::sign::expand),
        Unary::Exp => (elementary::exp::expand, wide::exp::expand),
        Unary::Exp2 => (elementary::exp2::expand, wide::exp2::expand),
        Unary::Expm1 => (elementary::expm1::expand, wide::expm1::expand),
        Unary::Log => (elementary::log::expand, wide::log::expand),
        Unary::Log2 => (elementary::log2::expand, wide::log2::expand),
        Unary::Log10 => (elementary::log10::expand, wide::log10::expand),
        Unary::Log1p => (elementary::log1p::expand, wide::log1p::expand),
        Unary::Sqrt => (elementary::sqrt::expand, wide::sqrt::expand),
        Unary::Rsqrt => (elementary::rsqrt::expand, wide::rsqrt::expand),
        Unary::Sin => (elementary::sin::expand, wide::sin::expand),
        Unary::Cos => (elementary::cos::expand, wide::cos::expand),
        Unary::Tan => (elementary::tan::expand, wide::tan::expand),
        Unary::Asin => (elementary::asin::expand, wide::asin::expand),
        Unary::Acos => (elementary::acos::expand, wide::acos::expand),
        Unary::Atan => (elementary::atan::expand, wide::atan::expand),
        Unary::Sinh => (elementary::sinh::expand, wide::sinh::expand),
        Unary::Cosh => (elementary::cosh::expand, wide::cosh::expand),
        Unary::Tanh => (elementary::tanh::expand, wide::tanh::expand),
        Unary::Asinh => (elementary::asinh::expand, wide::asinh::expand),
        Unary::Acosh => (elementary::acosh::expand, wide::acosh::expand),
        Unary::Atanh => (elementary::atanh::expand, wide::atanh::expand),
        Unary::Floor => (elementary::floor::expand, wide::floor::expand),
        Unary::Ceil => (elementary::ceil::expand, wide::ceil::expand),
        Unary::Round => (elementary::round::expand, wide::round::expand),
        Unary::Trunc => (elementary::trunc::expand, wide::trunc::expand),
        Unary::Erf => (erf::expand, wide::erf::expand),
        Unary::Erfinv => (erfinv::expand, double::erfinv::expand),
        Unary::Lgamma => (lgamma::expand, double::lgamma::expand),
        Unary::Digamma => (digamma::expand, double::digamma::expand),
        Unary::IsNan | Unary::IsInf | Unary::Not => panic!("{op:?} does not give a float"),
    }
}

/// `erf(x) / x - 1` in `x^2`, `|x| <= 1`.
const ERF: &[f32] = &[
    -9.68013592e-06,
    0.000112705442,
    -0.000848471129,
    0.00522107491,
    -0.0268654451,
    0.112837829,
    -0.376126379,
    0.128379166,
];
/// `-ln(1 - erf(x))`, `1 <= x <= 4`.
const ERF_TAIL: &[f32] = &[
    2.16868502e-05,
    -0.000441336364,
    0.00420456193,
    -0.0252082571,
    0.108418576,
    0.633219898,
    1.12957847,
    -0.000188040227,
];
/// `erfinv(x) / x` in `x^2`, `x^2 <= 1/2`.
const ERFINV: &[f32] = &[
    0.485190541,
    -0.700377584,
    0.569417,
    -0.174754381,
    0.104699776,
    0.0572745129,
    0.0871844515,
    0.127529949,
    0.23201409,
    0.886226952,
];
/// `erfinv(x) / s` in `s - 1.5` and in `s - 3.125`, with `s = sqrt(-ln(1 - x^2))` in 0.83..2.25 and
/// 2.25..4.1.
const ERFINV_NEAR: &[f32] = &[
    -7.12258843e-05,
    7.62811178e-05,
    0.000448565697,
    -0.000246782642,
    -0.00338214403,
    0.00363498065,
    0.0253272597,
    0.907690227,
];
const ERFINV_FAR: &[f32] = &[
    3.55064512e-05,
    -0.00013921599,
    0.000204130498,
    0.00037692886,
    -0.00408814987,
    0.0184272695,
    0.946635306,
];
/// `lgamma(2 + t) / (t (1 + t))`, `-3/4 <= t <= 1/2`.
const LGAMMA: &[f32] = &[
    -0.000202175579,
    0.000167265855,
    -0.000340791739,
    0.000930922455,
    -0.00212081871,
    0.00499573397,
    -0.0123832179,
    0.0329651572,
    -0.100317322,
    0.422784328,
];
/// Stirling's correction `x (lgamma(x) - (x - 1/2)(ln x - 1) - ln(2 pi) / 2 + 1/2)` in `1 / x^2`,
/// `x >= 2.5`.
const STIRLING: &[f32] = &[
    0.000401106605,
    -0.000539931643,
    0.000790230581,
    -0.00277768751,
    0.0833333358,
];
/// `pi d tan(pi (1/2 - d))` and `pi tan(pi d) / d` in `d^2`, `d <= 1/4`.
const PI_COT: &[f32] = &[
    -2.42681694,
    -1.97702122,
    -2.03571749,
    -2.16463113,
    -3.28986812,
    1.0,
];
const PI_TAN: &[f32] = &[
    401602.719,
    -900.775208,
    10169.3145,
    1986.06995,
    513.115112,
    128.176804,
    32.4697227,
    9.86960411,
];
/// The positive root of digamma, in two parts.
const DIGAMMA_ROOT: f32 = 1.46163213;
const DIGAMMA_ROOT_LOW: f32 = 1.24381499e-08;
/// `digamma(root + d) / d`, `1 <= root + d <= 2`.
const DIGAMMA: &[f32] = &[
    -0.0168835651,
    0.0297598075,
    -0.033739876,
    0.047274258,
    -0.0720391124,
    0.107956231,
    -0.163953826,
    0.258495718,
    -0.442763001,
    0.967672288,
];
/// `-x^2 (digamma(x) - ln x + 1 / (2 x))` in `1 / x^2`, `x >= 2`.
const DIGAMMA_FAR: &[f32] = &[
    -0.00295598363,
    0.00422372995,
    -0.00375507376,
    0.00393930217,
    -0.00833234284,
    0.0833333209,
];

/// 1.34 ulp.
#[cube]
pub(crate) fn erf(x: F4) -> F4 {
    let a = abs(x);
    let near = a.less_than(&all(1.0));
    let inner = select_many(near, a, all(0.0));
    let tail = all(1.0) - exp_shifted(neg(polynomial(clamp_to(a, 1.0, 4.0), ERF_TAIL)), 0);
    let tail = select_many(a.greater_than(&all(4.0)), all(1.0), tail);
    let y = select_many(near, inner + inner * polynomial(inner * inner, ERF), tail);
    keep_nan(x, copysign(y, x))
}

/// 2.76 ulp.
#[cube]
pub(crate) fn erfinv(x: F4) -> F4 {
    let a = abs(x);
    let square = a * a;
    let center = a * polynomial(square, ERFINV);
    let rest = select_many(
        a.less_than(&all(1.0)),
        (all(1.0) - a) * (all(1.0) + a),
        all(0.5),
    );
    let s = neg(log_positive(rest)).sqrt();
    let near = polynomial(s - all(1.5), ERFINV_NEAR);
    let far = polynomial(s - all(3.125), ERFINV_FAR);
    let tail = s * select_many(s.less_than(&all(2.25)), near, far);
    let y = select_many(square.less_than(&all(0.5)), center, tail);
    let y = select_many(a.equal(&all(1.0)), infinity(x), y);
    let y = select_many(a.greater_than(&all(1.0)), nan(x), copysign(y, x));
    keep_nan(x, y)
}

/// `sin(pi f)`, `0 <= f <= 1/2`.
#[cube]
fn sin_pi(f: F4) -> F4 {
    let steep = f.greater_than(&all(0.25));
    let f = select_many(steep, all(0.5) - f, f);
    let angle = f * all(PI) + f * all(PI_LOW);
    select_many(steep, cos_reduced(angle), sin_reduced(angle))
}

/// `pi / tan(pi f)`, `0 < f <= 1/2`.
#[cube]
fn pi_over_tan_pi(f: F4) -> F4 {
    let steep = f.greater_than(&all(0.25));
    let d = select_many(steep, all(0.5) - f, f);
    let square = d * d;
    select_many(
        steep,
        d * polynomial(square, PI_TAN),
        polynomial(square, PI_COT) / d,
    )
}

/// The logarithm of the magnitude of the gamma function. Below -1/2, where it has zeros between its
/// poles, ulp are those of the largest of `|y|`, 1 and `|x| / 2`. 3.31 ulp.
#[cube]
pub(crate) fn lgamma(x: F4) -> F4 {
    let reflected = x.less_than(&all(-0.5));
    let y = select_many(reflected, neg(x), x);
    // Up to 2.5: lgamma(2 + t) less the logarithm of the factors between.
    let (below, first, far) = (
        y.less_than(&all(0.5)),
        y.less_than(&all(1.25)),
        y.greater_equal(&all(2.5)),
    );
    let t = select_many(below, y, select_many(first, y - all(1.0), y - all(2.0)));
    let t = select_many(far, all(0.0), t);
    let factor = select_many(
        below,
        abs(y) * (all(1.0) + y),
        select_many(first, y, all(1.0)),
    );
    let (e, f) = log_split(select_many(far, y, factor));
    // Both sums start with a number that is exact, so that little is lost where they nearly cancel.
    let (high, low) = (e * all(LN_2_HIGH), e * all(LN_2_LOW) + log_reduced(f));
    let inverse = all(1.0) / select_many(far, y, all(1.0));
    let stirling = (y - all(0.5)) * (opaque(high - all(1.0)) + low)
        + (all(0.418938533) + inverse * polynomial(inverse * inverse, STIRLING));
    let value = select_many(
        far,
        stirling,
        t * (all(1.0) + t) * polynomial(t, LGAMMA) - (high + low),
    );
    // Gamma(-y) Gamma(y) = -pi / (y sin(pi y)).
    let sine = sin_pi(abs(y - y.round()));
    let pole = reflected
        .vec_and(sine.equal(&all(0.0)))
        .or(magnitude_bits(x).equal(&U4::new(0u32)))
        .or(is_inf(x));
    let mirrored = log_positive(all(PI) / (y * sine)) - value;
    let value = select_many(reflected, mirrored, value);
    keep_nan(x, select_many(pole, infinity(x), value))
}

/// The derivative of `lgamma`. Below 0, where it has zeros between its poles, ulp are those of the
/// larger of 1 and the two terms of the reflection. 2.71 ulp.
#[cube]
pub(crate) fn digamma(x: F4) -> F4 {
    let reflected = x.less_than(&all(0.0));
    let y = select_many(reflected, all(1.0) - x, x);
    // From 2 on the asymptotic series; from 1 to 2 a polynomial about the root; below 1 that of y +
    // 1.
    let (low, far) = (y.less_than(&all(1.0)), y.greater_equal(&all(2.0)));
    let d =
        (y - select_many(low, all(DIGAMMA_ROOT - 1.0), all(DIGAMMA_ROOT))) - all(DIGAMMA_ROOT_LOW);
    let inverse = div(all(1.0), y);
    let middle = d * polynomial(d, DIGAMMA) - select_many(low, inverse, all(0.0));
    let square = inverse * inverse;
    let series = log_positive(y) - (inverse * all(0.5) + square * polynomial(square, DIGAMMA_FAR));
    let value = select_many(far, series, middle);
    // digamma(1 - x) - digamma(x) = pi / tan(pi x).
    let f = x - x.round();
    let value = select_many(
        reflected,
        value - copysign(pi_over_tan_pi(abs(f)), f),
        value,
    );
    let none = reflected.vec_and(f.equal(&all(0.0)).or(is_inf(x)));
    let value = select_many(none, nan(x), value);
    let value = select_many(bits(x).equal(&U4::new(INFINITY)), x, value);
    let value = select_many(
        magnitude_bits(x).equal(&U4::new(0u32)),
        neg(copysign(infinity(x), x)),
        value,
    );
    keep_nan(x, value)
}

/// In `f64`, on CUDA alone.
mod double {
    use super::super::wide::*;
    use crate::words::{D4, Q4};
    use cubecl::prelude::*;
    use std::f64::consts::PI;

    /// `(2k - 1)`-th coefficients of Stirling's series for `lgamma` in `1 / x^2`, highest power first.
    const STIRLING: &[f64] = &[
        -3617.0 / 122400.0,
        1.0 / 156.0,
        -691.0 / 360360.0,
        1.0 / 1188.0,
        -1.0 / 1680.0,
        1.0 / 1260.0,
        -1.0 / 360.0,
        1.0 / 12.0,
    ];
    /// The same for `ln x - 1 / (2 x) - digamma(x)`, less one power of `1 / x^2`.
    const DIGAMMA: &[f64] = &[
        -3617.0 / 8160.0,
        1.0 / 12.0,
        -691.0 / 32760.0,
        1.0 / 132.0,
        -1.0 / 240.0,
        1.0 / 252.0,
        -1.0 / 120.0,
        1.0 / 12.0,
    ];

    /// `1 - erf(x)`, `x >= 0`: from 2 on by its continued fraction, which keeps the digits that `erf`
    /// has lost.
    #[cube]
    fn erfc_positive(x: D4) -> D4 {
        let y = select_many(x.less_than(&all(2.0)), all(2.0), x);
        let mut fraction = all(0.0);
        let mut k = all(30.0);
        for _ in 0..60u32 {
            fraction = k / (y + fraction);
            k -= all(0.5);
        }
        let tail = (-(y * y)).exp() * all(0.5 * std::f64::consts::FRAC_2_SQRT_PI) / (y + fraction);
        select_many(x.less_than(&all(2.0)), all(1.0) - x.erf(), tail)
    }

    /// A closed-form guess good to three digits, then Halley's method, each step of which triples them.
    #[cube]
    pub(crate) fn erfinv(x: D4) -> D4 {
        let a = abs(x);
        let inside = a.less_than(&all(1.0));
        let a = select_many(inside, a, all(0.0));
        let log = ((all(1.0) - a) * (all(1.0) + a)).ln();
        let middle = log * all(0.5) + all(2.0 / (PI * 0.147));
        let mut y = ((middle * middle - log * all(1.0 / 0.147)).sqrt() - middle).sqrt();
        #[unroll]
        for _ in 0..3u32 {
            let excess = select_many(
                a.less_than(&all(0.5)),
                y.erf() - a,
                (all(1.0) - a) - erfc_positive(y),
            );
            let step = excess / ((-(y * y)).exp() * all(std::f64::consts::FRAC_2_SQRT_PI));
            y -= step / (all(1.0) + y * step);
        }
        // Near zero the guess has lost all its digits, and the function is a line.
        let y = select_many(
            a.less_than(&all(1e-8)),
            a * all(1.0 / std::f64::consts::FRAC_2_SQRT_PI),
            y,
        );
        let edge = select_many(abs(x).equal(&all(1.0)), infinity(x), nan(x));
        keep_nan(x, copysign(select_many(inside, y, edge), x))
    }

    /// The logarithm of the magnitude of the gamma function, to 1e-14 of the larger of 1 and its terms.
    #[cube]
    pub(crate) fn lgamma(x: D4) -> D4 {
        let a = abs(x);
        // Up by ten steps into the range of Stirling's series.
        let mut y = a;
        let mut product = all(1.0);
        #[unroll]
        for _ in 0..10u32 {
            let low = y.less_than(&all(10.0));
            product *= select_many(low, y, all(1.0));
            y += select_many(low, all(1.0), all(0.0));
        }
        let inverse = all(1.0) / y;
        let series =
            all(0.9189385332046728 - 0.5) + inverse * polynomial(inverse * inverse, STIRLING);
        let value = (y - all(0.5)) * (y.ln() - all(1.0)) + series - product.ln();
        // Gamma(-a) Gamma(a) = -pi / (a sin(pi a)).
        let sine = abs((all(PI) * (a - a.round())).sin());
        let mirrored = (all(PI) / sine).ln() - a.ln() - value;
        let minus = x.less_than(&all(0.0));
        let value = select_many(minus, mirrored, value);
        let pole = minus
            .vec_and(sine.equal(&all(0.0)))
            .or(magnitude_bits(x).equal(&Q4::new(0u64)))
            .or(is_inf(x));
        keep_nan(x, select_many(pole, infinity(x), value))
    }

    /// The derivative of `lgamma`, to 1e-14 of the larger of 1 and its terms.
    #[cube]
    pub(crate) fn digamma(x: D4) -> D4 {
        let minus = x.less_than(&all(0.0));
        let mut y = select_many(minus, all(1.0) - x, x);
        let mut below = all(0.0);
        #[unroll]
        for _ in 0..10u32 {
            let low = y.less_than(&all(10.0));
            below += select_many(low, all(1.0) / y, all(0.0));
            y += select_many(low, all(1.0), all(0.0));
        }
        let inverse = all(1.0) / y;
        let square = inverse * inverse;
        let value = y.ln() - (inverse * all(0.5) + square * polynomial(square, DIGAMMA)) - below;
        // digamma(1 - x) - digamma(x) = pi / tan(pi x).
        let f = x - x.round();
        let value = select_many(minus, value - all(PI) / (all(PI) * f).tan(), value);
        let none = minus.vec_and(f.equal(&all(0.0)).or(is_inf(x)));
        let value = select_many(none, nan(x), value);
        let value = select_many(bits(x).equal(&Q4::new(INFINITY)), x, value);
        let value = select_many(
            magnitude_bits(x).equal(&Q4::new(0u64)),
            neg(copysign(infinity(x), x)),
            value,
        );
        keep_nan(x, value)
    }
}
