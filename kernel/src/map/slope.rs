//! How a value changes with an input, while a derivative is built.

use super::Val;
use Slope::{Const, Zero};

/// The slope of a value with respect to one input.
#[derive(Clone, Copy)]
pub(super) enum Slope<'b> {
    Zero,
    Const(f64),
    Val(Val<'b>),
}

impl<'b> Slope<'b> {
    pub(super) fn times(self, factor: Val<'b>) -> Self {
        match self {
            Zero => Zero,
            Const(1.0) => Slope::Val(factor),
            Const(c) => Slope::Val(factor * c),
            Slope::Val(v) => Slope::Val(v * factor),
        }
    }

    pub(super) fn scaled(self, factor: f64) -> Self {
        match self {
            Zero => Zero,
            Const(c) => Const(c * factor),
            Slope::Val(v) if factor == -1.0 => Slope::Val(-v),
            Slope::Val(v) => Slope::Val(v * factor),
        }
    }

    pub(super) fn over(self, divisor: Val<'b>) -> Self {
        match self {
            Zero => Zero,
            Const(c) => Slope::Val(divisor.lit(c) / divisor),
            Slope::Val(v) => Slope::Val(v / divisor),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        match (self, other) {
            (Zero, x) | (x, Zero) => x,
            (Const(a), Const(b)) => Const(a + b),
            (Const(c), Slope::Val(v)) | (Slope::Val(v), Const(c)) => Slope::Val(v + c),
            (Slope::Val(a), Slope::Val(b)) => Slope::Val(a + b),
        }
    }

    /// As a value of the kind of `like`.
    pub(super) fn value(self, like: Val<'b>) -> Val<'b> {
        match self {
            Zero => like.lit(0.0),
            Const(c) => like.lit(c),
            Slope::Val(v) => v,
        }
    }

    /// This where `condition` holds, else the other.
    pub(super) fn unless(self, condition: Val<'b>, other: Self, like: Val<'b>) -> Self {
        match (self, other) {
            (Zero, Zero) => Zero,
            (Const(a), Const(b)) if a == b => self,
            _ => Slope::Val(condition.select(self.value(like), other.value(like))),
        }
    }
}
