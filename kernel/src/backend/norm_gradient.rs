//! The gradients of a norm along rows, as a row program. What it computes at a position is written once,
//! for programs and for loops that a backend on the host has compiled ahead, as
//! [formulas](crate::map::formulas) are.

use super::{ReduceOp, RowArgs, RowBuilder, RowProgram};
use crate::{
    DType, Result,
    map::{Val, formulas::Value},
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// What tells the programs apart.
///
/// ```
/// use anymesh_kernel::{DType, backend::NormGradient};
/// let of_layer_norm = NormGradient {
///     x: DType::F32,
///     g: DType::F32,
///     weight: Some(DType::F32),
///     bias: Some(DType::F32),
///     beside: None,
///     rms: false,
///     of_input: true,
///     of_weight: true,
///     of_bias: true,
/// };
/// let program = of_layer_norm.program()?;
/// // Mean, variance, and of the gradient its share along the normalised input and its mean.
/// assert_eq!(program.folds.len(), 4);
/// # Ok::<(), anymesh_kernel::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormGradient {
    /// The input.
    pub x: DType,
    /// The gradient of the output.
    pub g: DType,
    /// The factors, where there are any.
    pub weight: Option<DType>,
    /// The summands, where there are any.
    pub bias: Option<DType>,
    /// What else is added to the gradient of the input, once that is rounded.
    pub beside: Option<DType>,
    /// Whether no mean is taken off.
    pub rms: bool,
    /// Whether the gradient of the input is wanted.
    pub of_input: bool,
    /// Whether that of the weight is, where there is one.
    pub of_weight: bool,
    /// Whether that of the bias is, where there is one.
    pub of_bias: bool,
}

/// One position of a row, with the mean of the row, where that is taken off.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NormPosition<V> {
    pub x: V,
    pub g: V,
    pub weight: Option<V>,
    pub mean: Option<V>,
}

impl<V: Value> NormPosition<V> {
    /// One over the deviation of a row.
    #[inline(always)]
    pub fn root(variance: V, eps: V) -> V {
        (variance + eps).rsqrt()
    }

    /// The input without the mean.
    #[inline(always)]
    pub fn centered(&self) -> V {
        self.mean.map_or(self.x, |mean| self.x - mean)
    }

    /// The normalised input, by the [`root`](Self::root) of the row.
    #[inline(always)]
    pub fn direction(&self, root: V) -> V {
        self.centered() * root
    }

    /// The gradient of the normalised input.
    #[inline(always)]
    pub fn scaled(&self) -> V {
        self.weight.map_or(self.g, |weight| self.g * weight)
    }

    /// What the gradient of the weight is the sum of.
    #[inline(always)]
    pub fn of_weight(&self, root: V) -> V {
        self.g * self.direction(root)
    }

    /// The gradient of the input: of that of the normalised input what is left without its mean,
    /// `level`, and without its share along the normalised input.
    #[inline(always)]
    pub fn of_input(&self, root: V, along: V, level: Option<V>) -> V {
        let g = self.scaled();
        let g = level.map_or(g, |level| g - level);
        (g - self.direction(root) * along) * root
    }
}

/// Which values of a program are what.
#[derive(Clone, Copy)]
struct Row {
    weighted: bool,
    /// Results of reductions.
    mean: Option<usize>,
    variance: usize,
}

impl Row {
    fn at<'b>(&self, a: &RowArgs<'b>) -> NormPosition<Val<'b>> {
        NormPosition {
            x: a.x[0],
            g: a.x[1],
            weight: self.weighted.then(|| a.x[2]),
            mean: self.mean.map(|mean| a.r[mean]),
        }
    }

    fn root<'b>(&self, a: &RowArgs<'b>) -> Val<'b> {
        NormPosition::root(a.r[self.variance], a.p[NormGradient::EPS])
    }

    fn of_weight<'b>(&self, a: &RowArgs<'b>) -> Val<'b> {
        self.at(a).of_weight(self.root(a))
    }
}

impl NormGradient {
    /// The parameter that is one over the length of a row.
    pub const SHARE: usize = 0;
    /// The parameter that is added under the root.
    pub const EPS: usize = 1;

    /// The dtypes of the inputs: `x`, `g`, the weight, and what is added, where there are these.
    fn inputs(&self) -> SmallVec<[DType; 4]> {
        let mut inputs = smallvec![self.x, self.g];
        inputs.extend(self.weight.into_iter().chain(self.beside));
        inputs
    }

    /// `r (g w - mean(g w) - h mean(g w h))` with `h = (x - mean) r`, and the sums of `g h` and `g` over
    /// all rows: those that are wanted.
    pub fn program(&self) -> Result<Arc<RowProgram>> {
        let mut b = RowBuilder::new(&self.inputs(), 2);
        let kind = b.kind();
        let share = Some(Self::SHARE);
        let mean = match self.rms {
            true => None,
            false => Some(b.fold(ReduceOp::Sum, share, |a| a.x[0])?),
        };
        let mut row = Row {
            weighted: self.weight.is_some(),
            mean,
            variance: 0,
        };
        row.variance = b.fold(ReduceOp::Sum, share, |a| {
            row.at(a).centered() * row.at(a).centered()
        })?;
        if self.of_input {
            let along = b.fold(ReduceOp::Sum, share, |a| {
                row.at(a).scaled() * row.at(a).direction(row.root(a))
            })?;
            let level = match self.rms {
                true => None,
                false => Some(b.fold(ReduceOp::Sum, share, |a| row.at(a).scaled())?),
            };
            b.each([self.x], |a| {
                let level = level.map(|level| a.r[level]);
                let of_norm = row.at(a).of_input(row.root(a), a.r[along], level);
                let other = a.x.last().filter(|_| self.beside.is_some());
                [other.map_or(of_norm, |other| *other + of_norm.cast(self.x).cast(kind))]
            })?;
        }
        let weight = self.weight.filter(|_| self.of_weight);
        match (weight, self.bias.filter(|_| self.of_bias)) {
            (Some(weight), Some(bias)) => {
                b.columns([weight, bias], |a| [row.of_weight(a), a.x[1]])?
            }
            (Some(weight), None) => b.columns([weight], |a| [row.of_weight(a)])?,
            (None, Some(bias)) => b.columns([bias], |a| [a.x[1]])?,
            (None, None) => {}
        }
        b.finish()
    }
}
