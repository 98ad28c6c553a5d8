//! Gated linear units: one half of the features decides how much of the other passes.

use super::{
    OpInfo,
    expr::{Expr, check_float, check_same_shape},
    op,
};
use crate::{
    Error, Result, Tensor,
    map::Val,
    spmd::{Call, Local, Rule, plain},
};
use smallvec::smallvec;

/// The ops of this file; what is gated may be a partial sum.
pub const OPS: &[OpInfo] = &[op("glu", HALVES), op("swiglu", HALVES), op("swiglu2", PAIR), op("geglu", HALVES), op("geglu2", PAIR)];

const HALVES: &str = "...d -> ...d ; replicate d";
const PAIR: &str = "..., ... -> ... ; linear 1";

impl Tensor {
    /// `a * sigmoid(b)` for the halves `a`, `b` of the last axis.
    #[track_caller]
    pub fn glu(&self) -> Result<Tensor> {
        gate_halves("glu", self, |a, b| gate("glu", b, a, sigmoid))
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
    #[track_caller]
    pub fn swiglu(&self) -> Result<Tensor> {
        gate_halves("swiglu", self, |a, b| gate("swiglu", a, b, silu))
    }

    /// `silu(self) * other`.
    #[track_caller]
    pub fn swiglu2(&self, other: &Tensor) -> Result<Tensor> {
        gate("swiglu2", self, other, silu)
    }

    /// `gelu(a) * b` for the halves `a`, `b` of the last axis, with the exact (error function) gelu.
    #[track_caller]
    pub fn geglu(&self) -> Result<Tensor> {
        gate_halves("geglu", self, |a, b| gate("geglu", a, b, gelu))
    }

    /// `gelu(self) * other`.
    #[track_caller]
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

/// Cuts the last axis in two and gates one half by the other. On a mesh that axis is whole, since a part of it has no other half.
#[track_caller]
fn gate_halves(op: &'static str, x: &Tensor, gated: impl Fn(&Tensor, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let half = match x.dims().last() {
        Some(n) if n % 2 == 0 => n / 2,
        _ => return Err(Error::Shape { op, detail: format!("{} has no last axis of even size to split", x.shape()) }),
    };
    check_float(op, &[x])?;
    let of = |x: &Tensor| gated(&x.narrow(-1, 0, half)?, &x.narrow(-1, half, half)?);
    if x.is_plain() {
        return of(x);
    }
    let rule = || Rule::new(HALVES, &[x.into()], &[]);
    Ok(Call { op, inputs: &[x], attrs: &[] }.run(rule, |l| Ok(smallvec![of(&l[0])?]))?.remove(0))
}

#[track_caller]
fn gate(op: &'static str, gated_by: &Tensor, value: &Tensor, f: for<'b> fn(Val<'b>) -> Val<'b>) -> Result<Tensor> {
    check_float(op, &[gated_by, value])?;
    check_same_shape(op, &[gated_by, value])?;
    if !plain(op, &[gated_by, value])? {
        // Parts of a wider value would be rounded one by one.
        let rounds = value.dtype() != gated_by.dtype();
        let rule = || {
            let rule = Rule::new(PAIR, &[gated_by.into(), value.into()], &[])?;
            Ok(if rounds { Rule { through: smallvec![], addends: 0, ..rule } } else { rule })
        };
        let local = |l: &Local<'_>| Ok(smallvec![gate(op, &l[0], &l[1], f)?]);
        return Ok(Call { op, inputs: &[gated_by, value], attrs: &[rounds.into()] }.run(rule, local)?.remove(0));
    }
    Expr::new(op, &[gated_by, value]).map(gated_by.dtype(), |a| f(a.x[0]) * a.x[1])
}
