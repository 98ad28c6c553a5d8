//! Elementwise ops against plain formulas, and the facts about them that can be misread.

use crate::support::{bools, get, i32s, ints};
use anymesh_backend_cpu as cpu;
use anymesh_core::{
    Arg, DType, Device, Error, Result, Tensor, bf16, f16,
    ops::{activation, elementwise::Elementwise, unary},
};
use std::f64::consts::{LN_2, PI, SQRT_2};

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

fn f32s(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, [values.len()], &cpu::device()).expect("a vector")
}

/// Bit for bit, but any NaN equals any NaN: this tells -0 from 0.
#[track_caller]
fn assert_same(actual: Vec<f32>, expected: &[f32]) {
    let bits = |v: &[f32]| {
        v.iter()
            .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        bits(&actual),
        bits(expected),
        "{actual:?} instead of {expected:?}"
    );
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

/// Name, arguments after the first, the range of `x`, and what the op must give.
type Reference = (&'static str, &'static [f64], (f64, f64), fn(f64) -> f64);

const REFERENCE: &[Reference] = &[
    ("abs", &[], (-3.0, 3.0), |x| if x < 0.0 { -x } else { x }),
    ("neg", &[], (-3.0, 3.0), |x| 0.0 - x),
    (
        "sign",
        &[],
        (-3.0, 3.0),
        |x| if x > 0.0 { 1.0 } else { -1.0 },
    ),
    ("square", &[], (-3.0, 3.0), |x| x.powi(2)),
    ("reciprocal", &[], (0.1, 5.0), |x| x.powi(-1)),
    ("exp", &[], (-8.0, 8.0), libm::exp),
    ("exp2", &[], (-8.0, 8.0), libm::exp2),
    ("expm1", &[], (-3.0, 3.0), libm::expm1),
    ("log", &[], (0.01, 20.0), libm::log),
    ("log2", &[], (0.01, 20.0), libm::log2),
    ("log10", &[], (0.01, 20.0), libm::log10),
    ("log1p", &[], (-0.9, 20.0), libm::log1p),
    ("sqrt", &[], (0.0, 20.0), libm::sqrt),
    ("rsqrt", &[], (0.01, 20.0), |x| 1.0 / libm::sqrt(x)),
    ("sin", &[], (-8.0, 8.0), libm::sin),
    ("cos", &[], (-8.0, 8.0), libm::cos),
    ("tan", &[], (-1.4, 1.4), libm::tan),
    ("asin", &[], (-1.0, 1.0), libm::asin),
    ("acos", &[], (-1.0, 1.0), libm::acos),
    ("atan", &[], (-9.0, 9.0), libm::atan),
    ("sinh", &[], (-5.0, 5.0), libm::sinh),
    ("cosh", &[], (-5.0, 5.0), libm::cosh),
    ("tanh", &[], (-5.0, 5.0), libm::tanh),
    ("asinh", &[], (-9.0, 9.0), libm::asinh),
    ("acosh", &[], (1.01, 9.0), libm::acosh),
    ("atanh", &[], (-0.99, 0.99), libm::atanh),
    ("erf", &[], (-3.0, 3.0), libm::erf),
    ("erfinv", &[], (-0.99, 0.99), erfinv),
    ("lgamma", &[], (0.1, 20.0), libm::lgamma),
    ("digamma", &[], (0.1, 20.0), digamma),
    ("floor", &[], (-4.0, 4.0), |x| {
        (x + 100.0) as i64 as f64 - 100.0
    }),
    ("ceil", &[], (-4.0, 4.0), |x| {
        100.0 - (100.0 - x) as i64 as f64
    }),
    ("round", &[], (-4.0, 4.0), round_even),
    ("trunc", &[], (-4.0, 4.0), |x| x as i64 as f64),
    ("frac", &[], (-4.0, 4.0), |x| x - x as i64 as f64),
    ("relu", &[], (-3.0, 3.0), |x| if x > 0.0 { x } else { 0.0 }),
    ("relu6", &[], (-3.0, 9.0), |x| x.clamp(0.0, 6.0)),
    ("leaky_relu", &[0.1], (-3.0, 3.0), |x| {
        if x < 0.0 { x * 0.1 } else { x }
    }),
    ("elu", &[1.5], (-3.0, 3.0), |x| {
        if x < 0.0 { 1.5 * libm::expm1(x) } else { x }
    }),
    ("selu", &[], (-3.0, 3.0), |x| {
        1.0507009873554805
            * if x < 0.0 {
                1.6732632423543772 * libm::expm1(x)
            } else {
                x
            }
    }),
    ("celu", &[0.5], (-3.0, 3.0), |x| {
        if x < 0.0 {
            0.5 * libm::expm1(x / 0.5)
        } else {
            x
        }
    }),
    ("sigmoid", &[], (-30.0, 30.0), logistic),
    ("logsigmoid", &[], (-30.0, 30.0), |x| -softplus(-x)),
    ("logit", &[0.125], (0.0, 1.0), |x| {
        libm::log(x.clamp(0.125, 0.875)) - libm::log1p(-x.clamp(0.125, 0.875))
    }),
    ("gelu", &[], (-3.0, 6.0), |x| {
        x * 0.5 * libm::erfc(-x / SQRT_2)
    }),
    ("gelu_tanh", &[], (-3.0, 6.0), |x| {
        0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
    }),
    ("silu", &[], (-9.0, 9.0), |x| x * logistic(x)),
    ("mish", &[], (-9.0, 30.0), |x| x * libm::tanh(softplus(x))),
    ("softplus", &[2.0, 5.0], (-9.0, 9.0), |x| {
        if 2.0 * x > 5.0 {
            x
        } else {
            softplus(2.0 * x) / 2.0
        }
    }),
    ("softsign", &[], (-9.0, 9.0), |x| x / (1.0 + x.abs())),
    ("softshrink", &[0.5], (-2.0, 2.0), |x| {
        x.signum() * (x.abs() - 0.5).max(0.0)
    }),
    ("hardshrink", &[0.5], (-2.0, 2.0), |x| {
        if x.abs() > 0.5 { x } else { 0.0 }
    }),
    ("hardsigmoid", &[], (-5.0, 5.0), |x| {
        (x / 6.0 + 0.5).clamp(0.0, 1.0)
    }),
    ("hardswish", &[], (-5.0, 5.0), |x| {
        x * (x / 6.0 + 0.5).clamp(0.0, 1.0)
    }),
    ("hardtanh", &[-1.5, 2.0], (-5.0, 5.0), |x| {
        x.clamp(-1.5, 2.0)
    }),
    ("tanhshrink", &[], (-5.0, 5.0), |x| x - libm::tanh(x)),
    ("threshold", &[0.5, -7.0], (-2.0, 2.0), |x| {
        if x > 0.5 { x } else { -7.0 }
    }),
];

/// Ops that give bools or bits; they have tests of their own below.
const NOT_FLOATS: &[&str] = &["isnan", "isinf", "isfinite", "logical_not", "bitwise_not"];

fn rows() -> impl Iterator<Item = &'static Elementwise> {
    unary::TABLE.iter().chain(activation::TABLE)
}

