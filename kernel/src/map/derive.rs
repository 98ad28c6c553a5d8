//! The derivative of an elementwise program is an elementwise program.
//!
//! Each register carries its slope with respect to one input, next to its value. Going forward
//! keeps both sides of a `select` apart: where a side is not taken, its slope (perhaps infinite or
//! NaN) is not taken either.
//!
//! At a kink the slope is in the middle: 0 for `abs`, a half for each side of `max` and `min` of
//! equal values. That makes sums of such functions that are smooth (softplus written with `abs` and
//! `max`) right at the kink too.

use super::{Binary, Builder, Inst, MapProgram, Program, Unary, Val};
use crate::{Kind, Result};
use std::f64::consts::{FRAC_1_PI, FRAC_2_SQRT_PI, LN_2, LN_10, PI};

/// The product of the derivative of a program's output and the output's gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct Derivative {
    /// Its inputs are the gradient (unless `is_slope`) and those of the original program that
    /// `uses` names.
    pub program: MapProgram,
    /// Inputs of the original program.
    pub uses: Vec<usize>,
    /// Whether the gradient itself is the result.
    pub is_identity: bool,
    /// Whether there was no room for the gradient among the inputs: the result is only the
    /// derivative.
    pub is_slope: bool,
}

/// How a register changes with the input.
#[derive(Clone, Copy)]
enum Slope<'b> {
    Zero,
    Const(f64),
    Val(Val<'b>),
}

use Slope::{Const, Zero};

impl<'b> Slope<'b> {
    fn times(self, factor: Val<'b>) -> Self {
        match self {
            Zero => Zero,
            Const(1.0) => Slope::Val(factor),
            Const(c) => Slope::Val(factor * c),
            Slope::Val(v) => Slope::Val(v * factor),
        }
    }

    fn scaled(self, factor: f64) -> Self {
        match self {
            Zero => Zero,
            Const(c) => Const(c * factor),
            Slope::Val(v) if factor == -1.0 => Slope::Val(-v),
            Slope::Val(v) => Slope::Val(v * factor),
        }
    }

    fn over(self, divisor: Val<'b>) -> Self {
        match self {
            Zero => Zero,
            Const(c) => Slope::Val(divisor.lit(c) / divisor),
            Slope::Val(v) => Slope::Val(v / divisor),
        }
    }

    fn plus(self, other: Self) -> Self {
        match (self, other) {
            (Zero, x) | (x, Zero) => x,
            (Const(a), Const(b)) => Const(a + b),
            (Const(c), Slope::Val(v)) | (Slope::Val(v), Const(c)) => Slope::Val(v + c),
            (Slope::Val(a), Slope::Val(b)) => Slope::Val(a + b),
        }
    }

    /// As a value of the kind of `like`.
    fn value(self, like: Val<'b>) -> Val<'b> {
        match self {
            Zero => like.lit(0.0),
            Const(c) => like.lit(c),
            Slope::Val(v) => v,
        }
    }

    /// This where `condition` holds, else the other.
    fn unless(self, condition: Val<'b>, other: Self, like: Val<'b>) -> Self {
        match (self, other) {
            (Zero, Zero) => Zero,
            (Const(a), Const(b)) if a == b => self,
            _ => Slope::Val(condition.select(self.value(like), other.value(like))),
        }
    }
}

impl MapProgram {
    /// The gradient of input `input` from that of output `output`; `None` where the output does not
    /// change with the input (or one of them is not a float).
    pub fn derivative(&self, output: usize, input: usize) -> Result<Option<Derivative>> {
        let (out, dtype) = self.outputs[output];
        let into = self.inputs[input];
        if !dtype.is_float() || !into.is_float() {
            return Ok(None);
        }
        let b = Builder::new();
        self.replay(&b);
        let at = |reg: u16| Val { builder: &b, reg };
        let mut slopes: Vec<Slope<'_>> = Vec::with_capacity(self.insts.len());
        for (i, inst) in self.insts.iter().enumerate() {
            let value = at(i as u16);
            let slope = |reg: u16| slopes[reg as usize];
            let own = match *inst {
                _ if !self.kinds[i].is_float() => Zero,
                Inst::Load(k) if k as usize == input => Const(1.0),
                Inst::Load(_)
                | Inst::Inside(_)
                | Inst::Index(_)
                | Inst::Param(_)
                | Inst::Const(..)
                | Inst::Philox { .. } => Zero,
                Inst::Cast(a, _) => match slope(a) {
                    Slope::Val(v) => Slope::Val(v.cast(self.kinds[i].dtype())),
                    other => other,
                },
                Inst::Select(c, yes, no) => slope(yes).unless(at(c), slope(no), value),
                Inst::Unary(op, a) => match slope(a) {
                    Zero => Zero,
                    t => unary(op, t, at(a), value),
                },
                Inst::Binary(op, x, y) => match (slope(x), slope(y)) {
                    (Zero, Zero) => Zero,
                    (tx, ty) => binary(op, (at(x), tx), (at(y), ty), value),
                },
            };
            slopes.push(own);
        }
        let slope = slopes[out as usize];
        if matches!(slope, Zero) {
            return Ok(None);
        }
        let is_identity = matches!(slope, Const(1.0)) && dtype == into;
        let like = at(out);
        let (program, uses) = self.trimmed(&b, slope.value(like), into)?;
        if uses.len() >= super::MAX_INPUTS {
            return Ok(Some(Derivative {
                program,
                uses,
                is_identity,
                is_slope: true,
            }));
        }
        let (program, uses) = self.trimmed(&b, slope.times(b.load(dtype)).value(like), into)?;
        Ok(Some(Derivative {
            program,
            uses: uses[1..].to_vec(),
            is_identity,
            is_slope: false,
        }))
    }

