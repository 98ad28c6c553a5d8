//! Float functions in `f64`, by instruction, and those among them that neither the standard library
//! nor `libm` has. What `f32` needs faster is in `fastmath`.

use anymesh_kernel::map::Unary;
use std::f64::consts::{FRAC_2_SQRT_PI, PI};

/// The function of an instruction; `None` for those that are exact, or not of floats alone.
pub(crate) fn of(op: Unary) -> Option<fn(f64) -> f64> {
    use Unary::*;
    Some(match op {
        Exp => f64::exp,
        Exp2 => f64::exp2,
        Expm1 => f64::exp_m1,
        Log => f64::ln,
        Log2 => f64::log2,
        Log10 => f64::log10,
        Log1p => f64::ln_1p,
        Rsqrt => |x| 1.0 / x.sqrt(),
        Sin => f64::sin,
        Cos => f64::cos,
        Tan => f64::tan,
        Asin => f64::asin,
        Acos => f64::acos,
        Atan => f64::atan,
        Sinh => f64::sinh,
        Cosh => f64::cosh,
        Tanh => f64::tanh,
        Asinh => libm::asinh,
        // libm answers numbers for large negative arguments.
        Acosh => |x| if x < 1.0 { f64::NAN } else { libm::acosh(x) },
        Atanh => libm::atanh,
        Erf => libm::erf,
        Erfinv => erfinv,
        Lgamma => lgamma,
        Digamma => digamma,
        Neg | Abs | Sign | Sqrt | Floor | Ceil | Round | Trunc | IsNan | IsInf | Not => {
            return None;
        }
    })
}

/// `log |gamma(x)|`.
pub(crate) fn lgamma(x: f64) -> f64 {
    libm::lgamma(x)
}

/// The inverse of `erf`: a closed-form guess good to 3 digits, then three steps of Halley's method
/// (each triples the digits; the third is for the far tail, where the guess is poorer).
pub(crate) fn erfinv(x: f64) -> f64 {
    let a = x.abs();
    if a >= 1.0 || a.is_nan() {
        return if a == 1.0 {
            f64::INFINITY.copysign(x)
        } else {
            f64::NAN
        };
    }
    if a < 1e-8 {
        return x / FRAC_2_SQRT_PI;
    }
    const SHAPE: f64 = 0.147;
    let log = ((1.0 - a) * (1.0 + a)).ln();
    let middle = 2.0 / (PI * SHAPE) + log / 2.0;
    let mut y = ((middle * middle - log / SHAPE).sqrt() - middle).sqrt();
    for _ in 0..3 {
        // Near 1 the complement keeps the digits that `erf` has lost; `1 - a` is exact there.
        let excess = if a < 0.5 {
            libm::erf(y) - a
        } else {
            (1.0 - a) - libm::erfc(y)
        };
        let step = excess / (FRAC_2_SQRT_PI * (-y * y).exp());
        y -= step / (1.0 + y * step);
    }
    y.copysign(x)
}

/// The positive root of digamma, in two parts.
const ROOT: (f64, f64) = (1.4616321449683622, 9.549995429965697e-17);

/// Taylor coefficients of digamma at its root: `(-1)^(k+1) zeta(k + 1, root)` for k = 1, 2, ...
const AT_ROOT: [f64; 29] = [
    0.9676722454476212,
    -0.4427631689835921,
    0.258499760955651,
    -0.16394270544240652,
    0.10782405069126237,
    -0.07219956125645471,
    0.04880428816414311,
    -0.03316112647484736,
    0.022597648232218104,
    -0.01542476590494896,
    0.010538791616612175,
    -0.007204534386356869,
    0.004926781395729853,
    -0.003369801655439328,
    0.002305126326734928,
    -0.0015769367714301972,
    0.0010788252019162967,
    -0.0007380709389960052,
    0.000504953265834602,
    -0.0003454680251063077,
    0.00023635601564027053,
    -0.00016170622091974803,
    0.0001106337276874741,
    -7.569179582195066e-05,
    5.178575795222081e-05,
    -3.5430070947659604e-05,
    2.424006611860132e-05,
    -1.6584242271854135e-05,
    1.134638458466385e-05,
];

/// `B_2k / 2k`, the coefficients of the asymptotic series.
const BERNOULLI: [f64; 8] = [
    0.08333333333333333,
    -0.008333333333333333,
    0.003968253968253968,
    -0.004166666666666667,
    0.007575757575757576,
    -0.021092796092796094,
    0.08333333333333333,
    -0.4432598039215686,
];

fn horner(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c)
}