fn apply(row: &Elementwise, x: &Tensor, params: &[f64]) -> Result<Tensor> {
    let args: Vec<Arg<'_>> = [Arg::Tensor(x)]
        .into_iter()
        .chain(params.iter().map(|p| Arg::from(*p)))
        .collect();
    row.apply(&args)
}

fn check(&(name, params, (low, high), expected): &Reference, dtype: DType, relative: f64) {
    let row = rows().find(|row| row.info.name == name).expect(name);
    // Odd steps miss the kinks by more than a rounding.
    let xs = (0..173).map(|i| low + (high - low) * (i as f64 + 0.37) / 173.0);
    let xs: Vec<f64> = xs
        .map(|x| {
            if dtype == DType::F32 {
                f64::from(x as f32)
            } else {
                x
            }
        })
        .collect();
    let x = Tensor::from_slice(&xs, [173], &cpu::device())
        .and_then(|t| t.cast(dtype))
        .expect("input");
    let y = apply(row, &x, params).expect(name);
    assert_eq!(y.dtype(), dtype, "{name}");
    let scale = xs.iter().map(|x| expected(*x).abs()).fold(0.0, f64::max);
    for (x, y) in xs.iter().zip(
        y.cast(DType::F64)
            .and_then(|t| t.to_vec::<f64>())
            .expect(name),
    ) {
        let expected = expected(*x);
        assert!(
            (y - expected).abs() <= relative * (expected.abs() + 0.1 * scale),
            "{name}({x}) = {y} in {dtype}, expected {expected}"
        );
    }
}

