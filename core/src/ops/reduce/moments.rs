//! Norms, variances and deviations.

use super::{Reduce, extent, front, mean, settled, wide};
use crate::{
    DType, Error, Reduction, Result, Scalar, Tensor,
    backend::ReduceOp,
    map::Val,
    ops::{
        elementwise::{Key, Slot, cached},
        map1,
        similarity::unless_zero,
    },
    spmd::built::Combine,
};

/// Variance with a chosen result dtype: the mean first, then the squares of the differences in one
/// pass.
#[track_caller]
fn variance(
    x: &Tensor,
    op: &'static str,
    axes: &[i64],
    keepdim: bool,
    correction: usize,
    dtype: DType,
) -> Result<Tensor> {
    let (axes, wide) = (x.shape().axes(op, axes)?, wide(x.dtype()));
    // The mean of what is partial is partial, but the differences need both.
    let x = &settled(op, x, &axes, Combine::By(Reduction::Sum, false))?;
    let mean = mean(x, op, &axes, true, wide)?;
    let slots = [
        Slot::Load(x.dtype()),
        Slot::Load(wide),
        Slot::Empty,
        Slot::Empty,
    ];
    let program = cached(
        Key {
            op: "var",
            dtype,
            slots,
        },
        |b| {
            let difference = b.load(x.dtype()).cast(wide) - b.load(wide);
            b.finish(&[(difference * difference, dtype)])
        },
    )?;
    let scale = Some(1.0 / (extent(x, &axes) - correction as f64).max(0.0));
    Reduce {
        op,
        program: &program,
        operands: &[x, &mean],
        params: &[],
        axes: &axes,
        keepdim,
        reduce: ReduceOp::Sum,
        scale,
        dtype,
        linear: false,
    }
    .run()
}

impl Tensor {
    /// The `p`-norm `sum(|x|^p)^(1/p)`; for `p = 0` the number of values that are not zero, for an
    /// infinite `p` the largest absolute value, for minus infinity the smallest. Integers and bools
    /// give `f32`.
    #[track_caller]
    pub fn norm(&self, p: f64, axes: &[i64], keepdim: bool) -> Result<Tensor> {
        let op = "norm";
        if p.is_nan() {
            return Err(Error::argument(
                op,
                "p",
                "p is NaN, it must be a number or an infinity",
            ));
        }
        let axes = self.shape().axes(op, axes)?;
        let (from, to, wide) = (self.dtype(), self.dtype().to_float(), wide(self.dtype()));
        let (program, reduce, root) = match p {
            f64::INFINITY => (
                front("norm: |x|", from, to, |v| v.abs())?,
                ReduceOp::Max,
                None,
            ),
            f64::NEG_INFINITY => (
                front("norm: |x|", from, to, |v| v.abs())?,
                ReduceOp::Min,
                None,
            ),
            0.0 => (
                front("norm: x != 0", from, to, |v| {
                    v.ne(0.0).select(v.lit(1.0), v.lit(0.0))
                })?,
                ReduceOp::Sum,
                None,
            ),
            1.0 => (
                front("norm: |x|", from, to, |v| v.abs())?,
                ReduceOp::Sum,
                None,
            ),
            2.0 => (
                front("norm: x^2", from, to, |v| v * v)?,
                ReduceOp::Sum,
                Some(front("norm: root", wide, to, |v| unless_zero(v, v.sqrt()))?),
            ),
            _ => {
                fn power(v: Val<'_>) -> Val<'_> {
                    v.pow(v.builder().param(v.kind().dtype()))
                }
                fn positive(v: Val<'_>) -> Val<'_> {
                    unless_zero(v, power(v))
                }
                if p > 0.0 {
                    let powers = front("norm: |x|^p, p > 0", from, to, |v| positive(v.abs()))?;
                    (
                        powers,
                        ReduceOp::Sum,
                        Some(front("norm: x^p, p > 0", wide, to, positive)?),
                    )
                } else {
                    (
                        front("norm: |x|^p", from, to, |v| power(v.abs()))?,
                        ReduceOp::Sum,
                        Some(front("norm: x^p", wide, to, power)?),
                    )
                }
            }
        };
        let (p, inverse) = ([Scalar::Float(p)], [Scalar::Float(1.0 / p)]);
        let dtype = if root.is_some() { wide } else { to };
        let params = &p[..program.params.len()];
        let sum = Reduce {
            op,
            program: &program,
            operands: &[self],
            params,
            axes: &axes,
            keepdim,
            reduce,
            scale: None,
            dtype,
            linear: false,
        }
        .run()?;
        match root {
            Some(root) => map1(op, &root, &[&sum], &inverse[..root.params.len()]),
            None => Ok(sum),
        }
    }

    /// Variance: the sum of squared differences from the mean, divided by `n - correction` (1 for a
    /// sample, 0 for a whole population). NaN where nothing is left to divide by. Integers and
    /// bools give `f32`.
    #[track_caller]
    pub fn var(&self, axes: &[i64], keepdim: bool, correction: usize) -> Result<Tensor> {
        variance(
            self,
            "var",
            axes,
            keepdim,
            correction,
            self.dtype().to_float(),
        )
    }

    /// Standard deviation: the root of [`var`](Self::var).
    #[track_caller]
    pub fn std(&self, axes: &[i64], keepdim: bool, correction: usize) -> Result<Tensor> {
        let (wide, to) = (wide(self.dtype()), self.dtype().to_float());
        let variance = variance(self, "std", axes, keepdim, correction, wide)?;
        let root = front("std", wide, to, |v| unless_zero(v, v.sqrt()))?;
        map1("std", &root, &[&variance], &[])
    }
}