/// The logarithmic derivative of the gamma function. Negative integers give NaN, zero gives minus
/// infinity.
pub(crate) fn digamma(x: f64) -> f64 {
    if x == 0.0 {
        return f64::NEG_INFINITY.copysign(-x.signum());
    }
    if x < 0.0 {
        // Only the distance to the nearest pole matters to the tangent; taking it first keeps its
        // digits.
        let distance = x - x.round();
        if distance == 0.0 || x.is_infinite() {
            return f64::NAN;
        }
        // Half-way between poles the cotangent vanishes, which only the tangent of the complement
        // shows exactly.
        let cotangent = if distance.abs() < 0.25 {
            1.0 / (PI * distance).tan()
        } else {
            (PI * (0.5f64.copysign(distance) - distance)).tan()
        };
        return digamma(1.0 - x) - PI * cotangent;
    }
    let step = (x - ROOT.0) - ROOT.1;
    if step.abs() < 0.35 {
        return step * horner(&AT_ROOT, step);
    }
    let (mut x, mut below) = (x, 0.0);
    while x < 10.0 {
        below += 1.0 / x;
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let series = inverse * inverse * horner(&BERNOULLI, inverse * inverse);
    x.ln() - 0.5 * inverse - series - below
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(name: &str, f: fn(f64) -> f64, table: &[(f64, f64)], tolerance: f64) {
        for &(x, expected) in table {
            let got = f(x);
            assert!(
                (got - expected).abs() <= tolerance * expected.abs(),
                "{name}({x}) = {got}, expected {expected}"
            );
        }
    }

    // Expected values were computed with 50 digits.
    #[test]
    fn erfinv_is_accurate_from_the_origin_into_the_tail() {
        assert_close(
            "erfinv",
            erfinv,
            &[
                (1e-300, 8.86226925452758e-301),
                (1e-10, 8.862269254527581e-11),
                (0.1, 0.08885599049425769),
                (0.3, 0.2724627147267543),
                (-0.5, -0.4769362762044699),
                (0.7, 0.7328690779592167),
                (0.9, 1.1630871536766743),
                (-0.99, -1.8213863677184494),
                (0.999999, 3.458910737275499),
                (0.9999999999990905, 5.05125408524939),
                (0.9999999999999998, 5.805018683193453),
                (-0.9999999999999999, -5.8635847487551676),
            ],
            1e-15,
        );
        assert_eq!(
            (erfinv(1.0), erfinv(-1.0), erfinv(0.0)),
            (f64::INFINITY, f64::NEG_INFINITY, 0.0)
        );
        assert!(erfinv(1.5).is_nan() && erfinv(f64::NAN).is_nan());
    }

    #[test]
    fn digamma_is_accurate_also_at_its_root_and_between_its_poles() {
        assert_close(
            "digamma",
            digamma,
            &[
                (1e-08, -100000000.57721564),
                (0.1, -10.423754940411076),
                (0.5, -1.9635100260214235),
                (1.0, -0.5772156649015329),
                (1.2, -0.2890398965921884),
                (1.46, -0.0015805619870834522),
                (1.4616321449683622, -9.241265521729427e-17),
                (1.47, 0.008066489011364869),
                (1.8, 0.28499143329386156),
                (2.0, 0.42278433509846713),
                (3.5, 1.103156640645243),
                (9.5, 2.1977378764029494),
                (10.0, 2.251752589066721),
                (25.0, 3.198742512851974),
                (1000000.0, 13.815510057964191),
                (1e+300, 690.7755278982137),
                (-0.5, 0.03648997397857652),
                (-1.25, 3.714139120213528),
                (-7.3, 4.33730730551005),
                (-100.1, 14.279984365172156),
            ],
            3e-15,
        );
        assert!(
            digamma(-3.0).is_nan()
                && digamma(f64::NAN).is_nan()
                && digamma(f64::NEG_INFINITY).is_nan()
        );
        assert_eq!(
            (digamma(0.0), digamma(-0.0), digamma(f64::INFINITY)),
            (f64::NEG_INFINITY, f64::INFINITY, f64::INFINITY)
        );
    }

    #[test]
    fn lgamma_is_accurate() {
        assert_close(
            "lgamma",
            lgamma,
            &[
                (0.1, 2.252712651734206),
                (0.5, 0.5723649429247001),
                (1.5, -0.12078223763524522),
                (3.0, std::f64::consts::LN_2),
                (10.5, 13.940625219403763),
                (100.0, 359.1342053695754),
                (1000000.0, 12815504.569147611),
                (-0.5, 1.2655121234846454),
                (-3.7, -1.3797399049658245),
            ],
            1e-15,
        );
        assert_eq!(
            (lgamma(1.0), lgamma(2.0), lgamma(0.0), lgamma(-2.0)),
            (0.0, 0.0, f64::INFINITY, f64::INFINITY)
        );
    }
}
