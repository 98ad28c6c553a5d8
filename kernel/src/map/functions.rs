//! The scalar functions of map programs: what each takes and gives, its poles and its slope.
//!
//! A function is a row here, and its values are a row (and a formula, where no library has one) in
//! the `functions.rs` of each family of devices: `backend-cpu/src/functions.rs` for hosts and
//! `shaders/src/math/functions.rs` for GPUs.

use super::{
    Val,
    slope::Slope::{self, Zero},
};
use crate::Kind;
use std::f64::consts::{FRAC_1_PI, FRAC_2_SQRT_PI, LN_2, LN_10, PI};

/// Classes of kinds.
#[derive(Clone, Copy)]
enum Takes {
    /// All kinds.
    Any,
    /// All but bool.
    Numbers,
    /// Floats.
    Floats,
    /// Integers.
    Integers,
    /// Integers and bool.
    Bits,
}

impl Takes {
    fn includes(self, kind: Kind) -> bool {
        match self {
            Takes::Any => true,
            Takes::Numbers => kind != Kind::Bool,
            Takes::Floats => kind.is_float(),
            Takes::Integers => !kind.is_float() && kind != Kind::Bool,
            Takes::Bits => !kind.is_float(),
        }
    }
}

/// Where a function of finite values is infinite, told by one of them: its only or its last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pole {
    /// Nowhere.
    Nowhere,
    /// Where it is zero.
    Zero,
    /// Somewhere below zero.
    Negative,
    /// At values of which nothing is known.
    Somewhere,
}

/// The kind of a result: the operands' own unless a row says `bool`.
macro_rules! given {
    ($kind:ident) => {
        $kind
    };
    ($kind:ident bool) => {
        Kind::Bool
    };
}

/// Where a function has a pole: nowhere unless a row says so.
macro_rules! pole {
    () => {
        Pole::Nowhere
    };
    ($pole:ident) => {
        Pole::$pole
    };
}

