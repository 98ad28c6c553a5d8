//! Error function, gamma function and their kin, on four `f32` lanes; see the `math` module for the
//! rules.

use cubecl::prelude::*;

use super::elementary::*;
use crate::words::{F4, U4};

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