#[test]
fn every_unary_op_computes_its_formula_in_both_precisions() {
    for reference in REFERENCE {
        check(reference, DType::F64, 2e-14);
        check(reference, DType::F32, 6e-7);
    }
    for row in rows() {
        let name = row.info.name;
        assert!(
            NOT_FLOATS.contains(&name) || REFERENCE.iter().any(|r| r.0 == name),
            "{name} has no reference formula"
        );
    }
}

#[test]
fn small_floats_compute_in_f32_and_round_once() -> Result<()> {
    let device = cpu::device();
    let values: Vec<f16> = (0..400)
        .map(|i| f16::from_f32(i as f32 * 0.01 - 2.0))
        .collect();
    let x = Tensor::from_slice(&values, [400], &device)?;
    // mish has five steps: rounding each of them to f16 would show.
    let expected: Vec<f16> = x
        .cast(DType::F32)?
        .mish()?
        .to_vec::<f32>()?
        .into_iter()
        .map(f16::from_f32)
        .collect();
    assert_eq!(x.mish()?.to_vec::<f16>()?, expected);
    // 2049 is no f16; an integer operand must not be rounded to it on the way in.
    let y = Tensor::from_slice(&[f16::from_f32(-2048.0)], [1], &device)?;
    assert_eq!(
        y.add(&i32s(&[2049]))?.to_vec::<f16>()?,
        [f16::from_f32(1.0)]
    );
    Ok(())
}

#[test]
fn round_takes_halves_to_the_even_neighbour() {
    assert_same(
        get(f32s(&[0.5, 1.5, 2.5, -0.5, -1.5, 2.4999998, NAN, INF]).round()),
        &[0.0, 2.0, 2.0, -0.0, -2.0, 2.0, NAN, INF],
    );
    assert_eq!(ints(i32s(&[-3, 7]).round()), [-3, 7]);
}

#[test]
fn sign_keeps_nan_and_abs_wraps() {
    assert_same(
        get(f32s(&[-2.0, 0.0, 3.0, NAN]).sign()),
        &[-1.0, 0.0, 1.0, NAN],
    );
    assert_eq!(ints(i32s(&[i32::MIN, -4]).abs()), [i32::MIN, 4]);
    assert_eq!(ints(-&i32s(&[i32::MIN, 4])), [i32::MIN, -4]);
}

#[test]
fn nan_passes_through_every_float_function() {
    for (name, params, ..) in REFERENCE {
        let row = rows().find(|row| row.info.name == *name).expect(name);
        assert!(get(apply(row, &f32s(&[NAN]), params))[0].is_nan(), "{name}");
    }
}

#[test]
fn activations_saturate_instead_of_overflowing() {
    let x = f32s(&[-1000.0, -200.0, 200.0, 1000.0]);
    assert_eq!(get(x.sigmoid()), [0.0, 0.0, 1.0, 1.0]);
    assert_eq!(get(x.logsigmoid()), [-1000.0, -200.0, 0.0, 0.0]);
    assert_eq!(get(x.softplus(1.0, 20.0)), [0.0, 0.0, 200.0, 1000.0]);
    for y in [x.silu(), x.mish(), x.gelu(), x.gelu_tanh()] {
        assert_eq!(get(y), [0.0, 0.0, 200.0, 1000.0]);
    }
}

#[test]
fn logit_takes_an_optional_bound() {
    assert_same(
        get(f32s(&[0.0, 0.5, 1.0, 2.0]).logit(None)),
        &[-INF, 0.0, INF, NAN],
    );
    assert!(
        get(f32s(&[0.0, 1.0]).logit(Some(0.25)))
            .iter()
            .zip([-1.0, 1.0])
            .all(|(a, b)| (a - b * 3f32.ln()).abs() < 1e-6)
    );
    for eps in [-0.1, 0.6, f64::NAN] {
        assert!(matches!(
            f32s(&[0.5]).logit(Some(eps)),
            Err(Error::Argument { op: "logit", .. })
        ));
    }
}