    /// The same instructions with the same numbers.
    fn replay(&self, b: &Builder) {
        let mut state = b.0.borrow_mut();
        state.insts = self.insts.clone();
        state.kinds = self.kinds.clone();
        state.inputs = self.inputs.clone();
        state.indices = self.indices.clone();
        state.params = self.params.clone();
    }

    /// The program that stores `result`, without what it does not need, and the inputs it does:
    /// those of this program behind any other.
    fn trimmed(
        &self,
        b: &Builder,
        result: Val<'_>,
        dtype: crate::DType,
    ) -> Result<(MapProgram, Vec<usize>)> {
        let whole = b.peek(result, dtype)?;
        let mut live = vec![false; whole.insts.len()];
        live[whole.outputs[0].0 as usize] = true;
        // Operands come before what reads them, so one way down the list marks all.
        for i in (0..whole.insts.len()).rev() {
            if live[i] {
                whole.insts[i].operands(|r| live[r as usize] = true);
            }
        }
        let mut uses: Vec<usize> = (0..whole.inputs.len())
            .filter(|k| {
                whole
                    .insts
                    .iter()
                    .zip(&live)
                    .any(|(inst, live)| *live && inst.input() == Some(*k))
            })
            .collect();
        uses.sort_by_key(|k| *k < self.inputs.len());
        let mut numbers = vec![0; whole.insts.len()];
        let (mut insts, mut kinds) = (vec![], vec![]);
        for (i, inst) in whole.insts.iter().enumerate().filter(|(i, _)| live[*i]) {
            numbers[i] = insts.len() as u16;
            insts.push(inst.renumbered(
                |r| numbers[r as usize],
                |k| uses.iter().position(|u| *u == k as usize).unwrap_or(0) as u8,
            ));
            kinds.push(whole.kinds[i]);
        }
        let outputs = vec![(numbers[whole.outputs[0].0 as usize], dtype)];
        let inputs = uses.iter().map(|k| whole.inputs[*k]).collect();
        Ok((
            Program {
                insts,
                kinds,
                inputs,
                indices: whole.indices,
                params: whole.params,
                outputs,
            }
            .into(),
            uses,
        ))
    }
}

impl Inst {
    /// The registers it reads.
    fn operands(&self, mut f: impl FnMut(u16)) {
        match *self {
            Inst::Load(_) | Inst::Inside(_) | Inst::Index(_) | Inst::Param(_) | Inst::Const(..) => {
            }
            Inst::Unary(_, a) | Inst::Cast(a, _) => f(a),
            Inst::Binary(_, a, b) => [a, b].into_iter().for_each(f),
            Inst::Select(a, b, c) => [a, b, c].into_iter().for_each(f),
            Inst::Philox { index, key, .. } => {
                f(index);
                key.into_iter().for_each(f);
            }
        }
    }

    /// The input it reads.
    fn input(&self) -> Option<usize> {
        match *self {
            Inst::Load(k) | Inst::Inside(k) => Some(k as usize),
            _ => None,
        }
    }

