//! Sizes of tensors: a short list of dimensions with checked arithmetic.

use crate::{Error, Result};
use smallvec::SmallVec;

/// A list of dimension-sized numbers, kept inline up to rank 5.
pub type Dims<T = usize> = SmallVec<[T; 5]>;

/// The dimensions of a tensor. Rank 0 (one element) and zero-sized dimensions are ordinary.
#[derive(Debug, PartialEq, Eq, Hash, Default)]
pub struct Shape(Dims);

impl Clone for Shape {
    fn clone(&self) -> Self {
        // As a slice: `SmallVec` clones one by one, and every op clones several shapes.
        Self(Dims::from_slice(&self.0))
    }
}

impl Shape {
    /// The shape of a 0-d tensor.
    pub fn scalar() -> Self {
        Self::default()
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// The number of elements. A shape inside a tensor has been checked, so this cannot overflow
    /// there.
    pub fn numel(&self) -> usize {
        if self.0.contains(&0) {
            0
        } else {
            self.0.iter().product()
        }
    }

    /// The number of elements, or an error where bytes at 8 per element could not be addressed.
    pub fn checked_numel(&self, op: &'static str) -> Result<usize> {
        if self.0.contains(&0) {
            return Ok(0);
        }
        self.0
            .iter()
            .try_fold(1usize, |n, d| n.checked_mul(*d))
            .filter(|n| *n <= isize::MAX as usize / 8)
            .ok_or_else(|| Error::SizeOverflow {
                op,
                shape: self.clone().into(),
            })
    }

    /// Resolves an axis that may count from the end.
    pub fn axis(&self, op: &'static str, axis: i64) -> Result<usize> {
        let rank = self.rank() as i64;
        let resolved = if axis < 0 { axis + rank } else { axis };
        if (0..rank).contains(&resolved) {
            Ok(resolved as usize)
        } else {
            Err(Error::Axis {
                op,
                axis,
                rank: self.rank(),
            })
        }
    }

    /// Resolves a set of distinct axes; an empty list means all axes. The result is sorted.
    pub fn axes(&self, op: &'static str, axes: &[i64]) -> Result<Dims> {
        if axes.is_empty() {
            return Ok((0..self.rank()).collect());
        }
        let mut out = Dims::new();
        for &axis in axes {
            let resolved = self.axis(op, axis)?;
            if out.contains(&resolved) {
                return Err(Error::Axis {
                    op,
                    axis,
                    rank: self.rank(),
                });
            }
            out.push(resolved);
        }
        out.sort_unstable();
        Ok(out)
    }

    /// The common shape of two operands under NumPy's broadcasting rule.
    pub fn broadcast(&self, op: &'static str, other: &Shape) -> Result<Shape> {
        if self == other {
            return Ok(self.clone());
        }
        let rank = self.rank().max(other.rank());
        let at = |s: &Shape, i: usize| (i + s.rank()).checked_sub(rank).map_or(1, |i| s.0[i]);
        let mut out = Dims::with_capacity(rank);
        for i in 0..rank {
            match (at(self, i), at(other, i)) {
                (a, b) if a == b => out.push(a),
                (1, b) => out.push(b),
                (a, 1) => out.push(a),
                _ => {
                    return Err(Error::shape(
                        op,
                        [self, other],
                        format!(
                            "{self} and {other} do not broadcast: dimensions must be equal or 1"
                        ),
                    ));
                }
            }
        }
        Ok(Shape(out))
    }

    /// This shape with dimension `axis` set to `size`.
    pub fn with(&self, axis: usize, size: usize) -> Shape {
        let mut out = self.clone();
        out.0[axis] = size;
        out
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Dims<isize> {
        let mut strides: Dims<isize> = smallvec::smallvec![1; self.rank()];
        for i in (1..self.rank()).rev() {
            // Only shapes without elements can reach the limit, and nobody walks those.
            strides[i - 1] =
                strides[i].saturating_mul(isize::try_from(self.0[i].max(1)).unwrap_or(isize::MAX));
        }
        strides
    }
}

impl std::ops::Index<usize> for Shape {
    type Output = usize;
    fn index(&self, i: usize) -> &usize {
        &self.0[i]
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(usize::to_string).collect();
        write!(f, "[{}]", parts.join(", "))
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Self(dims.into())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self(Dims::from_slice(&dims))
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Self(dims.into())
    }
}

impl From<Dims> for Shape {
    fn from(dims: Dims) -> Self {
        Self(dims)
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Self {
        shape.clone()
    }
}

impl From<usize> for Shape {
    fn from(n: usize) -> Self {
        Self::from([n])
    }
}

impl From<()> for Shape {
    fn from((): ()) -> Self {
        Self::scalar()
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(iter: I) -> Self {
        Self(iter.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        let b = |a: &[usize], b: &[usize]| {
            Shape::from(a)
                .broadcast("t", &Shape::from(b))
                .map(|s| s.dims().to_vec())
        };
        assert_eq!(b(&[3, 1], &[4]).expect("fits"), [3, 4]);
        assert_eq!(b(&[], &[2, 0]).expect("fits"), [2, 0]);
        assert_eq!(b(&[1], &[0]).expect("fits"), [0]);
        assert!(b(&[2], &[3]).is_err());
        assert!(b(&[2], &[0]).is_err());
    }

    #[test]
    fn huge_sizes_are_errors_not_wraps() {
        assert!(
            Shape::from([1 << 31, 1 << 31, 1 << 31])
                .checked_numel("t")
                .is_err()
        );
        assert_eq!(
            Shape::from([1 << 31, 1 << 31, 1 << 31, 0]).checked_numel("t"),
            Ok(0)
        );
        assert_eq!(Shape::scalar().checked_numel("t"), Ok(1));
    }
}
