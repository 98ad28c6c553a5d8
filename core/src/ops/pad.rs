//! Padding: constants, or a tensor's own elements, around it.
//!
//! ```
//! # use anymesh_core::{Tensor, ops::PadMode};
//! # let device = anymesh_backend_cpu::device();
//! let x = Tensor::from_slice(&[1i32, 2, 3], [3], &device)?;
//! assert_eq!(x.pad(&[(2, 1)], PadMode::Reflect)?.to_vec::<i32>()?, [3, 2, 1, 2, 3, 2]);
//! # Ok::<(), anymesh_core::Error>(())
//! ```

use super::{Map, OpInfo, Operand, assemble::assembled, create, movement::join};
use crate::{
    Dims, Error, Result, Scalar, Shape, Tensor,
    grad::{Back, record1},
    map::Builder,
    reshard::Recipe,
    spmd::{
        Call, Local,
        built::{PAD, pad_data},
    },
};
use smallvec::smallvec;

/// The op of this file. Of a dimension that is cut and grows, each rank fetches what it lacks. Zeros
/// are zeros in every reduction of parts.
pub const OPS: &[OpInfo] = &[PADDED.runs(&["assemble"])];

const PADDED: OpInfo = OpInfo::new("pad", PAD);

/// What [`Tensor::pad`] puts around a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PadMode {
    /// This value, which the tensor's dtype can hold.
    Constant(Scalar),
    /// The elements mirrored at the edge, without repeating the edge itself: `3 2 | 1 2 3 | 2 1`.
    Reflect,
    /// The edge again and again: `1 1 | 1 2 3 | 3 3`.
    Replicate,
    /// The elements from the other end: `2 3 | 1 2 3 | 1 2`.
    Circular,
}

