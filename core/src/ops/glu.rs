//! Gated linear units: one half of the features decides how much of the other passes.

use super::{
    OpInfo,
    expr::{Expr, check_float, check_same_shape},
    op,
};
use crate::{Error, Result, Tensor, map::Val};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    op("glu", "...d -> ...d ; replicate d"),
    op("swiglu", "...d -> ...d ; replicate d"),
    op("swiglu2", "..., ... -> ..."),
    op("geglu", "...d -> ...d ; replicate d"),
    op("geglu2", "..., ... -> ..."),
];

impl Tensor {
    /// `a * sigmoid(b)` for the halves `a`, `b` of the last axis.
    pub fn glu(&self) -> Result<Tensor> {
        let (a, b) = halves("glu", self)?;
        gate("glu", &b, &a, sigmoid)
    }

    /// `silu(a) * b` for the halves `a`, `b` of the last axis.
    ///
    /// ```
    /// # use anymesh_core::Tensor;
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[0f32, 100.0, 5.0, 3.0], [1, 4], &device)?;
    /// assert_eq!(x.swiglu()?.to_vec::<f32>()?, [0.0, 300.0]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn swiglu(&self) -> Result<Tensor> {
        let (a, b) = halves("swiglu", self)?;
        gate("swiglu", &a, &b, silu)
    }

    /// `silu(self) * other`.
    pub fn swiglu2(&self, other: &Tensor) -> Result<Tensor> {
        gate("swiglu2", self, other, silu)
    }

    /// `gelu(a) * b` for the halves `a`, `b` of the last axis, with the exact (error function) gelu.
    pub fn geglu(&self) -> Result<Tensor> {
        let (a, b) = halves("geglu", self)?;
        gate("geglu", &a, &b, gelu)
    }

    /// `gelu(self) * other`.
    pub fn geglu2(&self, other: &Tensor) -> Result<Tensor> {
        gate("geglu2", self, other, gelu)
    }
}

fn sigmoid(x: Val<'_>) -> Val<'_> {
    x.lit(1.0) / ((-x).exp() + 1.0)
}

fn silu(x: Val<'_>) -> Val<'_> {
    x / ((-x).exp() + 1.0)
}

fn gelu(x: Val<'_>) -> Val<'_> {
    x * 0.5 * ((x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0)
}

fn halves(op: &'static str, x: &Tensor) -> Result<(Tensor, Tensor)> {
    match x.dims().last() {
        Some(n) if n % 2 == 0 => Ok((x.narrow(-1, 0, n / 2)?, x.narrow(-1, n / 2, n / 2)?)),
        _ => Err(Error::Shape { op, detail: format!("{} has no last axis of even size to split", x.shape()) }),
    }
}

fn gate(op: &'static str, gate: &Tensor, value: &Tensor, f: for<'b> fn(Val<'b>) -> Val<'b>) -> Result<Tensor> {
    check_float(op, &[gate, value])?;
    check_same_shape(op, &[gate, value])?;
    Expr::new(op, &[gate, value]).map(gate.dtype(), |a| f(a.x[0]) * a.x[1])
}
