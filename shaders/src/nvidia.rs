//! Instructions of NVIDIA's GPUs for which CubeCL has no words, on four lanes, and whether a kernel
//! is compiled for one that has them.

use crate::{
    hopper::{held, pack},
    math::elementary::{copysign, magnitude_bits, polynomial},
    words::{F4, U4, halves},
};
use anymesh_kernel::DType;
use cubecl::prelude::*;

/// Whether a kernel is compiled for one of NVIDIA's GPUs from Ampere on, which convert pairs of
/// floats and have extremes that keep NaN.
pub(crate) fn is_target(scope: &Scope) -> bool {
    let Some(properties) = &scope.state().device_properties else {
        return false;
    };
    let version = properties.identity.fingerprint.strip_prefix("sm_");
    let version = version.and_then(|v| v.trim_end_matches('a').parse::<u32>().ok());
    version.is_some_and(|version| version >= 80)
}

/// Rounds to the nearest `bf16` or `f16`, as bits.
#[cube]
pub(crate) fn round16(x: F4, #[comptime] dtype: DType) -> U4 {
    let a = pack(x.extract(0usize), x.extract(1usize), dtype);
    let b = pack(x.extract(2usize), x.extract(3usize), dtype);
    halves(a, b)
}

#[cube]
fn widened(bits: u32) -> f32 {
    let bits = held::<u32>(bits);
    let out: f32;
    gpu_asm!(
        "{{ .reg .b16 h; cvt.u16.u32 h, {x}; cvt.f32.f16 {o}, h; }}",
        o = out(_) out, x = in(_) bits, options(pure, nomem)
    );
    held::<f32>(out)
}

/// The values of `f16`s.
#[cube]
pub(crate) fn from_f16(bits: U4) -> F4 {
    let mut out = F4::empty();
    #[unroll]
    for lane in 0..4usize {
        out.insert(lane, widened(bits.extract(lane)));
    }
    out
}

#[cube]
fn extreme_of(a: f32, b: f32, #[comptime] largest: bool) -> f32 {
    let (a, b) = (held::<f32>(a), held::<f32>(b));
    let op = comptime!(if largest { "max" } else { "min" });
    let out: f32;
    gpu_asm!(
        "{op}.NaN.f32 {o}, {a}, {b};",
        o = out(_) out, a = in(_) a, b = in(_) b, options(pure, nomem)
    );
    held::<f32>(out)
}

/// The larger or smaller one; NaN if either is.
#[cube]
pub(crate) fn extreme(a: F4, b: F4, #[comptime] largest: bool) -> F4 {
    let mut out = F4::empty();
    #[unroll]
    for lane in 0..4usize {
        out.insert(lane, extreme_of(a.extract(lane), b.extract(lane), largest));
    }
    out
}

// Functions that are right to some 17 bits: for values that are rounded to 16-bit floats. Subnormal
// arguments and results are taken for zero.

/// `log2(1 - erf(x)) / x`, `1/4 <= x <= 4`.
const ERF_TAIL: &[f32] = &[
    0.000250180981,
    -0.0041942155,
    0.0318056051,
    -0.150368806,
    -0.91796069,
    -1.62794492,
];
/// `erf(x) / x` in `x^2`, `x <= 1/4`.
const ERF_NEAR: &[f32] = &[0.1098, -0.376126, 1.12837917];

/// A function of the special function unit.
#[cube]
fn unit_of(x: f32, #[comptime] name: &'static str) -> f32 {
    let x = held::<f32>(x);
    let out: f32;
    gpu_asm!(
        "{name}.approx.ftz.f32 {o}, {x};",
        o = out(_) out, x = in(_) x, options(pure, nomem)
    );
    held::<f32>(out)
}

#[cube]
fn unit(x: F4, #[comptime] name: &'static str) -> F4 {
    let mut out = F4::empty();
    #[unroll]
    for lane in 0..4usize {
        out.insert(lane, unit_of(x.extract(lane), name));
    }
    out
}

#[cube]
pub(crate) fn coarse_exp(x: F4) -> F4 {
    unit(x * F4::new(std::f32::consts::LOG2_E), "ex2")
}

#[cube]
pub(crate) fn coarse_sqrt(x: F4) -> F4 {
    unit(x, "sqrt")
}

/// `a / b`, rounded to nearest but for subnormal results, which may be an ulp off. CUDA's own division
/// branches wherever the numerator is zero or far from one, which is most of a masked softmax.
#[cube]
pub(crate) fn div(a: F4, b: F4) -> F4 {
    // Far divisors are brought nearer, so that their reciprocals and remainders are ordinary numbers.
    let size = b.abs();
    let scale = select_many(
        size.less_than(&F4::new(5.421_011e-20f32)),
        F4::new(1.844_674_4e19f32),
        F4::new(1.0f32),
    );
    let scale = select_many(
        size.greater_than(&F4::new(1.844_674_4e19f32)),
        F4::new(5.421_011e-20f32),
        scale,
    );
    let (a, b) = (a * scale, b * scale);
    let near = unit(b, "rcp");
    let negative = -b;
    let reciprocal = fma(fma(negative, near, F4::new(1.0f32)), near, near);
    let quotient = a * reciprocal;
    let quotient = fma(fma(negative, quotient, a), reciprocal, quotient);
    let quotient = fma(fma(negative, quotient, a), reciprocal, quotient);
    // Infinities have no remainder, and that of a zero has lost its sign: NaN and zero, less one.
    let size = magnitude_bits(quotient) - U4::new(1u32);
    let none = size.greater_than(&U4::new(0x7f7f_ffffu32));
    select_many(none, a * near, quotient)
}

#[cube]
pub(crate) fn coarse_div(a: F4, b: F4) -> F4 {
    // The reciprocal of a divisor above 2^126 is subnormal.
    let far = b.abs().greater_than(&F4::new(8.507059e37f32));
    let shrink = select_many(far, F4::new(0.25f32), F4::new(1.0f32));
    (a * shrink) * unit(b * shrink, "rcp")
}

/// One over a value; zero where that is subnormal.
#[cube]
pub(crate) fn coarse_reciprocal(x: F4) -> F4 {
    unit(x, "rcp")
}

#[cube]
pub(crate) fn coarse_tanh(x: F4) -> F4 {
    let one = F4::new(1.0f32);
    let power = unit(x * F4::new(2.885_390_1f32), "ex2");
    let far = one - F4::new(2.0f32) * unit(power + one, "rcp");
    // Where the difference has few digits left.
    let near = x - x * (x * x) * F4::new(0.333_333_34f32);
    select_many(x.abs().less_than(&F4::new(0.05f32)), near, far)
}

#[cube]
pub(crate) fn coarse_erf(x: F4) -> F4 {
    let one = F4::new(1.0f32);
    let a = extreme(x.abs(), F4::new(4.0f32), false);
    let far = one - unit(a * polynomial(a, ERF_TAIL), "ex2");
    // Where the difference has few digits left.
    let near = x * polynomial(x * x, ERF_NEAR);
    select_many(a.less_than(&F4::new(0.25f32)), near, copysign(far, x))
}
