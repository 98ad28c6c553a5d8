//! Running sums, products and logarithms of sums with their gradients, which are scans in the other
//! direction.

use super::{CUMPROD, CUMSUM, LOGCUMSUMEXP, OpInfo, Scan};
use crate::{
    DType, Result, Tensor,
    backend::ScanOp,
    grad::{Back, is_recording, record1},
};
use smallvec::smallvec;

/// Scans that give values alone.
fn scan(info: &'static OpInfo, axis: usize, scan: ScanOp, backwards: bool) -> Scan {
    Scan {
        info,
        axis,
        scan,
        positions: false,
        backwards,
    }
}

/// The dtype in which a scan is to run whose gradient reads the result: that of small floats is too
/// coarse for it.
fn wider(x: &Tensor) -> Option<DType> {
    let wide = x.dtype().kind().dtype();
    (x.dtype().is_float() && wide != x.dtype() && is_recording(&[x])).then_some(wide)
}

/// A running sum, from the beginning or from the end.
#[track_caller]
pub(super) fn sum(x: &Tensor, axis: usize, backwards: bool) -> Result<Tensor> {
    record1(
        CUMSUM.name,
        &[x],
        || Ok(scan(&CUMSUM, axis, ScanOp::Sum, backwards).of(x)?.0),
        |_| Ok(move |b: &Back<'_>| Ok(smallvec![Some(sum(b.grad()?, axis, !backwards)?)])),
    )
}

/// A running product.
#[track_caller]
pub(super) fn product(x: &Tensor, axis: usize) -> Result<Tensor> {
    if let Some(wide) = wider(x) {
        return product(&x.cast(wide)?, axis)?.cast(x.dtype());
    }
    record1(
        CUMPROD.name,
        &[x],
        || Ok(scan(&CUMPROD, axis, ScanOp::Prod, false).of(x)?.0),
        |out| {
            let (x, out) = (x.kept(), out.clone());
            Ok(move |b: &Back<'_>| {
                let g = b.grad()?;
                // Where an element is zero, products with it say nothing about those without it:
                // they are computed with a one in its place.
                let zero = x.eq(0)?;
                let nth = sum(&zero.cast(DType::I32)?, axis, false)?;
                let without = |n: i64| {
                    let here = zero.logical_and(&nth.eq(n)?)?;
                    let rest = sum(&product(&here.where_(1, &x)?, axis)?.mul(g)?, axis, true)?;
                    here.where_(&rest, 0)
                };
                let sums = sum(&b.out(0, &out).mul(g)?, axis, true)?;
                let quotient = zero.where_(0, &sums.div(&zero.where_(1, &x)?)?)?;
                let gradient = quotient.add(&without(1)?)?;
                // A second zero has a gradient of zero, but one that depends on the first.
                Ok(smallvec![Some(if is_recording(&[&x]) {
                    gradient.add(&without(2)?)?
                } else {
                    gradient
                })])
            })
        },
    )
}

/// A running `log(sum(exp(x)))`.
#[track_caller]
pub(super) fn log_sum_exp(x: &Tensor, axis: usize) -> Result<Tensor> {
    if let Some(wide) = wider(x) {
        return log_sum_exp(&x.cast(wide)?, axis)?.cast(x.dtype());
    }
    record1(
        LOGCUMSUMEXP.name,
        &[x],
        || Ok(scan(&LOGCUMSUMEXP, axis, ScanOp::LogSumExp, false).of(x)?.0),
        |out| {
            let (x, out) = (x.kept(), out.clone());
            Ok(move |b: &Back<'_>| {
                Ok(smallvec![Some(weighted(
                    b.grad()?,
                    &b.out(0, &out).neg()?,
                    &x,
                    axis,
                    true
                )?)])
            })
        },
    )
}

/// `out[i] = sum(weights[k] * exp(from[k] + to[i]))` over the `k` up to `i`, or from `i` on. None
/// of the terms is far above the weights, but both exponents may be: positive and negative weights
/// are summed apart, by their logarithms.
#[track_caller]
fn weighted(
    weights: &Tensor,
    from: &Tensor,
    to: &Tensor,
    axis: usize,
    backwards: bool,
) -> Result<Tensor> {
    let run = || {
        let sums = |weights: &Tensor| {
            // An infinite exponent belongs to an element before which nothing was summed.
            let nothing = weights.le(0)?.logical_or(&from.eq(f64::INFINITY)?)?;
            let logs = nothing.where_(f64::NEG_INFINITY, &weights.log()?.add(from)?)?;
            scan(&LOGCUMSUMEXP, axis, ScanOp::LogSumExp, backwards)
                .of(&logs)?
                .0
                .add(to)?
                .exp()
        };
        sums(weights)?.sub(&sums(&weights.neg()?)?)
    };
    record1(LOGCUMSUMEXP.name, &[weights, from, to], run, |out| {
        let (weights, from, to, out) = (weights.clone(), from.clone(), to.clone(), out.clone());
        Ok(move |b: &Back<'_>| {
            let g = b.grad()?;
            let of_weights = if b.needs(0) || b.needs(1) {
                Some(weighted(g, &to, &from, axis, !backwards)?)
            } else {
                None
            };
            let of_from = of_weights
                .as_ref()
                .filter(|_| b.needs(1))
                .map(|g| g.mul(&weights))
                .transpose()?;
            Ok(smallvec![
                of_weights,
                of_from,
                b.wanted(2, || b.out(0, &out).mul(g))?
            ])
        })
    })
}