#[test]
fn parameters_that_would_divide_by_zero_are_refused() {
    assert!(matches!(
        f32s(&[1.0]).celu(0.0),
        Err(Error::Argument { op: "celu", .. })
    ));
    assert!(matches!(
        f32s(&[1.0]).softplus(0.0, 20.0),
        Err(Error::Argument { op: "softplus", .. })
    ));
}

#[test]
fn finiteness_is_known_for_every_dtype() -> Result<()> {
    let x = f32s(&[1.0, INF, -INF, NAN]);
    assert_eq!(bools(x.isnan()), [false, false, false, true]);
    assert_eq!(bools(x.isinf()), [false, true, true, false]);
    assert_eq!(bools(x.isfinite()), [true, false, false, false]);
    for dtype in [DType::Bool, DType::U8, DType::I32, DType::I64] {
        let x = i32s(&[0, 1]).cast(dtype)?;
        assert_eq!(
            (bools(x.isnan()), bools(x.isinf()), bools(x.isfinite())),
            (vec![false; 2], vec![false; 2], vec![true; 2]),
            "{dtype}"
        );
    }
    Ok(())
}

#[test]
fn division_signs_follow_python() {
    let (x, y) = (i32s(&[7, -7, 7, -7]), i32s(&[3, 3, -3, -3]));
    assert_eq!(ints(x.floor_div(&y)), [2, -3, -3, 2]);
    assert_eq!(ints(x.trunc_div(&y)), [2, -2, -2, 2]);
    assert_eq!(ints(x.remainder(&y)), [1, 2, -2, -1]);
    let (x, y) = (f32s(&[7.5, -7.5, 7.5, -7.5]), f32s(&[2.0, 2.0, -2.0, -2.0]));
    assert_eq!(get(x.floor_div(&y)), [3.0, -4.0, -4.0, 3.0]);
    assert_eq!(get(x.trunc_div(&y)), [3.0, -3.0, -3.0, 3.0]);
    assert_eq!(get(x.remainder(&y)), [1.5, 0.5, -0.5, -1.5]);
    // 1 / 0.1 rounds up to 10, yet the f32 next to 0.1 fits only nine times into 1.
    assert_eq!(get(f32s(&[1.0]).floor_div(0.1)), [9.0]);
}

#[test]
fn true_division_of_integers_gives_floats() {
    assert_eq!(get(i32s(&[1, 7]).div(2)), [0.5, 3.5]);
    assert_eq!(get(&i32s(&[1, -1]) / &i32s(&[0, 0])), [INF, -INF]);
}

#[test]
fn an_integer_divided_by_zero_is_an_error_that_names_the_op() {
    let (x, zero) = (i32s(&[1, 2]), i32s(&[1, 0]));
    let fault =
        |result: Result<Tensor>| result.and_then(|t| t.to_vec::<i32>()).expect_err("a fault");
    assert_eq!(
        fault(x.floor_div(&zero)),
        Error::DivisionByZero { op: "floor_div" }
    );
    assert_eq!(
        fault(x.trunc_div(&zero)),
        Error::DivisionByZero { op: "trunc_div" }
    );
    assert_eq!(
        fault(x.remainder(0)),
        Error::DivisionByZero { op: "remainder" }
    );
}

#[test]
fn maximum_propagates_nan_and_fmax_ignores_it() {
    let (x, y) = (f32s(&[NAN, 1.0, NAN, 2.0]), f32s(&[1.0, NAN, NAN, 3.0]));
    assert_same(get(x.maximum(&y)), &[NAN, NAN, NAN, 3.0]);
    assert_same(get(x.minimum(&y)), &[NAN, NAN, NAN, 2.0]);
    assert_same(get(x.fmax(&y)), &[1.0, 1.0, NAN, 3.0]);
    assert_same(get(x.fmin(&y)), &[1.0, 1.0, NAN, 2.0]);
    assert_eq!(ints(i32s(&[1, 5]).fmax(3)), [3, 5]);
}

