//! Dropout: each element survives or not by its own random value, keyed by its global index.

use super::{
    OpInfo,
    expr::{check_float, check_same_shape, compute_type},
    op,
    random::{Draw, Rng, uniform01},
    same_device,
};
use crate::{
    DType, Device, Error, Kind, Result, Scalar, Shape, Tensor,
    map::{Builder, Val},
};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[op("dropout", "... -> ... ; offset"), op("dropout_add", "..., ... -> ... ; offset"), op("dropout_mask", "-> ... ; offset")];

/// Which elements survive: one of each with probability `1 - p`. It depends on seed, stream and index alone, so it is the mask that
/// [`Tensor::dropout`] used with the same key.
pub fn dropout_mask(shape: impl Into<Shape>, p: f64, device: &Device, rng: Rng) -> Result<Tensor> {
    let (op, shape) = ("dropout_mask", shape.into());
    check_probability(op, p)?;
    Draw::whole(op, &shape, rng)?.values(DType::Bool, &[], &[Scalar::Float(p)], device, survives)
}

impl Tensor {
    /// Zero with probability `p`, else the element times `1 / (1 - p)`.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::{Rng, dropout::dropout_mask}};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::ones([8], DType::F32, &device)?;
    /// let y = x.dropout(0.5, Rng::new(7))?;
    /// let mask = dropout_mask([8], 0.5, &device, Rng::new(7))?;
    /// assert_eq!(y.to_vec::<f32>()?, mask.to_vec::<bool>()?.iter().map(|m| if *m { 2.0 } else { 0.0 }).collect::<Vec<f32>>());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    pub fn dropout(&self, p: f64, rng: Rng) -> Result<Tensor> {
        check_float("dropout", &[self])?;
        run("dropout", self, None, p, rng)
    }

    /// `residual + dropout(self)` in one pass.
    pub fn dropout_add(&self, residual: &Tensor, p: f64, rng: Rng) -> Result<Tensor> {
        check_float("dropout_add", &[self, residual])?;
        check_same_shape("dropout_add", &[self, residual])?;
        run("dropout_add", self, Some(residual), p, rng)
    }
}

fn check_probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) { Ok(()) } else { Err(Error::Argument { op, detail: format!("the probability must be in 0..=1, got {p}") }) }
}

/// Whether an element survives; declares the probability as a param.
fn survives<'b>(b: &'b Builder, index: Val<'b>, key: [Val<'b>; 3]) -> Val<'b> {
    // In f32 for every dtype, so that the mask depends on the key alone.
    uniform01(b, index, key, Kind::F32).ge(b.param(Kind::F32))
}

fn run(op: &'static str, x: &Tensor, residual: Option<&Tensor>, p: f64, rng: Rng) -> Result<Tensor> {
    check_probability(op, p)?;
    let operands: smallvec::SmallVec<[&Tensor; 2]> = [Some(x), residual].into_iter().flatten().collect();
    let device = same_device(op, &operands)?;
    let kind = compute_type(operands.iter().copied());
    // At p = 1 nothing survives and the factor is never used.
    let factor = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    Draw::whole(op, x.shape(), rng)?.values(x.dtype(), &operands, &[p, factor].map(Scalar::Float), device, |b, index, key| {
        let (keep, factor) = (survives(b, index, key), b.param(kind.kind()));
        let value = b.load(x.dtype()).cast(kind) * factor;
        let value = keep.select(value, value.lit(0.0));
        residual.map_or(value, |r| b.load(r.dtype()).cast(kind) + value)
    })
}
