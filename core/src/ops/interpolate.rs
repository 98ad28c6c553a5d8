//! Resizing by nearest or linear interpolation, one dimension at a time.
//!
//! ```
//! # use anymesh_core::{Tensor, ops::Interpolate};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[0f32, 4.], [1, 1, 2], &device)?;
//! assert_eq!(x.interpolate(&[4], Interpolate::Nearest)?.to_vec::<f32>()?, [0., 0., 4., 4.]);
//! assert_eq!(x.interpolate(&[4], Interpolate::Linear { align_corners: false })?.to_vec::<f32>()?, [0., 1., 3., 4.]);
//! assert_eq!(x.interpolate(&[3], Interpolate::Linear { align_corners: true })?.to_vec::<f32>()?, [0., 2., 4.]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{
    OpInfo, RuleForm,
    index::Zeros,
    map1,
    pool::{leading, on_mesh_of, on_windows, table},
};
use crate::{
    Error, Result, Shape, Tensor,
    grad::{Back, record1},
    map::Builder,
};

/// The ops of this file. `w` are the resized dimensions; they stay whole.
pub const OPS: &[OpInfo] = &[INTERPOLATE];

/// Where every result is an element, it does not matter how parts combine; between elements they
/// add up.
const INTERPOLATE: OpInfo = OpInfo::new(
    OP,
    RuleForm::Variants(&[
        "...w -> ...w ; replicate w ; through any 0",
        "...w -> ...w ; replicate w ; linear 0",
    ]),
);

const OP: &str = "interpolate";

/// How [`Tensor::interpolate`] finds a value between elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interpolate {
    /// Element `floor(i * size / out)`, computed in integers. Any dtype.
    Nearest,
    /// The two neighbours, weighted by distance (over two dimensions: bilinear). Floats only.
    Linear {
        /// Whether the first and last elements keep their places (`i * (size - 1) / (out - 1)`), or
        /// elements are areas (`(i + 0.5) * size / out - 0.5`, not below 0).
        align_corners: bool,
    },
}

fn positions(values: impl Iterator<Item = usize>, like: &Tensor) -> Result<Tensor> {
    let values: Vec<i32> = values.map(|v| v as i32).collect();
    Tensor::from_slice(&values, [values.len()], like.device())
}

/// The element that each of `out` results is.
fn nearest_places(size: usize, out: usize, like: &Tensor) -> Result<Tensor> {
    positions(
        (0..out).map(|i| (i as u128 * size as u128 / out as u128) as usize),
        like,
    )
}

/// The two elements around each of `out` results along `axis`, and the weight of the second.
fn linear_places(
    size: usize,
    out: usize,
    align_corners: bool,
    axis: usize,
    like: &Tensor,
) -> Result<[Tensor; 3]> {
    let place = |i: usize| match align_corners {
        true if out > 1 => i as f64 * (size - 1) as f64 / (out - 1) as f64,
        true => 0.0,
        false => ((i as f64 + 0.5) * size as f64 / out as f64 - 0.5).max(0.0),
    };
    let low = |i: usize| (place(i) as usize).min(size - 1);
    let weights: Vec<f64> = (0..out).map(|i| place(i) - low(i) as f64).collect();
    let beside: Shape = std::iter::once(out)
        .chain(like.dims()[axis + 1..].iter().map(|_| 1))
        .collect();
    Ok([
        positions((0..out).map(low), like)?,
        positions((0..out).map(|i| (low(i) + 1).min(size - 1)), like)?,
        table(&weights, beside, like.dtype(), like)?,
    ])
}

fn linear(input: &Tensor, axis: usize, out: usize, align_corners: bool) -> Result<Tensor> {
    let [below, above, weights] =
        linear_places(input.shape()[axis], out, align_corners, axis, input)?;
    let (below, above) = (
        input.index_select(axis as i64, &below)?,
        input.index_select(axis as i64, &above)?,
    );
    let b = Builder::new();
    let (x, y, w) = (
        b.load(input.dtype()),
        b.load(input.dtype()),
        b.load(input.dtype()),
    );
    // A neighbour without weight does not count, even if it is infinite.
    let value = w.eq(0.0).select(x, x * (w.lit(1.0) - w) + y * w);
    map1(
        OP,
        &b.finish(&[(value, input.dtype())])?,
        &[&below, &above, &weights],
        &[],
    )
}

