//! Functions of `f32` values, computed in `f64` without branches so that loops over them vectorise.
//! Errors are around 1e-13: after rounding to `f32` the result is the correctly rounded one but for
//! about one value in a million.
//!
//! `FUSED` is whether a product and a sum are one instruction, which takes half of the time. Machines
//! that have it use it for all values; results then differ from those of others where the last
//! place of a `f64` decides how a `f32` rounds.

use std::f64::consts::{FRAC_PI_2, LN_2, LN_10, LOG2_E};

/// Adding and subtracting this rounds to an integer, which is then in the low bits of the sum.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Keeps NaN.
#[inline(always)]
fn clamp(x: f64, low: f64, high: f64) -> f64 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `yes` or `no`, both computed. With an ordinary `if` the compiler may move the work into the
/// branches, and then nothing vectorises.
#[inline(always)]
fn choose(condition: bool, yes: f64, no: f64) -> f64 {
    let mask = u64::from(condition).wrapping_neg();
    f64::from_bits((yes.to_bits() & mask) | (no.to_bits() & !mask))
}

/// `a * b + c`.
#[inline(always)]
fn plus<const FUSED: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `c0 + x (c1 + x (c2 + ..))`, written out: a loop here would keep the loop around it from
/// vectorising.
macro_rules! polynomial {
    ($x:expr, $c:expr) => { $c };
    ($x:expr, $c:expr, $($rest:expr),+) => { plus::<FUSED>($x, polynomial!($x, $($rest),+), $c) };
}

/// `2^n` and `exp(r) - 1` where `x = n log(2) + r`. For arguments where `f32` neither overflows nor
/// vanishes.
#[inline(always)]
fn exp_parts<const FUSED: bool>(x: f64) -> (f64, f64) {
    let shifted = plus::<FUSED>(x, LOG2_E, ROUND);
    let r = plus::<FUSED>(shifted - ROUND, -LN_2, x);
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let series = polynomial!(
        r,
        1.0,
        1.0 / 2.0,
        1.0 / 6.0,
        1.0 / 24.0,
        1.0 / 120.0,
        1.0 / 720.0,
        1.0 / 5040.0,
        1.0 / 40320.0,
        1.0 / 362_880.0,
        1.0 / 3_628_800.0,
        1.0 / 39_916_800.0
    );
    (scale, r * series)
}

#[inline(always)]
pub(crate) fn exp<const FUSED: bool>(x: f64) -> f64 {
    let (scale, rest) = exp_parts::<FUSED>(clamp(x, -120.0, 100.0));
    plus::<FUSED>(scale, rest, scale)
}

/// `exp(x * scale - base)` of many `x`, where it is no more than about one.
#[derive(Clone, Copy)]
pub(crate) struct Shifted {
    scale: f64,
    base: f64,
    /// To base 2, in two parts each, so that nothing is lost where scores and base are large and nearly
    /// the same.
    scale2: [f32; 2],
    base2: [f32; 2],
}

impl Shifted {
    pub(crate) fn new(scale: f64, base: f64) -> Self {
        let split = |x: f64| {
            let high = (x * LOG2_E) as f32;
            [high, (x * LOG2_E - f64::from(high)) as f32]
        };
        Self {
            scale,
            base,
            scale2: split(scale),
            base2: split(base),
        }
    }

    #[inline(always)]
    pub(crate) fn exp64(self, x: f64) -> f64 {
        (x * self.scale - self.base).exp()
    }

    /// In `f32` where products and sums are fused, to within the last place of `1 + |power|` of itself:
    /// an `f32` cannot hold the power any closer. What is less than the least normal number is zero.
    #[inline(always)]
    pub(crate) fn exp32<const FUSED: bool>(self, x: f32) -> f32 {
        /// As its namesake in `f64`.
        const ROUND: f32 = 12_582_912.0;
        if !FUSED {
            return exp::<FUSED>(f64::from(x) * self.scale - self.base) as f32;
        }
        let ([scale, scale_rest], [base, base_rest]) = (self.scale2, self.base2);
        let product = x * scale;
        let rest = x.mul_add(scale_rest, x.mul_add(scale, -product) - base_rest);
        let power = product - base;
        let power = if power > 127.0 { 127.0 } else { power };
        let rounded = power + ROUND;
        let f = (power - (rounded - ROUND)) + rest;
        // `(2^f - 1) / f`, interpolated at Chebyshev points of [-1/2, 1/2].
        let series = 0.000_154_532_62_f32
            .mul_add(f, 0.001_339_097_8)
            .mul_add(f, 0.009_618_082)
            .mul_add(f, 0.055_503_57)
            .mul_add(f, 0.240_226_5)
            .mul_add(f, std::f32::consts::LN_2);
        let result =
            series.mul_add(f, 1.0) * f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
        if power < -126.0 { 0.0 } else { result }
    }
}

