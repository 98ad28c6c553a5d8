//! Whether a program can make an infinite value out of finite ones other than by overflow.
//!
//! A program that is linear in an operand gives the same for a sum as for its terms one by one,
//! up to rounding and overflow: but not at a pole, where `1 / 0` is infinite and
//! `2 / 0 + -1 / 0` is NaN.

use super::{Binary, Inst, MapProgram, Unary, functions::Pole};
use crate::{Kind, Scalar};

/// What is known about all values of a register, but for underflow and NaN.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    nonzero: bool,
    nonnegative: bool,
    /// Some value may be an infinite number that the program was given.
    infinite: bool,
}

impl Known {
    fn number(value: Scalar, kind: Kind) -> Self {
        let value = match kind {
            Kind::F32 => f64::from(value.to_f64() as f32),
            _ => value.to_f64(),
        };
        Self {
            nonzero: value != 0.0,
            nonnegative: value >= 0.0,
            infinite: value.is_infinite(),
        }
    }

    fn is_positive(self) -> bool {
        self.nonzero && self.nonnegative
    }

    fn meets(self, pole: Pole) -> bool {
        match pole {
            Pole::Nowhere => false,
            Pole::Zero => !self.nonzero,
            Pole::Negative => !self.nonnegative,
            Pole::Somewhere => true,
        }
    }
}

impl MapProgram {
    /// Whether finite inputs may lead to an infinite value without overflow, with these runtime
    /// scalars: through a division by what may be zero, a logarithm, arithmetic with a number that
    /// is infinite itself.
    ///
    /// ```
    /// use anymesh_kernel::{DType, Scalar, map::Builder};
    /// let b = Builder::new();
    /// let (x, y) = (b.load(DType::F32), b.param(DType::F32));
    /// let quotient = b.finish(&[(x / y, DType::F32)])?;
    /// assert!(!quotient.has_pole(&[Scalar::Float(-2.0)]));
    /// assert!(quotient.has_pole(&[Scalar::Float(0.0)]));
    /// # Ok::<(), anymesh_kernel::Error>(())
    /// ```
    pub fn has_pole(&self, params: &[Scalar]) -> bool {
        let mut known: Vec<Known> = Vec::with_capacity(self.insts.len());
        for (inst, kind) in self.insts.iter().zip(&self.kinds) {
            let at = |reg: u16| known[reg as usize];
            let number = match *inst {
                Inst::Const(value, _) => Some(value),
                Inst::Param(k) => params.get(k as usize).copied(),
                _ => None,
            };
            let pole = match *inst {
                Inst::Unary(op, a) => at(a).meets(op.pole()),
                // Nothing is computed with a bound.
                Inst::Binary(Binary::Max | Binary::Min | Binary::Fmax | Binary::Fmin, ..) => false,
                Inst::Binary(op, a, b) if kind.is_float() => {
                    at(a).infinite || at(b).infinite || at(b).meets(op.pole())
                }
                _ => false,
            };
            if pole {
                return true;
            }
            let own = match *inst {
                Inst::Unary(op, a) => of_unary(op, at(a)),
                Inst::Binary(op, a, b) => of_binary(op, at(a), at(b), a == b),
                Inst::Select(_, yes, no) => Known {
                    nonzero: at(yes).nonzero && at(no).nonzero,
                    nonnegative: at(yes).nonnegative && at(no).nonnegative,
                    infinite: at(yes).infinite || at(no).infinite,
                },
                Inst::Fence(a, _) => at(a),
                Inst::Cast(a, dtype) => Known {
                    // A narrower float may round to zero.
                    nonzero: at(a).nonzero && dtype.size() >= self.kinds[a as usize].dtype().size(),
                    nonnegative: at(a).nonnegative,
                    infinite: at(a).infinite,
                },
                _ => number.map_or(Known::default(), |n| Known::number(n, *kind)),
            };
            known.push(own);
        }
        false
    }
}

fn of_unary(op: Unary, x: Known) -> Known {
    match op {
        Unary::Neg => Known {
            nonnegative: false,
            ..x
        },
        Unary::Abs | Unary::Sqrt => Known {
            nonnegative: true,
            ..x
        },
        Unary::Exp | Unary::Exp2 => Known {
            nonzero: false,
            nonnegative: true,
            ..x
        },
        Unary::Cosh => Known {
            nonzero: true,
            nonnegative: true,
            ..x
        },
        _ => Known::default(),
    }
}

fn of_binary(op: Binary, x: Known, y: Known, same: bool) -> Known {
    let both = x.nonnegative && y.nonnegative;
    let (nonzero, nonnegative) = match op {
        Binary::Add => (both && (x.nonzero || y.nonzero), both),
        Binary::Mul => (x.nonzero && y.nonzero, both || same),
        Binary::Max => (
            x.is_positive() || y.is_positive(),
            x.nonnegative || y.nonnegative,
        ),
        Binary::Hypot => (x.nonzero || y.nonzero, true),
        _ => (false, false),
    };
    Known {
        nonzero,
        nonnegative,
        infinite: x.infinite || y.infinite,
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        DType,
        map::{Builder, Val},
    };

    fn has_pole(f: for<'b> fn(Val<'b>, Val<'b>) -> Val<'b>) -> bool {
        let b = Builder::new();
        let (x, y) = (b.load(DType::F32), b.load(DType::F32));
        let program = b.finish(&[(f(x, y), DType::F32)]).expect("valid");
        program.has_pole(&[])
    }

    #[test]
    fn divisions_by_what_may_be_zero_are_poles() {
        assert!(has_pole(|x, y| x / y));
        assert!(has_pole(|x, y| x / (y - 1.0)));
        assert!(has_pole(|x, y| x * y.log()));
        assert!(has_pole(|x, y| x / y.exp()));
        assert!(has_pole(|x, _| x * f64::INFINITY));
        assert!(!has_pole(|x, y| x * y + 3.0));
        assert!(!has_pole(|x, _| x / -2.0));
        assert!(!has_pole(|x, _| x.max(f64::NEG_INFINITY)));
    }

    #[test]
    fn what_cannot_be_zero_divides_without_a_pole() {
        // The slopes of the logistic function, of tanh, and of asinh.
        assert!(!has_pole(|x, y| x / ((-y).exp() + 1.0)));
        assert!(!has_pole(|x, y| {
            let e = (y * 2.0).exp();
            x * e / ((e + 1.0) * (e + 1.0))
        }));
        assert!(!has_pole(|x, y| x / (y * y + 1.0).sqrt()));
        assert!(!has_pole(|x, y| x * y.abs().exp().log1p()));
    }
}
