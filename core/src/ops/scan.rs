//! Running reductions along one axis: element `i` of the result covers elements `0..=i` of the input.

use super::{OpInfo, need_float_math, op};
use crate::{
    DType, Error, Result, Tensor,
    backend::{ScanCall, ScanOp},
};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    op("cumsum", "...r -> ...r ; replicate r ; linear 0"),
    op("cumprod", "...r -> ...r ; replicate r"),
    op("cummax", "...r -> ...r, ...r ; replicate r"),
    op("cummin", "...r -> ...r, ...r ; replicate r"),
    op("logcumsumexp", "...r -> ...r ; replicate r"),
];

impl Tensor {
    /// Running sum. `bool` and `u8` give `i32`, other integers keep their type and wrap.
    ///
    /// ```
    /// # let device = anymesh_backend_cpu::device();
    /// let x = anymesh_core::Tensor::from_slice(&[1f32, 2.0, 3.0], [3], &device)?;
    /// assert_eq!(x.cumsum(0)?.to_vec::<f32>()?, [1.0, 3.0, 6.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn cumsum(&self, axis: i64) -> Result<Tensor> {
        Ok(scan("cumsum", &self.cast(super::reduce::sum_type(self.dtype()))?, axis, ScanOp::Sum, false)?.0)
    }

    /// Running product, with the dtypes of `cumsum`.
    pub fn cumprod(&self, axis: i64) -> Result<Tensor> {
        Ok(scan("cumprod", &self.cast(super::reduce::sum_type(self.dtype()))?, axis, ScanOp::Prod, false)?.0)
    }

    /// Running maximum and its position (`i32`; the latest among equals). From the first NaN on, the maximum is NaN.
    pub fn cummax(&self, axis: i64) -> Result<(Tensor, Tensor)> {
        extreme("cummax", self, axis, ScanOp::Max)
    }

    /// Running minimum and its position (`i32`; the latest among equals). From the first NaN on, the minimum is NaN.
    pub fn cummin(&self, axis: i64) -> Result<(Tensor, Tensor)> {
        extreme("cummin", self, axis, ScanOp::Min)
    }

    /// `log(cumsum(exp(x)))` without overflow.
    pub fn logcumsumexp(&self, axis: i64) -> Result<Tensor> {
        Ok(scan("logcumsumexp", &self.cast(self.dtype().to_float())?, axis, ScanOp::LogSumExp, false)?.0)
    }
}

fn extreme(op: &'static str, x: &Tensor, axis: i64, scan_op: ScanOp) -> Result<(Tensor, Tensor)> {
    // Bools scan as the integers 0 and 1, in the same order.
    let numbers = if x.dtype() == DType::Bool { x.cast(DType::U8)? } else { x.clone() };
    let (values, positions) = scan(op, &numbers, axis, scan_op, true)?;
    let positions = positions.ok_or_else(|| Error::DeviceFailed { device: x.device().to_string(), detail: format!("{op} returned no positions") })?;
    Ok((values.cast(x.dtype())?, positions))
}

fn scan(op: &'static str, x: &Tensor, axis: i64, scan_op: ScanOp, positions: bool) -> Result<(Tensor, Option<Tensor>)> {
    let axis = x.shape().axis(op, axis)?;
    let (device, shape) = (x.device(), x.shape().clone());
    if positions {
        super::reduce::check_positions(op, shape[axis])?;
        device.check(DType::I32, x.numel())?;
    }
    if scan_op == ScanOp::LogSumExp {
        need_float_math(op, device, x.dtype())?;
    }
    if x.numel() == 0 {
        return Ok((x.result(None, x.dtype(), shape.clone()), positions.then(|| x.result(None, DType::I32, shape))));
    }
    let (values, found) = device.backend().scan(&ScanCall { input: &x.view()?, axis, op: scan_op, positions })?;
    Ok((x.result(Some(values), x.dtype(), shape.clone()), found.map(|buffer| x.result(Some(buffer), DType::I32, shape))))
}
