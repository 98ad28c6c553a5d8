//! Dtype conversion and dense copies.

use super::{OpInfo, map1, op};
use crate::{DType, MapProgram, Result, Tensor};

/// The ops of this file.
pub const OPS: &[OpInfo] = &[op("cast", "... -> ... ; linear 0"), op("contiguous", "... -> ... ; linear 0")];

impl Tensor {
    /// Converts every element: integers wrap, floats truncate towards zero and saturate on the way to integers (NaN
    /// gives 0), small floats round to nearest even, anything but zero is true.
    pub fn cast(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        map1("cast", &MapProgram::cast(self.dtype(), dtype), &[self], &[])
    }

    /// The same values, dense in row-major order. Free where they already are.
    pub fn contiguous(&self) -> Result<Tensor> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        map1("contiguous", &MapProgram::cast(self.dtype(), self.dtype()), &[self], &[])
    }
}
