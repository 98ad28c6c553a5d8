//! Slopes far from zero: where a function is finite its gradient is, and it is right in the limit.
//!
//! What a formula passes on its way (an overflowing exponential, a difference of large numbers)
//! must not show.

use anymesh_core::{Result, Tensor};

type Function = fn(&Tensor) -> Result<Tensor>;

const LARGE: [f32; 6] = [50.0, -50.0, 1e4, -1e4, 1e30, -1e30];

/// The value and slope of a function at one point.
fn slope(f: Function, x: f32) -> Result<(f32, f32)> {
    let x = Tensor::new(x, &anymesh_backend_cpu::device())?.require_grad()?;
    let y = f(&x)?;
    // A function that is flat has none.
    let g = y.backward()?.of(&x)?;
    Ok((y.to_vec::<f32>()?[0], g.to_vec::<f32>()?[0]))
}

/// Checks slopes at all large numbers where the function is finite, against `expected`, to a
/// relative error (of at least the smallest normal number).
fn check(cases: &[(&str, Function, fn(f64) -> f64, f64)]) -> Result<()> {
    let mut wrong = vec![];
    for (name, f, expected, tolerance) in cases {
        let mut finite = 0;
        for x in LARGE {
            let (y, g) = slope(*f, x)?;
            if !y.is_finite() {
                continue;
            }
            finite += 1;
            let e = expected(f64::from(x));
            if !g.is_finite()
                || (f64::from(g) - e).abs() > tolerance * e.abs() + f64::from(f32::MIN_POSITIVE)
            {
                wrong.push(format!(
                    "{name}({x:e}) = {y:e}: slope {g:e}, expected {e:e}"
                ));
            }
        }
        assert!(finite > 0, "{name} was checked nowhere");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// 1 above, 0 below.
fn ramp(x: f64) -> f64 {
    if x > 0.0 { 1.0 } else { 0.0 }
}

fn sigmoid_slope(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    e / ((1.0 + e) * (1.0 + e))
}

/// Few roundings, and those of an exponential.
const TIGHT: f64 = 2e-6;

#[test]
fn activations_have_the_slopes_of_their_limits() -> Result<()> {
    check(&[
        ("relu", |x| x.relu(), ramp, 0.0),
        ("relu6", |x| x.relu6(), |_| 0.0, 0.0),
        (
            "leaky_relu",
            |x| x.leaky_relu(0.25),
            |x| if x > 0.0 { 1.0 } else { 0.25 },
            0.0,
        ),
        (
            "elu",
            |x| x.elu(1.5),
            |x| if x > 0.0 { 1.0 } else { 1.5 * x.exp() },
            TIGHT,
        ),
        (
            "selu",
            |x| x.selu(),
            |x| {
                1.050_700_987_355_480_5
                    * if x > 0.0 {
                        1.0
                    } else {
                        1.673_263_242_354_377_2 * x.exp()
                    }
            },
            TIGHT,
        ),
        (
            "celu",
            |x| x.celu(2.0),
            |x| if x > 0.0 { 1.0 } else { (x / 2.0).exp() },
            TIGHT,
        ),
        (
            "logsigmoid",
            |x| x.logsigmoid(),
            |x| 1.0 / (1.0 + x.exp()),
            TIGHT,
        ),
        (
            "softplus",
            |x| x.softplus(1.0, 20.0),
            |x| 1.0 / (1.0 + (-x).exp()),
            TIGHT,
        ),
        (
            "softplus without a threshold",
            |x| x.softplus(1.0, f64::INFINITY),
            |x| 1.0 / (1.0 + (-x).exp()),
            TIGHT,
        ),
        (
            "softplus, steep and mirrored",
            |x| x.softplus(-3.0, f64::INFINITY),
            |x| 1.0 / (1.0 + (3.0 * x).exp()),
            2e-5,
        ),
        (
            "silu",
            |x| x.silu(),
            |x| 1.0 / (1.0 + (-x).exp()) + x * sigmoid_slope(x),
            TIGHT,
        ),
        (
            "mish",
            |x| x.mish(),
            |x| if x > 0.0 { 1.0 } else { x.exp() * (1.0 + x) },
            1e-5,
        ),
        ("gelu", |x| x.gelu(), ramp, TIGHT),
        ("gelu_tanh", |x| x.gelu_tanh(), ramp, TIGHT),
        (
            "softsign",
            |x| x.softsign(),
            |x| (1.0 + x.abs()).powi(-2),
            TIGHT,
        ),
        ("softshrink", |x| x.softshrink(0.5), |_| 1.0, 0.0),
        ("hardshrink", |x| x.hardshrink(0.5), |_| 1.0, 0.0),
        ("hardsigmoid", |x| x.hardsigmoid(), |_| 0.0, 0.0),
        ("hardswish", |x| x.hardswish(), ramp, TIGHT),
        ("hardtanh", |x| x.hardtanh(-1.0, 1.0), |_| 0.0, 0.0),
        ("tanhshrink", |x| x.tanhshrink(), |_| 1.0, 0.0),
        ("threshold", |x| x.threshold(0.5, 7.0), ramp, 0.0),
        ("logit", |x| x.logit(Some(0.01)), |_| 0.0, 0.0),
    ])
}

/// Their slopes follow from the value alone, which rounds to the limit: what is left is below one
/// rounding of it.
#[test]
fn functions_that_keep_only_their_value_have_the_slope_of_the_limit() -> Result<()> {
    let functions: [(&str, Function); 2] = [("sigmoid", |x| x.sigmoid()), ("tanh", |x| x.tanh())];
    for (name, f) in functions {
        for x in LARGE {
            let (y, g) = slope(f, x)?;
            assert!(
                y.is_finite() && (0.0..1e-7).contains(&g),
                "{name}({x:e}): {g:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn unary_functions_have_the_slopes_of_their_definitions() -> Result<()> {
    check(&[
        ("abs", |x| x.abs(), f64::signum, 0.0),
        ("neg", |x| x.neg(), |_| -1.0, 0.0),
        ("square", |x| x.square(), |x| 2.0 * x, TIGHT),
        ("reciprocal", |x| x.reciprocal(), |x| -1.0 / x / x, TIGHT),
        ("exp", |x| x.exp(), f64::exp, TIGHT),
        (
            "exp2",
            |x| x.exp2(),
            |x| x.exp2() * std::f64::consts::LN_2,
            TIGHT,
        ),
        ("expm1", |x| x.expm1(), f64::exp, TIGHT),
        ("log", |x| x.log(), f64::recip, TIGHT),
        (
            "log2",
            |x| x.log2(),
            |x| 1.0 / (x * std::f64::consts::LN_2),
            TIGHT,
        ),
        (
            "log10",
            |x| x.log10(),
            |x| 1.0 / (x * std::f64::consts::LN_10),
            TIGHT,
        ),
        ("log1p", |x| x.log1p(), |x| 1.0 / (1.0 + x), TIGHT),
        ("sqrt", |x| x.sqrt(), |x| 0.5 / x.sqrt(), TIGHT),
        ("rsqrt", |x| x.rsqrt(), |x| -0.5 / x.sqrt() / x, TIGHT),
        ("sin", |x| x.sin(), f64::cos, 1e-5),
        ("cos", |x| x.cos(), |x| -x.sin(), 1e-5),
        ("tan", |x| x.tan(), |x| 1.0 + x.tan() * x.tan(), 1e-5),
        ("atan", |x| x.atan(), |x| 1.0 / (1.0 + x * x), TIGHT),
        ("sinh", |x| x.sinh(), f64::cosh, TIGHT),
        ("cosh", |x| x.cosh(), f64::sinh, TIGHT),
        ("asinh", |x| x.asinh(), |x| 1.0 / x.hypot(1.0), TIGHT),
        (
            "acosh",
            |x| x.acosh(),
            |x| 1.0 / ((x - 1.0).sqrt() * (x + 1.0).sqrt()),
            TIGHT,
        ),
        ("erf", |x| x.erf(), |x| (-x * x).exp(), TIGHT),
        (
            "lgamma",
            |x| x.lgamma(),
            |x| x.ln() - 0.5 / x - 1.0 / (12.0 * x * x),
            TIGHT,
        ),
        (
            "digamma",
            |x| x.digamma(),
            |x| 1.0 / x + 0.5 / (x * x) + 1.0 / (6.0 * x * x * x),
            TIGHT,
        ),
        ("floor", |x| x.floor(), |_| 0.0, 0.0),
        ("ceil", |x| x.ceil(), |_| 0.0, 0.0),
        ("round", |x| x.round(), |_| 0.0, 0.0),
        ("trunc", |x| x.trunc(), |_| 0.0, 0.0),
        ("sign", |x| x.sign(), |_| 0.0, 0.0),
        ("frac", |x| x.frac(), |_| 1.0, 0.0),
    ])
}

#[test]
fn functions_of_a_limited_domain_have_slopes_up_to_its_ends() -> Result<()> {
    let near = |f: Function, x: f32, expected: f64, name: &str| -> Result<()> {
        let g = f64::from(slope(f, x)?.1);
        assert!(
            (g - expected).abs() <= 1e-5 * expected.abs(),
            "{name}({x:e}): {g:e}, expected {expected:e}"
        );
        Ok(())
    };
    // The number next to 1.
    let x = 1.0 - f32::EPSILON / 2.0;
    let (d, s) = (f64::from(f32::EPSILON) / 2.0, f64::from(x));
    near(|x| x.asin(), x, 1.0 / (d * (1.0 + s)).sqrt(), "asin")?;
    near(|x| x.acos(), x, -1.0 / (d * (1.0 + s)).sqrt(), "acos")?;
    near(|x| x.atanh(), x, 1.0 / (d * (1.0 + s)), "atanh")?;
    near(|x| x.logit(None), x, 1.0 / (d * s), "logit")?;
    near(|x| x.logit(None), 1e-30, 1e30, "logit")?;
    near(|x| x.log(), 1e-30, 1e30, "log")?;
    near(|x| x.sqrt(), 1e-30, 0.5e15, "sqrt")?;
    near(|x| x.tanhshrink(), 1e-4, 1e-8, "tanhshrink")?;
    near(|x| x.tanhshrink(), 0.2, 0.2f64.tanh().powi(2), "tanhshrink")?;
    near(|x| x.tanhshrink(), 0.3, 0.3f64.tanh().powi(2), "tanhshrink")?;
    Ok(())
}

/// What becomes of a whole row decides: a slope of the value at 0, not of either side.
#[test]
fn kinks_and_missing_numbers_have_the_slopes_that_are_documented() -> Result<()> {
    assert_eq!(slope(|x| x.relu(), 0.0)?.1, 0.0);
    assert_eq!(slope(|x| x.relu6(), 0.0)?.1, 0.0);
    assert_eq!(slope(|x| x.relu6(), 6.0)?.1, 0.0);
    assert_eq!(slope(|x| x.abs(), 0.0)?.1, 0.0);
    assert!(
        slope(|x| x.relu(), f32::NAN)?.0.is_nan() && slope(|x| x.relu6(), f32::NAN)?.0.is_nan()
    );
    for f in [
        (|x| x.silu()) as Function,
        |x| x.gelu_tanh(),
        |x| x.logsigmoid(),
        |x| x.softplus(1.0, 20.0),
        |x| x.softsign(),
        |x| x.tanhshrink(),
    ] {
        assert!(slope(f, f32::NAN)?.0.is_nan());
    }
    for (f, expected) in [
        ((|x| x.sigmoid()) as Function, 0.25),
        (|x| x.silu(), 0.5),
        (|x| x.gelu_tanh(), 0.5),
        (|x| x.softsign(), 1.0),
        (|x| x.celu(2.0), 1.0),
    ] {
        assert_eq!(slope(f, 0.0)?.1, expected);
    }
    Ok(())
}

#[test]
fn gates_pass_gradients_at_large_numbers() -> Result<()> {
    let device = anymesh_backend_cpu::device();
    for (by, passes) in [(1e4f32, 1.0f32), (-1e4, 0.0), (1e30, 1.0), (-1e30, 0.0)] {
        let gate = Tensor::new(by, &device)?.reshape([1])?;
        let two = Tensor::new(2f32, &device)?.reshape([1])?;
        let x = Tensor::concat(&[&gate, &two], 0)?.require_grad()?;
        let of = |y: Tensor| -> Result<Vec<f32>> {
            y.backward_with(&y.ones_like()?)?.of(&x)?.to_vec::<f32>()
        };
        assert_eq!(
            of(x.swiglu()?)?,
            [2.0 * passes, by * passes],
            "swiglu {by:e}"
        );
        assert_eq!(of(x.geglu()?)?, [2.0 * passes, by * passes], "geglu {by:e}");
        let flipped = Tensor::concat(&[&two, &gate], 0)?.require_grad()?;
        let y = flipped.glu()?;
        assert_eq!(
            y.backward_with(&y.ones_like()?)?
                .of(&flipped)?
                .to_vec::<f32>()?,
            [passes, 0.0],
            "glu {by:e}"
        );
    }
    Ok(())
}
