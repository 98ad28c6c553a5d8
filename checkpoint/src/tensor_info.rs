//! The type of a stored tensor.

use crate::regions::slabs;
use anymesh_core::{DType, Region};
use std::fmt;

/// The type of a stored tensor. It prints as `f32[2, 3]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

impl TensorInfo {
    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// The region that is all of it.
    pub fn whole(&self) -> Region {
        Region {
            start: self.shape.iter().map(|_| 0).collect(),
            shape: self.shape.iter().copied().collect(),
        }
    }

    /// The tensor in regions of at most `limit` bytes (or one element) that follow each other in
    /// row-major order. A tensor without elements has none.
    ///
    /// ```
    /// # use anymesh_checkpoint::TensorInfo;
    /// # use anymesh_core::DType;
    /// let info = TensorInfo { dtype: DType::F32, shape: vec![5, 4] };
    /// let rows: Vec<usize> = info.slabs(32).map(|slab| slab.shape[0]).collect();
    /// assert_eq!(rows, [2, 2, 1]);
    /// ```
    pub fn slabs(&self, limit: usize) -> impl Iterator<Item = Region> + use<> {
        slabs(self.shape.clone(), self.dtype.size(), limit)
    }
}