    fn renumbered(&self, r: impl Fn(u16) -> u16, input: impl Fn(u8) -> u8) -> Inst {
        match *self {
            Inst::Load(k) => Inst::Load(input(k)),
            Inst::Inside(k) => Inst::Inside(input(k)),
            Inst::Unary(op, a) => Inst::Unary(op, r(a)),
            Inst::Binary(op, a, b) => Inst::Binary(op, r(a), r(b)),
            Inst::Select(a, b, c) => Inst::Select(r(a), r(b), r(c)),
            Inst::Cast(a, dtype) => Inst::Cast(r(a), dtype),
            Inst::Philox { index, key, word } => Inst::Philox {
                index: r(index),
                key: key.map(r),
                word,
            },
            other => other,
        }
    }
}

/// The slope of a function of `x`, whose value is `y`.
fn unary<'b>(op: Unary, t: Slope<'b>, x: Val<'b>, y: Val<'b>) -> Slope<'b> {
    let one = || x.lit(1.0);
    match op {
        Unary::Neg => t.scaled(-1.0),
        Unary::Abs => t.times(x.sign()),
        // Flat, but for jumps.
        Unary::Sign
        | Unary::Floor
        | Unary::Ceil
        | Unary::Round
        | Unary::Trunc
        | Unary::IsNan
        | Unary::IsInf
        | Unary::Not => Zero,
        Unary::Exp => t.times(y),
        Unary::Exp2 => t.times(y * LN_2),
        Unary::Expm1 => t.times(x.exp()),
        Unary::Log => t.over(x),
        Unary::Log2 => t.over(x * LN_2),
        Unary::Log10 => t.over(x * LN_10),
        Unary::Log1p => t.over(x + 1.0),
        Unary::Sqrt => t.over(y * 2.0),
        Unary::Rsqrt => t.times(y / x * -0.5),
        Unary::Sin => t.times(x.cos()),
        Unary::Cos => t.times(-x.sin()),
        Unary::Tan => t.times(y * y + 1.0),
        // In factors, so that nothing cancels near 1.
        Unary::Asin => t.times(((one() - x) * (x + 1.0)).rsqrt()),
        Unary::Acos => t.times(-((one() - x) * (x + 1.0)).rsqrt()),
        Unary::Atan => t.over(x * x + 1.0),
        Unary::Sinh => t.times(x.unary(Unary::Cosh)),
        Unary::Cosh => t.times(x.unary(Unary::Sinh)),
        // 1 / cosh^2 keeps its digits where 1 - tanh^2 is all rounding. A choice and not `abs`,
        // whose slope at 0 would be missing from further derivatives.
        Unary::Tanh => {
            let e = (x.gt(0.0).select(-x, x) * 2.0).exp();
            t.times(e * 4.0 / ((e + 1.0) * (e + 1.0)))
        }
        Unary::Asinh => t.over(hypot(x, one())),
        Unary::Acosh => t.times((x - 1.0).rsqrt() * (x + 1.0).rsqrt()),
        Unary::Atanh => t.over((one() - x) * (x + 1.0)),
        Unary::Erf => t.times((-(x * x)).exp() * FRAC_2_SQRT_PI),
        Unary::Erfinv => t.times((y * y).exp() * FRAC_2_SQRT_PI.recip()),
        Unary::Lgamma => t.times(x.unary(Unary::Digamma)),
        Unary::Digamma => t.times(trigamma(x)),
    }
}

fn hypot<'b>(x: Val<'b>, y: Val<'b>) -> Val<'b> {
    x.binary(Binary::Hypot, y)
}

/// The slope of a function of `x` and `y`, whose value is `z`.
fn binary<'b>(
    op: Binary,
    (x, tx): (Val<'b>, Slope<'b>),
    (y, ty): (Val<'b>, Slope<'b>),
    z: Val<'b>,
) -> Slope<'b> {
    // The slope of the side that wins; of equals the mean.
    let chosen = |wins: Val<'b>, loses: Val<'b>| {
        let tied = tx.plus(ty).scaled(0.5);
        tx.unless(wins, ty.unless(loses, tied, z), z)
    };
    match op {
        Binary::Add => tx.plus(ty),
        Binary::Sub => tx.plus(ty.scaled(-1.0)),
        Binary::Mul => tx.times(y).plus(ty.times(x)),
        Binary::Div => tx.over(y).plus(ty.times(-z / y)),
        Binary::Rem => tx.plus(ty.times(-x.floor_div(y))),
        Binary::Pow => {
            // Constant exponents of 0 have slope 0 also at a base of 0, and 0^y stays 0 for every
            // positive y.
            let base = tx.times(y.eq(0.0).select(y.lit(0.0), y * x.pow(y - 1.0)));
            let exponent = ty.times(x.eq(0.0).select(z.lit(0.0), z * x.log()));
            base.plus(exponent)
        }
        Binary::Max => chosen(x.gt(y), y.gt(x)),
        Binary::Min => chosen(x.lt(y), y.lt(x)),
        Binary::Fmax => chosen(x.gt(y).or(y.is_nan()), y.gt(x).or(x.is_nan())),
        Binary::Fmin => chosen(x.lt(y).or(y.is_nan()), y.lt(x).or(x.is_nan())),
        Binary::Atan2 => {
            // Divided twice, since the square of the distance may overflow.
            let distance = hypot(x, y);
            let share = |v: Val<'b>| distance.eq(0.0).select(v.lit(0.0), v / distance / distance);
            tx.times(share(y)).plus(ty.times(share(-x)))
        }
        Binary::Hypot => {
            let share = |v: Val<'b>| z.eq(0.0).select(z.lit(0.0), v / z);
            tx.times(share(x)).plus(ty.times(share(y)))
        }
        Binary::Copysign => tx.times(x.sign() * z.sign()),
        Binary::FloorDiv
        | Binary::TruncDiv
        | Binary::Eq
        | Binary::Ne
        | Binary::Lt
        | Binary::Le
        | Binary::Gt
        | Binary::Ge
        | Binary::And
        | Binary::Or
        | Binary::Xor
        | Binary::Shl
        | Binary::Shr => Zero,
    }
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
