//! Products of stacks of matrices, scaled and added to something.

use super::{
    check_inner, check_rank,
    gradient::{added_at_once, product_as},
    number_type, product,
};
use crate::{
    DType, Error, Result, Scalar, Shape, Tensor,
    grad::{Back, record1},
    map::Builder,
    ops::{OpInfo, map1, op, sum_to},
    spmd::{Call, Local, plain},
};
use smallvec::smallvec;

pub(super) const BADDBMM: OpInfo = op(
    "baddbmm",
    "bmn, bmk, bkn -> bmn ; reduce k sum ; linear 0 1 ; linear 0 2",
)
.runs(&["cast", "expand"]);

/// The factors of [`Tensor::baddbmm`]; both are 1 unless told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baddbmm {
    /// On the summand.
    pub beta: f64,
    /// On the product.
    pub alpha: f64,
}

impl Default for Baddbmm {
    fn default() -> Self {
        Self {
            beta: 1.0,
            alpha: 1.0,
        }
    }
}

impl Tensor {
    /// `beta * self + alpha * (a @ b)` for stacks of matrices; `self` broadcasts, and is ignored
    /// (also its NaN) where `beta` is 0. Floats only.
    #[track_caller]
    pub fn baddbmm(&self, a: &Tensor, b: &Tensor, options: &Baddbmm) -> Result<Tensor> {
        let (op, Baddbmm { beta, alpha }) = ("baddbmm", *options);
        check_rank(op, a, 3)?;
        check_rank(op, b, 3)?;
        let dtype = number_type(op, &[self, a, b])?;
        if !dtype.is_float() {
            return Err(Error::DType {
                op,
                dtype,
                expected: "floats",
            });
        }
        if a.shape()[0] != b.shape()[0] {
            return Err(Error::shape(
                op,
                [self, a, b],
                format!(
                    "{} and {} are stacks of different heights",
                    a.type_string(),
                    b.type_string()
                ),
            ));
        }
        record1(
            op,
            &[self, a, b],
            || self.added(a, b, beta, alpha, dtype),
            |_| {
                let (x, a, b) = (self.clone(), a.kept(), b.kept());
                Ok(move |back: &Back<'_>| {
                    let gradient = back.grad()?;
                    let own = back.wanted(0, || {
                        sum_to(op, &gradient.mul(beta)?, x.shape())?.cast(x.dtype())
                    })?;
                    let scaled = gradient.mul(alpha)?;
                    let first = back.wanted(1, || product_as(op, &scaled, &b.t()?, a.dtype()))?;
                    Ok(smallvec![
                        own,
                        first,
                        back.wanted(2, || product_as(op, &a.t()?, &scaled, b.dtype()))?
                    ])
                })
            },
        )
    }

    /// [`baddbmm`](Self::baddbmm) without a gradient, for operands that were checked.
    #[track_caller]
    fn added(&self, a: &Tensor, b: &Tensor, beta: f64, alpha: f64, dtype: DType) -> Result<Tensor> {
        let op = "baddbmm";
        if !plain(op, &[self, a, b])? {
            return sharded_baddbmm(self, &a.cast(dtype)?, &b.cast(dtype)?, beta, alpha);
        }
        check_inner(op, a, b, 2, 1)?;
        if (beta, alpha) == (1.0, 1.0)
            && self.dtype() == dtype
            && let Some(out) = added_at_once(op, &a.cast(dtype)?, &b.cast(dtype)?, self, false)?
        {
            return Ok(out);
        }
        // The product is kept wide, so that the result is rounded once.
        let product = product(op, &a.cast(dtype)?, &b.cast(dtype)?, dtype.kind().dtype())?;
        if self.shape().broadcast(op, product.shape())? != *product.shape() {
            return Err(Error::shape(
                op,
                [self, a, b],
                format!(
                    "{} does not expand to {}",
                    self.type_string(),
                    product.shape()
                ),
            ));
        }
        let b = Builder::new();
        let (x, alpha_value) = (b.load(product.dtype()), b.param(product.dtype()));
        let scaled = x * alpha_value;
        if beta == 0.0 {
            return map1(
                op,
                &b.finish(&[(scaled, dtype)])?,
                &[&product],
                &[Scalar::Float(alpha)],
            );
        }
        let program = b.finish(&[(
            scaled + b.load(self.dtype()).cast(product.dtype()) * b.param(product.dtype()),
            dtype,
        )])?;
        map1(
            op,
            &program,
            &[&product, self],
            &[Scalar::Float(alpha), Scalar::Float(beta)],
        )
    }
}

/// [`Tensor::baddbmm`] on a mesh, for factors of one dtype.
#[track_caller]
fn sharded_baddbmm(x: &Tensor, a: &Tensor, b: &Tensor, beta: f64, alpha: f64) -> Result<Tensor> {
    let op = "baddbmm";
    check_inner(op, a, b, 2, 1)?;
    let shape = Shape::from([a.dims()[0], a.dims()[1], b.dims()[2]]);
    if x.shape().broadcast(op, &shape)? != shape {
        return Err(Error::shape(
            op,
            [x, a, b],
            format!("{} does not expand to {shape}", x.type_string()),
        ));
    }
    if beta == 0.0 {
        // The summand is not read, so it is of no matter how it lies: any tensor of the right dtype
        // and shape will do for the local step.
        let local = |l: &Local<'_>| {
            let nothing = Tensor::zeros([1], x.dtype(), l[0].device())?;
            nothing.baddbmm(&l[0], &l[1], &Baddbmm { beta, alpha })
        };
        return Call::of(&BADDBMM, &[a, b]).optional(0, &[None]).run1(local);
    }
    // A summand of integers is converted when it is whole.
    let x = if x.dtype().is_float() {
        x.expand(&shape)?
    } else {
        x.cast(a.dtype())?.expand(&shape)?
    };
    Call::of(&BADDBMM, &[&x, a, b]).run1(|l| l[0].baddbmm(&l[1], &l[2], &Baddbmm { beta, alpha }))
}