/// The gradient along one axis, which had `size` elements: every result hands its own to the
/// elements that it was made of.
fn unresized(g: &Tensor, axis: usize, size: usize, mode: Interpolate) -> Result<Tensor> {
    let (out, at) = (g.shape()[axis], axis as i64);
    let zeros = Tensor::zeros(g.shape().with(axis, size), g.dtype(), g)?;
    match mode {
        Interpolate::Nearest => {
            zeros.index_add(at, &on_mesh_of(nearest_places(size, out, g)?, g)?, g)
        }
        Interpolate::Linear { align_corners } => {
            let [below, above, weights] = linear_places(size, out, align_corners, axis, g)?;
            let second = g.mul(&on_mesh_of(weights, g)?)?;
            zeros
                .index_add(at, &on_mesh_of(below, g)?, &g.sub(&second)?)?
                .index_add(at, &on_mesh_of(above, g)?, &second)
        }
    }
}

impl Tensor {
    /// Resizes the last `size.len()` dimensions (one to three).
    #[track_caller]
    pub fn interpolate(&self, size: &[usize], mode: Interpolate) -> Result<Tensor> {
        if size.is_empty() || size.len() > 3 {
            return Err(Error::Argument {
                op: OP,
                detail: format!(
                    "{} sizes were given: resizes one to three dimensions",
                    size.len()
                ),
            });
        }
        let is_linear = mode != Interpolate::Nearest;
        if is_linear && !self.dtype().is_float() {
            return Err(Error::DType {
                op: OP,
                dtype: self.dtype(),
                expected: "floats; any dtype can be resized by `Nearest`",
            });
        }
        let lead = leading(OP, self, size.len())?;
        for (d, &out) in size.iter().enumerate() {
            let n = self.shape()[lead + d];
            if n == 0 && out > 0 {
                return Err(Error::Shape {
                    op: OP,
                    detail: format!(
                        "dimension {} of {} is empty and cannot become {out}",
                        lead + d,
                        self.type_string()
                    ),
                });
            }
            super::sort::check_positions(OP, self.shape(), n)?;
        }
        let shape: Shape = self.dims()[..lead].iter().chain(size).copied().collect();
        shape.checked_numel(OP)?;
        record1(
            OP,
            &[self],
            || self.resized(size, mode, &shape),
            |_| {
                let (dims, zeros) = (self.dims()[lead..].to_vec(), Zeros::like(self));
                Ok(move |b: &Back<'_>| {
                    let g = b.grad()?;
                    if g.numel() == 0 {
                        return Ok(smallvec::smallvec![Some(zeros.make(g)?)]);
                    }
                    let wide = g.cast(g.dtype().kind().dtype())?;
                    let back = |g: Tensor, (d, size): (usize, &usize)| {
                        if g.dims()[lead + d] == *size {
                            Ok(g)
                        } else {
                            unresized(&g, lead + d, *size, mode)
                        }
                    };
                    Ok(smallvec::smallvec![Some(
                        dims.iter()
                            .enumerate()
                            .try_rfold(wide, back)?
                            .cast(g.dtype())?
                    )])
                })
            },
        )
    }

    /// [`interpolate`](Self::interpolate) to a shape that is checked.
    #[track_caller]
    fn resized(&self, size: &[usize], mode: Interpolate, shape: &Shape) -> Result<Tensor> {
        let (is_linear, lead) = (mode != Interpolate::Nearest, self.rank() - size.len());
        if !self.is_plain() {
            let local = |x: &Tensor| Ok(smallvec::smallvec![x.interpolate(size, mode)?]);
            let (info, variant) = (&INTERPOLATE, usize::from(is_linear));
            return Ok(on_windows(OP, info, variant, self, size.len(), local)?.remove(0));
        }
        self.device().check(self.dtype(), shape.numel())?;
        if shape.numel() == 0 {
            return self.no_elements(self.dtype(), shape.clone());
        }
        // In between, small floats are kept wide, so that the result is rounded once.
        let mut done = if is_linear {
            self.cast(self.dtype().kind().dtype())?
        } else {
            self.clone()
        };
        for (d, &out) in size.iter().enumerate() {
            let axis = lead + d;
            if done.shape()[axis] != out {
                done = match mode {
                    Interpolate::Nearest => done.index_select(
                        axis as i64,
                        &nearest_places(done.shape()[axis], out, &done)?,
                    )?,
                    Interpolate::Linear { align_corners } => {
                        linear(&done, axis, out, align_corners)?
                    }
                };
            }
        }
        done.cast(self.dtype())
    }
}