impl Tensor {
    /// Adds `(before, after)` elements at the ends of each dimension; `pairs` has one entry for
    /// every dimension.
    ///
    /// Reflection reaches at most to the far edge (`size - 1` elements), wrapping around at most
    /// once (`size`).
    #[track_caller]
    pub fn pad(&self, pairs: &[(usize, usize)], mode: PadMode) -> Result<Tensor> {
        let op = "pad";
        if pairs.len() != self.rank() {
            let detail = format!(
                "{} pairs for a tensor of rank {}: give one (before, after) for each dimension",
                pairs.len(),
                self.rank()
            );
            return Err(Error::argument(op, "pairs", detail).of([self]));
        }
        // A size that cannot be counted is the largest that can, so that the error shows what was
        // asked for, also where another dimension is empty.
        let padded = |(size, (before, after)): (&usize, &(usize, usize))| {
            size.saturating_add(*before).saturating_add(*after)
        };
        let shape: Shape = self.dims().iter().zip(pairs).map(padded).collect();
        if shape.dims().contains(&usize::MAX) {
            return Err(Error::SizeOverflow {
                op,
                shape: shape.into(),
            });
        }
        for (axis, &(before, after)) in pairs.iter().enumerate() {
            let size = self.shape()[axis];
            let (limit, rule) = match mode {
                PadMode::Constant(_) => continue,
                PadMode::Reflect => (size.saturating_sub(1), "reflection reaches"),
                PadMode::Replicate => (
                    if size == 0 { 0 } else { usize::MAX },
                    "repeating the edge of nothing reaches",
                ),
                PadMode::Circular => (size, "wrapping around reaches"),
            };
            if before.max(after) > limit {
                let detail = format!(
                    "({before}, {after}) at axis {axis} of {}: {rule} at most {limit} elements",
                    self.type_string()
                );
                return Err(Error::argument(op, "pairs", detail).of([self]));
            }
        }
        shape.checked_numel(op)?;
        if shape == *self.shape() {
            return Ok(self.clone());
        }
        record1(
            op,
            &[self],
            || self.with_edges(pairs, mode, shape),
            |_| {
                let pairs: Dims<(usize, usize)> = pairs.into();
                Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.without_edges(&pairs, mode)?)]))
            },
        )
    }

    /// The gradient of [`pad`](Self::pad): what the edges were made of gets theirs.
    #[track_caller]
    fn without_edges(&self, pairs: &[(usize, usize)], mode: PadMode) -> Result<Tensor> {
        if matches!(mode, PadMode::Constant(_)) {
            return self.cropped(pairs);
        }
        let mut gradient = self.clone();
        for (axis, &(before, after)) in pairs
            .iter()
            .enumerate()
            .filter(|(_, pair)| **pair != (0, 0))
        {
            let size = gradient.dims()[axis] - before - after;
            let part = |start, len| gradient.narrow(axis as i64, start, len);
            let (front, back) = (part(0, before)?, part(before + size, after)?);
            let mut sum = part(before, size)?;
            let mut give = |part: Tensor, start: usize| -> Result<()> {
                if part.numel() > 0 {
                    sum =
                        sum.add(&part.padded(axis, start, size - start - part.dims()[axis])?)?;
                }
                Ok(())
            };
            let along = [axis as i64];
            match mode {
                PadMode::Constant(_) => {}
                PadMode::Reflect => {
                    give(front.flip(&along)?, 1.min(size))?;
                    give(back.flip(&along)?, size - 1 - after)?;
                }
                PadMode::Replicate => {
                    give(front.sum(&along, true)?, 0)?;
                    give(back.sum(&along, true)?, size - 1)?;
                }
                PadMode::Circular => {
                    give(front, size - before)?;
                    give(back, 0)?;
                }
            }
            gradient = sum;
        }
        Ok(gradient)
    }

    /// This tensor without so many elements at the ends of each dimension.
    #[track_caller]
    fn cropped(&self, pairs: &[(usize, usize)]) -> Result<Tensor> {
        let op = "pad";
        let kept = |d: usize| self.dims()[d] - pairs[d].0 - pairs[d].1;
        let cut: Dims = (0..self.rank()).filter(|d| pairs[*d] != (0, 0)).collect();
        let run = || {
            if self.is_plain() {
                let crop = |t: Tensor, d: &usize| t.sliced(op, *d, pairs[*d].0, 1, kept(*d));
                return cut.iter().try_fold(self.clone(), crop);
            }
            let recipe = |&d: &usize| {
                let recipe = Recipe::of(self.dims()[d]);
                (d, recipe.take(0, pairs[d].0, 1, kept(d)))
            };
            self.made(op, &cut.iter().map(recipe).collect(), |l| {
                l[0].cropped(pairs)
            })
        };
        record1(op, &[self], run, |_| {
            let pairs: Dims<(usize, usize)> = pairs.into();
            let zero = PadMode::Constant(0.into());
            Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.pad(&pairs, zero)?)]))
        })
    }

    #[track_caller]
    fn with_edges(&self, pairs: &[(usize, usize)], mode: PadMode, shape: Shape) -> Result<Tensor> {
        let op = "pad";
        if !self.is_plain() {
            return self.pad_parts(pairs, mode, shape);
        }
        if shape.numel() == 0 {
            return self.no_elements(self.dtype(), shape);
        }
        match mode {
            PadMode::Constant(value) => self.pad_constant(pairs, shape, value),
            _ => pairs
                .iter()
                .enumerate()
                .try_fold(self.clone(), |t, (axis, &(before, after))| {
                    let size = t.shape()[axis];
                    let slice = |start, step, len| t.sliced(op, axis, start, step, len);
                    let (front, back) = match mode {
                        PadMode::Reflect if size > 1 => {
                            (slice(before, -1, before)?, slice(size - 2, -1, after)?)
                        }
                        PadMode::Replicate => (slice(0, 0, before)?, slice(size - 1, 0, after)?),
                        PadMode::Circular => {
                            (slice(size - before, 1, before)?, slice(0, 1, after)?)
                        }
                        _ => return Ok(t),
                    };
                    join(op, &[&front, &t, &back], axis)
                }),
        }
    }

    /// [`pad`](Self::pad) on a mesh.
    #[track_caller]
    fn pad_parts(&self, pairs: &[(usize, usize)], mode: PadMode, shape: Shape) -> Result<Tensor> {
        let grown: Dims = (0..self.rank()).filter(|d| pairs[*d] != (0, 0)).collect();
        if grown.is_empty() {
            return Ok(self.clone());
        }
        let constant = match mode {
            // Every process says so if it does not fit, also where its ranks have no edge.
            PadMode::Constant(value) if shape.numel() > 0 => {
                Some(create::exact_scalar("pad", value, self.dtype())?)
            }
            PadMode::Constant(value) => Some(value),
            _ => None,
        };
        let local = |l: &Local<'_>| l[0].pad(pairs, mode);
        if grown.iter().any(|d| self.is_cut(*d)) {
            let recipe = |&d: &usize| (d, padded(self.dims()[d], pairs[d], mode));
            let recipes = grown.iter().map(recipe).collect();
            return assembled("pad", &[self], &recipes, constant, local);
        }
        Call::of(&PADDED, &[self])
            .data(&pad_data(
                &self.without(&grown),
                constant.map(Scalar::to_f64),
            ))
            .run1(local)
    }

    fn pad_constant(
        &self,
        pairs: &[(usize, usize)],
        shape: Shape,
        value: Scalar,
    ) -> Result<Tensor> {
        let (op, dtype) = ("pad", self.dtype());
        let value = create::exact_scalar(op, value, dtype)?;
        if self.numel() == 0 {
            return create::filled(op, shape, value, dtype, &self.into());
        }
        if shape == *self.shape() {
            return Ok(self.clone());
        }
        let b = Builder::new();
        let x = b.load(dtype);
        let program = b.finish(&[(x.inside().select(x, b.param(dtype)), dtype)])?;
        let start = pairs.iter().map(|(before, _)| *before as isize).collect();
        Ok(Map {
            params: &[value],
            ..Map::new(op, &program, &shape)
        }
        .run(&[Operand::at(self, start)], self.device())?
        .remove(0))
    }
}

/// A dimension of size `n` with edges.
fn padded(n: usize, (before, after): (usize, usize), mode: PadMode) -> Recipe {
    let recipe = Recipe::of(n);
    match mode {
        PadMode::Constant(_) => recipe.fill(before).take(0, 0, 1, n).fill(after),
        PadMode::Reflect => recipe.take(0, before, -1, before).take(0, 0, 1, n).take(
            0,
            n.saturating_sub(2),
            -1,
            after,
        ),
        PadMode::Replicate => {
            recipe
                .take(0, 0, 0, before)
                .take(0, 0, 1, n)
                .take(0, n.saturating_sub(1), 0, after)
        }
        PadMode::Circular => recipe
            .take(0, n.saturating_sub(before), 1, before)
            .take(0, 0, 1, n)
            .take(0, 0, 1, after),
    }
}