#[inline(always)]
pub(crate) fn exp2<const FUSED: bool>(x: f64) -> f64 {
    exp::<FUSED>(x * LN_2)
}

#[inline(always)]
pub(crate) fn expm1<const FUSED: bool>(x: f64) -> f64 {
    let (scale, rest) = exp_parts::<FUSED>(clamp(x, -120.0, 100.0));
    // Of a tiny argument nothing may be lost in the sum: there `scale - 1` is exactly zero.
    let sum = plus::<FUSED>(scale, rest, scale - 1.0);
    if x == 0.0 { x } else { sum }
}

#[inline(always)]
pub(crate) fn log<const FUSED: bool>(x: f64) -> f64 {
    /// Bits of `sqrt(1/2)`: mantissas are taken from there to `sqrt(2)`.
    const LOWEST: u64 = 0x3fe6_a09e_667f_3bcd;
    let above = x.to_bits().wrapping_sub(LOWEST);
    let exponent = ((above as i64) >> 52) as u64;
    let mantissa = f64::from_bits((above & 0x000f_ffff_ffff_ffff).wrapping_add(LOWEST));
    // A small integer becomes a float by the same trick as in `exp`, which every instruction set
    // can do.
    let exponent = f64::from_bits(exponent.wrapping_add(ROUND.to_bits())) - ROUND;
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let s2 = s * s;
    let series = polynomial!(
        s2,
        2.0,
        2.0 / 3.0,
        2.0 / 5.0,
        2.0 / 7.0,
        2.0 / 9.0,
        2.0 / 11.0,
        2.0 / 13.0,
        2.0 / 15.0,
        2.0 / 17.0
    );
    let value = plus::<FUSED>(exponent, LN_2, s * series);
    let value = if x == 0.0 { f64::NEG_INFINITY } else { value };
    let value = if x < 0.0 { f64::NAN } else { value };
    if x < f64::INFINITY { value } else { x }
}

#[inline(always)]
pub(crate) fn log2<const FUSED: bool>(x: f64) -> f64 {
    log::<FUSED>(x) / LN_2
}

#[inline(always)]
pub(crate) fn log10<const FUSED: bool>(x: f64) -> f64 {
    log::<FUSED>(x) / LN_10
}

#[inline(always)]
pub(crate) fn log1p<const FUSED: bool>(x: f64) -> f64 {
    // What `1 + x` rounds away is put back as a factor.
    let sum = 1.0 + x;
    let value = log::<FUSED>(sum) * (x / (sum - 1.0));
    let value = choose(sum == 1.0, x, value);
    choose(sum < f64::INFINITY && sum != 0.0, value, log::<FUSED>(sum))
}

#[inline(always)]
pub(crate) fn tanh<const FUSED: bool>(x: f64) -> f64 {
    let a = x.abs();
    let t = expm1::<FUSED>(2.0 * if a > 20.0 { 20.0 } else { a });
    (t / (t + 2.0)).copysign(x)
}

#[inline(always)]
pub(crate) fn sinh<const FUSED: bool>(x: f64) -> f64 {
    let t = expm1::<FUSED>(x.abs());
    (0.5 * (t + t / (t + 1.0))).copysign(x)
}

#[inline(always)]
pub(crate) fn cosh<const FUSED: bool>(x: f64) -> f64 {
    let e = exp::<FUSED>(x.abs());
    0.5 * (e + 1.0 / e)
}

