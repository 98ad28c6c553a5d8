//! Dtype conversion and dense copies.

use super::{Map, MapRule, OpInfo, map1, op};
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
            return constant(&[self], || self.converted(dtype));
        }
        record1(
            "cast",
            &[self],
            || self.converted(dtype),
            |_| Ok(move |b: &Back<'_>| Ok(smallvec![Some(b.grad()?.cast(from)?)])),
        )
    }

    #[track_caller]
    fn converted(&self, dtype: DType) -> Result<Tensor> {
        // Where rounding or wrapping could happen, the parts of a sum must meet first; extremes
        // keep their order through any float conversion.
        let (from, to) = (self.dtype(), dtype);
        let widens = (from.is_float()
            && to.is_float()
            && to.size() >= from.size()
            && from.kind() == to.kind())
            || (from == DType::F32 && to == DType::F64)
            || (from == DType::I32 && to == DType::I64);
        Ok(Map {
            rule: MapRule::Op {
                info: &CAST,
                numbers: 0,
                partials: widens,
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
