//! Ops that choose between or mix operands, element by element, with broadcasting.

use super::elementwise::{Arg, elementwise};
use crate::Tensor;

elementwise! {
    /// `yes` where this condition holds (is not zero), else `no`.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[-1f32, 4.0], [2], &device)?;
    /// let root = x.ge(0)?.where_(&x.sqrt()?, 0)?;
    /// assert_eq!(root.to_vec::<f32>()?, [0.0, 2.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    where_(condition, yes: impl Into<Arg<'a>>, no: impl Into<Arg<'a>>) Select "..., ..., ... -> ... ; linear 1 2" = condition.select(yes, no);
    /// `low` where `x` is below it, `high` where above; NaN stays NaN. For one bound use `maximum`
    /// or `minimum`.
    clip(x, low: impl Into<Arg<'a>>, high: impl Into<Arg<'a>>) Number "..., ..., ... -> ... ; monotone 0" = x.max(low).min(high);
    /// `x + weight * (y - x)`: `x` at weight 0 and exactly `y` at weight 1.
    lerp(x, y: impl Into<Arg<'a>>, weight: impl Into<Arg<'a>>) Float "..., ..., ... -> ... ; linear 0 1" = {
        let step = y - x;
        weight.lt(0.5).select(x + weight * step, y - step * (weight.lit(1.0) - weight))
    };
    /// `x + value * y * z`.
    addcmul(x, y: impl Into<Arg<'a>>, z: impl Into<Arg<'a>>, value: impl Into<Arg<'a>>) Number
        "..., ..., ..., ... -> ... ; linear 0 1 ; linear 0 2" = x + value * y * z;
    /// `value` where `mask` holds (is not zero), else `x`.
    masked_fill(x, mask: &'a Tensor, value: impl Into<Arg<'a>>) Mask "..., ..., ... -> ... ; linear 0 2" = mask.select(value, x);
}
