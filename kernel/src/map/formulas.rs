//! Formulas that are written once and computed in two ways: as programs, like all others, and as
//! loops that a backend on the host has compiled ahead. A loop keeps everything in registers, where
//! an interpreter of programs goes through memory after every instruction; so this is for what takes
//! a good part of a training step.

use super::{Builder, MapProgram, Val};
use crate::{DType, Result};
use std::{
    f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI},
    ops::{Add, Div, Mul, Neg, Sub},
};

/// What formulas are made of: a value of a program that is being built, or a number.
#[allow(missing_docs)]
pub trait Value:
    Copy
    + Neg<Output = Self>
    + Add<Output = Self>
    + Add<f64, Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Mul<f64, Output = Self>
    + Div<Output = Self>
{
    /// A number as one of these.
    fn lit(self, value: f64) -> Self;
    fn exp(self) -> Self;
    fn erf(self) -> Self;
    fn sqrt(self) -> Self;
    fn rsqrt(self) -> Self;
    /// The larger; NaN if either is.
    fn max(self, other: Self) -> Self;
    /// The smaller; NaN if either is.
    fn min(self, other: Self) -> Self;
    /// `yes` where this is above 0, else `no`.
    fn above_0(self, yes: Self, no: Self) -> Self;
}

impl Value for Val<'_> {
    fn lit(self, value: f64) -> Self {
        Val::lit(self, value)
    }
    fn exp(self) -> Self {
        Val::exp(self)
    }
    fn erf(self) -> Self {
        Val::erf(self)
    }
    fn sqrt(self) -> Self {
        Val::sqrt(self)
    }
    fn rsqrt(self) -> Self {
        Val::rsqrt(self)
    }
    fn max(self, other: Self) -> Self {
        Val::max(self, other)
    }
    fn min(self, other: Self) -> Self {
        Val::min(self, other)
    }
    fn above_0(self, yes: Self, no: Self) -> Self {
        self.gt(0.0).select(yes, no)
    }
}

/// `-|x|`. Written as a choice, so that what is smooth at 0 (a function of `e^-|x|` on either side)
/// has its slopes there too: that of `abs` is 0.
#[inline(always)]
pub fn below<V: Value>(x: V) -> V {
    x.above_0(-x, x)
}

/// `1 / (1 + e^-x)` times `y`. No exponential overflows: an infinite one would leave no slope.
#[inline(always)]
fn times_sigmoid<V: Value>(y: V, x: V) -> V {
    let e = below(x).exp();
    x.above_0(y, y * e) / (e + 1.0)
}

/// The logistic function.
#[inline(always)]
pub fn sigmoid<V: Value>(x: V) -> V {
    times_sigmoid(x.lit(1.0), x)
}

/// The slope of [`sigmoid`].
#[inline(always)]
pub fn sigmoid_slope<V: Value>(x: V) -> V {
    let e = below(x).exp();
    e / ((e + 1.0) * (e + 1.0))
}

/// `x` times [`sigmoid`].
#[inline(always)]
pub fn silu<V: Value>(x: V) -> V {
    times_sigmoid(x, x)
}

/// The slope of [`silu`].
#[inline(always)]
pub fn silu_slope<V: Value>(x: V) -> V {
    sigmoid(x) + x * sigmoid_slope(x)
}

/// `x` times the normal distribution function.
#[inline(always)]
pub fn gelu<V: Value>(x: V) -> V {
    x * 0.5 * ((x * FRAC_1_SQRT_2).erf() + 1.0)
}

/// The normal distribution function, plus `x` times the density.
#[inline(always)]
pub fn gelu_slope<V: Value>(x: V) -> V {
    let density = (x * x * -0.5).exp() * (0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI);
    ((x * FRAC_1_SQRT_2).erf() + 1.0) * 0.5 + x * density
}

/// The factor of the cube in the argument of `gelu_tanh`, and that of the whole argument:
/// `sqrt(8 / pi)`, since `(1 + tanh(u)) / 2 = sigmoid(2 u)`.
const GELU_CUBE: f64 = 0.044715;
const GELU_SCALE: f64 = 1.595_769_121_605_730_8;

/// Beyond 30 the logistic function in `gelu_tanh` is 0 or 1 in every dtype, and the cube would
/// overflow later.
#[inline(always)]
fn within_30<V: Value>(x: V) -> V {
    x.max(x.lit(-30.0)).min(x.lit(30.0))
}

/// [`gelu`] by a hyperbolic tangent, as a logistic function.
#[inline(always)]
pub fn gelu_tanh<V: Value>(x: V) -> V {
    let near = within_30(x);
    times_sigmoid(x, (near * near * GELU_CUBE + 1.0) * near * GELU_SCALE)
}

