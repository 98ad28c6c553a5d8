//! Rotary position embedding.

use super::{
    Map, OpInfo, Operand, creates,
    expr::{Expr, check_float},
    op,
    pool::check_table,
    sum_to,
};
use crate::{
    DType, Dims, Dry, Error, IntoPlace, Result, Shape, Tensor,
    backend::Affine,
    grad::{Back, Pulled, record1},
    map::Builder,
    spmd::{Call, plain},
};
use smallvec::smallvec;

/// The ops of this file.
pub const OPS: &[OpInfo] = &[ROPE, creates("rope_tables")];

const ROPE: OpInfo = op("rope", "...d, ...d, ...d -> ...d ; replicate d ; linear 0");

/// Which elements of a vector form a pair that is rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Element `i` with element `i + d/2`, as in LLaMA and GPT-NeoX.
    Half,
    /// Element `2i` with element `2i + 1`, as in GPT-J.
    Interleaved,
}

/// Which angles [`Tensor::rope_tables`] has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeOptions {
    /// What the frequencies are powers of; 10,000 unless told.
    pub base: f64,
    /// The first position; 0 unless told.
    pub offset: usize,
}

impl Default for RopeOptions {
    fn default() -> Self {
        Self {
            base: 10_000.0,
            offset: 0,
        }
    }
}

impl Tensor {
    /// The cosines and sines (f32, each `[length, d / 2]`) of the angles `position * base^(-2i / d)`
    /// for positions `offset .. offset + length`: what [`rope`](Self::rope) rotates vectors of size `d`
    /// by. Angles are computed in `f64`, so distant positions stay precise.
    pub fn rope_tables(
        length: usize,
        d: usize,
        options: &RopeOptions,
        place: impl IntoPlace,
    ) -> Result<(Tensor, Tensor)> {
        let (op, RopeOptions { base, offset }) = ("rope_tables", *options);
        if !d.is_multiple_of(2) {
            return Err(Error::argument(
                op,
                "d",
                format!("vectors of odd size {d} have no pairs to rotate"),
            ));
        }
        if !(base > 0.0 && base.is_finite()) {
            return Err(Error::argument(
                op,
                "base",
                format!("the base must be positive and finite, got {base}"),
            ));
        }
        let (shape, place) = (Shape::from([length, d / 2]), place.into_place(2)?);
        shape.checked_numel(op)?;
        let table = |f: fn(f64) -> f64| {
            place.build(DType::F32, &shape, |device, region| {
                device.check(DType::F32, region.numel())?;
                check_table(op, "length", region.numel())?;
                // Nobody will read the values of a device that has none.
                if region.numel() == 0 || !device.has_values() || Dry::is_on() {
                    return Tensor::zeros(Shape::from(region.shape.clone()), DType::F32, device);
                }
                let frequencies: Vec<f64> = (0..region.shape[1])
                    .map(|i| base.powf(-2.0 * (region.start[1] + i) as f64 / d as f64))
                    .collect();
                let positions =
                    (0..region.shape[0]).map(|s| offset as f64 + (region.start[0] + s) as f64);
                let values: Vec<f32> = positions
                    .flat_map(|at| {
                        frequencies
                            .iter()
                            .map(move |frequency| f(at * frequency) as f32)
                    })
                    .collect();
                Tensor::from_slice(&values, Shape::from(region.shape.clone()), device)
            })
        };
        Ok((table(f64::cos)?, table(f64::sin)?))
    }

