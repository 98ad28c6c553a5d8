//! Dropout: each element survives or not by its own random value, keyed by its global index.

use super::{
    OpInfo, creates,
    expr::{check_float, check_same_shape, compute_type},
    op,
    random::{Draw, Rng, uniform01},
};
use crate::{
    DType, Error, IntoPlace, Kind, Result, Scalar, Shape, Tensor,
    grad::{Back, Pulled, record1},
    map::{Builder, Val},
    spmd::{Call, Local, plain},
};
use smallvec::SmallVec;

/// The ops of this file. An element survives wherever it lies, so the parts of a sum survive
/// together.
pub const OPS: &[OpInfo] = &[DROPOUT, DROPOUT_ADD, creates("dropout_mask")];

const DROPOUT: OpInfo = op("dropout", "... -> ... ; linear 0");
const DROPOUT_ADD: OpInfo = op("dropout_add", "..., ... -> ... ; linear 0 1");

impl Tensor {
    /// Which elements survive: one of each with probability `1 - p`. It depends on seed, stream and
    /// index alone, so it is the mask that [`dropout`](Self::dropout) used with the same key.
    pub fn dropout_mask(
        shape: impl Into<Shape>,
        p: f64,
        place: impl IntoPlace,
        rng: Rng,
    ) -> Result<Tensor> {
        let (op, shape) = ("dropout_mask", shape.into());
        check_probability(op, p)?;
        Draw::whole(op, &shape, rng)?.values(DType::Bool, &[Scalar::Float(p)], place, survives)
    }

    /// Zero with probability `p`, else the element times `1 / (1 - p)`.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor, ops::Rng};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::ones([8], DType::F32, &device)?;
    /// let y = x.dropout(0.5, Rng::new(7))?;
    /// let mask = Tensor::dropout_mask([8], 0.5, &device, Rng::new(7))?;
    /// assert_eq!(y.to_vec::<f32>()?, mask.to_vec::<bool>()?.iter().map(|m| if *m { 2.0 } else { 0.0 }).collect::<Vec<f32>>());
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn dropout(&self, p: f64, rng: Rng) -> Result<Tensor> {
        check_float("dropout", &[self])?;
        run("dropout", self, None, p, rng)
    }

    /// `residual + dropout(self)` in one pass.
    #[track_caller]
    pub fn dropout_add(&self, residual: &Tensor, p: f64, rng: Rng) -> Result<Tensor> {
        check_float("dropout_add", &[self, residual])?;
        check_same_shape("dropout_add", &[self, residual])?;
        run("dropout_add", self, Some(residual), p, rng)
    }
}

fn check_probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        Ok(())
    } else {
        Err(Error::argument(
            op,
            "p",
            format!("the probability must be in 0..=1, got {p}"),
        ))
    }
}

/// Whether an element survives; declares the probability as a param.
fn survives<'b>(b: &'b Builder, index: Val<'b>, key: [Val<'b>; 3]) -> Val<'b> {
    // In f32 for every dtype, so that the mask depends on the key alone.
    uniform01(b, index, key, Kind::F32).ge(b.param(DType::F32))
}

#[track_caller]
fn run(
    op: &'static str,
    x: &Tensor,
    residual: Option<&Tensor>,
    p: f64,
    rng: Rng,
) -> Result<Tensor> {
    check_probability(op, p)?;
    let operands: SmallVec<[&Tensor; 2]> = [Some(x), residual].into_iter().flatten().collect();
    crate::observe::tell(|| {
        let [low, high, stream] = rng.params().map(|p| p.to_i64());
        serde_json::json!({ "p": p, "seed": low | high << 32, "stream": stream })
    });
    // The same elements of the gradient survive.
    record1(
        op,
        &operands,
        || values(op, x, residual, p, rng, &operands),
        |_| {
            let beside = residual.map(|r| r.dtype());
            Ok(move |b: &Back<'_>| {
                let g = b.grad()?;
                let of_x = b.wanted(0, || run("dropout", g, None, p, rng))?;
                let of_residual = beside
                    .map(|dtype| b.wanted(1, || g.cast(dtype)))
                    .transpose()?;
                Ok([of_x].into_iter().chain(of_residual).collect::<Pulled>())
            })
        },
    )
}

#[track_caller]
fn values(
    op: &'static str,
    x: &Tensor,
    residual: Option<&Tensor>,
    p: f64,
    rng: Rng,
    operands: &[&Tensor],
) -> Result<Tensor> {
    let kind = compute_type(operands.iter().copied());
    // At p = 1 nothing survives and the factor is never used.
    let params = [p, if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }].map(Scalar::Float);
    let draw = Draw::whole(op, x.shape(), rng)?;
    let program = draw.program(x.dtype(), |b, index, key| {
        let (keep, factor) = (survives(b, index, key), b.param(kind));
        let value = b.load(x.dtype()).cast(kind) * factor;
        let value = keep.select(value, value.lit(0.0));
        residual.map_or(value, |r| b.load(r.dtype()).cast(kind) + value)
    })?;
    if plain(op, operands)? {
        return draw.run(&program, operands, &params, x.device());
    }
    let local = |l: &Local<'_>| {
        let parts: SmallVec<[&Tensor; 2]> = l.inputs.iter().collect();
        draw.part(&l.region(0, x.shape()))
            .run(&program, &parts, &params, l[0].device())
    };
    let info = if residual.is_some() {
        &DROPOUT_ADD
    } else {
        &DROPOUT
    };
    // Parts of a wider residual would be rounded one by one.
    Call::of(info, operands)
        .partials(residual.is_none_or(|r| r.dtype() == x.dtype()))
        .run1(local)
}
