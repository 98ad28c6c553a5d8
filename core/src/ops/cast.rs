//! Dtype conversion and dense copies.

use super::{Expr, Map, MapRule, OpInfo, map1, op};
use crate::{
    DType, MapProgram, Result, Tensor,
    grad::{Back, constant, record1},
    spmd::Call,
};
use smallvec::smallvec;

/// The ops of this file. Partial values pass where the conversion loses nothing.
pub const OPS: &[OpInfo] = &[CAST, CONTIGUOUS];

const CAST: OpInfo = op("cast", "... -> ... ; linear 0 ; monotone 0");
const CONTIGUOUS: OpInfo = op("contiguous", "... -> ... ; through any 0");

impl Tensor {
    /// Converts every element: integers wrap, floats truncate towards zero and saturate on the way
    /// to integers (NaN gives 0), small floats round to nearest even, anything but zero is true.
    #[track_caller]
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        let from = self.dtype();
        if dtype == from {
            return Ok(self.clone());
        }
        if !dtype.is_float() {
            return constant("cast", &[self], || self.converted(dtype));
        }
        record1(
            "cast",
            &[self],
            || self.converted(dtype),
            |_| Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.cast(from)?)])),
        )
    }

    /// What [`cast`](Self::cast) makes of each of several float tensors. A device may take many of
    /// them in one launch.
    ///
    /// ```
    /// # use anymesh_core::{DType, Tensor};
    /// # let device = anymesh_backend_cpu::device();
    /// let (a, b) = (Tensor::new(&[1f32, 2.5], &device)?, Tensor::new(&[0.3f32], &device)?);
    /// let small = Tensor::cast_each(&[&a, &b], DType::BF16)?;
    /// assert_eq!(small[0].type_string(), "bf16[2]");
    /// assert_eq!(small[1].cast(DType::F32)?.to_vec::<f32>()?, [0.30078125]);
    /// # Ok::<(), anymesh_core::Error>(())
    /// ```
    #[track_caller]
    pub fn cast_each(tensors: &[&Tensor], dtype: DType) -> Result<Vec<Tensor>> {
        let changes = |t: &Tensor| t.dtype() != dtype;
        if tensors.iter().any(|t| !t.dtype().is_float()) || !dtype.is_float() {
            return tensors.iter().map(|t| t.cast(dtype)).collect();
        }
        let each: Vec<Expr<'_>> = (tensors.iter().filter(|t| changes(t)))
            .map(|t| Expr::new(CAST.name, &[t]).rule(&CAST, widens(t.dtype(), dtype)))
            .collect();
        let mut cast = Expr::maps_each(&each, [dtype], |a| [a.x[0]])?.into_iter();
        let one = |t: &&Tensor| match changes(t) {
            true => cast.next().map(|[t]| t),
            false => Some((*t).clone()),
        };
        Ok(tensors.iter().filter_map(one).collect())
    }

    #[track_caller]
    fn converted(&self, dtype: DType) -> Result<Tensor> {
        let (from, to) = (self.dtype(), dtype);
        Ok(Map {
            rule: MapRule::Op {
                info: &CAST,
                numbers: 0,
                partials: widens(from, to),
            },
            ..Map::new(CAST.name, &MapProgram::cast(from, to), self.shape())
        }
        .run(&[self.into()], self.device())?
        .remove(0))
    }

    /// The same values, dense in row-major order. Free where they already are.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor> {
        record1(
            "contiguous",
            &[self],
            || self.dense(),
            |_| Ok(|b: &Back<'_>| Ok(smallvec![Some(b.grad()?.clone())])),
        )
    }

    #[track_caller]
    fn dense(&self) -> Result<Tensor> {
        if !self.is_plain() {
            return Call::of(&CONTIGUOUS, &[self]).run1(|l| l[0].dense());
        }
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        map1(
            "contiguous",
            &MapProgram::cast(self.dtype(), self.dtype()),
            &[self],
            &[],
        )
    }
}

/// Whether a conversion loses nothing. Where rounding or wrapping could happen, the parts of a sum
/// must meet first; extremes keep their order through any float conversion.
fn widens(from: DType, to: DType) -> bool {
    (from.is_float() && to.is_float() && to.size() >= from.size() && from.kind() == to.kind())
        || (from == DType::F32 && to == DType::F64)
        || (from == DType::I32 && to == DType::I64)
}
