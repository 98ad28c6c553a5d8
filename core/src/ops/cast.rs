//! Dtype conversion and dense copies.

use super::{OpInfo, map1, op};
use crate::{
    DType, MapProgram, Result, Tensor,
    grad::{Back, constant, record1},
    spmd::{Call, Rule},
};
use smallvec::smallvec;

/// The ops of this file.
pub const OPS: &[OpInfo] = &[
    op("cast", "... -> ... ; linear 0"),
    op("contiguous", "... -> ... ; through any 0"),
];

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

    #[track_caller]
    fn converted(&self, dtype: DType) -> Result<Tensor> {
        let program = MapProgram::cast(self.dtype(), dtype);
        if self.is_plain() {
            return map1("cast", &program, &[self], &[]);
        }
        // Where rounding or wrapping could happen, the parts of a sum must meet first; extremes
        // keep their order through any float conversion.
        let (from, to) = (self.dtype(), dtype);
        let widens = (from.is_float()
            && to.is_float()
            && to.size() >= from.size()
            && from.kind() == to.kind())
            || (from == DType::F32 && to == DType::F64)
            || (from == DType::I32 && to == DType::I64);
        let rule = if widens {
            "... -> ... ; linear 0 ; monotone 0"
        } else {
            "... -> ..."
        };
        let call = Call {
            op: "cast",
            inputs: &[self],
            attrs: &[from as i64, to as i64],
        };
        Ok(call
            .run(
                || Rule::new(rule, &[self.into()], &[]),
                |l| Ok(smallvec![map1("cast", &program, &[&l[0]], &[])?]),
            )?
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
            let call = Call {
                op: "contiguous",
                inputs: &[self],
                attrs: &[],
            };
            let rule = || Rule::new("... -> ... ; through any 0", &[self.into()], &[]);
            return Ok(call
                .run(rule, |l| Ok(smallvec![l[0].contiguous()?]))?
                .remove(0));
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