    /// Rotates each pair of `[..., s, d]` by its position's angle:
    /// `(a cos - b sin, b cos + a sin)`. The tables are `[s, d / 2]`, or have leading dimensions
    /// that broadcast (positions that differ between samples). With the sines negated this is its
    /// own gradient.
    ///
    /// ```
    /// # use anymesh_core::{Tensor, ops::{RopeOptions, RopeStyle}};
    /// # let device = anymesh_backend_cpu::device();
    /// let x = Tensor::from_slice(&[1f32, 0.0, 1.0, 0.0], [2, 2], &device)?;
    /// let (cos, sin) = Tensor::rope_tables(2, 2, &RopeOptions::default(), &device)?;
    /// let y = x.rope(&cos, &sin, RopeStyle::Half)?.to_vec::<f32>()?;
    /// assert_eq!(y, [1.0, 0.0, 1f32.cos(), 1f32.sin()]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn rope(&self, cos: &Tensor, sin: &Tensor, style: RopeStyle) -> Result<Tensor> {
        let op = "rope";
        check_float(op, &[self, cos, sin])?;
        let rank = self.rank();
        if rank < 2 || !self.dims()[rank - 1].is_multiple_of(2) {
            return Err(Error::shape(
                op,
                [self],
                format!(
                    "the input is [..., s, d] with an even d, got {}",
                    self.shape()
                ),
            ));
        }
        let half = self.dims()[rank - 1] / 2;
        let pairs = self.shape().with(rank - 1, half);
        if let Some(table) = [cos, sin]
            .into_iter()
            .find(|t| t.rank() < 2 || t.shape().broadcast(op, &pairs).as_ref() != Ok(&pairs))
        {
            return Err(Error::shape(
                op,
                [self, table],
                format!(
                    "tables for {} must broadcast to {pairs}, got {}",
                    self.shape(),
                    table.shape()
                ),
            ));
        }
        crate::observe::tell(|| {
            let interleaved = matches!(style, RopeStyle::Interleaved);
            serde_json::json!({ "style": if interleaved { "interleaved" } else { "half" } })
        });
        record1(
            op,
            &[self, cos, sin],
            || self.rotated(cos, sin, style),
            |_| {
                let (cos, sin) = (cos.kept(), sin.kept());
                // Only tables that are learned look at the input again.
                let x = (cos.requires_grad() || sin.requires_grad()).then(|| self.kept());
                Ok(move |b: &Back<'_>| {
                    let g = b.grad()?;
                    // Back by the same angle.
                    let mut pulled: Pulled =
                        smallvec![b.wanted(0, || g.rope(&cos, &sin.neg()?, style))?];
                    if let Some(x) = &x {
                        pulled.push(b.wanted(1, || of_table(x, g, style, &cos, false))?);
                        pulled.push(b.wanted(2, || of_table(x, g, style, &sin, true))?);
                    }
                    Ok(pulled)
                })
            },
        )
    }

    /// [`rope`](Tensor::rope), checked.
    #[track_caller]
    fn rotated(&self, cos: &Tensor, sin: &Tensor, style: RopeStyle) -> Result<Tensor> {
        let (op, rank) = ("rope", self.rank());
        if !plain(op, &[self, cos, sin])? {
            return Call::of(&ROPE, &[self, cos, sin]).run1(|l| l[0].rope(&l[1], &l[2], style));
        }
        // The axis of two: before the pairs or after them. Flipped along it, each element meets its
        // partner.
        let (two, shape) = in_pairs(self, style);
        let x = self.reshape(&shape)?;
        let partner = x.flip(&[two as i64])?;
        let table = |t: &Tensor| t.unsqueeze(two as i64 - rank as i64 - 1);
        let (cos, sin) = (table(cos)?, table(sin)?);

        let b = Builder::new();
        let kind = super::expr::compute_type([self, &cos, &sin]);
        let [own, other, cos_v, sin_v] =
            [&x, &partner, &cos, &sin].map(|t| b.load(t.dtype()).cast(kind));
        let sign = b.index(DType::I32).cast(kind);
        let program = b.finish(&[(own * cos_v + sign * other * sin_v, self.dtype())])?;
        let mut sign = Affine {
            offset: -1,
            strides: smallvec![0; rank + 1],
        };
        sign.strides[two] = 2;
        let operands = [&x, &partner, &cos, &sin].map(Operand::from);
        Map {
            indices: &[sign],
            ..Map::new(op, &program, &shape)
        }
        .run(&operands, self.device())?
        .remove(0)
        .reshape(self.shape())
    }
}

/// The axis of two, and the shape with it, of vectors whose elements are taken apart into pairs.
fn in_pairs(x: &Tensor, style: RopeStyle) -> (usize, Shape) {
    let last = x.rank() - 1;
    let mut dims: Dims = x.dims()[..last].into();
    let half = x.dims()[last] / 2;
    let (two, pairs) = if style == RopeStyle::Half {
        (last, [2, half])
    } else {
        (last + 1, [half, 2])
    };
    dims.extend(pairs);
    (two, dims.into())
}

/// The gradient of the cosines, or of the sines, from the input and the gradient `g` of the result.
#[track_caller]
fn of_table(
    x: &Tensor,
    g: &Tensor,
    style: RopeStyle,
    table: &Tensor,
    is_sine: bool,
) -> Result<Tensor> {
    let (two, shape) = in_pairs(x, style);
    let pairs = x.shape().with(x.rank() - 1, x.dims()[x.rank() - 1] / 2);
    let part = |t: &Tensor, i: usize| t.reshape(&shape)?.narrow(two as i64, i, 1)?.reshape(&pairs);
    let (a, b, of_a, of_b) = (part(x, 0)?, part(x, 1)?, part(g, 0)?, part(g, 1)?);
    let kind = super::expr::compute_type([x, table]);
    let each = Expr::new("rope", &[&a, &b, &of_a, &of_b]);
    let each = each.map(kind, |v| {
        if is_sine {
            v.x[0] * v.x[3] - v.x[1] * v.x[2]
        } else {
            v.x[0] * v.x[2] + v.x[1] * v.x[3]
        }
    })?;
    sum_to("rope", &each, table.shape())?.cast(table.dtype())
}