/// A table of functions: `Name Takes -> bool, pole Zero = slope`. `-> bool` is for those that do not
/// give the kind they take; the pole is where the function is infinite. The slope is written with
/// the arguments that the head names.
macro_rules! functions {
    (
        $(#[$about:meta])*
        $table:ident($($arg:ident: $type:ty),*);
        $($(#[$doc:meta])* $name:ident $takes:ident $(-> $gives:ident)? $(, pole $pole:ident)? = $slope:expr;)*
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum $table {
            $($(#[$doc])* $name,)*
        }

        impl $table {
            /// Whether it is defined on values of a kind.
            pub fn takes(self, kind: Kind) -> bool {
                match self {
                    $($table::$name => Takes::$takes.includes(kind),)*
                }
            }

            /// What it gives for values of a kind.
            pub fn gives(self, kind: Kind) -> Kind {
                match self {
                    $($table::$name => given!(kind $($gives)?),)*
                }
            }

            /// Where it is infinite.
            pub(super) fn pole(self) -> Pole {
                match self {
                    $($table::$name => pole!($($pole)?),)*
                }
            }

            pub(super) fn slope<'b>(self, $($arg: $type),*) -> Slope<'b> {
                match self {
                    $($table::$name => $slope,)*
                }
            }
        }
    };
}

functions! {
    /// Functions of one value. Float functions take float kinds; the rest say what they take.
    // The slope of a function of `x`, whose value is `y`; that of `x` is `t`.
    Unary(t: Slope<'b>, x: Val<'b>, y: Val<'b>);

    /// Any number; wraps on integers.
    Neg Numbers = t.scaled(-1.0);
    /// Any number.
    Abs Numbers = t.times(x.sign());
    /// -1, 0 or 1 of the same kind; NaN stays NaN.
    Sign Numbers = Zero;
    Exp Floats = t.times(y);
    Exp2 Floats = t.times(y * LN_2);
    Expm1 Floats = t.times(x.exp());
    Log Floats, pole Zero = t.over(x);
    Log2 Floats, pole Zero = t.over(x * LN_2);
    Log10 Floats, pole Zero = t.over(x * LN_10);
    Log1p Floats, pole Negative = t.over(x + 1.0);
    Sqrt Floats = t.over(y * 2.0);
    Rsqrt Floats, pole Zero = t.times(y / x * -0.5);
    Sin Floats = t.times(x.cos());
    Cos Floats = t.times(-x.sin());
    Tan Floats = t.times(y * y + 1.0);
    Asin Floats = t.times(one_less_square(x).rsqrt());
    Acos Floats = t.times(-one_less_square(x).rsqrt());
    Atan Floats = t.over(x * x + 1.0);
    Sinh Floats = t.times(x.unary(Unary::Cosh));
    Cosh Floats = t.times(x.unary(Unary::Sinh));
    Tanh Floats = t.times(tanh_slope(x));
    Asinh Floats = t.over(hypot(x, x.lit(1.0)));
    Acosh Floats = t.times((x - 1.0).rsqrt() * (x + 1.0).rsqrt());
    Atanh Floats, pole Somewhere = t.over(one_less_square(x));
    Erf Floats = t.times((-(x * x)).exp() * FRAC_2_SQRT_PI);
    Erfinv Floats, pole Somewhere = t.times((y * y).exp() * FRAC_2_SQRT_PI.recip());
    Lgamma Floats, pole Somewhere = t.times(x.unary(Unary::Digamma));
    Digamma Floats, pole Somewhere = t.times(trigamma(x));
    Floor Floats = Zero;
    Ceil Floats = Zero;
    /// To the nearest integer, ties to even.
    Round Floats = Zero;
    Trunc Floats = Zero;
    IsNan Floats -> bool = Zero;
    IsInf Floats -> bool = Zero;
    /// Bitwise on integers, logical on bool.
    Not Bits = Zero;
}

functions! {
    /// Functions of two values of the same kind.
    // The slope of a function of `x` and `y`, whose value is `z`; theirs are `tx` and `ty`.
    Binary(x: Val<'b>, tx: Slope<'b>, y: Val<'b>, ty: Slope<'b>, z: Val<'b>);

    Add Numbers = tx.plus(ty);
    Sub Numbers = tx.plus(ty.scaled(-1.0));
    Mul Numbers = tx.times(y).plus(ty.times(x));
    /// Floats only; integers use `FloorDiv` or `TruncDiv`.
    Div Floats, pole Zero = tx.over(y).plus(ty.times(-z / y));
    /// Rounds towards minus infinity; an integer divided by zero is a fault.
    FloorDiv Numbers, pole Zero = Zero;
    /// Rounds towards zero; an integer divided by zero is a fault.
    TruncDiv Numbers, pole Zero = Zero;
    /// The remainder of `FloorDiv`: it has the sign of the divisor, as in Python. Integer zero
    /// divisor is a fault.
    Rem Numbers = tx.plus(ty.times(-x.floor_div(y)));
    /// Integers: wraps; a negative exponent gives the truncated true value (0, or ±1 for bases ±1).
    Pow Numbers, pole Somewhere = {
        // Constant exponents of 0 have slope 0 also at a base of 0, and 0^y stays 0 for every
        // positive y.
        let base = tx.times(y.eq(0.0).select(y.lit(0.0), y * x.pow(y - 1.0)));
        let exponent = ty.times(x.eq(0.0).select(z.lit(0.0), z * x.log()));
        base.plus(exponent)
    };
    /// NaN if either is NaN.
    Max Any = chosen(x.gt(y), tx, y.gt(x), ty, z);
    /// NaN if either is NaN.
    Min Any = chosen(x.lt(y), tx, y.lt(x), ty, z);
    /// Ignores one NaN. Floats only.
    Fmax Floats = chosen(x.gt(y).or(y.is_nan()), tx, y.gt(x).or(x.is_nan()), ty, z);
    /// Ignores one NaN. Floats only.
    Fmin Floats = chosen(x.lt(y).or(y.is_nan()), tx, y.lt(x).or(x.is_nan()), ty, z);
    Atan2 Floats = {
        // Divided twice, since the square of the distance may overflow.
        let distance = hypot(x, y);
        let share = |v: Val<'b>| distance.eq(0.0).select(v.lit(0.0), v / distance / distance);
        tx.times(share(y)).plus(ty.times(share(-x)))
    };
    Hypot Floats = {
        let share = |v: Val<'b>| z.eq(0.0).select(z.lit(0.0), v / z);
        tx.times(share(x)).plus(ty.times(share(y)))
    };
    Copysign Floats = tx.times(x.sign() * z.sign());
    Eq Any -> bool = Zero;
    Ne Any -> bool = Zero;
    Lt Any -> bool = Zero;
    Le Any -> bool = Zero;
    Gt Any -> bool = Zero;
    Ge Any -> bool = Zero;
    /// Bitwise on integers, logical on bool.
    And Bits = Zero;
    Or Bits = Zero;
    Xor Bits = Zero;
    /// Shift counts of the width or more, and negative ones, give 0.
    Shl Integers = Zero;
    /// Arithmetic on signed kinds; counts of the width or more, and negative ones, give 0 (or -1
    /// for negative values).
    Shr Integers = Zero;
}

impl Binary {
    /// Whether it compares: the result is a bool, whatever the operands are.
    pub fn is_comparison(self) -> bool {
        self.gives(Kind::F32) == Kind::Bool
    }
}

/// `1 - x^2` in factors, so that nothing cancels near 1.
fn one_less_square(x: Val<'_>) -> Val<'_> {
    (x.lit(1.0) - x) * (x + 1.0)
}

/// `1 / cosh(x)^2`, which keeps its digits where `1 - tanh(x)^2` is all rounding. A choice and not
/// `abs`, whose slope at 0 would be missing from further derivatives.
fn tanh_slope(x: Val<'_>) -> Val<'_> {
    let e = (x.gt(0.0).select(-x, x) * 2.0).exp();
    e * 4.0 / ((e + 1.0) * (e + 1.0))
}

fn hypot<'b>(x: Val<'b>, y: Val<'b>) -> Val<'b> {
    x.binary(Binary::Hypot, y)
}

/// The slope of the side that wins; of equals the mean. `like` is of their kind.
fn chosen<'b>(
    first_wins: Val<'b>,
    first: Slope<'b>,
    second_wins: Val<'b>,
    second: Slope<'b>,
    like: Val<'b>,
) -> Slope<'b> {
    let tied = first.plus(second).scaled(0.5);
    first.unless(first_wins, second.unless(second_wins, tied, like), like)
}

/// The derivative of the digamma function: moved up by its recurrence until the asymptotic series
/// holds, negative arguments by reflection.
fn trigamma(x: Val<'_>) -> Val<'_> {
    let negative = x.lt(0.5);
    let start = negative.select(x.lit(1.0) - x, x);
    let steps = if x.kind() == Kind::F64 { 14 } else { 6 };
    let mut sum = x.lit(0.0);
    for k in 0..steps {
        let at = start + f64::from(k);
        sum = sum + at.lit(1.0) / (at * at);
    }
    let far = start + f64::from(steps);
    let r = far.lit(1.0) / far;
    let s = r * r;
    // Bernoulli numbers: 1/6, -1/30, 1/42, -1/30, 5/66, -691/2730, 7/6.
    let terms = [
        1.0 / 6.0,
        -1.0 / 30.0,
        1.0 / 42.0,
        -1.0 / 30.0,
        5.0 / 66.0,
        -691.0 / 2730.0,
        7.0 / 6.0,
    ];
    let series = terms
        .iter()
        .rev()
        .fold(x.lit(0.0), |series, c| series * s + *c);
    let above = sum + r + s * 0.5 + series * s * r;
    // pi / sin(pi x), with the argument near zero so that the sine is precise.
    let near = x - x.unary(Unary::Round);
    let cosecant = x.lit(PI) / (near * FRAC_1_PI.recip()).sin();
    negative.select(cosecant * cosecant - above, above)
}
