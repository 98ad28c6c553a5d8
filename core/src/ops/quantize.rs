//! Tensors as 8-bit floats and a scale.

use super::{
    OpInfo,
    expr::{Expr, check_float},
};
use crate::{DType, Error, F8E4M3, F8E5M2, Result, Tensor, grad::constant, spmd::without_partials};

/// The ops of this file. On a mesh the scale is that of the whole tensor: the largest value of all
/// ranks' largest.
pub const OPS: &[OpInfo] = &[OpInfo::composed("quantize_f8", &["map", "reduce", "view"])
    .without_gradient("rounds to codes: say what is to pass with `grad::custom`")];

impl Tensor {
    /// The elements divided by a scale and rounded to 8-bit floats (`F8E4M3` or `F8E5M2`), and the
    /// scale: the largest magnitude of the tensor divided by the largest of the dtype, one `f32`
    /// without dimensions. Codes times scale are about the elements again, for
    /// [`matmul_scaled`](Tensor::matmul_scaled). Nothing is read by the host.
    ///
    /// On a mesh the scale is that of the whole tensor on every rank. It is at least the smallest
    /// normal `f32`, so that zeros stay zeros. A NaN or an infinity anywhere makes all products
    /// with the tensor NaN.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::new(&[0.5f32, -1.75, 0.25], &device)?;
    /// let (codes, scale) = x.quantize_f8(DType::F8E4M3)?;
    /// assert_eq!(codes.cast(DType::F32)?.to_vec::<f32>()?, [128.0, -448.0, 64.0]);
    /// assert_eq!(scale.item()?.to_f64(), 1.0 / 256.0);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn quantize_f8(&self, dtype: DType) -> Result<(Tensor, Tensor)> {
        let op = "quantize_f8";
        check_float(op, &[self])?;
        let largest = match dtype {
            DType::F8E4M3 => F8E4M3::MAX,
            DType::F8E5M2 => F8E5M2::MAX,
            _ => {
                return Err(Error::DType {
                    op,
                    dtype,
                    expected: "a float of 8 bits to round to",
                });
            }
        };
        crate::observe::tell(|| serde_json::json!({ "dtype": dtype.name() }));
        constant(op, &[self], || {
            // Of f64 only what f32 holds.
            let x = match self.dtype() {
                DType::F64 => Expr::new(op, &[self]).map(DType::F32, |a| a.x[0])?,
                _ => self.clone(),
            };
            let x = without_partials(x)?;
            let top = match x.numel() {
                0 => Expr::new(op, &[&x]).sum(&[], false, DType::F32, |a| a.x[0])?,
                _ => Expr::new(op, &[&x]).max(&[], false, DType::F32, |a| a.x[0].abs())?,
            };
            // Times the inverse of a constant: a product has the same bits on every device.
            let [share, least] = [1.0 / largest, f32::MIN_POSITIVE].map(f64::from);
            let scale = Expr::new(op, &[&without_partials(top)?])
                .params(&[share, least])
                .map(DType::F32, |a| (a.x[0] * a.p[0]).max(a.p[1]))?;
            let codes = Expr::new(op, &[&x, &scale]).map(dtype, |a| a.x[0] / a.x[1])?;
            Ok((codes, scale))
        })
    }
}