#[inline(always)]
pub(crate) fn erf<const FUSED: bool>(x: f64) -> f64 {
    let a = x.abs();
    // From 4 on the result is 1 in `f32`.
    let b = if a > 4.1 { 4.1 } else { a };
    // `erf(x) / x` on [0, 1] and `erfc(x) exp(x^2)` on [1, 4.1], each interpolated at Chebyshev
    // points of the variable in which it is smoothest, moved to [-1, 1].
    let t = 2.0 * b * b - 1.0;
    let small = x * polynomial!(
        t,
        0.9654687386698673,
        -0.14053608902272122,
        0.019852496688983864,
        -0.0022854855610623184,
        0.00021751715603847516,
        -1.7537169899206237e-05,
        1.2233827558562044e-06,
        -7.511464577090118e-08,
        4.11576058992764e-09,
        -2.0456997595543134e-10,
        9.207614215658363e-12
    );
    let t = 11.806451612903226 / (b + 2.0) - 2.935483870967742;
    let large = 1.0
        - polynomial!(
            t,
            0.25306853058065865,
            0.14383723772149065,
            0.02758994798370723,
            0.0030681086098914984,
            5.169608733321748e-05,
            -3.1108189288681464e-05,
            -1.3379334645996733e-06,
            5.015445845468631e-07,
            9.136524045263798e-09,
            -9.818282767075957e-09,
            4.3249833842030904e-10
        ) * exp::<FUSED>(-b * b);
    choose(a < 1.0, small, large.copysign(x))
}

/// Up to here the reduction below is exact enough.
pub(crate) const TRIG_LIMIT: f32 = 1e5;

/// Sine (`shift` 0) or cosine (`shift` 1) of `|x| <= TRIG_LIMIT`.
#[inline(always)]
fn trig<const FUSED: bool>(x: f64, shift: u64) -> f64 {
    /// `pi / 2` in two parts; multiples of the first by up to 2^20 are exact.
    const HIGH: f64 = f64::from_bits(FRAC_PI_2.to_bits() & !0xffff_ffff);
    const LOW: f64 = 3.139_164_786_504_813e-7;
    let shifted = x * (1.0 / FRAC_PI_2) + ROUND;
    let n = shifted - ROUND;
    let quarter = shifted.to_bits().wrapping_add(shift);
    let r = (x - n * HIGH) - n * LOW;
    let r2 = r * r;
    let sine = r * polynomial!(
        r2,
        1.0,
        -1.0 / 6.0,
        1.0 / 120.0,
        -1.0 / 5040.0,
        1.0 / 362_880.0,
        -1.0 / 39_916_800.0,
        1.0 / 6_227_020_800.0
    );
    let cosine = polynomial!(
        r2,
        1.0,
        -1.0 / 2.0,
        1.0 / 24.0,
        -1.0 / 720.0,
        1.0 / 40_320.0,
        -1.0 / 3_628_800.0,
        1.0 / 479_001_600.0,
        -1.0 / 87_178_291_200.0
    );
    let value = choose(quarter & 1 == 0, sine, cosine);
    f64::from_bits(value.to_bits() ^ ((quarter & 2) << 62))
}

#[inline(always)]
pub(crate) fn sin<const FUSED: bool>(x: f64) -> f64 {
    let value = trig::<FUSED>(x, 0);
    if x == 0.0 { x } else { value }
}

#[inline(always)]
pub(crate) fn cos<const FUSED: bool>(x: f64) -> f64 {
    trig::<FUSED>(x, 1)
}

/// A function as a type: unlike a closure it is sure to be inlined, whatever its size.
pub(crate) trait Function {
    fn call<const FUSED: bool>(x: f64) -> f64;
}