#[test]
fn heaviside_takes_its_value_at_zero_from_the_right() {
    assert_same(
        get(f32s(&[-2.0, -0.0, 0.0, 2.0, NAN]).heaviside(0.5)),
        &[0.0, 0.5, 0.5, 1.0, NAN],
    );
    assert_eq!(ints(i32s(&[-2, 0, 2]).heaviside(7)), [0, 7, 1]);
}

#[test]
fn copysign_and_atan2_see_the_sign_of_zero() {
    assert_same(
        get(f32s(&[1.0, -1.0, 0.0]).copysign(&f32s(&[-0.0, 0.0, -3.0]))),
        &[-1.0, 1.0, -0.0],
    );
    let pi = PI as f32;
    assert_same(
        get(f32s(&[0.0, -0.0, 1.0]).atan2(&f32s(&[-1.0, -1.0, 0.0]))),
        &[pi, -pi, pi / 2.0],
    );
}

#[test]
fn hypot_does_not_overflow_on_the_way() {
    assert_eq!(
        get(f32s(&[3e30, 3.0]).hypot(&f32s(&[4e30, 4.0]))),
        [5e30, 5.0]
    );
}

#[test]
fn integer_powers_wrap_and_truncate() {
    let x = i32s(&[2, -1, 1, 3, 0, -2]);
    assert_eq!(ints(x.pow(-3)), [0, -1, 1, 0, 0, 0]);
    assert_eq!(ints(x.pow(0)), [1; 6]);
    assert_eq!(ints(i32s(&[3]).pow(40)), [3i32.wrapping_pow(40)]);
    assert_eq!(get(f32s(&[-2.0, 2.0, 0.0]).pow(3)), [-8.0, 8.0, 0.0]);
    assert_same(
        get(f32s(&[-2.0, NAN, 1.0]).pow(&f32s(&[0.5, 0.0, NAN]))),
        &[NAN, 1.0, 1.0],
    );
}

#[test]
fn shifts_past_the_width_leave_only_the_sign() -> Result<()> {
    let x = i32s(&[-8, 8, -8, 8, -8]);
    assert_eq!(ints(x.shr(&i32s(&[1, 1, 32, 40, -1]))), [-4, 4, -1, 0, -1]);
    assert_eq!(
        ints(x.shl(&i32s(&[1, 28, 32, 31, -1]))),
        [-16, i32::MIN, 0, 0, 0]
    );
    let bytes = Tensor::from_slice(&[200u8, 1], [2], &cpu::device())?;
    assert_eq!(bytes.shl(1)?.to_vec::<u8>()?, [144, 2]);
    assert_eq!(bytes.shl(8)?.to_vec::<u8>()?, [0, 0]);
    Ok(())
}

#[test]
fn bytes_wrap_at_eight_bits() -> Result<()> {
    let x = Tensor::from_slice(&[200u8, 3], [2], &cpu::device())?;
    assert_eq!(x.add(100)?.to_vec::<u8>()?, [44, 103]);
    assert_eq!(x.square()?.to_vec::<u8>()?, [64, 9]);
    assert_eq!(x.neg()?.to_vec::<u8>()?, [56, 253]);
    assert_eq!(x.bitwise_not()?.to_vec::<u8>()?, [55, 252]);
    assert_eq!(x.pow(2)?.to_vec::<u8>()?, [64, 9]);
    Ok(())
}

#[test]
fn logical_ops_take_anything_and_bits_take_integers() {
    let (x, y) = (f32s(&[0.0, 0.5, -0.0, NAN]), i32s(&[0, 0, 3, 3]));
    assert_eq!(bools(x.logical_and(&y)), [false, false, false, true]);
    assert_eq!(bools(x.logical_or(&y)), [false, true, true, true]);
    assert_eq!(bools(x.logical_xor(&y)), [false, true, true, false]);
    assert_eq!(bools(x.logical_not()), [true, false, true, false]);
    let (x, y) = (i32s(&[12, -1]), i32s(&[10, 7]));
    assert_eq!(
        (
            ints(x.bitwise_and(&y)),
            ints(x.bitwise_or(&y)),
            ints(x.bitwise_xor(&y))
        ),
        (vec![8, 7], vec![14, -1], vec![6, -8])
    );
    assert_eq!(ints(x.bitwise_not()), [-13, 0]);
    assert_eq!(bools(x.gt(0).and_then(|t| t.bitwise_not())), [false, true]);
}

