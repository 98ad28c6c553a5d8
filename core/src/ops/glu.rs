//! Gated linear units: one half of the features decides how much of the other passes.

use super::{
    OpInfo,
    expr::{Expr, check_float, check_same_shape},
    op,
};
use crate::{
    Error, Result, Shape, Tensor,
    backend::Affine,
    grad::{Back, record1},
    map::{
        Val,
        formulas::{gelu, gelu_slope, sigmoid, sigmoid_slope, silu, silu_slope},
    },
    spmd::Call,
};
use smallvec::smallvec;

/// The ops of this file; what is gated may be a partial sum.
pub const OPS: &[OpInfo] = &[
    HALVES.named("glu"),
    HALVES.named("swiglu"),
    PAIR.named("swiglu2"),
    HALVES.named("geglu"),
    PAIR.named("geglu2"),
];

const HALVES: OpInfo = op("glu", "...d -> ...d ; replicate d");
const PAIR: OpInfo = op("swiglu2", "..., ... -> ... ; linear 1");

impl Tensor {
    /// `a * sigmoid(b)` for the halves `a`, `b` of the last axis.
    #[track_caller]
    pub fn glu(&self) -> Result<Tensor> {
        gate_halves("glu", self, SIGMOID, 1)
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
        gate_halves("swiglu", self, SILU, 0)
    }

    /// `silu(self) * other`.
    #[track_caller]
    pub fn swiglu2(&self, other: &Tensor) -> Result<Tensor> {
        gate("swiglu2", self, other, SILU)
    }

    /// `gelu(a) * b` for the halves `a`, `b` of the last axis, with the exact (error function)
    /// gelu.
    #[track_caller]
    pub fn geglu(&self) -> Result<Tensor> {
        gate_halves("geglu", self, GELU, 0)
    }

    /// `gelu(self) * other`.
    #[track_caller]
    pub fn geglu2(&self, other: &Tensor) -> Result<Tensor> {
        gate("geglu2", self, other, GELU)
    }
}

/// A function that gates, and its slope.
#[derive(Clone, Copy)]
struct Gate {
    f: for<'b> fn(Val<'b>) -> Val<'b>,
    slope: for<'b> fn(Val<'b>) -> Val<'b>,
}

const SIGMOID: Gate = Gate {
    f: |x| sigmoid(x),
    slope: |x| sigmoid_slope(x),
};
const SILU: Gate = Gate {
    f: |x| silu(x),
    slope: |x| silu_slope(x),
};
const GELU: Gate = Gate {
    f: |x| gelu(x),
    slope: |x| gelu_slope(x),
};

/// Cuts the last axis in two and gates one half by half `by`. On a mesh that axis is whole, since a
/// part of it has no other half.
#[track_caller]
fn gate_halves(op: &'static str, x: &Tensor, gated: Gate, by: usize) -> Result<Tensor> {
    let half = match x.dims().last() {
        Some(n) if n % 2 == 0 => n / 2,
        _ => {
            return Err(Error::shape(
                op,
                [x],
                format!("{} has no last axis of even size to split", x.shape()),
            ));
        }
    };
    check_float(op, &[x])?;
    let of = |x: &Tensor| {
        gate(
            op,
            &x.narrow(-1, by * half, half)?,
            &x.narrow(-1, (1 - by) * half, half)?,
            gated,
        )
    };
    let run = || {
        if x.is_plain() {
            return of(x);
        }
        Call::of(&HALVES, &[x]).on_behalf_of(op).run1(|l| of(&l[0]))
    };
    record1(op, &[x], run, |_| {
        let x = x.kept();
        Ok(move |b: &Back<'_>| Ok(smallvec![Some(pull_halves(op, &x, b.grad()?, gated, by)?)]))
    })
}

/// The gradient of both halves in one map: that of the gating half follows the slope, that of the
/// other passes the gate.
#[track_caller]
fn pull_halves(op: &'static str, x: &Tensor, g: &Tensor, gated: Gate, by: usize) -> Result<Tensor> {
    let last = x.rank() - 1;
    let halves: Shape = x.dims()[..last]
        .iter()
        .copied()
        .chain([2, x.dims()[last] / 2])
        .collect();
    let apart = x.reshape(&halves)?;
    let half = |i: usize| apart.narrow(last as i64, i, 1);
    let (gating, value, g) = (
        half(by)?,
        half(1 - by)?,
        g.unsqueeze(last as i64)?.expand(&halves)?,
    );
    let which = Affine {
        offset: 0,
        strides: (0..=x.rank()).map(|d| i64::from(d == last)).collect(),
    };
    let out = Expr::new(op, &[&g, &gating, &value]).index(which);
    let out = out.map(x.dtype(), |a| {
        a.x[0]
            * a.i[0]
                .eq(by as i64)
                .select((gated.slope)(a.x[1]) * a.x[2], (gated.f)(a.x[1]))
    })?;
    out.reshape(x.shape())
}

#[track_caller]
fn gate(op: &'static str, gated_by: &Tensor, value: &Tensor, gated: Gate) -> Result<Tensor> {
    check_float(op, &[gated_by, value])?;
    check_same_shape(op, &[gated_by, value])?;
    // Parts of a wider value would be rounded one by one.
    let keeps = value.dtype() == gated_by.dtype();
    Expr::new(op, &[gated_by, value])
        .rule(&PAIR, keeps)
        .map(gated_by.dtype(), |a| (gated.f)(a.x[0]) * a.x[1])
}