/// The slope of [`gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh_slope<V: Value>(x: V) -> V {
    // sigmoid(u) + x sigmoid'(u) u', with one exponential and one division for all of it.
    let near = within_30(x);
    let square = near * near;
    let u = (square * GELU_CUBE + 1.0) * near * GELU_SCALE;
    let e = below(u).exp();
    let share = e.lit(1.0) / (e + 1.0);
    let rest = e * share;
    let steep = (square * (3.0 * GELU_CUBE * GELU_SCALE) + GELU_SCALE) * near;
    u.above_0(share, rest) + steep * (rest * share)
}

/// The numbers of one step of Adam.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub struct Adam<V> {
    /// A factor of the gradient.
    pub scale: V,
    /// Decay that is added to the gradient.
    pub coupled: V,
    /// How much of a new gradient each average takes.
    pub new: [V; 2],
    pub rate: V,
    /// What is left of the value after decay.
    pub left: V,
    pub unbias: [V; 2],
    pub eps: V,
    pub eps_root: V,
}

impl<V: Value> Adam<V> {
    /// In the order of the fields.
    #[inline(always)]
    pub fn of(p: [V; 10]) -> Self {
        Self {
            scale: p[0],
            coupled: p[1],
            new: [p[2], p[3]],
            rate: p[4],
            left: p[5],
            unbias: [p[6], p[7]],
            eps: p[8],
            eps_root: p[9],
        }
    }

    /// The gradient of a value, with what decay adds.
    #[inline(always)]
    pub fn gradient(&self, g: V, w: V) -> V {
        g * self.scale + w * self.coupled
    }

    /// The averages with another gradient. They move by a part of what they lack: exact where the
    /// gradient stays the same.
    #[inline(always)]
    pub fn moments(&self, g: V, [m, v]: [V; 2]) -> [V; 2] {
        [m + (g - m) * self.new[0], v + (g * g - v) * self.new[1]]
    }

    /// The direction of the step.
    #[inline(always)]
    pub fn direction(&self, [m, v]: [V; 2]) -> V {
        let root = (v / self.unbias[1] + self.eps_root).sqrt();
        m / self.unbias[0] / (root + self.eps)
    }

    /// The value after the step.
    #[inline(always)]
    pub fn stepped(&self, w: V, direction: V) -> V {
        w * self.left - self.rate * direction
    }

    /// The value and the averages after a step.
    #[inline(always)]
    pub fn changed(&self, [w, g, m, v]: [V; 4]) -> [V; 3] {
        let g = self.gradient(g, w);
        let [m, v] = self.moments(g, [m, v]);
        [self.stepped(w, self.direction([m, v])), m, v]
    }
}

/// A formula of `N` inputs and `P` numbers, with `O` results, that may be compiled ahead.
pub trait Formula<const N: usize, const P: usize, const O: usize> {
    /// Its results.
    fn of<V: Value>(inputs: [V; N], numbers: [V; P]) -> [V; O];

    /// The program of it: inputs and results in this dtype.
    fn program(dtype: DType) -> Result<MapProgram> {
        let b = Builder::new();
        let inputs = [(); N].map(|()| b.load(dtype));
        let numbers = [(); P].map(|()| b.param(dtype));
        b.finish(&Self::of(inputs, numbers).map(|result| (result, dtype)))
    }
}

macro_rules! formulas {
    ($($(#[$doc:meta])* $name:ident<$n:literal, $p:literal, $o:literal> = |$x:pat_param, $numbers:pat_param| $value:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name;

        impl Formula<$n, $p, $o> for $name {
            #[inline(always)]
            fn of<V: Value>($x: [V; $n], $numbers: [V; $p]) -> [V; $o] {
                $value
            }
        }
    )*};
}

formulas! {
    /// [`silu`].
    Silu<1, 0, 1> = |[x], []| [silu(x)];
    /// [`silu`] of one input times another.
    SiluTimes<2, 0, 1> = |[x, y], []| [silu(x) * y];
    /// [`gelu`].
    Gelu<1, 0, 1> = |[x], []| [gelu(x)];
    /// A gradient times the slope of [`gelu`].
    GeluPull<2, 0, 1> = |[g, x], []| [g * gelu_slope(x)];
    /// [`gelu_tanh`].
    GeluTanh<1, 0, 1> = |[x], []| [gelu_tanh(x)];
    /// A gradient times the slope of [`gelu_tanh`].
    GeluTanhPull<2, 0, 1> = |[g, x], []| [g * gelu_tanh_slope(x)];
    /// [`Adam::changed`] of value, gradient and averages.
    AdamStep<4, 10, 3> = |x, numbers| Adam::of(numbers).changed(x);
}