#[test]
fn nan_compares_as_unequal_to_everything() {
    let (x, y) = (f32s(&[NAN, 1.0, 1.0]), f32s(&[NAN, NAN, 1.0]));
    assert_eq!(bools(x.eq(&y)), [false, false, true]);
    assert_eq!(bools(x.ne(&y)), [true, true, false]);
    assert_eq!(bools(x.le(&y)), [false, false, true]);
    assert_eq!(bools(x.lt(&y)), [false; 3]);
    assert_eq!(bools(x.ge(&y)), [false, false, true]);
    assert_eq!(bools(x.gt(&y)), [false; 3]);
}

#[test]
fn operands_meet_in_the_promoted_dtype() -> Result<()> {
    use DType::*;
    let of = |dtype| i32s(&[1]).cast(dtype);
    let pairs = [
        (U8, I32, I32, F32),
        (U32, I32, I64, F32),
        (Bool, U8, U8, F32),
        (I64, BF16, BF16, BF16),
        (F16, BF16, F32, F32),
        (F32, F64, F64, F64),
        (F8E4M3, F8E5M2, F32, F32),
    ];
    for (a, b, sum, quotient) in pairs {
        assert_eq!(of(a)?.add(&of(b)?)?.dtype(), sum, "{a} {b}");
        assert_eq!(of(b)?.add(&of(a)?)?.dtype(), sum, "{b} {a}");
        assert_eq!(of(a)?.div(&of(b)?)?.dtype(), quotient, "{a} {b}");
        assert_eq!(of(a)?.lt(&of(b)?)?.dtype(), Bool, "{a} {b}");
    }
    for (dtype, with_int, with_float) in [
        (Bool, I32, F32),
        (U8, U8, F32),
        (I64, I64, F32),
        (F8E4M3, F8E4M3, F8E4M3),
        (F16, F16, F16),
        (F64, F64, F64),
    ] {
        assert_eq!(
            (of(dtype)?.mul(2)?.dtype(), of(dtype)?.mul(2.5)?.dtype()),
            (with_int, with_float),
            "{dtype}"
        );
    }
    Ok(())
}

#[test]
fn numbers_stand_on_either_side() {
    let x = f32s(&[1.0, 4.0]);
    assert_eq!(get(&x + 1), [2.0, 5.0]);
    assert_eq!(get(1.0 - &x), [0.0, -3.0]);
    assert_eq!(get(2i64 * &x), [2.0, 8.0]);
    assert_eq!(get(1.0 / &x), [1.0, 0.25]);
    assert_eq!(get(&x - &x), [0.0, 0.0]);
    let exact = Tensor::from_slice(&[1i64], [1], &cpu::device())
        .and_then(|t| t.add(i64::MAX - 1))
        .and_then(|t| t.to_vec::<i64>());
    assert_eq!(exact.expect("i64"), [i64::MAX]);
}

#[test]
fn a_number_that_does_not_fit_is_refused_instead_of_wrapped() -> Result<()> {
    let x = Tensor::from_slice(&[1u8], [1], &cpu::device())?;
    for result in [x.gt(-1), x.add(256), i32s(&[1]).add(1i64 << 31)] {
        assert!(matches!(result, Err(Error::Argument { .. })), "{result:?}");
    }
    Ok(())
}