macro_rules! functions {
    ($($name:ident $f:ident),*) => {$(
        pub(crate) struct $name;
        impl Function for $name {
            #[inline(always)]
            fn call<const FUSED: bool>(x: f64) -> f64 {
                $f::<FUSED>(x)
            }
        }
    )*};
}
functions!(Exp exp, Exp2 exp2, Expm1 expm1, Log log, Log2 log2, Log10 log10, Log1p log1p, Tanh tanh, Sinh sinh, Cosh cosh, Erf erf, Sin sin, Cos cos);

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the standard library's `f64` functions over arguments that are `f32`, in units
    /// of the result's last place.
    fn check(
        name: &str,
        fast: fn(f64) -> f64,
        exact: fn(f64) -> f64,
        arguments: impl Iterator<Item = f32>,
    ) {
        for x in arguments {
            let (got, expected) = (fast(f64::from(x)), exact(f64::from(x)));
            if (got as f32).to_bits() == (expected as f32).to_bits()
                || (got.is_nan() && expected.is_nan())
            {
                continue;
            }
            let unit = f64::from((expected as f32).abs()).max(1e-37) * f64::from(f32::EPSILON);
            assert!(
                (got - expected).abs() < 1e-4 * unit,
                "{name}({x:e}) = {got:e}, expected {expected:e}"
            );
        }
    }

    /// Floats of all magnitudes and both signs, and the special ones.
    fn everything() -> impl Iterator<Item = f32> {
        (0..u32::MAX / 20_011)
            .map(|i| f32::from_bits(i * 20_011))
            .chain([
                0.0,
                -0.0,
                1.0,
                -1.0,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                1e-45,
            ])
    }

    fn around(limit: f32) -> impl Iterator<Item = f32> {
        (-50_000..=50_000).map(move |i| i as f32 / 50_000.0 * limit)
    }

    #[test]
    fn functions_agree_with_the_standard_library_after_rounding() {
        type F = fn(f64) -> f64;
        fn table<const FUSED: bool>() -> [(&'static str, F, F); 11] {
            [
                ("erf", erf::<FUSED>, libm::erf),
                ("exp", exp::<FUSED>, f64::exp),
                ("exp2", exp2::<FUSED>, f64::exp2),
                ("expm1", expm1::<FUSED>, f64::exp_m1),
                ("log", log::<FUSED>, f64::ln),
                ("log2", log2::<FUSED>, f64::log2),
                ("log10", log10::<FUSED>, f64::log10),
                ("log1p", log1p::<FUSED>, f64::ln_1p),
                ("tanh", tanh::<FUSED>, f64::tanh),
                ("sinh", sinh::<FUSED>, f64::sinh),
                ("cosh", cosh::<FUSED>, f64::cosh),
            ]
        }
        for (name, fast, exact) in table::<false>().into_iter().chain(table::<true>()) {
            check(
                name,
                fast,
                exact,
                everything().chain(around(3.0)).chain(around(110.0)),
            );
        }
        for (name, fast, exact) in [
            ("sin", sin::<false> as F, f64::sin as F),
            ("cos", cos::<false>, f64::cos),
            ("sin", sin::<true>, f64::sin),
            ("cos", cos::<true>, f64::cos),
        ] {
            check(
                name,
                fast,
                exact,
                everything()
                    .filter(|x| x.abs() <= TRIG_LIMIT)
                    .chain(around(10.0))
                    .chain(around(TRIG_LIMIT)),
            );
        }
    }

    /// Of scores and bases that are both small or both large, and of what has no score or too low a one.
    #[test]
    fn shifted_exponentials_are_as_exact_as_their_type() {
        for (scale, base) in [(1.0, 0.0), (0.125, -3.7), (0.3, 20.25), (7.5, 3.1e4)] {
            let by = Shifted::new(scale, base);
            for i in 0..200_000 {
                let x = ((base - f64::from(i) * 1e-3) / scale) as f32;
                let exact = (f64::from(x) * scale - base).exp();
                for got in [by.exp32::<true>(x), by.exp32::<false>(x)] {
                    let error = (f64::from(got) - exact).abs();
                    let least = f64::from(f32::MIN_POSITIVE);
                    let bound = exact * 1.2e-7 * (1.0 + exact.log2().abs() / 2.0);
                    assert!(
                        error <= bound.max(1.001 * least),
                        "exp({x} * {scale} - {base}): {got} and {exact}"
                    );
                }
            }
            for got in [
                by.exp32::<true>(f32::NEG_INFINITY),
                by.exp32::<true>(f32::MIN),
            ] {
                assert_eq!(got, 0.0);
            }
            assert!(by.exp32::<true>(f32::NAN).is_nan());
        }
    }
}