#[test]
fn shapes_broadcast_or_say_why_not() -> Result<()> {
    let device = cpu::device();
    let column = Tensor::from_slice(&[10f32, 20.0], [2, 1], &device)?;
    assert_eq!(
        get(column.add(&f32s(&[1.0, 2.0, 3.0]))),
        [11.0, 12.0, 13.0, 21.0, 22.0, 23.0]
    );
    let empty = Tensor::from_slice::<f32>(&[], [0, 1], &device)?;
    assert_eq!(empty.mul(&f32s(&[1.0, 2.0]))?.dims(), [0, 2]);
    assert_eq!(Tensor::new(2f32, &device)?.exp2()?.item()?.to_f64(), 4.0);
    let error = f32s(&[1.0, 2.0])
        .add(&f32s(&[1.0, 2.0, 3.0]))
        .expect_err("2 and 3 do not broadcast");
    assert_eq!(
        error.to_string(),
        "add: shapes do not fit: [2] and [3] do not broadcast: dimensions must be equal or 1"
    );
    Ok(())
}

#[test]
fn dtypes_without_meaning_are_refused() -> Result<()> {
    let (flag, x) = (i32s(&[1]).gt(0)?, f32s(&[1.0]));
    for result in [
        flag.neg(),
        flag.add(&flag),
        flag.floor(),
        flag.relu(),
        x.bitwise_not(),
        x.bitwise_and(&x),
        x.shl(1),
        flag.shl(&flag),
        flag.square(),
    ] {
        assert!(matches!(result, Err(Error::DType { .. })), "{result:?}");
    }
    assert_eq!(flag.exp()?.dtype(), DType::F32);
    assert_eq!(bools(flag.maximum(&flag)), [true]);
    Ok(())
}

#[test]
fn operands_on_different_devices_are_refused() -> Result<()> {
    let other = Device::new(cpu::CpuBackend::new());
    let y = Tensor::from_slice(&[1f32], [1], &other)?;
    assert!(matches!(
        f32s(&[1.0]).add(&y),
        Err(Error::DeviceMismatch { op: "add", .. })
    ));
    assert!(matches!(
        f32s(&[1.0]).gt(0)?.where_(&y, 0),
        Err(Error::DeviceMismatch { op: "where_", .. })
    ));
    Ok(())
}

#[test]
fn selections_choose_and_mix() -> Result<()> {
    let (x, y) = (f32s(&[1.0, 2.0, 3.0]), f32s(&[10.0, 20.0, 30.0]));
    let odd = Tensor::from_slice(&[true, false, true], [3], &cpu::device())?;
    assert_eq!(get(odd.where_(&x, &y)), [1.0, 20.0, 3.0]);
    assert_eq!(ints(odd.where_(1, 0)), [1, 0, 1]);
    assert_eq!(get(odd.where_(0.5, &i32s(&[7, 8, 9]))), [0.5, 8.0, 0.5]);
    assert_eq!(get(x.masked_fill(&odd, -1)), [-1.0, 2.0, -1.0]);
    assert_eq!(get(x.lerp(&y, 0.5)), [5.5, 11.0, 16.5]);
    assert_eq!(get(f32s(&[0.1]).lerp(&f32s(&[0.7]), 1.0)), [0.7]);
    assert_eq!(get(x.addcmul(&y, &x, 0.5)), [6.0, 22.0, 48.0]);
    assert_same(
        get(f32s(&[-5.0, 0.5, 5.0, NAN]).clip(-1, &f32s(&[1.0]))),
        &[-1.0, 0.5, 1.0, NAN],
    );
    assert_eq!(ints(i32s(&[-5, 0, 5]).clip(-1, 1)), [-1, 0, 1]);
    assert_eq!(get(i32s(&[-5, 0, 5]).clip(-0.5, 0.5)), [-0.5, 0.0, 0.5]);
    Ok(())
}

#[test]
fn small_floats_overflow_as_their_format_says() -> Result<()> {
    let x = f32s(&[300.0]);
    assert!(
        x.cast(DType::F8E4M3)?
            .mul(2)?
            .cast(DType::F32)?
            .isnan()?
            .item()?
            .to_bool()
    );
    assert_eq!(
        x.cast(DType::F8E5M2)?
            .mul(1000)?
            .cast(DType::F32)?
            .item()?
            .to_f64(),
        f64::INFINITY
    );
    let y = Tensor::from_slice(&[bf16::from_f32(1.0)], [1], &cpu::device())?;
    assert_eq!(y.add(LN_2)?.to_vec::<bf16>()?, [bf16::from_f64(1.0 + LN_2)]);
    Ok(())
}
